"""Copies that are bad, or that stand for something else by now, a scene each."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
import xxhash
from sim_check import PAGE_SLACK_BYTES, commit_file
from sim_fill import SimDisk, slow_disk
from sim_nvme import Nvme
from sim_run import inline_threads
from test_found import Scene, _overwrite
from test_found_nodes import DIRECTORY, FILE, Pair, play
from test_spill import spilled

from cachexfs.core.manifest import LATER
from cachexfs.core.records import ROOT_FID
from cachexfs.engine.node import REFUSAL_S
from cachexfs.errors import FsError

MIB = 1 << 20
DATA = b"".join(b"%07d\n" % line for line in range(2 * MIB // 8))


def test_what_was_overwritten_in_place_before_its_node_was_lost_holds_nothing_up() -> None:
    """Both survivors have what it is now, none what a commit file had named; each asked its own copy for ever."""

    async def scene(pair: Pair) -> None:
        directory = (await pair.fs(0).mkdir(ROOT_FID, b"d", DIRECTORY)).ino
        kernel, life = pair.seats[0].kernel, pair.seats[0].current
        assert life is not None
        opened = None
        while opened is None or not opened.passed:  # the supervisor refuses now and then
            name = b"m%d" % pair.next_save()
            opened = kernel.opened(life.filesystem, (await pair.fs(0).create(directory, name, FILE, 1))[0])
        kernel.write(opened, 0, b"old")
        await pair.fs(0).fsync(opened.handle)
        await pair.fs(0).flush(opened.handle)  # a duplicate is closed
        members = {name: b"old"}
        pair.saves.made[commit_file(1, members)] = members
        await pair.write(0, directory, b".metadata.tmp", commit_file(1, members))
        await pair.fs(0).rename(directory, b".metadata.tmp", directory, b".metadata", 0)
        kernel.write(opened, 0, b"new")
        await pair.fs(0).flush(opened.handle)
        kernel.closed(opened)
        await pair.fs(0).release(opened.handle)
        await trio.sleep(5)
        await pair.lose(0, 30.0)  # another node has a copy by then
        pair.faults.away = False
        with trio.fail_after(600):
            while any(op.path == b"d/" + name for _, op, _ in pair.log.state.ops()):  # noqa: ASYNC110
                await trio.sleep(1)
        found = pair.store.find(b"d/" + name)
        assert found is not None
        assert found.data == b"new"

    play(scene, nodes=3)


def test_what_an_fsync_has_brought_stays_though_the_partner_hears_late_that_the_file_was_emptied() -> None:
    """The staged file goes on with its name: the partner removed the replica as that of what had been there before."""

    async def scene(pair: Pair) -> None:
        fs, kernel, opened = pair.fs(0), pair.seats[0].kernel, None
        while opened is None or not opened.passed:  # the supervisor refuses now and then
            name = b"f%d" % pair.next_save()
            opened = kernel.opened(fs, (await fs.create(ROOT_FID, name, FILE, os.O_RDWR))[0])
        kernel.write(opened, 0, b"first")
        await fs.fsync(opened.handle)
        pair.seats[1].link.set(up=False)
        await fs.setattr(opened.handle.vnode.ino, opened.handle, size=0)
        await fs.flush(opened.handle)  # a duplicate is closed
        kernel.write(opened, 0, b"second")
        await fs.fsync(opened.handle)
        pair.seats[1].link.set(up=True)
        await trio.sleep(2)
        await pair.lose(0, 60)
        assert await pair.read(1, name) == b"second"

    play(scene)


def garble(path: str, offset: int = 0) -> None:
    """Something writes over a file behind everybody's back."""
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, b"garbled", offset)
    os.close(fd)


def test_bad_bytes_in_memory_take_no_claim_from_the_replica_on_nvme_beside_them() -> None:
    """Both were dropped, and the good one with them; applications there went on reading the bad one."""

    async def scene(pair: Pair) -> None:
        assert pair._nursery is not None
        await pair.write(0, ROOT_FID, b"a", b"good bytes")
        await trio.sleep(5)
        first = pair.seats[0].current
        assert first is not None
        pair.seats[0].kill(supervised=False)
        await trio.testing.wait_all_tasks_blocked()
        (stage,) = first.staging.stages()
        garble(first.staging.path(stage))
        await pair.seats[0].born(pair._nursery)
        await trio.sleep(30)  # it was found, and the partner has sent it back
        life = pair.seats[0].current
        assert life is not None
        assert life.store is not None
        assert life.store.committed(stage) is not None
        fs = pair.fs(0)
        assert await pair.read(0, b"a") == b"good bytes"
        pair.seats[1].kill(supervised=False)  # nobody else is to help
        await trio.sleep(30)
        assert await pair.read(0, b"a") == b"good bytes"
        pair.faults.away = False
        await trio.sleep(200)
        assert (await fs.xattrs((await fs.lookup(ROOT_FID, b"a")).ino))[b"user.cachex.stage"] == b"pfs"
        assert await pair.read(0, b"a") == b"good bytes"

    play(scene)


