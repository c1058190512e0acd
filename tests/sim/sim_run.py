"""One run of the simulation from a seed; as a program, many.

Role: makes the world (store, catalogue, daemons), lets clients work while daemons and PFS suffer, then heals everything
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
from sim_check import Checkers, Saves, Violation, commit_file
from sim_client import Loss, Node
from sim_cluster import Cluster, Routes
from sim_kernel import Kernel
from sim_life import Life, SimClock
from sim_pfs import Faults, SimPfs
from sim_recover import Recover
from sim_store import Store
from sim_work import Worker

from cachexfs.config import MountOptions
from cachexfs.core.records import OpKind

T = TypeVar("T")
SLOW_S = 20.0
REST_S = 1500.0  # by then everything must be on a PFS that works again
MIB = 1 << 20


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

    def __init__(self, seed: int, directory: str, *, trace: bool = False) -> None:
        self.seed, self.random, self._traces = seed, random.Random(seed), trace
        rng = self.random
        self.fsync = rng.choice(["pfs", "returned"])
        self.tight = rng.random() < 0.3
        self.trouble = False
        self.asks = rng.random() < 0.7  # somebody looks at the attributes now and then
        self.planted = rng.random() < 0.5
        passthrough = not self.tight and rng.random() < 0.6
        memory = 256 << 10 if self.tight else 1024 * MIB
        self.options = MountOptions(
            pfs="/pfs", mountpoint="/mnt", memory=memory, staging=directory, node="n0",
            fsync=self.fsync, drain_workers=rng.choice([1, 4]),
        )  # fmt: skip
        self.store, self.faults, self.log, self.clock = Store(), Faults(), Log(), SimClock()
        self.saves = Saves()
        self.checkers = Checkers(self.store, self.saves)
        self.kernel = Kernel(rng, self.clock, passthrough=passthrough)
        self.checkers.kept.view = lambda: self._life.catalogue.view if self._life is not None else None
        self.checkers.kept.excused = self.tight
        self.loss: Loss | None = None
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

    async def all_there(self) -> None:
        await self.life()

    async def others(self) -> Life:
        return await self.life()

    def trace(self, text: str) -> None:
        if self._traces:
            print(f"{trio.current_time():10.4f} {text}")

    def looked(self, life: Life) -> None:
        if not life.dead:
            self.checkers.memory(life)

    def _stepped(self, what: str) -> None:
        self.trace(f"PFS {what}")
        self.checkers.commit_last(what)

    # ---- the daemon
    async def _born(self, after: Life | None = None) -> None:
        assert self._nursery is not None
        pfs = SimPfs(self.store, self.faults, self.random, self._stepped, self._nursery)
        pfs.trace = self.trace
        life = Life(self.options, self.log, pfs, self.clock, self.random, after)
        life.others = lambda: {*self.store.readers, *(of.fd for of in self.kernel.opens)}
        life.filesystem.kernel = self.kernel
        if after is not None:
            life.open_files, life.resume = self.kernel.open_files(), self.kernel.resume
        await self._nursery.start(life.run)
        self._life = life
        self._alive.set()

    async def _kill(self) -> None:
        """SIGKILL, then the next daemon on the same staging and catalogue."""
        life = await self.life()
        self._alive = trio.Event()
        self.kills += 1
        supervised = self.random.random() < 0.5
        self.trace(f"KILL{' under a supervisor' if supervised else ''}")
        life.kill(supervised=supervised)
        self.kernel.died(supervised=supervised)
        await trio.sleep(self.random.choice([0.1, 1, 30]))
        await self._born(life if supervised else None)
        self.trace("BORN")

    # ---- what happens
    async def _suffer(self) -> None:
        rng, faults = self.random, self.faults
        for _ in range(rng.randrange(1, 8)):
            await trio.sleep(rng.choice([0.01, 0.1, 0.5, 2]) * rng.random())
            event = rng.choice(["kill", "kill", "cut", "faults", "away", "full", "calm"])
            self.trace(event)
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

    def _plant(self, client: Worker) -> None:
        """What the PFS has before the mount: files, a link, a checkpoint."""
        rng, base = self.random, client.base
        tree = {b"d": Node("d", 0o755), b"a": Node("f", 0o640, b"old a" * rng.choice([1, 2000]), 1)}
        if rng.random() < 0.7:
            tree[b"d/b"], tree[b"link"] = Node("f", 0o644, b"old b", 2), Node("l", 0o777, b"a")
        if rng.random() < 0.7:
            number = self.next_save()
            members = {b"__%d_0.distcp" % rank: b"save %d rank %d" % (number, rank) for rank in range(2)}
            commit = commit_file(number, members)
            self.saves.made[commit] = members
            tree[b"step-1"] = Node("d", 0o755)
            for at, (name, data) in enumerate([*members.items(), (b".metadata", commit)]):
                tree[b"step-1/" + name] = Node("f", 0o644, data, 3 + at)
        plain = {base + b"/" + path: (n.kind, n.mode, n.data) for path, n in tree.items()}
        self.store.plant({base: ("d", 0o755, b""), **plain})
        client.tree = tree
        for _ in range(10):
            client.new_file()

    async def main(self) -> None:
        async with trio.open_nursery() as self._nursery:
            clients = [Worker(self, b"c%d" % number) for number in range(self.random.choice([1, 1, 2, 3]))]
            for client in clients if self.planted else ():
                self._plant(client)
            await self._born()
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

    async def _rest(self, busy: Callable[[], bool]) -> None:
        life = await self.life()
        with trio.move_on_after(REST_S) as scope:
            while busy():  # noqa: ASYNC110
                await trio.sleep(1)
        if scope.cancelled_caught:
            left = [(op.kind, op.path, life.parts.drainer.reason(key)) for key, op in life.parts.drainer.own_pending()]
            raise Violation(f"liveness: not on the PFS after {REST_S:.0f} s: {left[:5]}")

    async def _end(self, clients: list[Worker]) -> None:
        """Faults stop: all reaches the PFS in time, and both trees are the model's."""
        self.trace("CALM at the end")
        self.faults.calm()
        life = await self.life()
        drainer = life.parts.drainer
        await self._rest(lambda: bool(drainer.in_progress() or life.pfs.busy()))
        for client in clients:  # members that were overwritten alone stay hidden until somebody saves again
            await client.save_again({op.path for _, op in drainer.own_pending() if op.kind == OpKind.WITHDRAW})
        await self._rest(lambda: bool(drainer.own_pending() or life.pfs.busy()))
        self.trouble = False
        await trio.sleep(60)  # what needs no haste: looking for what a dead daemon has left
        contents = {}
        for client in clients:
            await client.verify()
            for path, node in client.tree.items():
                if node.kind == "f":
                    contents[client.base + b"/" + path] = node.data
        await self.checkers.claims(life)
        self.checkers.memory(life)
        self.checkers.same_tree(life, contents)
        self.checkers.nothing_left(life, cut=self.cuts > 0)


