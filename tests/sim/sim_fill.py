"""Memory that is always too small, an NVMe that fails at any call, a PFS that is away for long.

Role: a scenario. One node with staging for a few files, and files that are larger than it: writers wait, contents move
to NVMe, grow there and come back. Every call on NVMe may fail (full, I/O error, read-only). Besides what ``Run`` looks
at, staging is measured after each step of each task: never a page more than ``memory`` and what one write may touch.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import trio
from sim_check import PAGE_SLACK_BYTES, Violation
from sim_one import Run
from sim_work import Worker

from cachexfs.engine import spill

KIB = 1 << 10
REFUSALS = (errno.ENOSPC, errno.EIO, errno.EROFS)
EVENTS = ["kill", "kill", "cut", "faults", "away", "away for long", "full", "calm", "disk", "disk", "disk is mended"]


class SimDisk:
    """``Disk`` of one node. ``failing``: the probability that a call fails. ``calls``: of each kind, (made, failed)."""

    def __init__(self, rng: random.Random, capacity_bytes: int) -> None:
        self.random, self.capacity_bytes, self.failing = rng, capacity_bytes, 0.0
        self.calls: dict[str, list[int]] = {}

    def called(self, what: str) -> None:
        """See ``Disk``."""
        made = self.calls.setdefault(what, [0, 0])
        made[0] += 1
        if self.random.random() < self.failing:
            made[1] += 1
            code = self.random.choice(REFUSALS)
            raise OSError(code, os.strerror(code), what)


class Bound(trio.abc.Instrument):
    """Looks at the memory that staging takes after each step of any task."""

    def __init__(self, directory: str, limit_bytes: int) -> None:
        self._files, self.limit_bytes, self.peak_bytes, self.looks = directory, limit_bytes, 0, 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """See ``trio.abc.Instrument``: an error here is only printed, so what is seen is kept for ``check``."""
        self.looks += 1
        try:
            held = sum(entry.stat().st_blocks * 512 for entry in os.scandir(self._files))
        except FileNotFoundError:
            return  # its node is down, and has lost its memory
        self.peak_bytes = max(self.peak_bytes, held)

    def check(self) -> None:
        """Raises ``Violation``."""
        if self.peak_bytes > self.limit_bytes + PAGE_SLACK_BYTES:
            raise Violation(f"memory: {self.peak_bytes} bytes were held, of {self.limit_bytes}")


class Filler(Worker):
    """Files up to more than memory has."""

    def bytes_for(self, path: bytes) -> bytes:
        rng = self.world.random
        size = rng.choice([0, 100, 4096, 20_000, 60_000, 60_000, 200_000])
        return (b"%s %d " % (path, self.world.next_save())).ljust(size, b".")[:size]


class Fill(Run):
    """As ``Run``, in too little memory."""

    events = EVENTS
    worker = Filler

    def __init__(self, seed: int, directory: str, *, trace: bool = False) -> None:
        super().__init__(seed, directory, trace=trace)
        rng = self.random
        self.tight = self.checkers.kept.excused = True
        self.kernel.passthrough = False  # what is passed asks for more room than there is
        self.disk = SimDisk(rng, rng.choice([0, 100 * KIB, 1 << 20, 1 << 30]))
        memory = rng.choice([96 * KIB, 256 * KIB])
        self.options = msgspec.structs.replace(
            self.options,
            memory=memory,
            spill=os.path.join(directory, "nvme"),
            staging=os.path.join(directory, "memory"),
        )
        self.bound = Bound(os.path.join(directory, "memory", "files"), memory)

    async def happen(self, event: str) -> None:
        rng = self.random
        if event == "disk":
            self.trouble, self.disk.failing = True, rng.choice([0.05, 0.3, 1.0])
        elif event == "disk is mended":
            self.disk.failing = 0.0
        elif event == "away for long":
            self.trouble = self.faults.away = True
            await trio.sleep(rng.choice([100, 300]))
            self.faults.away = False
        else:
            await super().happen(event)

    async def main(self) -> None:
        os.makedirs(os.path.join(str(self.options.staging), "files"))
        with slow_disk(self.random, self.disk):
            trio.lowlevel.add_instrument(self.bound)
            try:
                await super().main()
            finally:
                trio.lowlevel.remove_instrument(self.bound)
        self.bound.check()

    def calm(self) -> None:
        super().calm()
        self.disk.failing = 0.0


@contextmanager
def slow_disk(rng: random.Random, disk: SimDisk) -> Iterator[None]:
    """Calls on NVMe take time, so that others come between, and may fail."""
    run_sync, copy_bytes = trio.to_thread.run_sync, spill.copy_bytes
    named: dict[Callable[..., Any], str] = {os.pwrite: "write", os.fdatasync: "sync", os.pread: ""}

    async def slow(function: Callable[..., Any], *args: object, **options: Any) -> Any:
        if function in named:
            await trio.sleep(rng.choice([0, 0.001, 0.1]))
            if named[function]:
                disk.called(named[function])
        return await run_sync(function, *args, **options)

    async def copy(source: int, target: int, length: int) -> None:
        await trio.sleep(rng.choice([0, 0.001, 0.1]))
        disk.called("copy")
        await copy_bytes(source, target, length)
        await trio.sleep(rng.choice([0, 0.001, 0.1]))

    trio.to_thread.run_sync, spill.copy_bytes = slow, copy  # type: ignore[assignment]
    try:
        yield
    finally:
        trio.to_thread.run_sync, spill.copy_bytes = run_sync, copy_bytes
