"""The daemon's side of the supervisor: small, synchronous, standard library only.

Role: what a pyfuse3 daemon needs to run behind a supervisor::

    supervisor = Supervisor.from_environ()          # None: mount yourself, as without a supervisor
    pyfuse3.init(operations, supervisor.fuse_path, options)
    ...adopt supervisor.state...
    supervisor.ready()
    # a task: await trio.lowlevel.wait_readable(supervisor.events_fd); supervisor.next_event()

Concurrency: one thread (trio's). ``register`` is a question and its answer over a socket, about 0.1 ms, and
gives up after ``ANSWER_S_MAX``. Called by ``cachexfs.daemon`` and by the tests' daemon.
"""

from __future__ import annotations

import array
import os
import socket
from contextlib import suppress
from typing import Self

from . import messages
from .messages import Call, Event, Message, State
from .replay import PID_MAX, Replays

#: How long an answer of the supervisor may take, seconds. Without one the daemon goes on as if refused.
ANSWER_S_MAX = 5.0


class Supervisor:
    """The connection to the supervisor that started this process."""

    def __init__(
        self,
        fuse_fd: int,
        control: socket.socket,
        events: socket.socket,
        state: State,
        *,
        passthrough: bool,
        mount_id: str,
        mountpoint: str,
    ) -> None:
        self._fuse_fd = fuse_fd
        self._control = control
        self._events = events
        self._sequence = 0
        #: What an earlier daemon of this mount left behind.
        self.state = state
        #: The unanswered requests of earlier daemons.
        self.replays = Replays(state.replays)
        #: Whether ``register`` can succeed on this machine.
        self.passthrough = passthrough
        #: A random name of this mount, the same for all daemons of it.
        self.mount_id = mount_id
        #: Where applications see the filesystem; the daemon must never touch it.
        self.mountpoint = mountpoint

    @classmethod
    def from_environ(cls) -> Self | None:
        """The supervisor named by the environment, or None when this process has none.

        Takes the variables out of the environment and marks the descriptors close-on-exec, so that workers of
        the daemon inherit neither. In a process that was started ahead this waits until the daemon before it has
        ended, so call it after the imports; it exits when the mount ends first. ``MalformedError`` when what was
        inherited is not a supervisor's.
        """
        env = os.environ
        raw = [env.pop(name, "") for name in messages.ENV_FDS]
        passthrough = env.pop(messages.ENV_PASSTHROUGH, "0") == "1"
        mount_id = env.pop(messages.ENV_MOUNT_ID, "")
        mountpoint = env.pop(messages.ENV_MOUNTPOINT, "")
        standby = env.pop(messages.ENV_STANDBY_FD, "")
        if standby.isdigit():
            fds, passthrough = _wait_for_handover(int(standby))
        elif not raw[0]:
            return None
        elif not all(number.isdigit() for number in raw):
            raise messages.MalformedError("the supervisor's descriptors are not numbers")
        else:
            fds = [int(number) for number in raw]
        fuse_fd, control_fd, events_fd, state_fd = fds
        for fd in fds:
            os.set_inheritable(fd, False)
        with os.fdopen(state_fd, "rb") as reader:
            state = messages.unpack_state(reader.read())
        control = socket.socket(fileno=control_fd)
        control.settimeout(ANSWER_S_MAX)
        events = socket.socket(fileno=events_fd)
        events.setblocking(False)
        return cls(
            fuse_fd,
            control,
            events,
            state,
            passthrough=passthrough,
            mount_id=mount_id,
            mountpoint=mountpoint,
        )

    @property
    def fuse_path(self) -> str:
        """The mount point argument for ``pyfuse3.init``."""
        return f"/dev/fd/{self._fuse_fd}"

    @property
    def events_fd(self) -> int:
        """Readable when ``next_event`` has one."""
        return self._events.fileno()

    def next_event(self) -> Event | None:
        """The next event, or None when there is none now. A supervisor that died counts as ``Event.END``."""
        try:
            raw = self._events.recv(messages.MESSAGE_BYTES + 1)
        except BlockingIOError:
            return None
        except OSError:
            return Event.END
        if not raw:
            return Event.END
        try:
            return Event(messages.unpack(raw).kind)
        except ValueError:
            return None

    def request_id(self, pid: int) -> int | None:
        """The id of a request, the same when it is repeated; None for a ``pid`` that is a process.

        ``pid`` is ``ctx.pid`` of the handler of a create, mkdir, mknod, symlink, link, unlink, rmdir, rename,
        removexattr, setattr or setxattr: behind a supervisor it is not the caller's. Ids belong to ``mount_id``.
        """
        return pid if pid > PID_MAX else None

    def ready(self) -> None:
        """The state is adopted and the main loop is about to run. ``OSError`` when nobody answers."""
        value = self._ask(Call.READY)
        if value is None:
            raise TimeoutError("the supervisor does not answer")

    def stopping(self, code: int = 0) -> None:
        """Finished on purpose: the supervisor unmounts, sends ``Event.END`` and ends with ``code``."""
        self._ask(Call.STOPPING, value=code)

    def draining(self) -> None:
        """After ``Event.END``: work is left, this process exits by itself when it is done."""
        self._ask(Call.DRAINING)

    def register(self, fh: int, fd: int) -> int | None:
        """Let the kernel serve ``fh`` from the open file ``fd``; call before answering the open.

        Returns the backing id, or None: unsupported or refused, and the handler serves. An id is a permission,
        not a promise: READ and WRITE may still come (an open beside cached ones). ``fd`` stays the caller's.
        """
        if not self.passthrough:
            return None
        value = self._ask(Call.REGISTER, fh=fh, fd=fd)
        return value if value is not None and value > 0 else None

    def offer(self, fh: int, fd: int) -> bool:
        """As ``register`` without waiting for the answer: the quick way, for every open.

        The supervisor takes the offer before it passes the next reply on. Where it refuses, the open is served
        by the handler with the flags that the reply has; ``status`` counts it. False when it cannot be sent.
        """
        if not self.passthrough:
            return False
        question = Message(Call.OFFER, 0, 0, fh).pack()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            self._control.sendmsg([question], rights)
        except OSError:
            return False
        return True

    def unregister(self, fh: int) -> None:
        """Forget the backing of ``fh``, at the latest when its opens end. RELEASE does so by itself."""
        if self.passthrough:
            self._ask(Call.UNREGISTER, fh=fh)

    def _ask(self, kind: Call, *, value: int = 0, fh: int = 0, fd: int = -1) -> int | None:
        """The answer's value, or None when none came in time."""
        self._sequence = self._sequence % 0x7FFFFFFF + 1
        question = Message(kind, self._sequence, value, fh).pack()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        try:
            self._control.sendmsg([question], rights)
            while True:
                answer = messages.unpack(self._control.recv(messages.MESSAGE_BYTES + 1))
                if answer.sequence == self._sequence and answer.is_reply:
                    return answer.value
        except (OSError, messages.MalformedError):
            return None


def _wait_for_handover(fd: int) -> tuple[list[int], bool]:
    """Say that this process waits, then wait for the mount: (descriptors, passthrough)."""
    with socket.socket(fileno=fd) as sock:
        os.set_inheritable(fd, False)
        with suppress(BrokenPipeError):  # it may have given the mount already, and has closed its end then
            sock.send(Message(messages.HANDOVER).pack())
        raw, fds, _, _ = socket.recv_fds(sock, messages.MESSAGE_BYTES + 1, len(messages.ENV_FDS))
    if not raw:
        raise SystemExit(0)
    message = messages.unpack(raw)
    if message.kind != messages.HANDOVER or len(fds) != len(messages.ENV_FDS):
        raise messages.MalformedError("a handover without its descriptors")
    return fds, message.value == 1
