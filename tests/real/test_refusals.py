"""What cannot be mounted fails before anything is mounted: one clear line, the right exit code."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from real_support import until

from cachexfs.demo.cluster import LocalCluster
from cachexfs.errors import EXIT_CANNOT_TELL, EXIT_DONE, EXIT_USAGE

MakeCluster = Callable[..., LocalCluster]


def refused(cluster: LocalCluster, index: int, code: int, *words: str) -> None:
    """The mount fails with ``code`` and one line that has all the words; nothing is left."""
    ended = cluster.run(index, *cluster.mount_arguments(index))
    lines = ended.err.strip().splitlines()
    assert (ended.code, len(lines)) == (code, 1), ended
    for word in words:
        assert word in lines[0]
    assert not os.path.ismount(cluster.nodes[index].mountpoint)
    assert cluster.processes(index) == []


def test_an_unknown_option_names_the_nearest(make_cluster: MakeCluster) -> None:
    refused(make_cluster(1, {"fsycn": "pfs"}, mounted=False), 0, EXIT_USAGE, "fsycn", "fsync")


@pytest.mark.parametrize(
    ("key", "value"), [("fsync", "never"), ("memory", "lots"), ("drain_workers", "0"), ("node_timeout", "-1")]
)
def test_a_wrong_value_names_option_and_value(make_cluster: MakeCluster, key: str, value: str) -> None:
    refused(make_cluster(1, {key: value}, mounted=False), 0, EXIT_USAGE, key, value)


def test_a_missing_pfs_directory(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(1, mounted=False)
    cluster.pfs.rmdir()
    refused(cluster, 0, EXIT_USAGE, str(cluster.pfs))


def test_a_mountpoint_that_is_not_empty(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(1, mounted=False)
    (cluster.nodes[0].mountpoint / "precious").touch()
    refused(cluster, 0, EXIT_USAGE, "precious")


def test_several_nodes_without_a_secret(make_cluster: MakeCluster) -> None:
    refused(make_cluster(2, {"secret": None}, mounted=False), 0, EXIT_USAGE, "secret")


def test_a_node_with_another_pfs_directory_than_the_others(make_cluster: MakeCluster) -> None:
    """Its files landed there, and no node could read what the PFS alone had of the others'."""
    cluster = make_cluster(3, mounted=False)
    cluster.node_pfs[2] = other = cluster.root / "other"
    other.mkdir()
    cluster.mount([0, 1])
    ended = cluster.run(2, *cluster.mount_arguments(2))
    assert (ended.code, len(ended.err.splitlines())) == (EXIT_USAGE, 1), ended
    assert f"{other} of node n2" in ended.err
    assert f"job local-{cluster.tag} have mounted, {cluster.pfs}" in ended.err
    until("its etcd member has ended", lambda: not cluster.processes(2))
    assert cluster.answers(0)
    cluster.node_pfs[2] = cluster.pfs
    cluster.mount([2])


@pytest.mark.parametrize("supervisor", ["on", "off"])
def test_one_of_two_nodes_names_the_member_of_the_catalogue_that_is_missing(
    make_cluster: MakeCluster, supervisor: str
) -> None:
    """It said only that the mount has not answered."""
    cluster = make_cluster(2, {"supervisor": supervisor}, mounted=False)
    ended = cluster.run(0, *cluster.mount_arguments(0), "--timeout", "12")
    assert (ended.code, len(ended.err.splitlines())) == (EXIT_CANNOT_TELL, 1), ended
    assert (
        f"no majority of the catalogue's members (n0, n1) answers: nobody listens on n1 ({cluster.nodes[1].host})"
        in (ended.err)
    )
    assert "cachexfs recover" in ended.err
    assert cluster.processes(0) == []
    cluster.mount()


def test_a_secret_that_everybody_can_read(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, mounted=False)
    cluster.secret.chmod(0o644)
    refused(cluster, 0, EXIT_USAGE, "secret", "chmod")


def test_several_nodes_without_an_nvme_directory(make_cluster: MakeCluster) -> None:
    refused(make_cluster(2, {"nvme": None}, mounted=False), 0, EXIT_USAGE, "nvme")


def test_a_node_that_is_not_in_the_list(make_cluster: MakeCluster) -> None:
    refused(make_cluster(2, {"node": "n9"}, mounted=False), 0, EXIT_USAGE, "n9", "n0")


def test_an_address_that_is_taken(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, {"fsync_timeout": "3"}, mounted=False)
    with socket.create_server((cluster.nodes[0].host, cluster.nodes[0].port)):
        ended = cluster.run(0, *cluster.mount_arguments(0))
    assert ended.code in (EXIT_USAGE, EXIT_CANNOT_TELL)
    assert len(ended.err.strip().splitlines()) == 1
    assert str(cluster.nodes[0].port) in ended.err
    assert not os.path.ismount(cluster.nodes[0].mountpoint)


def test_two_mounts_of_one_mountpoint(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(1)
    ended = cluster.run(0, *cluster.mount_arguments(0))
    assert ended.code == EXIT_USAGE
    assert "mounted already" in ended.err
    (cluster.nodes[0].mountpoint / "still").write_bytes(b"works")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide /dev/fuse in a mount namespace of its own")
def test_a_machine_without_dev_fuse(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(1, mounted=False)
    hide = 'mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9 && exec "$@"'
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", hide, "sh"]
    command += [sys.executable, "-m", "cachexfs", *cluster.mount_arguments(0)]
    environment = cluster.environment(0)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == EXIT_USAGE
    assert len(done.stderr.strip().splitlines()) == 1
    assert "/dev/fuse" in done.stderr
    assert "modprobe fuse" in done.stderr


def test_commands_on_a_path_that_is_no_mount(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(1, mounted=False)
    for command in (["status"], ["wait", "--at", "pfs"], ["explain"], ["umount"]):
        ended = cluster.run(0, *command, str(tmp_path))
        assert ended.code in (EXIT_USAGE, EXIT_CANNOT_TELL), command
        assert len(ended.err.strip().splitlines()) == 1, command


def test_mount_8_mounts_through_the_helper(make_cluster: MakeCluster) -> None:
    """The helper as mount(8) calls it: source, directory, -o options."""
    helper = shutil.which("mount.cachexfs") or str(Path(sys.executable).with_name("mount.cachexfs"))
    cluster = make_cluster(1, mounted=False)
    _, pfs, mountpoint, flag, options = cluster.mount_arguments(0)
    command = [helper, pfs, mountpoint, flag, f"rw,_netdev,{options}"]
    done = subprocess.run(command, env=cluster.environment(0), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == EXIT_DONE, done.stderr
    (cluster.nodes[0].mountpoint / "f").write_bytes(b"x")
    cluster.umount()
    assert (cluster.pfs / "f").read_bytes() == b"x"
