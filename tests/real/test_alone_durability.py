"""One node: what is claimed survives what it says, a dead mount is no empty directory, nothing is dropped."""

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable

from real_support import Template, contents_below, pfs_away, raises_errno, until, until_stage, write_file

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr
from cachexfs.errors import EXIT_DONE, EXIT_NOT_DURABLE
from cachexfs.recovery.choice import decode_record

MIB = 1 << 20
#: What a mount without a daemon says: the second to the one request that was under way.
DEAD = (errno.ENOTCONN, errno.ECONNABORTED)


def test_fsync_alone_survives_the_loss_of_the_node(make_cluster: Callable[..., LocalCluster]) -> None:
    """``fsync`` resolves to ``pfs``; the bytes are there, under their name or a hidden one with its record."""
    cluster = make_cluster(1)
    data = os.urandom(3 * MIB + 17)
    write_file(cluster.nodes[0].mountpoint / "shard", data)
    cluster.kill(0)
    cluster.wipe(0)
    assert data in contents_below(cluster.pfs)


def lose_and_recover(cluster: LocalCluster) -> None:
    """The node goes with its memory; ``recover`` gives what it had fsynced its names."""
    cluster.kill(0)
    cluster.detach(0)
    cluster.wipe(0)
    assert cluster.run(0, "recover", "--to", str(cluster.pfs)).code == EXIT_DONE


