"""The built-in catalogue's journal: kills at every byte, damage, compaction, a full disk, two daemons."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import crc32c
import msgspec
import pytest
import trio
import trio.lowlevel
from catalogue_support import adder, inode, namer, remover, running, size_of

from cachexfs.adapters.catalogue_builtin import BuiltinCatalogue
from cachexfs.adapters.journal_file import JOURNAL_NAME, mend
from cachexfs.core.journal import HEADER_BYTES, MAGIC, VERSION, whole_frames
from cachexfs.core.records import (
    FID_STEP,
    ROOT_FID,
    AnyRecord,
    Dirent,
    Inode,
    Op,
    OpKind,
    dirent_key,
    inode_key,
    op_key,
)
from cachexfs.core.replica import Replica
from cachexfs.errors import CorruptError, FsError, UsageError

FID = 5 * FID_STEP
State = dict[bytes, tuple[AnyRecord, int, int]]


def state(view: Replica) -> State:
    return {key: (entry.record, entry.created, entry.modified) for key, entry in view.items()}


@contextlib.contextmanager
def opened(directory: Path, *, fsync: bool = False) -> Iterator[BuiltinCatalogue]:
    catalogue = BuiltinCatalogue(directory, fsync=fsync)
    try:
        yield catalogue
    finally:
        catalogue.close()


async def some_history(catalogue: BuiltinCatalogue, states: dict[int, State]) -> None:
    """Mutations of all kinds; ``states`` gets length of the journal -> state after each."""
    journal = catalogue._path
    states[journal.stat().st_size] = state(catalogue.view)
    for number in range(6):
        await catalogue.mutate(namer(ROOT_FID, b"%d" % number, FID))
        states[journal.stat().st_size] = state(catalogue.view)
        await catalogue.mutate(adder(FID))
        states[journal.stat().st_size] = state(catalogue.view)
    await catalogue.mutate(remover(dirent_key(ROOT_FID, b"3")))
    states[journal.stat().st_size] = state(catalogue.view)


@pytest.mark.parametrize("compacted", [False, True])
async def test_a_daemon_killed_at_any_byte_has_all_that_returned(tmp_path: Path, compacted: bool) -> None:
    states: dict[int, State] = {}
    with opened(tmp_path) as catalogue:
        if compacted:
            await catalogue.mutate(adder(2 * FID))
            await catalogue.compact()
        await some_history(catalogue, states)
    journal = tmp_path / JOURNAL_NAME
    data = journal.read_bytes()
    assert max(states) == len(data)
    for length in range(min(states), len(data) + 1):
        journal.write_bytes(data[:length])
        with opened(tmp_path) as catalogue:
            assert state(catalogue.view) == states[max(end for end in states if end <= length)], length
            await catalogue.mutate(adder(FID, 100))
            after = state(catalogue.view)
        with opened(tmp_path) as catalogue:  # what is written behind the cut is read too
            assert state(catalogue.view) == after


KILLED = """
import sys, trio
from pathlib import Path
from cachexfs.adapters.catalogue_builtin import BuiltinCatalogue
from catalogue_support import adder
from cachexfs.core.records import FID_STEP

async def main():
    catalogue = BuiltinCatalogue(Path(sys.argv[1]), compact_bytes_min=4000)
    async with trio.open_nursery() as nursery:
        await nursery.start(catalogue.run)
        while True:
            print(await catalogue.mutate(adder(5 * FID_STEP)), flush=True)
            await catalogue.barrier()

