"""What the simulation has found, a scene each: the real engine, a simulated PFS, one thing that happens."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
import trio
import trio.testing
import xxhash
from sim_catalogue import Link, Log
from sim_check import Checkers, Saves, commit_file
from sim_kernel import Kernel, OpenFile
from sim_life import Disk, Life, SimClock, SimFilesystem
from sim_pfs import Faults, SimPfs
from sim_run import inline_threads
from sim_store import Store

from cachexfs.config import MountOptions
from cachexfs.core.changes import NewAttrs
from cachexfs.core.records import ROOT_FID, OpKind
from cachexfs.core.stages import make_stage
from cachexfs.engine.publishing import DIGEST_AT_ONCE_BYTES_MAX
from cachexfs.engine.vnode import Handle
from cachexfs.errors import FsError

NAMES, NEXT = (commit_file(number, {b"m": b"one"}) for number in (1, 2))  # of checkpoints with a member "m"

FILE, DIRECTORY = NewAttrs(0o644, 0, 0), NewAttrs(0o755, 0, 0)


_NOTHING: Mapping[bytes, tuple[str, int, bytes]] = {}


class Scene:
    """One node and its PFS. ``before(step)`` may raise, wait or do nothing before a step of a call on the PFS."""

    def __init__(
        self,
        directory: str,
        nursery: trio.Nursery,
        planted: Mapping[bytes, tuple[str, int, bytes]] = _NOTHING,
        **options: Any,
    ) -> None:
        self._nursery = nursery
        self.options = MountOptions(
            pfs="/pfs",
            mountpoint="/mnt",
            staging=directory,
            node="n0",
            **{"memory": 64 << 20, "fsync": "pfs", **options},
        )
        self.store, self.faults, self.log, self.clock = Store(), Faults(), Log(), SimClock()
        self.store.plant(planted)
        self.random = random.Random(1)
        self.kernel = Kernel(self.random, self.clock, passthrough=True)
        self.before: Callable[[str], None] = lambda step: None
        self.disk: Disk | None = None
        self.link = Link()
        self.digest_at_once_bytes = DIGEST_AT_ONCE_BYTES_MAX  # 0: as if all files were large
        self.mended = False  # the catalogue has lost what it knew, or some of it
        self.life: Life

    async def start(self, after: Life | None = None) -> Life:
        pfs = SimPfs(self.store, self.faults, self.random, lambda step: None, self._nursery)
        act = pfs._act

        def acting(what: str, action: Callable[[], object]) -> None:
            self.before(what)
            act(what, action)

        pfs._act = acting  # type: ignore[method-assign]
        self.life = Life(self.options, self.log, pfs, self.clock, self.random, after, self.link, disk=self.disk)
        self.life.filesystem.kernel = self.kernel
        self.life.parts.files.publishing.digest_at_once_bytes = self.digest_at_once_bytes
        if self.mended:
            self.life.set_aside = self.life.staging.set_aside
        if after is not None:
            self.life.open_files, self.life.resume = self.kernel.open_files(), self.kernel.resume
        await self._nursery.start(self.life.run)
        return self.life

    def as_if_large(self) -> None:
        """From now on closes wait for no digests."""
        self.digest_at_once_bytes = self.life.parts.files.publishing.digest_at_once_bytes = 0

    async def killed(self, *, supervised: bool = False) -> Life:
        """The daemon dies, the next one starts."""
        self.life.kill(supervised=supervised)
        self.kernel.died(supervised=supervised)
        await trio.testing.wait_all_tasks_blocked()
        return await self.start(self.life if supervised else None)

    @property
    def fs(self) -> SimFilesystem:
        return self.life.filesystem

    async def ino(self, path: bytes) -> int:
        ino = ROOT_FID
        for name in path.split(b"/") if path else ():
            ino = (await self.fs.lookup(ino, name)).ino
        return ino

    async def place(self, path: bytes) -> tuple[int, bytes]:
        parent, _, name = path.rpartition(b"/")
        return await self.ino(parent), name

    async def create(self, path: bytes, data: bytes = b"") -> Handle:
        handle, _ = await self.fs.create(*await self.place(path), FILE, os.O_WRONLY)
        if data:
            await self.fs.write(handle, 0, data)
        return handle

    async def passed(self, path: bytes) -> OpenFile:
        """A new file whose bytes the kernel puts into staging itself."""
        while True:
            opened = self.kernel.opened(self.fs, await self.create(path))
            if opened.passed:  # the supervisor refuses now and then
                return opened
            await self.close(opened.handle)
            await self.unlink(path)

    async def close(self, handle: Handle) -> None:
        await self.fs.flush(handle)
        await self.fs.release(handle)

    async def write(self, path: bytes, data: bytes) -> None:
        await self.close(await self.create(path, data))

    async def mkdir(self, path: bytes) -> None:
        await self.fs.mkdir(*await self.place(path), DIRECTORY)

    async def rename(self, old: bytes, new: bytes) -> None:
        await self.fs.rename(*await self.place(old), *await self.place(new), 0)

    async def unlink(self, path: bytes) -> None:
        await self.fs.unlink(*await self.place(path))

    async def read(self, path: bytes) -> bytes:
        handle = await self.fs.open(await self.ino(path), os.O_RDONLY)
        try:
            return await self.fs.read(handle, 0, 1 << 20)
        finally:
            await self.fs.release(handle)

    async def drained(self) -> None:
        with trio.fail_after(1000):
            while self.life.parts.drainer.own_pending():  # noqa: ASYNC110
                await trio.sleep(0.1)

    def on_pfs(self, path: bytes, *, synced: bool = False) -> bytes | None:
        found = self.store.find(path, kept=synced)
        return None if found is None else found.kept_data if synced else found.data

    async def stage(self, path: bytes) -> str:
        return (await self.life.parts.attributes.of(await self.ino(path)))["stage"]

    def left(self) -> list[bytes]:
        return [*self.store.tmp.entries, *self.store.held.entries]


def scene(**options: Any) -> Callable[[Callable[[Scene], Awaitable[None]]], Callable[[], None]]:
    """Turn ``async def test(scene)`` into a test that runs in the simulation."""

    def decorate(function: Callable[[Scene], Awaitable[None]]) -> Callable[[], None]:
        async def main(directory: str) -> None:
            async with trio.open_nursery() as nursery:
                made = Scene(directory, nursery, **options)
                await made.start()
                await made.fs.names(ROOT_FID)  # the root is imported while the PFS answers
                await function(made)
                nursery.cancel_scope.cancel()

        def test() -> None:
            with tempfile.TemporaryDirectory() as directory, inline_threads(1):
                trio.run(main, directory, clock=trio.testing.MockClock(autojump_threshold=0))

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        return test

    return decorate


def fail_once(scene: Scene, step: str, code: int = errno.EIO, *, after: int = 0) -> None:
    """The next call that comes to ``step`` fails there, after ``after`` that did not."""
    count = [after]

    def before(what: str) -> None:
        if what == step:
            count[0] -= 1
            if count[0] == -1:
                raise OSError(code, os.strerror(code))

    scene.before = before


def die_at(scene: Scene, step: str) -> trio.Event:
    """The daemon dies when a call comes to ``step``."""
    died = trio.Event()

    def before(what: str) -> None:
        if what == step and not died.is_set():
            died.set()
            scene.life.kill()
            raise OSError(errno.EIO, "killed")

    scene.before = before
    return died


# ---- fsync=pfs
@scene()
async def test_what_was_overwritten_after_an_fsync_is_what_lands(scene: Scene) -> None:
    """The staged file keeps its name and its size: the copy that the fsync made is not the file any more."""
    handle = await scene.create(b"a", b"old bytes")
    await scene.fs.fsync(handle)
    await scene.fs.write(handle, 0, b"new bytes")
    await scene.close(handle)
    await scene.drained()
    assert scene.on_pfs(b"a") == b"new bytes"


@scene()
async def test_a_second_fsync_saves_what_the_first_one_did_not(scene: Scene) -> None:
    handle = await scene.create(b"a", b"old bytes")
    await scene.fs.fsync(handle)
    await scene.fs.write(handle, 0, b"new bytes")
    await scene.fs.fsync(handle)
    assert b"new bytes" in [ino.kept_data for ino in scene.store.tmp.kept.values()]
    await scene.close(handle)


@scene()
async def test_the_landing_of_an_earlier_generation_leaves_the_copy_of_a_later_fsync(scene: Scene) -> None:
    """Appended bytes lie in the same staged file as the generation before."""
    scene.faults.away = True
    await scene.write(b"a", b"first")
    handle = await scene.fs.open(await scene.ino(b"a"), os.O_WRONLY)
    await scene.fs.write(handle, 5, b" second")
    scene.faults.away = False
    await scene.fs.fsync(handle)
    await scene.drained()
    assert scene.on_pfs(b"a") == b"first"
    assert b"first second" in [ino.kept_data for ino in scene.store.tmp.kept.values()]
    await scene.close(handle)
    await scene.drained()
    assert scene.on_pfs(b"a") == b"first second"
    assert scene.left() == []


@scene()
async def test_an_fsync_of_an_emptied_file_is_kept(scene: Scene) -> None:
    await scene.write(b"a", b"something")
    await scene.drained()
    handle = await scene.fs.open(await scene.ino(b"a"), os.O_WRONLY | os.O_TRUNC)
    await scene.fs.fsync(handle)
    assert [ino.kept_data for name, ino in scene.store.tmp.kept.items() if not name.endswith(b".rec")] == [b""]
    await scene.close(handle)


@scene(fsync_timeout_s=10.0)
async def test_an_fsync_on_a_pfs_that_hangs_is_eio(scene: Scene) -> None:
    handle = await scene.create(b"a", b"x")
    scene.faults.away = True
    with pytest.raises(FsError) as found:
        await scene.fs.fsync(handle)
    assert found.value.errno == errno.EIO


@scene()
async def test_a_file_that_was_flushed_and_stays_open_is_drained(scene: Scene) -> None:
    """As after ``dup`` and ``close``: FLUSH has published it, an fsync must not wait for the last close."""
    handle = await scene.create(b"a", b"x")
    await scene.fs.flush(handle)
    await scene.drained()
    assert scene.on_pfs(b"a") == b"x"
    await scene.fs.release(handle)


# ---- what lies there for nothing
@scene()
async def test_copies_of_fsyncs_do_not_stay_beside_what_landed(scene: Scene) -> None:
    handle = await scene.create(b"a", b"one")
    await scene.fs.fsync(handle)
    await scene.fs.write(handle, 3, b" two")
    await scene.close(handle)
    await scene.drained()
    assert scene.on_pfs(b"a") == b"one two"
    assert scene.left() == []


@scene()
async def test_copies_of_fsyncs_go_with_their_file(scene: Scene) -> None:
    handle = await scene.create(b"a", b"one")
    await scene.fs.fsync(handle)
    await scene.unlink(b"a")
    await scene.close(handle)
    await trio.sleep(60)
    assert scene.left() == []


@scene()
async def test_what_a_dead_daemon_prepared_for_a_removed_file_goes(scene: Scene) -> None:
    died = die_at(scene, "discard")
    handle = await scene.create(b"a", b"one")
    await scene.fs.fsync(handle)
    await scene.unlink(b"a")
    await died.wait()
    await scene.killed()
    await trio.sleep(60)
    assert scene.left() == []


@scene()
async def test_a_discard_that_is_refused_backs_off(scene: Scene) -> None:
    """It went round and round at full speed before: time did not even pass."""
    scene.faults.away = True
    await scene.write(b"a", b"x")
    await trio.sleep(1)
    refused = [0]

    async def discard(hidden: str, deadline_s: float) -> None:
        refused[0] += 1
        raise OSError(errno.EBUSY, "an abandoned call")

    scene.life.pfs.discard = discard  # type: ignore[method-assign]
    scene.faults.away = False
    fail_once(scene, "sync tmp")
    await scene.unlink(b"a")
    await trio.sleep(60)
    assert 0 < refused[0] < 30


@scene()
async def test_what_a_dead_daemon_prepared_goes_though_the_first_discard_fails(scene: Scene) -> None:
    """The second look took it for its own life's, and left it."""
    died = die_at(scene, "discard")
    handle = await scene.create(b"a", b"one")
    await scene.fs.fsync(handle)
    await scene.unlink(b"a")
    await died.wait()
    fail_once(scene, "discard")
    await scene.killed()
    await trio.sleep(10)
    assert scene.left() != []
    await trio.sleep(60)
    assert scene.left() == []


