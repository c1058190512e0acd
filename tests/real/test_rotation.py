"""Who keeps one checkpoint and removes the one before has a whole one on the PFS at every moment."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from real_support import PfsWatcher, Template, until, until_stage

from cachexfs.demo.cluster import LocalCluster

STEPS = 4
MIB = 1 << 20


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_pfs_has_a_whole_checkpoint_at_every_moment_of_a_rotation(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template], nodes: int
) -> None:
    """Each is removed as soon as the next one is written: long before that has landed."""
    cluster = make_cluster(nodes, {"drain_bandwidth": "16M"})
    mounts = [node.mountpoint for node in cluster.nodes]
    templates[0].save(mounts, "run/step-0", sync=False)
    until_stage(mounts[0] / "run/step-0", "pfs")
    with PfsWatcher(cluster.pfs, templates) as watcher:
        for step in range(1, STEPS):
            new = mounts[0] / f"run/step-{step}"
            new.mkdir()
            (new / "optimizer").write_bytes(b"o" * (24 * MIB))
            templates[step % 2].save(mounts, f"run/step-{step}", sync=False)
            shutil.rmtree(mounts[-1] / f"run/step-{step - 1}")
            until_stage(new, "pfs")
        until("the last but one leaves the PFS", lambda: not (cluster.pfs / f"run/step-{STEPS - 2}").exists())
    assert watcher.verdict.whole > 0
    assert (watcher.verdict.absent, watcher.verdict.wrong) == (0, [])


def test_directories_without_a_commit_file_go_after_what_was_written_before_their_removal(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = make_cluster(1, {"drain_bandwidth": "16M"})
    mount = cluster.nodes[0].mountpoint
    old, new = Path("iter_1/mp_rank_00/model.pt"), Path("iter_2/mp_rank_00/model.pt")
    for path, size in ((old, MIB), (new, 24 * MIB)):
        (mount / path).parent.mkdir(parents=True)
        (mount / path).write_bytes(b"m" * size)
        if path == old:
            until_stage(mount / path, "pfs")
    shutil.rmtree(mount / "iter_1")
    until("the old one goes", lambda: not (cluster.pfs / old).exists())
    assert (cluster.pfs / new).stat().st_size == 24 * MIB


def test_a_job_that_outruns_the_pfs_keeps_the_last_one_there(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    """Those in between are removed before they have landed; an unmount waits for the one that is left."""
    cluster = make_cluster(1, {"drain_bandwidth": "16M"})
    mount = cluster.nodes[0].mountpoint
    templates[0].save([mount], "run/step-0", sync=False)
    until_stage(mount / "run/step-0", "pfs")
    with PfsWatcher(cluster.pfs, templates) as watcher:
        for step in range(1, STEPS):
            new = mount / f"run/step-{step}"
            new.mkdir()
            (new / "optimizer").write_bytes(b"o" * (24 * MIB))
            templates[step % 2].save([mount], f"run/step-{step}", sync=False)
            shutil.rmtree(mount / f"run/step-{step - 1}")
        assert (cluster.pfs / "run/step-0/.metadata").exists()
        cluster.umount()
    assert (watcher.verdict.absent, watcher.verdict.wrong) == (0, [])
    assert [path.name for path in (cluster.pfs / "run").iterdir()] == [f"step-{STEPS - 1}"]
