"""``keep_fast``: old checkpoints leave the fast tier once they are on the PFS; the newest stay."""

from __future__ import annotations

from collections.abc import Callable

from real_support import Template, pfs_away, until, until_stage

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr


def holders(cluster: LocalCluster, step: int, name: str) -> set[str]:
    found = xattr(cluster.nodes[0].mountpoint / f"step-{step}" / name, "holders") or ""
    return {word for word in found.replace(",", " ").split() if not word.startswith("pfs")}


def test_the_newest_checkpoints_stay_and_older_ones_come_from_the_pfs(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    cluster = make_cluster(3, {"keep_fast": "2"})
    mounts = [node.mountpoint for node in cluster.nodes]
    template = templates[0]
    shards = template.shards()
    for step in range(1, 5):
        template.save(mounts, f"step-{step}", sync=False)
        until_stage(mounts[0] / f"step-{step}", "pfs")
    for step in (1, 2):
        for name in shards:
            until(f"step-{step}/{name} leaves", lambda: not holders(cluster, step, name))  # noqa: B023
        assert xattr(mounts[1] / f"step-{step}", "restartable") == "pfs"
        assert Template.read(mounts[2] / f"step-{step}").files == template.files
    for step in (3, 4):
        assert all(len(holders(cluster, step, name)) == 2 for name in shards)
    with pfs_away(cluster):
        assert Template.read(mounts[1] / "step-4").files == template.files


def test_what_is_not_on_the_pfs_is_kept_however_old(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    cluster = make_cluster(1, {"keep_fast": "0"})
    mount = cluster.nodes[0].mountpoint
    template = templates[0]
    with pfs_away(cluster):
        for step in range(1, 4):
            template.save([mount], f"step-{step}", sync=False)
            assert all(holders(cluster, step, name) for name in template.shards())
    until_stage(mount, "pfs")
    for step in range(1, 4):
        for name in template.shards():
            until(f"step-{step}/{name} leaves", lambda: not holders(cluster, step, name))  # noqa: B023
        assert Template.read(mount / f"step-{step}").files == template.files


def test_what_the_pfs_has_lost_is_kept_and_copied_there_again(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    cluster = make_cluster(1, {"keep_fast": "1", "fsync": "returned"})
    mount = cluster.nodes[0].mountpoint
    templates[0].save([mount], "step-1", sync=False)
    until_stage(mount / "step-1", "pfs")
    first, second, *_ = templates[0].shards()
    (cluster.pfs / "step-1" / first).unlink()
    templates[1].save([mount], "step-2", sync=False)
    until("step-1 leaves", lambda: not holders(cluster, 1, second))
    until("it is there again", lambda: (cluster.pfs / "step-1" / first).exists())
    until_stage(mount / "step-1", "pfs")
    assert templates[0].same_as(cluster.pfs / "step-1") == []
    assert templates[0].same_as(mount / "step-1") == []
