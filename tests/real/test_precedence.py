"""Who waits for processors, and who does not."""

import os
from collections.abc import Callable

import pytest
import trio
import trio.testing
from real_support import until

from cachexfs.demo.cluster import LocalCluster
from cachexfs.engine.foreground import REQUEST_S, WAIT_S_MAX, Foreground

MakeCluster = Callable[..., LocalCluster]


def nice_values(cluster: LocalCluster, mark: bytes) -> set[int]:
    found = set()
    for pid in cluster.processes(0):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if mark in file.read():
                    found.add(os.getpriority(os.PRIO_PROCESS, pid))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a mount precedence")
@pytest.mark.parametrize("supervisor", ["on", "off"])
def test_what_applications_wait_for_comes_first(make_cluster: MakeCluster, supervisor: str) -> None:
    cluster = make_cluster(1, {"fsync": "returned", "supervisor": supervisor, "nice": "-7"})
    (cluster.nodes[0].mountpoint / "f").write_bytes(b"x" * (8 << 20))
    assert nice_values(cluster, b"cachexfs.daemon") == {-7}
    assert nice_values(cluster, b"cachexfs.supervisor") == ({-7} if supervisor == "on" else set())
    until("a copy begins", lambda: nice_values(cluster, b"pfs_worker") == {5})
    if supervisor == "on":
        until("the next daemon waits, behind all", lambda: nice_values(cluster, b"cachexfs.daemon") == {-7, 10})
        cluster.kill_daemon(0)
        assert (cluster.nodes[0].mountpoint / "f").stat().st_size == 8 << 20
        assert nice_values(cluster, b"cachexfs.daemon") == {-7}


async def waited_s(foreground: Foreground) -> float:
    start_s = trio.current_time()
    await foreground.pause()
    return trio.current_time() - start_s


async def test_background_work_waits_for_a_pause(autojump_clock: trio.testing.MockClock) -> None:
    foreground = Foreground()
    assert await waited_s(foreground) == 0
    foreground.busy(0.1)
    foreground.busy()
    assert await waited_s(foreground) == pytest.approx(0.1)
    foreground.busy(0.1)
    foreground.rest()
    assert await waited_s(foreground) == pytest.approx(REQUEST_S)


async def test_without_a_pause_it_gets_as_much_time_as_it_has_waited(autojump_clock: trio.testing.MockClock) -> None:
    foreground = Foreground()
    foreground.busy(100.0)
    assert await waited_s(foreground) == pytest.approx(WAIT_S_MAX)
    assert await waited_s(foreground) == 0
    await trio.sleep(WAIT_S_MAX)
    assert await waited_s(foreground) == pytest.approx(WAIT_S_MAX)


async def test_what_somebody_waits_for_does_not_wait(autojump_clock: trio.testing.MockClock) -> None:
    foreground = Foreground()
    foreground.busy(100.0)
    with foreground.awaited():
        assert await waited_s(foreground) == 0
    assert await waited_s(foreground) == pytest.approx(WAIT_S_MAX)
