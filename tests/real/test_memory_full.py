"""Memory full: eviction, spill to NVMe, files larger than staging, spare memory; by handler and by passthrough."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from real_support import memory_below, pfs_away, raises_errno, until, until_stage

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr

MIB = 1 << 20
MEMORY_MIB = {"off": 32, "auto": 320}  # passthrough needs room
MODES = tuple(MEMORY_MIB)


def of_memory(cluster: LocalCluster, share: float) -> int:
    """MiB that are a share of a cluster's staging."""
    return int(int(cluster.options(0)["memory"].rstrip("M")) * share)


def put(path: Path, mib: int, seed: int = 0, after: Callable[[], object] = lambda: None) -> str:
    """Write a file of that size in pieces of 1 MiB, ``after`` each of which something is done; its SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for number in range(mib):
            piece = hashlib.sha256(b"%d.%d" % (seed, number)).digest() * (MIB // 32)
            digest.update(piece)
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]  # short before ENOSPC
            after()
    return digest.hexdigest()


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def spilled(cluster: LocalCluster) -> list[Path]:
    where = cluster.options(0)["spill"]
    return [path for path in Path(where).rglob("*") if path.is_file()]


@pytest.fixture(params=MODES)
def small(request: pytest.FixtureRequest, make_cluster: Callable[..., LocalCluster], tmp_path: Path) -> LocalCluster:
    """One node with little memory and a spill directory."""
    options = {
        "memory": f"{MEMORY_MIB[request.param]}M",
        "passthrough": request.param,
        "full_timeout": "20",
        "supervisor": "auto",
    }
    cluster = make_cluster(1, options | {"spill": str(tmp_path)}, mounted=False)
    cluster.node_options[0] = {"staging": None} if request.param == "auto" else {}
    cluster.mount()
    return cluster


def test_what_is_on_the_pfs_stays_in_a_small_memory_that_has_room(small: LocalCluster) -> None:
    first, second = (small.nodes[0].mountpoint / name for name in "ab")
    put(first, of_memory(small, 0.4))
    until_stage(first, "pfs")
    put(second, 1)
    until_stage(second, "pfs")
    assert "memory" in (xattr(first, "holders") or "")


def test_a_file_larger_than_staging_is_written_read_changed_and_drained(small: LocalCluster) -> None:
    path = small.nodes[0].mountpoint / "big"
    with pfs_away(small):
        size = of_memory(small, 1.5)
        whole = put(path, size)
        assert (xattr(path, "stage"), path.stat().st_size) == ("returned", size * MIB)
        assert digest(path) == whole
        with path.open("r+b") as file:
            file.seek(5 * MIB)
            file.write(b"changed")
            file.seek(0, os.SEEK_END)
            file.write(b"the end")
        assert spilled(small)
        changed = digest(path)
        assert changed != whole
    until_stage(path, "pfs")
    assert digest(small.pfs / "big") == changed == digest(path)


def test_many_files_in_twice_the_memory(small: LocalCluster) -> None:
    mount = small.nodes[0].mountpoint
    with pfs_away(small):
        size = of_memory(small, 0.25)
        sums = {f"f{number}": put(mount / f"f{number}", size, number) for number in range(8)}
        assert spilled(small)
        assert {name: digest(mount / name) for name in sums} == sums
    for name in sums:
        until_stage(mount / name, "pfs")
    assert {name: digest(small.pfs / name) for name in sums} == sums
    assert {name: digest(mount / name) for name in sums} == sums


def test_what_was_spilled_outlives_the_daemon(small: LocalCluster) -> None:
    mount = small.nodes[0].mountpoint
    with pfs_away(small):
        size = of_memory(small, 0.3)
        sums = {f"f{number}": put(mount / f"f{number}", size, number) for number in range(4)}
        with (mount / "open").open("wb", buffering=0) as file:
            for _ in range(size):
                file.write(bytes(MIB))
            small.kill_daemon(0)
            file.write(b"and on")
        assert (mount / "open").stat().st_size == size * MIB + 6
        assert {name: digest(mount / name) for name in sums} == sums
        assert spilled(small)
    for name in (*sums, "open"):
        until_stage(mount / name, "pfs")
    assert {name: digest(small.pfs / name) for name in sums} == sums


def test_a_clean_end_leaves_nothing_on_nvme(small: LocalCluster) -> None:
    size = of_memory(small, 1.5)
    put(small.nodes[0].mountpoint / "big", size)
    small.umount()
    assert spilled(small) == []
    assert (small.pfs / "big").stat().st_size == size * MIB


@contextmanager
def full_disk(directory: Path, mib: int) -> Iterator[None]:
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "small-disk", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_full_nvme_is_said_and_loses_nothing(
    mode: str, make_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    with full_disk(tmp_path / "disk", 280):  # 256 MiB are left free for replicas
        options = {"memory": "32M", "passthrough": mode, "full_timeout": "1", "spill": str(tmp_path / "disk")}
        cluster = make_cluster(1, options)
        mount = cluster.nodes[0].mountpoint
        with pfs_away(cluster):
            kept = put(mount / "kept", 30)
            with raises_errno(errno.ENOSPC):
                put(mount / "big", 200)
            assert "staging is full" in cluster.run(0, "status", str(mount)).out
            assert digest(mount / "kept") == kept
        until_stage(mount / "kept", "pfs")
        assert digest(cluster.pfs / "kept") == kept
        (mount / "big").unlink()
        again = put(mount / "again", 20)
        until_stage(mount / "again", "pfs")
        assert digest(mount / "again") == again
        cluster.umount()


def test_an_nvme_that_became_read_only_costs_nothing_that_was_there(
    make_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    """Which is what the kernel does with a filesystem whose device fails."""
    with full_disk(tmp_path / "disk", 512):
        options = {"memory": "32M", "passthrough": "off", "full_timeout": "1", "spill": str(tmp_path / "disk")}
        cluster = make_cluster(1, options | {"fsync": "returned", "supervisor": "auto"})
        mount = cluster.nodes[0].mountpoint
        with pfs_away(cluster):
            sums = {f"f{number}": put(mount / f"f{number}", 12, number) for number in range(6)}
            subprocess.run(["mount", "-o", "remount,ro", tmp_path / "disk"], check=True)
            (mount / "f0").unlink()  # its bytes are there: nobody can remove them, and nobody waits for that
            del sums["f0"]
            put(mount / "f7", 4)
            (mount / "f7").unlink()
            cluster.kill_daemon(0)
            assert {name: digest(mount / name) for name in sums} == sums
            with raises_errno(errno.ENOSPC):
                put(mount / "more", 60)
            assert "NVMe" in cluster.run(0, "status", str(mount)).out
        for name in sums:
            until_stage(mount / name, "pfs")
        assert {name: digest(cluster.pfs / name) for name in sums} == sums
        assert not (cluster.pfs / "f0").exists()
        cluster.umount()


def test_memory_comes_down_to_its_limit_once_a_larger_file_is_closed(small: LocalCluster) -> None:
    """By passthrough it may pass the limit; it stayed there until the next writer asked for room."""
    node = small.nodes[0]
    with pfs_away(small):
        wanted = put(node.mountpoint / "large", of_memory(small, 1.5))
        until(
            "within the limit", lambda: memory_below(node.staging) <= of_memory(small, 1) * MIB + 2 * MIB
        )  # the journal, small files
        assert digest(node.mountpoint / "large") == wanted


def test_removed_files_leave_their_memory_to_the_next_and_it_never_passes_the_limit(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = make_cluster(1, {"memory": "256M", "passthrough": "off"})
    node = cluster.nodes[0]
    for turn in range(6):
        sums = [put(node.mountpoint / f"f{number}", 24, turn * 10 + number) for number in range(4)]
        assert [digest(node.mountpoint / f"f{number}") for number in range(4)] == sums
        until_stage(node.mountpoint, "pfs")
        held = memory_below(node.staging)
        assert held <= 256 * MIB + MIB  # and the journal
        for number in range(4):
            (node.mountpoint / f"f{number}").unlink()
    until("spare memory", lambda: any((Path(node.staging) / "spare").iterdir()))


def test_a_reader_of_a_removed_file_keeps_its_bytes(make_cluster: Callable[..., LocalCluster]) -> None:
    """Its memory is not spare while anybody has it open."""
    cluster = make_cluster(1, {"memory": "256M", "passthrough": "auto"})
    mount = cluster.nodes[0].mountpoint
    wanted = put(mount / "a", 32)
    with (mount / "a").open("rb") as reader:
        (mount / "a").unlink()
        for number in range(8):
            put(mount / "b", 32, number)
        assert hashlib.file_digest(reader, "sha256").hexdigest() == wanted


def test_memory_is_made_ready_while_nothing_is_written(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1, {"memory": "256M", "prefault": "64M", "passthrough": "off"})
    node = cluster.nodes[0]

    def ready() -> int:
        return memory_below(node.staging / "spare")

    until("64 MiB are ready", lambda: ready() == 64 * MIB)
    seen: list[int] = []
    first = put(node.mountpoint / "a", 60, after=lambda: seen.append(ready()))
    assert min(seen) < 64 * MIB
    assert digest(node.mountpoint / "a") == first
    cluster.kill_daemon(0)
    cluster.remount(0)
    assert digest(node.mountpoint / "a") == first
    until("64 MiB are ready again", lambda: ready() >= 64 * MIB)
    held = memory_below(node.staging)
    assert held <= 256 * MIB + MIB


def test_a_first_read_takes_memory_that_is_ready_and_a_second_none(make_cluster: Callable[..., LocalCluster]) -> None:
    """The kernel's page cache grows by what is read; memory that nobody has touched costs more than the copy."""
    cluster = make_cluster(1, {"memory": "256M", "prefault": "64M", "passthrough": "off"})
    node = cluster.nodes[0]
    wanted = put(node.mountpoint / "a", 24)

    def ready() -> int:
        return memory_below(node.staging / "spare")

    until("64 MiB are ready", lambda: ready() == 64 * MIB)
    with (node.mountpoint / "a").open("rb") as reader:
        assert hashlib.file_digest(reader, "sha256").hexdigest() == wanted
        assert ready() <= 48 * MIB
        until("64 MiB are ready again", lambda: ready() == 64 * MIB)
        reader.seek(0)
        assert hashlib.file_digest(reader, "sha256").hexdigest() == wanted
        assert ready() == 64 * MIB, "it was in the page cache"


