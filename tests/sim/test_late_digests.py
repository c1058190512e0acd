"""A close does not wait for the digests of what was written by the handler; all that leaves the node does."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import trio
import xxhash
from test_found import Scene, scene

from cachexfs.core.records import Generation


class Slow:
    """Digests of this node's files come when they may."""

    def __init__(self, scene: Scene) -> None:
        scene.as_if_large()
        self.may, self.asked, self._scene = trio.Event(), 0, scene
        self._digests: Callable[..., Awaitable[tuple[bytes, bytes, list[bytes]]]] = scene.life.node.digests
        scene.life.node.digests = self._wait  # type: ignore[method-assign, assignment]

    async def _wait(self, fd: int, size: int, *, late: bool = False) -> tuple[bytes, bytes, list[bytes]]:
        self.asked += 1
        await self.may.wait()
        return await self._digests(fd, size, late=late)


async def generation(scene: Scene, path: bytes) -> Generation:
    found = scene.life.node.catalogue.view.generation(await scene.ino(path))
    assert found is not None
    return found


def digest(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


@scene(fsync="returned")
async def test_a_copy_to_the_pfs_waits_for_digests_and_a_close_does_not(scene: Scene) -> None:
    slow = Slow(scene)
    await scene.write(b"f", b"bytes")
    assert (await generation(scene, b"f")).tree == b""
    assert await scene.read(b"f") == b"bytes"
    await trio.sleep(60)
    assert (scene.on_pfs(b"f"), scene.left(), slow.asked) == (None, [], 1)
    slow.may.set()
    await scene.drained()
    assert scene.on_pfs(b"f") == b"bytes"
    assert (await generation(scene, b"f")).digest == digest(b"bytes")


@scene(fsync="returned")
async def test_the_next_daemon_finds_what_the_last_one_owed(scene: Scene) -> None:
    Slow(scene)
    await scene.write(b"f", b"bytes")
    await trio.sleep(1)
    await scene.killed(supervised=True)
    assert (await generation(scene, b"f")).digest == digest(b"bytes")
    await scene.drained()
    assert scene.on_pfs(b"f") == b"bytes"


@scene(fsync="returned")
async def test_a_content_that_replaces_one_whose_digests_are_owed_gets_its_own(scene: Scene) -> None:
    slow = Slow(scene)
    await scene.write(b"f", b"one")
    await trio.sleep(1)
    handle = await scene.fs.open(await scene.ino(b"f"), os.O_WRONLY)
    await scene.fs.write(handle, 0, b"and another")
    await scene.close(handle)
    await trio.sleep(1)
    slow.may.set()
    await scene.drained()
    assert scene.on_pfs(b"f") == b"and another"
    assert (await generation(scene, b"f")).digest == digest(b"and another")


@scene(fsync="returned")
async def test_what_is_removed_meanwhile_keeps_nobody_waiting(scene: Scene) -> None:
    slow = Slow(scene)
    await scene.write(b"removed", b"bytes")
    await trio.sleep(1)
    await scene.unlink(b"removed")
    await scene.write(b"next", b"more")
    slow.may.set()
    await scene.drained()
    assert (scene.on_pfs(b"removed"), scene.on_pfs(b"next"), scene.left()) == (None, b"more", [])
    assert (await generation(scene, b"next")).digest == digest(b"more")


@scene(fsync="returned")
async def test_digests_are_told_once_the_catalogue_has_a_majority_again(scene: Scene) -> None:
    slow = Slow(scene)
    await scene.write(b"f", b"bytes")
    scene.link.set(up=False)
    await trio.sleep(200)  # by then its calls are refused at once
    slow.may.set()
    await trio.sleep(10)
    (ino,) = [fid for fid, inode in scene.life.node.catalogue.view.inodes() if inode.kind == "f"]
    found = scene.life.node.catalogue.view.generation(ino)
    assert found is not None
    assert found.tree == b""
    scene.link.set(up=True)
    await scene.drained()
    assert (await generation(scene, b"f")).digest == digest(b"bytes")
    assert scene.on_pfs(b"f") == b"bytes"


@scene(fsync="pfs")
async def test_an_fsync_after_the_close_waits_for_no_turn(scene: Scene) -> None:
    """Of a descriptor that is opened again: it finds the digests itself."""
    slow = Slow(scene)
    await scene.write(b"f", b"bytes")
    handle = await scene.fs.open(await scene.ino(b"f"), os.O_RDONLY)
    slow.may.set()
    await scene.fs.fsync(handle)
    await scene.fs.release(handle)
    assert scene.life.parts.drainer.is_safe(await scene.ino(b"f"))
    assert (await generation(scene, b"f")).digest == digest(b"bytes")
