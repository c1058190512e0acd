"""In each way in which a mount works: the same answers as a plain directory, over kill -9 of the daemon too."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from modes import MODES, Mode
from twin import same_tree

from cachexfs.demo.cluster import LocalCluster

STEPS = 400

#: Arguments: mount side, plain side, seed, steps, a file with the daemon's pid as JSON ("" to let it live).
TWINS = """
import glob, json, os, signal, sys
from pathlib import Path
from twin import Twin
ours, plain, seed, steps, registry = sys.argv[1:]
def kill(step):
    if registry and step % 100 == 50:
        os.kill(json.loads(Path(glob.glob(registry)[0]).read_text())["pid"], signal.SIGKILL)
sides = Path(ours), Path(plain)
for side in sides:
    side.mkdir()
Twin(sides, int(seed), frozenset({"fsync"})).run(int(steps), kill)
"""


@pytest.fixture(params=MODES.values(), ids=lambda mode: mode.name)
def mode(request: pytest.FixtureRequest) -> Mode:
    found: Mode = request.param
    return found


@pytest.fixture
def cluster(make_cluster: Callable[..., LocalCluster], monkeypatch: pytest.MonkeyPatch, mode: Mode) -> LocalCluster:
    return mode.cluster(make_cluster, monkeypatch)


@pytest.fixture
def plain(cluster: LocalCluster, mode: Mode) -> Path:
    """A directory of whoever acts."""
    path = cluster.root / "plain"
    path.mkdir()
    os.chown(path, mode.acts_as, mode.acts_as)
    return path


def test_a_mount_answers_as_a_plain_directory(mode: Mode, cluster: LocalCluster, plain: Path) -> None:
    """Writes, truncations, maps, O_DIRECT, copies, links, renames, removals; then the PFS has the same tree."""
    point = cluster.nodes[0].mountpoint
    for seed in (1, 2, 3):
        mode.run(TWINS, point / f"s{seed}", plain / f"s{seed}", seed, STEPS, "")
    if mode.supervised:
        registry = cluster.nodes[0].runtime / "*.json"
        mode.run(TWINS, point / "killed", plain / "killed", 12, STEPS, registry)
    status = cluster.status(0)
    assert (status.kernel, status.supervisor) == (mode.kernel, "on" if mode.supervised else "off")
    assert status.kernel_reason.startswith(mode.reason)
    assert bool(status.kernel_reason) == bool(mode.reason)
    cluster.umount()
    assert same_tree(cluster.pfs, plain) == []
