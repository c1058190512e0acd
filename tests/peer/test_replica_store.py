"""The replica store: what is committed stays whole, what is not is nobody's."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from peer_support import MIB, STAGE, blocks_of, content, manifest_of, put, write_blocks

from cachexfs.adapters import replica_copy
from cachexfs.adapters.replica_copy import ReplicaCopy
from cachexfs.adapters.replica_store import ReplicaStore
from cachexfs.core import manifest as manifests
from cachexfs.core.digest import Buffer, block_digest
from cachexfs.errors import CorruptError, UsageError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "job" / "n2" / "replicas"


@pytest.fixture
def store(directory: Path) -> Iterator[ReplicaStore]:
    made = ReplicaStore.open_blocking(str(directory))
    yield made
    made.close()


def reopen(store: ReplicaStore) -> ReplicaStore:
    store.close()
    return ReplicaStore.open_blocking(store.directory)


def files(directory: Path) -> set[str]:
    """Names below the directory, without identity and lock."""
    found = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    return found - {"store", "lock"}


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB + 17])
async def test_commit_and_read_back(store: ReplicaStore, directory: Path, size: int) -> None:
    data = content(size)
    await write_blocks(store, data)
    assert store.manifest(STAGE) is None
    with pytest.raises(FileNotFoundError):
        await store.read(STAGE, 0, 10)
    assert await store.commit(STAGE, manifest_of(data)) == store.identity
    assert await store.read(STAGE, 0, size + 100) == data
    assert store.manifest(STAGE) == manifest_of(data)
    assert [m.stage for m in store.list()] == [STAGE]
    assert store.used_bytes == size
    assert files(directory) == {f"{STAGE}.1.data", f"{STAGE}.manifest"}
    again = reopen(store)
    assert again.identity == store.identity
    assert await again.read(STAGE, 0, size + 100) == data
    assert await again.verify(STAGE) == ()
    again.close()


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1), (MIB - 1, 2), (5, 2 * MIB), (2 * MIB, 50), (2 * MIB + 9, 1), (9 * MIB, 5)]
)
async def test_any_range(store: ReplicaStore, offset: int, length: int) -> None:
    data = content(2 * MIB + 10)
    await put(store, data)
    assert await store.read(STAGE, offset, length) == data[offset : offset + length]


async def test_blocks_in_any_order_and_twice(store: ReplicaStore) -> None:
    data = content(3 * MIB + 1)
    await write_blocks(store, content(3 * MIB + 1, seed=5), only=[1, 3])
    await write_blocks(store, data, only=[3, 1])
    await write_blocks(store, data, only=[0, 2])
    await store.commit(STAGE, manifest_of(data))
    assert await store.read(STAGE, 0, 4 * MIB) == data


async def test_a_commit_repeated_after_a_lost_answer(store: ReplicaStore) -> None:
    data = content(MIB + 1)
    await put(store, data)
    assert await store.commit(STAGE, manifest_of(data)) == store.identity


@pytest.mark.parametrize("missing", [0, 1, 2])
async def test_a_missing_block_is_named_and_may_follow(store: ReplicaStore, missing: int) -> None:
    data = content(2 * MIB + 5)
    await write_blocks(store, data, only=[i for i in range(3) if i != missing])
    with pytest.raises(CorruptError, match=f"block {missing} "):
        await store.commit(STAGE, manifest_of(data))
    assert store.list() == ()
    await write_blocks(store, data, only=[missing])
    await store.commit(STAGE, manifest_of(data))
    assert await store.read(STAGE, 0, 3 * MIB) == data


async def test_nothing_sent_at_all(store: ReplicaStore, directory: Path) -> None:
    with pytest.raises(CorruptError, match=r"block 0 .* is missing"):
        await store.commit(STAGE, manifest_of(b"x"))
    assert files(directory) == set()


async def test_a_block_that_is_not_the_manifests(store: ReplicaStore) -> None:
    data = content(2 * MIB)
    await write_blocks(store, content(2 * MIB, seed=1), only=[1])
    await write_blocks(store, data, only=[0])
    with pytest.raises(CorruptError, match="block 1 "):
        await store.commit(STAGE, manifest_of(data))


async def test_a_block_that_arrives_damaged(store: ReplicaStore) -> None:
    with pytest.raises(CorruptError, match=r"block 2 .* other bytes"):
        await store.write_block(STAGE, 2 * MIB, b"abc", block_digest(b"abd"))
    assert store.unfinished() == ()


@pytest.mark.parametrize(("offset", "size"), [(1, 5), (0, 0), (0, MIB + 1), (-MIB, 5), (1 << 62, 5)])
async def test_what_is_no_block(store: ReplicaStore, offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="are no block"):
        await store.write_block(STAGE, offset, bytes(size), block_digest(bytes(size)))


@pytest.mark.parametrize("stage", ["", ".", "..", "../x", "a/b", "/x", "a\n", "a\0", "A", "store", "a" * 101, ".a"])
async def test_a_key_is_never_a_path(store: ReplicaStore, directory: Path, stage: str) -> None:
    with pytest.raises(ValueError, match="not a stage key"):
        await store.write_block(stage, 0, b"x", block_digest(b"x"))
    with pytest.raises(ValueError, match="not a stage key"):
        await store.commit(stage, manifest_of(b""))
    await store.drop(stage)
    await store.abandon(stage)
    assert store.manifest(stage) is None
    assert files(directory) == set()


async def test_a_manifest_of_another_stage(store: ReplicaStore) -> None:
    with pytest.raises(CorruptError, match=r"for 2000\.3\.ab"):
        await store.commit(STAGE, manifest_of(b"", stage="beef"))


# --- growing, changing, shrinking ------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(1, 2), (MIB, MIB + 1), (MIB + 7, 3 * MIB + 9), (0, 5)])
async def test_appending_grows_in_place(store: ReplicaStore, directory: Path, before: int, after: int) -> None:
    data = content(after)
    await put(store, data[:before])
    await write_blocks(store, data, only=list(range(before // MIB, -(-after // MIB))))
    # Not committed: readers see the old version, and a restart brings it back.
    assert await store.read(STAGE, 0, after) == data[:before]
    await store.commit(STAGE, manifest_of(data))
    assert files(directory) == {f"{STAGE}.1.data", f"{STAGE}.manifest"}
    assert await store.read(STAGE, 0, after) == data
    assert store.used_bytes == after


async def test_growth_that_was_not_committed_is_gone_after_a_restart(store: ReplicaStore, directory: Path) -> None:
    data = content(2 * MIB + 50)
    await put(store, data[: MIB + 50])
    await write_blocks(store, data, only=[1, 2])
    assert (directory / f"{STAGE}.1.data").stat().st_size == len(data)
    again = reopen(store)
    assert (directory / f"{STAGE}.1.data").stat().st_size == MIB + 50
    assert await again.read(STAGE, 0, len(data)) == data[: MIB + 50]
    assert await again.verify(STAGE) == ()
    again.close()


async def test_an_overwrite_leaves_the_committed_version_readable(store: ReplicaStore, directory: Path) -> None:
    old = content(3 * MIB + 10)
    new = old[:MIB] + content(MIB, seed=1) + old[2 * MIB :]
    await put(store, old)
    await write_blocks(store, new, only=[1])
    assert await store.read(STAGE, 0, len(old)) == old
    assert store.used_bytes == 2 * len(old)
    assert files(directory) == {f"{STAGE}.1.data", f"{STAGE}.manifest", f"partial/{STAGE}.2.data"}
    await store.commit(STAGE, manifest_of(new))
    assert await store.read(STAGE, 0, len(old)) == new
    assert files(directory) == {f"{STAGE}.2.data", f"{STAGE}.manifest"}


async def test_growth_and_then_an_overwrite(store: ReplicaStore) -> None:
    old = content(MIB + 10)
    grown = old + content(2 * MIB, seed=1)
    new = content(MIB, seed=2) + grown[MIB:]
    await put(store, old)
    await write_blocks(store, grown, only=[1, 2, 3])
    await write_blocks(store, new, only=[0])
    assert await store.read(STAGE, 0, len(new)) == old
    await store.commit(STAGE, manifest_of(new))
    assert await store.read(STAGE, 0, len(new)) == new


async def test_an_abandoned_overwrite(store: ReplicaStore, directory: Path) -> None:
    old = content(MIB + 10)
    await put(store, old)
    await write_blocks(store, content(MIB + 10, seed=1))
    await store.abandon(STAGE)
    assert files(directory) == {f"{STAGE}.1.data", f"{STAGE}.manifest"}
    assert await store.read(STAGE, 0, len(old)) == old
    assert store.used_bytes == len(old)


@pytest.mark.parametrize("size", [0, 5, MIB, MIB + 5])
async def test_shrinking(store: ReplicaStore, directory: Path, size: int) -> None:
    old = content(3 * MIB)
    await put(store, old)
    await store.commit(STAGE, manifest_of(old[:size]))
    assert await store.read(STAGE, 0, len(old)) == old[:size]
    assert (directory / f"{STAGE}.1.data").stat().st_size == size
    again = reopen(store)
    assert await again.verify(STAGE) == ()
    again.close()


async def test_a_late_commit_of_an_earlier_generation_is_refused(store: ReplicaStore) -> None:
    """Appended bytes share the stage: it would cut off what is claimed to be here."""
    data = content(2 * MIB)
    await write_blocks(store, data)
    await store.commit(STAGE, manifest_of(data, gen=4))
    with pytest.raises(CorruptError, match="newer"):
        await store.commit(STAGE, manifest_of(data[:5], gen=3))
    assert await store.read(STAGE, 0, len(data)) == data


async def test_a_carried_over_block_is_read_again(store: ReplicaStore) -> None:
    """A manifest that claims other bytes for a block that was not sent is refused."""
    old = content(2 * MIB)
    await put(store, old)
    await write_blocks(store, content(2 * MIB, seed=1), only=[1])
    with pytest.raises(CorruptError, match=r"block 0 .* not sent"):
        await store.commit(STAGE, manifest_of(content(2 * MIB, seed=1)))
    assert await store.read(STAGE, 0, len(old)) == old


async def test_a_block_that_only_grew_must_be_sent(store: ReplicaStore) -> None:
    data = content(MIB + 10)
    await put(store, data[:10])
    with pytest.raises(CorruptError, match=r"block 0 .* missing"):
        await store.commit(STAGE, manifest_of(data))


async def test_new_attributes_need_no_bytes(store: ReplicaStore) -> None:
    data = content(10)
    await write_blocks(store, data)
    await store.commit(STAGE, manifest_of(data, published=False, revision=0))
    await store.commit(STAGE, manifest_of(data, path=b"renamed"))
    again = reopen(store)
    found = again.find(STAGE)
    assert found is not None
    assert (found.path, found.published) == (b"renamed", True)
    again.close()


# --- dropping, restarts, damage --------------------------------------------------------------------------------


async def test_drop(store: ReplicaStore, directory: Path) -> None:
    await put(store, content(5))
    await write_blocks(store, content(2 * MIB, seed=1))
    await store.drop(STAGE)
    await store.drop(STAGE)
    assert files(directory) == set()
    assert (store.list(), store.unfinished(), store.used_bytes) == ((), (), 0)
    await put(store, content(6))
    assert await store.read(STAGE, 0, 9) == content(6)


async def test_a_restart_removes_what_was_not_committed(store: ReplicaStore, directory: Path) -> None:
    await put(store, content(5))
    await write_blocks(store, content(5), stage="beef.1")
    (directory / "partial" / "left.over").write_bytes(b"x")
    (directory / "abc.9.data").write_bytes(b"x")
    (directory / f"{STAGE}.7.data").write_bytes(b"x")
    again = reopen(store)
    assert files(directory) == {f"{STAGE}.1.data", f"{STAGE}.manifest"}
    assert again.unfinished() == ()
    again.close()


async def test_a_crash_between_the_two_renames_of_a_commit(store: ReplicaStore, directory: Path) -> None:
    data = content(MIB + 3)
    await put(store, data)
    store.close()
    (directory / f"{STAGE}.1.data").rename(directory / "partial" / f"{STAGE}.1.data")
    again = ReplicaStore.open_blocking(str(directory))
    assert await again.read(STAGE, 0, 2 * MIB) == data
    again.close()


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(directory)): (p.stat().st_size, p.stat().st_mtime_ns) for p in directory.rglob("*")}


async def test_looking_into_a_store_changes_nothing(store: ReplicaStore, directory: Path) -> None:
    """Beside a running daemon, with growth and another copy in progress, and a commit cut between its renames."""
    data = content(2 * MIB)
    await put(store, data[: MIB + 5])
    await put(store, data, "beef")
    await write_blocks(store, data, only=[1])
    await write_blocks(store, data, stage="abc.1")
    (directory / "beef.1.data").rename(directory / "partial" / "beef.1.data")
    before = listing(directory)
    seen = ReplicaStore.inspect_blocking(str(directory))
    assert seen.identity == store.identity
    assert {m.stage: m.size for m in seen.list()} == {STAGE: MIB + 5, "beef": 2 * MIB}
    assert await seen.read(STAGE, 0, 9 * MIB) == data[: MIB + 5]
    assert await seen.verify("beef") == ()
    for call in (
        seen.write_block(STAGE, 0, b"x", block_digest(b"x")),
        seen.commit(STAGE, manifest_of(b"")),
        seen.drop(STAGE),
    ):
        with pytest.raises(OSError, match="reading only"):
            await call
    seen.close()
    assert listing(directory) == before


def test_looking_into_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ReplicaStore.inspect_blocking(str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


async def test_two_daemons(store: ReplicaStore) -> None:
    with pytest.raises(UsageError, match="in use by another daemon"):
        ReplicaStore.open_blocking(store.directory)


@pytest.mark.parametrize("how", ["manifest bit", "manifest cut", "manifest of another", "data short", "data gone"])
async def test_damage_found_at_the_start_is_kept_and_named(
    store: ReplicaStore, directory: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = content(MIB + 3)
    await put(store, data)
    await put(store, b"other", stage="beef.1")
    store.close()
    manifest, data_file = directory / f"{STAGE}.manifest", directory / f"{STAGE}.1.data"
    raw = bytearray(manifest.read_bytes())
    if how == "manifest bit":
        raw[70] ^= 1
        manifest.write_bytes(raw)
    elif how == "manifest cut":
        manifest.write_bytes(raw[:-1])
    elif how == "manifest of another":
        manifest.write_bytes((directory / "beef.1.manifest").read_bytes())
    elif how == "data short":
        os.truncate(data_file, MIB + 2)
    else:
        data_file.unlink()
    with caplog.at_level(logging.ERROR):
        again = ReplicaStore.open_blocking(str(directory))
    assert list(again.damaged) == [STAGE]
    assert STAGE in caplog.text
    assert [m.stage for m in again.list()] == ["beef.1"]
    assert again.manifest(STAGE) is None
    assert data_file.exists() == (how != "data gone")
    # A new copy replaces it.
    await put(again, data)
    assert await again.read(STAGE, 0, 2 * MIB) == data
    assert again.damaged == {}
    last = reopen(again)
    assert last.damaged == {}
    assert await last.read(STAGE, 0, 2 * MIB) == data
    await last.drop(STAGE)
    assert files(directory) == {"beef.1.1.data", "beef.1.manifest"}
    last.close()


async def test_dropping_a_damaged_replica(
    store: ReplicaStore, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await put(store, content(5))
    store.close()
    (directory / f"{STAGE}.manifest").write_bytes(b"")
    again = ReplicaStore.open_blocking(str(directory))
    assert len(caplog.records) == 1
    await again.drop(STAGE)
    assert (files(directory), again.damaged) == (set(), {})
    again.close()


async def test_a_damaged_byte_is_never_served(store: ReplicaStore, directory: Path) -> None:
    data = content(3 * MIB)
    await put(store, data)
    fd = os.open(directory / f"{STAGE}.1.data", os.O_WRONLY)
    os.pwrite(fd, bytes([data[MIB + 500] ^ 1]), MIB + 500)
    os.close(fd)
    for offset, length in ((MIB, MIB), (MIB + 900, 1), (0, 3 * MIB)):
        with pytest.raises(CorruptError, match="block 1 of the replica"):
            await store.read(STAGE, offset, length)
    assert await store.read(STAGE, 2 * MIB, MIB) == data[2 * MIB :]
    assert await store.verify(STAGE) == (1,)


@pytest.mark.parametrize("how", ["other bytes", "cut", "unreadable"])
async def test_blocks_that_are_sent_again_replace_what_went_bad(
    store: ReplicaStore, directory: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """They were taken for those that the manifest said were there: a copy that had been found bad was claimed again."""
    data = content(3 * MIB + 17)
    await put(store, data)
    path = directory / f"{STAGE}.1.data"
    if how == "other bytes":
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, b"garbled", MIB + 500)
        os.close(fd)
    elif how == "cut":
        os.truncate(path, MIB + 500)
    else:
        read = replica_copy.read_exactly

        def fails(fd: int, view: memoryview, offset: int) -> None:
            if os.readlink(f"/proc/self/fd/{fd}") == str(path):
                raise OSError(errno.EIO, "unreadable")
            read(fd, view, offset)

        monkeypatch.setattr(replica_copy, "read_exactly", fails)
        with pytest.raises(OSError, match="unreadable"):
            await put(store, data)
    await put(store, data)
    assert await store.read(STAGE, 0, len(data)) == data
    assert await store.verify(STAGE) == ()


async def test_the_identity_belongs_to_the_directory(store: ReplicaStore, tmp_path: Path) -> None:
    other = ReplicaStore.open_blocking(str(tmp_path / "other"))
    assert other.identity != store.identity
    other.close()
    (tmp_path / "other" / "store").write_text("nonsense")
    with pytest.raises(CorruptError, match="identity"):
        ReplicaStore.open_blocking(str(tmp_path / "other"))


async def test_open_copy_gives_the_committed_version(store: ReplicaStore) -> None:
    data = content(MIB + 5)
    assert store.open_copy(STAGE) is None
    await put(store, data)
    found = store.open_copy(STAGE)
    assert found is not None
    fd, size = found
    await write_blocks(store, content(MIB + 5, seed=1))
    await store.commit(STAGE, manifest_of(content(MIB + 5, seed=1)))
    assert os.pread(fd, size, 0) == data
    os.close(fd)


# --- errors of the disk ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("call", ["pwrite", "fsync data", "fsync manifest"])
async def test_an_error_of_the_disk_costs_the_copy_in_progress_only(
    store: ReplicaStore, directory: Path, monkeypatch: pytest.MonkeyPatch, call: str, committed: bool
) -> None:
    old = content(MIB + 5)
    new = content(2 * MIB + 5, seed=1)
    if committed:
        await put(store, old)
    before = files(directory)
    fsyncs = 0

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, "disk")

    def fsync(fd: int) -> None:
        nonlocal fsyncs
        fsyncs += 1
        if fsyncs == (1 if call == "fsync data" else 2):
            raise OSError(errno.EIO, "disk")

    with monkeypatch.context() as patch:
        if call == "pwrite":
            patch.setattr(replica_copy.os, "pwrite", pwrite)
        else:
            patch.setattr(replica_copy.os, "fsync", fsync)
        with pytest.raises(OSError, match="disk") as caught:
            await put(store, new)
    assert caught.value.errno == errno.EIO
    assert files(directory) == before
    assert store.unfinished() == ()
    if committed:
        assert await store.read(STAGE, 0, 9 * MIB) == old
    # Nothing of the failed attempt is taken for received.
    with pytest.raises(CorruptError):
        await store.commit(STAGE, manifest_of(new))
    await put(store, new)
    assert await store.read(STAGE, 0, 9 * MIB) == new


async def test_a_failed_fsync_of_the_directory_is_no_commit(
    store: ReplicaStore, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = content(MIB), content(2 * MIB, seed=1)
    await put(store, old)
    await write_blocks(store, new)

    def fsync_path(path: str) -> None:
        raise OSError(errno.EIO, "directory")

    with monkeypatch.context() as patch:
        patch.setattr(replica_copy, "fsync_path", fsync_path)
        with pytest.raises(OSError, match="directory"):
            await store.commit(STAGE, manifest_of(new))
        # Repeating it does not turn the failure into a success.
        with pytest.raises(OSError, match="directory"):
            await store.commit(STAGE, manifest_of(new))
    # A crash may show either version; both are still whole.
    assert {f"{STAGE}.1.data", f"{STAGE}.2.data"} <= files(directory)
    await store.commit(STAGE, manifest_of(new))
    assert await store.read(STAGE, 0, 9 * MIB) == new
    assert files(directory) == {f"{STAGE}.2.data", f"{STAGE}.manifest"}


async def test_calls_for_one_stage_take_turns(store: ReplicaStore) -> None:
    data = content(8 * MIB)

    async def write(index: int) -> None:
        await write_blocks(store, data, only=[index])

    async with trio.open_nursery() as nursery:
        for index in range(8):
            nursery.start_soon(write, index)
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(store.commit, STAGE, manifest_of(data))
    assert await store.read(STAGE, 0, 9 * MIB) == data
    assert store._locks == {}


class SlowDisk:
    """Holds up the first write until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.entered: list[int] = []
        original = ReplicaCopy.write_block

        def write_block(copy: ReplicaCopy, offset: int, view: memoryview, digest: bytes) -> None:
            self.entered.append(offset // MIB)
            self.go.wait()
            original(copy, offset, view, digest)

        monkeypatch.setattr(ReplicaCopy, "write_block", write_block)

    async def until_entered(self) -> None:
        while not self.entered:  # noqa: ASYNC110 (a thread enters)
            await trio.sleep(0.001)


@pytest.mark.parametrize("cancelled", [0, 1, 2])
async def test_cancelled_while_the_disk_is_slow(
    store: ReplicaStore, monkeypatch: pytest.MonkeyPatch, cancelled: int
) -> None:
    """Block 0 is being written, 1 and 2 wait. The cancelled call gives its buffer back only when no thread reads it;
    the other blocks are written all the same."""
    disk = SlowDisk(monkeypatch)
    data = content(3 * MIB)
    scopes = [trio.CancelScope() for _ in range(3)]
    ended: list[int] = []

    async def write(index: int) -> None:
        buffer = bytearray(data[index * MIB : (index + 1) * MIB])
        with scopes[index]:
            await store.write_block(STAGE, index * MIB, buffer, block_digest(buffer))
        buffer[:] = bytes(MIB)
        ended.append(index)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write, 0)
        await disk.until_entered()
        nursery.start_soon(write, 1)
        nursery.start_soon(write, 2)
        await trio.testing.wait_all_tasks_blocked()
        scopes[cancelled].cancel()
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert ended == ([] if cancelled == 0 else [cancelled])
        disk.go.set()
    written = [0, *(i for i in (1, 2) if i != cancelled)]
    assert sorted(disk.entered) == written
    await write_blocks(store, data, only=[i for i in range(3) if i not in written])
    await store.commit(STAGE, manifest_of(data))
    assert await store.verify(STAGE) == ()
    assert (store._queues, store._locks) == ({}, {})


