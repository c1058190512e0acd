"""Several nodes on one catalogue and one PFS.

Role: a ``Seat`` is a node: what it keeps over the death of its daemon, and what its applications ask. ``Cluster`` lets
daemons die, cuts nodes off from the catalogue or from each other, lets calls fail, and heals everything at the end.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence

import trio
import trio.testing
from sim_catalogue import Link, Log
from sim_check import Checkers, Saves, Violation
from sim_client import Loss
from sim_kernel import Kernel
from sim_life import Disk, Life, SimClock
from sim_peers import NetFaults, SimPeers
from sim_pfs import Faults, SimPfs
from sim_store import Store
from sim_work import Worker

from cachexfs.config import MountOptions, NodeAddress
from cachexfs.core.boundary import Boundary
from cachexfs.core.records import Generation, OpKind, life_key
from cachexfs.core.routes import DIRECT, PARTNER
from cachexfs.core.transaction import Tx
from cachexfs.engine.drain_reasons import why_pending

REST_S = 1500.0
CALM_EVERY_S = 600.0
MIB = 1 << 20


class Seat:
    """One node."""

    disk: Disk | None = None
    planted = True  # without the catalogue a name that is not known cannot be told from one that is not there
    tight = False
    refusals: tuple[int, ...] = ()

    def __init__(self, cluster: Cluster, name: str, options: MountOptions) -> None:
        self.cluster, self.name, self.options = cluster, name, options
        self.random, self.checkers, self.fsync = cluster.random, cluster.checkers, options.fsync
        self.kernel = Kernel(self.random, cluster.clock, passthrough=self.random.random() < 0.5)
        self.link = Link()
        self.heard_s = 0.0  # when the catalogue heard of it last
        self.current: Life | None = None
        self.loss: Loss | None = None
        self.lost_s = float("-inf")
        self._alive = trio.Event()

    @property
    def trouble(self) -> bool:
        return self.cluster.trouble

    # ---- what clients ask
    async def life(self) -> Life:
        while self.current is None or self.current.dead:
            await self._alive.wait()
        return self.current

    def next_save(self) -> int:
        return self.cluster.next_save()

    def trace(self, text: str) -> None:
        self.cluster.trace(f"{self.name} {text}")

    def looked(self, life: Life) -> None:
        if not life.dead:
            self.checkers.memory(life)

    async def all_there(self) -> None:
        """Wait until no node is down or out of reach."""
        seats, state = self.cluster.seats, self.cluster.log.state
        while not all(s.current and not s.current.dead and s.link.up and state.is_live(s.name) for s in seats):  # noqa: ASYNC110
            await trio.sleep(1)

    async def others(self) -> Life:
        """A daemon through which somebody else may look, while all nodes are there."""
        seats = self.cluster.seats
        lives = [s.current for s in seats if s.current is not None and not s.current.dead and s.link.up]
        state = self.cluster.log.state
        if len(lives) < len(seats) or not all(state.is_live(s.name) for s in seats):
            return await self.life()
        return self.random.choice(lives)

    # ---- the daemon
    async def born(self, nursery: trio.Nursery, after: Life | None = None) -> None:
        cluster = self.cluster
        pfs = SimPfs(cluster.store, cluster.faults, self.random, cluster.stepped, nursery)
        pfs.trace = self.trace
        life = Life(
            self.options, cluster.log, pfs, cluster.clock, self.random, after, self.link,
            lambda name: SimPeers(cluster, name), self.disk,
        )  # fmt: skip
        pfs.struck = lambda what, when: cluster.struck(self, life, what, when)
        life.node.choose_route = cluster.choose_route
        life.filesystem.kernel = self.kernel
        life.others = lambda: {*cluster.store.readers, *(of.fd for of in self.kernel.opens)}
        if after is not None:
            life.open_files, life.resume = self.kernel.open_files(), self.kernel.resume
        await nursery.start(life.run)
        self.current = life
        self._alive.set()
        self.trace("BORN")

    def forget(self, *, nvme: bool) -> None:
        """Power is gone: memory is empty, and perhaps the disk has gone with the node."""
        assert self.options.staging is not None
        assert self.options.nvme_directory is not None
        shutil.rmtree(self.options.staging)
        if nvme:
            shutil.rmtree(self.options.nvme_directory)

    def kill(self, *, supervised: bool) -> Life | None:
        """SIGKILL. Returns the daemon that the next one follows under the same supervisor."""
        life = self.current
        assert life is not None
        self.trace(f"KILL{' under a supervisor' if supervised else ''}")
        self._alive = trio.Event()
        life.kill(supervised=supervised)
        self.kernel.died(supervised=supervised)
        return life if supervised else None


class Cluster:
    """Two to four nodes."""

    events: Sequence[str] = ("kill", "kill", "cut", "faults", "away", "calm", "net", "part", "outage", "lose")
    seat: type[Seat] = Seat
    worker: type[Worker] = Worker
    memory_bytes = 1024 * MIB

    def __init__(self, seed: int, directory: str, *, trace: bool = False, fsync: str = "") -> None:
        self.seed, self.random, self._traces = seed, random.Random(seed), trace
        rng = self.random
        self.store, self.faults, self.log, self.clock = Store(), Faults(), Log(), SimClock()
        self.net = NetFaults()
        self.saves = Saves()
        self.checkers = Checkers(self.store, self.saves)
        self.checkers.alone = False
        self.checkers.kept.excused = True  # a lost member takes its checkpoint with it
        self.trouble = False
        self.cuts = self._numbers = self.losses = 0
        names = [f"n{number}" for number in range(rng.choice([2, 2, 3, 4]))]
        nodes = tuple(NodeAddress(name, "", 0) for name in names)
        fsync, workers = fsync or rng.choice(["partner", "returned", "pfs"]), rng.choice([1, 4])
        self.seats = [
            self.seat(
                self,
                name,
                MountOptions(
                    pfs="/pfs", mountpoint="/mnt", memory=self.memory_bytes,
                    staging=os.path.join(directory, name, "staging"),
                    nvme=os.path.join(directory, name, "nvme"), nodes=nodes, node=name, job="sim", fsync=fsync,
                    drain_workers=workers,
                ),
            )
            for name in names
        ]  # fmt: skip
        self._nursery: trio.Nursery | None = None

    def choose_route(self) -> str:
        return PARTNER

    def next_save(self) -> int:
        self._numbers += 1
        return self._numbers

    def trace(self, text: str) -> None:
        if self._traces:
            print(f"{trio.current_time():10.4f} {text}")

    def stepped(self, what: str) -> None:
        self.trace(f"PFS {what}")
        self.checkers.commit_last(what)

    def struck(self, seat: Seat, life: Life, what: str, when: str) -> None:
        """Before and after the effect of each step on the PFS. May kill, and raise then."""

    def life_of(self, name: str) -> Life | None:
        seat = next(s for s in self.seats if s.name == name)
        return seat.current if seat.current is not None and not seat.current.dead else None

    # ---- what happens
    async def _leases(self) -> None:
        """The catalogue forgets who is silent."""
        while True:
            await trio.sleep(1)
            for seat in self.seats:
                now_s = trio.current_time()
                if seat.current is not None and not seat.current.dead and seat.link.up:
                    seat.heard_s = now_s
                elif now_s - seat.heard_s > seat.options.node_timeout_s:
                    key = life_key(seat.name)
                    if self.log.state.entry(key) is not None:
                        self.trace(f"{seat.name} LEASE ENDS")
                        tx = Tx(self.log.state)
                        tx.delete(key)
                        self.log.append(tx.write)

    async def _suffer(self) -> None:
        rng = self.random
        for _ in range(rng.randrange(1, 10)):
            await trio.sleep(rng.choice([0.01, 0.1, 0.5, 2]) * rng.random())
            event = rng.choice(self.events)
            self.trace(event)
            self.trouble = self.trouble or event not in ("kill", "calm")
            await self.happen(event, rng.choice(self.seats))
        await trio.sleep(rng.choice([0.1, 5]))

    async def happen(self, event: str, seat: Seat) -> None:
        """One of ``events``."""
        rng, faults, net = self.random, self.faults, self.net
        if event == "kill":
            await self._kill(seat)
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
        elif event == "net":
            net.drop, net.slow = rng.choice([0, 0.1, 0.5]), rng.choice([0, 0, 0.05])
        elif event == "part":
            net.parted.add(frozenset(s.name for s in rng.sample(self.seats, 2)))
        elif event == "lose":
            await self._lose(seat)
        elif event == "outage":
            await self._outage(seat)
        else:
            self.calm()

    def calm(self) -> None:
        """No more faults."""
        self.faults.calm()
        self.net.calm()

    async def _calm_late(self) -> None:
        """No network is parted for ever: who waits for what only the other side has goes on."""
        while True:
            await trio.sleep(CALM_EVERY_S)
            self.calm()

    async def _kill(self, seat: Seat) -> None:
        assert self._nursery is not None
        after = seat.kill(supervised=self.random.random() < 0.5)
        await trio.sleep(self.random.choice([0.1, 1, 30]))
        await seat.born(self._nursery, after)

    async def _lose(self, seat: Seat) -> None:
        """A node goes with all that it held in memory, and comes back empty, or with what its disk had."""
        assert self._nursery is not None
        now_s, settled_s = trio.current_time(), seat.options.node_timeout_s + 5
        if any(now_s - other.lost_s < settled_s or not other.link.up for other in self.seats):
            return
        witness = self.random.choice([s.current for s in self.seats if s is not seat])
        assert witness is not None
        self.losses += 1
        seat.loss, seat.lost_s = self._what_is_there(witness), now_s
        seat.kill(supervised=False)
        await trio.testing.wait_all_tasks_blocked()
        nvme = self.random.random() < 0.5
        self.trace(f"{seat.name} LOST{' with its disk' if nvme else ''}")
        seat.forget(nvme=nvme)
        self.power_gone(seat)
        await trio.sleep(self.random.choice([0.5, 8, 30]))
        await seat.born(self._nursery)
        seat.lost_s = max(seat.lost_s, trio.current_time() - seat.options.node_timeout_s)

    def power_gone(self, seat: Seat) -> None:
        """Of what its disk had, if that is still there, the seed may choose what is left."""

    def _what_is_there(self, witness: Life) -> Loss:
        witness.catalogue._catch_up()
        view, found = witness.catalogue.view, {}
        for key, entry in view.items():
            content, inode = entry.record, view.inode(int(key[2:], 16)) if key.startswith(b"g/") else None
            if not isinstance(content, Generation) or inode is None:
                continue
            safe = witness.node.boundary(int(key[2:], 16), inode) >= Boundary.PARTNER
            for parent, name in view.names_of(int(key[2:], 16)):
                if (above := view.path(parent)) is not None:
                    found[above + b"/" + name if above else name] = (content.digest, safe)
        return Loss(found, self.faults.denied)

    async def _outage(self, seat: Seat) -> None:
        """A node does not reach the catalogue; its lease may end. It goes on by itself."""
        seat.link.set(up=False)
        try:
            await trio.sleep(self.random.choice([0.5, 5, 20]))
        finally:
            seat.link.set(up=True)

    async def _ask(self) -> None:
        while True:
            await trio.sleep(self.random.choice([0.02, 0.1, 1, 20]))
            life = self.life_of(self.random.choice(self.seats).name)
            if life is not None and life.catalogue.link.up:
                await life.call(lambda fs, life=life: self._claims(life))  # type: ignore[misc]

    async def _claims(self, life: Life) -> None:
        await self.checkers.claims(life)
        now_s = trio.current_time()
        if all(now_s - seat.lost_s > seat.options.node_timeout_s + 2 for seat in self.seats):  # noticed by all
            self.checkers.partner(life, {seat.name: seat.current for seat in self.seats if seat.current is not None})

    async def main(self) -> None:
        async with trio.open_nursery() as self._nursery:
            for seat in self.seats:
                await seat.born(self._nursery)
            clients = [self.worker(seat, b"c%d" % number) for number, seat in enumerate(self.seats[:3])]
            for client in clients:
                await client.start()
            async with trio.open_nursery() as suffering:
                suffering.start_soon(self._leases)
                suffering.start_soon(self._ask)
                suffering.start_soon(self._calm_late)
                async with trio.open_nursery() as working:
                    working.start_soon(self._suffer)
                    for client in clients:
                        working.start_soon(client.work, self.random.choice([10, 20, 30]))
                await self._end(clients)
                suffering.cancel_scope.cancel()
            self._nursery.cancel_scope.cancel()

    async def _rest(self, lives: list[Life], busy: Callable[[], bool]) -> None:
        """Wait until nothing is under way."""
        with trio.move_on_after(REST_S) as scope:
            while busy() or any(life.pfs.busy() for life in lives):  # noqa: ASYNC110
                await trio.sleep(1)
        if scope.cancelled_caught:
            why = {op.owner: self.life_of(op.owner) for _, op, _ in self.log.state.ops()}
            left = [
                (op.kind, op.path, op.owner, why_pending(life.parts.drainer, key))
                for key, op, _ in self.log.state.ops()
                if (life := why[op.owner]) is not None
            ]
            raise Violation(f"liveness: not on the PFS after {REST_S:.0f} s: {left[:5]}")

    async def _end(self, clients: list[Worker]) -> None:
        self.trace("CALM at the end")
        self.calm()
        lives = [await seat.life() for seat in self.seats]
        for client in clients:
            if client.world.loss is not None:  # its node was lost after its last step
                await client.settle()
        ops = self.log.state.ops
        await self._rest(lives, lambda: not all(life.parts.drainer.is_idle() for life in lives))
        for client in clients:  # members that were overwritten alone stay hidden until somebody saves again
            await client.save_again({op.path for _, op, _ in ops() if op.kind == OpKind.WITHDRAW})
        await self._rest(lives, lambda: self.log.state.op_count > 0)
        self.trouble = False
        await trio.sleep(60)
        contents = {}
        for client in clients:
            await client.verify()
            for path, node in client.tree.items():
                if node.kind == "f":
                    contents[client.base + b"/" + path] = node.data
        for life in lives:
            await life.catalogue.barrier()
            await self._claims(life)
            self.checkers.memory(life)
        self.checkers.same_tree(lives[0], contents)
        for life in lives:
            # What a node had prepared that came back with another memory is left to ``cachexfs recover``.
            self.checkers.nothing_left(life, cut=self.cuts > 0 or self.losses > 0)


class Routes(Cluster):
    """As ``Cluster``; each directory's files take either route."""

    def choose_route(self) -> str:
        return self.random.choice([PARTNER, DIRECT])
