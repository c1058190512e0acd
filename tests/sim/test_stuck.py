"""What cannot land: lost files, operations that the PFS refuses, and those that must not wait for them."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import trio
from sim_check import Checkers, Saves, commit_file
from sim_store import Ino
from test_found import Scene, scene

from cachexfs.core.records import ROOT_FID
from cachexfs.engine.drain_reasons import why_pending
from cachexfs.engine.pfs_interface import PfsAttrs
from cachexfs.errors import FsError

MEMBERS = {b"m": b"one", b"n": b"two"}


def _refuse(scene: Scene, step: str, code: int) -> None:
    def before(what: str) -> None:
        if what == step:
            raise OSError(code, os.strerror(code))

    scene.before = before


def _errors(scene: Scene) -> list[str]:
    return list(scene.life.parts.drainer.progress.errors.values())


async def _lost(scene: Scene) -> None:
    """A checkpoint in memory, of which a member is damaged while no daemon is there."""
    scene.faults.away = True
    await scene.mkdir(b"s")
    for name, data in MEMBERS.items():
        await scene.write(b"s/" + name, data)
    await scene.write(b"s/.metadata", commit_file(1, MEMBERS))
    content = scene.life.catalogue.view.generation(await scene.ino(b"s/m"))
    assert content is not None
    scene.life.kill()
    await trio.testing.wait_all_tasks_blocked()
    os.truncate(scene.life.staging.path(content.stage), 1)
    await scene.start()
    scene.faults.away = False


async def _names(scene: Scene, path: bytes) -> list[bytes]:
    return sorted(name for name, _ in await scene.fs.names(await scene.ino(path)))


# ---- lost
@scene()
async def test_no_commit_file_lands_over_a_lost_member(scene: Scene) -> None:
    await _lost(scene)
    await scene.mkdir(b"old")
    await scene.fs.rmdir(*await scene.place(b"old"))
    await scene.write(b"latest", b"s")
    await trio.sleep(300)
    assert scene.on_pfs(b"s/n") == b"two"
    assert scene.on_pfs(b"s/.metadata") is None
    assert scene.on_pfs(b"latest") is None  # it would lead to half a checkpoint
    assert scene.store.find(b"old") is None  # what has nothing to do with it goes on
    drainer = scene.life.parts.drainer
    assert "lost" in "".join(why_pending(drainer, key) for key, op in drainer.own_pending() if op.path == b"s/m")


@scene()
async def test_a_commit_file_with_a_lost_member_is_withheld_and_reported(scene: Scene) -> None:
    await _lost(scene)
    assert await _names(scene, b"s") == [b"m", b"n"]
    with pytest.raises(FsError) as found:
        await scene.ino(b"s/.metadata")
    assert found.value.errno == errno.ENOENT
    errors = {path: why for path, _, why in scene.life.parts.losses.errors()}
    assert errors.keys() == {b"s/m", b"s/.metadata"}
    shown = await scene.life.parts.attributes.of(await scene.ino(b"s"))
    assert shown["restartable"] == "no"
    assert "m (" in shown["missing"]
    assert await scene.stage(b"s/m") == "lost"


@scene()
async def test_a_withheld_commit_file_is_replaced_by_the_next_save(scene: Scene) -> None:
    await _lost(scene)
    assert await _names(scene, b"s") == [b"m", b"n"]
    new = {b"m": b"three", b"n": b"four"}
    for name, data in new.items():
        handle = await scene.fs.open(await scene.ino(b"s/" + name), os.O_WRONLY | os.O_TRUNC)
        await scene.fs.write(handle, 0, data)
        await scene.close(handle)
    await scene.write(b"s/.metadata.tmp", commit_file(2, new))
    await scene.rename(b"s/.metadata.tmp", b"s/.metadata")
    await scene.drained()
    assert await _names(scene, b"s") == [b".metadata", b"m", b"n"]
    assert scene.on_pfs(b"s/.metadata") == commit_file(2, new)
    assert scene.life.parts.losses.errors() == []


@scene()
async def test_a_directory_with_a_withheld_commit_file_can_be_removed(scene: Scene) -> None:
    """``rm -r`` removes what it sees, then the directory."""
    await _lost(scene)
    for name in await _names(scene, b"s"):
        await scene.unlink(b"s/" + name)
    assert await _names(scene, b"s") == []
    await scene.fs.rmdir(*await scene.place(b"s"))
    assert await _names(scene, b"") == []
    await scene.drained()
    assert scene.store.walk() == {}


@scene()
async def test_a_lost_file_that_is_removed_with_its_second_name_holds_nothing_up(scene: Scene) -> None:
    await _lost(scene)
    await scene.fs.link(await scene.ino(b"s/m"), await scene.ino(b"s"), b"hard")
    await trio.sleep(60)
    for name in (b"m", b"hard", b"n", b".metadata"):
        await scene.unlink(b"s/" + name)
    await scene.fs.rmdir(*await scene.place(b"s"))
    await scene.drained()
    assert scene.store.walk() == {}


# ---- refused
@scene()
async def test_a_refused_removal_is_parked_and_others_go_on(scene: Scene) -> None:
    await scene.mkdir(b"d")
    await scene.drained()
    directory = scene.store.find(b"d")
    assert directory is not None
    stray = Ino(999_999, "f", PfsAttrs(0o644, 0, 0, 0, 0), b"theirs", b"theirs")
    scene.store.change((directory, b"stray", stray))  # somebody has put it there behind our back
    await scene.fs.rmdir(*await scene.place(b"d"))
    await scene.write(b"latest", b"x")
    await scene.fs.symlink(ROOT_FID, b"link", b"latest", await _attrs(scene))
    await trio.sleep(120)
    assert scene.on_pfs(b"latest") == b"x"
    assert scene.store.find(b"link") is not None
    assert any("ENOTEMPTY" in text for text in _errors(scene))
    parked = [op.parked for _, op in scene.life.parts.drainer.own_pending() if op.path == b"d"]
    assert parked == ["ENOTEMPTY"]
    scene.store.change((directory, b"stray", None))
    await scene.drained()
    assert scene.store.find(b"d") is None
    assert _errors(scene) == []


async def _attrs(scene: Scene):  # type: ignore[no-untyped-def]
    from cachexfs.core.namespace import NewAttrs

    return NewAttrs(0o777, 0, 0)


@scene()
async def test_a_directory_that_is_made_again_supersedes_its_refused_removal(scene: Scene) -> None:
    await scene.mkdir(b"d")
    await scene.drained()
    directory = scene.store.find(b"d")
    assert directory is not None
    scene.store.change((directory, b"stray", Ino(999_999, "f", PfsAttrs(0o644, 0, 0, 0, 0), b"theirs", b"theirs")))
    await scene.fs.rmdir(*await scene.place(b"d"))
    await trio.sleep(60)
    await scene.mkdir(b"d")
    await scene.write(b"d/a", b"mine")
    await trio.sleep(60)
    assert scene.on_pfs(b"d/a") == b"mine"
    assert scene.on_pfs(b"d/stray") == b"theirs"


@scene()
async def test_a_commit_file_waits_for_a_refused_member(scene: Scene) -> None:
    _refuse(scene, "land", errno.EACCES)
    await scene.mkdir(b"s")
    await scene.write(b"s/m", b"one")
    await scene.write(b"s/.metadata", commit_file(1, {b"m": b"one"}))
    await trio.sleep(120)
    assert scene.on_pfs(b"s/.metadata") is None
    await scene.mkdir(b"t")
    await scene.fs.rmdir(*await scene.place(b"t"))
    await trio.sleep(30)
    assert scene.store.find(b"t") is None
    scene.before = lambda step: None
    await scene.drained()
    assert scene.on_pfs(b"s/.metadata") == commit_file(1, {b"m": b"one"})


@scene()
async def test_a_pfs_that_does_not_answer_parks_nothing(scene: Scene) -> None:
    scene.faults.away = True
    await scene.mkdir(b"d")
    await trio.sleep(600)
    assert [op.parked for _, op in scene.life.parts.drainer.own_pending()] == ["", "", ""][
        : scene.life.catalogue.view.op_count
    ]
    scene.faults.away = False
    await scene.drained()


# ---- order of copies
@scene(drain_workers=1)
async def test_copies_begin_with_the_oldest_checkpoint(scene: Scene) -> None:
    """Also with a file that was published early and may be copied only late, because its writer kept it open."""
    gate, made, prepare = trio.Event(), [], scene.life.pfs.prepare

    async def gated(source: str, size: int, hidden: str, *args: Any, **options: Any) -> None:
        await gate.wait()
        made.append(size)
        await prepare(source, size, hidden, *args, **options)

    scene.life.pfs.prepare = gated  # type: ignore[method-assign]
    await scene.write(b"first", b"x")
    late = await scene.create(b"s1", b"x" * 10)
    await scene.fs.flush(late)
    for number in range(2, 6):
        await scene.write(b"s%d" % number, b"x" * 10 * number)
    await trio.sleep(1)
    await scene.fs.release(late)
    await trio.sleep(1)
    gate.set()
    await scene.drained()
    assert made == [1, 10, 20, 30, 40, 50]


# ---- verify
@scene(verify=True)
async def test_verify_finds_a_byte_that_the_pfs_has_flipped_and_copies_again(scene: Scene) -> None:
    flipped: list[bytes] = []

    def before(what: str) -> None:
        if what == "sync part" and not flipped:
            part = next(ino for name, ino in scene.store.tmp.entries.items() if b"~" in name)
            flipped.append(part.data)
            part.data = b"X" + part.data[1:]

    scene.before = before
    await scene.write(b"a", b"right")
    await trio.sleep(0.1)
    assert scene.on_pfs(b"a") is None
    assert any("digest" in text for text in _errors(scene))
    await scene.drained()
    assert flipped == [b"right"]
    assert scene.on_pfs(b"a") == b"right"


@scene()
async def test_damaged_bytes_that_a_commit_file_claims_and_that_were_overwritten_hold_nothing_up(scene: Scene) -> None:
    """Damaged, not missing: they were copied as they were, and a commit file landed over them; or tried for ever."""
    scene.faults.away = True
    await scene.mkdir(b"s")
    await scene.write(b"s/m", b"old bytes")
    await scene.write(b"s/.metadata", commit_file(1, {b"m": b"old bytes"}))
    old = scene.life.catalogue.view.generation(await scene.ino(b"s/m"))
    assert old is not None
    handle = await scene.fs.open(await scene.ino(b"s/m"), os.O_WRONLY | os.O_TRUNC)
    await scene.fs.write(handle, 0, b"new")
    await scene.close(handle)
    scene.life.kill()
    await trio.testing.wait_all_tasks_blocked()
    fd = os.open(scene.life.staging.path(old.stage), os.O_WRONLY)
    os.pwrite(fd, b"BAD", 0)
    os.close(fd)
    await scene.start()
    checkers = Checkers(scene.store, Saves())
    checkers.saves.made[commit_file(1, {b"m": b"old bytes"})] = {b"m": b"old bytes"}
    scene.life.pfs._looked = checkers.commit_last
    scene.faults.away = False
    await scene.drained()
    assert scene.on_pfs(b"s/m") == b"new"
    assert scene.on_pfs(b"s/.metadata") is None
    shown = await scene.life.parts.attributes.of(await scene.ino(b"s/.metadata"))
    assert (shown["stage"], "a file that it names has changed" in shown["error"]) == ("returned", True)
    assert [ino.kept_data for ino in scene.store.held.kept.values()] == [commit_file(1, {b"m": b"old bytes"})]


@scene(fsync="returned")
async def test_what_was_refused_and_waits_for_others_by_now_is_no_error_and_not_in_progress(scene: Scene) -> None:
    """An unmount waited for it as long as it may, and ``status`` promised the next try in a moment."""
    await scene.mkdir(b"s")
    for name, data in MEMBERS.items():
        await scene.write(b"s/" + name, data)
    await scene.write(b"s/.metadata", commit_file(1, MEMBERS))
    await scene.drained()
    _refuse(scene, "attr", errno.EACCES)
    await scene.fs.setattr(await scene.ino(b"s"), None, mtime_ns=10**18)
    await trio.sleep(100)
    assert _errors(scene)
    assert not scene.life.parts.drainer.is_idle()
    handle = await scene.fs.open(await scene.ino(b"s/m"), os.O_WRONLY)
    await scene.fs.write(handle, 0, b"new")
    await scene.close(handle)
    await trio.sleep(100)
    assert _errors(scene) == []
    assert scene.life.parts.drainer.is_idle()


@scene(fsync="returned")
async def test_a_member_is_not_removed_below_a_commit_file_that_the_pfs_denies_and_nobody_else_has(
    scene: Scene,
) -> None:
    """It counted as one that lists nothing; once its server was back it claimed what had gone."""
    checkers = Checkers(scene.store, Saves())
    checkers.saves.made[commit_file(1, MEMBERS)] = MEMBERS
    checkers.kept.excused = True
    await scene.mkdir(b"s")
    for name, data in MEMBERS.items():
        await scene.write(b"s/" + name, data)
    await scene.write(b"s/.metadata", commit_file(1, MEMBERS))
    await scene.drained()
    fid, directory = await scene.ino(b"s/.metadata"), await scene.ino(b"s")
    content = scene.life.catalogue.view.generation(fid)
    assert content is not None
    scene.life.kill()
    await trio.testing.wait_all_tasks_blocked()
    os.unlink(scene.life.staging.path(content.stage))
    await scene.start()
    scene.faults.hidden.add(b"s/.metadata")
    with pytest.raises(FsError):
        await scene.read(b"s/.metadata")
    assert (await scene.life.parts.attributes.of(directory))["restartable"] == "no"
    scene.before = lambda step: checkers.commit_last(step)
    await scene.unlink(b"s/m")
    await trio.sleep(100)
    scene.faults.hidden.clear()
    await trio.sleep(100)
    checkers.commit_last("the end")
    assert scene.on_pfs(b"s/m") is None