def read_error(path: Path) -> int:
    """The errno that reading a file gives; 0 if it can be read."""
    try:
        digest(path)
    except OSError as error:
        return error.errno or 0
    return 0


def test_a_spill_directory_that_somebody_removed_is_said_and_not_claimed(
    make_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    options = {"memory": "32M", "passthrough": "off", "full_timeout": "1", "spill": str(tmp_path / "spill")}
    cluster = make_cluster(1, options | {"fsync": "returned"})
    mount = cluster.nodes[0].mountpoint
    with pfs_away(cluster):
        for number in range(4):
            put(mount / f"f{number}", 12, number)
        gone = {path.stat().st_ino for path in spilled(cluster)}
        shutil.rmtree(tmp_path / "spill")
        assert gone
        errors = 0
        for path in sorted(mount.iterdir()):
            code = read_error(path)
            if code:
                errors += 1
                assert code == errno.EIO
                until("it is lost", lambda: xattr(path, "stage") == "lost")  # noqa: B023
        assert errors == len(gone)
        status = cluster.run(0, "status", str(mount))
        assert (status.code, status.out.count("lost: ")) == (3, errors)
    ended = cluster.run(0, "umount", str(mount), "--timeout", "10", "--json")
    lost = [item for item in json.loads(ended.out)["left"] if "lost: " in item["reason"]]
    assert (ended.code, len(lost), "lost: " in ended.err) == (3, errors, True)


def test_nothing_is_evicted_to_a_pfs_that_is_away_while_nvme_has_room(small: LocalCluster) -> None:
    mount = small.nodes[0].mountpoint
    size = of_memory(small, 0.4)
    sums = {f"f{number}": put(mount / f"f{number}", size, number) for number in range(2)}
    for name in sums:
        until_stage(mount / name, "pfs")
    with pfs_away(small):
        (mount / "other").touch()  # its drain sees at once what would be looked for every ten seconds
        until("the PFS is seen to be away", lambda: small.status(0).pfs_state != "ok")
        sums["more"] = put(mount / "more", size, 9)
        sums["again"] = put(mount / "again", size, 10)
        assert {name: digest(mount / name) for name in sums} == sums