trio.run(main)
"""


def test_kill_9_loses_nothing_that_returned(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for lines in (1, 500, 1500):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, env=environment
        ) as process:
            assert process.stdout is not None
            seen = [int(process.stdout.readline()) for _ in range(lines)]
            process.send_signal(signal.SIGKILL)
            seen += [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith(b"\n")]
        assert seen == list(range(seen[0], seen[0] + len(seen)))
        with opened(tmp_path) as catalogue:
            assert size_of(catalogue, FID) in (seen[-1], seen[-1] + 1)  # the last may not have been told
            assert not catalogue.view.is_live("any")


async def test_damage_is_an_error_that_says_what_to_do_and_changes_nothing(tmp_path: Path) -> None:
    states: dict[int, State] = {}
    with opened(tmp_path) as catalogue:
        await some_history(catalogue, states)
    journal = tmp_path / JOURNAL_NAME
    data = journal.read_bytes()
    for at in range(0, len(data), 7):
        spoilt = bytearray(data)
        spoilt[at] ^= 0x40
        journal.write_bytes(spoilt)
        with pytest.raises(CorruptError, match=r"damaged at byte \d+.*recover --journal"):
            BuiltinCatalogue(tmp_path)
        assert journal.read_bytes() == spoilt
    journal.write_bytes(data)
    with opened(tmp_path) as catalogue:
        assert state(catalogue.view) == states[len(data)]


async def test_whole_records_in_a_wrong_order_are_damage(tmp_path: Path) -> None:
    lengths: list[int] = []
    with opened(tmp_path) as catalogue:
        for _ in range(3):
            lengths.append(catalogue._path.stat().st_size)
            await catalogue.mutate(adder(FID))
    journal = tmp_path / JOURNAL_NAME
    data = journal.read_bytes()
    journal.write_bytes(data[: lengths[1]] + data[lengths[2] :])
    with pytest.raises(CorruptError, match="revision 3 follows 1"):
        BuiltinCatalogue(tmp_path)


async def test_compaction_keeps_everything_and_what_comes_meanwhile(tmp_path: Path) -> None:
    with opened(tmp_path) as catalogue:
        for number in range(2500):
            await catalogue.mutate(namer(ROOT_FID, b"%d" % (number % 1200), number * FID_STEP))
        before = catalogue._path.stat().st_size
        async with trio.open_nursery() as nursery:
            nursery.start_soon(catalogue.compact)
            for _ in range(200):
                await catalogue.mutate(adder(FID))
                await trio.lowlevel.checkpoint()
        assert catalogue._path.stat().st_size < before * 2 // 3
        await catalogue.mutate(adder(FID))
        after, order = state(catalogue.view), list(catalogue.view.children(ROOT_FID))
        assert size_of(catalogue, FID) == 201
    with opened(tmp_path) as catalogue:
        assert state(catalogue.view) == after
        assert list(catalogue.view.children(ROOT_FID)) == order


async def test_the_journal_stays_small_by_itself(tmp_path: Path) -> None:
    catalogue = BuiltinCatalogue(tmp_path, compact_bytes_min=10_000)
    try:
        async with running(catalogue):
            largest = 0
            for _ in range(3000):
                await catalogue.mutate(adder(FID))
                await trio.lowlevel.checkpoint()
                largest = max(largest, catalogue._path.stat().st_size)
        assert size_of(catalogue, FID) == 3000
        assert largest < 150_000  # 3000 mutations have some 180,000 bytes; it was cut many times
        assert catalogue._path.stat().st_size < 60_000
    finally:
        catalogue.close()


async def test_without_room_a_mutation_fails_whole_and_the_next_one_works(tmp_path: Path) -> None:
    """RLIMIT_FSIZE plays the full disk: writes are cut short, then fail."""
    with opened(tmp_path) as catalogue:
        await catalogue.mutate(adder(FID))
        good = catalogue._path.read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            for room in range(0, 40, 3):
                resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) + room, hard))
                with pytest.raises(FsError, match="cannot write") as caught:
                    await catalogue.mutate(adder(FID))
                assert caught.value.errno == errno.EFBIG
            resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
            await catalogue.compact()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert catalogue._path.read_bytes() == good
        assert size_of(catalogue, FID) == 1
        await catalogue.mutate(adder(FID))
    with opened(tmp_path) as catalogue:
        assert size_of(catalogue, FID) == 2
    assert not (tmp_path / "catalogue.new").exists()


async def test_a_second_daemon_is_told_who_has_the_directory(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(UsageError, match=rf"process {os.getpid()}\) uses {tmp_path}"):
        BuiltinCatalogue(tmp_path)
    with opened(tmp_path) as catalogue:
        assert catalogue.view.revision == 0


async def test_with_fsync_a_mutation_returns_after_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fdatasync = os.fdatasync

    def counting(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", counting)
    with opened(tmp_path, fsync=True) as catalogue:
        await catalogue.mutate(adder(FID))
        assert synced == [catalogue._path.stat().st_size]
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(catalogue.mutate, adder(FID))
        assert synced[-1] == catalogue._path.stat().st_size
        assert len(synced) <= 3  # those who wait share one


async def test_after_a_failed_fsync_nothing_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with opened(tmp_path, fsync=True) as catalogue:
        await catalogue.mutate(adder(FID))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", failing)
            with pytest.raises(FsError, match="fsync"):
                await catalogue.mutate(adder(FID))
        with pytest.raises(FsError, match="fsync") as caught:
            await catalogue.mutate(adder(FID))
        assert caught.value.errno == errno.EIO


async def test_a_mutation_that_changes_nothing_writes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as catalogue:
        await catalogue.mutate(adder(FID))
        size, revision = catalogue._path.stat().st_size, catalogue.view.revision
        assert await catalogue.mutate(lambda tx: tx.inode(FID)) == inode(1)
        await catalogue.mutate(remover(inode_key(99 * FID_STEP)))
        assert (catalogue._path.stat().st_size, catalogue.view.revision) == (size, revision)
        assert catalogue._path.stat().st_mode & 0o777 == 0o600


async def test_mending_leaves_out_what_is_damaged_and_keeps_all_else(tmp_path: Path) -> None:
    with opened(tmp_path) as catalogue:
        for number in range(60):
            await catalogue.mutate(namer(ROOT_FID, b"%d" % number, (number + 2) * FID_STEP))
            if number == 30:
                await catalogue.compact()
        names = set(catalogue.view.children(ROOT_FID))
    path = tmp_path / JOURNAL_NAME
    data = path.read_bytes()
    starts = [at for at, _ in whole_frames(data)]
    for at in range(HEADER_BYTES, len(data), 3):
        spoilt = bytearray(data)
        spoilt[at] ^= 0x10
        path.write_bytes(spoilt)
        assert mend(tmp_path) == (len(starts) - 1, 1)
        assert (tmp_path / "catalogue.journal.damaged").read_bytes() == spoilt
        with opened(tmp_path) as catalogue:
            left = set(catalogue.view.children(ROOT_FID))
            assert left <= names
            assert len(names) - len(left) == (1 if at >= starts[2] else 31 if at < starts[1] else 0), at
            await catalogue.mutate(adder(FID))  # it goes on
        with opened(tmp_path) as catalogue:
            assert size_of(catalogue, FID) == 1


async def test_a_commit_file_whose_members_a_mended_journal_may_have_forgotten_is_held_back(tmp_path: Path) -> None:
    """It landed on the PFS beside a member that was not there."""
    ops = {
        "1": Op(OpKind.PUT, b"d/m", "n0", fid=FID, gen=2, size=1, stage="1.2.a"),
        "2": Op(
            OpKind.RENAME, b"d/.metadata.tmp", "n0", fid=6 * FID_STEP, path2=b"d/.metadata", commit=True, below=b"d"
        ),
        "3": Op(OpKind.RMDIR, b"e", "n0", commit=True, below=b"e"),
    }
    with opened(tmp_path) as catalogue:
        for name, op in ops.items():
            await catalogue.mutate(lambda tx, name=name, op=op: tx.put(op_key(name), op))  # type: ignore[misc]
            if name == "1":
                end = catalogue._length
    path = tmp_path / JOURNAL_NAME
    with path.open("r+b") as file:
        file.seek(end - 1)
        file.write(b"?")
    assert mend(tmp_path) == (2, 1)
    with opened(tmp_path) as catalogue:
        left = {key: op.cancelled for key, op, _ in catalogue.view.ops()}
    assert left == {op_key("2"): True, op_key("3"): False}


async def test_a_change_that_was_noted_again_keeps_its_place_though_its_first_record_is_damaged(tmp_path: Path) -> None:
    """It came after what followed it: bytes of an older save landed under the newer one's name."""
    first, last = (Op(OpKind.PUT, b"a", "n0", fid=FID, gen=gen, size=1, stage=f"1.{gen}.a") for gen in (2, 3))
    ends = list[int]()
    with opened(tmp_path) as catalogue:
        for name, op in [("1", first), ("2", last), ("1", msgspec.structs.replace(first, ready=True))]:
            await catalogue.mutate(lambda tx, name=name, op=op: tx.put(op_key(name), op))  # type: ignore[misc]
            ends.append(catalogue._length)
    with (tmp_path / JOURNAL_NAME).open("r+b") as out:
        out.seek(ends[0] - 1)
        out.write(b"?")
    assert mend(tmp_path) == (2, 1)
    with opened(tmp_path) as catalogue:
        assert [op.gen for _, op, _ in catalogue.view.ops()] == [2, 3]
        created = [(at, key) for key, _, at in catalogue.view.ops()]
        assert created == sorted(created)


