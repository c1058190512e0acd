"""``cachexfs drill``: tells whether a checkpoint would come back, and harms nothing."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from real_support import Template, pfs_away, raises_errno, until, until_stage, write_file
from recover_support import damage, save, until_manifests, until_restartable

from cachexfs.demo.cluster import Ended, LocalCluster
from cachexfs.demo.control import xattr, xattrs
from cachexfs.errors import EXIT_CANNOT_TELL, EXIT_DONE, EXIT_NO, EXIT_NOT_DURABLE, EXIT_USAGE

MIB = 1 << 20
OPTIONS = {"node_timeout": "2"}


def drill(cluster: LocalCluster, index: int, directory: str, *arguments: str) -> Ended:
    return cluster.run(index, "drill", str(cluster.nodes[index].mountpoint / directory), *arguments)


def claims(directory: Path, template: Template) -> dict[str, dict[str, str]]:
    """What each file's attributes promise (without errors and predictions, which the missing PFS moves)."""
    found = {name: xattrs(directory / name) for name in template.files}
    return {n: {k: v for k, v in all_.items() if k != "error" and k[:3] != "eta"} for n, all_ in found.items()}


def files(ended: Ended) -> dict[str, tuple[str, bool]]:
    """file -> (source, ok)."""
    return {f["file"]: (f["source"], f["ok"]) for f in json.loads(ended.out)["files"]}


