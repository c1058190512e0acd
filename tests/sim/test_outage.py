"""A PFS that does not answer: one error for the outage, however many files wait for it, and words that help."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

import pytest
import trio
from test_found import Scene, scene

from cachexfs.core.records import Op
from cachexfs.engine.drain_reasons import LANDS_BY_ITSELF, why_pending
from cachexfs.engine.health import HUNG_S, SLOW_S, pfs_health
from cachexfs.engine.outrun import IN_A_ROW
from cachexfs.errors import CatalogueUnavailableError, FsError

FILES = 40


def _logged(function: Callable[[], None], caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    with caplog.at_level(logging.INFO, "cachexfs.engine"):
        function()
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_an_outage_is_one_error_and_its_files_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    @scene()
    async def outage(scene: Scene) -> None:
        logging.disable(logging.NOTSET)  # the simulation is quiet, else
        await scene.mkdir(b"d")
        await scene.drained()
        scene.faults.away = True
        for number in range(FILES):
            await scene.write(b"d/%d" % number, b"x")
        await trio.sleep(600)
        drainer, view = scene.life.parts.drainer, scene.life.catalogue.view
        progress = drainer.progress
        assert progress.errors == {}
        assert progress.held_up
        pending = len(drainer.own_pending())
        assert drainer.held_up() == pending > FILES
        assert f"{pending} changes wait" in drainer.errors.outage(drainer.held_up())
        assert [inode.error for _, inode in view.inodes() if inode.error] == []
        assert all(LANDS_BY_ITSELF in why_pending(drainer, key) for key, op, _ in view.ops() if op.kind == "put")
        attributes = await scene.life.parts.attributes.of(await scene.ino(b"d/7"))
        assert "the PFS is hung since" in attributes["error"]
        scene.faults.away = False
        await scene.drained()
        assert (progress.held_up, drainer.held_up(), drainer.errors.outage(0)) == ({}, 0, "")
        assert "error" not in await scene.life.parts.attributes.of(await scene.ino(b"d/7"))

    told = [row for row in _logged(outage, caplog) if row[0] >= logging.WARNING]
    assert [level for level, _ in told] == [logging.ERROR, logging.WARNING]
    assert "the PFS is hung since" in told[0][1]
    assert "the PFS answers again" in told[1][1]


def test_an_outage_of_the_catalogue_is_no_error_of_each_file(caplog: pytest.LogCaptureFixture) -> None:
    @scene()
    async def outage(scene: Scene) -> None:
        logging.disable(logging.NOTSET)
        await scene.mkdir(b"d")
        await scene.drained()
        drainer = scene.life.parts.drainer
        own, away = drainer.owners.own, [True]

        async def unreachable(key: bytes, *, begin: bool) -> Op | None:
            if away:
                raise CatalogueUnavailableError("no majority")
            return await own(key, begin=begin)

        drainer.owners.own = unreachable  # type: ignore[method-assign]
        for number in range(5):
            await scene.write(b"d/%d" % number, b"x")
        await trio.sleep(30)
        assert (drainer.progress.errors, drainer.progress.held_up) == ({}, {})
        away.clear()
        await scene.drained()

    assert [row for row in _logged(outage, caplog) if row[0] >= logging.WARNING] == []


@scene()
async def test_what_is_refused_is_still_told_for_each_file(scene: Scene) -> None:
    def before(step: str) -> None:
        if step == "write part":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    scene.before = before
    await scene.write(b"a", b"x")
    await scene.write(b"b", b"x")
    await trio.sleep(60)
    progress = scene.life.parts.drainer.progress
    assert (len(progress.errors), progress.held_up) == (2, {})
    assert scene.life.parts.drainer.errors.refusal() == "refuses 2 changes: EDQUOT (Disk quota exceeded)"
    assert "EDQUOT" in (await scene.life.parts.attributes.of(await scene.ino(b"a")))["error"]
    scene.before = lambda step: None
    await trio.sleep(60)
    assert (scene.life.parts.drainer.errors.refusal(), progress.errors) == ("", {})


@scene(fsync="pfs")
async def test_an_fsync_that_meets_its_deadline_says_what_stood_in_the_way(scene: Scene) -> None:
    def before(step: str) -> None:
        if step == "write part":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    scene.before = before
    await scene.write(b"a", b"x")
    handle = await scene.fs.open(await scene.ino(b"a"), 0)
    with pytest.raises(FsError, match="EDQUOT"):
        await scene.fs.fsync(handle)


@scene()
async def test_a_call_that_is_out_for_seconds_shows_before_its_deadline(
    scene: Scene,
) -> None:
    node, pfs = scene.life.node, scene.life.pfs
    waits = ["land a/b", 0.0]
    type(pfs).waiting, kept = property(lambda self: tuple(waits)), type(pfs).waiting  # type: ignore[assignment, misc]
    try:
        for seconds, state in ((0.0, "ok"), (SLOW_S, "slow"), (HUNG_S, "hung")):
            waits[1] = seconds
            health = pfs_health(node)
            assert (health.state, health.for_s) == (state, seconds)
            assert (health.why == "no answer to land a/b") == (state != "ok")
        assert pfs.state == "ok"  # nothing is decided by it
    finally:
        type(pfs).waiting = kept  # type: ignore[misc]


@scene()
async def test_checkpoints_that_are_all_removed_before_they_land_are_named(scene: Scene) -> None:
    """Each of them was safe on a node, and none was on the PFS, which nothing had said."""
    errors = scene.life.parts.node.errors

    async def save(step: int) -> None:
        await scene.mkdir(b"s%d" % step)
        await scene.write(b"s%d/m" % step, b"m")
        await scene.write(b"s%d/.metadata" % step, b"\x80\x04names m")

    async def remove(step: int) -> None:
        for name in (b"m", b".metadata"):
            await scene.unlink(b"s%d/%s" % (step, name))

    scene.faults.away = True
    await save(0)
    for step in range(IN_A_ROW):
        assert "outrun" not in errors
        await save(step + 1)
        await remove(step)
    assert "checkpoints were removed or replaced before they were on the PFS" in errors["outrun"]
    await save(99)
    scene.faults.away = False
    await scene.drained()
    assert "outrun" not in errors
    await remove(99)
    await scene.drained()
    assert "outrun" not in errors


@scene()
async def test_that_the_last_checkpoint_on_the_pfs_goes_before_another_is_there_is_told(scene: Scene) -> None:
    """The one after it was removed before it landed, and so nothing waited for it any more: its commit files list
    nothing (``test_last_whole``: those that do stay)."""
    errors = scene.life.parts.node.errors

    async def save(step: int) -> None:
        await scene.mkdir(b"r/s%d" % step)
        await scene.write(b"r/s%d/m" % step, b"m")
        await scene.write(b"r/s%d/trainer_state.json" % step, b"{}")

    async def remove(step: int) -> None:
        for name in (b"trainer_state.json", b"m"):
            await scene.unlink(b"r/s%d/%s" % (step, name))

    await scene.mkdir(b"r")
    await save(0)
    await scene.drained()
    await remove(0)
    await scene.drained()
    assert "outrun" not in errors  # as its user wanted
    await save(1)
    await scene.drained()
    scene.faults.away = True
    await save(2)
    await remove(1)
    assert "outrun" not in errors  # it stays until the next is there
    await save(3)
    await remove(2)
    assert "the one that was there goes" in errors["outrun"]
    scene.faults.away = False
    await scene.drained()
    assert "outrun" not in errors
    assert scene.on_pfs(b"r/s3/trainer_state.json") is not None
