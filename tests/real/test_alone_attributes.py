"""``getfattr -d`` on one node: every name and value that scripts depend on."""

import contextlib
import datetime
import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from real_support import Template, raises_errno, until, until_stage, write_file

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import PREFIX, xattr, xattrs

MIB = 1 << 20


def parsed(text: str) -> datetime.datetime:
    """A time as promised: RFC 3339, UTC, microseconds."""
    time = datetime.datetime.fromisoformat(text)
    assert time.utcoffset() == datetime.timedelta(0)
    assert len(text.partition(".")[2].rstrip("Z").partition("+")[0]) == 6
    return time


def test_a_file_tells_its_whole_story(mount: Path, alone: LocalCluster) -> None:
    data = os.urandom(1_500_000)
    before = datetime.datetime.now(datetime.UTC)
    (mount / "shard").write_bytes(data)
    until_stage(mount / "shard", "pfs")
    after = datetime.datetime.now(datetime.UTC)
    shown = xattrs(mount / "shard")
    assert shown["stage"] == "pfs"
    assert before <= parsed(shown["t.returned"]) <= parsed(shown["t.pfs"]) <= after
    assert "t.partner" not in shown
    assert shown["digest"] == f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"
    assert shown["origin"] == alone.status(0).node
    assert shown["origin"] in shown["holders"]
    assert shown["pending"] == "0"
    assert int(shown["generation"]) > 0
    assert shown["eta.pfs"] == "unknown" or shown["eta.pfs"].startswith("p50=")
    assert "route" in shown
    assert "error" not in shown
    assert not {"restartable", "missing", "at_risk_s"} & set(shown)


def test_the_digest_of_a_large_file_is_there_for_who_asks_at_once(make_cluster: Callable[..., LocalCluster]) -> None:
    """Its close has not waited for it."""
    mount = make_cluster(1, {"passthrough": "off", "fsync": "returned"}).nodes[0].mountpoint
    for number in range(4):
        data = os.urandom(1 << 20) * 64
        (mount / f"f{number}").write_bytes(data)
        assert xattr(mount / f"f{number}", "digest") == f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"


def test_writing_is_shown_between_a_write_and_its_flush_only(mount: Path) -> None:
    fd = os.open(mount / "f", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"x")
    assert xattr(mount / "f", "stage") == "writing"
    os.close(fd)
    assert xattr(mount / "f", "stage") in ("returned", "pfs")


def test_a_rewrite_is_a_new_generation_and_falls_back(mount: Path) -> None:
    (mount / "f").write_bytes(b"one")
    until_stage(mount / "f", "pfs")
    old = xattrs(mount / "f")
    fd = os.open(mount / "f", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"two")
    assert xattr(mount / "f", "stage") == "writing"
    assert xattr(mount / "f", "t.pfs") is None
    os.close(fd)
    until_stage(mount / "f", "pfs")
    new = xattrs(mount / "f")
    assert int(new["generation"]) > int(old["generation"])
    assert parsed(new["t.returned"]) > parsed(old["t.pfs"])
    assert new["digest"] != old["digest"]


def test_when_a_file_came_to_the_pfs_is_not_its_mtime_after_a_remount(mount: Path, alone: LocalCluster) -> None:
    """``cp -a`` of an old checkpoint was at ``pfs`` years ago."""
    before = datetime.datetime.now(datetime.UTC)
    (mount / "f").write_bytes(b"bytes")
    os.utime(mount / "f", (1e9, 1e9))
    until_stage(mount / "f", "pfs")
    alone.umount()
    alone.mount()
    assert (mount / "f").stat().st_mtime == 1e9
    assert before <= parsed(xattrs(mount / "f")["t.pfs"]) <= datetime.datetime.now(datetime.UTC)


def test_directories_show_the_weakest_of_what_lies_below(mount: Path, alone: LocalCluster) -> None:
    (mount / "d/e").mkdir(parents=True)
    assert xattr(mount / "d/e", "stage") == "pfs"
    (mount / "d/e/f").write_bytes(b"x")
    until_stage(mount / "d", "pfs")
    fd = os.open(mount / "d/e/g", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"1234")
    assert xattr(mount / "d", "stage") == "writing"
    os.close(fd)
    until_stage(mount / "d", "pfs")
    assert xattr(mount / "d", "pending") == "0"


def test_the_root_shows_the_training_at_risk(alone: LocalCluster) -> None:
    shown = xattrs(alone.nodes[0].mountpoint)
    assert "stage" in shown
    assert "pending" in shown
    assert "at_risk_s" in shown


def test_a_checkpoint_becomes_restartable_with_its_commit_file_and_not_before(
    mount: Path, templates: tuple[Template, Template]
) -> None:
    directory = mount / "step-1"
    directory.mkdir()
    template = templates[0]
    for name in template.shards():
        write_file(directory / name, template.files[name], sync=False)
    assert xattr(directory, "restartable") in (None, "no")
    template.commit(directory)
    until("restartable at pfs", lambda: xattr(directory, "restartable") == "pfs")
    shown = xattrs(directory)
    files = [xattrs(directory / name) for name in template.files]
    assert "missing" not in shown
    assert shown["stage"] == "pfs"
    assert parsed(shown["t.returned"]) >= max(parsed(file["t.returned"]) for file in files)
    assert parsed(shown["t.pfs"]) >= max(parsed(file["t.pfs"]) for file in files)
    assert parsed(shown["t.returned"]) <= parsed(shown["t.restartable"])


