"""What happens between nodes, a scene each: the real engines on one simulated catalogue."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
import trio.testing
from sim_check import commit_file
from sim_cluster import Cluster
from sim_pfs import Faults
from sim_run import inline_threads

from cachexfs.core.changes import NewAttrs
from cachexfs.core.records import ROOT_FID, OpKind
from cachexfs.engine.drain_reasons import why_pending
from cachexfs.engine.filesystem import Filesystem
from cachexfs.engine.owners import FENCE_S

FILE, DIRECTORY = NewAttrs(0o644, 0, 0), NewAttrs(0o755, 0, 0)
SEEDS = {2: 1, 3: 5}  # number of nodes -> a seed that gives so many


class Pair(Cluster):
    """Two nodes, or three, to which only the scene does something; fsync waits for the partner."""

    async def play(self, scene: Callable[[Pair], Awaitable[None]]) -> None:
        async with trio.open_nursery() as self._nursery:
            for seat in self.seats:
                seat.kernel.passthrough = True
                await seat.born(self._nursery)
            await self.fs(0).names(ROOT_FID)
            self.faults.away = True  # what is asked here is asked of the nodes
            self._nursery.start_soon(self._leases)
            await scene(self)
            self._nursery.cancel_scope.cancel()

    def fs(self, number: int) -> Filesystem:
        life = self.seats[number].current
        assert life is not None
        return life.filesystem

    async def lose(self, number: int, away_s: float) -> None:
        """A node goes with all that it had, and comes back empty."""
        assert self._nursery is not None
        self.seats[number].kill(supervised=False)
        await trio.testing.wait_all_tasks_blocked()
        self.seats[number].forget(nvme=True)
        await trio.sleep(away_s)
        await self.seats[number].born(self._nursery)

    async def write(self, number: int, directory: int, name: bytes, data: bytes) -> None:
        handle, _ = await self.fs(number).create(directory, name, FILE, os.O_WRONLY)
        await self.fs(number).write(handle, 0, data)
        await self.fs(number).flush(handle)
        await self.fs(number).release(handle)

    async def read(self, number: int, name: bytes) -> bytes:
        fs = self.fs(number)
        handle = await fs.open((await fs.lookup(ROOT_FID, name)).ino, os.O_RDONLY)
        try:
            return await fs.read(handle, 0, 1 << 20)
        finally:
            await fs.release(handle)


def play(scene: Callable[[Pair], Awaitable[None]], nodes: int = 2) -> None:
    with tempfile.TemporaryDirectory() as directory, inline_threads(1):
        pair = Pair(SEEDS[nodes], directory, fsync="partner")
        assert len(pair.seats) == nodes
        trio.run(pair.play, scene, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("away_s", [1.0, 60.0])
def test_what_was_fsynced_is_there_however_soon_its_lost_node_is_replaced(away_s: float) -> None:
    """Before its lease has ended nobody has taken over, and the newcomer forgot what it did not know."""

    async def scene(pair: Pair) -> None:
        handle, _ = await pair.fs(0).create(ROOT_FID, b"a", FILE, os.O_WRONLY)
        await pair.fs(0).write(handle, 0, b"safe at the partner")
        await pair.fs(0).fsync(handle)
        await pair.lose(0, away_s)
        await trio.sleep(60)
        assert await pair.read(1, b"a") == b"safe at the partner"

    play(scene)


@pytest.mark.parametrize("replicated", [True, False])
def test_what_a_lost_node_has_removed_holds_nothing_up(*, replicated: bool) -> None:
    """A commit file waited for bytes that their own node did not have any more, and nobody else brought them."""

    async def scene(pair: Pair) -> None:
        members = {b"m": b"member"}
        directory = (await pair.fs(0).mkdir(ROOT_FID, b"d", DIRECTORY)).ino
        if not replicated:
            pair.net.parted.add(frozenset(["n0", "n1"]))
        await pair.write(0, directory, b"m", members[b"m"])
        pair.saves.made[commit_file(1, members)] = members
        await pair.write(1, directory, b".metadata.tmp", commit_file(1, members))
        await pair.fs(1).rename(directory, b".metadata.tmp", directory, b".metadata", 0)
        await trio.sleep(5)
        await pair.fs(0).unlink(directory, b"m")
        await pair.lose(0, 1.0)
        pair.net.calm()
        pair.faults.away = False
        with trio.fail_after(300):
            while pair.log.state.op_count:  # noqa: ASYNC110
                await trio.sleep(1)
        there = pair.store.find(b"d")
        assert there is not None
        assert there.entries == {}

    play(scene)


def test_a_commit_file_that_was_not_to_land_and_is_removed_leaves_no_name() -> None:
    """It lay under its temporary name, from which the rename that was given up did not take it."""

    async def scene(pair: Pair) -> None:
        members = {b"m": b"member"}
        directory = (await pair.fs(0).mkdir(ROOT_FID, b"d", DIRECTORY)).ino
        pair.net.parted.add(frozenset(["n0", "n1"]))
        await pair.write(0, directory, b"m", members[b"m"])
        pair.saves.made[commit_file(1, members)] = members
        owner = pair.seats[0].current
        assert owner is not None
        prepare = owner.pfs.prepare

        async def not_the_member(source: str, size: int, *args: Any, **options: Any) -> None:
            if size == len(members[b"m"]):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            await prepare(source, size, *args, **options)

        owner.pfs.prepare = not_the_member  # type: ignore[method-assign]
        pair.faults.away = False
        await pair.write(0, directory, b".metadata.tmp", commit_file(1, members))
        await pair.fs(0).rename(directory, b".metadata.tmp", directory, b".metadata", 0)
        await trio.sleep(5)
        pair.faults.away = True
        there = pair.store.find(b"d")
        assert there is not None
        assert list(there.entries) == [b".metadata.tmp"]
        await pair.lose(0, 1.0)
        pair.net.calm()
        slots = pair.fs(0).parts.drainer._meta_slots
        borrowers = [object() for _ in range(int(slots.total_tokens))]
        for borrower in borrowers:
            await slots.acquire_on_behalf_of(borrower)
        pair.faults.away = False
        await pair.fs(1).unlink(directory, b"m")
        await trio.sleep(5)
        assert [op.cancelled for _, op, _ in pair.log.state.ops() if op.kind == OpKind.RENAME] == [True]
        await pair.fs(1).unlink(directory, b".metadata")
        await trio.sleep(1)
        for borrower in borrowers:
            slots.release_on_behalf_of(borrower)
        with trio.fail_after(300):
            while pair.log.state.op_count:  # noqa: ASYNC110
                await trio.sleep(1)
        assert there.entries == {}

    play(scene)


def test_a_temporary_commit_file_that_another_one_replaced_is_not_wanted_by_the_next() -> None:
    async def scene(pair: Pair) -> None:
        directory = (await pair.fs(0).mkdir(ROOT_FID, b"d", DIRECTORY)).ino
        for number in range(3):
            pair.saves.made[commit_file(number, {})] = {}
            await pair.write(0, directory, b".metadata.tmp", commit_file(number, {}))
            await pair.fs(0).rename(directory, b".metadata.tmp", directory, b".metadata", 0)
        puts = [(key, op) for key, op, _ in pair.log.state.ops() if op.kind == OpKind.PUT]
        drainer = pair.fs(1).parts.drainer
        await pair.fs(1).names(directory)
        assert [drainer.puts.unneeded(key, op) for key, op in puts] == [True, True, False]

    play(scene)


def test_the_drains_of_a_node_that_lost_its_memory_are_carried_out_by_those_that_have_the_bytes() -> None:
    """They waited for the bytes to come back to their node, which never got them: two others had them."""

    async def scene(pair: Pair) -> None:
        await pair.write(0, ROOT_FID, b"a", b"of node 0")
        await trio.sleep(5)
        await pair.lose(0, 60.0)
        pair.faults.away = False
        with trio.fail_after(300):
            while pair.log.state.op_count:  # noqa: ASYNC110
                await trio.sleep(1)
        found = pair.store.find(b"a")
        assert found is not None
        assert found.data == b"of node 0"

    play(scene, nodes=3)


@pytest.mark.parametrize("away_s", [1.0, 60.0])
@pytest.mark.parametrize("saved_again", [True, False])
@pytest.mark.parametrize("moved", [True, False])
def test_lost_bytes_that_have_been_overwritten_hold_nothing_up(
    *, away_s: float, saved_again: bool, moved: bool
) -> None:
    """Their own node tried for ever to land what only it had had, and all later changes waited for that.

    A survivor that has taken over lands them: its replicas are there until then.
    """

    async def scene(pair: Pair) -> None:
        fs = pair.fs(0)
        directory = (await fs.mkdir(ROOT_FID, b"d", DIRECTORY)).ino
        name = b"k" if moved else b"m"

        async def commit(number: int, members: dict[bytes, bytes]) -> None:
            pair.saves.made[commit_file(number, members)] = members
            await pair.write(0, directory, b".metadata.tmp", commit_file(number, members))
            await fs.rename(directory, b".metadata.tmp", directory, b".metadata", 0)

        await pair.write(0, directory, b"m", b"old")
        if moved:
            await fs.rename(directory, b"m", directory, name, 0)
        await commit(1, {name: b"old"})
        handle = await fs.open((await fs.lookup(directory, name)).ino, os.O_WRONLY | os.O_TRUNC)
        await fs.write(handle, 0, b"newer")
        await fs.flush(handle)
        await fs.release(handle)
        if saved_again:
            await commit(2, {name: b"newer"})
        await trio.sleep(5)
        await pair.lose(0, away_s)
        pair.faults.away = False
        held = away_s > 10 and not saved_again  # the first checkpoint is whole there, and the new bytes are ready
        with trio.fail_after(300):
            while any(not (held and pair.fs(1).parts.drainer.waits.is_held(key)) for key, _, _ in pair.log.state.ops()):  # noqa: ASYNC110
                await trio.sleep(1)
        there = pair.store.find(b"d")
        assert there is not None
        wanted = {name: b"newer"}
        if held:
            wanted = {name: b"old", b".metadata": commit_file(1, {name: b"old"})}
        elif saved_again:
            wanted[b".metadata"] = commit_file(2, wanted)
        assert {found: ino.data for found, ino in there.entries.items()} == wanted

    play(scene)


def test_a_node_that_is_cut_off_leaves_the_pfs_to_those_that_took_over() -> None:
    """It removed a file late that a survivor had landed after its removal."""

    async def scene(pair: Pair) -> None:
        pair.faults.away = False
        await pair.write(0, ROOT_FID, b"a", b"old")
        await trio.sleep(60)
        pair.faults.away = True
        await pair.fs(0).unlink(ROOT_FID, b"a")
        await trio.sleep(1)
        pair.seats[0].link.set(up=False)
        await trio.sleep(20)  # its lease has ended
        cut_off = pair.seats[0].current
        assert cut_off is not None
        cut_off.pfs.dead = True  # what it begins from now on comes late
        pair.faults.away = False
        await pair.write(1, ROOT_FID, b"a", b"new")
        await trio.sleep(150)
        cut_off.pfs.dead = False
        await trio.sleep(30)
        found = pair.store.find(b"a")
        assert found is not None
        assert found.data == b"new"

    play(scene)


@pytest.mark.parametrize("replaced", [True, False])
def test_a_node_that_is_cut_off_while_it_copies_lands_nothing_late_and_leaves_nothing(*, replaced: bool) -> None:
    """It had begun in time: it landed what a survivor had landed, and removed, or left its copy under a hidden name."""

    async def scene(pair: Pair) -> None:
        cut_off = pair.seats[0].current
        assert cut_off is not None
        gate, prepare = trio.Event(), cut_off.pfs.prepare

        async def gated(*args: Any, **options: Any) -> None:
            await gate.wait()
            await prepare(*args, **options)

        cut_off.pfs.prepare = gated  # type: ignore[method-assign]
        pair.faults.away = False
        await pair.write(0, ROOT_FID, b"a", b"old")
        await trio.sleep(1)
        pair.seats[0].link.set(up=False)
        await trio.sleep(30)  # a survivor has landed it
        if replaced:
            await pair.fs(1).unlink(ROOT_FID, b"a")
            await pair.write(1, ROOT_FID, b"a", b"new")
            await trio.sleep(30)
        gate.set()
        await trio.sleep(30)
        found = pair.store.find(b"a")
        assert found is not None
        assert found.data == (b"new" if replaced else b"old")
        pair.seats[0].link.set(up=True)
        await trio.sleep(60)
        assert pair.store.tmp.entries == {}

    play(scene)


def test_who_waited_for_its_turn_copies_nothing_that_is_another_nodes_by_then() -> None:
    """It landed under the old name what the other one had landed and renamed."""

    async def scene(pair: Pair) -> None:
        first, last = pair.seats[0].current, pair.seats[2].current
        assert first is not None
        assert last is not None
        copied: list[str] = []
        gate = trio.Event()

        async def others(*args: Any, **options: Any) -> None:
            copied.append("n0")
            await gate.wait()

        async def mine(*args: Any, **options: Any) -> None:
            copied.append("n2")

        first.pfs.prepare, last.pfs.prepare = others, mine  # type: ignore[method-assign]
        pair.faults.away = False
        pair.seats[1].current.pfs.prepare = mine  # type: ignore[union-attr, method-assign]
        async with AsyncExitStack() as slots:
            for _ in range(last.parts.node.options.drain_workers):
                await slots.enter_async_context(last.parts.drainer._copy_slots.slot((0, b"")))
            pair.faults.away = True
            await pair.write(1, ROOT_FID, b"a", b"of node 1")
            await trio.sleep(0.5)
            copied.clear()
            pair.seats[1].kill(supervised=False)
            await trio.sleep(60)
            assert copied == ["n0"]
        await trio.sleep(5)
        assert copied == ["n0"]
        gate.set()

    play(scene, nodes=3)


@pytest.mark.parametrize("removed", [True, False])
def test_what_another_node_does_just_after_a_publication_is_not_taken_for_it(*, removed: bool) -> None:
    """A close asked the catalogue what it had made, when that was gone or another node's content."""

    async def scene(pair: Pair) -> None:
        await pair.write(0, ROOT_FID, b"a", b"old")
        found = await pair.fs(0).lookup(ROOT_FID, b"a")
        handle = await pair.fs(0).open(found.ino, os.O_WRONLY)
        await pair.fs(0).write(handle, 0, b"one")
        catalogue = pair.fs(0).node.catalogue
        mutate = catalogue.mutate

        async def overtaken(change: Any) -> Any:
            catalogue.mutate = mutate  # type: ignore[method-assign]
            done = await mutate(change)
            if removed:
                await pair.fs(1).unlink(ROOT_FID, b"a")
            else:
                other = await pair.fs(1).open((await pair.fs(1).lookup(ROOT_FID, b"a")).ino, os.O_WRONLY)
                await pair.fs(1).write(other, 0, b"two")
                await pair.fs(1).flush(other)
                await pair.fs(1).release(other)
            await catalogue.barrier()
            return done

        catalogue.mutate = overtaken  # type: ignore[method-assign]
        await pair.fs(0).flush(handle)
        await pair.fs(0).release(handle)
        if removed:
            assert await pair.fs(0).names(ROOT_FID) == []
        else:
            assert await pair.read(0, b"a") == b"two"

    play(scene)


