"""A real Slurm with two nodes: the prolog mounts, the job's steps see each other's files, the epilog drains."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HELPERS = HERE.parents[1] / "mount_helpers" / "slurm"
COMMAND = HERE.parents[1] / ".venv" / "bin" / "cachexfs"
PFS_BYTES = 8 << 20
DEADLINE_S = 150

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="slurmd and network namespaces need root")


@dataclass
class Cluster:
    """A running Slurm below ``root``; the PFS is a small tmpfs that both nodes see."""

    root: Path

    @property
    def pfs(self) -> Path:
        return self.root / "pfs"

    @property
    def mountpoint(self) -> Path:
        return self.root / "local" / "cachex"

    def slurm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A Slurm command, in the namespace of the controller."""
        tag = (self.root / "tag").read_text().strip()
        return subprocess.run(
            ["nsenter", f"--net=/run/netns/{tag}hub", "--", *arguments],
            env=os.environ | {"SLURM_CONF": str(self.root / "slurm.conf")},
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
            cwd="/",
        )

    def on_node(self, node: int, *arguments: str) -> str:
        """What a command says in the namespaces of a node's slurmd."""
        pid = (self.root / f"slurmd-n{node}.pid").read_text().strip()
        enter = ["nsenter", "--target", pid, "--net", "--mount", "--"]
        ended = subprocess.run([*enter, *arguments], capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        return ended.stdout

    def mounts(self, node: int) -> list[str]:
        """Mount points of ours on a node."""
        lines = [line.split() for line in self.on_node(node, "cat", "/proc/self/mounts").splitlines()]
        return [fields[1] for fields in lines if fields[2].startswith("fuse.cachex")]

    def script(self, name: str, text: str) -> str:
        path = self.root / name
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)
        return str(path)

    def settle(self) -> None:
        """Wait until all epilogs are over."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            states = self.slurm("sinfo", "-h", "-N", "-o", "%T").stdout.split()
            if states == ["idle", "idle"]:
                return
            assert time.monotonic() < deadline, f"{states}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.root.glob("slurmd-*.log")))


def settings(root: Path, drain_s: int = DEADLINE_S) -> str:
    return f"""
CACHEXFS_SLURM_PFS={root}/pfs
CACHEXFS_SLURM_MOUNTPOINT={root}/local/cachex
CACHEXFS_SLURM_NVME={root}/local/nvme
CACHEXFS_SLURM_RUN={root}/jobs
CACHEXFS_SLURM_SITE_KEY={root}/site.key
CACHEXFS_SLURM_OPTIONS=memory=64M
CACHEXFS_SLURM_MOUNT_TIMEOUT={DEADLINE_S}
CACHEXFS_SLURM_DRAIN_TIMEOUT={drain_s}
CACHEXFS_SLURM_COMMAND={COMMAND}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster(Path(tempfile.mkdtemp(prefix="cachexfs-slurm-")))
    found.pfs.mkdir()
    (found.root / "site.key").write_bytes(os.urandom(32))
    (found.root / "site.key").chmod(0o600)
    (found.root / "settings").write_text(settings(found.root))
    scripts = {
        name.upper(): found.script(
            f"{name}.sh",
            f"export CACHEXFS_SLURM_CONF={found.root}/settings\n"
            f"exec {HELPERS}/{name}.sh >>{found.root}/{name}.log 2>&1\n",
        )
        for name in ("prolog", "epilog")
    }
    nodes = HERE / "slurm_nodes.sh"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={PFS_BYTES}", "pfs", found.pfs], check=True)
    try:
        subprocess.run(
            [HERE / "slurm_nodes.sh", "up", found.root], env=os.environ | scripts, check=True, timeout=DEADLINE_S
        )
        yield found
    finally:
        subprocess.run([nodes, "down", found.root], check=False, timeout=DEADLINE_S)
        subprocess.run(["umount", "-l", found.pfs], check=False)
        shutil.rmtree(found.root, ignore_errors=True)


def test_settings_that_are_there_and_cannot_be_read_fail_the_prolog(tmp_path: Path) -> None:
    """The job was started, and saved into a bare directory."""

    def prolog(settings: Path) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {"CACHEXFS_SLURM_CONF": str(settings), "SLURM_JOB_ID": "7"}
        return subprocess.run(
            ["sh", HELPERS / "prolog.sh"], env=environ, capture_output=True, text=True, check=False, timeout=DEADLINE_S
        )

    settings = tmp_path / "slurm.conf"
    ran = prolog(settings)
    assert (ran.returncode, "nothing is mounted" in ran.stderr) == (0, True)
    settings.symlink_to(tmp_path / "none")
    assert (prolog(settings).returncode, "cannot read" in prolog(settings).stderr) == (1, True)
    settings.unlink()
    settings.mkdir()
    assert prolog(settings).returncode == 1


def test_a_job_finds_its_mount_and_leaves_its_files_on_the_pfs(cluster: Cluster) -> None:
    step = cluster.script(
        "step.sh",
        f"""
set -e
cd {cluster.mountpoint}
grep -q ' {cluster.mountpoint} fuse.cachex' /proc/self/mounts
echo "from $SLURMD_NODENAME" >"$SLURMD_NODENAME"
for other in n1 n2; do
  tries=0
  until [ -s "$other" ]; do tries=$((tries + 1)); [ $tries -lt 1000 ]; sleep 0.1; done
  echo "$SLURMD_NODENAME reads: $(cat "$other")"
done
echo "stage: $(getfattr --only-values -n user.cachex.stage "$SLURMD_NODENAME")"
""",
    )
    ran = cluster.slurm("srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", step)
    assert ran.returncode == 0, ran.stderr + cluster.logs()
    for reader in ("n1", "n2"):
        for writer in ("n1", "n2"):
            assert f"{reader} reads: from {writer}\n" in ran.stdout
    assert ran.stdout.count("stage: ") == 2
    cluster.settle()
    log = (cluster.root / "epilog.log").read_text()
    assert log.count("everything is on the PFS") == 2, log
    for node in ("n1", "n2"):
        assert (cluster.pfs / node).read_text() == f"from {node}\n"
    for node in (1, 2):
        assert cluster.mounts(node) == []
        assert "drained-" in cluster.on_node(node, "ls", str(cluster.root / "local" / "nvme"))
        assert not cluster.on_node(node, "ls", str(cluster.mountpoint))
    assert list((cluster.root / "jobs").iterdir()) == []


def test_an_epilog_that_cannot_drain_says_so_and_keeps_node_and_data(cluster: Cluster) -> None:
    (cluster.root / "settings").write_text(settings(cluster.root, drain_s=3))
    big = cluster.root / "big"
    big.write_bytes(b"x" * 2 * PFS_BYTES)
    step = cluster.script("big.sh", f"[ $SLURM_PROCID != 0 ] || exec cp {big} {cluster.mountpoint}/big\n")
    ran = cluster.slurm("srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", step)
    assert ran.returncode == 0, ran.stderr + cluster.logs()
    cluster.settle()  # the nodes stay in service
    log = (cluster.root / "epilog.log").read_text()
    assert "NOT EVERYTHING IS ON THE PFS" in log, log
    assert "big" in log
    assert not (cluster.pfs / "big").exists(), (cluster.pfs / "big").stat().st_size
    held = [cluster.on_node(node, "du", "-sm", str(cluster.root / "local" / "nvme")) for node in (1, 2)]
    assert any(int(size.split()[0]) >= 2 * PFS_BYTES >> 20 for size in held), held
    for node in (1, 2):
        assert cluster.mounts(node) == []