def test_a_checkpoint_with_a_missing_shard_says_which_and_is_not_restartable(
    mount: Path, templates: tuple[Template, Template]
) -> None:
    templates[0].save([mount], "step-1")
    until("restartable", lambda: xattr(mount / "step-1", "restartable") == "pfs")
    gone = templates[0].shards()[1]
    (mount / "step-1" / gone).unlink()
    assert xattr(mount / "step-1", "restartable") == "no"
    assert gone in (xattr(mount / "step-1", "missing") or "")
    assert xattr(mount / "step-1", "t.restartable") is None


def test_a_cut_shard_holds_the_checkpoint_back(mount: Path, templates: tuple[Template, Template]) -> None:
    templates[0].save([mount], "step-1")
    until("restartable", lambda: xattr(mount / "step-1", "restartable") == "pfs")
    cut = templates[0].shards()[2]
    os.truncate(mount / "step-1" / cut, 1000)
    assert xattr(mount / "step-1", "restartable") == "no"
    assert cut in (xattr(mount / "step-1", "missing") or "")


def test_an_overwrite_is_not_restartable_from_its_first_truncate_to_its_commit(
    mount: Path, templates: tuple[Template, Template]
) -> None:
    """Names and sizes are right all the time: only generations tell."""
    old, new = templates
    old.save([mount], "ckpt")
    until("restartable", lambda: xattr(mount / "ckpt", "restartable") == "pfs")
    for name in new.shards():
        write_file(mount / "ckpt" / name, new.files[name], sync=False)
        assert xattr(mount / "ckpt", "restartable") == "no", name
    new.commit(mount / "ckpt")
    until("restartable again", lambda: xattr(mount / "ckpt", "restartable") == "pfs")
    assert new.same_as(mount / "ckpt") == []


def test_attributes_are_refused_in_a_way_that_copies_tolerate(mount: Path, tmp_path: Path) -> None:
    (mount / "f").write_bytes(b"x")
    with raises_errno(errno.ENOTSUP):
        os.setxattr(mount / "f", f"{PREFIX}stage", b"pfs")
    with raises_errno(errno.ENOTSUP):
        os.removexattr(mount / "f", f"{PREFIX}stage")
    subprocess.run(["cp", "-a", mount / "f", mount / "g"], check=True)
    shutil.copytree(mount, tmp_path / "copy")
    assert (mount / "g").read_bytes() == b"x"


def test_nothing_is_stored_on_the_pfs_and_lies_there_are_masked(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1, mounted=False)
    (cluster.pfs / "liar").write_bytes(b"x")
    with contextlib.suppress(OSError):  # a PFS without user attributes cannot lie
        os.setxattr(cluster.pfs / "liar", f"{PREFIX}origin", b"nowhere")
    cluster.mount()
    mount = cluster.nodes[0].mountpoint
    assert xattr(mount / "liar", "stage") == "pfs"
    assert xattr(mount / "liar", "origin") != "nowhere"
    (mount / "new").write_bytes(b"y")
    cluster.umount()
    assert os.listxattr(cluster.pfs / "new") == []


def test_hidden_attributes_are_readable_by_name(make_cluster: Callable[..., LocalCluster]) -> None:
    mount = make_cluster(1, {"hide_xattrs": "on"}).nodes[0].mountpoint
    (mount / "f").write_bytes(b"x")
    assert os.listxattr(mount / "f") == []
    assert xattr(mount / "f", "stage") in ("returned", "pfs")


@pytest.mark.parametrize("name", ["security.capability", "user.other", "system.posix_acl_access"])
def test_other_attributes_are_absent(mount: Path, name: str) -> None:
    (mount / "f").touch()
    with raises_errno(errno.ENODATA, errno.ENOTSUP):
        os.getxattr(mount / "f", name)


def test_a_large_file_says_how_far_its_copy_is(make_cluster: Callable[..., LocalCluster]) -> None:
    """Of one file of 10 GiB nothing moved for minutes, in ``status``, ``wait`` and ``umount``."""
    cluster = make_cluster(1, {"drain_bandwidth": "4M", "fsync": "returned"})
    mount = cluster.nodes[0].mountpoint
    (mount / "large").write_bytes(bytes(64 * MIB))
    until("some of it is there", lambda: 0 < cluster.status(0).own_copied_bytes < 64 * MIB)
    status = cluster.status(0)
    assert status.own_copied_bytes + status.own_left_bytes == status.pending_bytes == 64 * MIB
    assert status.own_left_s is not None
    assert "are there" in cluster.run(0, "explain", str(mount / "large")).out
    assert "p50=0 " not in (xattr(mount / "large", "eta.pfs") or "")
    ended = cluster.run(0, "umount", str(mount), "--timeout", "1")
    assert ended.code == 3
    assert "time ran out while it was copied: large" in ended.err
