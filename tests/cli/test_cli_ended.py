"""A daemon that ends while it is asked."""

import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cli_support import FakeDaemon, Run

from cachexfs.cli import client, mounts
from cachexfs.cli.earlier import end_earlier
from cachexfs.config import MountOptions
from cachexfs.registration import Entry

PONG = {"done": True, "node": "n1", "pid": 1}


def entry_of(daemon: FakeDaemon) -> Entry:
    (entry,) = mounts.registry(str(daemon.runtime))
    return entry


@pytest.fixture
def supervisor(daemon: FakeDaemon) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(client.supervisor_socket(entry_of(daemon)))
        server.listen()
        yield


@pytest.mark.usefixtures("supervisor")
def test_a_question_is_asked_again_of_the_next_daemon(daemon: FakeDaemon, run: Run) -> None:
    daemon.answers["wait"] = [{"done": True, "reached": True, "reason": "", "exit": 0}]
    daemon.deaths = 2
    assert run("wait", daemon.mountpoint, "--at", "pfs", "--timeout", "60").code == 0
    left_s = [request["timeout_s"] for request in daemon.asked]
    assert left_s == sorted(left_s, reverse=True)
    assert left_s[-1] < 60 == left_s[0]


@pytest.mark.usefixtures("supervisor")
def test_a_question_that_each_daemon_dies_of_has_an_end(daemon: FakeDaemon) -> None:
    daemon.deaths = 1000
    with pytest.raises(client.EndedError, match="ended before it answered"):
        client.ask_raw(entry_of(daemon), {"op": "ping"})


@pytest.mark.usefixtures("supervisor")
def test_what_changes_something_is_not_asked_twice(daemon: FakeDaemon) -> None:
    daemon.deaths = 1
    with pytest.raises(client.EndedError):
        client.ask_raw(entry_of(daemon), {"op": "umount"})
    assert len(daemon.asked) == 1


def test_a_mount_that_no_daemon_can_serve_says_why(daemon: FakeDaemon, run: Run) -> None:
    entry = entry_of(daemon)
    daemon.stop()
    said = {"phase": "failed", "last_failure": "daemon 7 ended with exit code 4"}
    Path(entry.socket).with_suffix(".answer").write_text(json.dumps({"ok": False, "error": "its staging is gone"}))

    def answer(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                with server.accept()[0] as connection:
                    if connection.recv(100):
                        connection.sendall(json.dumps(said).encode())

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(client.supervisor_socket(entry))
        server.listen()
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        ended = run("status", daemon.mountpoint)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert ended.code == 4
    assert "every request gets EIO: daemon 7 ended with exit code 4: its staging is gone" in ended.err
    assert f"cachexfs restart {daemon.mountpoint}" in ended.err


def test_an_earlier_daemon_that_ends_when_it_is_asked_is_not_in_the_way(daemon: FakeDaemon) -> None:
    daemon.deaths = 1000
    with subprocess.Popen(["sleep", "0.5"]) as process:
        daemon.register(process.pid, device="")
        end_earlier(
            MountOptions(pfs="/pfs", mountpoint=str(daemon.mountpoint), memory=1, runtime_dir=str(daemon.runtime))
        )
        assert daemon.asked
        assert not mounts.is_alive(process.pid)
