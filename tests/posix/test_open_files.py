"""Files that are open in more than one way at a time, on a mount where the kernel does the I/O itself if it can."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_support import contents_below
from twin import same_tree

from cachexfs.demo.cluster import LocalCluster

BIG = 3 << 20
WAIT_S = 100.0
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p


@pytest.fixture(scope="module")
def alone(make_module_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    """One mounted node; tests of this module share it."""
    return make_module_cluster(1, {"supervisor": "auto", "fsync_timeout": "30"})


@pytest.fixture
def mount(alone: LocalCluster, request: pytest.FixtureRequest) -> Path:
    """A directory on it for one test."""
    path = alone.nodes[0].mountpoint / request.node.name.partition("[")[0]
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="module")
def shared(make_module_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    """One mounted node that other users may use."""
    cluster = make_module_cluster(1, {"supervisor": "auto", "allow_other": "on"})
    cluster.nodes[0].root.chmod(0o755)
    return cluster


@pytest.fixture
def open_to_all(shared: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory on it for one test, in which everybody may write."""
    path = shared.nodes[0].mountpoint / tmp_path_factory.mktemp("d").name
    path.mkdir()
    path.chmod(0o777)
    return path


@contextlib.contextmanager
def raises(code: int) -> Iterator[None]:
    """The body fails with this errno."""
    with pytest.raises(OSError) as caught:  # noqa: PT011 (the errno is checked below)
        yield
    assert caught.value.errno == code


def write_all(fd: int, data: bytes, offset: int = 0) -> None:
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def test_a_file_that_is_being_written_can_be_read_and_written_by_others(mount: Path) -> None:
    """The kernel answers EIO to an open that goes another way than those of the same file that are there."""
    path = mount / "f"
    first = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        write_all(first, b"a" * 1000)
        assert path.read_bytes() == b"a" * 1000
        with open(path, "r+b") as second:
            second.seek(500)
            second.write(b"b" * 10)
        write_all(first, b"c", 1000)
        assert path.read_bytes() == b"a" * 500 + b"b" * 10 + b"a" * 490 + b"c"
    finally:
        os.close(first)
    assert path.stat().st_size == 1001


def test_a_reader_sees_what_a_later_writer_writes(mount: Path) -> None:
    """It may have been opened while the kernel served the file; the published bytes move to a file of their own."""
    path, data = mount / "f", os.urandom(BIG)
    path.write_bytes(data)
    reader = os.open(path, os.O_RDONLY)
    try:
        assert os.pread(reader, 10, 0) == data[:10]
        with open(path, "r+b") as writer:
            writer.write(b"0123456789")
            writer.flush()
            assert os.pread(reader, 12, 0) == b"0123456789" + data[10:12]
            with open(path, "ab") as appender:
                appender.write(b"end")
            assert os.pread(reader, 10, BIG) == b"end"
        os.truncate(path, 5)
        assert os.pread(reader, 100, 0) == b"01234"
    finally:
        os.close(reader)
    assert path.read_bytes() == b"01234"


def test_a_truncated_and_emptied_file_stays_open_to_its_reader_and_to_new_writers(mount: Path) -> None:
    path = mount / "f"
    path.write_bytes(b"x" * BIG)
    reader = os.open(path, os.O_RDONLY)
    try:
        path.write_bytes(b"")
        assert os.pread(reader, 10, 0) == b""
        path.write_bytes(b"again")
        assert os.pread(reader, 10, 0) == b"again"
    finally:
        os.close(reader)


