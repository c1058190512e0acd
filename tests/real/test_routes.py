"""The route: to the PFS directly or by way of the partner; what is said of it, and what a late PFS does to it."""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_support import Template, contents_below, pfs_away, until, until_stage, write_file

from cachexfs.config import mount_id
from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr
from cachexfs.demo.netns import usable
from cachexfs.model import records
from cachexfs.model.online import OBSERVED_MIN
from cachexfs.model.records import BoundaryRecord

MIB = 1 << 20
FAULT_FS = Path(__file__).parents[1] / "pfs/faultfs.py"
SEEDS = 40
DIRECT = {"route": "direct", "node_timeout": "2", "fsync_timeout": "9"}
AUTO = DIRECT | {"route": "auto"}


@contextlib.contextmanager
def hanging_pfs(root: Path) -> Iterator[tuple[Path, Path]]:
    """(PFS directory, a file that has it hang while it exists). Goes on at the end, so that all can be killed."""
    below, path, control = root / "backing", root / "pfs", root / "control"
    for directory in (below, path, control):
        directory.mkdir()
    process = subprocess.Popen([sys.executable, str(FAULT_FS), str(below), str(path), str(control)])
    hang = control / "hang-fsync"
    try:
        until("faultfs is mounted", lambda: os.path.ismount(path))
        yield path, hang
    finally:
        hang.unlink(missing_ok=True)
        process.kill()
        process.wait()
        subprocess.run(["umount", "-l", str(path)], check=True)


def on_nvme(cluster: LocalCluster) -> list[Path]:
    """What any node holds or has received for another."""
    return [path for node in cluster.nodes for path in node.nvme.glob("*/*/replicas/**/*.[0-9a-f]*") if path.is_file()]


def route(path: Path) -> str | None:
    return xattr(path, "route")


def seed(
    cluster: LocalCluster, index: int, partner_s: float, pfs_s: float, count: int = SEEDS, size: int = MIB
) -> None:
    """What a node's earlier life has learnt: so long for so many bytes to the partner, and to the PFS."""
    node = cluster.nodes[index]
    path = node.runtime / f"{mount_id(str(node.mountpoint), node.name)}.files"
    now_s = Path("/proc/self").stat().st_ctime
    for number in range(count):
        a, b = (seconds * (1 + number % 5 / 20) for seconds in (partner_s, pfs_s))
        record = BoundaryRecord(now_s + number, "", 1, size, "partner", node.name, (0, 0), (a, a), (b, b))
        records.append(path, record)


