"""Root mounts for a user: the daemon is the user's, passthrough works, and root's power cannot be led elsewhere."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from real_support import until

from cachexfs.config import RUNTIME_DIR_ROOT, mount_id
from cachexfs.demo import control
from cachexfs.demo.cluster import LocalCluster

USER, UID = "nobody", 65534
PYTHON = f"/usr/bin/python3.{sys.version_info.minor}"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts for others")


@pytest.fixture
def make_for_user(
    make_cluster: Callable[..., LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LocalCluster]:
    """Clusters whose commands root runs with an interpreter that the user can run too."""
    assert os.access(PYTHON, os.X_OK), "install the distribution's python3 (tools/setup.sh)"
    packages = [path for path in sys.path if path.endswith("site-packages")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *packages]))
    monkeypatch.setattr(sys, "executable", PYTHON)

    def make(nodes: int, **options: str | None) -> LocalCluster:
        cluster = make_cluster(nodes, {"supervisor": "on", "user": USER, **options}, mounted=False)
        for path in (cluster.pfs, cluster.secret, *(path for n in cluster.nodes for path in (n.staging, n.runtime))):
            os.chown(path, UID, UID)
        for node in cluster.nodes:  # a log in the user's directory
            cluster.node_options[node.index] = {"log_file": str(node.runtime / "log")}
        return cluster

    return make


def as_user(code: str, *arguments: object) -> str:
    """Run Python code as the user; its output."""
    command = [PYTHON, "-c", f"import os, sys\n{code}", *map(str, arguments)]
    done = subprocess.run(command, user=UID, group=UID, extra_groups=[], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


WRITE = "open(sys.argv[1], 'wb').write(sys.argv[2].encode() * 300_000)"
READ = "data = open(sys.argv[1], 'rb').read(); assert data == sys.argv[2].encode() * 300_000, len(data)"


def facts(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_alone_on_a_tmpfs_that_root_mounts_and_takes_away(make_for_user: Callable[..., LocalCluster]) -> None:
    cluster = make_for_user(1, staging=None)
    cluster.mount()
    point = cluster.nodes[0].mountpoint
    entry = control.registered(cluster.nodes[0].runtime)
    assert entry is not None
    daemon = facts(entry.pid)
    assert daemon["Uid"].split() == [str(UID)] * 4
    assert (daemon["CapPrm"], daemon["CapBnd"], daemon["NoNewPrivs"]) == ("0" * 16, f"{1 << 21:016x}", "1")
    environment = Path(f"/proc/{entry.pid}/environ").read_bytes()
    assert b"HOME=/root" not in environment
    supervisor = int(daemon["PPid"])
    kept = facts(supervisor)
    assert [kept[name] for name in ("CapEff", "CapPrm", "CapBnd")] == [f"{1 << 21:016x}"] * 3
    assert [kept[name] for name in ("CapInh", "CapAmb", "NoNewPrivs")] == ["0" * 16, "0" * 16, "1"]
    command = Path(f"/proc/{supervisor}/cmdline").read_bytes().split(b"\0")
    assert b"-s" in command, "root's Python must not run what lies in the user's ~/.local"
    status = json.loads(cluster.run(0, "status", "--json", str(point)).out)
    assert status["kernel"] == "passthrough", status["kernel_reason"]
    as_user(WRITE, point / "a", "one")
    as_user("os.mkdir(sys.argv[1], 0o750)", point / "d")
    cluster.kill_daemon(0)
    as_user(READ, point / "a", "one")
    as_user(WRITE, point / "d/b", "two")
    until("another daemon answers", lambda: cluster.answers(0))
    staging = f"{RUNTIME_DIR_ROOT}/staging/{mount_id(str(point), socket.gethostname().partition('.')[0])}"
    assert (os.path.ismount(staging), os.stat(staging).st_uid) == (True, UID)
    cluster.umount()
    assert (os.path.ismount(staging), os.stat(staging).st_uid) == (False, 0), "nothing is left that the user could fill"
    os.rmdir(staging)
    for name in ("a", "d", "d/b"):
        assert (cluster.pfs / name).stat().st_uid == UID
    assert (cluster.pfs / "d/b").read_bytes() == b"two" * 300_000


def test_two_nodes_with_directories_of_roots(make_for_user: Callable[..., LocalCluster]) -> None:
    """The NVMe directory is root's: the job's part of it is made for the user."""
    cluster = make_for_user(2)
    cluster.mount()
    one, two = (node.mountpoint for node in cluster.nodes)
    as_user(WRITE, one / "f", "x")
    as_user(READ, two / "f", "x")
    job = next(cluster.nodes[0].nvme.iterdir())
    assert (job.stat().st_uid, job.stat().st_mode & 0o777) == (UID, 0o700)
    cluster.kill_daemon(1)
    as_user(READ, two / "f", "x")
    cluster.umount()
    assert (cluster.pfs / "f").read_bytes() == b"x" * 300_000


def refused(cluster: LocalCluster) -> str:
    ended = cluster.run(0, *cluster.mount_arguments(0))
    assert ended.code == 2, ended
    return ended.err


def test_a_mount_point_that_the_user_can_move_is_refused(make_for_user: Callable[..., LocalCluster]) -> None:
    cluster = make_for_user(1)
    root = cluster.nodes[0].root
    os.chown(root, UID, UID)
    assert f"can change {root}" in refused(cluster)
    os.chown(root, 0, 0)
    root.chmod(0o777)
    assert f"can change {root}" in refused(cluster)


def test_links_of_the_user_lead_root_nowhere(make_for_user: Callable[..., LocalCluster], tmp_path: Path) -> None:
    """Log, options and answer lie where the user can put links: they are opened as the user."""
    cluster = make_for_user(1)
    victim = tmp_path / "victim"
    victim.write_text("root's\n")
    victim.chmod(0o600)
    (cluster.nodes[0].runtime / "log").symlink_to(victim)
    said = refused(cluster)
    assert "cannot write the log" in said
    assert victim.read_text() == "root's\n"


@pytest.mark.parametrize("what", ["log", "options"])
def test_a_pipe_of_the_user_does_not_hold_root(make_for_user: Callable[..., LocalCluster], what: str) -> None:
    cluster = make_for_user(1)
    node = cluster.nodes[0]
    name = mount_id(str(node.mountpoint), socket.gethostname().partition(".")[0])
    os.mkfifo(node.runtime / ("log" if what == "log" else f"{name}.options"), 0o666)
    assert "cannot write" in refused(cluster)


def test_only_root_mounts_for_others(make_for_user: Callable[..., LocalCluster]) -> None:
    cluster = make_for_user(1)
    cluster.node_options[0] |= {"user": "no-such-user"}
    assert "no user 'no-such-user'" in refused(cluster)
    cluster.node_options[0] |= {"user": USER, "supervisor": "off"}
    assert "needs the supervisor" in refused(cluster)
    cluster.node_options[0] |= {"user": "daemon"}
    command = [PYTHON, "-m", "cachexfs", *cluster.mount_arguments(0)]
    done = subprocess.run(
        command, user=UID, group=UID, extra_groups=[], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 2
    assert "only root" in done.stderr


def test_in_a_directory_of_the_group_that_belongs_to_another(make_for_user: Callable[..., LocalCluster]) -> None:
    """A project's directory: its mtime and mode are its owner's to set, and nothing is wrong when they cannot be."""
    cluster = make_for_user(1)
    for path in (cluster.pfs, cluster.pfs / "runs"):
        path.mkdir(exist_ok=True)
        os.chown(path, 0, UID)
        path.chmod(0o2775)
    cluster.mount()
    point = cluster.nodes[0].mountpoint
    as_user(WRITE, point / "runs" / "a", "one")
    as_user(WRITE, point / "b", "two")
    until("drained", lambda: cluster.status(0).pending_ops == 0)
    status = cluster.run(0, "status")
    assert status.code == 0, status.out
    cluster.umount()
    as_user(READ, cluster.pfs / "runs" / "a", "one")