def test_a_file_created_by_a_reader_can_be_mapped_shared(mount: Path) -> None:
    fd = os.open(mount / "f", os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        (mount / "f").write_bytes(b"mapped")
        with mmap.mmap(fd, 6, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            assert bytes(mapped) == b"mapped"
    finally:
        os.close(fd)


def test_fsync_after_a_duplicate_was_closed_does_not_wait_for_the_close(mount: Path, alone: LocalCluster) -> None:
    """A child that ends closes its copies of descriptors: that publishes, and the drain waits for the writer."""
    fd = os.open(mount / "f", os.O_RDWR | os.O_CREAT)
    try:
        write_all(fd, b"before the fork")
        os.close(os.dup(fd))
        os.fsync(fd)
        held = contents_below(alone.pfs / ".cachexfs")
        assert b"before the fork" in held
    finally:
        os.close(fd)


def test_a_sparse_file_larger_than_staging_is_refused_at_once(mount: Path) -> None:
    """Its holes would be read, digested and sent like bytes: a petabyte of them kept the daemon busy for ever."""
    with open(mount / "f", "wb") as file:
        with pytest.raises(OSError, match="File too large"):
            os.truncate(file.fileno(), 999_999_999_999_999)
        with pytest.raises(OSError, match="File too large"):
            os.truncate(mount / "f", 1 << 50)
        os.truncate(file.fileno(), 100 << 20)
        file.seek(99 << 20)
        file.write(b"end")
    assert (mount / "f").stat().st_size == 100 << 20


def test_fstat_of_an_unlinked_open_file_keeps_its_mode_and_owner(mount: Path) -> None:
    fd = os.open(mount / "f", os.O_RDWR | os.O_CREAT, 0o640)
    try:
        write_all(fd, b"abc")
        os.chown(mount / "f", 12, 34)
        os.utime(mount / "f", ns=(1_000_000_001, 2_000_000_002))
        os.unlink(mount / "f")
        found = os.fstat(fd)
        assert (found.st_mode & 0o7777, found.st_uid, found.st_gid, found.st_nlink) == (0o640, 12, 34, 0)
        assert (found.st_atime_ns, found.st_mtime_ns, found.st_size) == (1_000_000_001, 2_000_000_002, 3)
        os.fchmod(fd, 0o600)
        assert os.fstat(fd).st_mode & 0o7777 == 0o600
    finally:
        os.close(fd)


def until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    """Whether the condition came to hold."""
    deadline_s = time.monotonic() + timeout_s
    while not (held := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return held


def stage_of(path: Path) -> str:
    return os.getxattr(path, "user.cachex.stage").decode()


@pytest.mark.parametrize(("size", "synced"), [(8192, False), (BIG, True)])
def test_what_is_written_through_a_map_after_the_close_lands_on_the_pfs(
    mount: Path, alone: LocalCluster, size: int, *, synced: bool
) -> None:
    """Python's own map keeps a duplicate of the descriptor. A map by itself does not keep a passed file open."""
    path = mount / f"f{size}{synced}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, size)
    start = LIBC.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    ctypes.memset(start, ord("a"), 1)
    if synced:
        os.fsync(fd)
    os.close(fd)
    until(lambda: stage_of(path) == "pfs", 0.5)  # it may not be, as long as it may change
    ctypes.memset(start + 1, ord("b"), 1)
    ctypes.memset(start + size - 1, ord("z"), 1)
    assert LIBC.munmap(ctypes.c_void_p(start), ctypes.c_size_t(size)) == 0
    assert until(lambda: stage_of(path) == "pfs"), alone.run(0, "explain", str(path)).out
    data = b"ab" + bytes(size - 3) + b"z"
    assert path.read_bytes() == data
    assert until(lambda: (alone.pfs / mount.name / path.name).read_bytes() == data)


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_each_write_of_a_file_that_is_opened_so_is_an_fsync(
    make_cluster: Callable[..., LocalCluster], passthrough: str
) -> None:
    """A write that the kernel does itself was in memory alone, and one beside its page cache."""
    cluster = make_cluster(1, {"supervisor": "on", "passthrough": passthrough})
    for access in os.O_WRONLY, os.O_RDWR:
        for sync in os.O_SYNC, os.O_DSYNC:
            fd = os.open(cluster.nodes[0].mountpoint / f"{access}-{sync}", access | os.O_CREAT | sync)
            try:
                for data in (f"first {access} {sync}".encode(), f"second {access} {sync}".encode()):
                    os.pwrite(fd, data, 0)
                    assert data in contents_below(cluster.pfs / ".cachexfs")
            finally:
                os.close(fd)


def test_fsync_takes_what_a_map_has_changed_since_the_last_one(mount: Path, alone: LocalCluster) -> None:
    """It moves no stamp of a file that the kernel serves."""
    fd = os.open(mount / "f", os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, 4096)
        with mmap.mmap(fd, 4096) as mapped:
            for text in (b"first", b"later"):
                mapped[: len(text)] = text
                os.fsync(fd)
                held = contents_below(alone.pfs / ".cachexfs")
                assert text + bytes(4091) in held
    finally:
        os.close(fd)


def test_a_log_that_stays_open_holds_no_commit_up(mount: Path, alone: LocalCluster) -> None:
    """Each child that ends closes its copies of descriptors, which publishes; the writer may have it open for days."""
    on_pfs = alone.pfs / mount.name
    log = os.open(mount / "log", os.O_WRONLY | os.O_CREAT)
    try:
        write_all(log, b"begin\n")
        os.close(os.dup(log))
        (mount / "step.tmp").mkdir()
        (mount / "step.tmp/shard").write_bytes(b"bytes")
        os.rename(mount / "step.tmp", mount / "step")
        directory = os.open(mount, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        assert (on_pfs / "step/shard").read_bytes() == b"bytes"
        write_all(log, b"end\n", 6)
    finally:
        os.close(log)
    assert until(lambda: (on_pfs / "log").exists() and (on_pfs / "log").read_bytes() == b"begin\nend\n")


def test_times_that_are_set_before_the_close_stay(mount: Path, alone: LocalCluster) -> None:
    """``cp -a``, tar and rsync do so. The kernel's own copy of the attributes hid for a second that they were gone."""
    path, on_pfs = mount / "copy", alone.pfs / mount.name / "copy"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    write_all(descriptor, b"bytes")
    os.utime(descriptor, ns=(5, 7))
    os.close(descriptor)
    assert until(lambda: stage_of(path) == "pfs")
    assert on_pfs.stat().st_mtime_ns == 7


def test_a_truncation_to_the_same_length_moves_the_times(mount: Path, alone: LocalCluster) -> None:
    """``: > stamp`` is how makefiles and scripts touch a file."""
    path = mount / "stamp"
    path.write_bytes(b"")
    os.truncate(path, 7)
    for length, change in (
        (0, lambda: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))),
        (7, lambda: os.truncate(path, 7)),
        (0, lambda: os.truncate(path, 0)),
        (0, lambda: path.write_bytes(b"")),
    ):
        os.truncate(path, length)
        os.utime(path, ns=(5, 5))
        change()
        assert path.stat().st_mtime_ns > 5
    on_pfs = alone.pfs / mount.name / "stamp"
    assert until(lambda: on_pfs.exists() and on_pfs.stat().st_mtime_ns == path.stat().st_mtime_ns)


def test_a_reader_may_truncate_as_it_opens(mount: Path) -> None:
    (mount / "f").write_bytes(b"old")
    fd = os.open(mount / "f", os.O_RDONLY | os.O_TRUNC)
    try:
        assert os.fstat(fd).st_size == 0
    finally:
        os.close(fd)
    assert (mount / "f").read_bytes() == b""


def test_what_was_removed_while_open_still_answers(mount: Path) -> None:
    """fstat of a directory that somebody is in, and attributes of a file without a name."""
    (mount / "d").mkdir(mode=0o750)
    (mount / "e").mkdir()
    (mount / "f").write_bytes(b"f")
    fds = [os.open(mount / name, os.O_RDONLY) for name in "edf"]
    try:
        os.rename(mount / "d", mount / "e")
        os.rmdir(mount / "e")
        for fd in fds[:2]:
            found = os.fstat(fd)
            assert (stat.S_ISDIR(found.st_mode), found.st_nlink, os.listdir(fd)) == (True, 0, [])
            with raises(errno.ENOENT):
                os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
        os.setxattr(fds[2], "user.a", b"1")
        os.unlink(mount / "f")
        os.setxattr(fds[2], "user.b", b"2")
        os.removexattr(fds[2], "user.a")
        assert os.getxattr(fds[2], "user.b") == b"2"
        with raises(errno.ENODATA):
            os.getxattr(fds[2], "user.a")
    finally:
        for fd in fds:
            os.close(fd)


def test_a_removed_directory_stays_open_over_the_daemons_death(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1, {"supervisor": "on"})
    path = cluster.nodes[0].mountpoint / "gone"
    path.mkdir()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        path.rmdir()
        before = os.fstat(fd)
        for _ in range(2):  # what the last requests were is known to the first daemon that follows, not to the second
            cluster.kill_daemon(0)
            path.mkdir()  # answered by the next daemon
            path.rmdir()
        os.fchmod(fd, 0o700)  # the kernel asks for the attributes
        after = os.fstat(fd)
        assert (after.st_ino, after.st_nlink, stat.S_IFMT(after.st_mode)) == (before.st_ino, 0, stat.S_IFDIR)
        assert os.listdir(fd) == []
    finally:
        os.close(fd)


@pytest.mark.parametrize("way", ["kernel", "handler", "alone"])
def test_times_that_are_set_before_the_close_stay_over_the_daemons_death(
    make_cluster: Callable[..., LocalCluster], way: str
) -> None:
    """cp -a, tar and rsync set them last, and are not asked again."""
    options = {"kernel": {"supervisor": "on"}, "handler": {"supervisor": "on", "passthrough": "off"}}
    cluster = make_cluster(1, options.get(way, {"supervisor": "off"}))
    mount = cluster.nodes[0].mountpoint
    fds = {name: os.open(mount / name, os.O_WRONLY | os.O_CREAT) for name in ("set", "empty", "written")}
    for name in ("set", "written"):
        write_all(fds[name], b"bytes")
    for fd in fds.values():
        os.utime(fd, ns=(5, 7))
    write_all(fds["written"], b"after")
    for _ in range(1 if way == "alone" else 2):
        cluster.kill_daemon(0)
        if way == "alone":
            cluster.remount(0)
        assert [(mount / name).stat().st_mtime_ns for name in ("set", "empty")] == [7, 7]
    assert (mount / "written").stat().st_mtime_ns > 7
    for fd in fds.values():
        with contextlib.suppress(OSError):  # alone: of a mount that is gone
            os.close(fd)
    cluster.umount()
    assert [(cluster.pfs / name).stat().st_mtime_ns for name in ("set", "empty")] == [7, 7]
    assert (cluster.pfs / "written").stat().st_mtime_ns > 7


def test_times_of_a_file_without_a_name_stay_over_the_daemons_death(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1, {"supervisor": "on"})
    path = cluster.nodes[0].mountpoint / "f"
    with path.open("wb", buffering=0) as before, path.open("rb+", buffering=0) as after:
        before.write(b"bytes")
        os.utime(path, ns=(5, 7))
        path.unlink()
        for time_ns in (7, 9):
            for _ in range(2):
                cluster.kill_daemon(0)
                assert os.fstat(before.fileno()).st_mtime_ns == time_ns
            os.utime(after.fileno(), ns=(5, 9))


def test_listings_have_dots_and_symlinks_no_attributes(mount: Path) -> None:
    """``ls -a``; and ``rsync -X`` fails on a name that is listed and not there."""
    (mount / "d").mkdir()
    (mount / "d/f").write_bytes(b"")
    os.symlink("f", mount / "d/l")
    os.mkfifo(mount / "d/p")
    shown = subprocess.run(["ls", "-afi", mount / "d"], capture_output=True, text=True, check=True).stdout.split()
    inodes = dict(zip(shown[1::2], map(int, shown[::2]), strict=True))
    assert sorted(inodes) == [".", "..", "f", "l", "p"]
    assert (inodes["."], inodes[".."]) == ((mount / "d").stat().st_ino, mount.stat().st_ino)
    for name in ("l", "p"):
        assert os.listxattr(mount / "d" / name, follow_symlinks=False) == []


OWN_FILE = (
    "import os; f = os.open('{}', os.O_CREAT | os.O_WRONLY); os.fchmod(f, 0o6777); os.write(f, b'x'); os.close(f)"
)


@pytest.mark.parametrize(
    ("change", "before"),
    [
        ("printf x > {}", b"something"),
        (": > {}", b"something"),
        (": > {}", b""),
        ("printf x >> {}", b"something"),
        ("truncate -s 1 {}", b"something"),
        ('rm {} && python3 -c "' + OWN_FILE + '"', b"something"),
    ],
    ids=["write", "open", "open-empty", "append", "truncate", "own"],
)
def test_a_change_by_others_takes_the_set_id_bits_away(open_to_all: Path, change: str, before: bytes) -> None:
    path = open_to_all / "f"
    path.write_bytes(before)
    path.chmod(0o6777)
    subprocess.run(
        ["/bin/sh", "-c", change.replace("{}", str(path))], user=65534, group=65534, extra_groups=(), check=True
    )
    mode_alone = subprocess.run(["stat", "-c", "%a", path], capture_output=True, text=True, check=True).stdout
    assert mode_alone == "777\n"  # the kernel asks for no more than what is to be shown
    assert path.stat().st_mode & 0o7777 == 0o777


def test_a_new_owner_does_not_get_the_set_id_bits(open_to_all: Path) -> None:
    path = open_to_all / "f"
    path.write_bytes(b"something")
    path.chmod(0o6755)
    os.chown(path, 65534, -1)
    assert path.stat().st_mode & 0o7777 == 0o755
    path.chmod(0o2644)  # mandatory locking, not rights
    os.chown(path, 0, -1)
    assert path.stat().st_mode & 0o7777 == 0o2644


def test_hard_links_are_one_file_here_and_on_the_pfs(make_cluster: Callable[..., LocalCluster], tmp_path: Path) -> None:
    cluster = make_cluster(1)
    for root in (cluster.nodes[0].mountpoint, tmp_path):
        (root / "d").mkdir()
        (root / "a").write_bytes(b"first")
        os.link(root / "a", root / "d/b")
        assert (root / "a").stat().st_nlink == 2
        assert os.path.samefile(root / "a", root / "d/b")
        (root / "d/b").write_bytes(b"second, through the other name")
        os.link(root / "d/b", root / "c")
        os.rename(root / "a", root / "d/a")  # another name of the same file
        os.unlink(root / "d/b")
        with open(root / "c", "ab") as file:
            file.write(b" and more")
            os.link(root / "c", root / "open")
        os.rename(root / "c", root / "d/a")  # does nothing: they are one file
        assert (root / "open").stat().st_nlink == 3
        os.symlink("open", root / "s")
        os.link(root / "s", root / "s2", follow_symlinks=False)
        os.mkfifo(root / "p")
        os.link(root / "p", root / "p2")
        for name in ("p", "p2"):
            os.chmod(root / name, 0o640)
            os.unlink(root / name)
    cluster.umount()
    assert same_tree(cluster.pfs, tmp_path) == []
    assert os.path.samefile(cluster.pfs / "open", cluster.pfs / "d/a")


def test_a_name_that_was_linked_reads_from_the_pfs_after_the_first_one_is_gone(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    (mount / "a").write_bytes(b"bytes")
    cluster.umount()
    cluster.mount()
    os.link(mount / "a", mount / "b")
    os.unlink(mount / "a")
    assert (mount / "b").read_bytes() == b"bytes"
    assert (mount / "b").stat().st_nlink == 1
    cluster.umount()
    assert sorted(p.name for p in cluster.pfs.iterdir()) == [".cachexfs", "b"]


def test_users_attributes_are_kept_and_ours_refused(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    path = mount / "f"
    path.write_bytes(b"bytes")
    before = path.stat()
    for target in (path, mount):
        os.setxattr(target, "user.epoch", b"12\0\xff")
        os.setxattr(target, "user.empty", b"")
    assert path.stat().st_ctime_ns > before.st_ctime_ns
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    os.setxattr(path, "user.epoch", b"13")
    os.rename(path, mount / "g")
    path = mount / "g"
    path.write_bytes(b"other bytes")
    cluster.kill_daemon(0)
    cluster.remount(0)
    assert os.getxattr(path, "user.epoch") == b"13"
    assert os.getxattr(mount, "user.epoch") == b"12\0\xff"
    assert os.getxattr(path, "user.empty") == b""
    assert {"user.epoch", "user.empty", "user.cachex.stage"} <= set(os.listxattr(path))
    os.removexattr(path, "user.empty")
    with raises(errno.ENODATA):
        os.removexattr(path, "user.empty")
    with raises(errno.ENOSPC):
        for number in range(5):
            os.setxattr(path, f"user.big{number}", bytes(16 << 10))
    for name in ("user.cachex.stage", "user.cachex.mine", "trusted.x"):
        with raises(errno.ENOTSUP):
            os.setxattr(path, name, b"x")
    with raises(errno.ENOTSUP):
        os.removexattr(path, "user.cachex.stage")
    shutil.copy2(path, mount / "copy")
    assert os.getxattr(mount / "copy", "user.epoch") == b"13"


def test_fsync_of_a_directory_does_not_wait_for_what_is_rewritten_meanwhile(mount: Path, alone: LocalCluster) -> None:
    """It got EIO where others went on rewriting files: at no moment until its deadline was nothing pending there."""
    on_pfs = alone.pfs / mount.name
    (mount / "meanwhile").write_bytes(b"first")
    assert until((on_pfs / "meanwhile").is_file)
    (on_pfs / "meanwhile").unlink()
    for name in ("before", "meanwhile"):
        (on_pfs / name).mkdir()  # in the way of a file of that name
    directory, results = os.open(mount, os.O_RDONLY), list[str]()
    writer = os.open(mount / "meanwhile", os.O_WRONLY)

    def sync() -> None:
        try:
            os.fsync(directory)
            results.append("done")
        except OSError as error:
            results.append(str(error))

    (mount / "before").touch()
    thread = threading.Thread(target=sync)
    thread.start()
    number = {"x86_64": "74", "aarch64": "82"}[os.uname().machine]  # fsync
    assert until(lambda: Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()[0] == number)
    write_all(writer, b"second")
    os.close(writer)
    (on_pfs / "before").rmdir()
    thread.join()
    os.close(directory)
    assert results == ["done"]
    assert (on_pfs / "before").is_file()
    assert (on_pfs / "meanwhile").is_dir()
    (on_pfs / "meanwhile").rmdir()
    assert until((on_pfs / "meanwhile").is_file)
