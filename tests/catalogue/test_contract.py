"""What ``Catalogue`` promises, on each implementation."""

from __future__ import annotations

import errno

import pytest
import trio
from catalogue_support import RandomWork, World, adder, creator, finder, inode, namer, remover, size_of

from cachexfs.core.records import (
    FID_STEP,
    ROOT_FID,
    AnyRecord,
    Dirent,
    dirent_key,
    dirent_prefix,
    inode_key,
)
from cachexfs.core.transaction import Tx
from cachexfs.errors import FsError

FID = 5 * FID_STEP
Done = list[tuple[bytes, AnyRecord | None, AnyRecord | None]]


async def test_of_all_who_create_a_name_one_succeeds(world: World) -> None:
    async with world.nodes(3) as nodes:
        won: list[tuple[int, int]] = []
        lost: list[int] = []

        async def create(number: int, attempt: int) -> None:
            fid = (number + 10) * FID_STEP
            try:
                won.append((attempt, await nodes[number % 3].mutate(creator(b"name%d" % attempt, fid))))
            except FsError as error:
                lost.append(error.errno)

        for attempt in range(10):
            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(create, number, attempt)
        assert [attempt for attempt, _ in won] == list(range(10))
        assert lost == [errno.EEXIST] * 50
        for node in nodes:
            await node.barrier()
            for attempt, fid in won:
                assert node.view.lookup(ROOT_FID, b"name%d" % attempt) == Dirent(fid, "f")


async def test_no_update_is_lost(world: World) -> None:
    async with world.nodes(2) as nodes:
        seen: list[int] = []

        async def add(number: int) -> None:
            for _ in range(15):
                seen.append(await nodes[number % 2].mutate(adder(FID)))

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(add, number)
        assert sorted(seen) == list(range(1, 91))  # each applied exactly once, on the result of another


async def test_the_view_includes_a_mutation_that_has_returned(world: World) -> None:
    async with world.nodes(2) as nodes:
        for number in range(20):
            await nodes[number % 2].mutate(adder(FID))
            assert size_of(nodes[number % 2], FID) == number + 1


async def test_a_barrier_sees_what_has_returned_on_another_node(world: World) -> None:
    async with world.nodes(2) as nodes:
        for number in range(30):
            await nodes[number % 2].mutate(namer(ROOT_FID, b"%d" % number, FID))
            other = nodes[1 - number % 2]
            await other.barrier()
            assert other.view.lookup(ROOT_FID, b"%d" % number) is not None


async def test_many_barriers_at_once_all_see_it(world: World) -> None:
    async with world.nodes(2) as nodes:

        async def look(number: int) -> None:
            await nodes[1].barrier()
            assert nodes[1].view.lookup(ROOT_FID, b"%d" % number) is not None

        async with trio.open_nursery() as nursery:
            for number in range(30):
                await nodes[0].mutate(namer(ROOT_FID, b"%d" % number, FID))
                nursery.start_soon(look, number)


async def test_a_refusal_is_current(world: World) -> None:
    """Without a barrier: what the other node's mutation made true is never refused as if it had not."""
    async with world.nodes(2) as nodes:
        for number in range(30):
            await nodes[0].mutate(namer(ROOT_FID, b"%d" % number, FID))
            assert await nodes[1].mutate(finder(ROOT_FID, b"%d" % number)) == Dirent(FID, "f")


async def test_a_refused_function_changes_nothing(world: World) -> None:
    async with world.nodes(2) as nodes:

        def refused(tx: Tx) -> None:
            tx.put(inode_key(FID), inode(99))
            raise FsError(errno.EPERM)

        def broken(tx: Tx) -> None:
            tx.put(inode_key(FID), inode(98))
            raise ZeroDivisionError

        async def refuse() -> None:
            with pytest.raises(FsError):
                await nodes[0].mutate(refused)

        async def fail() -> None:
            with pytest.raises(ZeroDivisionError):
                await nodes[0].mutate(broken)

        async with trio.open_nursery() as nursery:  # all may share one transaction
            for _ in range(3):
                nursery.start_soon(nodes[0].mutate, adder(FID))
                nursery.start_soon(refuse)
                nursery.start_soon(fail)
        await nodes[1].barrier()
        assert size_of(nodes[1], FID) == 3


async def test_functions_of_one_node_are_applied_in_the_order_of_their_calls(world: World) -> None:
    async with world.nodes(1) as (node,):
        called: list[int] = []
        before: dict[int, int] = {}

        async def put(number: int) -> None:
            def function(tx: Tx) -> int:
                found = tx.inode(FID)
                tx.put(inode_key(FID), inode(number))
                return found.size if found else -1

            called.append(number)
            before[number] = await node.mutate(function)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(put, number)
        assert [before[number] for number in called] == [-1, *called[:-1]]