def test_a_drill_reads_everything_from_the_survivors_and_changes_nothing(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    cluster = make_cluster(3, OPTIONS)
    with pfs_away(cluster):
        save(templates[0], cluster, "run/step-1")
        until_restartable(cluster, "run/step-1", "partner")
        until_manifests(cluster, templates[0], "run/step-1")
        directory = cluster.nodes[1].mountpoint / "run/step-1"
        before = claims(directory, templates[0])
        for index in (1, 0):  # also asked on the node that is left out
            ended = drill(cluster, index, "run/step-1", "--json")
            assert ended.code == EXIT_DONE, ended
            found = files(ended)
            assert set(found) == set(templates[0].files)
            assert json.loads(ended.out)["without"] == "n0"
            assert all(ok for _, ok in found.values())
            assert {source.partition(":")[2] for source, _ in found.values()} <= {"n1", "n2"}
        for node in ("n1", "n2"):
            ended = drill(cluster, 0, "run/step-1", "--without", node)
            assert ended.code == EXIT_DONE, ended
            assert f"would come back without {node}" in ended.out
        assert [file for file in cluster.sources(1) if file.path != "run/step-1/.metadata"] == []
        damage(cluster, 1, "run/step-1/__0_0.distcp", 5)
        ended = drill(cluster, 2, "run/step-1", "--json")
        assert ended.code == EXIT_NOT_DURABLE
        assert {name for name, (_, ok) in files(ended).items() if not ok} == {"__0_0.distcp"}
        assert "'__0_0.distcp' first" in ended.err
        assert "n1" in json.loads(ended.out)["files"][1]["reason"]
        assert drill(cluster, 2, "run/step-1", "--without", "n1").code == EXIT_DONE  # n0 has a good one
        assert claims(directory, templates[0]) == before
        cluster.kill(0)
        cluster.wipe(0)
        shard = cluster.nodes[2].mountpoint / "run/step-1/__0_0.distcp"
        until("the claim falls with the damaged copy", lambda: xattr(shard, "stage") == "lost")
        with raises_errno(errno.EIO):  # the drill was right
            shard.read_bytes()


def test_a_drill_says_what_would_be_missing(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    cluster = make_cluster(2, OPTIONS | {"fsync_timeout": "4"})
    mounts = [node.mountpoint for node in cluster.nodes]
    save(templates[0], cluster, "step-1")
    until_restartable(cluster, "step-1", "pfs")
    ended = drill(cluster, 1, "step-1")
    assert ended.code == EXIT_DONE
    assert "cachexfs recover --dead n0" in ended.out  # one of two would be left
    (mounts[0] / "half").mkdir()
    for name in templates[0].shards()[1:]:
        write_file(mounts[0] / "half" / name, templates[0].files[name])
    ended = drill(cluster, 0, "half")
    assert (ended.code, ".metadata: absent: not saved yet" in ended.err) == (EXIT_NOT_DURABLE, True)
    templates[0].commit(mounts[0] / "half")
    ended = drill(cluster, 0, "half")
    assert (ended.code, "__0_0.distcp" in ended.err) == (EXIT_NOT_DURABLE, True)
    assert drill(cluster, 0, "none").code == EXIT_NO
    assert drill(cluster, 0, "step-1/.metadata").code == EXIT_USAGE
    cluster.kill(1)
    cluster.wipe(1)
    ended = drill(cluster, 0, "step-1")
    assert ended.code == EXIT_CANNOT_TELL  # the catalogue has no majority
    cluster.kill_daemon(0)
    assert drill(cluster, 0, "step-1").code == EXIT_CANNOT_TELL


def test_one_node_alone_has_nothing_to_come_back_from(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    cluster = make_cluster(1)
    save(templates[0], cluster, "step-1")
    until_restartable(cluster, "step-1", "pfs")
    ended = drill(cluster, 0, "step-1", "--json")
    assert ended.code == EXIT_NOT_DURABLE
    assert "no partner to drill with" in ended.err
    assert files(ended) == {}


def test_an_umount_without_a_majority_says_how_to_go_on(make_cluster: Callable[..., LocalCluster]) -> None:
    """Only ``status`` did."""
    cluster = make_cluster(2, OPTIONS | {"fsync_timeout": "4"})
    cluster.kill(1)
    cluster.wipe(1)
    ended = cluster.run(0, "umount", str(cluster.nodes[0].mountpoint), "--timeout", "60")
    assert ended.code in (EXIT_CANNOT_TELL, EXIT_NOT_DURABLE)
    assert "'cachexfs recover --dead n1'" in ended.err


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_survivor_goes_on_once_somebody_vouches_for_all_others(
    make_cluster: Callable[..., LocalCluster], nodes: int
) -> None:
    """The last node holds the replicas of the one before it; all others are killed and wiped."""
    cluster = make_cluster(nodes, OPTIONS | {"fsync_timeout": "4"})
    survivor, writer = nodes - 1, nodes - 2
    others = [f"n{index}" for index in range(survivor)]
    dead = [word for name in others for word in ("--dead", name)]
    mount = cluster.nodes[survivor].mountpoint
    data = os.urandom(3 * MIB + 1)
    with pfs_away(cluster):
        write_file(cluster.nodes[writer].mountpoint / "theirs", data)
        until_stage(mount / "theirs", "partner")
        alive = cluster.run(survivor, "recover", *dead)
        assert (alive.code, "answers" in alive.err) == (EXIT_USAGE, True)
        assert cluster.run(survivor, "recover", "--dead", "n7").code == EXIT_USAGE
        for index in range(survivor):
            cluster.kill(index)
            cluster.wipe(index)
        with pytest.raises(OSError, match="error"):
            write_file(mount / "early", b"no majority", sync=False)
        if nodes > 2:
            one = cluster.run(survivor, "recover", "--dead", "n0")
            assert (one.code, "n1 must be confirmed dead" in one.err) == (EXIT_USAGE, True)
        ended = cluster.run(survivor, "recover", *dead)
        assert ended.code == EXIT_DONE, ended
        assert "goes on" in ended.out
        assert xattr(mount / "theirs", "stage") == "returned"  # at once, whatever the leases of the dead say
        write_file(mount / "later", b"a change", sync=False)
        (mount / "later").rename(mount / "renamed")
        assert (mount / "renamed").read_bytes() == b"a change"
        assert (mount / "theirs").read_bytes() == data
        again = cluster.run(survivor, "recover", *dead, "--json")
        assert (again.code, json.loads(again.out)["done"]) == (EXIT_DONE, False)
    until_stage(mount / "theirs", "pfs")
    until_stage(mount / "renamed", "pfs")
    assert (cluster.pfs / "theirs").read_bytes() == data
    assert xattr(mount / "theirs", "origin") == others[-1]
