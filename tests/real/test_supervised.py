"""With the supervisor, a daemon killed with -9 is a pause for applications, not an error."""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import shutil
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from real_support import pfs_away, raises_errno, until, write_file

from cachexfs.cli import client
from cachexfs.demo import control
from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr

FILES = 40
F_OFD_SETLK, IN_CREATE = 37, 0x100
SYS_PIDFD_GETFD = 438


@pytest.mark.parametrize("nodes", [1, 3])
def test_writers_and_readers_go_on_over_a_killed_daemon(make_cluster: Callable[..., LocalCluster], nodes: int) -> None:
    cluster = make_cluster(nodes, {"supervisor": "on"})
    mount = cluster.nodes[0].mountpoint
    (mount / "before").write_bytes(b"b" * 300_000)
    written: dict[str, bytes] = {}
    errors: list[OSError] = []

    def write_on() -> None:
        try:
            for number in range(FILES):
                data = os.urandom(50_000 + number)
                write_file(mount / f"f{number}", data, sync=number % 4 == 0)
                written[f"f{number}"] = data
        except OSError as error:
            errors.append(error)

    with (mount / "open").open("w+b", buffering=0) as held:
        held.write(b"written before the kill, ")
        thread = threading.Thread(target=write_on)
        thread.start()
        for goal in (FILES // 4, FILES // 2):
            until("some files are written", lambda goal=goal: len(written) >= goal or bool(errors))
            old = cluster.status(0).pid
            cluster.kill_daemon(0)
            assert (mount / "before").read_bytes() == b"b" * 300_000
            until("another daemon answers", lambda old=old: cluster.answers(0) and cluster.status(0).pid != old)
        held.write(b"and after")
        thread.join()
    assert errors == []
    assert cluster.status(0).daemons >= 3
    assert (mount / "open").read_bytes() == b"written before the kill, and after"
    assert {name: (mount / name).read_bytes() for name in written} == written
    cluster.umount()
    assert {name: (cluster.pfs / name).read_bytes() for name in written} == written


def test_a_supervisor_is_not_found_by_the_daemons_name(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1, {"supervisor": "on"})
    path = cluster.nodes[0].mountpoint / "f"
    path.write_bytes(b"kept")
    for _ in range(3):
        old = cluster.status(0).pid
        for pid in cluster.processes(0):  # as pkill -f does
            with contextlib.suppress(OSError):
                if b"cachexfs.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        assert path.read_bytes() == b"kept"
        until("another daemon answers", lambda old=old: cluster.answers(0) and cluster.status(0).pid != old)


@pytest.mark.parametrize("supervisor", ["on", "off"])
def test_a_mount_goes_on_with_the_drain_of_an_earlier_one(
    make_cluster: Callable[..., LocalCluster], supervisor: str
) -> None:
    """``umount -l`` cannot drain; its daemon goes on by itself, until the place is mounted again."""
    cluster = make_cluster(1, {"supervisor": supervisor, "fsync": "returned"})
    mount = cluster.nodes[0].mountpoint
    with pfs_away(cluster):
        for number in range(5):
            write_file(mount / f"f{number}", bytes([number]) * 200_000)
        old = cluster.status(0).pid
        cluster.detach(0)
        until("it drains without a mount", lambda: control_status(cluster).get("unmounted") is True)
        ended = cluster.run(0, *cluster.mount_arguments(0))
        assert ended.code == 0, ended.err
        assert "goes on with them" in ended.err
        assert cluster.status(0).pid != old
        assert [(mount / f"f{n}").read_bytes() for n in range(5)] == [bytes([n]) * 200_000 for n in range(5)]
    cluster.umount()
    assert [(cluster.pfs / f"f{n}").read_bytes() for n in range(5)] == [bytes([n]) * 200_000 for n in range(5)]


def test_a_mount_beside_one_that_is_detached_and_used_is_refused(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1, {"supervisor": "on"})
    mount = cluster.nodes[0].mountpoint
    with (mount / "f").open("wb") as held:
        held.write(b"1")
        cluster.detach(0)
        ended = cluster.run(0, *cluster.mount_arguments(0))
        assert ended.code == 2
        assert "applications still have files of it open" in ended.err
    until("the earlier one has ended", lambda: not cluster.answers(0))
    assert (cluster.pfs / "f").read_bytes() == b"1"


def control_status(cluster: LocalCluster) -> dict[str, object]:
    entry = control.registered(cluster.nodes[0].runtime)
    found: dict[str, object] = json.loads(client.ask_raw(entry, {"op": "status", "path": None})) if entry else {}
    return found


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_bytes_that_were_overwritten_after_a_flush_outlive_the_daemon(
    make_cluster: Callable[..., LocalCluster], passthrough: str
) -> None:
    """A duplicate's close publishes; what the kernel then puts over the published bytes has the same length."""
    cluster = make_cluster(1, {"supervisor": "on", "passthrough": passthrough})
    mount = cluster.nodes[0].mountpoint
    fds = {size: os.open(mount / f"f{size}", os.O_CREAT | os.O_RDWR) for size in (5000, 3 << 20)}
    for size, fd in fds.items():
        os.write(fd, b"1" * size)
        os.close(os.dup(fd))
        os.pwrite(fd, b"2" * 100, 1000)
    old = cluster.status(0).pid
    cluster.kill_daemon(0)
    until("another daemon answers", lambda: cluster.answers(0) and cluster.status(0).pid != old)
    assert [xattr(mount / f"f{size}", "stage") for size in fds] == ["writing"] * len(fds)
    wanted = {size: b"1" * 1000 + b"2" * 100 + b"1" * (size - 1100) for size in fds}
    for size, fd in fds.items():
        assert os.pread(fd, size, 0) == wanted[size]
        os.close(fd)
        assert (mount / f"f{size}").read_bytes() == wanted[size]
    cluster.umount()
    for size, data in wanted.items():
        assert (cluster.pfs / f"f{size}").read_bytes() == data
    assert "damaged" not in cluster.nodes[0].log.read_text()


def test_an_empty_open_file_without_a_name_keeps_its_mode_over_the_daemon(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = make_cluster(1, {"supervisor": "on"})
    path = cluster.nodes[0].mountpoint / "f"
    path.touch()
    fd = os.open(path, os.O_RDWR)
    path.chmod(0o750)
    path.unlink()
    old = cluster.status(0).pid
    cluster.kill_daemon(0)
    until("another daemon answers", lambda: cluster.answers(0) and cluster.status(0).pid != old)
    assert (os.fstat(fd).st_mode & 0o7777, os.fstat(fd).st_size, os.fstat(fd).st_nlink) == (0o750, 0, 0)
    os.write(fd, b"and on")
    assert os.pread(fd, 10, 0) == b"and on"
    os.close(fd)
    files = Path(cluster.nodes[0].staging) / "files"
    until("nothing of it is left", lambda: not list(files.iterdir()))


@pytest.mark.parametrize("killed", [False, True])
def test_fsync_after_a_map_or_a_duplicate_was_closed_reaches_the_partner(
    make_cluster: Callable[..., LocalCluster], *, killed: bool
) -> None:
    """That close publishes what the kernel wrote without its digests, which were told at the last close only."""
    cluster = make_cluster(2, {"supervisor": "on", "fsync": "partner"})
    path, data = cluster.nodes[0].mountpoint / "f", os.urandom(2_500_000)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, len(data))
    with mmap.mmap(fd, len(data)) as map_:
        map_[:] = data
        map_.flush()
    if killed:
        old = cluster.status(0).pid
        cluster.kill_daemon(0)
        until("another daemon answers", lambda: cluster.answers(0) and cluster.status(0).pid != old)
    os.fsync(fd)
    assert xattr(path, "stage") in ("partner", "pfs")
    os.close(fd)
    assert path.read_bytes() == data


@pytest.mark.parametrize("size", [1_500_000, 2_500_000, 3_500_000])
def test_a_large_file_that_is_changed_after_a_duplicate_was_closed_outlives_its_mount(
    make_cluster: Callable[..., LocalCluster], size: int
) -> None:
    """That close publishes it without its digests, and what the next mount finds is not of these bytes any more: there
    was no next mount where it was shorter."""
    cluster = make_cluster(1, {"supervisor": "on"})
    path, data = cluster.nodes[0].mountpoint / "f", os.urandom(size)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, os.urandom(2_500_000))
    os.close(os.dup(fd))
    os.ftruncate(fd, size)
    os.pwrite(fd, data, 0)
    cluster.kill(0)
    with contextlib.suppress(OSError):
        os.close(fd)
    cluster.remount(0)
    assert path.read_bytes() == data
    until("it has landed", lambda: xattr(path, "stage") == "pfs")
    assert (cluster.pfs / "f").read_bytes() == data


