"""POSIX on one real mount: the same calls give the same results as on a plain directory."""

import ctypes
import errno
import hashlib
import mmap
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from real_support import raises_errno, until, until_stage, write_file

from cachexfs.demo.cluster import LocalCluster

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
AT_FDCWD = -100
TIME_NS = 1_700_000_000_123_456_789
KIB = 1 << 10
MIB = 1 << 20
WRITER = """
import os, sys, time
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(fd, b"z" * 5000)
print(flush=True)
time.sleep(99)
"""


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything that a user sees below a directory."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        what: tuple[object, ...] = (oct(status.st_mode), status.st_nlink if path.is_dir() else 1)
        if path.is_symlink():
            what += (os.readlink(path),)
        elif path.is_file():
            what += (status.st_size, hashlib.sha256(path.read_bytes()).hexdigest(), status.st_mtime_ns == TIME_NS)
        found[str(path.relative_to(root))] = what
    return found


def a_long_script(root: Path) -> list[str]:
    """Operations of all kinds; returns what each attempt that may fail said."""
    said: list[str] = []

    def attempt(function: Callable[..., object], *args: object) -> None:
        try:
            function(*args)
            said.append("ok")
        except OSError as error:
            said.append(errno.errorcode[error.errno or 0])

    (root / "d").mkdir(0o750)
    attempt(os.mkdir, root / "d")
    (root / "d/e").mkdir()
    (root / "a").write_bytes(b"first")
    (root / "a").write_bytes(b"second, longer")
    with (root / "a").open("ab") as file:
        file.write(b" and a tail")
    (root / "b").write_bytes(bytes(range(256)) * 5000)
    with (root / "b").open("r+b") as file:
        file.seek(70_000)
        file.write(b"in the middle")
        file.seek(0, os.SEEK_END)
        file.write(b"at the end")
    os.truncate(root / "b", 1_279_000)
    (root / "grown").touch()
    os.truncate(root / "grown", 100_001)
    (root / "a").rename(root / "d/a")
    (root / "b").rename(root / "d/e/b")
    (root / "d/e").rename(root / "d/f")
    (root / "replaced").write_bytes(b"old")
    (root / "new").write_bytes(b"new")
    (root / "new").replace(root / "replaced")
    (root / "link").symlink_to("d/a")
    (root / "dangling").symlink_to("/nowhere/at all")
    (root / "gone").write_bytes(b"x")
    (root / "gone").unlink()
    (root / "mode").write_bytes(b"y")
    (root / "mode").chmod(0o440)
    os.utime(root / "mode", ns=(TIME_NS, TIME_NS))
    os.utime(root / "d/a", ns=(TIME_NS, TIME_NS))
    (root / "empty dir").mkdir()
    (root / "removed dir").mkdir()
    (root / "removed dir").rmdir()
    (root / ("n" * 255)).touch()
    (root / "name with ünicode and \n newline").touch()
    attempt(os.rmdir, root / "d")
    attempt(os.unlink, root / "d")
    attempt(os.rmdir, root / "mode")
    attempt(os.mkdir, root / "mode/x")
    attempt(os.stat, root / "nothing")
    attempt(os.rename, root / "nothing", root / "x")
    attempt(os.rename, root / "d", root / "d/inside")
    attempt(os.rename, root / "d", root / "empty dir")
    attempt(os.rename, root / "empty dir", root / "d")
    attempt(os.rename, root / "mode", root / "empty dir")
    attempt(os.rename, root / "empty dir", root / "mode")
    attempt(os.open, root / "mode", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    attempt(os.open, root / "d", os.O_WRONLY)
    attempt(os.mkdir, root / ("n" * 256))
    attempt(os.open, root / "link", os.O_RDONLY | os.O_NOFOLLOW)
    attempt(os.readlink, root / "mode")
    attempt(os.symlink, "again", root / "link")
    attempt(os.listdir, root / "mode")
    return said


def test_a_long_script_gives_what_a_plain_directory_gives(mount: Path, tmp_path: Path) -> None:
    assert a_long_script(mount) == a_long_script(tmp_path)
    assert tree(mount) == tree(tmp_path)


def test_the_pfs_gets_the_names_bytes_modes_and_times_of_the_mount(
    make_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    cluster = make_cluster(1)
    a_long_script(cluster.nodes[0].mountpoint)
    a_long_script(tmp_path)
    seen = {path: path.lstat().st_mtime_ns for path in cluster.nodes[0].mountpoint.rglob("*")}
    cluster.umount()
    shutil.rmtree(cluster.pfs / ".cachexfs", ignore_errors=True)
    assert tree(cluster.pfs) == tree(tmp_path)
    times = {path: (cluster.pfs / path.relative_to(cluster.nodes[0].mountpoint)).lstat().st_mtime_ns for path in seen}
    assert times == seen


def test_a_directory_keeps_its_mtime_on_the_pfs_when_files_land_in_it_later(mount: Path, alone: LocalCluster) -> None:
    """Rotation by mtime deletes the newest otherwise: what is created early lands late, and an overwrite moves nothing
    on the mount, but a name on the PFS."""
    others = mount / "others"
    others.mkdir()

    def settled() -> bool:
        return alone.status(0).pending_ops == 0

    def times() -> list[int]:
        return [path.stat().st_mtime_ns for path in (mount, others)]

    def on_pfs() -> list[int]:
        return [
            (alone.pfs / path.relative_to(alone.nodes[0].mountpoint)).stat().st_mtime_ns for path in (mount, others)
        ]

    with open(mount / "f", "wb") as file:
        until("the times of the empty directory are there", settled)
        file.write(b"late")
    until("landed", settled)
    assert on_pfs() == times()
    os.link(mount / "f", others / "g")
    until("landed", settled)
    before = times()
    (mount / "f").write_bytes(b"over it")
    until_stage(mount / "f", "pfs")
    until("landed", settled)
    assert on_pfs() == times() == before


@pytest.mark.parametrize("seed", [1, 2])
def test_writes_in_any_order_read_back(mount: Path, seed: int) -> None:
    dice = random.Random(seed)
    want = bytearray()
    with (mount / "f").open("w+b", buffering=0) as file:
        for _ in range(120):
            offset, data = dice.randrange(3 * MIB), dice.randbytes(dice.choice((1, 100, 4096, 70_000)))
            want += bytes(max(0, offset + len(data) - len(want)))
            want[offset : offset + len(data)] = data
            file.seek(offset)
            assert file.write(data) == len(data)
            if dice.random() < 0.1:
                file.seek(offset // 2)
                assert file.read(5000) == want[offset // 2 :][:5000]
    assert (mount / "f").read_bytes() == want


def test_mapped_files_read_as_files_and_written_maps_arrive(mount: Path) -> None:
    data = random.Random(3).randbytes(2 * MIB + 5)
    (mount / "f").write_bytes(data)
    for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
        with (mount / "f").open("rb") as file, mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == data
    with (mount / "f").open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[MIB : MIB + 6] = b"mapped"
        mapped.flush()
    assert (mount / "f").read_bytes() == data[:MIB] + b"mapped" + data[MIB + 6 :]


def test_a_map_that_outlives_its_descriptor_is_published(mount: Path) -> None:
    (mount / "f").write_bytes(bytes(8192))
    fd = os.open(mount / "f", os.O_RDWR)
    mapped = mmap.mmap(fd, 8192)
    os.close(fd)
    mapped[4096:4100] = b"late"
    mapped.close()
    until_stage(mount / "f", "pfs")
    assert (mount / "f").read_bytes()[4096:4100] == b"late"


def rename2(old: Path, new: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def test_rename_flags_are_obeyed_or_refused(mount: Path) -> None:
    (mount / "a").write_bytes(b"a")
    (mount / "b").write_bytes(b"b")
    with raises_errno(errno.EEXIST):
        rename2(mount / "a", mount / "b", RENAME_NOREPLACE)
    with raises_errno(errno.EINVAL):
        rename2(mount / "a", mount / "b", RENAME_EXCHANGE)
    assert ((mount / "a").read_bytes(), (mount / "b").read_bytes()) == (b"a", b"b")
    rename2(mount / "a", mount / "c", RENAME_NOREPLACE)
    assert sorted(path.name for path in mount.iterdir()) == ["b", "c"]


def test_an_unlinked_open_file_lives_on_without_a_name(mount: Path) -> None:
    with (mount / "f").open("w+b", buffering=0) as file:
        file.write(b"before")
        (mount / "f").unlink()
        file.write(b" and after")
        assert os.listdir(mount) == []
        file.seek(0)
        assert file.read() == b"before and after"
        os.fsync(file.fileno())
    assert os.listdir(mount) == []


def test_a_file_renamed_while_open_and_dirty_closes_under_its_new_name(mount: Path) -> None:
    with (mount / ".tmpXYZ").open("wb") as file:
        file.write(b"x" * 10_000)
        (mount / ".tmpXYZ").rename(mount / "model.safetensors")
        file.write(b"y" * 10_000)
    assert os.listdir(mount) == ["model.safetensors"]
    assert (mount / "model.safetensors").read_bytes() == b"x" * 10_000 + b"y" * 10_000


def test_a_duplicated_descriptor_closed_early_does_not_cut_the_file(mount: Path) -> None:
    fd = os.open(mount / "f", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"one ")
    os.close(os.dup(fd))
    os.write(fd, b"two")
    os.close(fd)
    assert (mount / "f").read_bytes() == b"one two"


def test_removing_entries_while_listing_reaches_all_of_them(mount: Path) -> None:
    for number in range(300):
        (mount / f"file-{number}").touch()
    with os.scandir(mount) as entries:
        for entry in entries:
            os.unlink(entry.path)
    assert os.listdir(mount) == []


def test_rmtree_of_a_full_tree(mount: Path) -> None:
    for outer in range(3):
        for inner in range(3):
            (mount / f"t/{outer}/{inner}").mkdir(parents=True)
            (mount / f"t/{outer}/{inner}/f").write_bytes(b"x")
    shutil.rmtree(mount / "t")
    assert os.listdir(mount) == []


def test_a_killed_writer_leaves_what_it_wrote(mount: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(mount / "f")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    until_stage(mount / "f", "returned", "pfs")
    assert (mount / "f").read_bytes() == b"z" * 5000


def test_fsync_is_asked_every_time_and_on_directories_too(mount: Path, alone: LocalCluster) -> None:
    """ENOSYS once would mean success for ever after."""
    fd = os.open(mount / "f", os.O_WRONLY | os.O_CREAT)
    os.fsync(fd)
    for number in range(3):
        os.write(fd, b"%d" % number)
        os.fsync(fd)
        os.fdatasync(fd)
    os.close(fd)
    directory = os.open(mount, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    assert (mount / "f").read_bytes() == b"012"


def test_a_handle_that_wrote_nothing_changes_nothing(mount: Path) -> None:
    (mount / "f").write_bytes(b"sealed")
    until_stage(mount / "f", "pfs")
    before = (mount / "f").stat(), os.getxattr(mount / "f", "user.cachex.generation")
    os.close(os.open(mount / "f", os.O_RDWR | os.O_CREAT, 0o644))
    after = (mount / "f").stat(), os.getxattr(mount / "f", "user.cachex.generation")
    assert (before[0].st_mtime_ns, before[0].st_ino, before[1]) == (after[0].st_mtime_ns, after[0].st_ino, after[1])


def test_internal_work_moves_no_directory_mtime_and_shows_no_foreign_name(mount: Path) -> None:
    (mount / "ckpt").mkdir()
    for number in range(5):
        write_file(mount / f"ckpt/f{number}", b"x" * 100_000, sync=False)
    before = (mount / "ckpt").stat().st_mtime_ns
    for number in range(5):
        until_stage(mount / f"ckpt/f{number}", "pfs")
    assert (mount / "ckpt").stat().st_mtime_ns == before
    assert sorted(os.listdir(mount / "ckpt")) == [f"f{number}" for number in range(5)]
    assert ".cachexfs" not in os.listdir(mount.parent)


def test_hard_links_are_two_names_of_one_file_also_on_the_pfs(mount: Path, alone: LocalCluster) -> None:
    (mount / "f").write_bytes(b"one file")
    os.link(mount / "f", mount / "g")
    assert ((mount / "f").stat().st_ino, (mount / "f").stat().st_nlink) == ((mount / "g").stat().st_ino, 2)
    with (mount / "g").open("ab") as file:
        file.write(b", two names")
    assert (mount / "f").read_bytes() == b"one file, two names"
    until_stage(mount, "pfs")
    on_pfs = alone.pfs / mount.name
    assert ((on_pfs / "f").read_bytes(), (on_pfs / "g").read_bytes()) == (b"one file, two names",) * 2
    (mount / "f").unlink()
    assert (mount / "g").read_bytes() == b"one file, two names"
    until("the name is gone", lambda: not (on_pfs / "f").exists())
    assert (on_pfs / "g").read_bytes() == b"one file, two names"


def test_statfs_promises_no_more_than_the_staging_takes(make_cluster: Callable[..., LocalCluster]) -> None:
    mount = make_cluster(1, {"spill": "off"}).nodes[0].mountpoint
    status = os.statvfs(mount)
    free = status.f_bavail * status.f_frsize
    assert 0 < free <= 1 << 30  # the cluster's memory
    assert status.f_namemax == 255


def test_modes_and_owner_are_kept(mount: Path) -> None:
    (mount / "f").touch(mode=0o604)
    (mount / "f").chmod(0o604)
    status = (mount / "f").stat()
    assert stat.S_IMODE(status.st_mode) == 0o604
    assert (status.st_uid, status.st_gid) == (os.getuid(), os.getgid())
    assert status.st_blksize == 128 * KIB