@scene(memory=1 << 30)
async def test_an_fsync_of_a_passed_file_without_bytes_leaves_nothing(scene: Scene) -> None:
    opened = await scene.passed(b"a")
    await scene.fs.fsync(opened.handle)
    await scene.close(opened.handle)
    await scene.drained()
    assert scene.on_pfs(b"a") == b""
    assert scene.left() == []


# ---- renames, directories, links
@scene()
async def test_a_rename_whose_answer_died_with_the_daemon_is_recognised_and_synced(scene: Scene) -> None:
    await scene.write(b"a", b"x")
    await scene.drained()
    fail_once(scene, "sync directory")
    await scene.rename(b"a", b"b")
    await trio.sleep(0.1)
    assert scene.on_pfs(b"b") == b"x"
    assert scene.on_pfs(b"b", synced=True) is None
    await scene.killed()
    await scene.drained()
    assert scene.on_pfs(b"b", synced=True) == b"x"
    assert await scene.stage(b"b") == "pfs"
    assert scene.on_pfs(b"a", synced=True) is None


@scene()
async def test_the_old_name_of_a_renamed_and_removed_file_does_not_come_back_with_a_power_cut(scene: Scene) -> None:
    await scene.mkdir(b"d")
    await scene.write(b"d/a", b"x")
    await scene.drained()
    fail_once(scene, "sync directory", after=1)  # the new directory is synced, the old one is not
    await scene.rename(b"d/a", b"a")
    await trio.sleep(0.1)
    await scene.unlink(b"a")
    await scene.killed()
    await scene.drained()
    assert scene.on_pfs(b"a", synced=True) is None
    assert scene.on_pfs(b"d/a", synced=True) is None