def test_of_two_writers_one_wins_whole_and_the_other_is_told() -> None:
    async def scene(pair: Pair) -> None:
        handles = []
        first, _ = await pair.fs(0).create(ROOT_FID, b"a", FILE, os.O_WRONLY)
        await pair.fs(0).write(first, 0, b"0" * 5000)
        await pair.fs(0).flush(first)
        await pair.fs(0).release(first)
        for number in range(2):
            found = await pair.fs(number).lookup(ROOT_FID, b"a")
            handles.append(await pair.fs(number).open(found.ino, os.O_WRONLY))
        for at in range(0, 5000, 1000):
            for number in range(2):
                await pair.fs(number).write(handles[number], at, b"AB"[number : number + 1] * 1000)
        for number in range(2):
            await pair.fs(number).flush(handles[number])
            await pair.fs(number).release(handles[number])
        for number in range(2):
            assert await pair.read(number, b"a") == b"B" * 5000
        told = await pair.fs(1).xattrs((await pair.fs(1).lookup(ROOT_FID, b"a")).ino)
        assert b"was replaced without having been seen" in told[b"user.cachex.error"]

    play(scene)


def test_truncate_is_seen_everywhere_though_the_release_of_a_closed_writer_is_on_its_way() -> None:
    """It was left to that RELEASE to publish, and until then others read the old bytes."""

    async def scene(pair: Pair) -> None:
        handle, found = await pair.fs(0).create(ROOT_FID, b"a", FILE, os.O_WRONLY)
        await pair.fs(0).write(handle, 0, b"old")
        await pair.fs(0).flush(handle)
        await pair.fs(0).setattr(found.ino, None, size=1)
        assert await pair.read(1, b"a") == b"o"
        await pair.fs(0).release(handle)
        assert await pair.read(1, b"a") == b"o"

    play(scene)


