"""The last whole checkpoint on the PFS stays there until the next one has landed, however fast they are removed."""

from __future__ import annotations

import errno

import pytest
import trio
from sim_check import commit_file
from test_found import Scene, scene

from cachexfs.core.records import OpKind

NAMES = commit_file(1, {b"m": b"one"})
HUNG_S = 5.0
ORDERS = [(b"m", b".metadata"), (b".metadata", b"m")]


async def save(scene: Scene, directory: bytes, made_in: bytes = b"") -> None:
    await scene.mkdir(made_in or directory)
    await scene.write((made_in or directory) + b"/m", b"one")
    await scene.write((made_in or directory) + b"/new", NAMES)
    await scene.rename((made_in or directory) + b"/new", (made_in or directory) + b"/.metadata")
    if made_in:
        await scene.rename(made_in, directory)


async def remove(scene: Scene, directory: bytes, order: tuple[bytes, ...] = ORDERS[0]) -> None:
    for name in order:
        await scene.unlink(directory + b"/" + name)
    await scene.fs.rmdir(*await scene.place(directory))


def whole(scene: Scene, directory: bytes) -> bool:
    return scene.on_pfs(directory + b"/m") == b"one" and scene.on_pfs(directory + b"/.metadata") == NAMES


async def removals_only(scene: Scene) -> None:
    """The PFS answers again; what is written to it hangs for a while."""
    scene.faults.stuck.add("sync tmp")
    scene.faults.away = False
    await trio.sleep(HUNG_S)
    scene.faults.calm()


def rotation(scene: Scene) -> set[bytes]:
    """How many are whole on the PFS at each step of each call; those in the set were at one time."""
    seen = set[bytes]()

    def before(step: str) -> None:
        now = {b"s%d" % number for number in range(9) if whole(scene, b"s%d" % number)}
        assert now, f"before {step} there is none"
        seen.update(now)

    scene.before = before
    return seen


@pytest.mark.parametrize("made_in", [b"", b"tmp"])
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_removed_before_it_lands_takes_no_earlier_one_with_it(order: tuple[bytes, ...], made_in: bytes) -> None:
    @scene()
    async def rotate(scene: Scene) -> None:
        await save(scene, b"s0", made_in)
        await scene.drained()
        seen = rotation(scene)
        scene.faults.away = True
        for number in range(1, 6):
            await save(scene, b"s%d" % number, made_in)
            await remove(scene, b"s%d" % (number - 1), order)
        await removals_only(scene)
        await scene.drained()
        assert seen == {b"s0", b"s5"}
        assert [scene.on_pfs(b"s%d/m" % number) for number in range(5)] == [None] * 5
        assert scene.left() == []

    rotate()


def test_the_daemon_may_die_meanwhile() -> None:
    @scene()
    async def rotate(scene: Scene) -> None:
        await save(scene, b"s0")
        await scene.drained()
        seen = rotation(scene)
        scene.faults.away = True
        await save(scene, b"s1")
        await remove(scene, b"s0")
        await save(scene, b"s2")
        await remove(scene, b"s1")
        await scene.killed()
        await removals_only(scene)
        await scene.drained()
        assert seen == {b"s0", b"s2"}
        assert scene.on_pfs(b"s0/m") is None

    rotate()


def test_it_stays_for_what_is_going_to_land_only() -> None:
    @scene()
    async def remove_all(scene: Scene) -> None:
        await save(scene, b"s0")
        await scene.drained()
        scene.faults.away = True
        await save(scene, b"s1")
        await remove(scene, b"s0")
        assert [op.kind for _, op, _ in scene.life.catalogue.view.ops() if op.held] == [OpKind.WITHDRAW]
        await remove(scene, b"s1")
        scene.faults.away = False
        await scene.drained()
        assert scene.on_pfs(b"s0/m") is None
        assert scene.left() == []

    remove_all()


def test_it_stays_for_one_that_is_saved_before_it_has_gone() -> None:
    """Nothing was to take its place when it was let go; it waited for the PFS."""

    @scene()
    async def save_again(scene: Scene) -> None:
        await save(scene, b"s0")
        await scene.drained()
        seen = rotation(scene)
        scene.faults.away = True
        await save(scene, b"s1")
        await remove(scene, b"s0")
        await remove(scene, b"s1")
        with trio.fail_after(60):
            while any(op.held for _, op, _ in scene.life.catalogue.view.ops()):  # noqa: ASYNC110
                await trio.sleep(0.1)
        await save(scene, b"s2")
        await removals_only(scene)
        await scene.drained()
        assert seen == {b"s0", b"s2"}
        assert scene.on_pfs(b"s0/m") is None

    save_again()


