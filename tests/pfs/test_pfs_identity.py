"""Not there is not the same as does not exist: the directory must be the one that was mounted."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from pfs_support import ATTRS, LONG_S, FaultMount, command, running

from cachexfs.adapters.pfs_pool import PfsPool

MakeTmpfs = Callable[..., Path]


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[MakeTmpfs]:
    """Mount small tmpfs."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    mounted: list[Path] = []

    def mount(path: Path, options: str = "size=4M") -> Path:
        path.mkdir(exist_ok=True)
        command("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path))
        mounted.append(path)
        return path

    yield mount
    for path in reversed(mounted):
        subprocess.run(["umount", "-l", str(path)], check=False, stderr=subprocess.DEVNULL)


def mutations(pool: PfsPool, source: Path) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "prepare": lambda: pool.prepare(str(source), 10, "h2", ATTRS, b"", LONG_S),
        "land": lambda: pool.land("h", b"f", ATTRS, LONG_S),
        "discard": lambda: pool.discard("h", LONG_S),
        "mkdir": lambda: pool.run("mkdir", b"d", b"", ATTRS, LONG_S),
        "unlink": lambda: pool.run("unlink", b"f", b"", None, LONG_S),
        "probe": pool.probe,
    }


@pytest.mark.parametrize("operation", ["prepare", "land", "discard", "mkdir", "unlink", "probe"])
async def test_nothing_is_written_beneath_an_unmounted_pfs(
    tmp_path: Path, tmpfs: MakeTmpfs, source: Path, operation: str
) -> None:
    point = tmpfs(tmp_path / "pfs")
    async with running(PfsPool(str(point))) as pool:
        await pool.prepare(str(source), 10, "h", ATTRS, b"", LONG_S)
        command("umount", str(point))
        with pytest.raises(OSError, match="PFS_DIR is not the directory that was mounted") as caught:
            await mutations(pool, source)[operation]()
        assert caught.value.errno == errno.ESTALE
        assert pool.state == "unreachable"
        assert os.listdir(point) == []
        with pytest.raises(OSError, match="is not the directory"):
            await pool.listing(b"", LONG_S)  # an empty answer would be a lie


async def test_a_directory_in_its_place_is_refused_even_with_the_same_inode(pfs_dir: Path, source: Path) -> None:
    """ext4 gives a new directory the number of the one just removed: only the token tells them apart. Here the number
    stays and the token goes."""
    async with running(PfsPool(str(pfs_dir))) as pool:
        identity = await pool.probe()
        shutil.rmtree(pfs_dir / ".cachexfs")
        assert (pfs_dir.stat().st_dev, pfs_dir.stat().st_ino) == (identity.dev, identity.ino)
        with pytest.raises(OSError, match=r"no \.cachexfs/id"):
            await pool.prepare(str(source), 10, "h", ATTRS, b"", LONG_S)
        assert os.listdir(pfs_dir) == []