async def test_listeners_hear_every_change_once_in_order(world: World) -> None:
    async with world.nodes(2) as nodes:
        heard: list[tuple[bytes, AnyRecord | None, AnyRecord | None]] = []
        model = {key: entry.record for key, entry in nodes[1].view.items()}
        revisions: list[int] = []

        def listen(done: Done) -> None:
            revisions.append(nodes[1].view.revision)
            for key, old, new in done:
                assert model.get(key) == old
                model.pop(key, None)
                if new is not None:
                    model[key] = new
                assert (nodes[1].view.entry(key) is None) == (new is None)
            heard.extend(done)

        nodes[1].listen(listen)
        for number in range(20):
            await nodes[number % 2].mutate(adder(FID))
            await nodes[number % 2].mutate(namer(ROOT_FID, b"%d" % number, FID))
        await nodes[0].mutate(remover(inode_key(FID)))
        await nodes[1].barrier()
        sizes = [new.size if new else None for key, _, new in heard if key == inode_key(FID)]  # type: ignore[union-attr]
        assert sizes == [*range(1, 21), None]
        assert revisions == sorted(set(revisions))
        assert model == {key: entry.record for key, entry in nodes[1].view.items()}


async def test_a_directory_is_removed_or_gets_a_file_never_both(world: World) -> None:
    async with world.nodes(2) as nodes:
        for attempt in range(12):
            directory = (100 + attempt) * FID_STEP
            await nodes[0].mutate(adder(directory))
            done: list[str] = []

            async def remove(directory: int = directory, done: list[str] = done) -> None:
                def function(tx: Tx) -> None:
                    tx.read(inode_key(directory))
                    if not tx.require_empty(dirent_prefix(directory)):
                        raise FsError(errno.ENOTEMPTY)
                    tx.delete(inode_key(directory))

                try:
                    await nodes[0].mutate(function)
                    done.append("removed")
                except FsError as error:
                    done.append(errno.errorcode[error.errno])

            async def create(directory: int = directory, done: list[str] = done) -> None:
                def function(tx: Tx) -> None:
                    if tx.peek(inode_key(directory)) is None:
                        raise FsError(errno.ENOENT)
                    tx.require_same(inode_key(directory))
                    tx.put(dirent_key(directory, b"file"), Dirent(FID, "f"))

                try:
                    await nodes[1].mutate(function)
                    done.append("created")
                except FsError as error:
                    done.append(errno.errorcode[error.errno])

            await nodes[1].barrier()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(create)
                nursery.start_soon(remove)
            assert sorted(done) in (["ENOENT", "removed"], ["ENOTEMPTY", "created"])


async def test_emptiness_is_current(world: World) -> None:
    """Neither a refusal for a name that is gone, nor a removal past a name that has come."""
    async with world.nodes(2) as nodes:

        def is_empty(tx: Tx) -> bool:
            return tx.require_empty(dirent_prefix(FID))

        for number in range(10):
            await nodes[0].mutate(namer(FID, b"%d" % number, ROOT_FID))
            assert not await nodes[1].mutate(is_empty)
            await nodes[0].mutate(remover(dirent_key(FID, b"%d" % number)))
            assert await nodes[1].mutate(is_empty)


async def test_the_last_name_and_its_directory_may_go_in_one_transaction(world: World) -> None:
    async with world.nodes(1) as (node,):
        await node.mutate(namer(FID, b"a", ROOT_FID))

        def remove_all(tx: Tx) -> bool:
            tx.delete(dirent_key(FID, b"a"))
            return tx.require_empty(dirent_prefix(FID))

        assert await node.mutate(remove_all)
        assert not node.view.children(FID)


async def test_a_cancelled_call_leaves_the_others_alone(world: World) -> None:
    async with world.nodes(2) as nodes:
        for number in range(20):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    for _ in range(3):
                        nursery.start_soon(nodes[0].mutate, adder(2 * FID))
                        nursery.start_soon(nodes[0].barrier)
                    for _ in range(number % 5):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            await nodes[0].mutate(adder(FID))
        await nodes[1].barrier()
        assert size_of(nodes[1], FID) == 20
        assert size_of(nodes[1], 2 * FID) <= 60


async def test_a_node_that_starts_again_finds_everything(world: World) -> None:
    async with world.nodes(2) as nodes:
        for number in range(300):
            await nodes[0].mutate(namer(ROOT_FID, b"%d" % number, FID))
        await nodes[0].mutate(remover(dirent_key(ROOT_FID, b"7")))
        await nodes[0].mutate(adder(FID))
        await nodes[0].barrier()
        before = {key: entry for key, entry in nodes[0].view.items() if not key.startswith(b"l/")}
        published = nodes[0].view.revision
    async with world.nodes(1) as (node,):
        assert {key: entry for key, entry in node.view.items() if not key.startswith(b"l/")} == before
        assert list(node.view.children(ROOT_FID)) == [b"%d" % number for number in range(300) if number != 7]
        await node.mutate(adder(FID))
        entry = node.view.entry(inode_key(FID))
        assert entry is not None
        assert entry.modified > published
        assert entry.created == before[inode_key(FID)].created


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_thousand_random_transactions_are_serialisable(world: World, seed: int) -> None:
    """Replayed in the order of revisions on a plain dict, each had read what the dict holds."""
    work = RandomWork(seed)
    async with world.nodes(2) as nodes:
        async with trio.open_nursery() as nursery:
            for worker in range(8):
                nursery.start_soon(work.run, nodes[worker % 2], worker, 125)
        for node in nodes:
            await node.barrier()
            work.check(node)
    assert len(work.returned) + work.refused == 1000
