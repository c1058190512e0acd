"""The first look at a directory of the PFS: once, whoever looks at the same time, and again after a failure."""

from __future__ import annotations

import errno
import os

import pytest
import trio
from test_found import Scene, scene

from cachexfs.errors import FsError

PLANTED = {b"d": ("d", 0o755, b""), b"d/a": ("f", 0o644, b"a"), b"d/b": ("f", 0o600, b"b")}


def _listings(scene: Scene, *, fail: int = 0) -> list[bytes]:
    """The paths that the PFS lists from now on; the first ``fail`` of them are refused."""
    pfs, asked = scene.life.pfs, list[bytes]()
    listing = pfs.listing

    async def counted(path: bytes, deadline_s: float) -> object:
        asked.append(path)
        await trio.sleep(1)  # the others come meanwhile
        if len(asked) <= fail:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return await listing(path, deadline_s)

    pfs.listing = counted  # type: ignore[method-assign, assignment]
    return asked


async def _look_at_once(scene: Scene, count: int) -> list[list[bytes] | None]:
    """What each of ``count`` readers sees of the directory; None with EIO."""
    ino, seen = await scene.ino(b"d"), list[list[bytes] | None]()

    async def look() -> None:
        try:
            seen.append(sorted(name for name, _ in await scene.fs.names(ino)))
        except FsError as error:
            seen.append(None if error.errno == errno.EIO else [str(error).encode()])

    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(look)
    return seen


@scene(planted=PLANTED)
async def test_those_who_look_at_the_same_time_list_a_directory_once(scene: Scene) -> None:
    asked = _listings(scene)
    assert await _look_at_once(scene, 5) == [[b"a", b"b"]] * 5
    assert asked == [b"d"]
    assert await _look_at_once(scene, 2) == [[b"a", b"b"]] * 2
    assert (asked, scene.life.parts.importer._locks) == ([b"d"], {})


@scene(planted=PLANTED)
async def test_after_a_failed_look_the_next_one_who_waits_looks_again(scene: Scene) -> None:
    asked = _listings(scene, fail=2)
    seen = await _look_at_once(scene, 4)
    assert seen == [None, None, [b"a", b"b"], [b"a", b"b"]]
    assert len(asked) == 3
    assert scene.life.parts.importer._locks == {}


@scene(planted=PLANTED)
async def test_who_gives_up_waiting_leaves_the_look_to_the_others(scene: Scene) -> None:
    asked = _listings(scene)
    ino = await scene.ino(b"d")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.fs.names, ino)
        await trio.sleep(0.5)
        with trio.move_on_after(0.1):
            await scene.fs.names(ino)
            pytest.fail("it was not there yet")
        with trio.move_on_after(0.1):
            await scene.fs.names(ino)
    assert asked == [b"d"]
    assert await _look_at_once(scene, 1) == [[b"a", b"b"]]
    assert scene.life.parts.importer._locks == {}
