"""What users of other systems complain about, each on real mounts.

A pointer that moves before its checkpoint is durable; a 0-byte shard beside a valid commit file; saves faster than the
drain; odd sizes after a node's loss; a failed drain that is forgotten; an unmount that drops data; removed or emptied
files that come back; zeros in a log that another node reads.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from real_support import PfsWatcher, Template, pfs_away, until, until_stage, write_file

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr

MakeCluster = Callable[..., LocalCluster]
MIB = 1 << 20
ODD_SIZES = [0, 1, 4095, 4097, MIB - 1, MIB, MIB + 1, 3 * MIB + 7, 5 * MIB - 13]


def test_a_zero_byte_shard_beside_a_valid_commit_file_is_never_offered(
    alone: LocalCluster, mount: Path, templates: tuple[Template, Template]
) -> None:
    """pytorch/xla#7919: the second host's shard is empty, the commit file is there."""
    templates[0].save([mount], "step-1", sync=False)
    templates[1].save([mount], "step-2", sync=False)
    until_stage(mount, "pfs")
    shard = templates[1].shards()[-1]
    os.truncate(mount / "step-2" / shard, 0)
    assert xattr(mount / "step-2", "restartable") == "no"
    assert shard in (xattr(mount / "step-2", "missing") or "")
    assert alone.run(0, "latest", str(mount)).out == f"{mount / 'step-1'}\n"
    on_pfs = Path(alone.run(0, "latest", str(alone.pfs / mount.name)).out.strip())
    whole = templates[1] if on_pfs.name == "step-2" else templates[0]  # there the old shard stays until a new save
    assert whole.same_as(on_pfs) == []


def pointed_to(pfs: Path) -> Path | None:
    """The checkpoint that somebody who reads the PFS alone would resume from, by ``latest`` or by the tracker."""
    try:
        return pfs / os.readlink(pfs / "latest")
    except FileNotFoundError:
        pass
    try:
        return pfs / f"iter_{int((pfs / 'latest_checkpointed_iteration.txt').read_text()):07}"
    except FileNotFoundError:
        return None


@pytest.mark.parametrize("pointer", ["symlink", "tracker"])
def test_a_pointer_reaches_the_pfs_after_what_it_points_to(
    make_cluster: MakeCluster, templates: tuple[Template, Template], pointer: str
) -> None:
    """KempnerForge#102, composer#3376: ``latest`` moves before the data is durable."""
    cluster = make_cluster(2, {"fsync": "returned", "drain_bandwidth": "4M"})
    mounts = [node.mountpoint for node in cluster.nodes]
    wrong: list[str] = []
    ended = threading.Event()
    seen: set[str] = set()

    def watch() -> None:
        while not ended.is_set():
            target = pointed_to(cluster.pfs)
            if target is not None:
                seen.add(target.name)
                wrong.extend(templates[int(target.name[-1]) % 2].same_as(target))
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for step in (2, 3):
            name = f"iter_{step:07}"
            templates[step % 2].save(mounts, name, sync=False)
            if pointer == "symlink":
                (mounts[0] / "latest").unlink(missing_ok=True)
                (mounts[0] / "latest").symlink_to(name)
            else:
                (mounts[0] / "latest_checkpointed_iteration.txt").write_text(str(step))
        until("drained", lambda: cluster.status(0).pending_ops == 0)
        until("seen", lambda: "iter_0000003" in seen)
    finally:
        ended.set()
        watcher.join()
    assert wrong == []


def test_saving_faster_than_draining_with_retention_neither_breaks_nor_starves(
    make_cluster: MakeCluster, templates: tuple[Template, Template]
) -> None:
    """dlrover#1585, juicefs#7558: each save removes the last but one while that is still being drained."""
    cluster = make_cluster(1, {"fsync": "returned", "drain_bandwidth": "3M", "memory": "512M"})
    mount = cluster.nodes[0].mountpoint
    with PfsWatcher(cluster.pfs, templates) as watcher:
        for step in range(1, 9):
            templates[step % 2].save([mount], f"step-{step}", sync=False)
            assert cluster.run(0, "latest", str(mount)).out == f"{mount}/step-{step}\n"
            if step > 2:
                shutil.rmtree(mount / f"step-{step - 2}")
        until("drained", lambda: cluster.status(0).pending_ops == 0)
    assert watcher.verdict.wrong == []
    assert watcher.verdict.whole > 0
    assert sorted(p.name for p in cluster.pfs.iterdir() if p.name != ".cachexfs") == ["step-7", "step-8"]
    for step in (7, 8):
        assert templates[step % 2].same_as(cluster.pfs / f"step-{step}") == []
    status = cluster.run(0, "status")
    assert status.code == 0, status.out
    cluster.umount()
    assert cluster.run(0, "latest", str(cluster.pfs)).out == f"{cluster.pfs}/step-8\n"


