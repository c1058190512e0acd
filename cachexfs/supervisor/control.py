"""The daemon's questions on the control socket: ready, register, offer, unregister, stopping.

Role: receives one fixed-size message and at most one descriptor, checks both, acts, answers. What is not a
message is answered with EINVAL and counted; descriptors that came along are always closed here.
Concurrency: the supervisor's one thread, non-blocking. Called by ``run`` when the socket is readable.
"""

from __future__ import annotations

import array
import errno
import os
import socket
from collections.abc import Callable

from .messages import MESSAGE_BYTES, Call, MalformedError, Message, unpack
from .passthrough import Backings, RefusedError

_FDS_MAX = 8
#: Messages that are taken at one time: a daemon that sends without end does not keep the loop from its deadlines.
_AT_ONCE_MAX = 4096
_WITH_FD = (Call.REGISTER, Call.OFFER)


class Control:
    """Answers one daemon. ``on_ready``, ``on_stopping(exit code)`` and ``on_draining`` tell ``run``."""

    def __init__(
        self,
        backings: Backings,
        on_ready: Callable[[], None],
        on_stopping: Callable[[int], None],
        on_draining: Callable[[], None],
    ) -> None:
        self._backings = backings
        self._on_ready = on_ready
        self._on_stopping = on_stopping
        self._on_draining = on_draining
        #: Why registrations are refused; empty when they are accepted.
        self.no_passthrough = ""
        self.refused = 0
        self.last_refusal = ""

    def drain(self, sock: socket.socket) -> bool:
        """All messages that are there (within reason); False when the daemon has closed its end.

        The pump calls this before it passes the reply to an open on: an offer was sent before that reply.
        """
        for _ in range(_AT_ONCE_MAX):
            is_there = self.on_readable(sock)
            if is_there is not True:
                return is_there is None
        return True

    def on_readable(self, sock: socket.socket) -> bool | None:
        """One message: True. None when there is none now, False when the daemon has closed its end."""
        fds = array.array("i")
        try:
            raw, ancillary, flags, _ = sock.recvmsg(
                MESSAGE_BYTES + 1, socket.CMSG_SPACE(_FDS_MAX * fds.itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError:
            return False
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        try:
            if not raw and not fds:
                return False
            is_cut = bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))
            reply = self._answer(raw, list(fds), is_cut)
        finally:
            for fd in fds:
                os.close(fd)
        if reply is not None:
            try:
                sock.send(reply.pack())
            except OSError:
                pass  # it does not read its answers; its own deadline tells it
        return True

    def _answer(self, raw: bytes, fds: list[int], is_cut: bool) -> Message | None:
        sequence = 0
        is_answered = True
        try:
            message = unpack(raw)
            sequence = message.sequence
            _check(message, len(fds), is_cut)
            is_answered = message.kind != Call.OFFER
            value = self._act(message, fds)
        except MalformedError as error:
            value = self._refuse(errno.EINVAL, f"control message: {error}")
        except RefusedError as error:
            value = self._refuse(error.code, f"descriptor: {error}")
        except OSError as error:
            value = self._refuse(error.errno or errno.EIO, f"kernel: {error.strerror}")
        return Message(Call.READY, sequence, value, 0, is_reply=True) if is_answered else None

    def _act(self, message: Message, fds: list[int]) -> int:
        if message.kind in _WITH_FD:
            if self.no_passthrough:
                raise RefusedError(errno.EOPNOTSUPP, self.no_passthrough)
            return self._backings.register(message.fh, fds[0])
        if message.kind == Call.UNREGISTER:
            self._backings.unregister(message.fh)
        elif message.kind == Call.READY:
            self._on_ready()
        elif message.kind == Call.DRAINING:
            self._on_draining()
        else:
            self._on_stopping(message.value)
        return 0

    def _refuse(self, code: int, what: str) -> int:
        self.refused += 1
        self.last_refusal = what
        return -code


def _check(message: Message, fd_count: int, is_cut: bool) -> None:
    if is_cut or message.is_reply or message.kind not in Call.__members__.values():
        raise MalformedError("cut, a reply, or of unknown kind")
    if fd_count != (1 if message.kind in _WITH_FD else 0):
        raise MalformedError(f"{fd_count} descriptors")
