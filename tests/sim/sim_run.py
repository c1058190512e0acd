"""One run of the simulation from a seed; as a program, many.

Role: makes the world (store, catalogue, daemon), lets clients work while daemon and PFS suffer, then heals everything
and looks at the end. The same seed gives the same run: time is trio's mock clock, threads are run inline, the
scheduler is seeded.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio
import trio.testing
from sim_catalogue import Log
from sim_check import Checkers, Saves, Violation
from sim_client import Client
from sim_life import Life, SimClock
from sim_pfs import Faults, SimPfs
from sim_store import Store

from cachexfs.config import MountOptions

T = TypeVar("T")
SLOW_S = 20.0
REST_S = 1500.0  # by then everything must be on a PFS that works again


class _Wait(BaseException):
    """Code that runs "in a thread" has to wait for something of the loop."""

    def __init__(self, function: Callable[..., Awaitable[object]], args: tuple[object, ...]) -> None:
        super().__init__()
        self.function, self.args_ = function, args


@contextmanager
def inline_threads(seed: int) -> Iterator[None]:
    """No threads, which a mock clock does not see, and a scheduler that the seed decides."""
    answers: dict[object, object] = {}

    async def run_sync(function: Callable[..., T], *args: object, **options: object) -> T:
        answers.clear()
        while True:
            try:
                return function(*args)
            except _Wait as wait:
                answers[wait.args_] = await wait.function(*wait.args_)

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


class Run:
    """One node. Everything that differs between seeds is decided here."""

    def __init__(self, seed: int, directory: str) -> None:
        self.seed, self.random = seed, random.Random(seed)
        rng = self.random
        self.fsync = rng.choice(["pfs", "returned"])
        self.tight = rng.random() < 0.3
        self.trouble = False
        self.asks = rng.random() < 0.7  # somebody looks at the attributes now and then
        self.options = MountOptions(
            pfs="/pfs", mountpoint="/mnt", memory=256 << 10 if self.tight else 64 << 20, staging=directory, node="n0",
            fsync=self.fsync, drain_workers=rng.choice([1, 4]),
        )  # fmt: skip
        self.store, self.faults, self.log, self.clock = Store(), Faults(), Log(), SimClock()
        self.saves = Saves()
        self.checkers = Checkers(self.store, self.saves)
        self._numbers = 0
        self._life: Life | None = None
        self._alive = trio.Event()
        self._nursery: trio.Nursery | None = None
        self.cuts = 0
        self.kills = 0

    # ---- what clients ask
    def next_save(self) -> int:
        self._numbers += 1
        return self._numbers

    async def life(self) -> Life:
        while self._life is None or self._life.dead:
            await self._alive.wait()
        return self._life

    # ---- the daemon
    async def _born(self) -> None:
        assert self._nursery is not None
        pfs = SimPfs(self.store, self.faults, self.random, self.checkers.commit_last, self._nursery)
        life = Life(self.options, self.log, pfs, self.clock, self.random)
        await self._nursery.start(life.run)
        self._life = life
        self._alive.set()

    async def _kill(self) -> None:
        """SIGKILL, then the next daemon on the same staging and catalogue."""
        life = await self.life()
        self._alive = trio.Event()
        self.kills += 1
        life.kill()
        await trio.sleep(self.random.choice([0.1, 1, 30]))
        await self._born()

    # ---- what happens
    async def _suffer(self) -> None:
        rng, faults = self.random, self.faults
        for _ in range(rng.randrange(1, 8)):
            await trio.sleep(rng.choice([0.01, 0.1, 0.5, 2]) * rng.random())
            event = rng.choice(["kill", "kill", "cut", "faults", "away", "full", "calm"])
            self.trouble = self.trouble or event in ("cut", "faults", "away", "full")
            if event == "kill":
                await self._kill()
            elif event == "cut":
                self.cuts += 1
                self.store.power_cut(rng)
                self.checkers.commit_last("a power cut")
            elif event == "faults":
                faults.error, faults.hang = rng.choice([0, 0.02, 0.1]), rng.choice([0, 0, 0.01])
                faults.hide = rng.choice([0, 0, 0.05])
            elif event == "away":
                faults.away = True
                await trio.sleep(rng.choice([1, 30, 100]))
                faults.away = False
            elif event == "full":
                faults.full = rng.choice([0.1, 1.0])
            else:
                faults.calm()
        await trio.sleep(rng.choice([0.1, 5]))

    async def _ask(self) -> None:
        while True:
            await trio.sleep(self.random.choice([0.02, 0.1, 1, 20]))
            life = await self.life()
            outcome = await life.call(lambda fs, life=life: self.checkers.claims(life))  # type: ignore[misc]
            if not outcome.killed:
                self.checkers.memory(life)

    async def main(self) -> None:
        async with trio.open_nursery() as self._nursery:
            await self._born()
            clients = [Client(self, b"c%d" % number) for number in range(self.random.choice([1, 1, 2, 3]))]
            for client in clients:
                await client.start()
            async with trio.open_nursery() as suffering:
                if self.asks:
                    suffering.start_soon(self._ask)
                async with trio.open_nursery() as working:
                    working.start_soon(self._suffer)
                    for client in clients:
                        working.start_soon(client.work, self.random.choice([10, 25, 40]))
                suffering.cancel_scope.cancel()
            await self._end(clients)
            self._nursery.cancel_scope.cancel()

    async def _end(self, clients: list[Client]) -> None:
        """Faults stop: all reaches the PFS in time, and both trees are the model's."""
        self.faults.calm()
        life = await self.life()
        with trio.move_on_after(REST_S) as scope:
            while life.parts.drainer.own_pending() or life.pfs.busy():  # noqa: ASYNC110
                await trio.sleep(1)
        if scope.cancelled_caught:
            left = [(op.kind, op.path, life.parts.drainer.reason(key)) for key, op in life.parts.drainer.own_pending()]
            raise Violation(f"liveness: not on the PFS after {REST_S:.0f} s: {left[:5]}")
        self.trouble = False
        await trio.sleep(60)  # what needs no haste: looking for what a dead daemon has left
        contents = {}
        for client in clients:
            await client.verify()
            for path, (kind, _, data) in client.tree.items():
                if kind == "f":
                    contents[client.base + b"/" + path] = data
        await self.checkers.claims(life)
        self.checkers.memory(life)
        self.checkers.same_tree(life, contents)
        self.checkers.nothing_left(life, cut=self.cuts > 0)


def simulate(seed: int) -> None:
    """One run. Raises ``Violation`` (or what the engine raised), with the seed in its notes."""
    directory = tempfile.mkdtemp(prefix="cachexfs-sim-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    try:
        with inline_threads(seed):
            run = Run(seed, directory)
            trio.run(run.main, clock=trio.testing.MockClock(autojump_threshold=0))
    except BaseException as error:
        error.add_note(f"simulation seed {seed}")
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
    parser.add_argument("--keep-going", action="store_true")
    options = parser.parse_args()
    start, _, end = options.seeds.partition("-")
    begun, bad = time.monotonic(), 0
    for seed in range(int(start), int(end or start) + 1):
        started = time.monotonic()
        try:
            simulate(seed)
        except Exception as group:
            error, bad = first(group), bad + 1
            print(f"SEED {seed}: {type(error).__name__}: {error}", flush=True)
            if not options.keep_going:
                raise
        if time.monotonic() - started > SLOW_S:
            print(f"SEED {seed} took {time.monotonic() - started:.0f} s", flush=True)
    count = int(end or start) - int(start) + 1
    print(f"{count} seeds, {bad} failed, {time.monotonic() - begun:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
