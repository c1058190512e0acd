"""Servers that do not answer: the mount goes on, says what hangs, ends when told to, and drains when they are back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from lab_base import Server
from lab_gluster import Gluster
from lab_moosefs import MooseFs
from lab_support import look, promptly, until_drained
from real_support import until, write_file

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr
from cachexfs.errors import EXIT_CANNOT_TELL, EXIT_NOT_DURABLE

DATA = os.urandom(300_000)


def servers(shared: Gluster | MooseFs) -> list[Server]:
    """Those without which nothing is answered."""
    return shared.bricks if isinstance(shared, Gluster) else [shared.master, *shared.chunk_servers]


@pytest.mark.parametrize("filesystem", ["small", "moose"])
def test_a_hung_pfs_stops_nothing_but_the_drain(
    filesystem: str, request: pytest.FixtureRequest, make_cluster: Callable[..., LocalCluster], place: str
) -> None:
    shared: Gluster | MooseFs = request.getfixturevalue(filesystem)
    cluster = make_cluster(1, {"fsync": "returned"}, pfs=[shared.mounts[0] / place])
    mount = cluster.nodes[0].mountpoint
    (mount / "d").mkdir()
    write_file(mount / "d/before", DATA)
    until_drained(cluster, mount)
    for server in servers(shared):
        server.pause()

    def work() -> None:
        for number in range(20):
            write_file(mount / f"d/f{number}", DATA[number:])
        (mount / "d/sub").mkdir()
        (mount / "d/f0").rename(mount / "d/sub/renamed")
        (mount / "d/f1").unlink()
        (mount / "d/before").unlink()
        assert len(os.listdir(mount / "d")) == 19
        assert (mount / "d/f2").stat().st_size == len(DATA) - 2
        assert (mount / "d/f2").read_bytes() == DATA[2:]
        assert xattr(mount / "d/f2", "stage") == "returned"

    promptly("the mount", work)
    if filesystem == "moose":  # a deadline has to pass first
        promptly("status", lambda: until("the PFS counts as hung", lambda: cluster.status(0).pfs_state == "hung"))
        assert cluster.status(0).pfs_error
        assert cluster.run(0, "status", str(mount)).code == EXIT_NOT_DURABLE
    ended = promptly("umount", lambda: cluster.run(0, "umount", str(mount), "--timeout", "2"))
    assert ended.code == EXIT_NOT_DURABLE
    assert "d/f2" in ended.err
    promptly("mount", lambda: cluster.remount(0))
    assert promptly("reading", lambda: (mount / "d/sub/renamed").read_bytes()) == DATA
    cluster.kill_daemon(0)  # although children of it hang
    promptly("the mount after a kill", lambda: cluster.remount(0))
    promptly("the mount once more", lambda: write_file(mount / "d/late", DATA))
    for server in servers(shared):
        server.go_on()
    until_drained(cluster, mount)
    shown = look(mount, whole_seconds=filesystem == "moose")
    cluster.umount()
    assert look(shared.mounts[0] / place, whole_seconds=filesystem == "moose") == shown
    assert (shared.mounts[0] / place / "d/f19").read_bytes() == DATA[19:]
    assert not [path for path in (shared.mounts[0] / place / ".cachexfs/tmp").rglob("*") if path.is_file()]


def test_a_first_mount_of_a_hung_pfs_says_so(
    small: Gluster, make_cluster: Callable[..., LocalCluster], place: str
) -> None:
    cluster = make_cluster(1, mounted=False, pfs=[small.mounts[0] / place])
    small.bricks[0].pause()
    ended = promptly("mount", lambda: cluster.run(0, *cluster.mount_arguments(0)))
    assert ended.code == EXIT_CANNOT_TELL
    assert "has not answered" in ended.err
    small.bricks[0].go_on()
    cluster.mount()
    cluster.umount()


def test_one_of_three_servers_may_hang(strict: Gluster, make_cluster: Callable[..., LocalCluster], place: str) -> None:
    cluster = make_cluster(1, pfs=[strict.mounts[0] / place])
    mount = cluster.nodes[0].mountpoint
    write_file(mount / "before", DATA)
    strict.bricks[1].pause()
    promptly("the mount", lambda: write_file(mount / "f", DATA))
    until_drained(cluster, mount)
    strict.bricks[1].go_on()
    cluster.umount()
    assert (strict.mounts[2] / place / "f").read_bytes() == DATA


def names_of(pfs: Path) -> set[str]:
    return {path for path in look(pfs) if path.startswith("d/")}


def test_names_that_vanish_with_their_server_are_neither_removed_nor_made_again(
    nasty: Gluster, make_cluster: Callable[..., LocalCluster], place: str
) -> None:
    """Half of the names give ENOENT and are left out of listings, without an error."""
    bare = nasty.mounts[1] / place
    old = nasty.mounts[0] / place / "old"
    old.mkdir(parents=True)
    for number in range(24):
        (old / f"o{number}").write_bytes(DATA[:number])
    cluster = make_cluster(1, {"fsync": "returned"}, pfs=[nasty.mounts[0] / place])
    mount = cluster.nodes[0].mountpoint
    (mount / "d").mkdir()
    for number in range(24):
        write_file(mount / f"d/f{number}", DATA[number:])
    until_drained(cluster, mount / "d")
    inodes = {name: (bare / name).stat().st_ino for name in names_of(bare)}
    nasty.bricks[1].kill()
    until("names vanish", lambda: len(names_of(nasty.mounts[0] / place)) < 24)
    assert cluster.run(0, "latest", str(nasty.mounts[0] / place / "d")).code == EXIT_CANNOT_TELL
    for number in range(0, 24, 2):
        (mount / f"d/f{number}").unlink()
    for number in range(1, 24, 4):
        (mount / f"d/f{number}").rename(mount / f"d/r{number}")
    with pytest.raises(OSError, match=r"Input/output"):  # it was never listed: what is there, nobody can say
        os.listdir(mount / "old")
    with pytest.raises(OSError, match=r"Input/output"):
        os.stat(mount / "old/none")
    assert len(os.listdir(mount / "d")) == 12
    until("the PFS counts as unreachable", lambda: cluster.status(0).pfs_state == "unreachable")
    assert xattr(mount / "d/f3", "stage") == "pfs"
    cluster.kill_daemon(0)
    cluster.remount(0)
    assert len(os.listdir(mount / "d")) == 12
    nasty.heal()
    until("the old names are back", lambda: _listed(mount / "old") == 24)
    until_drained(cluster, mount)
    shown = look(mount)
    cluster.umount()
    until("caches are over", lambda: look(bare) == shown)
    kept = {f"d/f{number}" for number in range(3, 24, 4)}
    assert {name: (bare / name).stat().st_ino for name in kept} == {name: inodes[name] for name in kept}
    for number in range(1, 24, 4):
        assert (bare / f"d/r{number}").read_bytes() == DATA[number:]


def _listed(path: Path) -> int:
    try:
        return len(os.listdir(path))
    except OSError:
        return -1
