"""The PFS's copy of a file is made sure of before the last other one goes, and again when it is read."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest
import trio
from sim_check import commit_file
from test_found import Scene, scene
from test_refresh import _names, _put, _refresh

from cachexfs.errors import FsError

KIB = 1 << 10
SIZE = 600 * KIB
SMALL = {"memory": 1 << 20, "full_timeout_s": 30.0, "fsync": "returned"}  # one of the files fits, not two


def _data(name: bytes) -> bytes:
    return name * SIZE


async def _landed(scene: Scene, *names: bytes) -> None:
    for name in names:
        await scene.write(name, _data(name))
        await scene.drained()


async def _error(scene: Scene, path: bytes) -> str:
    return (await scene.life.parts.attributes.of(await scene.ino(path))).get("error", "")


async def _holders(scene: Scene, path: bytes) -> str:
    return (await scene.life.parts.attributes.of(await scene.ino(path)))["holders"]


def _rewrite(scene: Scene, path: bytes, data: bytes, mtime_ns: int = 5) -> None:
    """Somebody writes over a file on the PFS: the same inode."""
    found = scene.store.find(path)
    assert found is not None
    found.data = found.kept_data = data
    found.attrs = found.kept_attrs = replace(found.attrs, mtime_ns=mtime_ns)


@scene(**SMALL)
async def test_the_last_copy_of_what_the_pfs_has_lost_is_copied_there_again_before_it_goes(scene: Scene) -> None:
    await _landed(scene, b"a")
    _put(scene, b"a", None)
    await scene.write(b"b", _data(b"b"))  # waits until it has room
    await scene.drained()
    assert scene.on_pfs(b"a") == _data(b"a")
    assert await scene.read(b"a") == _data(b"a")


@scene(**SMALL)
async def test_the_last_copy_of_what_somebody_has_replaced_on_the_pfs_stays(scene: Scene) -> None:
    await _landed(scene, b"a")
    theirs = _data(b"x")
    _rewrite(scene, b"a", theirs)  # of the same size
    with pytest.raises(FsError) as caught:
        await scene.write(b"b", _data(b"b"))
    assert caught.value.errno == errno.ENOSPC
    assert "status --refresh" in await _error(scene, b"a")
    assert await scene.stage(b"a") == "returned"
    assert await scene.read(b"a") == _data(b"a")
    assert scene.on_pfs(b"a") == theirs
    assert (await _refresh(scene)).changed == [b"a"]
    assert await scene.read(b"a") == theirs
    assert (await scene.stage(b"a"), await _error(scene, b"a")) == ("pfs", "")


@scene(**SMALL)
async def test_what_was_only_touched_on_the_pfs_counts(scene: Scene) -> None:
    await _landed(scene, b"a")
    _rewrite(scene, b"a", _data(b"a"))
    await scene.write(b"b", _data(b"b"))
    assert await _holders(scene, b"a") == "pfs"
    _rewrite(scene, b"a", _data(b"a"), 6)
    assert await scene.read(b"a") == _data(b"a")
    assert await _error(scene, b"a") == ""
    assert (await _refresh(scene)).changed == []


@scene(**SMALL)
async def test_nothing_leaves_for_a_pfs_that_hangs(scene: Scene) -> None:
    await _landed(scene, b"a")
    scene.faults.away = True
    with pytest.raises(FsError) as caught:
        await scene.write(b"b", _data(b"b"))
    assert caught.value.errno == errno.ENOSPC
    assert "n0:memory" in await _holders(scene, b"a")
    assert await scene.read(b"a") == _data(b"a")


@scene(**SMALL)
async def test_the_pfs_is_asked_for_many_files_at_once_and_ahead_of_writers(scene: Scene) -> None:
    steps: list[str] = []
    for number in range(90):
        await scene.write(b"f%d" % number, b"x" * 10 * KIB)
    await scene.drained()
    await trio.sleep(5)
    scene.before = steps.append
    for number in range(90):
        await scene.write(b"g%d" % number, b"y" * 10 * KIB)
    assert 0 < steps.count("stats") < 30
    await scene.drained()
    assert await scene.read(b"f0") == b"x" * 10 * KIB


@scene(**SMALL)
async def test_what_somebody_has_changed_on_the_pfs_is_an_error_and_not_read(scene: Scene) -> None:
    await _landed(scene, b"a", b"b")
    assert await _holders(scene, b"a") == "pfs"
    _rewrite(scene, b"a", _data(b"x"))
    with pytest.raises(FsError) as caught:
        await scene.read(b"a")
    assert caught.value.errno == errno.EIO
    assert "status --refresh" in await _error(scene, b"a")
    assert await scene.stage(b"a") == "lost"  # it went on saying "pfs" of bytes that nobody had
    (why,) = [why for path, _, why in scene.life.parts.losses.errors() if path == b"a"]
    assert "status --refresh" in why
    assert (await _refresh(scene)).changed == [b"a"]
    assert await scene.read(b"a") == _data(b"x")
    assert (await scene.stage(b"a"), await _error(scene, b"a")) == ("pfs", "")


@scene(**SMALL)
async def test_what_somebody_had_changed_on_the_pfs_and_put_back_counts_again(scene: Scene) -> None:
    await _landed(scene, b"a", b"b")
    _rewrite(scene, b"a", _data(b"x"))
    with pytest.raises(FsError):
        await scene.read(b"a")
    assert await scene.stage(b"a") == "lost"
    _rewrite(scene, b"a", _data(b"a"), 6)
    await trio.sleep(100)  # it is not read through at once again
    assert await scene.read(b"a") == _data(b"a")
    assert (await scene.stage(b"a"), await _error(scene, b"a")) == ("pfs", "")


@scene(**SMALL)
async def test_a_commit_file_is_hidden_while_somebody_elses_file_lies_under_a_name_that_it_lists(scene: Scene) -> None:
    """``restartable`` said ``pfs``, and reading it gave EIO."""
    await scene.mkdir(b"s")
    await scene.write(b"s/a", _data(b"a"))
    await scene.write(b"s/.metadata", commit_file(1, {b"a": _data(b"a")}))
    await scene.drained()
    await _landed(scene, b"b")
    assert await _holders(scene, b"s/a") == "pfs"
    _rewrite(scene, b"s/a", _data(b"x"))
    with pytest.raises(FsError):
        await scene.read(b"s/a")
    shown = await scene.life.parts.attributes.of(await scene.ino(b"s"))
    assert shown["restartable"] == "no"
    assert "status --refresh" in shown["missing"]
    assert [name for name, _ in await scene.fs.names(await scene.ino(b"s"))] == [b"a"]
    assert (await _refresh(scene)).changed == [b"s/a"]
    await scene.ino(b"s/.metadata")


@scene()
async def test_a_file_that_was_there_before_the_mount_is_not_read_half_old_half_new(scene: Scene) -> None:
    await scene.mkdir(b"d")
    await scene.drained()
    _put(scene, b"d/f", _data(b"1") * 4)
    await _refresh(scene)
    assert await _names(scene, b"d") == [b"f"]
    handle = await scene.fs.open(await scene.ino(b"d/f"), os.O_RDONLY)
    assert await scene.fs.read(handle, 0, 10) == b"1" * 10
    _rewrite(scene, b"d/f", _data(b"2") * 4, 6)
    with pytest.raises(FsError) as caught:
        await scene.fs.read(handle, 2 << 20, 10)
    assert caught.value.errno == errno.EIO
    await scene.fs.release(handle)
    assert "status --refresh" in await _error(scene, b"d/f")
    await _refresh(scene)
    assert await scene.read(b"d/f") == b"2" * (1 << 20)


@scene(**SMALL)
async def test_times_that_a_user_sets_are_no_change_behind_the_mounts_back(scene: Scene) -> None:
    await _landed(scene, b"a")
    await scene.fs.setattr(await scene.ino(b"a"), None, mtime_ns=10**18)
    await scene.drained()
    assert (await _refresh(scene)).changed == []
    await scene.write(b"b", _data(b"b"))
    assert await _holders(scene, b"a") == "pfs"
    assert await scene.read(b"a") == _data(b"a")
    assert await _error(scene, b"a") == ""
