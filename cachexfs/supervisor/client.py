"""The daemon's side of the supervisor: small, synchronous, standard library only.

Role: what a pyfuse3 daemon needs to run behind a supervisor::

    supervisor = Supervisor.from_environ()          # None: mount yourself, as without a supervisor
    payloads = supervisor.share_payloads()          # may be left out: the write handler's ``buf`` is payloads.of(buf)
    pyfuse3.init(operations, supervisor.fuse_path, options)
    ...adopt supervisor.state...
    supervisor.ready()
    # a task: await trio.lowlevel.wait_readable(supervisor.events_fd); supervisor.next_event()

Concurrency: one thread (trio's). Nothing waits for an answer. Called by ``cachexfs.daemon`` and by the tests' daemon.
"""

from __future__ import annotations

import array
import os
import socket
from contextlib import suppress
from typing import Self

from . import messages
from .messages import Call, Event, Message, State
from .payloads import SharedPayloads
from .replay import PID_MAX, Replays

#: How long the supervisor may leave the control socket full, seconds. Then the daemon goes on as if refused.
FULL_S_MAX = 5.0


class Supervisor:
    """The connection to the supervisor that started this process."""

    def __init__(
        self,
        fuse_fd: int,
        control: socket.socket,
        events: socket.socket,
        state: State,
        payloads_fd: int = -1,
        *,
        passthrough: bool,
        mount_id: str,
        mountpoint: str,
    ) -> None:
        self._fuse_fd = fuse_fd
        self._control = control
        self._events = events
        self._payloads_fd = payloads_fd
        #: What an earlier daemon of this mount left behind.
        self.state = state
        #: The unanswered requests of earlier daemons.
        self.replays = Replays(state.replays)
        #: Whether ``offer`` can succeed on this machine.
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
        version = env.pop(messages.ENV_VERSION, "")
        if (standby or raw[0]) and version != messages.VERSION:
            raise messages.MalformedError("the mount's supervisor is of another version")
        if standby.isdigit():
            fds, passthrough = _wait_for_handover(int(standby))
        elif not raw[0]:
            return None
        elif not all(number.isdigit() for number in raw):
            raise messages.MalformedError("the supervisor's descriptors are not numbers")
        else:
            fds = [int(number) for number in raw]
        fuse_fd, control_fd, events_fd, state_fd, payloads_fd = fds
        for fd in fds:
            os.set_inheritable(fd, False)
        with os.fdopen(state_fd, "rb") as reader:
            state = messages.unpack_state(reader.read())
        control = socket.socket(fileno=control_fd)
        control.settimeout(FULL_S_MAX)
        events = socket.socket(fileno=events_fd)
        events.setblocking(False)
        return cls(
            fuse_fd,
            control,
            events,
            state,
            payloads_fd,
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
        """The next event, or None when there is none now. A supervisor that died counts as ``Event.END``.

        Call it from the task whose life says that the daemon lives: here the supervisor's pulse is answered.
        """
        try:
            raw = self._events.recv(messages.MESSAGE_BYTES + 1)
        except BlockingIOError:
            return None
        except OSError:
            return Event.END
        if not raw:
            return Event.END
        try:
            event = Event(messages.unpack(raw).kind)
        except ValueError:
            return None
        if event is not Event.PULSE:
            return event
        with suppress(OSError):
            self._say(Call.ALIVE)
        return None

    def request_id(self, pid: int) -> int | None:
        """The id of a request, the same when it is repeated; None for a ``pid`` that is a process.

        ``pid`` is ``ctx.pid`` of the handler of a create, mkdir, mknod, symlink, link, unlink, rmdir, rename,
        removexattr, setattr or setxattr: behind a supervisor it is not the caller's. Ids belong to ``mount_id``.
        """
        return pid if pid > PID_MAX else None

    def share_payloads(self) -> SharedPayloads:
        """From now on large writes come as references to shared memory: their handler passes ``buf`` through ``of``.

        Call it at most once, before ``pyfuse3.init``. ``OSError`` when that cannot be.
        """
        payloads = SharedPayloads(self._payloads_fd)
        self._say(Call.SHARED)
        return payloads

    def ready(self) -> None:
        """The state is adopted and the main loop is about to run. ``OSError`` when nobody listens."""
        self._say(Call.READY)

    def stopping(self, code: int = 0) -> None:
        """Finished on purpose: the supervisor unmounts, sends ``Event.END`` and ends with ``code``."""
        with suppress(OSError):  # it is dead, and so is the mount
            self._say(Call.STOPPING, value=code)

    def draining(self) -> None:
        """After ``Event.END``: work is left, this process exits by itself when it is done."""
        with suppress(OSError):
            self._say(Call.DRAINING)

    def offer(self, fh: int, fd: int) -> bool:
        """Let the kernel serve ``fh`` from the open file ``fd`` (the caller's); call it before the open is answered.

        The supervisor takes the offer before it passes the next reply on. Where it refuses, the open is served by the
        handler with the flags that the reply has; ``status`` counts it. An offer is a permission, not a promise: READ
        and WRITE may still come (an open beside cached ones). False when it cannot be sent.
        """
        if not self.passthrough:
            return False
        try:
            self._say(Call.OFFER, fh=fh, fds=(fd,))
        except OSError:
            return False
        return True

    def _say(self, kind: Call, *, value: int = 0, fh: int = 0, fds: tuple[int, ...] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._control.sendmsg([Message(kind, value, fh).pack()], rights)


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
