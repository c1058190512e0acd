"""All nodes are unmounted at once, as a job's epilog does, and one cannot drain in time: the others must not let go."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
from real_support import WAIT_TIMEOUT_S, until, until_stage, write_file
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


def until_ended(cluster: LocalCluster, index: int) -> None:
    until(f"no process of n{index}", lambda: not cluster.processes(index))


def test_what_others_have_landed_does_not_wait_and_is_given_back(make_cluster: MakeCluster) -> None:
    """Its staging said for ever that data waited; its mount asked for the partner, which had no catalogue any more."""
    cluster = make_cluster(2, SLOW)
    data = saved(cluster)
    assert umount(cluster, IN_TIME, None) == [3, 0]
    said = cluster.run(0, "status")
    assert (said.code, "nothing not on the PFS" in said.out) == (0, True), said
    assert "another node of the job has brought all of it to the PFS" in said.out
    until_ended(cluster, 0)  # its etcd member
    cluster.mount()
    assert (cluster.nodes[0].mountpoint / "f").read_bytes() == data
    saved(cluster)
    assert umount(cluster, IN_TIME, None) == [3, 0]
    ended = cluster.run(0, "umount", str(cluster.nodes[0].mountpoint))
    assert (ended.code, ended.err) == (0, "")
    assert list(cluster.nodes[0].staging.glob("*")) == []
    assert cluster.run(0, "status").code == 4  # nothing is there


def test_what_was_staged_after_a_return_is_not_taken_for_what_others_have_landed(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, SLOW)
    saved(cluster)
    ended = cluster.run(0, "umount", str(cluster.nodes[0].mountpoint), "--timeout", IN_TIME)
    assert ended.code == 3
    cluster.mount([0])
    (cluster.nodes[0].mountpoint / "g").write_bytes(b"later" * MIB)
    cluster.kill(0)
    umount_one(cluster, 1)
    said = cluster.run(0, "status").err
    assert "is dead; up to" in said
    assert f"is not on {cluster.pfs}" in said


def umount_one(cluster: LocalCluster, index: int) -> int:
    return cluster.run(index, "umount", str(cluster.nodes[index].mountpoint), "--timeout", IN_TIME).code


def test_the_etcd_member_of_who_left_first_ends_with_the_last(make_cluster: MakeCluster) -> None:
    """It had to be ended by hand, and only a log said so; its data was removed at once, below the running process."""
    cluster = make_cluster(2, {"node_timeout": "2", "fsync": "pfs"})
    write_file(cluster.nodes[0].mountpoint / "f", b"f")
    until_stage(cluster.nodes[0].mountpoint / "f", "pfs")
    ended = cluster.run(1, "umount", str(cluster.nodes[1].mountpoint), "--timeout", IN_TIME)
    assert ended.code == 0
    assert "left before n0" in ended.err
    assert "ends by itself when the last of them is unmounted" in ended.err
    found = re.search(r"kill (\d+)", ended.err)
    assert found is not None
    member = int(found.group(1))
    until("the daemon has ended", lambda: cluster.processes(1) == [member])
    write_file(cluster.nodes[0].mountpoint / "g", b"g")
    until_stage(cluster.nodes[0].mountpoint / "g", "pfs")
    assert cluster.processes(1) == [member]
    assert umount_one(cluster, 0) == 0
    until_ended(cluster, 1)
    cluster.mount()
    assert (cluster.nodes[1].mountpoint / "g").read_bytes() == b"g"
