"""What this node keeps and what it may forget: staged files, replicas held for others, room for writers.

Role: bytes go when nothing refers to them (no current generation, pending drain, fsynced content or open file),
under pressure when they are on the PFS (``Eviction``), and when retention says so. Nothing else is ever removed.

Concurrency: decisions are synchronous; removing a replica and asking the PFS are tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from cachexfs.core import manifest as manifests
from cachexfs.core import publication
from cachexfs.core.records import Generation, Inode, Op
from cachexfs.core.replica import Applied
from cachexfs.core.stages import parse_stage
from cachexfs.engine.eviction import Eviction
from cachexfs.engine.files import Files
from cachexfs.engine.fill import Fills
from cachexfs.engine.node import Node
from cachexfs.engine.pfs_copies import PfsCopies
from cachexfs.engine.spill import Spiller

log = logging.getLogger(__name__)


class Keeper:
    """Forgets what is not needed."""

    def __init__(self, node: Node, files: Files, copies: PfsCopies) -> None:
        self.node = node
        self.copies = copies
        self.files = files
        self._nursery: trio.Nursery | None = None
        self._freed = trio.Event()
        self.fills: Fills | None = None
        self.eviction = Eviction(node, files, copies)
        self.spiller = Spiller(node, files)
        self.spiller.on_full = self.eviction.make_spill_room
        self.spiller.on_room = self._free
        self._is_spilling = False
        #: stages that have no name in a catalogue which has forgotten some -> what keeps them once nothing needs them
        self.forgotten: dict[str, Callable[[str], None]] = {}
        self._ahead: dict[int, dict[str, None]] = {}  # replicas to look at again when their file has another content
        #: called when a writer gets no room though everything on the PFS is evicted and nothing more can be spilled
        self.on_pressure: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Carry out removals, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self.eviction.run)
            for stage in self.node.replicas.stages() if self.node.replicas else ():
                fid, _ = parse_stage(stage)
                if self.node.catalogue.view.inode(fid) is None or (
                    not self.referenced(stage) and self._is_ahead(stage)
                ):
                    self.check(stage)
            await trio.sleep_forever()

    def kept_for_others(self) -> list[int]:
        """Files of other nodes that the PFS does not have, or not as they were fsynced last, and of which a copy is
        here: perhaps the only one, should their node have ended."""
        own = self.node.name
        return [
            fid
            for fid, inode in self.node.catalogue.view.inodes()
            if inode.kind == "f" and own not in (inode.origin, inode.writing) and self._keeps(own, inode)
        ]

    def _keeps(self, own: str, inode: Inode) -> bool:
        if inode.writing and inode.synced is not None and any(copy.node == own for copy in inode.synced.copies):
            return True
        return any(copy.node == own for copy in inode.copies) and not self.node.was_landed(inode)

    def notice(self, changes: Applied) -> None:
        """Catalogue listener: something that referred to bytes may have gone."""
        stages: dict[str, None] = {}
        for key, old, new in changes:
            if self._ahead and isinstance(new or old, Generation):
                stages |= self._ahead.pop(int(key[2:], 16), {})
            if isinstance(old, Generation):
                stages[old.stage] = None
                if new is None:
                    self.files.removed(int(key[2:], 16))  # open handles take hold of the bytes before they go
            elif isinstance(old, Op):
                stages[old.stage] = None
            elif isinstance(old, Inode):
                if old.synced is not None:
                    stages[old.synced.stage] = None
                if new is None:
                    self.files.orphaned(int(key[2:], 16), old)
            if isinstance(new, Inode):
                self.eviction.note_landed(int(key[2:], 16), new)
        for stage in stages:
            self.check(stage)

    def referenced(self, stage: str) -> bool:
        """Whether a generation, a pending drain, an fsync or an open file needs a stage."""
        fid, _ = parse_stage(stage)
        view = self.node.catalogue.view
        generation, inode = view.generation(fid), view.inode(fid)
        if generation is not None and generation.stage == stage:
            return True
        if inode is not None and inode.synced is not None and inode.synced.stage == stage:
            return True
        if any(op.stage == stage and not op.cancelled for _, op in view.ops_of(fid)):
            return True
        vnode = self.files.known(fid)
        return vnode is not None and vnode.stage == stage

    def check(self, stage: str) -> None:
        """Give back a stage that nothing needs any more."""
        if not stage or self.referenced(stage):
            return
        if self.node.staging.has(stage):
            self.eviction.forget(stage)
            self.forgotten.pop(stage, self.node.staging.remove)(stage)
            self.node.damaged.discard((stage, self.node.staging.store))
            self._free()
        replicas = self.node.replicas
        if replicas is None or self._nursery is None or replicas.path(stage, 0) is None:
            return
        if self._is_ahead(stage):
            self._ahead.setdefault(parse_stage(stage)[0], {})[stage] = None
        else:
            self._nursery.start_soon(self._drop_replica, stage)

    def _is_ahead(self, stage: str) -> bool:
        """Whether a replica is of a content that comes after the one that this node knows.

        An fsync has brought it, and its note is on its way: what the catalogue shows here is older, and may speak of an
        earlier use of the same staged file.
        """
        raw = self.node.replicas.manifest(stage) if self.node.replicas is not None else None
        content = self.node.catalogue.view.generation(parse_stage(stage)[0])
        return raw is not None and content is not None and manifests.decode(raw).gen > content.gen

    async def _drop_replica(self, stage: str) -> None:
        assert self.node.replicas is not None
        try:
            await self.node.replicas.drop(stage)
        except OSError as error:
            log.warning("replica %s could not be removed: %s", stage, error)

    # ---- room
    def make_room(self, length: int) -> bool:
        """Evict what may go until ``length`` bytes fit in memory; False when they do not, or not yet (``ask_room``)."""
        staging = self.node.staging
        if staging.used_bytes + length <= staging.limit_bytes:
            return True
        if self.fills is not None and self.fills.give_up(length):
            return True
        if self.node.pfs is not None and self.node.pfs.state != "ok" and self.spiller.can_take(length):
            return False  # what is there cannot be read there now: it moves to NVMe instead
        if self.eviction.make_room(length):
            return True
        if self.eviction.is_hopeful():
            self.eviction.want(length)
        elif not self.spiller.can_take(1):
            self.on_pressure()
        return False

    async def ask_room(self, length: int) -> bool:
        """Wait a moment for what the PFS says of what could go; whether ``make_room`` may do better now."""
        return await self.eviction.asked(length)

    def evictable_bytes(self) -> int:
        """Bytes of staging that a writer could get by eviction."""
        return self.eviction.bytes() + (self.fills.bytes() if self.fills is not None else 0)

    def spill_soon(self, length: int) -> None:
        """Move what can leave memory to NVMe, without waiting for it; not while eviction may do."""
        if self._nursery is None or self._is_spilling or self.eviction.is_hopeful():
            return
        if self.spiller.can_take(1):
            self._is_spilling = True
            self._nursery.start_soon(self._spill, length)

    async def _spill(self, length: int) -> None:
        try:
            await self.spiller.spill(length)
        finally:
            self._is_spilling = False

    async def retire(self, fid: int) -> None:
        """Give up this node's copies of a file that is on the PFS, as that says now; not while it is open or anything
        is pending.

        Raises ``CatalogueUnavailableError``.
        """
        view, replicas = self.node.catalogue.view, self.node.replicas
        if fid not in (await self.copies.there([fid]) or ()):
            return
        inode, generation = view.inode(fid), view.generation(fid)
        if inode is None or generation is None or not generation.stage or not self.node.on_pfs(fid, inode):
            return
        vnode, stage = self.files.known(fid), generation.stage
        if (vnode is not None and (vnode.dirty or vnode.handles)) or view.has_ops(fid):
            return
        stores = {self.node.staging.store} | ({replicas.store} if replicas is not None else set())
        gone = {
            (copy.node, copy.store) for copy in inode.copies if copy.node == self.node.name and copy.store in stores
        }
        if not gone:
            return
        gen = inode.gen
        await self.node.catalogue.mutate(lambda tx: publication.forget_copies(tx, fid, gen, gone))
        generation = view.generation(fid)
        if generation is None or generation.stage != stage:
            return
        if self.node.staging.has(stage):
            self.eviction.remove(fid, stage)
            self._free()
        if replicas is not None and replicas.path(stage, 0) is not None:
            await self._drop_replica(stage)

    def _free(self) -> None:
        self._freed.set()
        self._freed = trio.Event()

    def landed(self) -> None:
        """Something reached the PFS: it may be evicted now."""
        if self.node.staging.used_bytes > self.node.staging.limit_bytes:
            self.make_room(0)
        self._free()

    async def room_freed(self) -> None:
        """Return when there may be more room, or soon."""
        with trio.move_on_after(0.2):
            await self._freed.wait()
