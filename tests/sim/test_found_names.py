"""Names that a file takes before the PFS has any of its bytes, a scene each."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import pytest
import trio
from test_found import Scene, scene

Then = Callable[[Scene], Awaitable[object]]


async def _chmod(scene: Scene) -> None:
    await scene.fs.setattr(await scene.ino(b"a"), None, mode=0o600)


async def _link(scene: Scene) -> None:
    await scene.fs.link(await scene.ino(b"a"), *await scene.place(b"b"))


async def _renamed_twice(scene: Scene) -> None:
    await scene.rename(b"a", b"c")
    await scene.rename(b"c", b"b")


async def _renamed_and_changed(scene: Scene) -> None:
    await scene.rename(b"a", b"b")
    await _chmod_of(scene, b"b")
    await scene.write(b"a", b"another")


async def _chmod_of(scene: Scene, name: bytes) -> None:
    await scene.fs.setattr(await scene.ino(name), None, mode=0o600)


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize(
    ("then", "there"),
    [
        (_chmod, {b"a"}),
        (_link, {b"a", b"b"}),
        (lambda scene: scene.rename(b"a", b"b"), {b"b"}),
        (_renamed_twice, {b"b"}),
        (_renamed_and_changed, {b"b"}),
        (lambda scene: scene.unlink(b"a"), set()),
    ],
    ids=["chmod", "link", "renamed", "renamed-twice", "renamed-and-changed", "unlinked"],
)
def test_an_open_file_takes_the_place_of_another_before_its_first_close(
    landed: bool, then: Then, there: set[bytes]
) -> None:
    """What was done to it then was done to a name without a file on the PFS: ENOENT for ever, and all after waited."""

    @scene(fsync="returned")
    async def play(scene: Scene) -> None:
        await scene.write(b"a.tmp", b"old")
        if landed:
            await scene.drained()
        scene.faults.away = True
        await scene.rename(b"a.tmp", b"a")
        handle = await scene.create(b"new.tmp", b"new")
        await scene.rename(b"new.tmp", b"a")
        await then(scene)
        await trio.sleep(1)
        scene.faults.away = False
        await trio.sleep(1)
        await scene.close(handle)
        await scene.drained()
        others = {b"a": b"another"} if then is _renamed_and_changed else {}
        wanted = dict.fromkeys(there, b"new") | others
        found = {name: scene.on_pfs(name) for name in (b"a.tmp", b"a", b"b", b"c", b"new.tmp")}
        assert {name: data for name, data in found.items() if data is not None} == wanted

    play()


@pytest.mark.parametrize("how", ["unlinked", "replaced"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_what_only_the_pfs_has_goes_on_without_a_name_while_it_is_open(how: str, *, is_killed: bool) -> None:
    """Reading it gave ESTALE, and a change of it began with nothing."""

    @scene(planted={b"f": ("f", 0o644, b"bytes")})
    async def play(scene: Scene) -> None:
        opened = scene.kernel.opened(scene.fs, await scene.fs.open(await scene.ino(b"f"), os.O_RDWR))
        if how == "unlinked":
            await scene.unlink(b"f")
        else:
            await scene.write(b"g", b"others")
            await scene.rename(b"g", b"f")
        await scene.drained()
        if is_killed:
            await scene.killed(supervised=True)
        assert await scene.fs.read(opened.handle, 0, 10) == b"bytes"
        await scene.fs.write(opened.handle, 0, b"B")
        assert await scene.fs.read(opened.handle, 0, 10) == b"Bytes"
        scene.kernel.closed(opened)
        await scene.close(opened.handle)
        await trio.sleep(5)
        assert len(scene.life.staging.stages()) == (how == "replaced")

    play()