async def test_another_mounts_directory_is_refused(pfs_dir: Path, tmp_path: Path, source: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    async with running(PfsPool(str(other))) as pool:
        await pool.probe()
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.probe()
        pfs_dir.rename(tmp_path / "moved")
        with pytest.raises(OSError, match="No such file"):
            await pool.stat(b"", LONG_S)
        other.rename(pfs_dir)
        with pytest.raises(OSError, match="was mounted"):
            await pool.run("mkdir", b"d", b"", ATTRS, LONG_S)
        with pytest.raises(OSError, match="was mounted"):
            await pool.stat(b"", LONG_S)
        pfs_dir.rename(other)
        (tmp_path / "moved").rename(pfs_dir)
        await pool.run("mkdir", b"d", b"", ATTRS, LONG_S)
        assert pool.state == "ok"


async def test_who_asks_hears_at_once_that_the_pfs_is_back(pfs_dir: Path, tmp_path: Path) -> None:
    """It was `unreachable` until the next look, ten seconds later, though a reader had come."""
    async with running(PfsPool(str(pfs_dir), watch_every_s=0)) as pool:
        await pool.probe()
        pfs_dir.rename(tmp_path / "moved")
        with pytest.raises(OSError, match="No such file"):
            await pool.stat(b"", LONG_S)
        await pool.look_again()
        assert pool.state == "unreachable"
        (tmp_path / "moved").rename(pfs_dir)
        with trio.fail_after(LONG_S):
            while pool.state != "ok":  # not at once where the look before took long
                await pool.look_again()
                await trio.sleep(0.01)
        assert pool.error == ""


async def test_a_pfs_that_hangs_is_not_asked_for_each_attribute(
    pfs_dir: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    pool, probes = PfsPool(str(pfs_dir), watch_every_s=0), [0]
    pool._calls.state = "hung"

    async def hangs(deadline_s: float) -> None:
        probes[0] += 1
        await trio.sleep(deadline_s)
        raise trio.TooSlowError

    monkeypatch.setattr(pool, "probe", hangs)
    for _ in range(1000):
        await pool.look_again()
        await trio.sleep(0.001)
    assert probes == [1]
    await trio.sleep(3)
    await pool.look_again()
    assert probes == [2]


async def test_a_remount_of_the_same_filesystem_is_accepted(fault_mount: Callable[..., FaultMount]) -> None:
    one = fault_mount("one")
    two = fault_mount("two", one.backing)
    link = one.path.parent / "pfs"
    link.symlink_to(one.path)
    async with running(PfsPool(str(link))) as pool:
        before = await pool.probe()
        link.unlink()
        link.symlink_to(two.path)
        await pool.run("mkdir", b"d", b"", ATTRS, LONG_S)
        after = await pool.probe()
    assert before.token == after.token
    assert before.dev != after.dev


async def test_the_token_of_an_earlier_mount_is_demanded(pfs_dir: Path) -> None:
    async with running(PfsPool(str(pfs_dir), token="0" * 32)) as pool:
        with pytest.raises(OSError, match=r"no \.cachexfs/id"):
            await pool.stat(b"", LONG_S)
    assert os.listdir(pfs_dir) == []
    async with running(PfsPool(str(pfs_dir))) as pool:
        token = (await pool.probe()).token
    async with running(PfsPool(str(pfs_dir), token=token)) as pool:
        await pool.stat(b"", LONG_S)
    async with running(PfsPool(str(pfs_dir), token="0" * 32)) as pool:
        with pytest.raises(OSError, match="was 0000"):
            await pool.probe()


@pytest.mark.parametrize("hard_links", [True, False])
async def test_nodes_that_start_at_once_agree_on_one_token(
    pfs_dir: Path, fault_mount: Callable[..., FaultMount], hard_links: bool
) -> None:
    path = pfs_dir if hard_links else fault_mount().path
    tokens: list[str] = []

    async def start() -> None:
        async with running(PfsPool(str(path))) as pool:
            tokens.append((await pool.probe()).token)

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(start)
    assert len(tokens) == 4
    assert len(set(tokens)) == 1
    assert sorted(os.listdir(path / ".cachexfs")) == ["held", "id", "names", "tmp"]


async def test_a_damaged_id_is_an_error_and_is_not_replaced(pfs_dir: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.probe()
    (pfs_dir / ".cachexfs/id").write_text("short")
    async with running(PfsPool(str(pfs_dir))) as pool:
        with pytest.raises(OSError, match="damaged"):
            await pool.probe()
        assert pool.state == "unreachable"
    assert (pfs_dir / ".cachexfs/id").read_text() == "short"


async def test_a_state_directory_that_is_a_symlink_is_not_followed(pfs_dir: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (pfs_dir / ".cachexfs").symlink_to(outside)
    async with running(PfsPool(str(pfs_dir))) as pool:
        with pytest.raises(OSError, match="Not a directory"):
            await pool.probe()
    assert os.listdir(outside) == []


async def test_tmp_and_held_removed_by_hand_come_back(pfs_dir: Path, source: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.probe()
        for name in ("tmp", "held"):
            shutil.rmtree(pfs_dir / ".cachexfs" / name)
        await pool.prepare(str(source), 10, "h", ATTRS, b"", LONG_S)
        await pool.land("h", b"f", ATTRS, LONG_S)
        await pool.run("hide", b"f", b"name", None, LONG_S)
    assert os.listdir(pfs_dir / ".cachexfs/held") == ["name"]


async def test_while_names_are_missing_nothing_counts_as_absent(pfs_dir: Path, source: Path) -> None:
    """As with a server down whose files give ENOENT: what would rest on that is an error, and asked again later."""
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.prepare(str(source), 10, "h", ATTRS, b"", LONG_S)
        await pool.land("h", b"f", ATTRS, LONG_S)
        witness = min((pfs_dir / ".cachexfs/names").iterdir())
        witness.rename(pfs_dir / "away")
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "unlink": lambda: pool.run("unlink", b"gone", b"", None, LONG_S),
            "unlink below": lambda: pool.run("unlink", b"gone/inner", b"", None, LONG_S),
            "rmdir": lambda: pool.run("rmdir", b"gone", b"", None, LONG_S),
            "rename": lambda: pool.run("rename", b"gone", b"there", None, LONG_S),
            "stat": lambda: pool.stat(b"gone", LONG_S),
            "read": lambda: pool.read(b"gone", 0, 1, LONG_S),
            "land": lambda: pool.land("gone", b"f", ATTRS, LONG_S),
            "discard": lambda: pool.discard("gone", LONG_S),
            "listing": lambda: pool.listing(b"", LONG_S),
            "prepared": lambda: pool.prepared(LONG_S),
            "probe": pool.probe,
        }
        for name, call in calls.items():
            with pytest.raises(OSError, match="does not show all") as caught:
                await call()
            assert caught.value.errno == errno.EIO, name
            assert pool.state == "unreachable", name
        assert (await pool.stat(b"f", LONG_S)).size == 10  # what is there is there
        (pfs_dir / "away").rename(witness)
        for name in ("unlink", "unlink below", "rmdir", "discard", "listing", "prepared"):
            await calls[name]()
        for name in ("rename", "stat", "read", "land"):
            with pytest.raises(FileNotFoundError):
                await calls[name]()


async def test_the_first_mount_after_an_id_was_lost_makes_no_other(pfs_dir: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.probe()
    (pfs_dir / ".cachexfs/id").unlink()
    async with running(PfsPool(str(pfs_dir))) as pool:
        with pytest.raises(OSError, match=r"no \.cachexfs/id in it"):
            await pool.probe()
    assert not (pfs_dir / ".cachexfs/id").exists()
