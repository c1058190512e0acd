"""The child processes: what they inherit, how they end, what happens when one dies or misbehaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from pfs_support import ATTRS, LONG_S, FaultMount, running, tmp_file, tmp_names, until

from cachexfs.adapters import pfs_worker
from cachexfs.adapters.pfs_pool import PfsPool

DAEMON = """
import sys, trio
from cachexfs.adapters.pfs_pool import PfsPool
from cachexfs.engine.pfs_interface import PfsAttrs

async def main():
    pool = PfsPool(sys.argv[1])
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.serve)
        await pool.probe()
        attrs = PfsAttrs(0o600, None, None, 0, 0)
        await pool.prepare(sys.argv[2], 10, "h", attrs, b"", 60)
        print(*[c.process.pid for lane in (pool._calls.data, pool._calls.meta) for c in lane.idle], flush=True)
        await pool.prepare(sys.argv[2], 10, "busy", attrs, b"", 60)

trio.run(main)
"""


def running_pids(pids: list[int]) -> list[int]:
    """Those that are neither gone nor zombies."""
    left = []
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text.rpartition(")")[2].split()[0] not in "ZX":
            left.append(pid)
    return left


def test_children_end_when_the_daemon_is_killed(fault_mount: Callable[..., FaultMount], source: Path) -> None:
    """One of them hangs in the rename of a record. That one call is carried out, and nothing after it."""
    mount = fault_mount()
    mount.hang("rename:busy.rec")
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(mount.path), str(source)], stdout=subprocess.PIPE, text=True
    )
    assert daemon.stdout is not None
    pids = [int(pid) for pid in daemon.stdout.readline().split()]
    daemon.stdout.close()
    assert len(pids) == 2
    while not (mount.control / "seen-rename").exists():
        time.sleep(0.01)
    daemon.kill()
    daemon.wait()
    mount.clear()
    while running_pids(pids):
        time.sleep(0.01)
    assert tmp_file(mount.backing, "busy", ".rec").exists()
    assert not tmp_file(mount.backing, "busy").exists()


async def test_a_child_inherits_nothing_and_yields(pfs_dir: Path) -> None:
    inherited = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    try:
        async with running(PfsPool(str(pfs_dir))) as pool:
            await pool.probe()
            (child,) = pool._calls.meta.idle
            pid = child.process.pid
            fds = {int(name): os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
            assert sorted(fds) == [0, 1, 2]
            assert fds[2] == "/dev/null"
            assert os.getpriority(os.PRIO_PROCESS, pid) == pfs_worker.NICE  # however this test is run
            assert os.readlink(f"/proc/{pid}/cwd") == "/"
            assert os.getsid(pid) == pid
    finally:
        os.close(inherited)
    assert running_pids([pid]) == []


async def test_a_call_leaves_no_descriptor_behind_in_its_child(pfs_dir: Path, source: Path) -> None:
    async with running(PfsPool(str(pfs_dir), drain_workers=1, meta_workers=2)) as pool:
        for path in (b"f", b"missing/f"):
            await pool.prepare(str(source), 10, "h", ATTRS, b"", LONG_S)
            try:
                await pool.land("h", path, ATTRS, LONG_S)
            except FileNotFoundError:
                await pool.discard("h", LONG_S)
        await pool.run("mkdir", b"d", b"", ATTRS, LONG_S)
        await pool.listing(b"d", LONG_S)
        await pool.read(b"f", 0, 10, LONG_S)
        for child in (*pool._calls.data.idle, *pool._calls.meta.idle):
            assert len(os.listdir(f"/proc/{child.process.pid}/fd")) == 3


async def test_a_stopped_child_is_replaced(pfs_dir: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.probe()
        (child,) = pool._calls.meta.idle
        os.kill(child.process.pid, signal.SIGSTOP)
        with pytest.raises(trio.TooSlowError):
            await pool.stat(b"", 0.2)
        assert pool.state == "hung"
        await pool.stat(b"", LONG_S)
        assert pool.state == "ok"
        await until(lambda: not pool.abandoned)
        assert running_pids([child.process.pid]) == []


async def test_a_child_that_dies_in_a_call_is_an_error_and_is_replaced(pfs_dir: Path, source: Path) -> None:
    async with running(PfsPool(str(pfs_dir), bandwidth_bytes_s=1000.0)) as pool:
        await pool.probe()
        errors: list[OSError] = []

        async def prepare() -> None:
            try:
                await pool.prepare(str(source), source.stat().st_size, "h", ATTRS, b"", LONG_S)
            except OSError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(prepare)
            await until(lambda: bool(pool._calls.data.busy))
            (child,) = pool._calls.data.busy
            child.process.kill()
        assert "ended unasked" in str(errors[0])
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.prepare(str(source), source.stat().st_size, "h", ATTRS, b"", LONG_S)
    assert tmp_names(pfs_dir) == ["h", "h.rec"]


async def test_children_that_died_while_idle_are_not_used(pfs_dir: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.probe()
        (child,) = pool._calls.meta.idle
        child.process.kill()
        await until(lambda: not running_pids([child.process.pid]))
        await pool.stat(b"", LONG_S)


async def test_nonsense_from_a_child_is_an_error_and_not_a_crash(pfs_dir: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.probe()
        for nonsense in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\1\x05", pfs_worker.encode([99, "done", None])):
            (child,) = pool._calls.meta.idle
            child._buffer += nonsense
            with pytest.raises(OSError, match="a PFS child"):
                await pool.stat(b"", LONG_S)
            await pool.stat(b"", LONG_S)


async def test_small_calls_do_not_wait_behind_big_copies(pfs_dir: Path, source: Path) -> None:
    async with running(PfsPool(str(pfs_dir), drain_workers=1, bandwidth_bytes_s=100_000.0)) as pool:
        await pool.probe()
        async with trio.open_nursery() as nursery:
            for number in range(3):
                size = source.stat().st_size
                nursery.start_soon(pool.prepare, str(source), size, f"h{number}", ATTRS, b"", LONG_S)
            await until(lambda: bool(pool._calls.data.busy))
            for number in range(10):
                await pool.run("mkdir", b"d%d" % number, b"", ATTRS, LONG_S)
            assert pool._calls.data.busy  # the first copy takes half a minute
            nursery.cancel_scope.cancel()
        assert len(pool._calls.data.busy) == 0


async def test_calls_outside_of_serve_are_a_programming_error(pfs_dir: Path) -> None:
    with pytest.raises(RuntimeError, match="not running"):
        await PfsPool(str(pfs_dir)).stat(b"", LONG_S)


async def test_a_python_that_does_not_start_is_told(pfs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    async with running(PfsPool(str(pfs_dir))) as pool:
        with pytest.raises(OSError, match="No such file"):
            await pool.stat(b"", LONG_S)


async def test_an_end_amid_calls_is_quiet(tmp_path: Path) -> None:
    """Pool and callers are cancelled at one moment, as when a daemon gives its place to the next one."""
    (tmp_path / "pfs").mkdir()
    os.mkfifo(tmp_path / "source")
    for _ in range(3):
        async with trio.open_nursery() as nursery:
            pool = PfsPool(str(tmp_path / "pfs"), drain_workers=4)
            await nursery.start(pool.serve)
            await pool.probe()
            for number in range(4):
                nursery.start_soon(pool.prepare, str(tmp_path / "source"), 10, f"h{number}", ATTRS, b"", LONG_S)
            await until(lambda: len(pool._calls.data.busy) == 4)  # noqa: B023
            nursery.cancel_scope.cancel()
