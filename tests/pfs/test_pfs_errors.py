"""Errors of the PFS: each is told, none leaves half a file where a whole one should be."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pfs_support import ATTRS, LONG_S, FaultMount, command, running, tmp_names, until

from cachexfs.adapters.pfs_pool import PfsPool

INJECT = ["-e", "trace=fsync", "-e", "inject=fsync:error=EIO:when=1"]

MakeMount = Callable[..., FaultMount]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB and 24 inodes, and beside it room for nothing else."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    path = tmp_path / "small"
    path.mkdir()
    command("mount", "-t", "tmpfs", "-o", "size=2M,nr_inodes=24", "tmpfs", str(path))
    yield path
    command("umount", "-l", str(path))


async def test_a_full_pfs_says_enospc_and_gets_its_space_back(small: Path, source: Path) -> None:
    async with running(PfsPool(str(small))) as pool:
        with pytest.raises(OSError, match="No space") as caught:
            await pool.prepare(str(source), source.stat().st_size, "h", ATTRS, b"", LONG_S)
        assert caught.value.errno == errno.ENOSPC
        assert tmp_names(small) == []
        await pool.prepare(str(source), 1 << 20, "h", ATTRS, b"", LONG_S)
        await pool.land("h", b"f", ATTRS, LONG_S)
        assert (small / "f").read_bytes() == source.read_bytes()[: 1 << 20]
        assert pool.state == "ok"  # full is not unreachable


async def test_no_inodes_left_is_enospc_too(small: Path, source: Path) -> None:
    async with running(PfsPool(str(small))) as pool:
        await pool.prepare(str(source), 10, "h", ATTRS, b"", LONG_S)
        for number in range(100):
            try:
                (small / f"x{number}").touch()
            except OSError:
                break
        with pytest.raises(OSError, match="No space"):
            await pool.prepare(str(source), 10, "h2", ATTRS, b"", LONG_S)
        with pytest.raises(OSError, match="No space"):
            await pool.run("mkdir", b"d", b"", ATTRS, LONG_S)
        await pool.land("h", b"f", ATTRS, LONG_S)  # what is prepared needs no room
        await pool.run("unlink", b"f", b"", None, LONG_S)
        await pool.run("mkdir", b"d", b"", ATTRS, LONG_S)


@pytest.mark.parametrize(
    "fault", ["fsync:h", "fsync:h.rec", "fsyncdir", "write", "flush", "rename:h", "setattr:h", "create:h"]
)
async def test_an_error_while_preparing_is_raised_and_nothing_counts_as_prepared(
    fault_mount: MakeMount, source: Path, fault: str
) -> None:
    mount = fault_mount()
    async with running(PfsPool(str(mount.path))) as pool:
        await pool.probe()
        mount.fail(fault, errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            await pool.prepare(str(source), source.stat().st_size, "h", ATTRS, b"", LONG_S)
        left = tmp_names(mount.backing)
        assert [name for name in left if "~" in name] == []
        mount.clear()
        await pool.prepare(str(source), source.stat().st_size, "h", ATTRS, b"", LONG_S)
        await pool.land("h", b"f", ATTRS, LONG_S)
        assert (mount.backing / "f").read_bytes() == source.read_bytes()


async def test_fsync_is_called_once_and_its_error_is_final(tmp_path: Path, pfs_dir: Path, source: Path) -> None:
    """An error injected into the child's first fsync only: a second fsync would say "ok" over lost data."""
    async with running(PfsPool(str(pfs_dir), drain_workers=1)) as pool:
        await pool.prepare(str(source), 10, "warm", ATTRS, b"", LONG_S)
        (child,) = pool._calls.data.idle
        trace = tmp_path / "trace"
        strace = subprocess.Popen(  # noqa: ASYNC220
            ["strace", "-q", "-o", str(trace), "-p", str(child.process.pid), *INJECT],
            stderr=subprocess.PIPE,
        )
        try:
            while "TracerPid:\t0" in Path(f"/proc/{child.process.pid}/status").read_text():
                assert strace.poll() is None, strace.stderr and strace.stderr.read()
            with pytest.raises(OSError, match="Input/output error"):
                await pool.prepare(str(source), 10, "h", ATTRS, b"", LONG_S)
        finally:
            strace.terminate()
            strace.communicate()
        lines = trace.read_text().splitlines()
        assert sum("fsync(" in line for line in lines) == 1
        assert tmp_names(pfs_dir) == ["warm", "warm.rec"]


@pytest.mark.parametrize(
    ("fault", "code", "state"),
    [("statfs", errno.ENOTCONN, "unreachable"), ("statfs", errno.EIO, "ok"), ("lookup", errno.ENOTCONN, "unreachable")],
)
async def test_the_state_tells_an_unreachable_pfs_from_an_error(
    fault_mount: MakeMount, fault: str, code: int, state: str
) -> None:
    mount = fault_mount()
    async with running(PfsPool(str(mount.path))) as pool:
        await pool.probe()
        mount.fail(fault, code)
        with pytest.raises(OSError, match=os.strerror(code)):
            await (pool.statvfs(LONG_S) if fault == "statfs" else pool.probe())
        assert pool.state == state
        mount.clear()
        await pool.probe()
        assert (pool.state, pool.error) == ("ok", "")


async def test_a_pfs_whose_client_has_died_is_unreachable(fault_mount: MakeMount) -> None:
    mount = fault_mount()
    async with running(PfsPool(str(mount.path))) as pool:
        await pool.probe()
        mount.die()
        await until(lambda: not os.path.ismount(mount.path))  # statx fails from now on
        with pytest.raises(OSError, match="not connected") as caught:
            await pool.stat(b"", LONG_S)
        assert caught.value.errno == errno.ENOTCONN
        assert pool.state == "unreachable"


async def test_landing_across_filesystems_goes_through_a_temporary_beside(
    pfs_dir: Path, small: Path, source: Path
) -> None:
    """A mount inside PFS_DIR stands for the quota trees and remote directories that answer EXDEV."""
    (pfs_dir / "sub").mkdir()
    command("mount", "--bind", str(small), str(pfs_dir / "sub"))
    try:
        async with running(PfsPool(str(pfs_dir))) as pool:
            await pool.prepare(str(source), 1000, "h", ATTRS, b"", LONG_S)
            found = await pool.land("h", b"sub/f", ATTRS, LONG_S)
            assert found.mtime_ns == ATTRS.mtime_ns
            assert (small / "f").read_bytes() == source.read_bytes()[:1000]
            assert tmp_names(pfs_dir) == []
            await pool.run("symlink", b"sub/l", b"one", ATTRS, LONG_S)
            await pool.run("symlink", b"sub/l", b"two", ATTRS, LONG_S)
            await pool.run("hide", b"sub/f", b"name", None, LONG_S)
            assert [name for name, _ in await pool.listing(b"sub", LONG_S)] == [b"l"]
            async with running(PfsPool(str(pfs_dir))) as next_pool:  # its predecessor died before it could tell
                await next_pool.run("hide", b"sub/f", b"name", None, LONG_S)
            await pool.run("unhide", b"sub/f", b"name", None, LONG_S)
            assert sorted(os.listdir(small)) == ["f", "l"]
            assert os.readlink(small / "l") == "two"
            await pool.prepare(str(source), source.stat().st_size, "big", ATTRS, b"", LONG_S)
            with pytest.raises(OSError, match="No space"):
                await pool.land("big", b"sub/big", ATTRS, LONG_S)
            assert sorted(os.listdir(small)) == ["f", "l"]
    finally:
        command("umount", "-l", str(pfs_dir / "sub"))
