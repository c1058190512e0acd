"""``cachexfs recover``: a job that has died comes back from the nodes' NVMe, and nothing on the PFS is harmed."""

import contextlib
import json
import os
import random
import time
from collections.abc import Callable

import pytest
from real_support import PfsWatcher, Template, pfs_away, until, until_stage, write_file
from recover_support import (
    damage,
    flat,
    held,
    hidden,
    kill_all,
    outcomes,
    reasons,
    recover,
    rounds,
    save,
    stopped,
    until_manifests,
    until_restartable,
)

from cachexfs.demo.cluster import LocalCluster
from cachexfs.errors import EXIT_CANNOT_TELL, EXIT_DONE, EXIT_NOT_DURABLE, EXIT_USAGE

MIB = 1 << 20
OPTIONS = {"node_timeout": "2"}


@pytest.fixture
def two(make_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    """Two nodes: each keeps the other's replicas."""
    return make_cluster(2, OPTIONS)


def test_a_dead_jobs_checkpoint_comes_back_and_a_second_run_has_nothing_to_do(
    two: LocalCluster, templates: tuple[Template, Template]
) -> None:
    mounts = [node.mountpoint for node in two.nodes]
    large = os.urandom(2 * MIB + 7)
    with pfs_away(two):
        save(templates[0], two, "run/tmp-1")
        write_file(mounts[0] / "large", large, sync=False)
        (mounts[0] / "large").chmod(0o640)
        os.utime(mounts[0] / "large", ns=(10**18, 10**18 + 7))
        until_restartable(two, "run/tmp-1", "partner")
        until_stage(mounts[0] / "large", "partner")
        (mounts[0] / "run/tmp-1").rename(mounts[0] / "run/step-1")
        until_manifests(two, templates[0], "run/step-1")
        kill_all(two)
    with PfsWatcher(two.pfs, templates) as watcher:
        ended = rounds(two)
    assert watcher.verdict.wrong == []
    assert [e.code for e in ended][2:] == [EXIT_DONE, EXIT_DONE], ended
    assert flat(two.pfs) == {f"run/step-1/{name}": data for name, data in templates[0].files.items()} | {"large": large}
    status = (two.pfs / "large").stat()
    assert (status.st_mode & 0o7777, status.st_mtime_ns) == (0o640, 10**18 + 7)
    assert hidden(two.pfs) == []
    again = recover(two, 0)
    assert (again.code, again.out[:13]) == (EXIT_DONE, "nothing to do")
    assert two.run(0, "latest", str(two.pfs / "run")).out == f"{two.pfs}/run/step-1\n"


def test_what_is_renamed_while_it_is_open_comes_back_under_its_new_name(two: LocalCluster) -> None:
    """write, fsync, rename, and the close comes later: the partner's manifest kept the old name until then."""
    mount = two.nodes[0].mountpoint
    with pfs_away(two):
        fd = os.open(mount / "state.tmp", os.O_CREAT | os.O_WRONLY)
        os.write(fd, b"new")
        os.fsync(fd)
        os.rename(mount / "state.tmp", mount / "state")
        until("the partner knows", lambda: [file["path"] for file in held(two, 1)] == ["state"])
        kill_all(two)
        with contextlib.suppress(OSError):  # the mount is dead
            os.close(fd)
    assert outcomes(recover(two, 1, "--json")) == {"state": "published"}
    assert flat(two.pfs) == {"state": b"new"}


def test_what_was_fsynced_takes_the_place_of_what_landed_after_it(two: LocalCluster) -> None:
    """The partner's manifest did not know of it: it passed for somebody else's content, a conflict."""
    path = two.nodes[0].mountpoint / "f"
    path.write_bytes(b"first")
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"second")
    os.fsync(fd)
    until("the first has landed", lambda: (two.pfs / "f").exists())
    kill_all(two)
    with contextlib.suppress(OSError):  # the mount is dead
        os.close(fd)
    assert recover(two, 1).code == EXIT_DONE
    assert flat(two.pfs) == {"f": b"second"}


def test_a_rename_whose_daemon_dies_before_the_partner_knows_of_it(two: LocalCluster) -> None:
    """The next daemon tells the partner: nothing that it has to do shows that its predecessor did not."""
    mount = two.nodes[0].mountpoint
    with pfs_away(two):
        write_file(mount / "state.tmp", b"new")
        until_stage(mount / "state.tmp", "partner")
        with stopped(two, 1):
            os.rename(mount / "state.tmp", mount / "state")
            two.kill_daemon(0)
        two.remount(0)
        until("the partner knows", lambda: [file["path"] for file in held(two, 1)] == ["state"])
        kill_all(two)
    assert outcomes(recover(two, 1, "--json")) == {"state": "published"}