@scene()
async def test_what_was_moved_out_of_a_directory_lands_though_the_directory_is_gone(scene: Scene) -> None:
    scene.faults.away = True
    await scene.mkdir(b"tmp")
    await scene.write(b"tmp/a", b"x")
    await scene.rename(b"tmp/a", b"a")
    await scene.fs.rmdir(*await scene.place(b"tmp"))
    scene.faults.away = False
    await scene.drained()
    assert set(scene.store.walk()) == {b"a"}


@scene()
async def test_a_removed_file_is_never_shown_by_its_rename(scene: Scene) -> None:
    await scene.write(b"a", b"old")
    await scene.write(b"b", b"new")
    await scene.drained()
    fail_once(scene, "rename")
    await scene.rename(b"b", b"a")
    await trio.sleep(0.1)  # the first attempt has failed
    shown = []
    scene.before = lambda step: shown.append(scene.on_pfs(b"a"))
    await scene.unlink(b"a")
    await scene.drained()
    assert b"new" not in shown
    assert scene.store.walk() == {}


@scene()
async def test_a_symlink_is_known_to_be_on_the_pfs_as_soon_as_its_operation_is_done(scene: Scene) -> None:
    """Two changes of the catalogue, and a death between them, left a link that no removal reached."""
    await scene.fs.symlink(ROOT_FID, b"l", b"to", DIRECTORY)
    key = next(key for key, op in scene.life.parts.drainer.own_pending() if op.kind == OpKind.SYMLINK)
    await scene.drained()
    done = next(r for r in scene.log.revisions if any(c.key == key and c.value is None for c in r))
    assert b"i/%x" % await scene.ino(b"l") in [change.key for change in done]


