"""Large files that are not in this node's memory: from the PFS, from a partner, larger than staging, damaged."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from real_support import pfs_away, raises_errno, until, until_stage

from cachexfs.demo.cluster import LocalCluster
from cachexfs.errors import EXIT_DONE, EXIT_NOT_DURABLE

MIB = 1 << 20
SIZE = 41 * MIB + 12_345


def content(seed: int) -> bytes:
    return random.Random(seed).randbytes(SIZE)


def read(path: Path, piece: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        return b"".join(iter(lambda: file.read(piece), b""))


@pytest.mark.parametrize("memory", ["256M", "16M"])
def test_what_is_on_the_pfs_is_read_in_any_order_and_by_many(
    memory: str, make_cluster: Callable[..., LocalCluster]
) -> None:
    cluster = make_cluster(1, {"memory": memory, "spill": "off"}, mounted=False)
    files = {f"f{seed}": content(seed) for seed in range(3)}
    for name, data in files.items():
        (cluster.pfs / name).write_bytes(data)
    cluster.mount()
    mount = cluster.nodes[0].mountpoint
    with ThreadPoolExecutor(6) as readers:
        pieces = (MIB, 77_777, 16 * MIB)
        jobs = [(name, readers.submit(read, mount / name, piece)) for name in files for piece in pieces]
        for name, job in jobs:
            assert job.result() == files[name]
    order = random.Random(5)
    with (mount / "f0").open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for _ in range(200):
            at, length = order.randrange(SIZE), order.randrange(1, 300_000)
            assert os.pread(file.fileno(), length, at) == files["f0"][at : at + length]
    (mount / "new").write_bytes(files["f1"][: 12 * MIB])  # a writer gets the room
    until_stage(mount / "new", "pfs")
    assert (mount / "new").read_bytes() == files["f1"][: 12 * MIB]
    (mount / "f2").write_bytes(b"another")  # and what was cached is past
    assert (mount / "f2").read_bytes() == b"another"


def test_a_large_file_of_a_lost_node_comes_from_its_partner(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(3, {"node_timeout": "2"})
    mounts = [node.mountpoint for node in cluster.nodes]
    data = content(9)
    (mounts[0] / "f").write_bytes(data)
    until_stage(mounts[0] / "f", "partner", "pfs")
    with pfs_away(cluster):
        cluster.kill(0)
        cluster.wipe(0, keep_catalogue=True)
        assert read(mounts[1] / "f", MIB) == data
        assert read(mounts[2] / "f", 3 * MIB) == data
    cluster.remount(0)


def test_what_is_rewritten_on_the_pfs_while_it_is_read_is_an_error_and_not_a_mixture(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = make_cluster(1, mounted=False)
    old, new = bytes([1]) * 4 * MIB, bytes([2]) * 4 * MIB
    (cluster.pfs / "f").write_bytes(old)
    os.setxattr(cluster.pfs / "f", "user.tag", b"theirs")
    cluster.mount()
    mount = cluster.nodes[0].mountpoint
    path = mount / "f"
    assert os.getxattr(path, "user.tag") == b"theirs"
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert os.pread(file.fileno(), 4096, 0) == old[:4096]
        with (cluster.pfs / "f").open("r+b") as theirs:
            theirs.write(new)
        with raises_errno(errno.EIO):
            os.pread(file.fileno(), 4096, 3 * MIB)
    told = cluster.run(0, "status", str(mount))
    assert told.code == EXIT_NOT_DURABLE
    assert "status --refresh" in told.out
    assert cluster.run(0, "status", str(path), "--refresh").code == EXIT_DONE
    until("the kernel has heard of it", lambda: path.read_bytes() == new)
    assert "status --refresh" not in cluster.run(0, "status", str(mount)).out
    os.setxattr(path, "user.tag", b"ours")
    until("it is set on the PFS", lambda: os.getxattr(cluster.pfs / "f", "user.tag") == b"ours")
