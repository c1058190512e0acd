"""Probe: measures a filesystem with several writer counts at once, within a budget of time and bytes.

Role: behind ``cachexfs probe``. Writers are processes of this machine (``Pool``) or ranks of a job
(``probe_ranks``); both offer ``Writers``. Runs of all counts are interleaved in random order, block by block,
so that a slow hour does not look like a law of N. Every file is removed after its run.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Protocol

from cachexfs.errors import CannotTellError, UsageError
from cachexfs.model.writer import Outcome, new_block, write_durably

FORMAT = "cachexfs-probe-1"
WRITERS_MAX = 4096
BYTES_MIN = 4096
FREE_SHARE_MAX = 0.5
START_DELAY_S = 0.05
GRACE_S = 30.0
PREFIX = ".cachexfs-probe-"


@dataclass(frozen=True)
class Plan:
    """What to measure. ``counts`` of writers, ``bytes_per_writer`` [B], ``repeats`` of each, ``seconds_max`` and
    ``bytes_max`` budgets for all of it, ``shared`` one file for all writers instead of one each."""

    counts: tuple[int, ...]
    bytes_per_writer: int
    repeats: int = 5
    seconds_max: float = 120.0
    bytes_max: int = 8 * 2**30
    shared: bool = False
    seed: int = 1

    def check(self, directory: str) -> None:
        """UsageError when the plan makes no sense or does not fit on the filesystem of ``directory``."""
        if not self.counts or min(self.counts) < 1 or max(self.counts) > WRITERS_MAX:
            raise UsageError(f"writer counts must lie between 1 and {WRITERS_MAX}")
        if self.bytes_per_writer < BYTES_MIN or self.repeats < 1 or not self.seconds_max > 0.0:
            raise UsageError(f"a probe needs {BYTES_MIN} bytes per writer, 1 repeat and some time")
        one_block = sum(self.counts) * self.bytes_per_writer
        if one_block > self.bytes_max:
            raise UsageError(
                f"one run of each writer count writes {_mib(one_block)}, more than the budget of "
                f"{_mib(self.bytes_max)}; lower --size or --writers, or raise --max-bytes"
            )
        try:
            stats = os.statvfs(directory)
        except OSError as error:
            raise UsageError(f"cannot use {directory}: {error.strerror}; give a directory that exists") from error
        free = stats.f_bavail * stats.f_frsize
        need = max(self.counts) * self.bytes_per_writer
        if need > FREE_SHARE_MAX * free:
            raise UsageError(
                f"{directory} has {_mib(free)} free and a run needs {_mib(need)}, more than half of it; lower --size"
            )

    def runs(self) -> Iterator[int]:
        """Writer counts in the order of their runs: blocks of all counts, each block shuffled."""
        order = random.Random(self.seed)
        left = self.bytes_max
        for _ in range(self.repeats):
            block = list(self.counts)
            order.shuffle(block)
            for count in block:
                left -= count * self.bytes_per_writer
                if left < 0:
                    return
                yield count


def _mib(value: float) -> str:
    return f"{value / 2**20:.0f} MiB"


@dataclass(frozen=True)
class Run:
    """One run: ``seconds`` of the slowest and ``typical_s`` of the median writer, each writer's in ``each_s``."""

    time: float
    writers: int
    bytes_per_writer: int
    seconds: float
    typical_s: float
    each_s: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """Runs that completed; ``trouble`` says why the probe stopped early, '' if it did not."""

    runs: tuple[Run, ...]
    shared: bool
    trouble: str
    notes: tuple[str, ...]

    def to_json(self, system: str) -> dict[str, object]:
        """What ``fit`` reads."""
        return {
            "format": FORMAT,
            "system": system,
            "access": "shared-file" if self.shared else "file-per-process",
            "notes": [*self.notes, *([self.trouble] if self.trouble else [])],
            "rows": [
                {
                    "time": r.time,
                    "writers": r.writers,
                    "bytes_per_writer": r.bytes_per_writer,
                    "seconds": r.seconds,
                    "typical_s": r.typical_s,
                    "each_s": [round(x, 6) for x in r.each_s],
                }
                for r in self.runs
            ],
        }


class Writers(Protocol):
    """Concurrent writers. ``run`` returns an outcome per writer, or None when they did not answer in time."""

    def run(self, directory: str, count: int, size: int, shared: bool, seconds_max: float) -> list[Outcome] | None:
        """Write with ``count`` writers of ``size`` bytes into ``directory``."""


