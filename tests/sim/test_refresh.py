"""Changes on the PFS behind the mount's back: ``status --refresh``."""

from __future__ import annotations

import errno

import pytest
from sim_store import Ino
from test_found import Scene, scene

from cachexfs.core.boundary import Boundary
from cachexfs.core.records import Inode
from cachexfs.engine.pfs_interface import PfsAttrs
from cachexfs.engine.refresh import Refreshed, Refresher
from cachexfs.errors import FsError

THEIRS = PfsAttrs(0o640, 7, 7, 5, 5)


def _put(scene: Scene, path: bytes, data: bytes | None, kind: str = "f") -> None:
    """Somebody else puts a file there, replaces it, or removes it (None)."""
    parent, name = scene.store.parent(path)
    if data is None:
        scene.store.change((parent, name, None))
        return
    made = scene.store.make(kind, THEIRS)
    made.data = made.kept_data = data
    scene.store.change((parent, name, made))


async def _refresh(scene: Scene, path: bytes = b"", *, forget: bool = False) -> Refreshed:
    parts = scene.life.parts
    refresher = Refresher(scene.life.node, parts.files, parts.reader, parts.importer, parts.drainer)
    return await refresher.refresh(await scene.ino(path), forget=forget)


async def _names(scene: Scene, path: bytes) -> list[bytes]:
    return sorted(name for name, _ in await scene.fs.names(await scene.ino(path)))


async def _tree(scene: Scene) -> None:
    await scene.mkdir(b"d")
    await scene.write(b"d/a", b"mine")
    await scene.write(b"d/b", b"mine too")
    await scene.drained()


@scene()
async def test_new_names_are_taken_in_and_a_miss_does_not_ask(scene: Scene) -> None:
    await _tree(scene)
    _put(scene, b"d/new", b"theirs")
    with pytest.raises(FsError):
        await scene.ino(b"d/new")
    found = await _refresh(scene)
    assert (found.new, found.changed, found.missing) == ([b"d/new"], [], [])
    assert await scene.read(b"d/new") == b"theirs"
    assert await _refresh(scene) == Refreshed()


@scene()
async def test_a_changed_file_is_read_as_it_is_now(scene: Scene) -> None:
    await _tree(scene)
    assert await scene.read(b"d/a") == b"mine"
    _put(scene, b"d/a", b"theirs and longer")
    found = await _refresh(scene, b"d")
    assert found.changed == [b"d/a"]
    assert await scene.read(b"d/a") == b"theirs and longer"
    attr = await scene.fs.getattr(await scene.ino(b"d/a"))
    assert (attr.mode, attr.uid, attr.mtime_ns) == (0o640, 7, 5)
    assert await scene.stage(b"d/a") == "pfs"
    await scene.write(b"d/c", b"x")  # the mount goes on there
    await scene.drained()


@scene()
async def test_a_missing_name_is_forgotten_when_the_user_says_so(scene: Scene) -> None:
    await _tree(scene)
    _put(scene, b"d/a", None)
    found = await _refresh(scene, b"d/a", forget=True)
    assert (found.missing, found.forgotten) == ([], [b"d/a"])
    assert await _names(scene, b"d") == [b"b"]
    await scene.write(b"d/a", b"again")
    await scene.drained()
    assert scene.on_pfs(b"d/a") == b"again"


@scene()
async def test_a_directory_that_is_gone_is_forgotten_with_all_below(scene: Scene) -> None:
    await _tree(scene)
    _put(scene, b"d", None)
    assert (await _refresh(scene, forget=True)).forgotten == [b"d"]
    assert await _names(scene, b"") == []


@scene()
async def test_what_is_missing_and_still_here_is_copied_again(scene: Scene) -> None:
    await _tree(scene)
    ino = await scene.ino(b"d/a")
    for gone, missing in ((b"d/a", b"d/a"), (b"d", b"d")):
        _put(scene, gone, None)
        before = _record(scene, ino)[1].pfs
        assert (await _refresh(scene)).missing == [missing]
        await scene.drained()  # it may have been quick already
        assert _record(scene, ino)[1].pfs != before
        assert [scene.on_pfs(b"d/a"), scene.on_pfs(b"d/b")] == [b"mine", b"mine too"]
        assert scene.life.node.on_pfs(*_record(scene, await scene.ino(b"d/a")))
    assert await _refresh(scene) == Refreshed()


@scene()
async def test_what_is_missing_and_nowhere_else_is_lost_until_it_is_back(scene: Scene) -> None:
    _put(scene, b"a", b"theirs")
    await _refresh(scene)
    fid = await scene.ino(b"a")
    _put(scene, b"a", None)
    assert (await _refresh(scene)).missing == [b"a"]
    assert scene.life.node.boundary(*_record(scene, fid)) == Boundary.LOST
    assert await _names(scene, b"") == [b"a"]
    assert await _refresh(scene) == Refreshed()
    _put(scene, b"a", b"theirs")
    assert (await _refresh(scene)).changed == [b"a"]
    assert scene.life.node.boundary(*_record(scene, fid)) == Boundary.PFS
    assert await scene.read(b"a") == b"theirs"


def _record(scene: Scene, fid: int) -> tuple[int, Inode]:
    inode = scene.life.node.catalogue.view.inode(fid)
    assert inode is not None
    return fid, inode


@scene()
async def test_what_is_pending_here_is_left_alone(scene: Scene) -> None:
    await _tree(scene)
    await scene.life.parts.importer.ensure(await scene.ino(b""))
    gate = scene.life.pfs.run

    async def refused(kind: str, *args: object) -> None:
        raise OSError(errno.EIO, "not now")

    scene.life.pfs.run = refused  # type: ignore[method-assign,assignment]
    await scene.unlink(b"d/a")
    found = await _refresh(scene, forget=True)
    assert found.new == []  # the removal has not landed: it does not bring the name back
    assert b"d/a" in found.busy
    assert await _names(scene, b"d") == [b"b"]
    scene.life.pfs.run = gate  # type: ignore[method-assign]
    await scene.drained()
    assert scene.on_pfs(b"d/a") is None


@scene()
async def test_a_pfs_that_does_not_answer_is_eio_and_forgets_nothing(scene: Scene) -> None:
    await _tree(scene)
    scene.faults.away = True
    with pytest.raises(FsError) as found:
        await _refresh(scene, forget=True)
    assert found.value.errno == errno.EIO
    assert await _names(scene, b"d") == [b"a", b"b"]


@scene()
async def test_another_kind_under_a_known_name_is_not_taken_for_it(scene: Scene) -> None:
    await _tree(scene)
    parent, name = scene.store.parent(b"d/a")
    scene.store.change((parent, name, Ino(77_777, "d", THEIRS)))
    found = await _refresh(scene)
    assert (found.changed, found.missing) == ([], [b"d/a"])
    await _refresh(scene, forget=True)
    assert (await _refresh(scene)).new == [b"d/a"]
    assert await _names(scene, b"d/a") == []