class _After(random.Random):
    """What hangs takes effect late; the rest is chosen as ever."""

    def choice(self, options: Any) -> Any:
        return "after" if options == ["never", "before", "after"] else super().choice(options)

    def uniform(self, a: float, b: float) -> float:
        return b


@pytest.mark.parametrize("kind", ["unlink", "rename"])
def test_a_call_that_hangs_on_a_node_which_was_cut_off_hits_nothing_newer(*, kind: str) -> None:
    """A survivor had taken over, and what was landed since under the same name went with the late call."""

    async def scene(pair: Pair) -> None:
        cut_off, survivor = pair.seats[0].current, pair.seats[1].current
        assert cut_off is not None
        assert survivor is not None
        pair.faults.away = False
        await pair.write(0, ROOT_FID, b"a", b"old")
        await trio.sleep(60)
        cut_off.pfs.faults, cut_off.pfs._rng = Faults(away=True), _After(1)  # hangs for this node alone
        if kind == "unlink":
            await pair.fs(0).unlink(ROOT_FID, b"a")
        else:
            await pair.fs(0).rename(ROOT_FID, b"a", ROOT_FID, b"b", 0)
        await trio.sleep(1)
        pair.seats[0].link.set(up=False)
        await trio.sleep(15)  # its lease has ended
        await pair.write(1, ROOT_FID, b"a", b"new")
        waits = survivor.parts.drainer
        assert any("late" in why_pending(waits, key) for key, op in waits.own_pending() if op.kind == kind)
        await trio.sleep(200)
        assert pair.log.state.op_count == 0
        found = {name: ino.data for name, ino in pair.store.root.entries.items() if ino.kind == "f"}
        assert found == ({b"a": b"new"} if kind == "unlink" else {b"a": b"new", b"b": b"old"})
        pair.seats[0].link.set(up=True)
        await trio.sleep(60)
        assert {name: ino.data for name, ino in pair.store.root.entries.items() if ino.kind == "f"} == found

    play(scene)


