"""What this node keeps and what it may forget: staged files, replicas held for others, room for writers.

Role: bytes go when nothing refers to them (no current generation, pending drain, fsynced content or open file),
and under pressure when they are on the PFS, oldest first. Nothing else is ever removed.

Concurrency: decisions are synchronous; removing a replica and telling the catalogue of an eviction are tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import trio

from cachexfs.core import publication
from cachexfs.core.records import Generation, Inode, Op
from cachexfs.core.replica import Applied
from cachexfs.core.stages import parse_stage
from cachexfs.core.transaction import Tx
from cachexfs.engine.files import Files
from cachexfs.engine.fill import Fills
from cachexfs.engine.node import Node
from cachexfs.engine.spill import Spiller
from cachexfs.errors import CacheXError

log = logging.getLogger(__name__)

STAT_DEADLINE_S = 20.0


class Keeper:
    """Forgets what is not needed."""

    def __init__(self, node: Node, files: Files) -> None:
        self.node = node
        self.files = files
        self._nursery: trio.Nursery | None = None
        self._freed = trio.Event()
        self.fills: Fills | None = None
        self.spiller = Spiller(node, files)
        self.spiller.on_full = self._make_spill_room
        self.evicted_bytes = 0
        self._candidates: dict[str, int] | None = None
        self._candidate_bytes = 0
        self._is_spilling = False
        #: called when a writer gets no room though everything on the PFS is evicted and nothing more can be spilled
        self.on_pressure: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Carry out removals, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for stage in self.node.replicas.stages() if self.node.replicas else ():
                fid, _ = parse_stage(stage)
                if self.node.catalogue.view.inode(fid) is None:
                    self.check(stage)
            await trio.sleep_forever()

    def notice(self, changes: Applied) -> None:
        """Catalogue listener: something that referred to bytes may have gone."""
        stages: dict[str, None] = {}
        for key, old, new in changes:
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
                self._note_landed(int(key[2:], 16), new)
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
            self._forget_candidate(stage)
            self.node.staging.remove(stage)
            self._free()
        replicas = self.node.replicas
        if replicas is not None and self._nursery is not None and replicas.path(stage, 0) is not None:
            self._nursery.start_soon(self._drop_replica, stage)

    async def _drop_replica(self, stage: str) -> None:
        assert self.node.replicas is not None
        try:
            await self.node.replicas.drop(stage)
        except OSError as error:
            log.warning("replica %s could not be removed: %s", stage, error)

    # ---- room
    def make_room(self, length: int) -> bool:
        """Evict staged contents that are on the PFS, oldest first, until ``length`` bytes fit."""
        staging = self.node.staging
        if staging.used_bytes + length <= staging.limit_bytes:
            return True
        if self.fills is not None and self.fills.give_up(length):
            return True
        if self.node.pfs is not None and self.node.pfs.state != "ok" and self.spiller.can_take(length):
            return False  # what is there cannot be read there now: it moves to NVMe instead
        for fid, stage in self._evictable():
            if staging.is_spilled(stage):
                continue
            self._evict(fid, stage)
            if staging.used_bytes + length <= staging.limit_bytes:
                return True
        if not self.spiller.can_take(1):
            self.on_pressure()
        return False

    def _evict(self, fid: int, stage: str) -> None:
        staging, inode = self.node.staging, self.node.catalogue.view.inode(fid)
        gen = inode.gen if inode is not None else 0
        before = staging.used_bytes + staging.spilled_bytes
        self.files.evicted(fid)
        self._forget_candidate(stage)
        staging.remove(stage)
        self.evicted_bytes += before - staging.used_bytes - staging.spilled_bytes
        if self._nursery is not None:
            self._nursery.start_soon(self._tell_evicted, fid, gen)

    def _make_spill_room(self, length: int) -> None:
        for fid, stage in self._evictable():
            if self.node.staging.spill_room_bytes() >= length:
                return
            if self.node.staging.is_spilled(stage):
                self._evict(fid, stage)

    def spill_soon(self, length: int) -> None:
        """Move what can leave memory to NVMe, without waiting for it."""
        if self._nursery is not None and not self._is_spilling and self.spiller.can_take(1):
            self._is_spilling = True
            self._nursery.start_soon(self._spill, length)

    async def _spill(self, length: int) -> None:
        try:
            await self.spiller.spill(length)
        finally:
            self._is_spilling = False

    def evictable_bytes(self) -> int:
        """Bytes of staging that a writer could get by eviction (files that are open now included)."""
        self._known_candidates()
        return self._candidate_bytes + (self.fills.bytes() if self.fills is not None else 0)

    def _evictable(self) -> Iterator[tuple[int, str]]:
        """(file id, stage) of what may go now, what landed first first. Looks no further than it is asked."""
        view = self.node.catalogue.view
        for stage in list(self._known_candidates()):
            fid, _ = parse_stage(stage)
            inode, generation = view.inode(fid), view.generation(fid)
            if inode is None or generation is None or generation.stage != stage or not self.node.staging.has(stage):
                self._forget_candidate(stage)
                continue
            vnode = self.files.known(fid)
            if not self.node.on_pfs(fid, inode) or (vnode is not None and (vnode.dirty or vnode.handles)):
                continue
            if not any(op.stage == stage for _, op in view.ops_of(fid)):
                yield fid, stage

    def _known_candidates(self) -> dict[str, int]:
        """Staged contents that have landed: stage -> bytes, in the order of landing. The first call looks at all."""
        if self._candidates is None:
            self._candidates, view = {}, self.node.catalogue.view
            landed = []
            for stage in self.node.staging.stages():
                fid, _ = parse_stage(stage)
                inode, generation = view.inode(fid), view.generation(fid)
                if inode is not None and generation is not None and generation.stage == stage:
                    landed.append((inode.t_pfs_s, fid, inode))
            for _, fid, inode in sorted(landed, key=lambda row: row[:2]):
                self._note_landed(fid, inode)
        return self._candidates

    def _note_landed(self, fid: int, inode: Inode) -> None:
        """A file's record has changed: its content may have reached the PFS."""
        if self._candidates is None or inode.pfs is None or inode.pfs.gen != inode.gen:
            return
        generation = self.node.catalogue.view.generation(fid)
        stage = generation.stage if generation is not None else ""
        if stage and stage not in self._candidates and self.node.staging.has(stage):
            self._candidates[stage] = inode.size
            self._candidate_bytes += inode.size

    def _forget_candidate(self, stage: str) -> None:
        if self._candidates is not None:
            self._candidate_bytes -= self._candidates.pop(stage, 0)

    async def retire(self, fid: int) -> None:
        """Give up this node's copies of a file that is on the PFS, as that says now; not while it is open or anything
        is pending.

        Raises ``CatalogueUnavailableError``.
        """
        view, replicas = self.node.catalogue.view, self.node.replicas
        if not await self._is_there(fid):
            return
        inode, generation = view.inode(fid), view.generation(fid)
        if inode is None or generation is None or not generation.stage or not self.node.on_pfs(fid, inode):
            return
        vnode, stage = self.files.known(fid), generation.stage
        if (vnode is not None and (vnode.dirty or vnode.handles)) or view.ops_of(fid):
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
            self.files.evicted(fid)
            self._forget_candidate(stage)
            self.node.staging.remove(stage)
            self._free()
        if replicas is not None and replicas.path(stage, 0) is not None:
            await self._drop_replica(stage)

    async def _is_there(self, fid: int) -> bool:
        """Whether the PFS has a file now of which copies are to go. What it has lost is copied there again."""
        node, view = self.node, self.node.catalogue.view
        inode, path = view.inode(fid), view.path(fid)
        if inode is None or path is None or not node.live_copies(inode) or not node.on_pfs(fid, inode):
            return False
        if node.pfs is None or node.pfs.state != "ok":
            return False
        ctx, gen = node.ctx(), inode.gen
        try:
            found = await node.pfs.stat(path, STAT_DEADLINE_S)
        except FileNotFoundError:
            log.error("%r is gone from the PFS: it is copied there again", path)
            holders, why = node.holders(inode), "somebody has removed it from the PFS"
            await node.catalogue.mutate(lambda tx: publication.pfs_copy_gone(tx, ctx, fid, gen, holders, why))
            return False
        except (OSError, trio.TooSlowError) as error:
            log.debug("whether %r is on the PFS: %s", path, error or "no answer")
            return False
        if (found.kind, found.size) == ("f", inode.size):
            return True
        why = "somebody has put another file there on the PFS: 'cachexfs status --refresh' takes it in"
        await node.catalogue.mutate(lambda tx: publication.note_error(tx, ctx, fid, why))
        return False

    async def _tell_evicted(self, fid: int, gen: int) -> None:
        gone = {(self.node.name, self.node.staging.store)}

        def forget(tx: Tx) -> None:
            publication.forget_copies(tx, fid, gen, gone)

        try:
            await self.node.catalogue.mutate(forget)
        except CacheXError as error:
            log.warning("the catalogue could not be told of an eviction: %s", error)

    def _free(self) -> None:
        self._freed.set()
        self._freed = trio.Event()

    def landed(self) -> None:
        """Something reached the PFS: it may be evicted now."""
        self._free()

    async def room_freed(self) -> None:
        """Return when there may be more room, or soon."""
        with trio.move_on_after(0.2):
            await self._freed.wait()
