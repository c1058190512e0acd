"""Faults of which each was found by trying to make the mount lose bytes or claim too much."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from real_support import COMMIT, WAIT_TIMEOUT_S, PfsWatcher, Template, pfs_away, raises_errno, until, until_stage

from cachexfs.demo import control
from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr
from cachexfs.errors import EXIT_CANNOT_TELL

MakeCluster = Callable[..., LocalCluster]
Templates = tuple[Template, Template]


def pids_of(cluster: LocalCluster, module: str) -> list[int]:
    """A node's processes that run a module of ours."""
    return [pid for pid in cluster.processes(0) if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_what_is_saved_under_a_forgotten_name_is_there(make_cluster: MakeCluster, templates: Templates) -> None:
    """The kernel remembers a name that ``--refresh --forget`` took away: no byte may go to the file that it led to."""
    cluster = make_cluster(1, {"fsync": "returned"})
    mount = cluster.nodes[0].mountpoint
    templates[0].save([mount], "step-1", sync=False)
    until_stage(mount / "step-1", "pfs")
    cluster.umount()
    cluster.mount()
    shard = templates[0].shards()[0]
    assert (mount / "step-1" / shard).stat().st_size  # now the kernel knows it
    (cluster.pfs / "step-1" / shard).unlink()
    with (mount / "step-1" / COMMIT).open("rb"):
        assert cluster.run(0, "status", "--refresh", "--forget", str(mount)).code == 0
    templates[1].save([mount], "step-1", sync=False)
    assert templates[1].same_as(mount / "step-1") == []
    until_stage(mount / "step-1", "pfs")
    assert templates[1].same_as(cluster.pfs / "step-1") == []


def test_a_refresh_without_the_pfs_says_so(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    with pfs_away(cluster):
        ended = cluster.run(0, "status", "--refresh", str(mount))
    assert ended.code == 4
    assert "the PFS cannot list" in ended.err


def dead_with_a_staged_checkpoint(cluster: LocalCluster, template: Template) -> list[Path]:
    """A checkpoint that is nowhere but in memory, its daemon dead; its staged shards."""
    mount = cluster.nodes[0].mountpoint
    with pfs_away(cluster):
        template.save([mount], "step-1", sync=False)
        cluster.kill(0)
        cluster.detach(0)
    sizes = set(template.sizes().values())
    return [path for path in cluster.nodes[0].staging.rglob("files/*") if path.stat().st_size in sizes]


def test_a_staged_file_that_was_removed_is_not_claimed(make_cluster: MakeCluster, templates: Templates) -> None:
    cluster = make_cluster(1, {"fsync": "returned"})
    staged = dead_with_a_staged_checkpoint(cluster, templates[0])
    staged[0].unlink()
    cluster.mount()
    mount = cluster.nodes[0].mountpoint
    assert xattr(mount / "step-1", "restartable") == "no"
    assert cluster.run(0, "latest", str(mount)).code == 1
    assert "save the checkpoint again" in cluster.run(0, "explain", str(mount / "step-1")).out


def test_a_journal_that_lost_its_end_loses_no_content(make_cluster: MakeCluster, templates: Templates) -> None:
    cluster = make_cluster(1, {"fsync": "returned"})
    staged = {path.read_bytes() for path in dead_with_a_staged_checkpoint(cluster, templates[0])}
    (journal,) = cluster.nodes[0].staging.rglob("catalogue.journal")
    data = journal.read_bytes()
    os.truncate(journal, data.index(templates[0].shards()[2].encode()) + 3)
    cluster.mount()
    mount = cluster.nodes[0].mountpoint
    kept = {path.read_bytes() for path in mount.rglob("*") if path.is_file()}
    kept |= {path.read_bytes() for path in journal.parent.glob("orphans/*")}
    assert staged <= kept
    status = cluster.run(0, "status", str(mount))
    assert (status.code, "have lost their names" in status.out) == (3, True)


def test_status_shows_what_a_detached_mount_still_drains(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(1, {"fsync": "returned", "supervisor": "on"})
    mount = cluster.nodes[0].mountpoint
    with pfs_away(cluster):
        (mount / "f").write_bytes(b"data")
        cluster.detach(0)
        until("the daemon knows", lambda: "taken away" in cluster.run(0, "status").out)
        status = cluster.run(0, "status")
        assert (status.code, "pending 4 B" in status.out) == (3, True)
    cluster.mount()
    until_stage(mount / "f", "pfs")
    assert cluster.run(0, "status").code == 0


#: Before a daemon's Python path: at its end it waits, while there is a file, before it removes what it had.
SLOW_END = """
import sys
if "cachexfs.daemon" in sys.orig_argv:
    import os, time
    from pathlib import Path
    found, orders = Path.iterdir, Path(os.environ["SLOW_END"])
    def iterdir(self):
        if sys._getframe(1).f_code.co_name == "_below":
            (orders / "ending").touch()
            while (orders / "hold").exists():
                time.sleep(0.005)
        return found(self)
    Path.iterdir = iterdir
"""


@pytest.mark.parametrize("supervisor", ["on", "off"])
def test_a_mount_waits_while_the_one_before_removes_what_it_had(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervisor: str
) -> None:
    """It was let in between, and then its own files were removed."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_END)
    monkeypatch.setenv("SLOW_END", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', Path(__file__).parents[2])}")
    cluster = make_cluster(1, {"fsync": "returned", "supervisor": supervisor})
    mount = cluster.nodes[0].mountpoint
    (mount / "before").write_bytes(b"1")
    (tmp_path / "hold").touch()
    cluster.detach(0)
    until("the daemon is at its end", (tmp_path / "ending").exists)
    assert control.registered(cluster.nodes[0].runtime) is not None, "nobody would wait for it"
    assert cluster.run(0, "status").code == EXIT_CANNOT_TELL  # there is no mount
    with cluster.start(0, *cluster.mount_arguments(0)) as process:
        (tmp_path / "hold").unlink()
        said = process.communicate(timeout=WAIT_TIMEOUT_S)
    assert process.returncode == 0, said
    (mount / "after").write_bytes(b"2")
    assert sorted(os.listdir(mount)) == ["after", "before"]
    cluster.umount()
    assert [(cluster.pfs / name).read_bytes() for name in ("before", "after")] == [b"1", b"2"]


@pytest.mark.parametrize("modules", [("cachexfs.supervisor",), ("cachexfs.supervisor", "cachexfs.daemon")])
def test_a_mount_without_its_supervisor_is_replaced(make_cluster: MakeCluster, modules: tuple[str, ...]) -> None:
    cluster = make_cluster(1, {"fsync": "returned", "supervisor": "on"})
    mount = cluster.nodes[0].mountpoint
    with pfs_away(cluster):
        (mount / "f").write_bytes(b"data")
        for module in modules:
            for pid in pids_of(cluster, module):
                os.kill(pid, signal.SIGKILL)
        until("the mount is dead", lambda: subprocess.run(["stat", "-f", mount], capture_output=True).returncode == 1)
        if len(modules) == 1:
            until("the daemon knows", lambda: "taken away" in cluster.run(0, "status").out)
        cluster.mount()
        assert (mount / "f").read_bytes() == b"data"
    until_stage(mount / "f", "pfs")
    cluster.umount()


def test_a_hard_linked_checkpoint_is_never_a_mixture(make_cluster: MakeCluster, templates: Templates) -> None:
    """``cp -al step-1 best``, then step-1 is saved again in place: the shards of both change, and so best falls."""
    cluster = make_cluster(1, {"fsync": "returned", "drain_bandwidth": "6M"})
    mount = cluster.nodes[0].mountpoint
    with PfsWatcher(cluster.pfs, templates) as watcher:
        for number, name in enumerate(("best", "kept")):
            templates[number].save([mount], "step-1", sync=False)
            (mount / name).mkdir()
            for path in (mount / "step-1").iterdir():
                os.link(path, mount / name / path.name)
            until("drained", lambda: cluster.status(0).pending_ops == 0)
            assert templates[number].same_as(cluster.pfs / name) == []
        shutil.rmtree(mount / "step-1")
        until("drained", lambda: not (cluster.pfs / "step-1").exists() and cluster.status(0).pending_ops == 0)
    assert watcher.verdict.wrong == []
    assert not (cluster.pfs / "best" / COMMIT).exists()
    assert xattr(mount / "best", "restartable") == "no"
    until("kept is whole", lambda: templates[1].same_as(cluster.pfs / "kept") == [])
    assert cluster.run(0, "latest", str(mount)).out == f"{mount}/kept\n"


def test_what_was_read_and_is_gone_from_the_pfs_is_not_claimed(make_cluster: MakeCluster, templates: Templates) -> None:
    cluster = make_cluster(1, mounted=False)
    for step in (1, 2):
        templates[0].save([cluster.pfs], f"step-{step}")
    cluster.mount()
    mount = cluster.nodes[0].mountpoint
    assert cluster.run(0, "latest", str(mount)).out == f"{mount}/step-2\n"
    shard = templates[0].shards()[0]
    (cluster.pfs / "step-2" / shard).rename(cluster.pfs / "aside")
    with raises_errno(errno.EIO):
        (mount / "step-2" / shard).read_bytes()
    assert xattr(mount / "step-2" / shard, "stage") == "lost"
    assert xattr(mount / "step-2", "restartable") == "no"
    assert cluster.run(0, "latest", str(mount)).out == f"{mount}/step-1\n"
    assert cluster.run(0, "status", str(mount)).code == 3
    explained = cluster.run(0, "explain", str(mount / "step-2" / shard)).out
    assert f"'cachexfs status {mount}/step-2/{shard} --refresh --forget' forgets its name" in explained
    for path in (mount / "step-2" / shard, mount / "step-2"):  # waited until its time was over
        waited = cluster.run(0, "wait", str(path), "--at", "pfs", "--timeout", "100")
        assert (waited.code, "is lost" in waited.err) == (3, True)
    (cluster.pfs / "aside").rename(cluster.pfs / "step-2" / shard)
    assert cluster.run(0, "status", "--refresh", str(mount)).code == 0
    assert templates[0].same_as(mount / "step-2") == []
    assert cluster.run(0, "latest", str(mount)).out == f"{mount}/step-2\n"


def test_latest_cannot_tell_while_the_pfs_is_away(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    templates[0].save([mount], "step-1", sync=False)
    until_stage(mount / "step-1", "pfs")
    assert cluster.run(0, "latest", str(mount), "--at", "pfs").out == f"{mount / 'step-1'}\n"
    with pfs_away(cluster):
        (mount / "other").touch()  # its drain sees at once what would be looked for every ten seconds
        until("the PFS is seen to be away", lambda: cluster.status(0).pfs_state != "ok")
        assert cluster.run(0, "latest", str(mount), "--at", "pfs").code == 4
        assert cluster.run(0, "latest", str(mount)).out == f"{mount / 'step-1'}\n"
