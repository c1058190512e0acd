"""One node, its applications, and what happens to them: a scenario, and what others of one node are made from.

Role: makes the world (store, catalogue, daemons), lets clients work while daemons and PFS suffer, then heals everything
and looks at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import trio
from sim_catalogue import Log
from sim_check import Checkers, Saves, Violation, commit_file
from sim_client import Loss, Node
from sim_kernel import Kernel
from sim_life import Disk, Life, SimClock
from sim_pfs import Faults, SimPfs
from sim_store import Store
from sim_work import Worker

from cachexfs.config import MountOptions
from cachexfs.core.records import OpKind
from cachexfs.engine.drain_reasons import why_pending

REST_S = 1500.0  # by then everything must be on a PFS that works again
MIB = 1 << 20


class Run:
    """One node. Everything that differs between seeds is decided here."""

    events: Sequence[str] = ("kill", "kill", "cut", "faults", "away", "full", "calm")
    worker: type[Worker] = Worker
    disk: Disk | None = None
    refusals: tuple[int, ...] = ()

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
        self.mended = False  # the catalogue has lost what it knew, or some of it
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
        life = Life(self.options, self.log, pfs, self.clock, self.random, after, disk=self.disk)
        life.others = lambda: {*self.store.readers, *(of.fd for of in self.kernel.opens)}
        life.filesystem.kernel = self.kernel
        if after is not None:
            life.open_files, life.resume = self.kernel.open_files(), self.kernel.resume
        if self.mended:
            life.set_aside = life.staging.set_aside
        await self._nursery.start(life.run)
        self._life = life
        self._alive.set()

    def _is_supervised(self) -> bool:
        return self.random.random() < 0.5

    async def _kill(self) -> None:
        """SIGKILL, then the next daemon on the same staging and catalogue."""
        life = await self.life()
        self._alive = trio.Event()
        self.kills += 1
        supervised = self._is_supervised()
        self.trace(f"KILL{' under a supervisor' if supervised else ''}")
        life.kill(supervised=supervised)
        self.kernel.died(supervised=supervised)
        await trio.sleep(self.random.choice([0.1, 1, 30]))
        await self._born(life if supervised else None)
        self.trace("BORN")

    # ---- what happens
    async def _suffer(self) -> None:
        rng = self.random
        for _ in range(rng.randrange(1, 8)):
            await trio.sleep(rng.choice([0.01, 0.1, 0.5, 2]) * rng.random())
            event = rng.choice(self.events)
            self.trace(event)
            self.trouble = self.trouble or event in ("cut", "faults", "away", "full")
            await self.happen(event)
        await trio.sleep(rng.choice([0.1, 5]))

    async def happen(self, event: str) -> None:
        """One of ``events``."""
        rng, faults = self.random, self.faults
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
            self.calm()

    def calm(self) -> None:
        """No more faults."""
        self.faults.calm()

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
            clients = [self.worker(self, b"c%d" % number) for number in range(self.random.choice([1, 1, 2, 3]))]
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
            left = [
                (op.kind, op.path, why_pending(life.parts.drainer, key)) for key, op in life.parts.drainer.own_pending()
            ]
            raise Violation(f"liveness: not on the PFS after {REST_S:.0f} s: {left[:5]}")

    async def _end(self, clients: list[Worker]) -> None:
        """Faults stop: all reaches the PFS in time, and both trees are the model's."""
        self.trace("CALM at the end")
        self.calm()
        life = await self.life()
        drainer = life.parts.drainer
        await self._rest(lambda: not drainer.is_idle() or life.pfs.busy())
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
