"""A daemon that sends without end, or never answers, costs the supervisor bounded memory and never its loop.

And root's power over paths: where others can change the way, it is not used.
"""

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachexfs.supervisor import notifier, pending, wire
from cachexfs.supervisor.client import Supervisor
from cachexfs.supervisor.control import Control
from cachexfs.supervisor.lifecycle import EXIT_CANNOT_TELL
from cachexfs.supervisor.messages import ENV_STANDBY_FD, ENV_VERSION, HANDOVER, VERSION, Message, pack_state
from cachexfs.supervisor.mount import MountError, Place, changeable_by_others, unmount
from cachexfs.supervisor.mount import mount as raw_mount
from cachexfs.supervisor.notifier import Notifier
from cachexfs.supervisor.passthrough import Backings
from cachexfs.supervisor.payloads import PayloadMemory
from cachexfs.supervisor.pump import Pump
from cachexfs.supervisor.session import BACKGROUND_MAX, Session
from cachexfs.supervisor.status import StatusSocket

from .conftest import DAEMON, Mount, is_mounted

NOBODY = 65534


def seqpacket() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in pair:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        sock.setblocking(False)
    return pair


@contextlib.contextmanager
def flood(sock: socket.socket, message: bytes) -> Iterator[None]:
    """Somebody who sends ``message`` as fast as it is taken."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            with contextlib.suppress(BlockingIOError):
                sock.send(message)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_notifications_that_the_kernel_does_not_take_are_bounded_in_bytes() -> None:
    reader, writer = os.pipe()
    try:
        one = Notifier(writer)
        message = bytes(1 << 20)
        taken = 0
        while one.put(message):
            taken += 1
            assert taken <= notifier.NOTIFICATIONS_BYTES_MAX >> 20
        assert taken > 1
        while not one.put(message):  # room again once the kernel takes them
            os.read(reader, 1 << 20)
    finally:
        os.close(reader)
        with contextlib.suppress(OSError):
            os.close(writer)


class Deaf:
    """Nobody acts on what a daemon says."""

    def daemon_ready(self) -> None: ...
    def daemon_alive(self) -> None: ...
    def daemon_shares(self) -> None: ...
    def daemon_stopping(self, code: int) -> None: ...
    def daemon_draining(self) -> None: ...


def test_a_flood_of_questions_lets_the_loop_go_on() -> None:
    ours, theirs = seqpacket()
    control = Control(Backings(-1, frozenset()), Deaf())
    with ours, theirs, flood(theirs, Message(99).pack()):
        while not control.refused:
            assert control.drain(ours)
        assert control.drain(ours)


@pytest.fixture
def pumped() -> Iterator[tuple[Pump, socket.socket, socket.socket, socket.socket]]:
    """A pump between a socket that plays the device (second) and one that plays the daemon (third)."""
    device, kernel = seqpacket()
    peer, daemon = seqpacket()
    with contextlib.closing(select.epoll()) as epoll, device, kernel, peer, daemon:
        one = Pump(device.fileno(), Session(Backings(-1, frozenset()), wire.PAYLOAD_BYTES_MAX, "off"), epoll)
        one.attach(peer.fileno())
        yield one, kernel, daemon, peer


def request(unique: int, size: int) -> bytes:
    return wire.IN_HEADER.pack(size, wire.WRITE, unique, 1, 0, 0, 0, 0, 0) + bytes(size - wire.IN_HEADER.size)


def test_requests_that_are_not_answered_stay_with_the_kernel(
    pumped: tuple[Pump, socket.socket, socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, kernel, daemon, _ = pumped
    monkeypatch.setattr(pending, "PENDING_BYTES_MAX", 8 << 20)
    unique = 0

    def offer() -> None:
        nonlocal unique
        for _ in range(20):
            unique += 2
            with contextlib.suppress(BlockingIOError):
                kernel.send(request(unique, 200_000))
            one.turn(0)
            with contextlib.suppress(BlockingIOError):
                daemon.recv(1 << 20)

    offer()
    assert len(one.pending) == 8, "the eighth slot and its head pass the limit"
    offer()
    assert len(one.pending) == 8
    for answered in list(one.pending)[:6]:
        daemon.send(wire.error_reply(answered))
    one.turn(0.1)
    assert len(one.pending) > 2, "the device is read again"
    one.fail_everything()
    assert len(one.pending) == 0


def test_what_a_dead_daemon_left_behind_cannot_go_on_answering_for_it(
    pumped: tuple[Pump, socket.socket, socket.socket, socket.socket],
) -> None:
    one, _, daemon, _ = pumped
    with flood(daemon, wire.error_reply(7)):
        while not one.refused:
            one.turn(0.01)
        one.detach()
    assert len(one.pending) == 0


def test_a_supervisor_waits_for_the_last_steps_of_an_earlier_one(tmp_path: Path) -> None:
    path = str(tmp_path / "status")
    with contextlib.closing(select.epoll()) as epoll:
        earlier = StatusSocket(path, epoll, lambda command: {})
        timer = threading.Timer(0.2, earlier.close)
        timer.start()
        later = StatusSocket(path, epoll, lambda command: {})
        timer.join()
        assert os.path.exists(path)
        later.close()
        assert not os.path.exists(path)


def test_a_daemon_asks_for_no_more_background_requests_than_an_unprivileged_one() -> None:
    one = Session(Backings(-1, frozenset()), wire.PAYLOAD_BYTES_MAX, "off")
    ask = wire.IN_HEADER.pack(104, wire.INIT, 2, 0, 0, 0, 0, 0, 0)
    one.remember_init(ask + struct.pack("<IIIII44x", 7, 45, 131072, 0, 0))
    reply = bytearray(wire.INIT_OUT_BYTES)
    wire.OUT_HEADER.pack_into(reply, 0, len(reply), 0, 2)
    struct.pack_into("<IIIIHHIIHHII", reply, 16, 7, 38, 131072, 0, 65535, 65535, 1 << 20, 1, 0, 0, 0, 0)
    one.init_replied(memoryview(reply))
    assert wire.u16(reply, wire.INIT_OUT_MAX_BACKGROUND_OFFSET) == BACKGROUND_MAX
    assert wire.u16(reply, wire.INIT_OUT_CONGESTION_OFFSET) == BACKGROUND_MAX


# -- paths -------------------------------------------------------------------------------------------------


@pytest.fixture
def ladder(tmp_path: Path) -> Path:
    """``tmp_path/a/b``, and above it directories that only root can change."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts for others")
    (tmp_path / "a/b").mkdir(parents=True)
    assert changeable_by_others(str(tmp_path / "a/b")) == ""
    return tmp_path


