"""Many files: what is closed costs the daemon no descriptor and little memory, and all of it is there after a kill."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from real_support import until

from cachexfs.demo import control
from cachexfs.demo.cluster import LocalCluster

MakeCluster = Callable[..., LocalCluster]
FILES = 600
BYTES_PER_FILE_MAX = 12_000  # measured: 3,000 with 100,000 files (bench/bench_scale.py); so few hide in the noise


def daemon(cluster: LocalCluster) -> Path:
    entry = control.registered(cluster.nodes[0].runtime)
    assert entry is not None
    return Path(f"/proc/{entry.pid}")


def resident_bytes(cluster: LocalCluster) -> int:
    return int((daemon(cluster) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("supervisor", ["off", "auto"])
def test_closed_files_hold_no_descriptor_and_little_memory(make_cluster: MakeCluster, supervisor: str) -> None:
    cluster = make_cluster(1, {"fsync": "returned", "supervisor": supervisor})
    mount = cluster.nodes[0].mountpoint
    (mount / "first").write_bytes(b"x")
    descriptors, memory = len(os.listdir(daemon(cluster) / "fd")), resident_bytes(cluster)
    for number in range(FILES):
        (mount / f"f{number}").write_bytes(b"%d" % number * 1000)
    os.truncate(mount / "f1", 100)
    for number in range(FILES):
        assert os.stat(mount / f"f{number}").st_size > 0
        with open(mount / f"f{number}", "rb") as file:
            assert file.read(1)
    with open(mount / "f2", "ab") as file:  # goes on where it was
        file.write(b"more")
    until("all closed", lambda: len(os.listdir(daemon(cluster) / "fd")) < descriptors + 50)
    assert resident_bytes(cluster) - memory < FILES * BYTES_PER_FILE_MAX
    assert (mount / "f1").read_bytes() == (b"1" * 1000)[:100]
    assert (mount / "f2").read_bytes() == b"2" * 1000 + b"more"
    until("drained", lambda: cluster.status(0).pending_ops == 0)
    assert (cluster.pfs / "f2").read_bytes() == b"2" * 1000 + b"more"
