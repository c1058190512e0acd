"""With the supervisor, a daemon killed with -9 is a pause for applications, not an error."""

import os
import threading
from collections.abc import Callable

import pytest
from real_support import until, write_file

from cachexfs.demo.cluster import LocalCluster

FILES = 40


@pytest.mark.parametrize("nodes", [1, 3])
def test_writers_and_readers_go_on_over_a_killed_daemon(make_cluster: Callable[..., LocalCluster], nodes: int) -> None:
    cluster = make_cluster(nodes, {"supervisor": "on"})
    mount = cluster.nodes[0].mountpoint
    (mount / "before").write_bytes(b"b" * 300_000)
    written: dict[str, bytes] = {}
    errors: list[OSError] = []

    def write_on() -> None:
        try:
            for number in range(FILES):
                data = os.urandom(50_000 + number)
                write_file(mount / f"f{number}", data, sync=number % 4 == 0)
                written[f"f{number}"] = data
        except OSError as error:
            errors.append(error)

    with (mount / "open").open("w+b", buffering=0) as held:
        held.write(b"written before the kill, ")
        thread = threading.Thread(target=write_on)
        thread.start()
        for goal in (FILES // 4, FILES // 2):
            until("some files are written", lambda goal=goal: len(written) >= goal or bool(errors))
            old = cluster.status(0).pid
            cluster.kill_daemon(0)
            assert (mount / "before").read_bytes() == b"b" * 300_000
            until("another daemon answers", lambda old=old: cluster.answers(0) and cluster.status(0).pid != old)
        held.write(b"and after")
        thread.join()
    assert errors == []
    assert (mount / "open").read_bytes() == b"written before the kill, and after"
    assert {name: (mount / name).read_bytes() for name in written} == written
    cluster.umount()
    assert {name: (cluster.pfs / name).read_bytes() for name in written} == written
