"""The disk of one node fails: the kernel makes its filesystem read-only under the daemon, its etcd member and its
replicas. The node goes on without it; nobody loses anything."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_support import until, until_stage, write_file

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own that can fail as a whole."""
    image, directory = tmp_path / "image", tmp_path / "disk"
    directory.mkdir()
    with image.open("wb") as file:
        file.truncate(600 * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, directory], check=True)
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)


def test_a_node_whose_disk_fails_goes_on_without_it(make_cluster: Callable[..., LocalCluster], disk: Path) -> None:
    cluster = make_cluster(3, {"supervisor": "auto"}, mounted=False)
    cluster.node_options[1] = {"nvme": str(disk)}
    cluster.mount()
    mounts = [node.mountpoint for node in cluster.nodes]
    before = {f"n{number}": os.urandom(2 * MIB) for number in range(3)}
    for mount, (name, data) in zip(mounts, before.items(), strict=True):
        write_file(mount / name, data)
    for name in before:
        until_stage(mounts[1] / name, "pfs")
    subprocess.run(["mount", "-o", "remount,abort", disk], check=True)
    after = {}
    for turn in ("the same daemon", "the next daemon"):
        for number, mount in enumerate(mounts):
            name = f"{turn} {number}"
            after[name] = os.urandom(MIB)
            (mount / name).write_bytes(after[name])
        (mounts[1] / f"n{0 if turn == 'the same daemon' else 2}").unlink()
        for name in after:
            until_stage(mounts[1] / name, "pfs")
        if turn == "the same daemon":
            cluster.kill_daemon(1)
            until("the next daemon serves", lambda: xattr(mounts[1], "stage") is not None)
    status = cluster.run(1, "status", str(mounts[1]))
    assert (status.code, "NVMe takes no writes" in status.out) == (3, True)
    for mount in (*mounts, cluster.pfs):
        assert sorted(path.name for path in mount.iterdir() if path.name != ".cachexfs") == sorted(["n1", *after])
        assert all((mount / name).read_bytes() == data for name, data in after.items())
        assert (mount / "n1").read_bytes() == before["n1"]
