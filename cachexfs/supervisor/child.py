"""One daemon process: its sockets, its start, its end.

Role: starts the daemon in a process group of its own with the descriptors and environment that ``client``
reads, and ends it. The group is killed before the leader is reaped, so that workers of a dead daemon never act
beside its successor (a process that must survive, such as an etcd member, starts its own session).
Concurrency: the supervisor's one thread. Called by ``run``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from . import messages, wire

_SO_SNDBUFFORCE = 32
#: What a socket should hold: eight full requests. Bytes.
_SOCKET_BYTES = 8 << 20
#: The kernel keeps this much of a send buffer for itself.
_SOCKET_SLACK_BYTES = 512
#: How long killed processes are waited for at the end, and how often they are looked at. Seconds.
_LAST_S, _POLL_S = 1.0, 0.005


def _enlarge(sock: socket.socket) -> int:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SOCKET_BYTES)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def payload_bytes_max() -> int:
    """Largest payload that one message over a socket pair can carry here, a whole number of pages.

    Without CAP_NET_ADMIN ``net.core.wmem_max`` limits it (EMSGSIZE beyond): 102 pages at the usual default.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        room = min(_enlarge(ours), _enlarge(theirs)) - _SOCKET_SLACK_BYTES - wire.HEADER_ROOM_BYTES
    return max(wire.PAGE_BYTES, min(wire.PAYLOAD_BYTES_MAX, room // wire.PAGE_BYTES * wire.PAGE_BYTES))


class Process:
    """A process in a session and process group of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def has_exited(self) -> bool:
        """Whether it has ended; it is not reaped yet."""
        if self._process.returncode is not None:
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def kill(self) -> None:
        """SIGKILL to the whole group. It is a zombie at least until ``reap``, so the number is still its own."""
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except OSError:
                pass  # none is left; EPERM: it has become somebody else

    def reap(self) -> int:
        """Kill what is left of the group and collect the exit code; call it when the leader has exited."""
        self.kill()
        return self._process.wait()


class Killed:
    """Processes that were killed and have not been reaped: one may hang in a system call, for which nobody waits."""

    def __init__(self) -> None:
        self._processes: list[Process] = []

    def add(self, process: Process) -> None:
        """Kill it now, reap it when it has ended."""
        process.kill()
        self._processes.append(process)
        self.reap()

    def reap(self) -> None:
        """Collect those that have ended."""
        for process in [process for process in self._processes if process.has_exited()]:
            process.reap()
            self._processes.remove(process)

    def wait(self) -> None:
        """Give them a moment, before we end ourselves."""
        until = time.monotonic() + _LAST_S
        while self._processes and time.monotonic() < until:
            time.sleep(_POLL_S)
            self.reap()


@dataclass(frozen=True)
class Program:
    """What a daemon is: its command and its environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]

    def run_by(self, interpreter: str) -> Program:
        """The same with another Python, which finds its modules where it is installed."""
        if interpreter == self.argv[0]:
            return self
        kept = {name: value for name, value in self.environment.items() if name not in _WHERE_MODULES_ARE}
        return Program((interpreter, *self.argv[1:]), kept)


_WHERE_MODULES_ARE = ("PYTHONPATH", "PYTHONHOME")


_BECOME = ("/bin/sh", "-c", 'exec "$@"', "sh")


def spawn(program: Program, variables: Mapping[str, str], fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a daemon with these descriptors and further variables, in a session of its own.

    The program may lie on a filesystem that hangs. Popen waits until something runs: that is a shell, on this machine,
    which becomes the program.
    """
    process = subprocess.Popen(
        (*_BECOME, *program.argv), pass_fds=tuple(fds), stdin=subprocess.DEVNULL, start_new_session=True,
        env={**program.environment, **variables, messages.ENV_VERSION: messages.VERSION},
    )  # fmt: skip
    try:
        # The supervisor may be spared by the out-of-memory killer; the daemon, which can be replaced, is not.
        with open(f"/proc/{process.pid}/oom_score_adj", "wb") as score:
            score.write(b"0")
    except OSError:
        pass  # it has ended already
    return process


class Giver(Protocol):
    """A process that waits to be given a mount (``standby.Standby``)."""

    def give(self, fds: Sequence[int], passthrough: bool) -> bool:
        """Hand the descriptors over; False when it no longer takes them."""

    def process(self) -> subprocess.Popen[bytes]:
        """The process, for its new owner."""

    def discard(self) -> None:
        """End it."""


class Child(Process):
    """A running daemon. ``peer_fd`` carries FUSE messages, ``control`` its questions, ``events`` our news."""

    def __init__(
        self,
        program: Program,
        state: bytes,
        payloads_fd: int,
        *,
        passthrough: bool,
        standby: Giver | None = None,
    ) -> None:
        """Start it, or give the mount to ``standby``; ``OSError`` when the program cannot be run."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
        state_fd = os.memfd_create("cachexfs-state", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(state_fd), "wb") as writer:
                writer.write(state)
            os.lseek(state_fd, 0, os.SEEK_SET)
            for sock in pairs[0]:
                _enlarge(sock)
            theirs = [*(pair[1].fileno() for pair in pairs), state_fd, payloads_fd]
            if standby is not None and standby.give(theirs, passthrough):
                super().__init__(standby.process())
            else:
                if standby is not None:
                    standby.discard()
                variables = {name: str(fd) for name, fd in zip(messages.ENV_FDS, theirs, strict=True)}
                variables[messages.ENV_PASSTHROUGH] = str(int(passthrough))
                super().__init__(spawn(program, variables, theirs))
        except BaseException:
            for pair in pairs:
                pair[0].close()
            raise
        finally:
            os.close(state_fd)
            for pair in pairs:
                pair[1].close()
        self.peer, self.control, self.events = (pair[0] for pair in pairs)
        for sock in (self.peer, self.control, self.events):
            sock.setblocking(False)
        #: Whether the daemon's end of the control socket is open.
        self.is_asking = True
        self.peer_fd = self.peer.fileno()

    def tell(self, event: messages.Event) -> bool:
        """Send an event; False when the daemon no longer takes any."""
        try:
            self.events.send(messages.Message(event).pack())
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Our ends of its sockets."""
        for sock in (self.peer, self.control, self.events):
            sock.close()
