"""An NVMe that fails: what a spill promises, and what a close that failed leaves. More of it: ``sim_fill``."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from sim_fill import SimDisk, slow_disk
from sim_run import inline_threads
from test_found import Scene, scene

from cachexfs.core.records import ROOT_FID
from cachexfs.engine import spill
from cachexfs.engine.vnode import Vnode
from cachexfs.errors import CatalogueUnavailableError, FsError

KIB = 1 << 10


class Failing(SimDisk):
    """Fails at calls that the scene names."""

    at: tuple[str, ...] = ()

    def called(self, what: str) -> None:
        if what in self.at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def full(function: Callable[[Scene, Failing], Awaitable[None]]) -> Callable[[], None]:
    """A scene with 96 KiB of memory, 1 MiB of NVMe, and a PFS that does not answer yet."""

    def test() -> None:
        disk = Failing(random.Random(1), 1 << 20)

        async def main(directory: str) -> None:
            with slow_disk(disk.random, disk):
                async with trio.open_nursery() as nursery:
                    spill = os.path.join(directory, "nvme")
                    made = Scene(directory, nursery, memory=96 * KIB, spill=spill, fsync="returned")
                    made.disk = disk
                    await made.start()
                    await made.fs.names(ROOT_FID)
                    made.faults.away = True
                    await function(made, disk)
                    nursery.cancel_scope.cancel()

        with tempfile.TemporaryDirectory() as directory, inline_threads(1):
            trio.run(main, directory, clock=trio.testing.MockClock(autojump_threshold=0))

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    return test


def spilled(scene: Scene) -> list[str]:
    staging = scene.life.staging
    return [stage for stage in staging.stages() if staging.is_spilled(stage)]


@full
async def test_memory_is_given_up_only_for_what_nvme_has_synced(scene: Scene, disk: Failing) -> None:
    """A device that fails takes bytes into the kernel's cache and loses them afterwards."""
    disk.at = ("sync",)
    await scene.write(b"a", b"a" * 60 * KIB)
    with pytest.raises(FsError):
        await scene.write(b"b", b"b" * 60 * KIB)
    assert spilled(scene) == []
    assert "NVMe" in scene.life.node.errors["spill"]
    disk.at = ()
    await trio.sleep(60)
    await scene.write(b"b", b"b" * 60 * KIB)
    assert spilled(scene)
    holders = [(await scene.life.parts.attributes.of(await scene.ino(name)))["holders"] for name in (b"a", b"b")]
    assert sorted(holders) == ["n0:memory", "n0:nvme"]  # the first said memory, too
    assert await scene.read(b"a") == b"a" * 60 * KIB


@full
async def test_what_nvme_loses_of_a_growing_file_is_an_error_of_its_close_and_is_published_later(
    scene: Scene, disk: Failing
) -> None:
    handle = await scene.create(b"a")
    for at in range(4):
        await scene.fs.write(handle, at * 60 * KIB, b"%d" % at * 60 * KIB)
    assert spilled(scene)
    disk.at = ("sync",)
    with pytest.raises(FsError):
        await scene.fs.flush(handle)
    with pytest.raises(FsError):
        await scene.fs.release(handle)
    assert await scene.stage(b"a") == "writing"
    assert any("could not be published" in error for error in scene.life.node.known_errors())
    disk.at, scene.faults.away = (), False
    await trio.sleep(60)
    await scene.drained()
    assert scene.on_pfs(b"a") == b"".join(b"%d" % at * 60 * KIB for at in range(4))
    assert not any("could not be published" in error for error in scene.life.node.known_errors())


@pytest.mark.parametrize("size", [40 * KIB, 190 * KIB])
@pytest.mark.parametrize("how", ["as published", "not published yet"])
def test_a_truncation_that_nvme_refuses_leaves_the_file_as_it_was(how: str, size: int) -> None:
    """It was shown, and published as soon as NVMe took it, though its caller had been told EIO."""

    @full
    async def truncate(scene: Scene, disk: Failing) -> None:
        data = b"".join(b"%d" % at * 60 * KIB for at in range(3))
        handle = await scene.create(b"a")
        for at in range(3):
            await scene.fs.write(handle, at * 60 * KIB, data[at * 60 * KIB : (at + 1) * 60 * KIB])
        if how == "as published":
            await scene.close(handle)
            await trio.sleep(1)
        await scene.create(b"in the way", b"x" * 90 * KIB)
        disk.at = ("sync",)
        for close in (scene.fs.flush, scene.fs.release) if how != "as published" else ():
            with pytest.raises(FsError):
                await close(handle)
        ino = await scene.ino(b"a")
        with pytest.raises(FsError) as error:
            await scene.fs.setattr(ino, None, size=size)
        assert error.value.errno == errno.EIO
        assert (await scene.fs.getattr(ino)).size == len(data)
        if how == "as published":
            assert await scene.stage(b"a") != "writing"
        disk.at, scene.faults.away = (), False
        await trio.sleep(60)
        assert await scene.read(b"a") == data
        await scene.drained()
        assert scene.on_pfs(b"a") == data

    truncate()