#: Name of a scenario -> its run: (seed, directory, trace) to something with ``main``.
SCENARIOS: dict[str, Callable[..., Run | Cluster]] = {
    "one": Run,
    "cluster": Cluster,
    "routes": Routes,
    "recover": Recover,
}


def simulate(seed: int, scenario: str = "one", *, trace: bool = False) -> None:
    """One run. Raises ``Violation`` (or what the engine raised), with the seed in its notes."""
    directory = tempfile.mkdtemp(prefix="cachexfs-sim-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    try:
        with inline_threads(seed):
            run = SCENARIOS[scenario](seed, directory, trace=trace)
            trio.run(run.main, clock=trio.testing.MockClock(autojump_threshold=0))
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
        started = time.monotonic()
        try:
            simulate(seed, name, trace=options.trace)
        except Exception as group:
            error, bad = first(group), bad + 1
            print(f"SEED {seed} of {name}: {type(error).__name__}: {error}", flush=True)
            again = f"tests/sim/sim_run.py --scenario {name} --seeds {seed} --trace"
            print(f"    again: PYTHONHASHSEED=0 .venv/bin/python {again}", flush=True)
            if not options.keep_going:
                raise
        if time.monotonic() - started > SLOW_S:
            print(f"SEED {seed} of {name} took {time.monotonic() - started:.0f} s", flush=True)
    count = len(seeds) * len(names)
    print(f"{count} runs of {', '.join(names)}: {bad} failed, {time.monotonic() - begun:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