def test_each_fsync_of_a_file_that_stays_open_takes_the_place_of_the_one_before(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    """A log that is fsynced after each line came back as its first line; every fsync left a copy of it on the PFS."""
    cluster = make_cluster(1)
    data = os.urandom(20 * 1000)
    with open(cluster.nodes[0].mountpoint / "log", "wb", buffering=0) as log:
        for at in range(0, len(data), 1000):
            log.write(data[at : at + 1000])
            os.fsync(log.fileno())
        assert contents_below(cluster.pfs).count(data) == 1
        assert [found for found in contents_below(cluster.pfs) if found and data.startswith(found)] == [data]
        cluster.kill(0)
        with contextlib.suppress(OSError):  # the mount is dead
            log.close()
    lose_and_recover(cluster)
    assert (cluster.pfs / "log").read_bytes() == data


def test_the_record_of_an_fsync_in_place_knows_the_bytes_of_the_one_before(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    """A crash between the exchange of record and bytes leaves the new record with the old bytes."""
    cluster = make_cluster(1)
    records = []
    with open(cluster.nodes[0].mountpoint / "f", "wb", buffering=0) as file:
        for data in (b"one", b"two"):
            os.pwrite(file.fileno(), data, 0)
            os.fsync(file.fileno())
            [path] = (cluster.pfs / ".cachexfs/tmp").rglob("*.rec")
            records.append(decode_record(path.read_bytes()))
    assert [record.before for record in records] == [(), (records[0].tree,)]


def test_what_was_fsynced_and_renamed_while_it_is_open_has_its_new_name(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    """write, fsync, rename, fsync of the directory, and the close comes later: it came back under the old name."""
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    (mount / "state").write_bytes(b"old")
    until_stage(mount / "state", "pfs")
    file, directory = os.open(mount / "state.tmp", os.O_CREAT | os.O_WRONLY), os.open(mount, os.O_RDONLY)
    os.write(file, b"new")
    os.fsync(file)
    os.rename(mount / "state.tmp", mount / "state")
    os.fsync(directory)
    cluster.kill(0)
    for fd in (file, directory):
        with contextlib.suppress(OSError):  # the mount is dead
            os.close(fd)
    lose_and_recover(cluster)
    assert {path.name: path.read_bytes() for path in cluster.pfs.iterdir() if path.is_file()} == {"state": b"new"}


def test_an_fsync_counts_though_an_earlier_content_lands_after_it(make_cluster: Callable[..., LocalCluster]) -> None:
    """``recover`` took the landed one for somebody else's, and called it a conflict."""
    cluster = make_cluster(1)
    path = cluster.nodes[0].mountpoint / "f"
    path.write_bytes(b"first")
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"second")
    os.fsync(fd)
    until("the first has landed", lambda: (cluster.pfs / "f").exists())
    cluster.kill(0)
    with contextlib.suppress(OSError):  # the mount is dead
        os.close(fd)
    lose_and_recover(cluster)
    assert (cluster.pfs / "f").read_bytes() == b"second"


def test_what_was_closed_is_there_after_kill_and_remount(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    with pfs_away(cluster):
        (mount / "d").mkdir()
        wanted = {f"d/f{number}": os.urandom(number * 40_000 + 1) for number in range(12)}
        for name, data in wanted.items():
            write_file(mount / name, data, sync=False)
        (mount / "d/f0").rename(mount / "d/renamed")
        wanted["d/renamed"] = wanted.pop("d/f0")
        (mount / "d/f1").unlink()
        del wanted["d/f1"]
        (mount / "link").symlink_to("d/f2")
        generations = {name: xattr(mount / name, "generation") for name in wanted}
        cluster.kill_daemon(0)
        with raises_errno(*DEAD):
            os.listdir(mount / "d")
    cluster.remount(0)
    assert {name: (mount / name).read_bytes() for name in wanted} == wanted
    assert {name: xattr(mount / name, "generation") for name in wanted} == generations
    assert sorted(os.listdir(mount / "d")) == sorted(name[2:] for name in wanted)
    assert os.readlink(mount / "link") == "d/f2"
    until_stage(mount, "pfs")


def test_a_daemon_killed_under_writers_loses_nothing_that_was_closed(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    closed: dict[str, bytes] = {}

    def write_on(thread: int) -> None:
        number = 0
        while True:
            name, data = f"t{thread}-{number}", os.urandom(1 + number * 1000)
            try:
                write_file(mount / name, data, sync=number % 3 == 0)
            except OSError:
                return
            closed[name] = data
            number += 1

    for _ in range(3):
        threads = [threading.Thread(target=write_on, args=(len(closed) * 10 + index,)) for index in range(3)]
        goal = len(closed) + 15
        for thread in threads:
            thread.start()
        until("some files closed", lambda goal=goal: len(closed) >= goal)
        cluster.kill_daemon(0)
        for thread in threads:
            thread.join()
        cluster.remount(0)
        wrong = [name for name, data in closed.items() if (mount / name).read_bytes() != data]
        assert not wrong
    cluster.umount()
    wrong = [name for name, data in closed.items() if (cluster.pfs / name).read_bytes() != data]
    assert not wrong


def test_a_dead_mount_is_an_error_and_not_an_empty_directory(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    (mount / "step-1").mkdir()
    cluster.kill(0)
    with raises_errno(*DEAD):
        os.listdir(mount)
    with raises_errno(*DEAD):
        os.open(mount / "step-2", os.O_CREAT | os.O_WRONLY)
    assert cluster.run(0, "status", str(mount)).code == 4
    cluster.remount(0)
    assert os.listdir(mount) == ["step-1"]


def test_umount_drains_everything_and_a_new_mount_shows_it(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template]
) -> None:
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    templates[0].save([mount], "run/step-1", sync=False)
    cluster.umount()
    assert templates[0].same_as(cluster.pfs / "run/step-1") == []
    assert cluster.left() == []
    assert os.listdir(mount) == []
    cluster.remount(0)
    assert templates[0].same_as(mount / "run/step-1") == []
    assert xattr(mount / "run/step-1", "restartable") == "pfs"
    assert xattr(mount, "pending") == "0"


def test_umount_without_the_pfs_fails_with_the_list_and_loses_nothing(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    with pfs_away(cluster):
        write_file(mount / "undrained", b"precious", sync=False)
        ended = cluster.run(0, "umount", str(mount), "--timeout", "2")
        assert ended.code == EXIT_NOT_DURABLE
        assert "undrained" in ended.out + ended.err
    if not os.path.ismount(mount):
        cluster.remount(0)
    until_stage(mount / "undrained", "pfs")
    assert (cluster.pfs / "undrained").read_bytes() == b"precious"


def test_an_unreachable_pfs_stops_no_write_is_told_and_catches_up(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    (mount / "before").write_bytes(b"1")
    until_stage(mount, "pfs")
    assert cluster.run(0, "status", str(mount)).code == EXIT_DONE
    with pfs_away(cluster):
        (mount / "during").write_bytes(b"2")
        (mount / "sub").mkdir()
        (mount / "before").rename(mount / "sub/before")
        until("an error is shown", lambda: xattr(mount / "during", "error") is not None)
        assert xattr(mount / "during", "stage") == "returned"
        assert cluster.status(0).pfs_state == "unreachable"
        told = cluster.run(0, "status", str(mount))
        assert told.code == EXIT_NOT_DURABLE
        errors = [line for line in told.out.splitlines() if "unreachable" in line and "wait" in line]
        assert len(errors) == 1, told.out
        assert "land by themselves" in errors[0]
        assert not [line for line in told.out.splitlines() if "during" in line and "try" in line]
        explained = cluster.run(0, "explain", str(mount / "during")).out
        assert "unreachable since" in explained
        assert "lands by itself" in explained
        assert (mount / "sub/before").read_bytes() == b"1"
        assert sorted(os.listdir(mount)) == ["during", "sub"]
    until_stage(mount, "pfs")
    assert xattr(mount / "during", "error") is None
    assert (cluster.pfs / "during").read_bytes() == b"2"
    assert (cluster.pfs / "sub/before").read_bytes() == b"1"
    assert not (cluster.pfs / "before").exists()


def test_a_rename_is_not_at_pfs_before_the_new_name_is_there(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    (mount / "old").write_bytes(b"x")
    until_stage(mount / "old", "pfs")
    with pfs_away(cluster):
        (mount / "old").rename(mount / "new")
        assert xattr(mount / "new", "stage") == "returned"
        assert xattr(mount / "new", "t.pfs") is None
    until_stage(mount / "new", "pfs")
    assert os.listdir(mount) == ["new"]
    assert (cluster.pfs / "new").read_bytes() == b"x"
    assert not (cluster.pfs / "old").exists()


def test_fsync_fails_at_its_deadline_when_the_pfs_is_away(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1, {"fsync_timeout": "1"})
    mount = cluster.nodes[0].mountpoint
    with pfs_away(cluster):
        fd = os.open(mount / "f", os.O_CREAT | os.O_WRONLY)
        os.write(fd, b"x")
        with raises_errno(errno.EIO):
            os.fsync(fd)
        os.close(fd)
    until_stage(mount / "f", "pfs")


def test_a_full_staging_is_enospc_and_works_again_once_drained(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1, {"memory": "8M", "full_timeout": "1", "spill": "off"})
    mount = cluster.nodes[0].mountpoint
    with pfs_away(cluster):
        (mount / "kept").write_bytes(bytes(4 * MIB))
        with raises_errno(errno.ENOSPC), (mount / "big").open("wb", buffering=0) as file:
            for _ in range(32):
                file.write(bytes(MIB))
        (mount / "big").unlink()
        assert (mount / "kept").read_bytes() == bytes(4 * MIB)
    until_stage(mount / "kept", "pfs")
    for number in range(4):  # four times the staging in all: what is on the PFS makes room
        (mount / f"more-{number}").write_bytes(bytes([number]) * (6 * MIB))
        until_stage(mount / f"more-{number}", "pfs")
    for number in range(4):
        assert (mount / f"more-{number}").read_bytes() == bytes([number]) * (6 * MIB)


def test_what_is_on_the_pfs_already_is_served_and_replaced_whole(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1, mounted=False)
    (cluster.pfs / "old/deep").mkdir(parents=True)
    (cluster.pfs / "old/deep/f").write_bytes(b"from before")
    (cluster.pfs / "old/deep/f").chmod(0o640)
    os.utime(cluster.pfs / "old/deep/f", ns=(10**18, 10**18))
    (cluster.pfs / "link").symlink_to("old/deep/f")
    cluster.mount()
    mount = cluster.nodes[0].mountpoint
    assert (mount / "old/deep/f").read_bytes() == b"from before"
    status = (mount / "old/deep/f").stat()
    assert (status.st_mode & 0o7777, status.st_mtime_ns) == (0o640, 10**18)
    assert os.readlink(mount / "link") == "old/deep/f"
    assert xattr(mount / "old", "stage") == "pfs"
    before = (cluster.pfs / "old/deep/f").stat().st_ino
    with (mount / "old/deep/f").open("r+b") as file:
        file.write(b"FROM")
    until_stage(mount / "old/deep/f", "pfs")
    assert (cluster.pfs / "old/deep/f").read_bytes() == b"FROM before"
    assert (cluster.pfs / "old/deep/f").stat().st_ino != before
    shutil.rmtree(mount / "old")
    until("removed on the PFS", lambda: not (cluster.pfs / "old").exists())


def test_the_bare_directory_of_a_dead_mount_refuses_writes(make_cluster: Callable[..., LocalCluster]) -> None:
    """When somebody has taken a dead mount away, nothing may land on the root disk in silence."""
    cluster = make_cluster(1)
    mount = cluster.nodes[0].mountpoint
    cluster.kill(0)
    cluster.detach(0)
    with raises_errno(errno.EPERM, errno.EACCES, errno.EROFS):
        os.open(mount / "checkpoint", os.O_CREAT | os.O_WRONLY)
    cluster.remount(0)
    (mount / "checkpoint").write_bytes(b"x")
