"""All nodes are unmounted at once, as a job's epilog does, and one cannot drain in time: the others must not let go."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from real_support import WAIT_TIMEOUT_S, until_stage, write_file
from recover_support import recover

from cachexfs.demo.cluster import LocalCluster

MakeCluster = Callable[..., LocalCluster]
MIB = 1 << 20
SLOW = {"drain_bandwidth": "4M", "node_timeout": "2", "route": "partner"}
IN_TIME = "3"


def saved(cluster: LocalCluster) -> bytes:
    data = os.urandom(24 * MIB)
    write_file(cluster.nodes[0].mountpoint / "f", data)
    return data


def umount(cluster: LocalCluster, *limits: str | None) -> list[int]:
    """Exit codes, of all nodes at once; ``limits``: of each in seconds, None without."""
    commands = [["umount", str(node.mountpoint)] for node in cluster.nodes]
    for command, limit in zip(commands, limits, strict=True):
        command += ["--timeout", limit] if limit is not None else []
    started = [cluster.start(index, *command) for index, command in enumerate(commands)]
    codes = []
    for process in started:
        process.communicate(timeout=WAIT_TIMEOUT_S)
        codes.append(process.returncode)
    return codes


@pytest.mark.parametrize("nodes", [2, 3])
def test_what_one_node_could_not_drain_in_time_stays_on_the_others_too(make_cluster: MakeCluster, nodes: int) -> None:
    """Its partner said that everything was on the PFS, and removed the only replica and its etcd member."""
    cluster = make_cluster(nodes, SLOW)
    data = saved(cluster)
    codes = umount(cluster, *[IN_TIME] * nodes)
    assert codes[0] == 3
    assert 3 in codes[1:]
    cluster.mount()
    until_stage(cluster.nodes[0].mountpoint / "f", "pfs")
    assert (cluster.pfs / "f").read_bytes() == data
    assert umount(cluster, *[None] * nodes) == [0] * nodes


def test_a_partner_with_time_lands_what_the_others_could_not(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, SLOW)
    data = saved(cluster)
    assert umount(cluster, IN_TIME, None) == [3, 0]
    assert (cluster.pfs / "f").read_bytes() == data


def test_the_replica_that_a_partner_kept_is_what_recover_finds(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, SLOW)
    data = saved(cluster)
    assert umount(cluster, IN_TIME, IN_TIME) == [3, 3]
    for index in 0, 1:
        cluster.kill(index)  # what is left of etcd
    cluster.wipe(0)
    assert recover(cluster, 1).code == 0
    assert (cluster.pfs / "f").read_bytes() == data


def test_a_node_that_goes_before_the_others_keeps_what_they_have_only_there(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, SLOW)
    data = saved(cluster)
    ended = cluster.run(1, "umount", str(cluster.nodes[1].mountpoint), "--timeout", IN_TIME)
    assert (ended.code, "this node keeps a replica of it for n0" in ended.err + ended.out) == (3, True)
    cluster.mount([1])
    until_stage(cluster.nodes[0].mountpoint / "f", "pfs")
    assert (cluster.pfs / "f").read_bytes() == data
