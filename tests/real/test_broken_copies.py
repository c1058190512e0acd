"""Copies that went bad, and checkpoints that nobody has looked at yet: found by trying to make the mount lie."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from real_support import Template, pfs_away, raises_errno, until, until_stage, write_file

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr
from cachexfs.errors import EXIT_NOT_DURABLE

MIB = 1 << 20


def flip(path: Path, offset: int) -> None:
    """Damage one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_latest_looks_into_directories_of_the_pfs_that_nobody_has_touched(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    cluster = make_cluster(1, mounted=False)
    for step in (1, 2):
        templates[0].save([cluster.pfs], f"run/step-{step}")
    cluster.mount()
    mount = cluster.nodes[0].mountpoint
    found = cluster.run(0, "latest", str(mount / "run"))
    assert (found.code, found.out.strip()) == (0, str(mount / "run/step-2"))


def test_a_damaged_replica_is_never_served_nor_drained(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(3, {"node_timeout": "2"})
    mounts = [node.mountpoint for node in cluster.nodes]
    with pfs_away(cluster):
        write_file(mounts[0] / "f", os.urandom(4 * MIB))
        until_stage(mounts[0] / "f", "partner")
        partner = next(n for n in (1, 2) if list(cluster.nodes[n].nvme.rglob("*.data")))
        for data in cluster.nodes[partner].nvme.rglob("*.data"):
            flip(data, MIB + 5)
        cluster.kill(0)
        cluster.wipe(0)
        for mount in mounts[1:]:
            with raises_errno(errno.EIO):
                (mount / "f").read_bytes()
        until("the claim falls", lambda: xattr(mounts[partner] / "f", "stage") == "lost")
        with raises_errno(errno.EIO):
            (mounts[partner] / "f").read_bytes()
    ended = cluster.run(partner, "umount", str(mounts[partner]), "--timeout", "5")
    assert ended.code == EXIT_NOT_DURABLE
    assert "is left: f." in ended.err
    assert not (cluster.pfs / "f").exists()


def test_staged_bytes_that_went_bad_while_the_daemon_was_dead_do_not_reach_the_pfs(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = make_cluster(1, {"fsync": "returned"})
    mount = cluster.nodes[0].mountpoint
    with pfs_away(cluster):
        (mount / "f").write_bytes(os.urandom(3 * MIB))
        until("its digest is known", lambda: xattr(mount / "f", "digest") is not None)
        cluster.kill(0)
        (staged,) = [p for p in cluster.nodes[0].staging.rglob("files/*") if p.stat().st_size == 3 * MIB]
        flip(staged, 2 * MIB + 1)
        cluster.remount(0)
        until("the damage is found", lambda: xattr(mount / "f", "stage") == "lost")
    assert not (cluster.pfs / "f").exists()


def test_a_file_that_the_commit_file_does_not_name_may_change_after_a_restart(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    cluster = make_cluster(1, {"fsync": "returned"})
    mount = cluster.nodes[0].mountpoint
    templates[0].save([mount], "step-1")
    (mount / "step-1/notes").write_bytes(b"one")
    until_stage(mount / "step-1", "pfs")
    cluster.kill(0)
    cluster.remount(0)
    (mount / "step-1/notes").write_bytes(b"two")
    until("the new notes are there", lambda: (cluster.pfs / "step-1/notes").read_bytes() == b"two")
    (mount / "step-1/notes").unlink()
    until("the notes are gone", lambda: not (cluster.pfs / "step-1/notes").exists())
    assert templates[0].same_as(cluster.pfs / "step-1") == []
    assert xattr(mount / "step-1", "restartable") == "pfs"
