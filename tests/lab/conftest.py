"""Real shared filesystems for the tests of this directory, each started once, when the first test wants it.

A test gets a healthy filesystem; whatever it does to the servers is undone before its clusters are taken down. Where a
filesystem cannot start the test fails, unless CACHEXFS_TESTS_WITHOUT_LAB=1 says that this is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import lab_gluster
import lab_moosefs
import pytest
from lab_base import Lab, LabError, why_not
from lab_gluster import Gluster
from lab_moosefs import MooseFs
from lab_run import MAKE
from real_support import Template

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.ranks import RankPool

T = TypeVar("T")
WITHOUT = "CACHEXFS_TESTS_WITHOUT_LAB"
RANKS = 2


def _started(make: Callable[[], T]) -> T:
    try:
        return make()
    except (LabError, OSError) as error:
        _refuse(str(error))


def _refuse(reason: str) -> None:
    if os.environ.get(WITHOUT) == "1":
        pytest.skip(f"no shared filesystem for tests: {reason}")
    pytest.fail(f"no shared filesystem for tests: {reason} ({WITHOUT}=1 leaves these tests out)", pytrace=False)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    if reason := why_not(lab_gluster.PROGRAMS + lab_moosefs.PROGRAMS):
        _refuse(reason)
    made = _started(Lab)
    yield made
    made.close()


@pytest.fixture(scope="session")
def _strict(lab: Lab) -> Gluster | MooseFs:
    return _started(lambda: MAKE["strict"](lab))


@pytest.fixture(scope="session")
def _nasty(lab: Lab) -> Gluster | MooseFs:
    return _started(lambda: MAKE["nasty"](lab))


@pytest.fixture(scope="session")
def _small(lab: Lab) -> Gluster | MooseFs:
    return _started(lambda: MAKE["small"](lab))


@pytest.fixture(scope="session")
def _moose(lab: Lab) -> Gluster | MooseFs:
    return _started(lambda: MAKE["moose"](lab))


@pytest.fixture
def strict(make_cluster: Callable[..., LocalCluster], _strict: Gluster) -> Iterator[Gluster]:
    """GlusterFS, three bricks, of which any two hold everything; three clients without caches."""
    yield _strict
    _strict.heal()


@pytest.fixture
def nasty(make_cluster: Callable[..., LocalCluster], _nasty: Gluster) -> Iterator[Gluster]:
    """GlusterFS, each file on one of two bricks; two clients with caches."""
    yield _nasty
    _nasty.heal()


@pytest.fixture
def small(make_cluster: Callable[..., LocalCluster], _small: Gluster) -> Iterator[Gluster]:
    """GlusterFS on one brick of 400 MiB, an XFS; its client waits long for it."""
    yield _small
    _small.heal()
    _small.clear()


@pytest.fixture
def moose(make_cluster: Callable[..., LocalCluster], _moose: MooseFs) -> Iterator[MooseFs]:
    """MooseFS, two chunk servers, one client."""
    yield _moose
    _moose.heal()


@pytest.fixture
def place(request: pytest.FixtureRequest) -> str:
    """Name of a fresh directory for a test."""
    return request.node.name.replace("[", "-").rstrip("]")[:60]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """A training job of two ranks."""
    with RankPool(RANKS, mib=3.0, seed=3, log=Path(tmp_path_factory.mktemp("ranks")) / "log") as pool:
        yield pool


@pytest.fixture(scope="session")
def templates(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Template, Template]:
    """Two of its checkpoints, a step apart: equal names and sizes only."""
    root = tmp_path_factory.mktemp("templates")
    made = []
    for step in (1, 2):
        ranks.train(1)
        ranks.save([str(root / f"step-{step}")] * RANKS)
        made.append(Template.read(root / f"step-{step}"))
    assert made[0].sizes() == made[1].sizes()
    return made[0], made[1]
