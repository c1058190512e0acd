"""Several nodes whose memory is too small, and whose NVMe tears at power cuts or goes bad.

Role: a scenario. As ``Cluster``, in memory for some files: all nodes spill. Of two kinds, by the seed: nodes lose their
power, and their disks what was not synced; or files on disks change, are cut or become unreadable, each while another
copy of what it holds is good. In both a node's NVMe may refuse writes, syncs and new files for a while: those of its
spills and those of its partners' replicas. In the second kind nothing may be lost, and no wrong byte may be seen.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import trio
from sim_check import Violation
from sim_cluster import Cluster, Seat
from sim_fill import KIB, Bound, Filler, SimDisk, slow_disk
from sim_life import Life
from sim_nvme import Nvme

from cachexfs.core.records import Generation
from cachexfs.core.stages import parse_stage

CUTS = (
    "kill", "cut", "faults", "away", "calm", "net", "outage", "lose", "lose", "lose", "lose", "full", "full", "refuse",
    "refuse",
)  # fmt: skip
SPOILS = (
    "kill", "kill", "away", "net", "outage", "full", "full", "spoil", "spoil", "spoil", "spoil", "spoil", "spoil",
    "refuse", "refuse",
)  # fmt: skip


LOOKS = 2000


class TightSeat(Seat):
    """A node with little memory."""

    tight = True


class AnyDisk(SimDisk):
    """That of the node whose call it is, which is not known: of each in turn."""

    def __init__(self, rng: random.Random, seats: Sequence[Seat]) -> None:
        super().__init__(rng, 0)
        self._seats = seats

    def called(self, what: str) -> None:
        """See ``Disk``."""
        disk = self.random.choice(self._seats).disk
        assert disk is not None
        disk.called(what)


class Disks(Cluster):
    """As ``Cluster``, with disks that fail."""

    seat = TightSeat
    worker = Filler
    memory_bytes = 128 * KIB

    def __init__(self, seed: int, directory: str, *, trace: bool = False, fsync: str = "") -> None:
        super().__init__(seed, directory, trace=trace, fsync=fsync)
        rng = self.random
        self.spoils = rng.random() < 0.5
        self.events = SPOILS if self.spoils else CUTS
        self.nvme = Nvme(directory, rng)
        self.counts = self.nvme.counts
        self.bounds: list[Bound] = []
        for seat in self.seats:
            seat.kernel.passthrough = False  # what is passed asks for more room than there is
            seat.disk = SimDisk(rng, rng.choice([100 * KIB, 1 << 20, 1 << 30, 1 << 30]))
            assert seat.options.staging is not None
            self.bounds.append(Bound(os.path.join(seat.options.staging, "files"), self.memory_bytes))

    async def happen(self, event: str, seat: Seat) -> None:
        """See ``Cluster``."""
        self.nvme.counts[event] += 1
        if event == "spoil":
            await trio.sleep(self.random.choice([0, 0.1, 1]))
            for other in self.random.sample(self.seats, len(self.seats)):
                if self._spoil(other):
                    return
        elif event == "lose":
            await self._until_it_takes_a_copy(seat)
            await super().happen(event, seat)
        elif event == "refuse":
            assert self._nursery is not None
            self._nursery.start_soon(self._refuse, seat, self.random.choice([1, 10, 60]))
        elif event == "full":  # what is written waits, and spills
            self.faults.full = self.random.choice([0.1, 1.0])
        else:
            await super().happen(event, seat)

    async def _refuse(self, seat: Seat, seconds: float) -> None:
        """A node's NVMe takes nothing, or not all."""
        directory, failing = str(seat.options.nvme_directory), self.random.choice([0.05, 0.3, 1.0])
        assert isinstance(seat.disk, SimDisk)
        self.trace(f"{seat.name} NVMe refuses {failing} of all for {seconds} s")
        self.nvme.refusing[directory] = seat.disk.failing = failing
        await trio.sleep(seconds)
        self.nvme.refusing.pop(directory, None)
        seat.disk.failing = 0.0

    def calm(self) -> None:
        """See ``Cluster``."""
        super().calm()
        self.nvme.refusing.clear()
        for seat in self.seats:
            assert isinstance(seat.disk, SimDisk)
            seat.disk.failing = 0.0

    async def _until_it_takes_a_copy(self, seat: Seat) -> None:
        """Power goes at a bad moment, if one comes soon."""
        for _ in range(LOOKS):
            if seat.current is not None and seat.current.store is not None and seat.current.store.unfinished():
                return
            await trio.sleep(0.0005)

    def _spoil(self, seat: Seat) -> bool:
        """Something that a node has on NVMe goes bad. False: it has nothing of which there is another copy."""
        life = seat.current
        assert life is not None
        found = sorted(self._on_nvme(life))
        self.random.shuffle(found)
        if self.random.random() < 0.7:
            found.sort(key=lambda row: not life.staging.is_spilled(row[0]))
        for stage, path in found:
            content = self.log.state.generation(parse_stage(stage)[0])
            if content is not None and content.stage == stage and self._is_elsewhere(seat, content):
                self.trace(f"{seat.name} SPOILS {path}")
                self.nvme.counts["a spilled file" if life.staging.is_spilled(stage) else "a replica"] += 1
                self.nvme.spoil(path, stage)
                self.checkers.spoilt.add(stage)
                return True
        return False

    def _on_nvme(self, life: Life) -> list[tuple[str, str]]:
        """(stage, path) of what nobody writes to."""
        if life.store is None:
            return []
        held = [(m.stage, c.path) for m in life.store.list() if m.size and (c := life.store.committed(m.stage))]
        staging = life.staging
        spilled = [(stage, staging.path(stage)) for stage in staging.stages() if staging.is_spilled(stage)]
        return [(stage, path) for stage, path in [*held, *spilled] if self._is_still(stage, path)]

    def _is_still(self, stage: str, path: str) -> bool:
        """Whether it is the content of now, of a file that no node changes."""
        fid, _ = parse_stage(stage)
        content, inode = self.log.state.generation(fid), self.log.state.inode(fid)
        if content is None or inode is None or not content.size or inode.writing or stage in self.checkers.spoilt:
            return False
        vnodes = [s.current.parts.files._current.get(fid) for s in self.seats if s.current is not None]
        busy = any(vnode is not None and (vnode.dirty or vnode.writers) for vnode in vnodes)
        return not busy and os.path.exists(path) and os.stat(path).st_size >= content.size

    def _is_elsewhere(self, seat: Seat, content: Generation) -> bool:
        """Whether another node has it, by the catalogue too, and will have it."""
        inode = self.log.state.inode(parse_stage(content.stage)[0])
        assert inode is not None
        for other in self.seats:
            copies = [copy for copy in inode.copies if copy.node == other.name]
            if other is not seat and copies and other.current is not None and self.checkers.has(other.current, content):
                return True
        return False

    def power_gone(self, seat: Seat) -> None:
        """See ``Cluster``."""
        assert seat.options.nvme_directory is not None
        if os.path.isdir(seat.options.nvme_directory):
            self.nvme.counts["a power cut"] += 1
            self.nvme.power_cut(seat.options.nvme_directory)

    async def main(self) -> None:
        for seat in self.seats:
            os.makedirs(os.path.join(str(seat.options.staging), "files"))
        with self.nvme.installed(), slow_disk(self.random, AnyDisk(self.random, self.seats)):
            for bound in self.bounds:
                trio.lowlevel.add_instrument(bound)
            try:
                await super().main()
            finally:
                for bound in self.bounds:
                    trio.lowlevel.remove_instrument(bound)
        for bound in self.bounds:
            bound.check()
        if self.spoils and self.losses:
            raise Violation("this kind of run loses no node")
