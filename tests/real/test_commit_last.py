"""Commit last: who looks at the PFS all the time never sees a checkpoint that claims to be whole and is not."""

import contextlib
import os
from collections.abc import Callable

import pytest
from real_support import PfsWatcher, Template, pfs_away, until, write_file

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr
from cachexfs.errors import EXIT_NOT_DURABLE

Templates = tuple[Template, Template]
SAVES = 6


def test_saves_of_four_nodes_land_commit_last(make_cluster: Callable[..., LocalCluster], templates: Templates) -> None:
    cluster = make_cluster(4)
    mounts = [node.mountpoint for node in cluster.nodes]
    with PfsWatcher(cluster.pfs, templates) as watcher:
        for step in range(SAVES):
            templates[step % 2].save(mounts, f"ckpt/step-{step}")
        for step in range(SAVES):
            until("on the PFS", lambda step=step: xattr(mounts[0] / f"ckpt/step-{step}", "restartable") == "pfs")
        until("the watcher has looked", lambda: watcher.verdict.whole > SAVES)
    assert watcher.verdict.wrong == []
    for step in range(SAVES):
        assert templates[step % 2].same_as(cluster.pfs / f"ckpt/step-{step}") == []


def test_overwrites_in_place_are_never_a_mixture_on_the_pfs(
    make_cluster: Callable[..., LocalCluster], templates: Templates
) -> None:
    cluster = make_cluster(3)
    mounts = [node.mountpoint for node in cluster.nodes]
    with PfsWatcher(cluster.pfs, templates) as watcher:
        for step in range(SAVES):
            templates[step % 2].save(mounts, "ckpt")
            if step % 3 == 0:  # some overwrites meet a drained checkpoint, some a draining one
                until("on the PFS", lambda: xattr(mounts[0] / "ckpt", "restartable") == "pfs")
        until("on the PFS", lambda: xattr(mounts[0] / "ckpt", "restartable") == "pfs")
        seen = watcher.verdict.whole
        until("the watcher has looked", lambda: watcher.verdict.whole > seen)
    assert watcher.verdict.wrong == []
    assert templates[(SAVES - 1) % 2].same_as(cluster.pfs / "ckpt") == []


def test_members_without_their_commit_file_leave_the_old_checkpoint_as_it_is(
    make_cluster: Callable[..., LocalCluster], templates: Templates
) -> None:
    """A save dies before its commit file: the PFS shows the old checkpoint, umount says what is left. Mounted again,
    the next save brings everything."""
    cluster = make_cluster(2)
    mounts = [node.mountpoint for node in cluster.nodes]
    with PfsWatcher(cluster.pfs, templates) as watcher:
        templates[0].save(mounts, "ckpt")
        until("on the PFS", lambda: xattr(mounts[0] / "ckpt", "restartable") == "pfs")
        for rank, name in enumerate(templates[1].shards()):
            write_file(mounts[rank % 2] / "ckpt" / name, templates[1].files[name], sync=False)
        until("nothing but what is held is left", lambda: "new commit file" in cluster.run(0, "explain", mounts[0]).out)
        assert templates[0].same_as(cluster.pfs / "ckpt") == []
        assert xattr(mounts[0] / "ckpt", "restartable") == "no"
        ended = cluster.run(0, "umount", mounts[0], "--timeout", "2")
        assert ended.code == EXIT_NOT_DURABLE
        assert "new commit file" in ended.out + ended.err
        assert templates[0].same_as(cluster.pfs / "ckpt") == []
        cluster.remount(0)
        templates[1].save(mounts, "ckpt")
        until("on the PFS", lambda: xattr(mounts[1] / "ckpt", "restartable") == "pfs")
        assert templates[1].same_as(cluster.pfs / "ckpt") == []
    assert watcher.verdict.wrong == []


