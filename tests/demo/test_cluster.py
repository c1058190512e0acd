"""The local cluster: places, options, and a teardown that hits its own processes only."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cachexfs.demo.cluster import RUNTIME_VARIABLE, LocalCluster, Node

SLEEPER = [sys.executable, "-c", "print(flush=True); import time; time.sleep(300)"]


def started(cluster: LocalCluster, index: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(SLEEPER, env=cluster.environment(index), stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    return process


def test_nodes_have_places_and_addresses_of_their_own(make_cluster: Callable[..., LocalCluster]) -> None:
    one, other = make_cluster(4, mounted=False), make_cluster(4, mounted=False)
    nodes: list[Node] = [*one.nodes, *other.nodes]
    for place in ("staging", "runtime", "nvme", "mountpoint", "log"):
        assert len({getattr(node, place) for node in nodes}) == 8, place
    assert len({(node.host, node.port) for node in nodes}) == 8
    assert one.node_list.read_text().splitlines() == [node.address for node in one.nodes]
    assert os.stat(one.secret).st_mode & 0o077 == 0


def test_options_can_be_given_taken_away_and_differ_by_node(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(2, {"fsync": "pfs", "secret": None}, mounted=False)
    cluster.node_options[1] = {"fsync": "partner"}
    assert [cluster.options(index)["fsync"] for index in range(2)] == ["pfs", "partner"]
    assert "secret" not in cluster.options(0)


def test_the_environment_of_commands_is_free_of_our_own_settings(
    make_cluster: Callable[..., LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHEXFS_FSYNC", "returned")
    environment = make_cluster(1, mounted=False).environment(0)
    assert [key for key in environment if key.startswith("CACHEXFS_")] == [RUNTIME_VARIABLE]


def test_a_kill_hits_all_processes_of_one_node_and_no_other(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(2, mounted=False)
    mine, others = [started(cluster, 0) for _ in range(3)], started(cluster, 1)
    stranger = subprocess.Popen(SLEEPER)
    try:
        cluster.kill(0)
        assert [process.wait(10) for process in mine] == [-9, -9, -9]
        assert others.poll() is None
        assert cluster.processes(1) == [others.pid]
        cluster.teardown()
        assert others.wait(10) == -9
        assert stranger.poll() is None
    finally:
        for process in (*mine, others, stranger):
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


def test_a_wipe_can_spare_the_catalogue(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1, mounted=False)
    node = cluster.nodes[0]
    for path in (node.nvme / "replicas/a", node.nvme / "etcd/etcd.pid", node.staging / "b"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    cluster.wipe(0, keep_catalogue=True)
    assert [path.name for path in node.nvme.iterdir()] == ["etcd"]
    cluster.wipe(0)
    assert [*node.nvme.iterdir(), *node.staging.iterdir()] == []


def test_teardown_removes_every_directory(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(3, mounted=False)
    staging = [node.staging for node in cluster.nodes]
    assert all(path.is_dir() for path in staging)
    cluster.teardown()
    assert not cluster.root.exists()
    assert not any(path.exists() for path in staging)


def test_a_root_too_long_for_a_socket_gets_a_short_runtime_directory(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / ("long" * 20), 1) as cluster:
        assert len(os.fsencode(cluster.nodes[0].runtime)) < 60
        assert cluster.nodes[0].runtime.is_dir()
    assert not cluster.nodes[0].runtime.exists()