@full
async def test_a_file_that_nvme_has_no_room_for_is_enospc_though_it_has_for_the_write(
    scene: Scene, disk: Failing
) -> None:
    """The writer asked again and again without waiting, for ever."""
    disk.capacity_bytes = 40 * KIB
    source, asked = scene.life.parts.files.source, list[int]()
    spill_own = source.spill_own

    async def counted(vnode: Vnode) -> bool:
        asked.append(vnode.fid)
        assert len(asked) < 1000, "it does not wait"
        return await spill_own(vnode)

    source.spill_own = counted  # type: ignore[method-assign]
    handle = await scene.create(b"a", b"x" * 90 * KIB)
    began_s = trio.current_time()
    with pytest.raises(FsError) as error:
        await scene.fs.write(handle, 90 * KIB, b"x" * 20 * KIB)
    assert error.value.errno == errno.ENOSPC
    assert trio.current_time() - began_s >= scene.options.full_timeout_s
    disk.capacity_bytes = 1 << 20
    await scene.fs.write(handle, 90 * KIB, b"x" * 20 * KIB)
    await scene.close(handle)
    assert await scene.read(b"a") == b"x" * 110 * KIB


@full
async def test_a_write_that_nvme_refuses_is_told(scene: Scene, disk: Failing) -> None:
    handle = await scene.create(b"a")
    for at in range(2):
        await scene.fs.write(handle, at * 60 * KIB, b"x" * 60 * KIB)
    disk.at = ("write",)
    with pytest.raises(FsError, match="NVMe"):
        await scene.fs.write(handle, 120 * KIB, b"x" * KIB)
    assert "NVMe" in scene.life.node.errors["spill"]


@full
async def test_a_file_that_moves_to_nvme_just_before_it_is_copied_is_no_error(scene: Scene, disk: Failing) -> None:
    scene.faults.away = False
    errors, told = scene.life.parts.drainer.errors, list[object]()
    failed, prepare = errors.failed, scene.life.pfs.prepare

    async def tell(*what: Any) -> None:
        told.append(what)
        await failed(*what)

    async def late(source: str, *args: Any, **options: Any) -> None:
        for stage in scene.life.staging.stages():
            if not scene.life.staging.is_spilled(stage):
                assert await scene.life.parts.keeper.spiller.move(stage, None)
        await prepare(source, *args, **options)

    scene.life.pfs.prepare, errors.failed = late, tell  # type: ignore[method-assign]
    await scene.write(b"a", b"a" * 60 * KIB)
    await scene.drained()
    assert scene.on_pfs(b"a") == b"a" * 60 * KIB
    assert spilled(scene)
    assert told == []


@full
async def test_bytes_that_nvme_has_changed_do_not_reach_the_pfs(scene: Scene, disk: Failing) -> None:
    await scene.write(b"a", b"a" * 60 * KIB)
    await scene.write(b"b", b"b" * 60 * KIB)
    (stage,) = spilled(scene)
    fd = os.open(scene.life.staging.path(stage), os.O_WRONLY)
    os.write(fd, b"garbled")
    os.close(fd)
    scene.faults.away = False
    await trio.sleep(60)
    assert await scene.stage(b"a") == "lost"
    assert scene.on_pfs(b"a") is None
    assert scene.on_pfs(b"b") == b"b" * 60 * KIB


@scene(fsync="returned")
async def test_what_was_closed_while_the_catalogue_was_away_is_published_when_it_answers(scene: Scene) -> None:
    await scene.write(b"a", b"old")
    await scene.drained()
    handle = await scene.create(b"a", b"newer")
    scene.link.set(up=False)
    await trio.sleep(100)
    for end in (scene.fs.flush, scene.fs.release):
        with pytest.raises((CatalogueUnavailableError, FsError)):
            await end(handle)
    scene.link.set(up=True)
    await trio.sleep(60)
    await scene.drained()
    assert scene.on_pfs(b"a") == b"newer"


@full
async def test_a_file_that_is_closed_while_it_moves_to_nvme_gives_its_memory_back(scene: Scene, disk: Failing) -> None:
    """Its descriptor stayed open when it was evicted in the midst of that."""
    handle = await scene.create(b"a", b"a" * 60 * KIB)
    await scene.fs.flush(handle)
    vnode, stage, closed = handle.vnode, handle.vnode.stage, trio.Event()
    scene.life.parts.files.remember(vnode)  # as a lookup does
    copy_bytes = spill.copy_bytes

    async def wait_for_close(source: int, target: int, length: int) -> None:
        await closed.wait()
        await copy_bytes(source, target, length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "copy_bytes", wait_for_close)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.life.parts.keeper.spiller._move_published, stage, vnode)
            await trio.testing.wait_all_tasks_blocked()
            await scene.fs.release(handle)
            scene.life.staging.remove(stage)
            closed.set()
    assert vnode.fd == -1


@full
async def test_what_is_copied_to_the_pfs_now_stays_in_memory_as_long_as_there_is_something_newer(
    scene: Scene, disk: Failing
) -> None:
    """Its copy began anew from NVMe."""
    for name in (b"a", b"b", b"c"):
        await scene.write(name, b"x" * 30 * KIB)
    await scene.write(b"d", b"x" * 30 * KIB)
    staging, view = scene.life.staging, scene.life.node.catalogue.view
    spilled = {}
    for name in (b"a", b"b", b"c", b"d"):
        content = view.generation(await scene.ino(name))
        assert content is not None
        spilled[name] = staging.is_spilled(content.stage)
    assert spilled == {b"a": False, b"b": False, b"c": True, b"d": False}