# ---- a full PFS
@scene()
async def test_removals_pass_data_that_the_pfs_has_no_room_for(scene: Scene) -> None:
    await scene.mkdir(b"d")
    await scene.write(b"d/old", b"o" * 9000)
    await scene.drained()
    scene.store.capacity_bytes = 10_000
    await scene.write(b"d/new", b"n" * 9000)
    await trio.sleep(5)
    assert scene.on_pfs(b"d/new") is None
    await scene.unlink(b"d/old")
    await scene.drained()
    assert scene.on_pfs(b"d/old") is None
    assert scene.on_pfs(b"d/new") == b"n" * 9000


# ---- withdrawals
async def _checkpoint(scene: Scene) -> None:
    await scene.mkdir(b"s")
    await scene.write(b"s/m", b"one")
    await scene.write(b"s/.metadata", NAMES)
    await scene.drained()


async def _commit(scene: Scene, data: bytes = NEXT) -> None:
    """The next commit file, as DCP brings it: the old one goes, a rename."""
    await scene.write(b"s/.metadata.tmp", data)
    await scene.unlink(b"s/.metadata")
    await scene.rename(b"s/.metadata.tmp", b"s/.metadata")


async def _overwrite(scene: Scene, path: bytes, data: bytes) -> None:
    handle = await scene.fs.open(await scene.ino(path), os.O_WRONLY | os.O_TRUNC)
    await scene.fs.write(handle, 0, data)
    await scene.close(handle)