@pytest.mark.parametrize("made_in", [b"", b"tmp"])
def test_one_that_is_to_have_its_name_does_not_keep_it_for_ever(made_in: bytes) -> None:
    """It waits for the removal, which would wait for it: let go, held again, let go."""

    @scene()
    async def save_again(scene: Scene) -> None:
        await save(scene, b"s0")
        await scene.drained()
        scene.faults.away = True
        await save(scene, b"s1")
        await remove(scene, b"s0")
        await remove(scene, b"s1")
        with trio.fail_after(60):
            while any(op.held for _, op, _ in scene.life.catalogue.view.ops()):  # noqa: ASYNC110
                await trio.sleep(0.1)
        await save(scene, b"s0", made_in)
        scene.faults.away = False
        await scene.drained()
        assert whole(scene, b"s0")
        assert scene.left() == []

    save_again()


def test_one_that_the_pfs_refuses_holds_nothing_up() -> None:
    """Perhaps for lack of the room that the old one takes."""

    @scene()
    async def full(scene: Scene) -> None:
        await save(scene, b"s0")
        await scene.drained()

        def before(step: str) -> None:
            if scene.on_pfs(b"s0/m") is not None and step == "write part":
                raise OSError(errno.ENOSPC, "no room")

        scene.before = before
        await save(scene, b"s1")
        await remove(scene, b"s0")
        await scene.drained()
        assert whole(scene, b"s1")
        assert scene.on_pfs(b"s0/m") is None

    full()


def test_another_series_neither_holds_it_nor_replaces_it() -> None:
    @scene()
    async def two(scene: Scene) -> None:
        for directory in (b"a1", b"b1"):
            await save(scene, directory)
        await scene.drained()
        scene.faults.away = True
        await save(scene, b"b2")
        await remove(scene, b"a1")
        held = [op.path for _, op, _ in scene.life.catalogue.view.ops() if op.held]
        assert held == []
        await remove(scene, b"b1")
        held = [op.path for _, op, _ in scene.life.catalogue.view.ops() if op.held]
        assert held == [b"b1/.metadata"]
        scene.faults.away = False
        await scene.drained()
        assert whole(scene, b"b2")

    two()


@pytest.mark.parametrize("below", [b"", b"/weights"])
def test_that_of_another_run_does_not_replace_it(below: bytes) -> None:
    """Its directory differed in numbers alone, too: what it had there let the last one of this run go."""

    @scene()
    async def two(scene: Scene) -> None:
        for directory in (b"run1", b"run2", *(b"run%d/s%d" % of for of in ((1, 1), (2, 2), (1, 3)) if below)):
            await scene.mkdir(directory)
        for directory in (b"run1/s1", b"run2/s2"):
            await save(scene, directory + below)
        await scene.drained()
        scene.faults.away = True
        await save(scene, b"run1/s3" + below)
        await remove(scene, b"run1/s1" + below)
        assert [op.path for _, op, _ in scene.life.catalogue.view.ops() if op.held] == [
            b"run1/s1" + below + b"/.metadata"
        ]
        scene.faults.away = False
        await scene.drained()
        assert whole(scene, b"run1/s3" + below)
        assert scene.on_pfs(b"run1/s1" + below + b"/m") is None

    two()


def test_a_commit_file_beside_it_does_not_replace_it() -> None:
    """Each rank's own: they differ in numbers alone."""

    @scene()
    async def ranks(scene: Scene) -> None:
        commits = {b"__%d.metadata" % rank: commit_file(rank, {b"m%d" % rank: b"one"}) for rank in range(2)}

        async def write(directory: bytes) -> None:
            await scene.mkdir(directory)
            for rank, (name, data) in enumerate(commits.items()):
                await scene.write(directory + b"/m%d" % rank, b"one")
                await scene.write(directory + b"/" + name, data)

        await write(b"s1")
        await scene.drained()
        scene.faults.away = True
        await write(b"s2")
        await remove(scene, b"s1", (b"m0", b"m1", *commits))
        held = [op.path for _, op, _ in scene.life.catalogue.view.ops() if op.held]
        assert sorted(held) == [b"s1/__0.metadata", b"s1/__1.metadata"]
        scene.faults.away = False
        await scene.drained()
        assert scene.on_pfs(b"s1/m0") is None

    ranks()


@pytest.mark.parametrize("order", ORDERS)
def test_one_that_is_to_have_the_name_of_the_last_takes_its_place(order: tuple[bytes, ...]) -> None:
    """Its new name waits for the removal: until then it is whole under the old one."""

    @scene()
    async def replace(scene: Scene) -> None:
        await save(scene, b"last")
        await scene.drained()
        seen = set[bytes]()

        def before(step: str) -> None:
            now = {name for name in (b"last", b"tmp") if whole(scene, name)}
            assert now, f"before {step} there is none"
            seen.update(now)

        scene.before = before
        scene.faults.away = True
        await save(scene, b"tmp")
        await remove(scene, b"last", order)
        await scene.rename(b"tmp", b"last")
        scene.faults.away = False
        await scene.drained()
        assert seen == {b"last", b"tmp"}
        assert whole(scene, b"last")
        assert scene.left() == []

    replace()