def test_a_file_with_a_commit_files_name_holds_up_nothing_that_it_does_not_list(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    """A log beside an index of somebody else's, and beside two indices whose shards are not there, never landed."""
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    contents = {
        "a": {".metadata": b"mine"},
        "b": {"words.index.json": b'{"cat": 3}'},
        "c": {"model.safetensors.index.json": b'{"weight_map": {"t": "s"}}', "words.index.json": b"{"},
        "d": {f"{i}.index.json": b'{"weight_map": {"t": "s"}}' for i in range(3)},
        "e": {"trainer_state.json": b'{"global_step": 1}', "m.index.json": b'{"weight_map": {"t": "s"}}'},
    }
    for name, files in contents.items():
        (mount / name).mkdir()
        for file, data in (files | {"log": b"begin"}).items():
            (mount / name / file).write_bytes(data)
    until("on the PFS", lambda: all(xattr(mount / name, "stage") == "pfs" for name in contents))
    for name in contents:
        (mount / name / "log").write_bytes(b"begin, end")
    cluster.umount()
    for name, files in contents.items():
        found = {path.name: path.read_bytes() for path in (cluster.pfs / name).iterdir()}
        assert found == files | {"log": b"begin, end"}


def test_removals_take_the_commit_file_first(make_cluster: Callable[..., LocalCluster], templates: Templates) -> None:
    cluster = make_cluster(2)
    mounts = [node.mountpoint for node in cluster.nodes]
    with PfsWatcher(cluster.pfs, templates) as watcher:
        for step in range(3):
            templates[0].save(mounts, f"step-{step}")
            until("on the PFS", lambda step=step: xattr(mounts[0] / f"step-{step}", "restartable") == "pfs")
            for name in templates[0].shards():  # shards first, the commit file last: the worst order
                os.unlink(mounts[1] / f"step-{step}" / name)
            os.unlink(mounts[1] / f"step-{step}/.metadata")
            os.rmdir(mounts[1] / f"step-{step}")
        until("all is gone", lambda: not any(cluster.pfs.glob("step-*")))
    assert watcher.verdict.wrong == []
    assert watcher.verdict.whole > 0


def test_the_commit_file_of_one_node_waits_for_the_shards_of_the_others_and_claims_nothing_before(
    make_cluster: Callable[..., LocalCluster], templates: Templates
) -> None:
    """n1's drain is slow: n0's .metadata must wait for it, though its bytes are on the PFS under a temporary name."""
    cluster = make_cluster(2, mounted=False)
    cluster.node_options[1] = {"drain_bandwidth": "1M"}
    cluster.mount()
    mounts = [node.mountpoint for node in cluster.nodes]
    with PfsWatcher(cluster.pfs, templates) as watcher:
        templates[0].save(mounts, "ckpt/step-1")
        first = templates[0].shards()[0]
        until("n0's shard is there", lambda: (cluster.pfs / "ckpt/step-1" / first).exists())
        commit = mounts[0] / "ckpt/step-1/.metadata"
        until("claimed", lambda: "pfs" in (xattr(commit, "stage"), xattr(commit.parent, "restartable")))
        assert templates[0].same_as(cluster.pfs / "ckpt/step-1") == []
        until("on the PFS", lambda: xattr(mounts[0] / "ckpt/step-1", "restartable") == "pfs")
    assert watcher.verdict.wrong == []
    assert templates[0].same_as(cluster.pfs / "ckpt/step-1") == []


def test_an_overwrite_that_is_complete_before_the_pfs_comes_back_takes_the_old_commit_file_first(
    make_cluster: Callable[..., LocalCluster], templates: Templates
) -> None:
    """The old commit file has been unlinked in the mount long before it can leave the PFS."""
    cluster = make_cluster(2)
    mounts = [node.mountpoint for node in cluster.nodes]
    with PfsWatcher(cluster.pfs, templates) as watcher:
        templates[0].save(mounts, "ckpt")
        until("on the PFS", lambda: xattr(mounts[0] / "ckpt", "restartable") == "pfs")
        with pfs_away(cluster):
            templates[1].save(mounts, "ckpt")
        until("on the PFS", lambda: xattr(mounts[0] / "ckpt", "restartable") == "pfs")
        assert templates[1].same_as(cluster.pfs / "ckpt") == []
    assert watcher.verdict.wrong == []


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_killed_daemons_leave_no_false_checkpoint(
    make_cluster: Callable[..., LocalCluster], templates: Templates, victim: int
) -> None:
    """kill -9 in the middle of saves and overwrites, remount, save again: the watcher never blinks."""
    cluster = make_cluster(3)
    mounts = [node.mountpoint for node in cluster.nodes]
    with PfsWatcher(cluster.pfs, templates) as watcher:
        templates[0].save(mounts, "ckpt")
        for round_ in range(2):
            names = templates[1].shards()
            for rank, name in enumerate(names[: len(names) // 2 + round_]):
                mount = mounts[rank * len(mounts) // len(names)]
                with contextlib.suppress(OSError):
                    write_file(mount / "ckpt" / name, templates[1].files[name], sync=False)
            cluster.kill_daemon(victim)
            cluster.remount(victim)
            templates[round_].save(mounts, "ckpt")
            templates[round_].save(mounts, f"other-{round_}")
        until("on the PFS", lambda: xattr(mounts[1] / "ckpt", "restartable") == "pfs")
        until("on the PFS", lambda: xattr(mounts[1] / "other-1", "restartable") == "pfs")
        seen = watcher.verdict.whole
        until("the watcher has looked", lambda: watcher.verdict.whole > seen + 2)
    assert watcher.verdict.wrong == []
    assert templates[1].same_as(cluster.pfs / "ckpt") == []
    assert templates[1].same_as(cluster.pfs / "other-1") == []


def test_a_lost_node_in_the_middle_of_an_overwrite_leaves_the_old_or_nothing(
    make_cluster: Callable[..., LocalCluster], templates: Templates
) -> None:
    cluster = make_cluster(4, {"node_timeout": "2"})
    mounts = [node.mountpoint for node in cluster.nodes]
    with PfsWatcher(cluster.pfs, templates) as watcher:
        templates[0].save(mounts, "ckpt")
        until("on the PFS", lambda: xattr(mounts[1] / "ckpt", "restartable") == "pfs")
        first = templates[1].shards()[0]
        write_file(mounts[0] / "ckpt" / first, templates[1].files[first], sync=False)
        cluster.kill(0)
        cluster.wipe(0)
        until("n0 is lost", lambda: any(n.name == "n0" and not n.live for n in cluster.status(1).nodes))
        templates[1].save(mounts[1:], "after")
        until("the survivors' save is on the PFS", lambda: xattr(mounts[1] / "after", "restartable") == "pfs")
    assert watcher.verdict.wrong == []
    assert templates[1].same_as(cluster.pfs / "after") == []


def test_a_pfs_that_comes_back_gets_shards_before_commit_files(
    make_cluster: Callable[..., LocalCluster], templates: Templates
) -> None:
    cluster = make_cluster(3)
    mounts = [node.mountpoint for node in cluster.nodes]
    with PfsWatcher(cluster.pfs, templates) as watcher:
        with pfs_away(cluster):
            for step in range(3):
                templates[step % 2].save(mounts, f"ckpt/step-{step}")
        for step in range(3):
            until("on the PFS", lambda step=step: xattr(mounts[0] / f"ckpt/step-{step}", "restartable") == "pfs")
    assert watcher.verdict.wrong == []