def test_what_was_removed_after_its_commit_file_lands_from_the_partner_where_its_own_node_has_bad_bytes() -> None:
    """Its node had a copy, so it was the one to land it: it got EIO for ever."""

    async def scene(pair: Pair) -> None:
        assert pair._nursery is not None
        directory = (await pair.fs(0).mkdir(ROOT_FID, b"d", DIRECTORY)).ino
        members = {b"m": b"good bytes"}
        pair.saves.made[commit_file(1, members)] = members
        await pair.write(0, directory, b"m", members[b"m"])
        await pair.write(0, directory, b".metadata.tmp", commit_file(1, members))
        await pair.fs(0).rename(directory, b".metadata.tmp", directory, b".metadata", 0)
        await trio.sleep(5)
        await pair.fs(0).unlink(directory, b"m")
        first = pair.seats[0].current
        assert first is not None
        pair.seats[0].kill(supervised=False)
        await trio.testing.wait_all_tasks_blocked()
        (stage,) = {op.stage for _, op, _ in pair.log.state.ops() if op.path == b"d/m" and op.stage}
        garble(first.staging.path(stage))
        await pair.seats[0].born(pair._nursery)
        pair.faults.away = False
        with trio.fail_after(600):
            while any(op.kind == "put" for _, op, _ in pair.log.state.ops()):  # noqa: ASYNC110
                await trio.sleep(1)

    play(scene)


def spilling(function: Callable[[Scene], Awaitable[None]]) -> Callable[[], None]:
    """A scene with 3 MiB of memory, in which ``a``, 2 MiB, has moved to NVMe."""

    async def main(directory: str) -> None:
        disk = SimDisk(random.Random(1), 1 << 30)
        with slow_disk(disk.random, disk):
            async with trio.open_nursery() as nursery:
                made = Scene(
                    directory, nursery, memory=3 * MIB, spill=os.path.join(directory, "nvme"), fsync="returned"
                )
                made.disk = disk
                await made.start()
                await made.fs.names(ROOT_FID)
                made.faults.away = True
                await made.write(b"a", DATA)
                await made.write(b"b", b"b" * (2 * MIB))
                await function(made)
                nursery.cancel_scope.cancel()

    def test() -> None:
        with tempfile.TemporaryDirectory() as directory, inline_threads(1):
            trio.run(main, directory, clock=trio.testing.MockClock(autojump_threshold=0))

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    return test


@spilling
async def test_what_nvme_has_changed_of_a_spilled_file_is_not_read(scene: Scene) -> None:
    (stage,) = spilled(scene)
    garble(scene.life.staging.path(stage), MIB + 5)
    handle = await scene.fs.open(await scene.ino(b"a"), os.O_RDONLY)
    for offset in (MIB, 0):  # all that is known is that the whole is not what it was
        with pytest.raises(FsError) as error:
            await scene.fs.read(handle, offset, 4096)
        assert error.value.errno == errno.EIO
    await scene.fs.release(handle)
    assert await scene.stage(b"a") == "lost"


@spilling
async def test_what_nvme_has_changed_of_a_spilled_file_is_read_from_the_pfs_and_not_copied_by_a_write(
    scene: Scene,
) -> None:
    """It became a content of its own, with a digest that said that it was right."""
    (stage,) = spilled(scene)
    scene.faults.away = False
    await scene.drained()
    garble(scene.life.staging.path(stage), MIB + 5)
    handle = await scene.fs.open(await scene.ino(b"a"), os.O_RDWR)
    assert await scene.fs.read(handle, MIB, 4096) == DATA[MIB : MIB + 4096]
    await scene.fs.write(handle, 0, b"new")
    await scene.close(handle)
    await scene.drained()
    assert scene.on_pfs(b"a") == b"new" + DATA[3:]


@spilling
async def test_what_nvme_has_changed_of_a_spilled_file_does_not_get_into_what_a_write_makes_of_it(scene: Scene) -> None:
    (stage,) = spilled(scene)
    garble(scene.life.staging.path(stage), MIB + 5)
    handle = await scene.fs.open(await scene.ino(b"a"), os.O_RDWR)
    with pytest.raises(FsError):
        await scene.fs.write(handle, 0, b"new")
    with contextlib.suppress(FsError):
        await scene.close(handle)
    scene.faults.away = False
    await trio.sleep(100)
    assert scene.on_pfs(b"a") is None