async def test_mending_forgets_names_below_a_directory_that_is_forgotten(tmp_path: Path) -> None:
    """They led nowhere, and the next daemon ended at the first such file that it had staged."""
    directory, file = 6 * FID_STEP, 7 * FID_STEP
    with opened(tmp_path) as catalogue:
        await catalogue.mutate(lambda tx: tx.put(dirent_key(ROOT_FID, b"d"), Dirent(directory, "d")))
        end = catalogue._length
        await catalogue.mutate(lambda tx: tx.put(inode_key(ROOT_FID), Inode("d", 0o755, 0, 0, 1, 1, 1)))
        await catalogue.mutate(lambda tx: tx.put(inode_key(directory), Inode("d", 0o755, 0, 0, 1, 1, 1)))
        await catalogue.mutate(namer(directory, b"f", file))
        await catalogue.mutate(adder(file))
    with (tmp_path / JOURNAL_NAME).open("r+b") as out:
        out.seek(end - 1)
        out.write(b"?")
    assert mend(tmp_path) == (4, 1)
    with opened(tmp_path) as catalogue:
        assert [fid for fid, _ in catalogue.view.inodes()] == [ROOT_FID]
        assert catalogue.view.names_of(file) == []


async def test_mending_a_whole_journal_changes_nothing_and_one_in_use_is_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as catalogue:
        for number in range(5):
            await catalogue.mutate(namer(ROOT_FID, b"%d" % number, (number + 2) * FID_STEP))
        with pytest.raises(UsageError, match="uses"):
            mend(tmp_path)
        before = state(catalogue.view)
    assert mend(tmp_path) == (5, 0)
    with opened(tmp_path) as catalogue:
        assert state(catalogue.view) == before
    with pytest.raises(UsageError, match="there is no"):
        mend(tmp_path / "elsewhere")


def of_version(version: int) -> bytes:
    head = struct.pack("<8sI", MAGIC, version)
    return head + struct.pack("<I", crc32c.crc32c(head))


async def test_a_journal_of_a_newer_version_is_not_touched_and_says_which_to_use(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    path.write_bytes(of_version(VERSION + 1) + b"something new")
    with pytest.raises(CorruptError, match=rf"newer CacheX FS \(format version {VERSION + 1}.*Mount with that version"):
        BuiltinCatalogue(tmp_path)
    with pytest.raises(UsageError, match="newer CacheX FS, not damaged"):
        mend(tmp_path)
    assert path.read_bytes() == of_version(VERSION + 1) + b"something new"
