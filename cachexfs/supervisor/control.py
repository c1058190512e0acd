"""What the daemon says on the control socket: ready, an offer, alive, stopping, draining, shared.

Role: receives one fixed-size message and at most one descriptor, checks both, acts. What is not a message is counted
and left; descriptors that came along are always closed here. Nothing is answered.
Concurrency: the supervisor's one thread, non-blocking. Called by ``run`` when the socket is readable.
"""

from __future__ import annotations

import array
import os
import socket
from typing import Protocol

from .messages import MESSAGE_BYTES, Call, MalformedError, unpack
from .passthrough import Backings, RefusedError

_FDS_MAX = 8
#: Messages that are taken at one time: a daemon that sends without end does not keep the loop from its deadlines.
_AT_ONCE_MAX = 4096


class Listener(Protocol):
    """Who acts on what the daemon says."""

    def daemon_ready(self) -> None:
        """It has adopted the state and is about to serve."""

    def daemon_alive(self) -> None:
        """Its loop runs."""

    def daemon_shares(self) -> None:
        """It takes the bytes of large writes from the shared memory."""

    def daemon_stopping(self, code: int) -> None:
        """It has finished on purpose, with this exit code."""

    def daemon_draining(self) -> None:
        """The mount has ended and it has work left."""


class Control:
    """Takes what one daemon says."""

    def __init__(self, backings: Backings, listener: Listener) -> None:
        self._backings = backings
        self._listener = listener
        #: Why offers are refused; empty when they are taken.
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
            self._take(raw, fds, bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)))
        except MalformedError as error:
            self._refuse(f"control message: {error}")
        except RefusedError as error:
            self._refuse(f"descriptor: {error}")
        except OSError as error:
            self._refuse(f"kernel: {error.strerror}")
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _take(self, raw: bytes, fds: array.array[int], is_cut: bool) -> None:
        message = unpack(raw)
        if is_cut or message.kind not in Call.__members__.values():
            raise MalformedError("cut, or of unknown kind")
        if len(fds) != (1 if message.kind == Call.OFFER else 0):
            raise MalformedError(f"{len(fds)} descriptors")
        if message.kind == Call.OFFER:
            if self.no_passthrough:
                raise RefusedError(self.no_passthrough)
            self._backings.register(message.fh, fds[0])
        elif message.kind == Call.ALIVE:
            self._listener.daemon_alive()
        elif message.kind == Call.SHARED:
            self._listener.daemon_shares()
        elif message.kind == Call.READY:
            self._listener.daemon_ready()
        elif message.kind == Call.DRAINING:
            self._listener.daemon_draining()
        else:
            self._listener.daemon_stopping(message.value)

    def _refuse(self, what: str) -> None:
        self.refused += 1
        self.last_refusal = what