def test_list_shows_what_is_held_and_whether_it_is_whole(two: LocalCluster) -> None:
    mounts = [node.mountpoint for node in two.nodes]
    with pfs_away(two):
        write_file(mounts[0] / "closed", b"c" * 5000)
        until("published", lambda: [f["published"] for f in held(two, 1)] == [True])
        assert "in use by a daemon" in recover(two, 1, "--list").out
        fd = os.open(mounts[0] / "open", os.O_CREAT | os.O_WRONLY)
        os.write(fd, b"o" * (MIB + 1))
        os.fsync(fd)
        kill_all(two)  # no process may be started before: it would inherit the file, and close it
        with contextlib.suppress(OSError):  # the mount is dead
            os.close(fd)
    files = {file["path"]: file for file in held(two, 1)}
    assert {path: file["published"] for path, file in files.items()} == {"closed": True, "open": False}
    assert (files["closed"]["size"], files["closed"]["origin"], files["closed"]["whole"]) == (5000, "n0", True)
    damage(two, 1, "open", MIB)
    listed = recover(two, 1, "--list", "--verify")
    assert listed.code == EXIT_NOT_DURABLE
    assert "block 1" in listed.out
    ended = recover(two, 1, "--json")
    assert ended.code == EXIT_NOT_DURABLE
    assert outcomes(ended) == {"closed": "published", "open": "damaged"}
    assert flat(two.pfs) == {"closed": b"c" * 5000}


def test_an_overwritten_checkpoint_changes_as_a_whole_or_not_at_all(
    two: LocalCluster, templates: tuple[Template, Template]
) -> None:
    save(templates[0], two, "ckpt")
    until_restartable(two, "ckpt", "pfs")
    with pfs_away(two):
        save(templates[1], two, "ckpt")
        until_restartable(two, "ckpt", "partner")
        until_manifests(two, templates[1], "ckpt")
        kill_all(two)
    with PfsWatcher(two.pfs, templates) as watcher:
        first = recover(two, 1, "--json")
        assert first.code == EXIT_NOT_DURABLE
        assert set(outcomes(first).values()) == {"withheld"}
        assert templates[0].same_as(two.pfs / "ckpt") == []
        last = recover(two, 0, "--json")
    assert watcher.verdict.wrong == []
    assert watcher.verdict.whole > 0
    assert last.code == EXIT_DONE, last
    assert templates[1].same_as(two.pfs / "ckpt") == []
    assert recover(two, 1).code == EXIT_DONE
    assert hidden(two.pfs) == []


def test_members_that_are_lost_leave_the_old_checkpoint_whole(
    two: LocalCluster, templates: tuple[Template, Template]
) -> None:
    save(templates[0], two, "ckpt")
    until_restartable(two, "ckpt", "pfs")
    with pfs_away(two):
        save(templates[1], two, "ckpt")
        until_restartable(two, "ckpt", "partner")
        until_manifests(two, templates[1], "ckpt")
        kill_all(two)
        two.wipe(0)  # with it, n1's shards of the new checkpoint; names and sizes of the old ones are the same
    for _ in range(2):
        ended = recover(two, 1, "--json")
        assert ended.code == EXIT_NOT_DURABLE
        assert set(outcomes(ended).values()) == {"withheld"}
        assert "not the file that .metadata was saved with" in reasons(ended)["ckpt/.metadata"]
        assert templates[0].same_as(two.pfs / "ckpt") == []


def test_what_others_wrote_to_the_pfs_is_left_alone(two: LocalCluster) -> None:
    mounts = [node.mountpoint for node in two.nodes]
    for name in ("base", "changed"):
        write_file(mounts[0] / name, b"1" * 1000)
        until_stage(mounts[0] / name, "pfs")
    with pfs_away(two):
        for name in ("base", "changed", "foreign"):
            write_file(mounts[0] / name, b"2" * 1000)
        (mounts[0] / "base").rename(mounts[0] / "moved")
        write_file(mounts[0] / "base", b"3" * 1000)
        until(
            "held",
            lambda: {f["path"] for f in held(two, 1) if f["published"]} == {"base", "changed", "foreign", "moved"},
        )
        kill_all(two)
    (two.pfs / "changed").write_bytes(b"x" * 1000)
    (two.pfs / "foreign").write_bytes(b"y")
    ended = recover(two, 1, "--json")
    assert ended.code == EXIT_NOT_DURABLE
    found = outcomes(ended)
    assert (found["changed"], found["foreign"], found["moved"]) == ("conflict", "conflict", "published")
    files = flat(two.pfs)
    assert (files["changed"], files["foreign"], files["moved"]) == (b"x" * 1000, b"y", b"2" * 1000)
    assert files["base"] in (b"1" * 1000, b"3" * 1000)


