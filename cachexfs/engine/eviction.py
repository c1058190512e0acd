"""Eviction: staged contents that are on the PFS leave memory, or NVMe, when it is short.

Role: what landed first goes first. Where no other copy is left the PFS is asked before: it must have the very file that
landed there. It is asked for many files at once, ahead of the writers while memory fills up; its word counts for
``VALID_S``. While it does not answer nothing of that kind goes: writers spill, or wait, as ``Keeper`` and ``Writing``
have it.

Concurrency: ``make_room`` is synchronous; one task asks the PFS; telling the catalogue is a task for each file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import trio

from cachexfs.core import publication
from cachexfs.core.records import Inode
from cachexfs.core.stages import parse_stage
from cachexfs.core.transaction import Tx
from cachexfs.engine.files import Files
from cachexfs.engine.node import Node
from cachexfs.engine.pfs_copies import PfsCopies
from cachexfs.errors import CacheXError

log = logging.getLogger(__name__)

VALID_S = 20.0
BATCH_FILES = 64  # of one call
ROUND_FILES_MAX = 512
AHEAD_SHARE = 8  # of memory that can go at once, while it fills up
SHORT_SHARE = 0.75  # of memory in use
LOOK_S = 1.0
WAIT_S = 1.0  # that a writer waits for the PFS's word before it spills
REFUSED_S = 5.0


class Eviction:
    """What may go from this node's staging."""

    def __init__(self, node: Node, files: Files, copies: PfsCopies) -> None:
        self.node = node
        self.files = files
        self.copies = copies
        self.evicted_bytes = 0
        self._candidates: dict[str, int] | None = None
        self._candidate_bytes = 0
        self._sure_until_s: dict[str, float] = {}  # stage -> when the PFS's word is too old
        self._wanted_bytes = 0
        self._asked_s: float | None = None  # since when an answer is waited for
        self._refused_s = float("-inf")
        self._wake, self._heard = trio.Event(), trio.Event()
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Ask the PFS ahead of need, until cancelled."""
        grown_bytes = -1
        async with trio.open_nursery() as self._nursery:
            while True:
                with trio.move_on_after(LOOK_S):
                    await self._wake.wait()
                is_asked, self._wake = self._wake.is_set(), trio.Event()
                staging = self.node.staging
                is_filling = staging.grown_bytes != grown_bytes and self._is_short()
                grown_bytes = staging.grown_bytes
                if is_asked or is_filling:
                    wanted, self._wanted_bytes = max(self._wanted_bytes, staging.limit_bytes // AHEAD_SHARE), 0
                    await self._ask(wanted)
                    self._asked_s = None
                    self._hear()

    def _is_short(self) -> bool:
        return self.node.staging.used_bytes > self.node.staging.limit_bytes * SHORT_SHARE

    # ---- the PFS's word
    async def _ask(self, wanted_bytes: int) -> None:
        """Have the PFS say of what landed first, up to so many bytes, that it has it."""
        now_s, total_bytes, asked = trio.current_time(), 0, list[tuple[int, str]]()
        for fid, stage in self._evictable():
            total_bytes += self.node.staging.size(stage)
            if not self._is_spare(fid) and self._sure_until_s.get(stage, 0.0) < now_s + VALID_S / 2:
                asked.append((fid, stage))
            if total_bytes >= wanted_bytes or len(asked) >= ROUND_FILES_MAX:
                break
        self._sure_until_s = {stage: until_s for stage, until_s in self._sure_until_s.items() if until_s > now_s}
        for start in range(0, len(asked), BATCH_FILES):
            part, self._asked_s = asked[start : start + BATCH_FILES], trio.current_time()
            try:
                there = await self.copies.there([fid for fid, _ in part])
            except CacheXError as error:
                log.debug("nothing is evicted for now: %s", error)
                there = None
            if there is None:
                self._refused_s = trio.current_time()
                return
            self._sure_until_s |= {stage: self._asked_s + VALID_S for fid, stage in part if fid in there}
            self._hear()

    def _hear(self) -> None:
        self._heard.set()
        self._heard = trio.Event()

    def is_hopeful(self) -> bool:
        """Whether the PFS's word, which comes soon, may make room."""
        now_s = trio.current_time()
        if self.node.pfs is None or self.node.pfs.state != "ok" or now_s - self._refused_s < REFUSED_S:
            return False
        if self._nursery is None or (self._asked_s is not None and now_s - self._asked_s > WAIT_S):
            return False
        return next((True for fid, stage in self._evictable() if not self._may_go(fid, stage)), False)

    def want(self, length: int) -> None:
        """Somebody needs room: ask the PFS now."""
        self._wanted_bytes = max(self._wanted_bytes, length)
        self._wake.set()

    async def asked(self, length: int) -> bool:
        """Wait a moment for the PFS's word; whether ``make_room`` may do better now."""
        if not self.is_hopeful():
            return False
        self.want(length)
        with trio.move_on_after(WAIT_S) as scope:
            await self._heard.wait()
        return not scope.cancelled_caught

    # ---- room
    def make_room(self, length: int) -> bool:
        """Evict until ``length`` bytes fit in memory; False when what may go is not enough."""
        staging = self.node.staging
        for fid, stage in self._evictable():
            if staging.is_spilled(stage) or not self._may_go(fid, stage):
                continue
            self.evict(fid, stage)
            if staging.used_bytes + length <= staging.limit_bytes:
                return True
        return False

    def make_spill_room(self, length: int) -> None:
        """The same on NVMe."""
        for fid, stage in self._evictable():
            if self.node.staging.spill_room_bytes() >= length:
                return
            if self.node.staging.is_spilled(stage):
                if self._may_go(fid, stage):
                    self.evict(fid, stage)
                else:
                    self.want(length)

    def _may_go(self, fid: int, stage: str) -> bool:
        return self._is_spare(fid) or self._sure_until_s.get(stage, 0.0) >= trio.current_time()

    def _is_spare(self, fid: int) -> bool:
        """Whether the staged file is not the only copy outside the PFS."""
        inode, mine = self.node.catalogue.view.inode(fid), (self.node.name, self.node.staging.store)
        return inode is not None and any((c.node, c.store) != mine for c in self.node.live_copies(inode))

    def evict(self, fid: int, stage: str) -> None:
        """Remove a staged file that may go."""
        staging, inode = self.node.staging, self.node.catalogue.view.inode(fid)
        before = staging.used_bytes + staging.spilled_bytes
        self.remove(fid, stage)
        self.evicted_bytes += before - staging.used_bytes - staging.spilled_bytes
        if self._nursery is not None and inode is not None:
            self._nursery.start_soon(self._tell, fid, inode.gen)

    def remove(self, fid: int, stage: str) -> None:
        """Give a staged file's memory back; what the catalogue says of it is the caller's."""
        self.files.evicted(fid)
        self.forget(stage)
        self.node.staging.remove(stage)

    async def _tell(self, fid: int, gen: int) -> None:
        gone = {(self.node.name, self.node.staging.store)}

        def forget(tx: Tx) -> None:
            publication.forget_copies(tx, fid, gen, gone)

        try:
            await self.node.catalogue.mutate(forget)
        except CacheXError as error:
            log.warning("the catalogue could not be told of an eviction: %s", error)

    # ---- what has landed
    def bytes(self) -> int:
        """Of staging that a writer could get so (files that are open now included)."""
        self._known()
        return self._candidate_bytes

    def _evictable(self) -> Iterator[tuple[int, str]]:
        """(file id, stage) of what is on the PFS and not in use, what landed first first. Looks no further than it is
        asked."""
        view = self.node.catalogue.view
        for stage in list(self._known()):
            fid, _ = parse_stage(stage)
            inode, generation = view.inode(fid), view.generation(fid)
            if inode is None or generation is None or generation.stage != stage or not self.node.staging.has(stage):
                self.forget(stage)
                continue
            vnode = self.files.known(fid)
            if not self.node.on_pfs(fid, inode) or (vnode is not None and (vnode.dirty or vnode.handles)):
                continue
            if not any(op.stage == stage for _, op in view.ops_of(fid)):
                yield fid, stage

    def _known(self) -> dict[str, int]:
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
                self.note_landed(fid, inode)
        return self._candidates

    def note_landed(self, fid: int, inode: Inode) -> None:
        """A file's record has changed: its content may have reached the PFS."""
        if self._candidates is None or inode.pfs is None or inode.pfs.gen != inode.gen:
            return
        generation = self.node.catalogue.view.generation(fid)
        stage = generation.stage if generation is not None else ""
        if stage and stage not in self._candidates and self.node.staging.has(stage):
            self._candidates[stage] = inode.size
            self._candidate_bytes += inode.size

    def forget(self, stage: str) -> None:
        """A staged file goes, or is not the current content any more."""
        if self._candidates is not None:
            self._candidate_bytes -= self._candidates.pop(stage, 0)
