"""Names that a file takes before the PFS has any of its bytes, a scene each."""

from __future__ import annotations

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
