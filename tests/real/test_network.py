"""Nodes in network namespaces: a cut cable, a slow link."""

import os
from collections.abc import Callable

import pytest
from real_support import pfs_away, until, until_stage, write_file

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr
from cachexfs.demo.netns import usable

pytestmark = pytest.mark.skipif(not usable(), reason="only root can make network namespaces")
MIB = 1 << 20


def test_a_partner_behind_a_cut_cable_is_replaced_and_comes_back(make_cluster: Callable[..., LocalCluster]) -> None:
    """Nothing is refused, packets just vanish: fsync waits, pairs again, and keeps its word."""
    cluster = make_cluster(4, {"node_timeout": "2"}, namespaces=True)
    assert cluster.network
    mounts = [node.mountpoint for node in cluster.nodes]
    data = os.urandom(2 * MIB)
    with pfs_away(cluster):
        partner = int((cluster.status(0).partner or "").removeprefix("n"))
        others = [index for index in range(1, 4) if index != partner]
        cluster.network.partition(partner)
        write_file(mounts[0] / "f", data)
        assert xattr(mounts[0] / "f", "stage") == "partner"
        assert f"n{partner}:nvme" not in (xattr(mounts[0] / "f", "holders") or "")
        assert [(mounts[index] / "f").read_bytes() == data for index in others] == [True, True]
        cluster.network.heal(partner)
        until("the cut node is back", lambda: all(node.live for node in cluster.status(partner).nodes))
        assert (mounts[partner] / "f").read_bytes() == data
    until_stage(mounts[partner] / "f", "pfs")
    assert (cluster.pfs / "f").read_bytes() == data


def test_a_slow_link_slows_the_partner_and_not_the_write(make_cluster: Callable[..., LocalCluster]) -> None:
    """``returned`` is local: the file is closed and readable while its replica is still on its way."""
    cluster = make_cluster(3, namespaces=True)
    assert cluster.network
    mounts = [node.mountpoint for node in cluster.nodes]
    data = os.urandom(8 * MIB)
    with pfs_away(cluster):
        cluster.network.shape(0, "4mbit")
        write_file(mounts[0] / "f", data, sync=False)
        assert xattr(mounts[0] / "f", "stage") == "returned"
        assert (mounts[0] / "f").read_bytes() == data
        assert xattr(mounts[0] / "f", "stage") == "returned"
        cluster.network.shape(0, "2gbit")
        until_stage(mounts[0] / "f", "partner")
        assert (mounts[2] / "f").read_bytes() == data
