"""The status socket: one command a line in, one JSON object a line out.

Role: ``status``, ``restart``, ``stop`` for the command line tool. Only the owner of the socket (mode 0600) and
root can connect. Concurrency: the supervisor's one thread, non-blocking, few clients. Called by ``run``.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable

_CLIENTS_MAX = 16
_COMMAND_BYTES_MAX = 8192
#: How long the supervisor of an earlier mount may take for its end, and how often it is looked at. Seconds.
_EARLIER_S_MAX, _POLL_S = 10.0, 0.05


class StatusSocket:
    """Listens on ``path`` (None: nowhere) and hands each command to ``answer``."""

    def __init__(self, path: str | None, epoll: select.epoll, answer: Callable[[str], dict[str, object]]) -> None:
        self._epoll = epoll
        self._answer = answer
        self._clients: dict[int, socket.socket] = {}
        self._path = path
        self._listener: socket.socket | None = None
        if path is None:
            return
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        _remove_dead(path)
        before = os.umask(0o177)
        try:
            self._listener.bind(path)
        finally:
            os.umask(before)
        self._listener.listen(_CLIENTS_MAX)
        epoll.register(self._listener.fileno(), select.EPOLLIN)

    def on_event(self, fd: int) -> None:
        """The listener or a client is readable."""
        if self._listener is not None and fd == self._listener.fileno():
            self._accept(self._listener)
        elif fd in self._clients:
            self._read(fd)

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        if len(self._clients) >= _CLIENTS_MAX:
            self._forget(next(iter(self._clients)))
        client.setblocking(False)
        self._clients[client.fileno()] = client
        self._epoll.register(client.fileno(), select.EPOLLIN)

    def _read(self, fd: int) -> None:
        client = self._clients[fd]
        try:
            raw = client.recv(_COMMAND_BYTES_MAX)
            if raw:
                command = raw.decode("utf-8", "replace").strip()
                client.send(json.dumps(self._answer(command)).encode() + b"\n")
        except OSError:
            pass  # the client went away
        self._forget(fd)

    def _forget(self, fd: int) -> None:
        client = self._clients.pop(fd)
        self._epoll.unregister(fd)
        client.close()

    def close(self) -> None:
        """Stop listening and remove the name."""
        for fd in list(self._clients):
            self._forget(fd)
        if self._listener is not None and self._path is not None:
            # The name first: once nobody listens behind it, the next supervisor takes it for itself.
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass
            self._listener.close()


def _remove_dead(path: str) -> None:
    """Remove the socket of a supervisor that died; ``FileExistsError`` when one lives behind it and does not end.

    That of an earlier mount may be at its last steps, its daemon gone.
    """
    until = time.monotonic() + _EARLIER_S_MAX
    while os.path.exists(path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(path)
            except FileNotFoundError:
                return
            except ConnectionRefusedError:
                os.unlink(path)
                return
        if time.monotonic() > until:
            raise FileExistsError(
                f"the supervisor of an earlier mount still listens on {path}: it ends once its daemon has"
            )
        time.sleep(_POLL_S)


def ask(path: str, command: str, *, timeout_s: float = 5.0) -> dict[str, object]:
    """Send one command to a supervisor and return its answer; ``OSError`` when none listens or answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        sock.connect(path)
        sock.sendall(command.encode() + b"\n")
        raw = b""
        while part := sock.recv(65536):
            raw += part
    answer = json.loads(raw)
    if not isinstance(answer, dict):
        raise OSError("the supervisor's answer is not an object")
    return answer
