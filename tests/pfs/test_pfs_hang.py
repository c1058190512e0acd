"""A PFS that hangs: the loop and the other calls go on, deadlines hold, what is late does no harm.

The callers of a hung ``faultfs`` are in D state, as those of a hung server: SIGKILL does not end them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from pfs_support import ATTRS, LONG_S, FaultMount, hang_in, running, tmp_names, until

from cachexfs.adapters.pfs_pool import PfsPool

#: Long enough for four calls beside the one that hangs, on a busy machine.
DEADLINE_S = 6.0

MakeMount = Callable[..., FaultMount]


def state_of(pid: int) -> str:
    """The letter of the process state: ``D`` is stuck in a system call."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def until_none_abandoned(pool: PfsPool) -> None:
    for call in pool.abandoned:
        await call.ended.wait()


async def test_a_hung_fsync_stops_neither_the_loop_nor_other_calls(fault_mount: MakeMount, source: Path) -> None:
    mount = fault_mount()
    size = source.stat().st_size
    async with running(PfsPool(str(mount.path), drain_workers=2)) as pool:
        await pool.probe()
        mount.hang("fsync:h1")
        ticks = 0
        outcomes: list[BaseException] = []

        async def hung() -> None:
            try:
                await pool.prepare(str(source), size, "h1", ATTRS, b"", DEADLINE_S)
            except trio.TooSlowError as error:
                outcomes.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hung)
            await mount.hanging("fsync")
            await pool.prepare(str(source), size, "h2", ATTRS, b"", LONG_S)
            await pool.land("h2", b"f", ATTRS, LONG_S)
            assert (await pool.stat(b"f", LONG_S)).size == size
            assert pool.state == "ok"
            what, waited_s = pool.waiting
            assert what == "prepare h1"
            assert 0 < waited_s <= DEADLINE_S + 1
            while not outcomes:
                ticks += 1
                await trio.sleep(0.01)
        assert ticks > 1
        (stuck,) = pool.abandoned
        assert state_of(stuck.pid) == "D"
        assert pool.state == "hung"
        assert pool.away_s >= DEADLINE_S  # since the call began, not since it was given up
        assert pool.waiting == ("", 0.0)
        assert "prepare h1" in pool.error
        await pool.prepare(str(source), size, "h3", ATTRS, b"", LONG_S)  # the replacement works
        assert (pool.state, pool.away_s) == ("ok", 0.0)
        mount.clear()
        await until_none_abandoned(pool)
        assert pool.abandoned == ()
        assert not os.path.exists(f"/proc/{stuck.pid}")


async def test_at_most_so_many_processes_hang_and_then_calls_fail_at_once(fault_mount: MakeMount) -> None:
    mount = fault_mount()
    async with running(PfsPool(str(mount.path), abandoned_max=3)) as pool:
        await pool.probe()
        for _ in range(3):
            await hang_in(mount, "statfs", lambda: pool.statvfs(LONG_S))
        with pytest.raises(OSError, match=r"hung.*docs/pfs\.md") as caught:
            await pool.stat(b"", LONG_S)
        assert caught.value.errno == errno.EIO
        assert (pool.state, len(pool.abandoned)) == ("hung", 3)
        mount.clear()
        await until_none_abandoned(pool)
        await pool.stat(b"", LONG_S)
        assert pool.state == "ok"


async def test_the_pool_ends_although_children_hang(fault_mount: MakeMount) -> None:
    mount = fault_mount()
    async with running(PfsPool(str(mount.path))) as pool:
        await pool.probe()
        await hang_in(mount, "statfs", lambda: pool.statvfs(LONG_S))
        (stuck,) = pool.abandoned
    assert state_of(stuck.pid) == "D"


async def test_a_late_part_is_not_taken_for_the_new_one(fault_mount: MakeMount, source: Path) -> None:
    """The first attempt hangs in the rename of its complete part; the second one has other bytes."""
    first, second = fault_mount("a"), None
    second = fault_mount("b", first.backing)
    size = source.stat().st_size
    new = source.with_name("new")
    new.write_bytes(os.urandom(size))
    async with running(PfsPool(str(first.path))) as pool, running(PfsPool(str(second.path))) as other:
        await pool.probe()
        await other.probe()
        await hang_in(first, "rename:h", lambda: pool.prepare(str(source), size, "h", ATTRS, b"old", LONG_S))
        await other.prepare(str(new), size, "h", ATTRS, b"new", LONG_S, takeover=True)
        first.clear()
        await until_none_abandoned(pool)
        await other.land("h", b"f", ATTRS, LONG_S)
        assert (first.backing / "f").read_bytes() == new.read_bytes()
        assert tmp_names(first.backing) == []


