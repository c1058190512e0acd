"""Clusters that several tests share, and the kinds of catalogue that the contract is tested on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from catalogue_support import EtcdCluster, World, module_cluster


@pytest.fixture(scope="session")
def one_member() -> Iterator[EtcdCluster]:
    """One member, with TLS."""
    with module_cluster(1) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def three_members() -> Iterator[EtcdCluster]:
    """Three members, with TLS."""
    with module_cluster(3) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def clear_member() -> Iterator[EtcdCluster]:
    """One member without TLS, for a proxy that must understand what it spoils."""
    with module_cluster(1, tls=False) as cluster:
        yield cluster


@pytest.fixture(params=["builtin", "one_member", "three_members"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """Each kind of catalogue."""
    cluster = None if request.param == "builtin" else request.getfixturevalue(request.param)
    return World(cluster, tmp_path)