def test_a_directory_whose_times_a_lost_node_was_setting_keeps_nothing_pending() -> None:
    """The root's times waited for that node's late calls, and with them whoever waited for an idle drain."""

    async def scene(pair: Pair) -> None:
        first = pair.seats[0].current
        assert first is not None
        run, asked = first.pfs.run, trio.Event()

        async def hung(kind: str, *args: Any, **options: Any) -> None:
            if kind == "attr":
                asked.set()
                await trio.sleep_forever()
            await run(kind, *args, **options)

        pair.faults.away = False
        await pair.write(0, ROOT_FID, b"a", b"bytes")
        await trio.sleep(60)
        first.pfs.run = hung  # type: ignore[method-assign]
        await pair.fs(0).unlink(ROOT_FID, b"a")
        with trio.fail_after(30):
            await asked.wait()
        pair.seats[0].kill(supervised=False)
        with trio.fail_after(FENCE_S / 2):
            while pair.log.state.op_count:  # noqa: ASYNC110
                await trio.sleep(1)

    play(scene)


def test_two_nodes_never_carry_out_one_operation() -> None:
    """A survivor that had taken over removed late what the owner, back again, had landed since."""

    async def scene(pair: Pair) -> None:
        owner, survivor = pair.seats[0].current, pair.seats[1].current
        assert owner is not None
        assert survivor is not None
        pair.faults.away = False
        await pair.write(0, ROOT_FID, b"a", b"old")
        await trio.sleep(60)
        slots = owner.parts.drainer._meta_slots
        borrowers = [object() for _ in range(int(slots.total_tokens))]
        for borrower in borrowers:
            await slots.acquire_on_behalf_of(borrower)
        gate, run = trio.Event(), survivor.pfs.run

        async def gated(*args: Any) -> None:
            await gate.wait()
            await run(*args)

        survivor.pfs.run = gated  # type: ignore[method-assign]
        await pair.fs(0).unlink(ROOT_FID, b"a")
        pair.seats[0].link.set(up=False)
        await trio.sleep(15)  # its lease has ended, and it had not begun
        pair.seats[0].link.set(up=True)
        for borrower in borrowers:
            slots.release_on_behalf_of(borrower)
        await pair.write(0, ROOT_FID, b"a", b"new")
        await trio.sleep(30)
        assert owner.parts.drainer.own_pending() != []  # what is new waits for the other's removal
        gate.set()
        await trio.sleep(60)
        found = pair.store.find(b"a")
        assert found is not None
        assert found.data == b"new"

    play(scene)