async def test_a_late_landing_finds_nothing_after_a_takeover(fault_mount: MakeMount, source: Path) -> None:
    first = fault_mount("a")
    second = fault_mount("b", first.backing)
    async with running(PfsPool(str(first.path))) as pool, running(PfsPool(str(second.path))) as other:
        await pool.prepare(str(source), 1000, "old", ATTRS, b"", LONG_S)
        await other.probe()
        await hang_in(first, "rename:old", lambda: pool.land("old", b"f", ATTRS, LONG_S))
        await other.discard("old", LONG_S)
        await other.prepare(str(source), 2000, "new", ATTRS, b"", LONG_S)
        await other.land("new", b"f", ATTRS, LONG_S)
        first.clear()
        await until_none_abandoned(pool)
        assert (first.backing / "f").stat().st_size == 2000
        assert tmp_names(first.backing) == []


async def test_a_landing_whose_answer_was_lost_is_recognised(fault_mount: MakeMount, source: Path) -> None:
    mount = fault_mount()
    async with running(PfsPool(str(mount.path))) as pool:
        await pool.prepare(str(source), 1000, "h", ATTRS, b"", LONG_S)
        await hang_in(mount, "fsyncdir", lambda: pool.land("h", b"f", ATTRS, LONG_S))  # after the rename
        mount.clear()
        await until_none_abandoned(pool)
        assert (await pool.land("h", b"f", ATTRS, LONG_S)).size == 1000
        assert tmp_names(mount.backing) == []


async def test_a_landing_is_retried_while_the_first_attempt_hangs(fault_mount: MakeMount, source: Path) -> None:
    """The retry goes another way round the hang (here: another mount); the late rename must not land what comes after
    under the same hidden name."""
    first = fault_mount("a")
    second = fault_mount("b", first.backing)
    link = first.path.parent / "pfs"
    link.symlink_to(first.path)
    async with running(PfsPool(str(link))) as pool:
        await pool.prepare(str(source), 1000, "h", ATTRS, b"", LONG_S)
        await hang_in(first, "rename:h", lambda: pool.land("h", b"f", ATTRS, LONG_S))
        link.unlink()
        link.symlink_to(second.path)
        with pytest.raises(OSError, match="abandoned land"):
            await pool.run("unlink", b"f", b"", None, LONG_S)
        await pool.land("h", b"f", ATTRS, LONG_S)
        await pool.run("unlink", b"f", b"", None, LONG_S)  # the late rename finds nothing now
        with pytest.raises(OSError, match="abandoned land of this name") as caught:
            await pool.prepare(str(source), 2000, "h", ATTRS, b"", LONG_S)
        assert caught.value.errno == errno.EBUSY
        first.clear()
        await until_none_abandoned(pool)
        assert not (first.backing / "f").exists()
        await pool.prepare(str(source), 2000, "h", ATTRS, b"", LONG_S)


async def test_a_path_with_an_abandoned_removal_stays_untouched(fault_mount: MakeMount, source: Path) -> None:
    mount = fault_mount()
    (mount.backing / "d").mkdir()
    (mount.backing / "d/f").write_bytes(b"old")
    async with running(PfsPool(str(mount.path))) as pool:
        await pool.prepare(str(source), 1000, "h", ATTRS, b"", LONG_S)
        await hang_in(mount, "unlink:f", lambda: pool.run("unlink", b"d/f", b"", None, LONG_S))
        for path in (b"d/f", b"d/f/below"):
            with pytest.raises(OSError, match="abandoned unlink") as caught:
                await pool.land("h", path, ATTRS, LONG_S)
            assert caught.value.errno == errno.EBUSY
        with pytest.raises(OSError, match="abandoned unlink"):
            await pool.run("rename", b"d", b"e", None, LONG_S)
        mount.clear()
        await until_none_abandoned(pool)
        await pool.land("h", b"d/f", ATTRS, LONG_S)
        assert (mount.backing / "d/f").stat().st_size == 1000


