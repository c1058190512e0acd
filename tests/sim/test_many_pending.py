"""What one more operation costs while much is pending and the PFS does not answer: as much as the first ones did."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import trio
import trio.testing
from sim_check import commit_file
from test_found import FILE, Scene, scene

from cachexfs.core.records import ROOT_FID
from cachexfs.engine.pfs_interface import PfsStat
from cachexfs.engine.turns import RETRIES_PER_S, Turns

FEW, MANY = 30, 240
SAMPLE = 10
GROWTH_MAX = 1.5

Operation = Callable[[int], Awaitable[object]]


async def held_open(scene: Scene) -> Operation:
    opened = await scene.passed(b"log")

    async def rewrite(number: int) -> None:
        await scene.fs.write(opened.handle, 0, b"%d" % number)
        await scene.fs.flush(opened.handle)  # as the close of a duplicate

    return rewrite


async def rewritten(scene: Scene) -> Operation:
    await scene.write(b"a", b"x")

    async def rewrite(number: int) -> None:
        handle = await scene.fs.open(await scene.ino(b"a"), os.O_WRONLY | os.O_TRUNC)
        await scene.fs.write(handle, 0, b"%d" % number)
        await scene.close(handle)

    return rewrite


async def new_files(scene: Scene) -> Operation:
    await scene.mkdir(b"d")
    return lambda number: scene.write(b"d/%d" % number, b"x")


async def replaced(scene: Scene) -> Operation:
    async def replace(number: int) -> None:
        await scene.write(b"a.tmp", b"%d" % number)
        await scene.rename(b"a.tmp", b"a")

    return replace


async def renamed(scene: Scene) -> Operation:
    await scene.write(b"0", b"x")
    return lambda number: scene.rename(b"%d" % number, b"%d" % (number + 1))


async def removed(scene: Scene) -> Operation:
    """Members of a checkpoint whose commit file is pending, too."""
    await scene.mkdir(b"s")
    for number in range(MANY + SAMPLE):
        await scene.write(b"s/%d" % number, b"x")
    await scene.write(b"s/.metadata", commit_file(1, {b"%d" % number: b"x" for number in range(MANY + SAMPLE)}))
    return lambda number: scene.unlink(b"s/%d" % number)


async def directories(scene: Scene) -> Operation:
    return lambda number: scene.mkdir(b"%d" % number)


async def checkpoints(scene: Scene) -> Operation:
    async def save(number: int) -> None:
        await scene.mkdir(b"%d" % number)
        await scene.write(b"%d/m" % number, b"x")
        await scene.write(b"%d/.metadata" % number, commit_file(number, {b"m": b"x"}))
        await scene.write(b"latest", b"%d" % number)
        await scene.fs.symlink(ROOT_FID, b"last.tmp", b"%d" % number, FILE)
        await scene.rename(b"last.tmp", b"last")

    return save


@pytest.mark.parametrize(
    "begin", [held_open, rewritten, new_files, replaced, renamed, removed, directories, checkpoints]
)
def test_an_operation_costs_the_same_however_much_is_pending(
    begin: Callable[[Scene], Awaitable[Operation]], counted: Callable[[], AbstractContextManager[list[int]]]
) -> None:
    @scene(fsync="returned", memory=1 << 30)
    async def grow(scene: Scene) -> None:
        scene.faults.away = True
        operation, costs, number = await begin(scene), [], 0
        for pending in (FEW, MANY):
            while number < pending:
                await operation(number)
                await trio.sleep(0.1)
                number += 1
            samples = []
            for _ in range(SAMPLE):
                with counted() as calls:
                    await operation(number)
                number += 1
                samples.append(calls[0])
            costs.append(min(samples))  # of those beside which least else ran
        assert costs[1] < GROWTH_MAX * costs[0]

    grow()


@scene(fsync="returned")
async def test_a_commit_file_is_not_read_after_each_member_that_is_removed(scene: Scene) -> None:
    members = {b"%d" % number: b"x" for number in range(20)}
    await scene.mkdir(b"s")
    for name, data in members.items():
        await scene.write(b"s/" + name, data)
    await scene.write(b"s/.metadata", commit_file(1, members))
    await scene.drained()
    completeness, read = scene.life.parts.completeness, [0]
    parse = completeness.commit_files._parse

    async def counted(tree: Any) -> Any:
        read[0] += 1
        return await parse(tree)

    completeness.commit_files._parse = counted  # type: ignore[method-assign]
    for name in members:
        await scene.unlink(b"s/" + name)
        await trio.sleep(0.5)
    assert scene.on_pfs(b"s/.metadata") is None
    assert read[0] <= 2


@scene(fsync="returned", memory=1 << 30)
async def test_what_waits_for_a_pfs_that_is_away_has_no_task(scene: Scene) -> None:
    """Each took 10 KiB, and all of them tried again and again."""
    scene.faults.away = True
    for number in range(300):
        await scene.write(b"%d" % number, b"x")
    for _ in range(100):
        await trio.sleep(1)
        nursery = scene.life.parts.drainer._nursery
        assert nursery is not None
        assert len(nursery.child_tasks) < 60
    scene.faults.away = False
    await scene.drained()
    assert all(scene.on_pfs(b"%d" % number) == b"x" for number in range(300))


@scene(fsync="returned")
async def test_a_file_that_takes_for_ever_holds_up_no_later_checkpoint(scene: Scene) -> None:
    prepare = scene.life.pfs.prepare

    async def slow(source: str, size: int, *arguments: Any, **options: Any) -> None:
        if size > 1000:
            await trio.sleep_forever()
        await prepare(source, size, *arguments, **options)

    scene.life.pfs.prepare = slow  # type: ignore[method-assign]
    await scene.mkdir(b"1")
    await scene.write(b"1/huge", bytes(2000))
    await trio.sleep(5)
    await scene.mkdir(b"2")
    await scene.write(b"2/m", b"x")
    await scene.write(b"2/.metadata", commit_file(1, {b"m": b"x"}))
    await trio.sleep(5)
    assert scene.on_pfs(b"2/.metadata") == commit_file(1, {b"m": b"x"})


@scene(fsync="returned")
async def test_a_directory_that_refuses_its_files_is_named_and_holds_up_no_other(scene: Scene) -> None:
    land = scene.life.pfs.land

    async def refusing(hidden: str, path: bytes, *arguments: Any, **options: Any) -> PfsStat:
        if path.startswith(b"closed/"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fsdecode(path))
        return await land(hidden, path, *arguments, **options)

    scene.life.pfs.land = refusing  # type: ignore[method-assign]
    for directory in (b"closed", b"open"):
        await scene.mkdir(directory)
    for number in range(40):
        await scene.write(b"closed/%d" % number, b"x")
    await scene.write(b"open/a", b"x")
    await trio.sleep(60)
    assert scene.on_pfs(b"open/a") == b"x"
    drainer = scene.life.parts.drainer
    refused = {op.path for key in drainer.progress.errors if (op := scene.life.catalogue.view.op(key)) is not None}
    assert refused == {b"closed/%d" % number for number in range(40)}
    scene.life.pfs.land = land  # type: ignore[method-assign]
    await scene.drained()
    assert drainer.progress.errors == {}


async def test_where_thousands_are_refused_each_is_tried_less_often(autojump_clock: trio.testing.MockClock) -> None:
    turns = Turns(4, lambda: False)
    began_s, count = trio.current_time(), 3000
    for number in range(count):
        key = b"%d" % number
        turns.state(key, ready=False).attempts.rest()
        turns.rest(key)
    rested = 0
    while rested < count:
        rested += len(await turns.rested())
    assert trio.current_time() - began_s > 0.9 * count / RETRIES_PER_S