async def test_blocks_that_wait_together_share_the_disks_error(
    store: ReplicaStore, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    data = content(4 * MIB)
    errors: list[OSError] = []

    async def write(index: int) -> None:
        try:
            await write_blocks(store, data, only=[index])
        except OSError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write, 0)
        await disk.until_entered()
        for index in (1, 2, 3):
            nursery.start_soon(write, index)
        await trio.testing.wait_all_tasks_blocked()
        (directory / "partial" / f"{STAGE}.1.data").write_bytes(b"")
        monkeypatch.setattr(replica_copy.os, "pwrite", _no_space)
        disk.go.set()
    assert [error.errno for error in errors] == [errno.ENOSPC] * 4
    assert files(directory) == set()


def _no_space(fd: int, view: memoryview, offset: int) -> int:
    raise OSError(errno.ENOSPC, "full")


async def test_a_cancelled_write_is_whole_or_absent(store: ReplicaStore) -> None:
    data = content(2 * MIB)
    with trio.CancelScope() as scope:
        scope.cancel()
        await write_blocks(store, data)
    await write_blocks(store, data)
    await store.commit(STAGE, manifest_of(data))
    assert manifests.decode(store.manifest(STAGE) or b"").size == 2 * MIB
    assert [length for _, length, _ in blocks_of(data)] == [MIB, MIB]


@pytest.mark.parametrize("refused", ["", "open", "write"])
async def test_whole_blocks_go_around_the_page_cache_where_that_can_be(
    store: ReplicaStore, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The memory of a training node is not for its partner's replicas. A filesystem may refuse: then as any bytes."""
    direct, real_open, real_pwrite = set[int](), os.open, os.pwrite
    offsets: list[int] = []

    def opened(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(path, flags, *rest)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def written(fd: int, data: Buffer, offset: int) -> int:
        if fd in direct and refused == "write":
            raise OSError(errno.EINVAL, "Invalid argument")
        if fd in direct:
            offsets.append(offset)
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(replica_copy.os, "open", opened)
    monkeypatch.setattr(replica_copy.os, "pwrite", written)
    data = content(2 * MIB + 17)
    for offset, length, digest in blocks_of(data):
        pages = mmap.mmap(-1, MIB)
        pages[:length] = data[offset : offset + length]
        await store.write_block(STAGE, offset, memoryview(pages)[:length], digest)
    await store.commit(STAGE, manifest_of(data))
    assert offsets == ([] if refused else [0, MIB])
    assert await store.read(STAGE, 0, len(data)) == data
    assert await store.verify(STAGE) == ()