def test_direct_sends_nothing_to_the_partner_and_fsync_waits_for_the_pfs(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = make_cluster(2, DIRECT)
    mounts = [node.mountpoint for node in cluster.nodes]
    data = os.urandom(20 * MIB + 5)
    fd = os.open(mounts[0] / "f", os.O_CREAT | os.O_WRONLY)
    try:
        for start in range(0, len(data), MIB):
            os.write(fd, data[start : start + MIB])
        os.fsync(fd)
        assert contents_below(cluster.pfs).count(data) == 1
        assert [route(mount / "f") for mount in mounts] == ["direct", "direct"]
    finally:
        os.close(fd)
    until_stage(mounts[1] / "f", "pfs")
    assert (cluster.pfs / "f").read_bytes() == (mounts[1] / "f").read_bytes() == data
    assert xattr(mounts[0] / "f", "t.partner") is None
    assert xattr(mounts[0] / "f", "holders") == "n0:memory,pfs"
    assert on_nvme(cluster) == []
    write_file(mounts[0] / "f", data[:MIB])  # a second content of it
    until_stage(mounts[0] / "f", "pfs")
    assert on_nvme(cluster) == []


def test_a_checkpoint_goes_directly_and_is_safe_on_the_pfs_when_its_save_returns(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    cluster = make_cluster(2, DIRECT)
    mounts = [node.mountpoint for node in cluster.nodes]
    templates[0].save(mounts, "step-1")
    there = contents_below(cluster.pfs)
    assert all(data in there for data in templates[0].files.values())
    until("on the PFS", lambda: xattr(mounts[1] / "step-1", "restartable") == "pfs")
    assert templates[0].same_as(cluster.pfs / "step-1") == []
    assert [point.route for point in cluster.status(1).checkpoints] == ["direct"]
    assert on_nvme(cluster) == []


def test_what_a_hung_pfs_does_not_take_goes_to_the_partner(
    make_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    with hanging_pfs(tmp_path) as (pfs, hang):
        cluster = make_cluster(2, DIRECT, pfs=[pfs, pfs])
        mounts = [node.mountpoint for node in cluster.nodes]
        os.listdir(mounts[0])
        hang.touch()
        data = os.urandom(MIB)
        write_file(mounts[0] / "synced", data)
        write_file(mounts[0] / "closed", data, sync=False)
        for name in ("synced", "closed"):
            until_stage(mounts[1] / name, "partner")
            assert [route(mount / name) for mount in mounts] == ["partner", "partner"]
        cluster.kill_daemon(0)
        cluster.wipe(0, keep_catalogue=True)
        assert (mounts[1] / "synced").read_bytes() == (mounts[1] / "closed").read_bytes() == data
        hang.unlink()
        until_stage(mounts[1] / "synced", "pfs")


def test_what_the_pfs_refuses_goes_to_the_partner(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(3, DIRECT | {"fsync_timeout": "600"})
    mounts = [node.mountpoint for node in cluster.nodes]
    with pfs_away(cluster):  # its first drain fails: no patience with that
        write_file(mounts[0] / "refused", b"x" * MIB)
        until_stage(mounts[0] / "refused", "partner")
        assert route(mounts[1] / "refused") == "partner"
    until_stage(mounts[0] / "refused", "pfs")


def test_a_direct_file_that_is_lost_with_its_node_is_named(
    make_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    with hanging_pfs(tmp_path) as (pfs, hang):
        cluster = make_cluster(3, DIRECT | {"fsync_timeout": "600"}, pfs=[pfs] * 3)
        mounts = [node.mountpoint for node in cluster.nodes]
        os.listdir(mounts[0])
        hang.touch()
        write_file(mounts[0] / "f", b"x" * MIB, sync=False)
        assert [route(mount / "f") for mount in mounts] == ["direct"] * 3
        assert xattr(mounts[1] / "f", "stage") == "returned"
        cluster.kill_daemon(0)
        cluster.wipe(0, keep_catalogue=True)
        until_stage(mounts[1] / "f", "lost")
        assert "'direct'" in (xattr(mounts[1] / "f", "error") or "")


@pytest.mark.parametrize(("partner_s", "pfs_s", "chosen"), [(2.0, 0.2, "direct"), (0.05, 2.0, "partner")])
def test_auto_decides_once_for_a_directory_from_what_it_has_seen(
    partner_s: float, pfs_s: float, chosen: str, make_cluster: Callable[..., LocalCluster]
) -> None:
    cluster = make_cluster(2, AUTO, mounted=False)
    seed(cluster, 0, partner_s, pfs_s)
    seed(cluster, 1, pfs_s, partner_s)  # would decide otherwise
    cluster.mount()
    mounts = [node.mountpoint for node in cluster.nodes]
    until("it has been told", lambda: cluster.status(0).route_now == chosen)
    os.mkdir(mounts[0] / "step-1")
    for mount, name in itertools.product(mounts, ("a", "b")):
        write_file(mount / f"step-1/{name}-{mount.parent.name}", os.urandom(MIB))
    names = os.listdir(mounts[1] / "step-1")
    assert len(names) == 4
    assert {route(mount / "step-1" / name) for mount in mounts for name in names} == {chosen}
    assert "costs" in cluster.status(0).route_why


def test_auto_stays_with_the_partner_while_the_pfs_is_slow(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(2, AUTO | {"drain_bandwidth": "2M", "drain_workers": "1"})
    mount = cluster.nodes[0].mountpoint
    for number in range(15):
        os.mkdir(mount / f"step-{number}")
        write_file(mount / f"step-{number}/f", os.urandom(MIB))
        assert route(mount / f"step-{number}/f") == "partner"
        until_stage(mount / f"step-{number}/f", "pfs")
    assert cluster.status(0).route_now == "partner"
    assert "costs" in cluster.status(0).route_why


@pytest.mark.skipif(not usable(), reason="only root can make network namespaces")
def test_auto_takes_the_faster_route_leaves_it_without_the_pfs_and_comes_back(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = make_cluster(2, AUTO, mounted=False, namespaces=True)
    assert cluster.network
    seed(cluster, 0, 1.3, 0.2, OBSERVED_MIN - 3, 3 * MIB)  # not enough to decide
    cluster.mount()
    cluster.network.shape(0, "20mbit")
    mount = cluster.nodes[0].mountpoint
    steps = itertools.count()

    def saved() -> str | None:
        path = mount / f"step-{next(steps)}"
        path.mkdir()
        write_file(path / "f", os.urandom(3 * MIB))
        return route(path / "f")

    assert saved() == "partner"
    until("the partner's slow link is known", lambda: saved() == "direct")
    with pfs_away(cluster):
        until("the PFS is left", lambda: saved() == "partner")
        assert cluster.status(0).route_now == "partner"
    until("the PFS is back", lambda: saved() == "direct")