def test_a_way_that_only_root_can_change_is_taken(ladder: Path) -> None:
    os.chown(ladder / "a/b", NOBODY, NOBODY)
    assert changeable_by_others(str(ladder / "a/b")) == "", "the last one gets covered"
    (ladder / "a").chmod(0o1777)
    assert changeable_by_others(str(ladder / "a/b")) == str(ladder / "a"), "its owner can move it out of /tmp"
    os.chown(ladder / "a/b", 0, 0)
    assert changeable_by_others(str(ladder / "a/b")) == "", "as in /tmp"


@pytest.mark.parametrize("how", ["owner", "group", "others", "link"])
def test_a_way_that_others_can_change_is_found(ladder: Path, how: str) -> None:
    path = ladder / "a/b"
    if how == "owner":
        os.chown(ladder / "a", NOBODY, NOBODY)
    elif how == "link":
        (ladder / "l").symlink_to(ladder / "a")
        path = ladder / "l/b"
    else:
        (ladder / "a").chmod(0o775 if how == "group" else 0o757)
    assert changeable_by_others(str(path)) == str(path if how == "link" else ladder / "a")


def test_a_way_that_is_bent_after_the_look_leads_nowhere_else(ladder: Path) -> None:
    place = Place.find(str(ladder / "a/b"), only_roots=True)
    victim = ladder / "victim"
    (victim / "b").mkdir(parents=True)
    (ladder / "a").rename(ladder / "moved")
    (ladder / "a").symlink_to(victim)
    os.close(raw_mount(place, "test", is_shared=False, uid=0, gid=0))
    try:
        assert [is_mounted(path) for path in (ladder / "moved/b", victim / "b")] == [True, False]
    finally:
        assert unmount(place, is_lazy=True) == ""
    assert not is_mounted(ladder / "moved/b")


def test_a_dead_mount_is_not_taken_away_where_others_can_change_the_way(ladder: Path) -> None:
    place = Place.find(str(ladder / "a/b"), only_roots=True)
    os.close(raw_mount(place, "test", is_shared=False, uid=0, gid=0))
    try:
        os.chown(ladder / "a", NOBODY, NOBODY)
        with pytest.raises(MountError, match="others than root can change"):
            Place.find(str(ladder / "a/b"), only_roots=True)
        assert is_mounted(ladder / "a/b")
    finally:
        assert unmount(place, is_lazy=True) == ""


def test_the_supervisor_does_not_mount_for_a_user_where_that_user_can_move_the_mount(mount: Mount) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root mounts for others")
    inner = mount.point / "mine" / "mnt"
    inner.mkdir(parents=True)
    os.chown(inner.parent, NOBODY, NOBODY)
    command = [sys.executable, "-m", "cachexfs.supervisor", "--mountpoint", str(inner), "--user", str(NOBODY)]
    done = subprocess.run(
        [*command, "--", sys.executable, str(DAEMON)],
        cwd=DAEMON.parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_CANNOT_TELL
    assert f"can change {inner.parent}" in done.stderr


def test_a_mount_that_is_given_before_it_is_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon before died while this one, started ahead, was still at its imports."""
    ours, theirs = seqpacket()
    state = os.memfd_create("state")
    os.write(state, pack_state(3, [], [], has_served=True))
    os.lseek(state, 0, os.SEEK_SET)
    pairs = [seqpacket() for _ in range(3)]
    fds = [pair[1].fileno() for pair in pairs] + [state, PayloadMemory(1).fd]
    socket.send_fds(ours, [Message(HANDOVER, value=1).pack()], fds)
    ours.close()
    theirs.setblocking(True)
    monkeypatch.setenv(ENV_VERSION, VERSION)
    monkeypatch.setenv(ENV_STANDBY_FD, str(theirs.detach()))
    taken = Supervisor.from_environ()
    assert taken is not None
    assert (taken.state.life, taken.passthrough) == (3, True)
    os.close(int(taken.fuse_path.rpartition("/")[2]))
    taken._control.close()
    taken._events.close()
    os.close(taken._payloads_fd)
    os.close(fds[-1])
    os.close(state)
    for pair in pairs:
        for sock in pair:
            sock.close()
