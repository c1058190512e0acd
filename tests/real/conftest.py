"""Fixtures on real mounts: one node, four nodes, and a real DCP checkpoint to write again and again."""

from collections.abc import Callable
from pathlib import Path

import pytest
from real_support import Template

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.ranks import RankPool

TEMPLATE_RANKS = 4
TEMPLATE_MIB = 3.0


@pytest.fixture(scope="module")
def alone(make_module_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    """One mounted node; tests of a module share it."""
    return make_module_cluster(1, {"supervisor": "auto"})


@pytest.fixture
def mount(alone: LocalCluster, request: pytest.FixtureRequest) -> Path:
    """A fresh directory on the one node's mount."""
    path = alone.nodes[0].mountpoint / request.node.name.partition("[")[0][:60]
    for number in range(1000):
        candidate = path.with_name(f"{path.name}-{number}")
        if not candidate.exists():
            candidate.mkdir()
            return candidate
    raise AssertionError("no name left")


@pytest.fixture(scope="module")
def four(make_module_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    """Four mounted nodes; tests of a module share them."""
    return make_module_cluster(4, {"supervisor": "auto"})


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Template, Template]:
    """Two checkpoints of one model by real ``dcp.save`` on four ranks, a step apart: equal names and sizes only."""
    root = tmp_path_factory.mktemp("templates")
    made = []
    with RankPool(TEMPLATE_RANKS, mib=TEMPLATE_MIB, seed=5, log=root / "log") as ranks:
        for step in (1, 2):
            ranks.train(1)
            ranks.save([str(root / f"step-{step}")] * TEMPLATE_RANKS)
            made.append(Template.read(root / f"step-{step}"))
    assert made[0].sizes() == made[1].sizes()
    assert made[0].files != made[1].files
    return made[0], made[1]
