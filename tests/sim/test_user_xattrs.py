"""The user's extended attributes on their way to the PFS and back."""

from __future__ import annotations

from dataclasses import replace

import trio
from test_found import Scene, scene
from test_refresh import THEIRS, _put, _refresh

from cachexfs.engine.pfs_interface import Xattrs

TAG = b"user.tag"


def _there(scene: Scene, path: bytes) -> Xattrs:
    found = scene.store.find(path)
    assert found is not None
    return found.attrs.xattrs or ()


async def _set(scene: Scene, path: bytes, value: bytes | None) -> None:
    await scene.fs.set_xattr(await scene.ino(path), TAG, value)


@scene()
async def test_they_land_with_the_file_follow_it_and_go(scene: Scene) -> None:
    await scene.mkdir(b"d")
    handle = await scene.create(b"d/f", b"x")
    await _set(scene, b"d/f", b"early")
    await scene.close(handle)
    await _set(scene, b"d", b"of a directory")
    await scene.drained()
    assert (_there(scene, b"d/f"), _there(scene, b"d")) == (((TAG, b"early"),), ((TAG, b"of a directory"),))
    await _set(scene, b"d/f", b"late")
    await scene.rename(b"d/f", b"d/g")
    await scene.drained()
    assert _there(scene, b"d/g") == ((TAG, b"late"),)
    await _set(scene, b"d/g", None)
    await _set(scene, b"d", None)
    await scene.drained()
    assert (_there(scene, b"d/g"), _there(scene, b"d")) == ((), ())
    assert (await _refresh(scene)).changed == []


@scene()
async def test_what_the_pfs_has_is_shown(scene: Scene) -> None:
    await scene.mkdir(b"d")
    await scene.drained()
    _put(scene, b"d/f", b"theirs")
    found = scene.store.find(b"d/f")
    assert found is not None
    found.attrs = replace(THEIRS, xattrs=((TAG, b"before"),))
    await _refresh(scene)
    assert await scene.fs.user_xattrs(await scene.ino(b"d/f")) == {TAG: b"before"}
    await _set(scene, b"d/f", b"after")
    await trio.sleep(1)
    await scene.drained()
    assert _there(scene, b"d/f") == ((TAG, b"after"),)
