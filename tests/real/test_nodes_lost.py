"""Nodes that are lost: a claim is checked by destroying what it says it survives, and reading the bytes back."""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from real_support import Template, pfs_away, raises_errno, until, until_stage, write_file

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr
from cachexfs.errors import EXIT_NO, EXIT_NOT_DURABLE

HERE = Path(__file__).parent
MIB = 1 << 20
OPTIONS = {"node_timeout": "2"}
SIZES = (0, 1, 4096, MIB - 1, MIB, 3 * MIB + 7)


def test_partner_survives_the_loss_of_the_node_that_wrote(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(4, OPTIONS)
    mounts = [node.mountpoint for node in cluster.nodes]
    with pfs_away(cluster):  # nothing can be at pfs: the claim is about the partner alone
        (mounts[0] / "d").mkdir()
        wanted = {f"d/f{size}": os.urandom(size) for size in SIZES}
        for name, data in wanted.items():
            write_file(mounts[0] / name, data, sync=False)
            (mounts[0] / name).chmod(0o640)
            os.utime(mounts[0] / name, ns=(10**18, 10**18 + 1))
        for name in wanted:
            until_stage(mounts[0] / name, "partner")
        cluster.kill(0)
        cluster.wipe(0)
        for mount in mounts[1:]:
            assert {name: (mount / name).read_bytes() for name in wanted} == wanted
            stats = [(mount / name).stat() for name in wanted]
            assert {(status.st_mode & 0o7777, status.st_mtime_ns) for status in stats} == {(0o640, 10**18 + 1)}
    until_stage(mounts[1] / "d", "pfs")  # a survivor finishes the lost node's drains
    assert {name: (cluster.pfs / name).read_bytes() for name in wanted} == wanted


def test_fsync_survives_the_loss_of_the_node_at_once(make_cluster: Callable[..., LocalCluster]) -> None:
    """Closed or still open when the node dies: what fsync returned for is there."""
    cluster = make_cluster(3, OPTIONS)
    mounts = [node.mountpoint for node in cluster.nodes]
    data = os.urandom(2 * MIB + 3)
    with pfs_away(cluster):
        write_file(mounts[0] / "closed", data)
        fd = os.open(mounts[0] / "open", os.O_CREAT | os.O_WRONLY)
        try:
            os.write(fd, data)
            os.fsync(fd)
            os.write(fd, b"not covered by the fsync")
            cluster.kill(0)
        finally:
            with contextlib.suppress(OSError):  # the mount is dead
                os.close(fd)
        cluster.wipe(0)
        for mount in mounts[1:]:
            assert (mount / "closed").read_bytes() == data
            until("published as of the last fsync", lambda m=mount: _read(m / "open") == data)


@pytest.mark.parametrize("was_closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_what_was_fsynced_survives_a_node_that_dies_in_the_next_fsync(
    make_cluster: Callable[..., LocalCluster],
    passthrough: str,
    was_closed: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The partner had the next bytes in place of those that the catalogue spoke of: the file was lost."""
    monkeypatch.setenv("DYING", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{HERE / 'dying'}:{os.environ.get('PYTHONPATH', HERE.parents[1])}")
    cluster = make_cluster(3, {**OPTIONS, "supervisor": "on", "passthrough": passthrough})
    mounts = [node.mountpoint for node in cluster.nodes]
    first, second = os.urandom(MIB + 3), os.urandom(MIB)
    with pfs_away(cluster):
        file = (mounts[0] / "f").open("wb", buffering=0)
        file.write(first)
        os.fsync(file.fileno())
        if was_closed:
            file.close()
            file = (mounts[0] / "f").open("ab", buffering=0)
        else:
            file.seek(0)
        file.write(second)
        (tmp_path / "hold").touch()
        (tmp_path / "die-noting").touch()
        syncing = threading.Thread(target=_sync, args=(file.fileno(),))
        syncing.start()
        until("the daemon is dead", (tmp_path / "died").exists)
        cluster.kill(0)
        syncing.join()
        with contextlib.suppress(OSError):  # the mount is dead
            file.close()
        cluster.wipe(0)
        for mount in mounts[1:]:
            after = first + second if was_closed else second + first[MIB:]
            until("there", lambda m=mount, a=after: _read(m / "f") in (first, a))


def test_what_was_fsynced_survives_a_node_that_is_lost_while_no_daemon_looks(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    """The others' daemons were dead, too, when its lease ended: it stayed as it was, empty and \"being written\"."""
    cluster = make_cluster(3, {**OPTIONS, "supervisor": "off"})
    mounts = [node.mountpoint for node in cluster.nodes]
    with pfs_away(cluster):
        with (mounts[0] / "f").open("wb", buffering=0) as file:
            file.write(b"bytes")
            os.fsync(file.fileno())
            for index in 1, 2:
                cluster.kill_daemon(index)  # its etcd lives on
            cluster.kill(0)
            with contextlib.suppress(OSError):  # the mount is dead
                file.close()
        cluster.wipe(0)
        time.sleep(3 * float(OPTIONS["node_timeout"]))
        cluster.mount([1, 2])
        for mount in mounts[1:]:
            until("there", lambda m=mount: _read(m / "f") == b"bytes")


def test_a_reader_waits_for_the_next_daemon_of_those_that_have_the_bytes(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = make_cluster(3, {"supervisor": "on"})
    mounts = [node.mountpoint for node in cluster.nodes]
    data = os.urandom(MIB + 3)
    with pfs_away(cluster):
        write_file(mounts[1] / "f", data)
        with (mounts[0] / "f").open("rb") as file:
            for index in 1, 2:
                cluster.kill_daemon(index)
            assert file.read() == data


def _sync(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.fsync(fd)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def test_losing_the_partner_lowers_the_claim_until_there_is_another(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = make_cluster(4, OPTIONS)
    mounts = [node.mountpoint for node in cluster.nodes]
    data = os.urandom(MIB)
    with pfs_away(cluster):
        write_file(mounts[0] / "f", data)
        partner = cluster.status(0).partner
        assert partner is not None
        first = xattr(mounts[0] / "f", "t.partner")
        lost = int(partner.removeprefix("n"))
        cluster.kill(lost)
        cluster.wipe(lost)
        until("the claim is made anew", lambda: xattr(mounts[0] / "f", "t.partner") not in (None, first))
        assert xattr(mounts[0] / "f", "stage") == "partner"
        assert cluster.status(0).partner not in (None, partner)
        cluster.kill_daemon(0)  # its etcd member lives: with n1's it would be the majority
        cluster.wipe(0, keep_catalogue=True)
        survivor = next(index for index in range(1, 4) if index != lost)
        assert (mounts[survivor] / "f").read_bytes() == data


def test_without_a_majority_changes_fail_and_the_daemon_has_not_failed(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    """``status`` said "the daemon has failed" until its end, because of a write to, and a close of, an open file."""
    cluster = make_cluster(2, OPTIONS | {"fsync_timeout": "4"})
    mount = cluster.nodes[0].mountpoint
    for name in ("published", "new"):
        (mount / name).write_bytes(b"before")
    rewritten, new = os.open(mount / "published", os.O_RDWR), os.open(mount / "new", os.O_WRONLY | os.O_TRUNC)
    os.write(new, b"after")
    cluster.kill(1)
    with raises_errno(errno.EIO):
        os.write(rewritten, b"after")
    with raises_errno(errno.EIO):
        os.close(new)
    os.close(rewritten)
    until("what the kernel still releases", lambda: "could not be published" in str(cluster.status(0).errors))
    assert cluster.status(0).failed is None


def test_a_claim_that_nobody_can_vouch_for_falls(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    """Two nodes, the partner dies: without a majority its death is no news, and 'partner' was claimed all the same."""
    cluster = make_cluster(2, OPTIONS | {"fsync_timeout": "4"})
    path, step = (cluster.nodes[0].mountpoint / name for name in ("f", "step-1"))
    with pfs_away(cluster):
        write_file(path, b"x" * MIB)
        templates[0].save([node.mountpoint for node in cluster.nodes], "step-1")
        assert xattr(path, "stage") == xattr(step, "restartable") == "partner"
        assert xattr(step, "t.partner") is not None
        cluster.kill(1)
        until_stage(path, "returned")
        assert xattr(path, "t.partner") is None
        until("no claim of the checkpoint", lambda: xattr(step, "restartable") in ("returned", "no"))
        assert xattr(step, "t.partner") is None
        fd = os.open(path, os.O_RDONLY)
        with raises_errno(errno.EIO):
            os.fsync(fd)
        os.close(fd)
        status = cluster.status(0)
        assert not status.protected
        assert "no word from the others" in cluster.run(0, "status", str(cluster.nodes[0].mountpoint)).out
        assert "recover --dead" in str(status.errors)
        cluster.remount(1)
        until_stage(path, "partner")


def test_status_tells_that_a_node_is_lost(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(3, OPTIONS)
    assert {node.name for node in cluster.status(1).nodes if node.live} == {"n0", "n1", "n2"}
    cluster.kill(2)
    until("n2 counts as lost", lambda: {n.name for n in cluster.status(1).nodes if not n.live} == {"n2"})


def test_a_checkpoint_is_restartable_from_survivors_without_the_pfs(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    cluster = make_cluster(4, OPTIONS)
    mounts = [node.mountpoint for node in cluster.nodes]
    with pfs_away(cluster):
        templates[0].save(mounts, "ckpt/step-1")
        until("restartable at partner", lambda: xattr(mounts[1] / "ckpt/step-1", "restartable") == "partner")
        cluster.kill(0)
        cluster.wipe(0)
        for mount in mounts[1:]:
            assert templates[0].same_as(mount / "ckpt/step-1") == []
        latest = cluster.run(1, "latest", str(mounts[1] / "ckpt"))
        assert (latest.code, latest.out.strip()) == (0, str(mounts[1] / "ckpt/step-1"))
    until("on the PFS", lambda: xattr(mounts[1] / "ckpt/step-1", "restartable") == "pfs")
    assert templates[0].same_as(cluster.pfs / "ckpt/step-1") == []


def test_a_file_that_nobody_has_any_more_is_named_and_its_checkpoint_not_restartable(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    """Both copies of two shards are destroyed at once; catalogue and commit file live, so that somebody can tell."""
    cluster = make_cluster(4, OPTIONS)
    mounts = [node.mountpoint for node in cluster.nodes]
    with pfs_away(cluster):
        partner = int((cluster.status(0).partner or "").removeprefix("n"))
        survivor = next(index for index in range(1, 4) if index != partner)
        templates[0].save([mounts[survivor], mounts[0]], "step-1")
        until("restartable at partner", lambda: xattr(mounts[survivor] / "step-1", "restartable") == "partner")
        for index in (0, partner):
            cluster.kill_daemon(index)
            cluster.wipe(index, keep_catalogue=True)
        directory = mounts[survivor] / "step-1"
        lost = [name for name in templates[0].shards() if xattr(directory / name, "origin") == "n0"]
        assert len(lost) == 2
        until("not restartable", lambda: xattr(directory, "restartable") == "no")
        until("the lost are named", lambda: all(name in (xattr(directory, "missing") or "") for name in lost))
        with raises_errno(errno.EIO):
            (directory / lost[0]).read_bytes()
        status = cluster.run(survivor, "status", str(mounts[survivor]))
        assert status.code == EXIT_NOT_DURABLE
        assert cluster.run(survivor, "latest", str(mounts[survivor])).code == EXIT_NO


@pytest.mark.parametrize(("victim", "node_timeout"), [(0, "2"), (1, "10"), (2, "2")])
def test_a_killed_daemon_comes_back_with_what_was_claimed(
    make_cluster: Callable[..., LocalCluster], victim: int, node_timeout: str
) -> None:
    """kill -9 under writers on all nodes, remount: every claim read before the kill holds on every node."""
    cluster = make_cluster(3, {"node_timeout": node_timeout})
    mounts = [node.mountpoint for node in cluster.nodes]
    claims: dict[str, tuple[str, bytes]] = {}
    stop = threading.Event()

    def write_on(index: int) -> None:
        number = 0
        while not stop.is_set():
            name, data = f"n{index}-{number}", os.urandom(20_000 + number)
            try:
                write_file(mounts[index] / name, data, sync=number % 2 == 0)
                claims[name] = (xattr(mounts[index] / name, "stage") or "", data)
            except OSError:
                if index == victim:
                    return
                raise
            number += 1

    threads = [threading.Thread(target=write_on, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    until("files are claimed", lambda: all(f"n{index}-7" in claims for index in range(3)))
    cluster.kill_daemon(victim)
    threads[victim].join()
    stop.set()
    for thread in threads:
        thread.join()
    cluster.remount(victim)
    assert {stage for stage, _ in claims.values()} <= {"returned", "partner", "pfs"}
    for mount in mounts:
        wrong = [name for name, (_, data) in claims.items() if (mount / name).read_bytes() != data]
        assert not wrong, mount
    cluster.umount()
    wrong = [name for name, (_, data) in claims.items() if (cluster.pfs / name).read_bytes() != data]
    assert not wrong


def test_a_commit_file_whose_member_is_lost_is_not_offered(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    """A shard's node and its partner are gone before the PFS had it: frameworks must not take the checkpoint."""
    cluster = make_cluster(5, OPTIONS)  # the catalogue's three members live
    mounts = [node.mountpoint for node in cluster.nodes]
    with pfs_away(cluster):
        templates[0].save(mounts[:1], "step-1")
        lost = templates[0].shards()[0]
        (mounts[3] / "step-1" / lost).unlink()
        write_file(mounts[3] / "step-1" / lost, templates[0].files[lost], sync=False)
        write_file(mounts[0] / "step-1/.metadata.tmp", templates[0].files[".metadata"], sync=False)
        os.rename(mounts[0] / "step-1/.metadata.tmp", mounts[0] / "step-1/.metadata")
        until_stage(mounts[0] / "step-1", "partner")
        partner = next(h for h in (xattr(mounts[0] / "step-1" / lost, "holders") or "").split(",") if "nvme" in h)
        for index in (3, int(partner.partition(":")[0].removeprefix("n"))):
            cluster.kill(index)
            cluster.wipe(index)
        left = next(index for index in (0, 1, 2) if not partner.startswith(f"n{index}:"))
        directory = mounts[left] / "step-1"
        until("withheld", lambda: ".metadata" not in os.listdir(directory))
        assert not (directory / ".metadata").exists()
        assert sorted(os.listdir(directory)) == sorted(templates[0].shards())
        assert xattr(directory / lost, "stage") == "lost"
        status = cluster.run(left, "status")
        assert status.code == EXIT_NOT_DURABLE
        assert f"step-1/{lost}" in status.out
        assert "hidden in the mount" in status.out
        assert cluster.run(left, "latest", mounts[left]).code == EXIT_NO
    rest = len(templates[0].shards()) - 1
    until("the rest lands", lambda: len(list(cluster.pfs.glob("step-1/*.distcp"))) == rest)
    assert not (cluster.pfs / "step-1/.metadata").exists()


def test_an_old_replica_of_a_file_that_has_grown_since_tells_nothing_of_the_others_copies(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    """The node that was away compared the others' copies, and the PFS's, with its own manifest, and all claims fell."""
    cluster = make_cluster(3, OPTIONS)
    mounts = [node.mountpoint for node in cluster.nodes]
    data = os.urandom(3 * MIB)
    (mounts[0] / "f").write_bytes(data)
    until_stage(mounts[0] / "f", "pfs")
    away = next(n for n in (1, 2) if f"n{n}:nvme" in str(xattr(mounts[0] / "f", "holders")))
    cluster.kill(away)
    with pfs_away(cluster):
        with (mounts[0] / "f").open("ab") as file:
            file.write(data)
        until_stage(mounts[0] / "f", "partner")
        cluster.remount(away)
        held = xattr(mounts[0] / "f", "holders")
        assert (mounts[away] / "f").read_bytes() == data + data
        assert xattr(mounts[0] / "f", "holders") == held
    until_stage(mounts[0] / "f", "pfs")
