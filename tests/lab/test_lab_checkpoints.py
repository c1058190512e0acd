"""A real DCP checkpoint through the mount to real shared filesystems, read there by processes without CacheX FS."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
from lab_gluster import Gluster
from lab_moosefs import MooseFs
from lab_support import look, until_drained
from real_support import PfsWatcher, Template, until

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.ranks import RankPool


@pytest.mark.parametrize("filesystem", ["strict", "nasty", "small", "moose"])
def test_a_checkpoint_is_plain_files_on_the_pfs(
    filesystem: str,
    request: pytest.FixtureRequest,
    make_cluster: Callable[..., LocalCluster],
    ranks: RankPool,
    place: str,
) -> None:
    shared: Gluster | MooseFs = request.getfixturevalue(filesystem)
    cluster = make_cluster(1, pfs=[shared.mounts[0] / place])
    mount = cluster.nodes[0].mountpoint
    ranks.train(1)
    wanted = ranks.digests()
    ranks.save([str(mount / "run/step-1")] * ranks.world)
    (mount / "run/step-1/.metadata").chmod(0o600)
    os.utime(mount / "run/step-1/__0_0.distcp", ns=(10**18 + 5, 10**18 + 7))
    (mount / "run/latest").symlink_to("step-1")
    (mount / "run/a name with ünïcode, spaces\nand a line").write_bytes(b"x")
    (mount / "run/gone").write_bytes(b"y")
    (mount / "run/gone").unlink()
    until_drained(cluster, mount)
    shown = look(mount, whole_seconds=filesystem == "moose")
    cluster.umount()
    bare = shared.mounts[-1] / place
    assert look(bare, whole_seconds=filesystem == "moose") == shown
    assert ranks.load_digests([str(bare / "run/latest")] * ranks.world) == wanted


def test_two_nodes_with_clients_of_their_own_commit_last(
    strict: Gluster, make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template], place: str
) -> None:
    """A third client that looks at the bare PFS all the time never finds a commit file whose members are not whole."""
    cluster = make_cluster(2, pfs=[mount / place for mount in strict.mounts[:2]])
    mounts = [node.mountpoint for node in cluster.nodes]
    with PfsWatcher(strict.mounts[2] / place, templates) as watcher:
        for number, step in enumerate((0, 0, 1, 1)):  # each is overwritten, once drained and once under way
            templates[number % 2].save(mounts, f"run/step-{step}")
            if number == 0:
                until_drained(cluster, mounts[0])
        until_drained(cluster, mounts[0])
        until("the watcher has seen the last", lambda: watcher.verdict.whole > 0)
    cluster.umount()
    assert not watcher.verdict.wrong
    for step in (0, 1):
        assert templates[1].same_as(strict.mounts[2] / place / f"run/step-{step}") == []


def test_files_overwritten_where_names_vanish_for_moments(
    nasty: Gluster, make_cluster: Callable[..., LocalCluster], place: str
) -> None:
    """A rename over a file has moments of ENOENT here: the mount shows none, nothing fails for good."""
    cluster = make_cluster(1, {"keep_fast": "0"}, pfs=[nasty.mounts[0] / place])
    mount = cluster.nodes[0].mountpoint
    names = [f"f{number}" for number in range(6)]
    ended, missed = threading.Event(), []

    def read_on() -> None:
        while not ended.is_set():
            for name in names:
                try:
                    assert len(set((mount / name).read_bytes())) == 1
                except (OSError, AssertionError) as error:
                    missed.append(f"{name}: {error}")

    def save(number: int) -> None:
        for name in names:
            (mount / "new").write_bytes(bytes([number]) * 200_000)
            (mount / "new").rename(mount / name)

    save(0)
    reader = threading.Thread(target=read_on, daemon=True)
    reader.start()
    for number in range(1, 5):
        save(number)
        until_drained(cluster, mount)
    ended.set()
    reader.join()
    assert not missed
    cluster.umount()
    assert {(nasty.mounts[1] / place / name).read_bytes() for name in names} == {bytes([4]) * 200_000}
