"""One run of the simulation from a seed; as a program, many.

Role: runs scenarios. The same seed gives the same run: time is trio's mock clock, threads are run inline, the scheduler
is seeded.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import sim_sizes  # first: it may change what the engine's modules take over from each other
import trio
import trio.testing
from sim_behind import Behind
from sim_check import Violation
from sim_cluster import Cluster, Routes
from sim_disks import Disks
from sim_fill import Fill
from sim_journal import Journal
from sim_limit import Limits, limited, processor_limit
from sim_one import Run
from sim_ram import Ram
from sim_recover import Recover
from sim_rotate import Rotate
from sim_steps import Steps

T = TypeVar("T")
SLOW_S = 8.0
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a disk counts more blocks than pages


class _Wait(BaseException):
    """Code that runs "in a thread" has to wait for something of the loop."""

    def __init__(self, function: Callable[..., Awaitable[object]], args: tuple[object, ...]) -> None:
        super().__init__()
        self.function, self.args_ = function, args


@contextmanager
def inline_threads(seed: int) -> Iterator[None]:
    """No threads, which a mock clock does not see, and a scheduler that the seed decides."""
    answers: dict[object, object] = {}  # of the call that runs

    async def run_sync(function: Callable[..., T], *args: object, **options: object) -> T:
        nonlocal answers
        known: dict[object, object] = {}
        while True:
            answers = known
            try:
                return function(*args)
            except _Wait as wait:
                known[wait.args_] = await wait.function(*wait.args_)

    def from_thread(function: Callable[..., Awaitable[T]], *args: object) -> T:
        if args not in answers:
            raise _Wait(function, args)
        return answers[args]  # type: ignore[return-value]

    core = trio._core._run  # type: ignore[attr-defined]
    old = (
        trio.to_thread.run_sync,
        trio.from_thread.run,
        core._ALLOW_DETERMINISTIC_SCHEDULING,
        logging.root.manager.disable,
    )
    trio.to_thread.run_sync, trio.from_thread.run = run_sync, from_thread  # type: ignore[assignment]
    core._ALLOW_DETERMINISTIC_SCHEDULING = True
    core._r.seed(seed)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        trio.to_thread.run_sync, trio.from_thread.run, core._ALLOW_DETERMINISTIC_SCHEDULING = old[:3]  # type: ignore[assignment]
        logging.disable(old[3])


#: Name of a scenario -> its run: (seed, directory, trace) to something with ``main``.
SCENARIOS: dict[str, Callable[..., Run | Cluster]] = {
    "one": Run,
    "fill": Fill,
    "ram": Ram,
    "cluster": Cluster,
    "routes": Routes,
    "recover": Recover,
    "disks": Disks,
    "journal": Journal,
    "behind": Behind,
    "steps": Steps,
    "rotate": Rotate,
}


def simulate(
    seed: int,
    scenario: str = "one",
    *,
    trace: bool = False,
    limits: Limits = Limits(),  # noqa: B008
) -> Run | Cluster:
    """One run, which is returned. Raises ``Violation`` (or what the engine raised), with the seed in its notes."""
    directory = tempfile.mkdtemp(prefix="cachexfs-sim-", dir=MEMORY)
    try:
        with inline_threads(seed):
            run = SCENARIOS[scenario](seed, directory, trace=trace)
            clock = trio.testing.MockClock(autojump_threshold=0)
            with processor_limit(limits):
                trio.run(limited, run.main, limits, clock=clock)
            return run
    except BaseException as error:
        error.add_note(f"simulation {scenario}, seed {seed}")
        raise
    finally:
        shutil.rmtree(directory)


def first(error: BaseException) -> BaseException:
    """The first error inside groups, violations before others."""
    while isinstance(error, BaseExceptionGroup):
        inner = sorted(error.exceptions, key=lambda e: not isinstance(e, Violation))
        error = next((e for e in inner if not isinstance(e, trio.Cancelled)), inner[0])
    return error


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulates the engine: --seeds A-B, or one seed.")
    parser.add_argument("--seeds", default="0-999")
    parser.add_argument("--scenario", choices=list(SCENARIOS), action="append", help="default: all")
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--trace", action="store_true", help="say what happens, step by step")
    options = parser.parse_args()
    start, _, end = options.seeds.partition("-")
    seeds = range(int(start), int(end or start) + 1)
    names = options.scenario or list(SCENARIOS)
    begun, bad = time.monotonic(), 0
    for seed, name in ((seed, name) for seed in seeds for name in names):
        started = time.process_time()
        try:
            simulate(seed, name, trace=options.trace)
        except Exception as group:
            error, bad = first(group), bad + 1
            print(f"SEED {seed} of {name}: {type(error).__name__}: {error}", flush=True)
            again = f"tests/sim/sim_run.py --scenario {name} --seeds {seed} --trace"
            print(f"    again: {sim_sizes.ENVIRONMENT}PYTHONHASHSEED=0 .venv/bin/python {again}", flush=True)
            if not options.keep_going:
                raise
        if (took_s := time.process_time() - started) > SLOW_S:
            print(f"SEED {seed} of {name} took {took_s:.0f} s of processor time", flush=True)
    count = len(seeds) * len(names)
    print(f"{count} runs of {', '.join(names)}: {bad} failed, {time.monotonic() - begun:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
