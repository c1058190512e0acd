"""The next daemon, started ahead: its imports are done when the present one dies.

Role: with ``--standby`` the pause at a death shrinks to the adoption of the state, and an upgrade whose program
cannot start is noticed while the old daemon still serves. Costs one idle process.
Concurrency: the supervisor's one thread. Called by ``run``; ``client`` is the other end.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
from collections.abc import Sequence

from . import messages
from .child import Killed, Process, Program, spawn

_NICE_AHEAD = 10  # enough to be ready for an upgrade where all processors are busy


class Standby(Process):
    """A daemon process that has been started ahead: it waits, its imports done, to be given a mount.

    Until then it leaves the processors to everybody else, if it may come back from that.
    """

    def __init__(self, program: Program, killed: Killed) -> None:
        """Start it; ``OSError`` when the program cannot be run. ``killed`` gets it when it is not wanted."""
        self._killed = killed
        self.handover, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            variables = {messages.ENV_STANDBY_FD: str(theirs.fileno())}
            super().__init__(spawn(program, variables, [theirs.fileno()]))
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        if os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20 - self._nice:
            self._set_nice(_NICE_AHEAD)
        self.handover.setblocking(False)

    def _set_nice(self, nice: int) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, self.pid, nice)
        except OSError:
            pass  # it has ended, or we are root without CAP_SYS_NICE: it works all the same

    def is_warm(self) -> bool | None:
        """Whether it has said that it waits; False: it is ending, or of another version. None: not yet."""
        try:
            return messages.unpack(self.handover.recv(messages.MESSAGE_BYTES + 1)).kind == messages.HANDOVER
        except BlockingIOError:
            return None
        except (OSError, messages.MalformedError):
            return False

    def give(self, fds: Sequence[int], passthrough: bool) -> bool:
        """Hand the descriptors over and close our end; False when it no longer takes them."""
        message = messages.Message(messages.HANDOVER, value=int(passthrough)).pack()
        self._set_nice(self._nice)
        try:
            socket.send_fds(self.handover, [message], list(fds))
        except OSError:
            return False
        finally:
            self.handover.close()
        return True

    def process(self) -> subprocess.Popen[bytes]:
        """What ``Child`` takes over."""
        return self._process

    def discard(self) -> None:
        """End it."""
        self.handover.close()
        self._killed.add(self)


class Ahead:
    """At most one standby, and its socket in the epoll until it has said that it waits."""

    def __init__(self, program: Program, epoll: select.epoll, killed: Killed) -> None:
        self._killed = killed
        #: What the next standby is.
        self.program = program
        self._epoll = epoll
        self._standby: Standby | None = None
        #: The descriptor to watch, or -1.
        self.fd = -1
        #: Whether the standby waits with its imports done.
        self.is_warm = False

    @property
    def pid(self) -> int:
        """Process id of the standby; 0 when there is none."""
        return self._standby.pid if self._standby is not None else 0

    def start(self) -> str:
        """Start one unless there is one; why it cannot be run, or the empty string."""
        if self._standby is None:
            try:
                self._standby = Standby(self.program, self._killed)
            except OSError as error:
                return f"cannot run {self.program.argv[0]}: {error.strerror}"
            self.fd = self._standby.handover.fileno()
            self._epoll.register(self.fd, select.EPOLLIN)
        return ""

    def on_readable(self) -> bool | None:
        """The standby said something: ``Standby.is_warm``. None, too, when the event was an earlier one's."""
        said = self._standby.is_warm() if self._standby is not None else None
        if said is not None:
            self._unwatch()
            self.is_warm = said
        return said

    def has_exited(self) -> bool:
        """Whether there is one that has ended; ``discard`` it then."""
        return self._standby is not None and self._standby.has_exited()

    def take(self) -> Standby | None:
        """Give the standby away, warm or not; None when there is none alive."""
        standby, self._standby = self._standby, None
        self._unwatch()
        self.is_warm = False
        if standby is not None and standby.has_exited():
            standby.discard()
            return None
        return standby

    def discard(self) -> None:
        """End the standby."""
        standby = self.take()
        if standby is not None:
            standby.discard()

    def _unwatch(self) -> None:
        if self.fd >= 0:
            self._epoll.unregister(self.fd)
            self.fd = -1