def run_probe(
    directory: str, plan: Plan, writers: Writers, progress: Callable[[float], None] = lambda _: None
) -> Result:
    """Run ``plan`` in a new subdirectory of ``directory`` and remove it. ``progress`` gets the share done.

    A filesystem that fills, fails or hangs ends the probe: what was measured until then is returned with
    ``trouble``. Raises UsageError for a directory that cannot be written.
    """
    plan.check(directory)
    place = os.path.join(directory, f"{PREFIX}{os.getpid()}-{random.randrange(16**6):06x}")
    try:
        os.mkdir(place, 0o700)
    except OSError as error:
        raise UsageError(f"cannot write in {directory}: {error.strerror}") from error
    notes: list[str] = []
    runs: list[Run] = []
    trouble = ""
    try:
        trouble = _measure(place, plan, writers, runs, progress)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if os.path.exists(place):
            notes.append(f"could not remove {place}: remove it when the filesystem answers again")
    return Result(tuple(runs), plan.shared, trouble, tuple(notes))


def _measure(place: str, plan: Plan, writers: Writers, runs: list[Run], progress: Callable[[float], None]) -> str:
    begin = time.monotonic()
    schedule = list(plan.runs())
    warm_up = [min(schedule)]  # first use of a directory pays for things that no checkpoint pays for
    for index, count in enumerate(warm_up + schedule):
        left = plan.seconds_max - (time.monotonic() - begin)
        if left <= 0.0:
            return "" if _balanced(runs, plan) else f"time ran out after {len(runs)} of {len(schedule)} runs"
        moment = time.time()
        outcomes = writers.run(place, count, plan.bytes_per_writer, plan.shared, left + GRACE_S)
        if outcomes is None:
            return f"{count} writers did not finish within {left + GRACE_S:.0f} s: the filesystem hangs or is too slow"
        failed = [o.error for o in outcomes if o.error]
        if failed:
            return _say(failed[0], count)
        _empty(place)
        if index >= len(warm_up):
            times = sorted(o.seconds for o in outcomes)
            runs.append(Run(moment, count, plan.bytes_per_writer, times[-1], statistics.median(times), tuple(times)))
        progress((index + 1) / (len(schedule) + 1))
    return ""


def _balanced(runs: Sequence[Run], plan: Plan) -> bool:
    """True when every count was measured at least three times: the time limit then is no trouble."""
    return all(sum(r.writers == c for r in runs) >= 3 for c in plan.counts)


def _say(code: int, count: int) -> str:
    if code in (errno.ENOSPC, errno.EDQUOT):
        return f"the filesystem is full or over quota ({os.strerror(code)}) with {count} writers; lower --size"
    return f"a write failed with {count} writers: {os.strerror(code)}"


def _empty(place: str) -> None:
    for name in os.listdir(place):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(place, name))


class Pool:
    """Writers as processes of this machine, started once. Use as a context manager."""

    def __init__(self, count: int, size: int) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._children: list[multiprocessing.process.BaseProcess] = []
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                child = context.Process(target=_serve, args=(theirs, [ours, *self._pipes], size), daemon=True)
                child.start()
                theirs.close()
                self._pipes.append(ours)
                self._children.append(child)
        except OSError as error:
            self.close()
            raise CannotTellError(f"cannot start {count} writer processes: {error.strerror}") from error

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, directory: str, count: int, size: int, shared: bool, seconds_max: float) -> list[Outcome] | None:
        """One run; see ``Writers``. A writer that died counts as EIO."""
        start = time.monotonic() + START_DELAY_S + 0.0005 * count
        used = self._pipes[:count]
        pending: set[Connection] = set(used)
        outcomes: list[Outcome] = []
        for index, pipe in enumerate(used):
            name = "shared" if shared else f"w{index:05d}"
            try:
                pipe.send((os.path.join(directory, name), index * size if shared else 0, size, start))
            except OSError:  # that writer is dead
                pending.discard(pipe)
                outcomes.append(Outcome(0.0, errno.EIO))
        deadline = start + seconds_max
        while pending:
            ready = [p for p in wait(list(pending), max(0.0, deadline - time.monotonic())) if isinstance(p, Connection)]
            if not ready:
                return None
            for pipe in ready:
                pending.discard(pipe)
                try:
                    outcomes.append(pipe.recv())
                except (EOFError, OSError):
                    outcomes.append(Outcome(0.0, errno.EIO))
        return outcomes

    def close(self) -> None:
        """End the writers; one that hangs in the kernel is left to it."""
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join(0.2)
            if child.is_alive():
                child.kill()
                child.join(1.0)


def _serve(pipe: Connection, others: Sequence[Connection], size: int) -> None:
    """A child: runs until its pipe closes. ``others`` are the parent's ends it inherited."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in others:
        other.close()
    block = new_block(size)
    with contextlib.suppress(EOFError, OSError):
        while True:
            path, offset, length, start = pipe.recv()
            outcome = write_durably(path, offset, length, start, time.monotonic, block)
            if outcome.late:  # the machine is overloaded: measure anyway, from now
                outcome = write_durably(path, offset, length, time.monotonic() + 0.001, time.monotonic, block)
            pipe.send(outcome)
    os._exit(0)