def test_files_of_odd_sizes_come_back_whole_from_the_partner(make_cluster: MakeCluster) -> None:
    """fti#76, #202: partner recovery corrupts odd sizes and deletes the surviving copy."""
    cluster = make_cluster(3, {"fsync": "partner", "node_timeout": "3"})
    written = {f"odd-{size}": os.urandom(size) for size in ODD_SIZES}
    os.listdir(cluster.nodes[0].mountpoint)
    cluster.pfs.rename(cluster.pfs.with_name("pfs.off"))
    for name, data in written.items():
        write_file(cluster.nodes[0].mountpoint / name, data)
    cluster.kill(0)
    cluster.detach(0)
    cluster.wipe(0)
    for node in cluster.nodes[1:]:
        until("the loss is known", lambda node=node: len([n for n in cluster.status(node.index).nodes if n.live]) == 2)
        found = {path.name: path.read_bytes() for path in node.mountpoint.iterdir()}
        assert found.keys() == written.keys()
        assert [name for name, data in written.items() if found[name] != data] == []
    cluster.pfs.with_name("pfs.off").rename(cluster.pfs)
    until("drained", lambda: cluster.status(1).pending_ops == 0)
    assert {name: (cluster.pfs / name).read_bytes() for name in written} == written


def test_a_drain_that_fails_for_long_is_shown_all_the_time_and_ends_whole(make_cluster: MakeCluster) -> None:
    """rclone#4293, Alluxio#14685: failed uploads are given up after some retries and deleted."""
    cluster = make_cluster(1, {"fsync": "returned"})
    mount = cluster.nodes[0].mountpoint
    (mount / "dir").mkdir()
    until("the directory is there", (cluster.pfs / "dir").is_dir)  # the stage of an empty one is always pfs
    until("nothing is pending", lambda: cluster.status(0).pending_ops == 0)
    (cluster.pfs / "dir").rmdir()
    (cluster.pfs / "dir").write_text("in the way")
    (mount / "dir" / "f").write_bytes(b"data")
    until("the error is shown", lambda: "dir/f" in cluster.run(0, "status").out)
    for _ in range(5):
        time.sleep(0.5)
        status = cluster.run(0, "status")
        assert status.code == 3
        assert "next try" in status.out
    assert "mend what the error says" in cluster.run(0, "explain", str(mount / "dir" / "f")).out
    assert (mount / "dir" / "f").read_bytes() == b"data"
    ended = cluster.run(0, "umount", str(mount), "--timeout", "1")
    assert ended.code == 3
    assert "dir/f" in ended.err
    (cluster.pfs / "dir").unlink()
    (cluster.pfs / "dir").mkdir()
    cluster.mount()
    until("landed", lambda: (cluster.pfs / "dir" / "f").exists())
    assert (cluster.pfs / "dir" / "f").read_bytes() == b"data"
    until("no error any more", lambda: cluster.run(0, "status").code == 0)


def test_what_is_renamed_and_removed_before_its_upload_never_appears(make_cluster: MakeCluster) -> None:
    """rclone#6809: the directory comes back under its new name once the write-back time is over."""
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    with pfs_away(cluster):
        for round_ in range(3):
            (mount / "old").mkdir()
            (mount / "old" / "file").write_bytes(os.urandom(MIB))
            (mount / "old").rename(mount / f"new-{round_}")
        for round_ in range(3):
            shutil.rmtree(mount / f"new-{round_}")
        assert os.listdir(mount) == []
    until("drained", lambda: cluster.status(0).pending_ops == 0)
    assert (os.listdir(mount), os.listdir(cluster.pfs)) == ([], [".cachexfs"])


def test_what_replaces_an_emptied_file_before_its_upload_is_what_arrives(make_cluster: MakeCluster) -> None:
    """rclone#4293: the upload of the emptied file wins over the rename onto it, and the data is gone."""
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    (mount / "file").write_bytes(b"first")
    until_stage(mount / "file", "pfs")
    with pfs_away(cluster):
        (mount / "part").write_bytes(b"whole" * MIB)
        os.truncate(mount / "file", 0)
        (mount / "part").rename(mount / "file")
        assert (mount / "file").read_bytes() == b"whole" * MIB
    until_stage(mount / "file", "pfs")
    until("drained", lambda: cluster.status(0).pending_ops == 0)
    assert (cluster.pfs / "file").read_bytes() == b"whole" * MIB
    assert sorted(os.listdir(cluster.pfs)) == [".cachexfs", "file"]


def test_a_log_that_grows_is_read_elsewhere_without_zeros_and_a_writer_survives_its_removal(
    make_cluster: MakeCluster,
) -> None:
    """juicefs#5038: zeros instead of what was appended; CubeFS#3373: who writes to a removed file hangs."""
    cluster = make_cluster(2, {"fsync": "returned"})
    here, there = (node.mountpoint for node in cluster.nodes)
    lines = [b"%07d\n" % number for number in range(600)]
    for start in range(0, len(lines), 20):
        with open(here / "log", "ab", buffering=0) as file:
            for line in lines[start : start + 20]:
                file.write(line)
            assert b"".join(lines).startswith((there / "log").read_bytes() if start else b"")
        assert (there / "log").read_bytes() == b"".join(lines[: start + 20])
    with open(here / "log", "ab", buffering=0) as file:
        (there / "log").unlink()
        file.write(bytes(3 * MIB))
        os.fsync(file.fileno())
    assert os.listdir(here) == os.listdir(there) == []
    until("drained", lambda: cluster.status(0).pending_ops + cluster.status(1).pending_ops == 0)
    assert [name for name in os.listdir(cluster.pfs) if name != ".cachexfs"] == []
