"""Random operations on a mount and on a plain directory give the same, and the PFS ends up with the same tree."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from twin import Twin, same_tree

from cachexfs.demo import control
from cachexfs.demo.cluster import LocalCluster

STEPS = 400
WAYS = {
    "kernel": {"supervisor": "auto"},
    "handler": {"supervisor": "auto", "passthrough": "off"},
    "alone": {"supervisor": "off"},
}


def run(cluster: LocalCluster, plain: Path, seeds: range, between: Callable[[int], None] = lambda step: None) -> None:
    """Twins side by side below one mount; after the unmount the PFS has what the plain directories have."""
    for seed in seeds:
        sides = cluster.nodes[0].mountpoint / f"s{seed}", plain / f"s{seed}"
        for side in sides:
            side.mkdir()
        Twin(sides, seed, frozenset({"fsync"})).run(STEPS, between)
    cluster.umount()
    assert same_tree(cluster.pfs, plain) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_mount_answers_as_a_plain_directory(
    make_cluster: Callable[..., LocalCluster], tmp_path: Path, way: str
) -> None:
    """Writes, truncations, maps, O_DIRECT, copies, links, renames and removals of open files, through each way in."""
    run(make_cluster(1, WAYS[way]), tmp_path, range(1, 4))


@pytest.mark.parametrize("way", ["kernel", "handler"])
def test_nobody_notices_that_the_daemon_is_killed(
    make_cluster: Callable[..., LocalCluster], tmp_path: Path, way: str
) -> None:
    """The same over kill -9 of the daemon: open files, unlinked ones too, go on with every byte."""
    cluster = make_cluster(1, WAYS[way])

    def kill(step: int) -> None:
        if step % 100 == 50:
            entry = control.registered(cluster.nodes[0].runtime)
            assert entry is not None
            os.kill(entry.pid, signal.SIGKILL)

    run(cluster, tmp_path, range(12, 13), kill)