async def test_a_rename_whose_answer_was_lost_is_recognised(fault_mount: MakeMount) -> None:
    mount = fault_mount()
    (mount.backing / "a").write_bytes(b"a")
    (mount.backing / "b").write_bytes(b"b")
    async with running(PfsPool(str(mount.path))) as pool:
        await pool.probe()
        await hang_in(mount, "fsyncdir", lambda: pool.run("rename", b"a", b"b", None, LONG_S))
        mount.clear()
        await until_none_abandoned(pool)
        await pool.run("rename", b"a", b"b", None, LONG_S)
        assert (mount.backing / "b").read_bytes() == b"a"
        with pytest.raises(FileNotFoundError):  # asked for anew, it is an error again
            await pool.run("rename", b"a", b"b", None, LONG_S)


async def test_a_name_is_not_prepared_while_its_late_removal_may_come(fault_mount: MakeMount, source: Path) -> None:
    mount = fault_mount()
    async with running(PfsPool(str(mount.path))) as pool:
        await pool.prepare(str(source), 1000, "h", ATTRS, b"", LONG_S)
        await hang_in(mount, "unlink:h", lambda: pool.discard("h", LONG_S))
        with pytest.raises(OSError, match="abandoned discard of this name") as caught:
            await pool.prepare(str(source), 1000, "h", ATTRS, b"", LONG_S)
        assert caught.value.errno == errno.EBUSY
        mount.clear()
        await until_none_abandoned(pool)
        await pool.prepare(str(source), 1000, "h", ATTRS, b"", LONG_S)


async def test_a_cancelled_call_frees_its_place(fault_mount: MakeMount, source: Path) -> None:
    mount = fault_mount()
    async with running(PfsPool(str(mount.path), drain_workers=1)) as pool:
        await pool.probe()
        await hang_in(mount, "fsync:h", lambda: pool.prepare(str(source), 1000, "h", ATTRS, b"", LONG_S))
        assert len(pool.abandoned) == 1
        assert pool.state == "hung"  # killed, and still there
        await pool.prepare(str(source), 1000, "h2", ATTRS, b"", LONG_S)
        mount.clear()
        await until_none_abandoned(pool)
        await pool.prepare(str(source), 1000, "h", ATTRS, b"", LONG_S)
        assert tmp_names(mount.backing) == ["h", "h.rec", "h2", "h2.rec"]


async def test_a_pfs_that_hangs_from_the_start(fault_mount: MakeMount) -> None:
    mount = fault_mount()
    async with running(PfsPool(str(mount.path))) as pool:
        await hang_in(mount, "lookup", lambda: pool.stat(b"", LONG_S))
        assert pool.state == "hung"
        assert pool.identity is None
        mount.clear()
        await until_none_abandoned(pool)
        await pool.stat(b"", LONG_S)
        assert pool.identity is not None


async def test_a_hang_and_its_end_are_noticed_although_nobody_calls(fault_mount: MakeMount) -> None:
    mount = fault_mount()
    async with running(PfsPool(str(mount.path), watch_every_s=0.05)) as pool:
        await pool.probe()
        mount.hang("lookup:.cachexfs")
        await until(lambda: pool.state == "hung")
        await trio.sleep(0.2)  # several times the interval: no second probe may join the first
        assert len(pool.abandoned) == 1
        mount.clear()
        await until(lambda: pool.state == "ok")
        await until_none_abandoned(pool)


async def test_progress_keeps_a_slow_copy_alive(pfs_dir: Path, tmp_path: Path) -> None:
    """The copy takes several times its deadline; it is paced, and says so each second."""
    staged = tmp_path / "staged"
    size = 1 << 20
    staged.write_bytes(os.urandom(size))
    seen: list[int] = []
    async with running(PfsPool(str(pfs_dir), bandwidth_bytes_s=size / 5)) as pool:
        await pool.probe()
        start_s = trio.current_time()
        await pool.prepare(str(staged), size, "h", ATTRS, b"", 3.0, on_progress=seen.append)
        assert trio.current_time() - start_s > 3.0
    assert seen == sorted(seen)
    assert len(seen) >= 2
