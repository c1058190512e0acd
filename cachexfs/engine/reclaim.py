"""Copies that nobody has recorded: a content that is lost by the catalogue, and that this node has all the same.
Or what came after it: bytes that an fsync has put in its place.

Role: a partner commits a replica, then its sender tells the catalogue; a sender that is lost in between leaves a whole,
synced copy of which nobody knows. When a file counts as lost, each node looks whether it has the very content, and
records its copy once the digests say so. From there on the file is like any other: served, copied again, drained.
A writer that goes on in the same staged file has its replica replaced by each fsync; if it is lost before it has noted
that, the newer bytes, whole, are what the file is.

Concurrency: one task, woken by the catalogue; a look reads a file of this node, in a thread.
"""

from __future__ import annotations

import logging
import os

import trio

from cachexfs.core import manifest as manifests
from cachexfs.core import publication
from cachexfs.core.boundary import Boundary
from cachexfs.core.manifest import Manifest
from cachexfs.core.publication import Content
from cachexfs.core.records import Copy, Generation, Inode, Life
from cachexfs.core.replica import Applied
from cachexfs.core.stages import parse_stage
from cachexfs.core.transaction import Tx
from cachexfs.engine.damaged import is_whole
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError

log = logging.getLogger(__name__)

RETRY_S = 5.0


class Reclaim:
    """Records this node's copies of files that are lost."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._asked: dict[int, None] = {}
        self._wake = trio.Event()

    def load(self) -> None:
        """Look at all that this node holds, when the engine starts."""
        self._ask(*self._held())

    def notice(self, changes: Applied) -> None:
        """Catalogue listener: a node is gone, or a copy."""
        for key, old, new in changes:
            if isinstance(old, Life) and new is None:
                self._ask(*self._held())
            elif isinstance(old, Inode) and isinstance(new, Inode) and old.copies != new.copies:
                self._note_anew(int(key[2:], 16), old, new)
                self._ask(int(key[2:], 16))

    def _note_anew(self, fid: int, old: Inode, new: Inode) -> None:
        """Another node has put a copy here anew: what was found bad of it is replaced."""
        content, before = self.node.catalogue.view.generation(fid), {(copy.node, copy.store) for copy in old.copies}
        for copy in new.copies if content is not None else ():
            is_new = (copy.node, copy.store) not in before or new.gen != old.gen
            if copy.node == self.node.name and is_new:
                assert content is not None
                self.node.damaged.discard((content.stage, copy.store))

    def _held(self) -> list[int]:
        return [parse_stage(stage)[0] for stage in self.node.replicas.stages()] if self.node.replicas else []

    def _ask(self, *fids: int) -> None:
        for fid in fids:
            if self._own(fid):
                self._asked[fid] = None
                self._wake.set()

    def _own(self, fid: int) -> tuple[Copy, ...]:
        """What this node has of a file that is lost."""
        view = self.node.catalogue.view
        inode, content = view.inode(fid), view.generation(fid)
        if inode is None or content is None or not content.tree or inode.gen != content.gen:
            return ()
        if self.node.replicas is None or self.node.boundary(fid, inode) != Boundary.LOST:
            return ()
        if self._newer(fid) is not None:
            return (Copy(self.node.name, self.node.replicas.store, "nvme", self.node.clock.now_s()),)
        recorded = {(copy.node, copy.store) for copy in inode.copies}
        found = self.node.own_copies(content.stage, content.size)
        return tuple(copy for copy in found if (copy.node, copy.store) not in recorded)

    def _newer(self, fid: int) -> Manifest | None:
        """What this node has instead of a file that is lost: what an fsync brought last, and nobody has noted."""
        content = self.node.catalogue.view.generation(fid)
        raw = self.node.replicas.manifest(content.stage) if content is not None and self.node.replicas else None
        if content is None or raw is None:
            return None
        held = manifests.decode(raw)
        follows = not held.published and held.gen == content.gen + 1 and held.tree != content.tree
        return held if follows else None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            for fid in list(self._asked):
                try:
                    await self._record(fid)
                    del self._asked[fid]
                except (CacheXError, OSError) as error:
                    log.debug("a copy of %x cannot be recorded yet: %s", fid, error)
            if self._asked:
                await trio.sleep(RETRY_S)
                self._wake.set()

    async def _record(self, fid: int) -> None:
        content, ctx = self.node.catalogue.view.generation(fid), self.node.ctx()
        newer = self._newer(fid)
        for copy in self._own(fid):
            assert content is not None
            if newer is not None:
                await self._publish(fid, content, newer, copy)
                return
            memory = copy.store == self.node.staging.store
            path = self.node.staging.path(content.stage) if memory else self.node.held_path(content.stage, content.size)
            if path is None:
                return
            if not await is_whole(self.node, path, content.size, content.tree):
                self.node.damaged.add((content.stage, copy.store))
                log.error("%s: the copy here, which nobody had recorded, is damaged", content.stage)
                continue
            await self.node.catalogue.mutate(
                lambda tx: publication.add_copy(tx, ctx, fid, content.gen, copy)  # noqa: B023
            )
            log.warning("%s is not lost: this node has a whole copy of which nobody knew", content.stage)

    async def _publish(self, fid: int, lost: Generation, held: Manifest, copy: Copy) -> None:
        replicas, ctx = self.node.replicas, self.node.ctx()
        path = replicas.path(held.stage, held.size) if replicas is not None else None
        if path is None:
            return
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            digest, tree, _ = await self.node.digests(fd, held.size)
        finally:
            os.close(fd)
        if tree != held.tree:
            log.error("%s: the copy here, which nobody had recorded, is damaged", held.stage)
            return
        self.node.damaged.discard((held.stage, copy.store))  # a reader of the lost content may have found it bad
        content = Content(held.size, digest, tree, held.stage, (copy,), held.mtime_ns)

        def publish(tx: Tx) -> None:
            if tx.generation(fid) == lost:
                publication.publish(tx, ctx, fid, lost.gen, content)

        await self.node.catalogue.mutate(publish)
        log.warning("%s: published as the last fsync on its lost node had brought it here", held.stage)