def test_recover_killed_at_any_instant_goes_on_the_next_time(
    two: LocalCluster, templates: tuple[Template, Template]
) -> None:
    save(templates[0], two, "ckpt")
    until_restartable(two, "ckpt", "pfs")
    with pfs_away(two):
        save(templates[1], two, "ckpt")
        until_restartable(two, "ckpt", "partner")
        until_manifests(two, templates[1], "ckpt")
        kill_all(two)
    chance = random.Random(7)
    with PfsWatcher(two.pfs, templates) as watcher:
        for round_ in range(8):
            index = round_ % 2
            child = two.start(index, "recover", str(two.nodes[index].nvme), "--to", str(two.pfs))
            time.sleep(0.4 + chance.random())
            two.kill(index)
            child.communicate()
        ended = rounds(two)
    assert watcher.verdict.wrong == []
    assert [e.code for e in ended][2:] == [EXIT_DONE, EXIT_DONE], ended
    assert templates[1].same_as(two.pfs / "ckpt") == []
    assert hidden(two.pfs) == []


def test_on_all_nodes_at_once_with_wait(two: LocalCluster, templates: tuple[Template, Template]) -> None:
    with pfs_away(two):
        save(templates[0], two, "step-1")
        until_restartable(two, "step-1", "partner")
        until_manifests(two, templates[0], "step-1")
        kill_all(two)
    goal = ("--to", str(two.pfs), "--wait", "60")
    children = [two.start(n.index, "recover", str(n.nvme), *goal) for n in two.nodes]
    ended = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [EXIT_DONE, EXIT_DONE], ended
    assert templates[0].same_as(two.pfs / "step-1") == []


def test_recover_refuses_a_living_job_and_a_directory_that_is_not_the_jobs(two: LocalCluster) -> None:
    with pfs_away(two):
        write_file(two.nodes[0].mountpoint / "f", b"f" * 5000)
        until("held", lambda: [f["path"] for f in held(two, 1)] == ["f"])
        alive = recover(two, 1)
        assert alive.code == EXIT_USAGE
        assert "umount" in alive.err
        kill_all(two)
        empty = two.root / "empty"
        empty.mkdir()
        ended = recover(two, 1, to=empty)  # the bare mount point of a PFS that is not mounted
        assert ended.code == EXIT_CANNOT_TELL
        assert "is the PFS mounted?" in ended.err
        assert list(empty.iterdir()) == []
        assert recover(two, 1, to=two.root / "none").code == EXIT_CANNOT_TELL
        assert recover(two, 1, "--elsewhere", to=empty).code == EXIT_DONE
        assert flat(empty) == {"f": b"f" * 5000}
        (empty / "f").unlink()
    assert recover(two, 1, to=empty).code == EXIT_USAGE  # it has the identity of another directory
    assert recover(two, 1).code == EXIT_DONE
    assert flat(two.pfs) == {"f": b"f" * 5000}
    for arguments in ([], ["--dead", "n1", "--list"], ["--to"]):
        assert two.run(0, "recover", *arguments).code == EXIT_USAGE
    assert two.run(0, "recover", str(two.root / "none")).code == EXIT_CANNOT_TELL


def test_a_lone_nodes_fsync_is_recovered_from_the_pfs_itself(make_cluster: Callable[..., LocalCluster]) -> None:
    """``fsync=pfs``: safe under a hidden name with its record when the node is lost."""
    cluster = make_cluster(1)
    data = os.urandom(MIB + 5)
    fd = os.open(cluster.nodes[0].mountpoint / "open", os.O_CREAT | os.O_WRONLY)
    os.write(fd, data)
    os.fsync(fd)
    kill_all(cluster)
    assert flat(cluster.pfs).get("open", b"") == b""
    listed = json.loads(cluster.run(0, "recover", "--to", str(cluster.pfs), "--list", "--json").out)
    assert [(r["path"], r["size"]) for r in listed["records"]] == [("open", len(data))]
    ended = cluster.run(0, "recover", "--to", str(cluster.pfs))
    assert ended.code == EXIT_DONE, ended
    assert flat(cluster.pfs) == {"open": data}
    assert hidden(cluster.pfs) == []
