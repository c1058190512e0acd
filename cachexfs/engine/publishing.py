"""Publishing: a file's bytes, so far private to this node, become the generation that all nodes see.

Role: used by ``Files`` (last close), ``Filesystem`` (close, truncation) and those who replicate or drain what is not
published yet (``snapshot``).

Concurrency: ``publish_lock`` makes publications of a file happen one after the other. A write may overlap: the
publication covers what was written before it began.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from cachexfs.core import namespace, publication
from cachexfs.core.commitfiles import POINTER_BYTES_MAX, is_pointer_name, pointer_target
from cachexfs.core.order import parent_of
from cachexfs.core.publication import Content
from cachexfs.core.records import Copy, Generation
from cachexfs.core.transaction import Tx
from cachexfs.engine.interfaces import ContentSource
from cachexfs.engine.late_digests import LateDigests
from cachexfs.engine.node import Node
from cachexfs.engine.passing import Passing
from cachexfs.engine.vnode import Handle, Vnode, route_of
from cachexfs.engine.writing import check_size
from cachexfs.errors import CorruptError, FsError

DIGEST_AT_ONCE_BYTES_MAX = 1 << 20  # hashing so little costs less than telling the digest later
Digests = tuple[bytes, bytes, list[bytes]]


class Publishing:
    """The publications of this mount. ``on_released(fid)``: a file's drain may have become possible."""

    def __init__(self, node: Node, source: ContentSource, passing: Passing) -> None:
        self.node = node
        self.source = source
        self.passing = passing
        self.digest_at_once_bytes = DIGEST_AT_ONCE_BYTES_MAX
        self.late_digests = LateDigests(self._tell_late)
        self.on_released: Callable[[int], None] = lambda fid: None

    async def flush(self, handle: Handle) -> None:
        """FLUSH: publish this handle's writes, and a created file that stayed empty."""
        vnode = handle.vnode
        await self.look(vnode)
        if handle.passed:
            vnode.closing = {handle, *(vnode.closing or ())}
        if vnode.dirty and (handle.wrote or handle.passed):
            await self.publish(vnode)
        elif vnode.content.open and (handle.writable or not vnode.writers) and not vnode.dirty and not vnode.removed:
            ctx = self.node.ctx()
            await self.node.catalogue.mutate(lambda tx: publication.close_created(tx, ctx, vnode.fid))
            generation = self.node.catalogue.view.generation(vnode.fid)
            vnode.content = generation if generation is not None else vnode.content
            self.on_released(vnode.fid)

    async def publish(
        self, vnode: Vnode, request: int | None = None, on_refused: Callable[[], None] | None = None
    ) -> None:
        """Make what was written before this call visible everywhere (FLUSH). Raises ``FsError`` (EIO, ENOSPC).

        ``request``: what is published is all that this request asked for (``Requests``). ``on_refused``: called when
        NVMe refuses before the catalogue has been told anything.
        """
        async with vnode.publish_lock:
            await self._publish(vnode, request, on_refused)
        vnode.rest()

    async def _publish(self, vnode: Vnode, request: int | None, on_refused: Callable[[], None] | None) -> None:
        self.passing.refresh(vnode)
        if not vnode.dirty:
            return
        if vnode.removed or self.node.catalogue.view.inode(vnode.fid) is None:
            self._abandon(vnode)
            return
        try:
            if self.node.staging.is_spilled(vnode.stage):
                async with vnode.change_lock:  # a write may be under way
                    await self.source.sync_spilled(vnode.fd)
        except FsError:
            if on_refused is not None:
                on_refused()
            raise
        version, size = vnode.version, os.fstat(vnode.fd).st_size
        check_size(self.node, size)  # the kernel may have grown a passed file
        stage = vnode.stage
        vnode.sealed = max(vnode.sealed, size)
        late = size > self.digest_at_once_bytes
        if late and (vnode.digested is None or vnode.digested[:2] != (version, size)):
            digest = tree = b""  # of passed files told once the last writer is gone, of others at once
        else:
            digest, tree, _ = await self._digests(vnode, version, size)
        copies = self._copies(vnode, version, stage, size)
        content = Content(
            size, digest, tree, stage if size else "", copies, vnode.mtime_ns, self._target(vnode, size),
            torn=vnode.passed > 0, route=route_of(self.node.catalogue.view.inode(vnode.fid), vnode),
            stamp_ns=vnode.seen[1] if vnode in self.passing.vnodes else 0,
        )  # fmt: skip
        ctx, base = self.node.ctx(), vnode.content.gen
        made: list[Generation | None] = []

        def publish(tx: Tx) -> int:
            made[:] = [publication.publish(tx, ctx, vnode.fid, base, content)]
            return int(made[0] is not None)

        applied = await self.node.catalogue.mutate(self.node.requests.once(request, publish))
        # What this has made: by now somebody else may have published another content, or removed the file.
        generation = made[0] if made else self.node.catalogue.view.generation(vnode.fid)
        if not applied or generation is None:
            self._abandon(vnode)
            return
        vnode.content = generation
        vnode.published, vnode.route, vnode.measured = version, "", False
        if late and not tree and not vnode.passed:
            self.late_digests.add(vnode, generation)
        self.on_released(vnode.fid)  # no longer a created file that is open: its drain may begin
        if generation.conflict:
            self.node.errors[f"conflict:{vnode.fid:x}"] = (
                f"a generation of node {generation.conflict} was replaced without having been seen"
            )
        if not size and vnode.stage == stage and not vnode.dirty and not vnode.backed:
            vnode.close_stage()
            self.node.staging.remove(stage)

    async def _digests(self, vnode: Vnode, version: int, size: int) -> Digests:
        if vnode.digested is not None and vnode.digested[:2] == (version, size):
            return vnode.digested[2]
        found = await self.digests_of(vnode, vnode.stage, size)
        vnode.digested = (version, size, found)
        return found

    async def digests_of(self, vnode: Vnode, stage: str, size: int, *, late: bool = False) -> Digests:
        """Of the first bytes of one of a vnode's staged files. ``late``: nobody waits for them. Raises ``OSError``.

        While a reader is served by the kernel, a writer has what is published moved to another file, which gets its
        stage name, and changes this one (``Writing``): then the other one is what counts.
        """
        staging = self.node.staging
        fd = os.dup(vnode.fd) if stage == vnode.stage and vnode.fd >= 0 else staging.open_file(stage)
        try:
            while True:
                looked_at = os.fstat(fd)
                found = await self._digests_unless_cut(fd, size, late=late)
                try:
                    now = os.stat(staging.path(stage)) if stage else looked_at
                except FileNotFoundError:
                    now = looked_at  # without a name it stays where it is
                if os.path.samestat(now, looked_at):
                    if found is None:
                        raise CorruptError(f"the staged file {stage} has been cut")
                    return found
                os.close(fd)
                fd = staging.open_file(stage)
        finally:
            os.close(fd)

    async def _digests_unless_cut(self, fd: int, size: int, *, late: bool) -> Digests | None:
        try:
            return await self.node.digests(fd, size, late=late)
        except CorruptError:
            return None

    async def look(self, vnode: Vnode) -> None:
        """Count changes that the kernel has made; of what may be mapped, by the digests where those are known."""
        self.passing.refresh(vnode)
        if not vnode.mappable or vnode.fd < 0 or vnode.removed:
            return
        version, size = vnode.version, os.fstat(vnode.fd).st_size
        known = vnode.content.tree if not vnode.dirty else b""
        if vnode.digested is not None and vnode.digested[:2] == (version, size):
            known = vnode.digested[2][1]
        if not known:
            return
        try:
            found = await self.digests_of(vnode, vnode.stage, size)
        except CorruptError:  # it is being cut
            return
        if found[1] != known and vnode.version == version:
            vnode.version += 1
            vnode.mtime_ns = self.node.clock.now_ns()
            vnode.digested = (vnode.version, size, found)

    async def snapshot(self, vnode: Vnode) -> tuple[int, int, Digests]:
        """(version, size, digests) of the bytes now in the staging file, for an fsync before publication."""
        self.passing.refresh(vnode)
        version, size = vnode.version, os.fstat(vnode.fd).st_size
        return version, size, await self._digests(vnode, version, size)

    def _copies(self, vnode: Vnode, version: int, stage: str, size: int) -> tuple[Copy, ...]:
        now_s = self.node.clock.now_s()
        own = (Copy(self.node.name, self.node.staging.store, "memory", now_s),) if size else ()
        if vnode.synced is not None and (vnode.synced.version, vnode.synced.size) == (version, size):
            return own + vnode.synced.copies
        return own

    def _target(self, vnode: Vnode, size: int) -> bytes | None:
        """Where a tracker file points, relative to the mount."""
        names = self.node.catalogue.view.names_of(vnode.fid)
        if not names or size > POINTER_BYTES_MAX or not is_pointer_name(names[0][1]):
            return None
        target = pointer_target(names[0][1], os.pread(vnode.fd, size, 0))
        path = self.source.path(vnode.fid)
        return None if target is None or path is None else namespace.resolve(parent_of(path), target)

    def _abandon(self, vnode: Vnode) -> None:
        """The file is gone from the namespace: its bytes live only as long as its handles."""
        vnode.removed = True
        vnode.published = vnode.version
        vnode.content = Generation(vnode.content.gen, os.fstat(vnode.fd).st_size, b"", b"", vnode.stage, self.node.name)

    async def complete_open(self, vnode: Vnode) -> None:
        """An fsync asks while a passed writer has the published file open: its digests, unless it is being changed."""
        content = vnode.content
        if vnode.dirty or vnode.removed or not content.size or content.tree or vnode.fd < 0:
            return
        version, size, digests = await self.snapshot(vnode)
        self.passing.refresh(vnode)
        if vnode.version == version and size == content.size and vnode.content is content:
            await self._tell_digests(vnode, content, digests[0], digests[1])

    async def complete(self, vnode: Vnode) -> None:
        """The last passed writer is gone: the published bytes are final, their digests can be told.

        Where they were told before, one writer may have been in the middle of a write when another one closed: its
        bytes may have come after the look at them, and its stamp before.
        """
        await self.passing.spare_processors()
        content = vnode.content
        if vnode.passed or vnode.dirty or vnode.removed or not content.size or vnode.fd < 0:
            return
        if content.tree and content.size > self.digest_at_once_bytes and not vnode.mappable:
            return
        digest, tree, _ = await self.digests_of(vnode, content.stage, content.size, late=True)
        if content.tree:
            if tree != content.tree and vnode.content is content:
                vnode.version += 1
                if vnode.mappable:
                    vnode.mtime_ns = self.node.clock.now_ns()
                await self.publish(vnode)
            return
        await self._tell_digests(vnode, content, digest, tree)

    async def _tell_late(self, vnode: Vnode, content: Generation) -> None:
        """Digests of a content that no passed writer can change: no write reaches what is sealed."""
        now = self.node.catalogue.view.generation(vnode.fid)
        if now is not None and now.gen == content.gen and not now.tree:
            digest, tree, _ = await self.digests_of(vnode, content.stage, content.size)
            await self._tell_digests(vnode, content, digest, tree)

    async def _tell_digests(self, vnode: Vnode, content: Generation, digest: bytes, tree: bytes) -> None:
        await self.node.catalogue.mutate(lambda tx: publication.complete(tx, vnode.fid, content, digest, tree))
        generation = self.node.catalogue.view.generation(vnode.fid)
        if generation is not None and generation.gen == content.gen == vnode.content.gen:
            vnode.content = generation