@pytest.mark.parametrize("data", [b"", b"bytes"])
def test_an_open_file_without_a_name_keeps_its_attributes_over_two_daemons(
    make_cluster: Callable[..., LocalCluster], data: bytes
) -> None:
    """Those it had, and those that were set since; the second daemon found the first one's note of the removal."""
    cluster = make_cluster(1, {"supervisor": "on"})
    path = cluster.nodes[0].mountpoint / "f"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDWR)
    os.setxattr(fd, "user.kept", b"1")
    os.setxattr(fd, "user.gone", b"2")
    path.unlink()
    os.removexattr(fd, "user.gone")
    os.setxattr(fd, "user.new", b"3")
    os.fchmod(fd, 0o751)
    for _ in range(2):
        old = cluster.status(0).pid
        cluster.kill_daemon(0)
        until("another daemon answers", lambda old=old: cluster.answers(0) and cluster.status(0).pid != old)
        found = {name: os.getxattr(fd, name) for name in os.listxattr(fd) if not name.startswith("user.cachex")}
        assert found == {"user.kept": b"1", "user.new": b"3"}
        assert (os.fstat(fd).st_mode & 0o7777, os.pread(fd, 10, 0)) == (0o751, data)
    os.close(fd)


def test_a_file_that_was_cut_after_a_flush_is_not_lost_with_the_daemon(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    """Where the kernel writes it is the published file itself that becomes shorter."""
    cluster = make_cluster(1, {"supervisor": "on"})
    path = cluster.nodes[0].mountpoint / "f"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(fd, b"1" * 5000)
    os.close(os.dup(fd))
    os.ftruncate(fd, 1000)
    old = cluster.status(0).pid
    cluster.kill_daemon(0)
    until("another daemon answers", lambda: cluster.answers(0) and cluster.status(0).pid != old)
    assert (xattr(path, "stage"), os.fstat(fd).st_size) == ("writing", 1000)
    os.close(fd)
    assert path.read_bytes() == b"1" * 1000
    cluster.umount()
    assert (cluster.pfs / "f").read_bytes() == b"1" * 1000
    log = cluster.nodes[0].log.read_text()
    assert "lost" not in log
    assert "gone" not in log


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_bytes_that_were_appended_before_older_ones_were_changed_outlive_two_daemons(
    make_cluster: Callable[..., LocalCluster], passthrough: str
) -> None:
    """The published file has grown in place when the writer goes on in a copy: it must not be published over it."""
    cluster = make_cluster(1, {"supervisor": "on", "passthrough": passthrough})
    path = cluster.nodes[0].mountpoint / "f"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(fd, b"1" * 1000)
    os.close(os.dup(fd))
    os.pwrite(fd, b"2" * 1000, 1000)
    os.pwrite(fd, b"3" * 10, 0)
    os.pwrite(fd, b"4" * 10, 2000)
    wanted = b"3" * 10 + b"1" * 990 + b"2" * 1000 + b"4" * 10
    for _ in range(3):
        old = cluster.status(0).pid
        cluster.kill_daemon(0)
        until("another daemon answers", lambda old=old: cluster.answers(0) and cluster.status(0).pid != old)
        assert os.pread(fd, 5000, 0) == wanted
    os.close(fd)
    assert path.read_bytes() == wanted
    cluster.umount()
    assert (cluster.pfs / "f").read_bytes() == wanted


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_listing_goes_on_over_a_killed_daemon(make_cluster: Callable[..., LocalCluster], nodes: int) -> None:
    """What is there all the time is listed once, whatever comes and goes meanwhile."""
    cluster = make_cluster(nodes, {"supervisor": "on"})
    directory = cluster.nodes[0].mountpoint / "d"
    directory.mkdir()
    for number in range(0, 400, 2):
        os.mknod(directory / f"name-{number:04}-{'x' * 240}")
    seen: list[str] = []
    with os.scandir(directory) as entries:
        while len(seen) < 20:
            seen.append(next(entries).name)
        old = cluster.status(0).pid
        cluster.kill_daemon(0)
        until("another daemon answers", lambda: cluster.answers(0) and cluster.status(0).pid != old)
        names = sorted(os.listdir(directory))
        gone = set(names[::5])
        for name in gone:
            (directory / name).unlink()
        for number in range(1, 60, 2):
            os.mknod(directory / f"name-{number:04}-{'x' * 240}")
        seen += [entry.name for entry in entries]
    assert len(seen) == len(set(seen))
    assert set(names) - gone <= set(seen)
    cluster.umount()


#: Before a supervisor's Python path: it gives up after the second failure in a row, not after minutes.
IMPATIENT = """
import sys
if "cachexfs.supervisor" in sys.orig_argv:
    sys.argv[1:1] = ["--max-restarts", "1"]
"""


def test_a_daemon_without_what_the_last_one_had_does_not_begin_anew(
    make_cluster: Callable[..., LocalCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty directory would look as if everything had been deleted."""
    (tmp_path / "sitecustomize.py").write_text(IMPATIENT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', Path(__file__).parents[2])}")
    cluster = make_cluster(1, {"supervisor": "on"})
    mount, staging = cluster.nodes[0].mountpoint, cluster.nodes[0].staging
    journal = staging / "catalogue.journal"
    (mount / "f").write_bytes(b"kept")
    fd = os.open(mount / "open", os.O_CREAT | os.O_RDWR)
    os.write(fd, b"1")
    for gone, why in ((staging, "not what this mount has used"), (journal, "the catalogue that this mount has used")):
        aside = gone.with_name("aside")
        gone.rename(aside)
        cluster.kill_daemon(0)
        with raises_errno(errno.EIO):  # the supervisor has tried several times
            os.listdir(mount)
        assert why in cluster.nodes[0].log.read_text()
        if gone.exists():
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        aside.rename(gone)
        ended = cluster.run(0, "restart", str(mount))
        assert ended.code == 0, ended.err
        assert (mount / "f").read_bytes() == b"kept"
    os.write(fd, b"2")
    assert os.pread(fd, 5, 0) == b"12"
    os.close(fd)
    cluster.umount()
    assert (cluster.pfs / "open").read_bytes() == b"12"


def test_locks_and_watches_outlive_the_daemon(make_cluster: Callable[..., LocalCluster]) -> None:
    """The kernel keeps them; nothing of them is in the daemon."""
    cluster = make_cluster(1, {"supervisor": "on"})
    mount = cluster.nodes[0].mountpoint
    (mount / "f").write_bytes(b"x" * 100)
    fds = [os.open(mount / "f", os.O_RDWR) for _ in range(4)]
    whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.flock(fds[0], fcntl.LOCK_EX)
    fcntl.fcntl(fds[1], F_OFD_SETLK, whole)
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, os.fsencode(mount), IN_CREATE) > 0
    old = cluster.status(0).pid
    cluster.kill_daemon(0)
    until("another daemon answers", lambda: cluster.answers(0) and cluster.status(0).pid != old)
    with raises_errno(errno.EWOULDBLOCK):
        fcntl.flock(fds[2], fcntl.LOCK_EX | fcntl.LOCK_NB)
    with raises_errno(errno.EAGAIN):
        fcntl.fcntl(fds[3], F_OFD_SETLK, whole)
    (mount / "new").touch()
    assert os.read(watch, 4096)[16:].rstrip(b"\0") == b"new"
    for fd in (*fds[:2], watch):
        os.close(fd)
    fcntl.flock(fds[2], fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.fcntl(fds[3], F_OFD_SETLK, whole)
    for fd in fds[2:]:
        os.close(fd)
    cluster.umount()


def test_a_daemon_that_hangs_in_the_kernel_does_not_keep_its_locks_from_the_next(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    """Killed, it still has them. Here another process has its descriptors."""
    cluster = make_cluster(1, {"supervisor": "on"})
    mount, staging = cluster.nodes[0].mountpoint, cluster.nodes[0].staging
    (mount / "f").write_bytes(b"kept")
    old = cluster.status(0).pid
    kept = descriptors_of(old, {str(staging / name) for name in ("lock", "catalogue.lock")})
    assert len(kept) == 2
    cluster.kill_daemon(0)
    assert (mount / "f").read_bytes() == b"kept"
    until("another daemon answers", lambda: cluster.answers(0) and cluster.status(0).pid != old)
    for fd in kept:
        os.close(fd)
    cluster.umount()


def descriptors_of(pid: int, paths: set[str]) -> list[int]:
    """Duplicates of another process's descriptors of these files: what it has locked stays locked with them."""
    pidfd = os.pidfd_open(pid)
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = [int(name) for name in os.listdir(f"/proc/{pid}/fd") if os.readlink(f"/proc/{pid}/fd/{name}") in paths]
    found = [libc.syscall(SYS_PIDFD_GETFD, pidfd, number, 0) for number in numbers]
    os.close(pidfd)
    return found


def test_a_reader_of_an_earlier_content_stays_with_it_over_the_daemon(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    """Another node has replaced what the kernel serves to it; who opens the file now gets the new content."""
    cluster = make_cluster(2, {"supervisor": "on"})
    here, there = (node.mountpoint / "f" for node in cluster.nodes)
    write_file(here, b"1" * 200_000)
    with here.open("rb", buffering=0) as reader:
        assert reader.read(10) == b"1" * 10
        write_file(there, b"2" * 300_000)
        assert here.read_bytes() == b"2" * 300_000
        old = cluster.status(0).pid
        cluster.kill_daemon(0)
        until("another daemon answers", lambda: cluster.answers(0) and cluster.status(0).pid != old)
        assert here.read_bytes() == b"2" * 300_000
        with here.open("r+b", buffering=0) as writer:
            writer.write(b"3")
        assert here.read_bytes() == b"3" + b"2" * 299_999
        assert os.pread(reader.fileno(), 200_000, 0) == b"1" * 200_000
    cluster.umount()
    assert (cluster.pfs / "f").read_bytes() == b"3" + b"2" * 299_999