@scene()
async def test_a_member_lands_after_its_commit_file_has_left(scene: Scene) -> None:
    await _checkpoint(scene)
    fail_once(scene, "hide", after=0)
    seen: list[tuple[bytes | None, bytes | None]] = []
    failing = scene.before

    def before(step: str) -> None:
        seen.append((scene.on_pfs(b"s/m"), scene.on_pfs(b"s/.metadata")))
        failing(step)

    scene.before = before
    await _overwrite(scene, b"s/m", b"two")
    await _commit(scene)
    await scene.drained()
    assert (b"two", NAMES) not in seen
    assert (b"one", NEXT) not in seen
    assert scene.on_pfs(b"s/m") == b"two"
    assert await scene.stage(b"s/.metadata") == "pfs"


@scene()
async def test_a_rotation_leaves_a_whole_checkpoint_on_the_pfs_at_every_step(scene: Scene) -> None:
    await _checkpoint(scene)
    seen: list[tuple[bool, bool]] = []

    def before(step: str) -> None:
        names = ((b"s/m", b"s/.metadata"), (b"t/m", b"t/.metadata"))
        seen.append(tuple(all(scene.on_pfs(name) for name in pair) for pair in names))  # type: ignore[arg-type]

    scene.before = before
    scene.faults.away = True
    await scene.mkdir(b"t")
    await scene.write(b"t/m", b"two")
    await scene.write(b"t/.metadata", NAMES)
    for name in (b"s/.metadata", b"s/m"):
        await scene.unlink(name)
    scene.faults.away = False
    await scene.drained()
    assert (True, False) in seen
    assert (False, False) not in seen
    assert scene.on_pfs(b"s/m") is None


@scene()
async def test_a_withdrawal_whose_answer_died_with_the_daemon_is_recognised(scene: Scene) -> None:
    await _checkpoint(scene)
    fail_once(scene, "sync directory")
    await scene.unlink(b"s/m")
    await trio.sleep(0.1)
    await scene.killed()
    await scene.drained()
    assert scene.on_pfs(b"s/m") is None
    assert scene.on_pfs(b"s/.metadata", synced=True) is None
    assert await scene.read(b"s/.metadata") == NAMES


@scene()
async def test_a_commit_file_that_is_removed_while_it_is_withdrawn_leaves_nothing(scene: Scene) -> None:
    await _checkpoint(scene)
    scene.faults.away = True
    await _overwrite(scene, b"s/m", b"two")
    await scene.write(b"s/new", NAMES)
    await scene.rename(b"s/new", b"s/.metadata")
    scene.faults.away = False
    await scene.drained()
    assert scene.on_pfs(b"s/.metadata") == NAMES
    assert scene.left() == []


