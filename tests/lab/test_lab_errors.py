"""Errors of a real shared filesystem: each is shown, nothing is taken for done, and all drains when it is over."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from lab_base import Lab, command
from lab_gluster import Gluster
from lab_support import MIB, Injection, bare_names, promptly, until_drained
from real_support import until, write_file

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr
from cachexfs.errors import EXIT_NOT_DURABLE

DATA = os.urandom(3 * MIB + 5)
RENAMES = "rename,renameat,renameat2"
WRITES = "pwrite64,pwritev"


@pytest.fixture
def disk(lab: Lab, place: str) -> Path:
    """A plain XFS as PFS, mounted for one test."""
    return lab.xfs(f"disk-{place[-20:]}", 300)


@pytest.mark.parametrize(
    ("calls", "code"), [("fsync", "EIO"), (RENAMES, "EIO"), (WRITES, "ENOSPC"), (WRITES, "EDQUOT")]
)
def test_an_error_in_a_brick_is_shown_and_the_copy_is_made_again(
    calls: str, code: str, small: Gluster, make_cluster: Callable[..., LocalCluster], place: str, tmp_path: Path
) -> None:
    pfs = small.mounts[0] / "errors"
    cluster = make_cluster(1, {"fsync": "returned"}, pfs=[pfs])
    mount = cluster.nodes[0].mountpoint
    (mount / "before").write_bytes(b"x")
    until_drained(cluster, mount)
    with Injection(small.bricks[0].pid, tmp_path / "calls", f"{calls}:error={code}") as injection:
        write_file(mount / "f", DATA)
        until("the error is shown", lambda: code in (xattr(mount / "f", "error") or ""))
        assert cluster.run(0, "status", str(mount)).code == EXIT_NOT_DURABLE
        assert xattr(mount / "f", "stage") == "returned"
        until("it is tried again", lambda: len(injection.injected()) > 2)
        failed = [line.partition("(")[2].partition(")")[0] for line in injection.injected()]
        assert not bare_names(pfs) - {"before"}
    until_drained(cluster, mount)
    assert xattr(mount / "f", "error") is None
    cluster.umount()
    assert (pfs / "f").read_bytes() == DATA
    assert not [path for path in (pfs / ".cachexfs/tmp").rglob("*") if path.is_file()]
    if calls == "fsync":  # one more fsync of the same file might say "ok" over lost data
        assert len(set(failed)) == len(failed)


def test_a_full_pfs_is_drained_to_once_a_removal_has_made_room(
    small: Gluster, make_cluster: Callable[..., LocalCluster], place: str
) -> None:
    """The removal is a later change, and does not wait for what has no room."""
    pfs = small.mounts[0] / place
    pfs.mkdir()
    space = os.statvfs(pfs)
    with (pfs / "filler").open("wb") as file:
        left = space.f_bavail * space.f_frsize - 20 * MIB
        while left > 0:
            left -= file.write(bytes(min(left, MIB)))
    cluster = make_cluster(1, {"fsync": "returned"}, pfs=[pfs])
    mount = cluster.nodes[0].mountpoint
    data = os.urandom(MIB) * 40
    write_file(mount / "big", data)
    until("the error is shown", lambda: "ENOSPC" in (xattr(mount / "big", "error") or ""))
    write_file(mount / "little", DATA[:1000])
    (mount / "filler").unlink()
    until_drained(cluster, mount)
    cluster.umount()
    assert (pfs / "big").read_bytes() == data
    assert bare_names(pfs) == {"big", "little"}


def test_a_read_only_pfs_is_drained_to_when_it_is_writable_again(
    disk: Path, make_cluster: Callable[..., LocalCluster]
) -> None:
    cluster = make_cluster(1, {"fsync": "returned"}, pfs=[disk / "pfs"])
    mount = cluster.nodes[0].mountpoint
    (mount / "d").mkdir()
    until_drained(cluster, mount)
    command("mount", "-o", "remount,ro", disk)
    write_file(mount / "d/f", DATA)
    until("the error is shown", lambda: "EROFS" in (xattr(mount / "d/f", "error") or ""))
    command("mount", "-o", "remount,rw", disk)
    until_drained(cluster, mount)
    cluster.umount()
    assert (disk / "pfs/d/f").read_bytes() == DATA


def test_nothing_is_written_to_the_mount_point_of_a_pfs_that_is_unmounted(
    small: Gluster, make_cluster: Callable[..., LocalCluster]
) -> None:
    pfs = small.mounts[0]
    cluster = make_cluster(1, {"fsync": "returned"}, pfs=[pfs])
    mount = cluster.nodes[0].mountpoint
    write_file(mount / "before", DATA)
    until_drained(cluster, mount)
    small.unmount(0)
    write_file(mount / "f", DATA)
    (mount / "before").unlink()
    until("the PFS counts as unreachable", lambda: cluster.status(0).pfs_state == "unreachable")
    until("the error is shown", lambda: "ESTALE" in (xattr(mount / "f", "error") or ""))
    assert os.listdir(pfs) == []
    small.heal()
    until_drained(cluster, mount)
    cluster.umount()
    assert (pfs / "f").read_bytes() == DATA
    assert bare_names(pfs) == {"f"}


@pytest.mark.parametrize("replaced", [False, True])
def test_a_directory_that_was_taken_away_is_not_made_again(
    replaced: bool, disk: Path, make_cluster: Callable[..., LocalCluster]
) -> None:
    pfs = disk / "pfs"
    cluster = make_cluster(1, {"fsync": "returned"}, pfs=[pfs])
    mount = cluster.nodes[0].mountpoint
    write_file(mount / "before", DATA)
    until_drained(cluster, mount)
    pfs.rename(disk / "away")
    if replaced:
        pfs.mkdir()
        (pfs / "strange").touch()
    write_file(mount / "f", DATA)
    (mount / "before").unlink()
    until("the error is shown", lambda: "ESTALE" in (xattr(mount / "f", "error") or ""))
    cluster.kill_daemon(0)
    promptly("mount", lambda: cluster.remount(0))
    assert (mount / "f").read_bytes() == DATA
    if replaced:
        assert os.listdir(pfs) == ["strange"]
        (pfs / "strange").unlink()
        pfs.rmdir()
    assert not pfs.exists()
    (disk / "away").rename(pfs)
    until_drained(cluster, mount)
    cluster.umount()
    assert bare_names(pfs) == {"f"}
    assert (pfs / "f").read_bytes() == DATA