def test_what_a_passed_writer_changes_in_place_is_not_called_safe_meanwhile() -> None:
    """The copy of its own node was not what had been published any more, and the partner's was the only one."""

    async def scene(pair: Pair) -> None:
        kernel, opened = pair.seats[0].kernel, None
        while opened is None or not opened.passed:  # the supervisor refuses now and then
            name = b"a%d" % pair.next_save()
            handle, _ = await pair.fs(0).create(ROOT_FID, name, FILE, os.O_WRONLY)
            opened = kernel.opened(pair.seats[0].current.filesystem, handle)  # type: ignore[union-attr]

        async def stage() -> str:
            fs = pair.fs(1)
            return (await fs.xattrs((await fs.lookup(ROOT_FID, name)).ino))[b"user.cachex.stage"].decode()

        kernel.write(opened, 0, b"first")
        await pair.fs(0).fsync(opened.handle)
        await pair.fs(0).flush(opened.handle)  # a duplicate is closed
        assert await stage() == "partner"
        kernel.write(opened, 0, b"F")
        await trio.sleep(1)
        assert await stage() == "writing"
        await pair.fs(0).flush(opened.handle)
        kernel.closed(opened)
        await pair.fs(0).release(opened.handle)
        await trio.sleep(5)
        assert await stage() == "partner"
        assert await pair.read(1, name) == b"First"

    play(scene)