@spilling
async def test_what_nvme_cannot_read_of_what_was_overwritten_holds_nothing_up(scene: Scene) -> None:
    """A commit file had named it, so it was to land first: it got EIO for ever, and the next content waited."""
    (stage,) = spilled(scene)
    await scene.write(b".metadata", commit_file(1, {b"a": DATA}))
    await _overwrite(scene, b"a", b"new")
    nvme = Nvme(os.path.dirname(scene.life.staging.path(stage)), scene.random)
    nvme.unreadable.add(os.stat(scene.life.staging.path(stage)).st_ino)
    with nvme.installed():
        scene.faults.away = False
        await trio.sleep(300)
    assert scene.on_pfs(b"a") == b"new"
    assert scene.on_pfs(b".metadata") is None  # it is of other bytes
    assert scene.life.parts.drainer.is_idle()


def test_two_writers_that_copy_what_was_published_share_no_room() -> None:
    """Each had asked for it before either had taken it: memory held more than its limit."""

    @spilling
    async def scene(scene: Scene) -> None:
        scene.faults.away = False
        for name in (b"c", b"d"):
            await scene.write(name, b"x" * MIB)
        await scene.drained()
        staging, copy_room = scene.life.staging, scene.life.parts.files.source.fetch_into
        for name in (b"a", b"b", b"c", b"d"):  # all have landed: whoever needs room gets theirs
            assert scene.on_pfs(name)

        async def slow(*args: Any) -> None:
            await trio.sleep(1)
            await copy_room(*args)

        scene.life.parts.files.source.fetch_into = slow  # type: ignore[method-assign]
        for stage in staging.stages():
            if not staging.is_spilled(stage):
                await scene.life.parts.keeper.spiller.move(stage, None)
        assert staging.used_bytes == 0

        async def change(name: bytes) -> None:
            handle = await scene.fs.open(await scene.ino(name), os.O_WRONLY)
            await scene.fs.write(handle, 0, b"new")
            await scene.close(handle)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(change, b"a")
            nursery.start_soon(change, b"b")
        await scene.drained()
        assert scene.on_pfs(b"b") == b"new" + b"b" * (2 * MIB - 3)
        assert staging.peak_bytes <= 3 * MIB + PAGE_SLACK_BYTES

    scene()


def test_a_partner_whose_disk_refuses_replicas_is_passed_over() -> None:
    """It stayed the partner of its neighbour, whose files had no second copy until they were on the PFS."""

    async def scene(pair: Pair) -> None:
        first, second = pair.seats[0].current, pair.seats[1].current
        assert first is not None
        assert second is not None
        assert second.store is not None
        second.store._read_only = True
        handle, _ = await pair.fs(0).create(ROOT_FID, b"a", FILE, os.O_WRONLY)
        await pair.fs(0).write(handle, 0, b"bytes")
        await pair.fs(0).fsync(handle)
        await pair.fs(0).flush(handle)
        await pair.fs(0).release(handle)
        await pair.write(0, ROOT_FID, b"b", b"others")
        await trio.sleep(5)
        for name in (b"a", b"b"):
            found = await pair.fs(0).xattrs((await pair.fs(0).lookup(ROOT_FID, name)).ino)
            assert found[b"user.cachex.stage"] == b"partner"
        assert any("n1 takes no replicas" in error and "n2" in error for error in first.node.known_errors())
        second.store._read_only = False
        await trio.sleep(REFUSAL_S)
        await pair.write(0, ROOT_FID, b"c", b"more")
        await trio.sleep(5)
        assert len(second.store.list()) == 1
        assert not any("takes no replicas" in error for error in first.node.known_errors())

    play(scene, nodes=3)


def test_the_manifest_of_a_commit_file_says_what_was_overwritten_before_it_was_sent() -> None:
    """It did not name the member at all, and ``recover`` published it beside another save's."""

    async def scene(pair: Pair) -> None:
        partner = pair.seats[1].current
        assert partner is not None
        assert partner.store is not None
        directory = (await pair.fs(0).mkdir(ROOT_FID, b"d", DIRECTORY)).ino
        members = {b"m": b"old", b"n": b"stays"}
        for name, data in members.items():
            await pair.write(0, directory, name, data)
        pair.saves.made[commit_file(1, members)] = members
        await pair.write(0, directory, b".metadata.tmp", commit_file(1, members))
        await trio.sleep(5)
        await pair.fs(0).rename(directory, b".metadata.tmp", directory, b".metadata", 0)
        pair.net.parted.add(frozenset(["n0", "n1"]))
        await pair.write(0, directory, b"m.new", b"new")
        await pair.fs(0).rename(directory, b"m.new", directory, b"m", 0)
        await trio.sleep(200)
        pair.calm()
        found = await pair.fs(0).lookup(directory, b".metadata")
        await pair.fs(0).setattr(found.ino, None, mode=0o600)
        await trio.sleep(90)  # an exchange that began before may take its time
        manifest = next(m for m in partner.store.list() if m.path == b"d/.metadata")
        assert {m.name: m.digest for m in manifest.members} == {
            b"m": LATER,
            b"n": xxhash.xxh3_128_digest(members[b"n"]),
        }

    play(scene)