@scene()
async def test_what_a_commit_file_names_lands_before_it_though_it_is_removed_since(scene: Scene) -> None:
    """Cancelled, it left the commit file on the PFS without its member, until the withdrawal came."""
    scene.faults.away = True
    await scene.mkdir(b"s")
    await scene.write(b"s/m", b"one")
    await scene.write(b"s/.metadata", NAMES)
    await scene.unlink(b"s/m")
    seen: list[tuple[bytes | None, bytes | None]] = []
    scene.before = lambda step: seen.append((scene.on_pfs(b"s/m"), scene.on_pfs(b"s/.metadata")))
    scene.faults.away = False
    await scene.drained()
    assert (None, NAMES) not in seen
    assert scene.on_pfs(b"s/m") is None


# ---- the daemon's death
@scene()
async def test_several_staged_generations_of_one_file_are_adopted(scene: Scene) -> None:
    """The newest is published first, which removes the others: the next look at one of them ended the daemon."""
    scene.faults.away = True
    await scene.write(b"a", b"one")
    handle = await scene.fs.open(await scene.ino(b"a"), os.O_WRONLY | os.O_TRUNC)
    await scene.fs.write(handle, 0, b"three")
    scene.faults.away = False
    await scene.killed()
    assert await scene.read(b"a") == b"three"
    await scene.drained()
    assert scene.on_pfs(b"a") == b"three"


@scene(memory=64 << 10)
async def test_a_copy_in_progress_is_not_the_newest_content(scene: Scene) -> None:
    """A write into a published file copies it first; the daemon dies before the copy is whole."""
    scene.faults.away = True
    await scene.write(b"a", b"a" * 40_000)
    part = make_stage(await scene.ino(b"a"), 0, 1)
    os.close(scene.life.staging.create(part))
    await scene.killed()
    assert await scene.read(b"a") == b"a" * 40_000
    assert len(scene.life.staging.stages()) == 1


# ---- open files
@scene()
async def test_an_open_file_that_was_never_drained_is_readable_without_its_name(scene: Scene) -> None:
    scene.faults.away = True
    await scene.write(b"a", b"still there")
    handle = await scene.fs.open(await scene.ino(b"a"), os.O_RDONLY)
    await scene.unlink(b"a")
    assert await scene.fs.read(handle, 0, 100) == b"still there"
    await scene.fs.release(handle)
    assert scene.life.staging.stages() == []


@scene()
async def test_bytes_that_a_commit_file_waits_for_stay_when_the_last_close_comes_after_the_removal(
    scene: Scene,
) -> None:
    """RELEASE comes after close(2) has returned: a member and its checkpoint were replaced in between."""
    scene.faults.away = True
    await scene.mkdir(b"s")
    member = await scene.create(b"s/m", b"one")
    await scene.fs.flush(member)
    await scene.write(b"s/.metadata", NAMES)
    await scene.unlink(b"s/m")
    await scene.fs.release(member)
    scene.faults.away = False
    await scene.drained()
    assert scene.on_pfs(b"s/m") is None


@scene(memory=64 << 10)
async def test_an_evicted_file_gives_its_memory_back_though_the_kernel_knows_its_name(scene: Scene) -> None:
    """An open descriptor of ours kept it: counted as free, and not free."""
    await scene.write(b"a", b"a" * 40_000)
    attr = await scene.fs.lookup(ROOT_FID, b"a")
    scene.kernel.given(scene.fs.files, attr)
    await scene.read(b"a")
    await scene.drained()
    await scene.write(b"b", b"b" * 40_000)
    Checkers(scene.store, Saves()).memory(scene.life)
    assert await scene.read(b"a") == b"a" * 40_000


# ---- passthrough
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("supervised", [True, False])
@pytest.mark.parametrize("data", [b"shorter", b"the same length", b"much longer than it was"])
def test_what_a_passed_writer_changes_after_a_publication_outlives_the_daemon(
    data: bytes, *, supervised: bool, large: bool
) -> None:
    """It was called damaged, and given up: the staged file was not what its digest says. Of large files that was not
    known yet: the next daemon failed over what was shorter."""

    @scene(memory=1 << 30)
    async def run(scene: Scene) -> None:
        if large:
            scene.as_if_large()
        opened = await scene.passed(b"a")
        scene.kernel.write(opened, 0, b"THE SAME LENGTH")
        await scene.fs.flush(opened.handle)  # a duplicate is closed
        os.ftruncate(opened.fd, 0)
        scene.kernel.write(opened, 0, data)
        await scene.killed(supervised=supervised)
        await trio.sleep(5)
        assert await scene.read(b"a") == data
        if supervised:
            await scene.close(opened.handle)
        await scene.drained()
        assert scene.on_pfs(b"a") == data

    run()