@pytest.mark.parametrize("away_s", [1.0, 60.0])
@pytest.mark.parametrize("partner_dies", [False, True])
def test_a_copy_that_its_lost_sender_had_not_recorded_is_found(away_s: float, *, partner_dies: bool) -> None:
    """The partner had committed it; the file was called lost, though everybody could read it, and never landed."""

    async def scene(pair: Pair) -> None:
        sender = pair.seats[0].current
        assert sender is not None
        assert sender.node.peers is not None
        commit, committed = sender.node.peers.commit, trio.Event()

        async def unheard(*args: Any) -> str:
            await commit(*args)
            committed.set()
            await trio.sleep_forever()
            return ""

        sender.node.peers.commit = unheard  # type: ignore[method-assign]
        await pair.write(0, ROOT_FID, b"a", b"only the partner has it")
        await committed.wait()
        await pair.lose(0, away_s)
        if partner_dies:
            pair.seats[1].kill(supervised=False)
            await trio.sleep(1)
            assert pair._nursery is not None
            await pair.seats[1].born(pair._nursery)
        await trio.sleep(60)
        life = pair.seats[1].current
        assert life is not None
        assert (await life.parts.attributes.of((await pair.fs(1).lookup(ROOT_FID, b"a")).ino))["stage"] == "partner"
        pair.faults.away = False
        with trio.fail_after(300):
            while pair.log.state.op_count:  # noqa: ASYNC110
                await trio.sleep(1)
        there = pair.store.find(b"a")
        assert there is not None
        assert there.data == b"only the partner has it"

    play(scene)


@pytest.mark.parametrize("is_on_pfs", [False, True])
def test_a_partner_that_did_not_hear_of_a_rename_is_told_again(*, is_on_pfs: bool) -> None:
    """Its next daemon lives in the catalogue before it listens: after the loss of all the file had its old name."""

    async def scene(pair: Pair) -> None:
        partner = pair.seats[1].current
        assert partner is not None
        assert partner.store is not None
        pair.faults.away = not is_on_pfs
        await pair.write(0, ROOT_FID, b"old", b"bytes")
        await trio.sleep(60)
        pair.faults.away = True
        pair.net.drop = 1.0
        await pair.fs(0).rename(ROOT_FID, b"old", ROOT_FID, b"new", 0)
        await trio.sleep(1)
        pair.net.calm()
        await trio.sleep(1)
        assert [found.path for found in partner.store.list()] == [b"new"]

    play(scene)