@scene(memory=1 << 30)
async def test_what_a_passed_writer_changes_within_one_stamp_of_a_publication_is_published(scene: Scene) -> None:
    """The kernel's stamps are coarse: the file looked as it had when it was published, and its digest stayed wrong."""
    opened = await scene.passed(b"a")
    scene.kernel.write(opened, 0, b"one")
    await scene.fs.flush(opened.handle)  # a duplicate is closed
    scene.kernel.write(opened, 0, b"two")
    await scene.fs.flush(opened.handle)
    content = scene.life.catalogue.view.generation(await scene.ino(b"a"))
    assert content is not None
    assert content.digest == xxhash.xxh3_128_digest(b"two")
    await scene.close(opened.handle)
    await scene.drained()
    assert scene.on_pfs(b"a") == b"two"


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("supervised", [True, False])
def test_no_commit_file_lands_over_a_member_that_a_passed_writer_changed_before_a_death(
    *, supervised: bool, large: bool
) -> None:
    """The next daemon took what the kernel had put over the published bytes for these, and landed it."""

    @scene(memory=1 << 30, fsync="returned")
    async def run(scene: Scene) -> None:
        if large:
            scene.as_if_large()
        checkers = Checkers(scene.store, Saves())
        members = {b"m": b"the old bytes"}
        commit = commit_file(1, members)
        checkers.saves.made[commit] = members
        await scene.mkdir(b"d")
        opened = await scene.passed(b"d/m")
        scene.kernel.write(opened, 0, members[b"m"])
        await scene.fs.flush(opened.handle)  # by one of two writers
        await scene.write(b"d/.metadata.tmp", commit)
        await scene.rename(b"d/.metadata.tmp", b"d/.metadata")
        scene.kernel.write(opened, 0, b"the new bytes")
        await scene.killed(supervised=supervised)
        scene.before = lambda step: checkers.commit_last(step)
        await trio.sleep(30)
        checkers.commit_last("30 s")
        if supervised:
            await scene.close(opened.handle)
            await trio.sleep(30)
        checkers.commit_last("the end")
        assert scene.on_pfs(b"d/m") == b"the new bytes"

    run()


@scene(memory=1 << 30, fsync="returned")
async def test_truncate_does_not_cut_in_place_what_was_just_closed(scene: Scene) -> None:
    """RELEASE was on its way: the published content, of which there were two copies, was one no more."""
    opened = await scene.passed(b"a")
    scene.kernel.write(opened, 0, b"a" * 6000)
    await scene.fs.flush(opened.handle)
    stage = opened.handle.vnode.stage
    ino = await scene.ino(b"a")
    published = os.open(scene.life.staging.path(stage), os.O_RDONLY)

    async def release() -> None:
        await trio.sleep(0.1)
        await scene.fs.release(opened.handle)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(release)
        await scene.fs.setattr(ino, None, size=3000)
        assert os.fstat(published).st_size == 6000
    os.close(published)
    await scene.drained()
    assert scene.on_pfs(b"a") == b"a" * 3000


@scene(memory=1 << 30)
async def test_a_write_that_was_under_way_while_another_writer_closed_is_published(scene: Scene) -> None:
    """The kernel stamps a file before it puts the bytes there."""
    opened = await scene.passed(b"a")
    scene.kernel.write(opened, 0, b"one")
    await scene.fs.flush(opened.handle)
    found = os.fstat(opened.fd)
    os.pwrite(opened.fd, b"two", 0)
    os.utime(opened.fd, ns=(found.st_atime_ns, found.st_mtime_ns))  # it was stamped before the look
    await scene.close(opened.handle)
    await scene.drained()
    content = scene.life.catalogue.view.generation(await scene.ino(b"a"))
    assert content is not None
    assert content.digest == xxhash.xxh3_128_digest(b"two")


@scene(memory=1 << 30, fsync="returned")
async def test_attributes_of_what_a_passed_writer_has_emptied_since_wait_for_its_next_content(scene: Scene) -> None:
    """They were to be set on a content whose bytes were gone and that never landed: ENOENT for ever."""
    opened = await scene.passed(b"a")
    scene.kernel.write(opened, 0, b"a" * 3000)
    await scene.fs.flush(opened.handle)
    await scene.fs.setattr(opened.ino, None, mode=0o755)
    await scene.fs.setattr(opened.ino, opened.handle, size=0)
    await scene.close(opened.handle)
    await scene.drained()
    found = scene.store.find(b"a")
    assert found is not None
    assert (found.data, found.attrs.mode) == (b"", 0o755)


# ---- what the PFS had before
@scene(planted={b"d": ("d", 0o755, b""), b"d/a": ("f", 0o644, b"old")})
async def test_a_directory_is_looked_at_for_the_first_time_while_its_rename_lands(scene: Scene) -> None:
    """The PFS had renamed it and the catalogue did not know yet: it was not there under the old name, so EIO."""
    fail_once(scene, "sync directory")
    await scene.rename(b"d", b"e")
    await trio.sleep(0.1)
    assert scene.on_pfs(b"e/a") == b"old"
    assert [name for name, _ in await scene.fs.names(await scene.ino(b"e"))] == [b"a"]
    assert await scene.read(b"e/a") == b"old"


async def denied(path: bytes, *args: Any) -> bytes:
    """What a PFS with a server down says of a file that is there."""
    raise FileNotFoundError(errno.ENOENT, "not here", os.fsdecode(path))


@scene(planted={b"d": ("d", 0o755, b""), b"d/a": ("f", 0o644, b"old")})
async def test_what_the_pfs_denied_once_is_read_and_claimed_again(scene: Scene) -> None:
    """It counted as lost for good, and its removal left it on the PFS."""
    read = scene.life.pfs.read

    scene.life.pfs.read = denied  # type: ignore[method-assign]
    with pytest.raises(FsError):
        await scene.read(b"d/a")
    assert await scene.stage(b"d/a") == "lost"
    scene.life.pfs.read = read  # type: ignore[method-assign]
    assert await scene.read(b"d/a") == b"old"
    assert await scene.stage(b"d/a") == "pfs"
    scene.life.pfs.read = denied  # type: ignore[method-assign]
    await trio.sleep(1)
    await scene.unlink(b"d/a")
    await scene.drained()
    assert scene.store.find(b"d/a") is None


@scene(planted={b"d": ("d", 0o755, b""), b"d/a": ("f", 0o644, b"old")})
async def test_what_the_pfs_denied_once_is_claimed_again_though_nobody_reads_it(scene: Scene) -> None:
    """A commit file that was denied is not shown, so nobody read it any more."""
    read = scene.life.pfs.read

    scene.life.pfs.read = denied  # type: ignore[method-assign]
    with pytest.raises(FsError):
        await scene.read(b"d/a")
    assert await scene.stage(b"d/a") == "lost"
    scene.life.pfs.read = read  # type: ignore[method-assign]
    await trio.sleep(60)
    assert await scene.stage(b"d/a") == "pfs"


@scene(planted={b"d": ("d", 0o755, b""), b"d/a": ("f", 0o644, b"old")})
async def test_a_read_looks_again_where_a_content_is_that_has_moved_meanwhile(scene: Scene) -> None:
    read, ino = scene.life.pfs.read, await scene.ino(b"d/a")

    async def moved(path: bytes, *args: Any) -> bytes:
        scene.life.pfs.read = read  # type: ignore[method-assign]
        await scene.fs.setattr(ino, None, mode=0o600)
        raise OSError(errno.EIO, "not where it was")

    scene.life.pfs.read = moved  # type: ignore[method-assign]
    assert await scene.read(b"d/a") == b"old"
