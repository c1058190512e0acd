"""One TCP connection between two daemons: sockets under a ``wire.Connection``.

Role: what ``PeerClients`` and ``PeerServer`` share. Bulk bytes do not pass through Python objects: ``send_file`` uses
sendfile, ``receive_payload`` fills a buffer of the caller's.

Concurrency: one task receives; sends may come from several and take turns. A send or a payload that was cancelled or
failed half way leaves the connection ``broken``: it can only be closed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket

import trio

from cachexfs import mountinfo
from cachexfs.core.digest import DIGEST_BYTES, Buffer, block_digest
from cachexfs.core.messages import Message
from cachexfs.core.wire import Authenticated, Connection, Received
from cachexfs.errors import PeerError

#: One read for a small frame; of a large one only so much passes through the connection's own buffer.
READ_BYTES = 4096
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3


class PeerStream:
    """A connected socket and the protocol's state. ``stall_s``: longest time without a byte of a frame under way."""

    def __init__(self, sock: trio.socket.SocketType, connection: Connection, stall_s: float) -> None:
        self._sock = sock
        self.connection = connection
        self._stall_s = stall_s
        self._send_lock = trio.Lock()
        self.broken = False
        _set_options(sock, stall_s)

    def close(self) -> None:
        """Close the socket at once; tasks that wait for it get ``ClosedResourceError`` or ``OSError``."""
        self.broken = True
        self._sock.close()

    def is_readable(self) -> bool:
        """Bytes or an end wait in the socket: between calls, either means that the connection is of no use."""
        try:
            self._sock._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)  # type: ignore[attr-defined]
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    # --- receiving ---------------------------------------------------------------------------------------------

    async def handshake(self) -> str:
        """Run the authentication to its end; returns the peer's name. Raises ``PeerError``, ``OSError``.

        The caller sets the deadline.
        """
        try:
            await self._write(self.connection.data_to_send())
            while True:
                event = self.connection.next_event()
                await self._write(self.connection.data_to_send())
                if isinstance(event, Authenticated):
                    return event.peer
                await self._fill()
        except BaseException:
            self.broken = True
            raise

    async def receive(self) -> Received:
        """The next message. Raises ``PeerError``, ``ConnectionResetError`` at the end, ``OSError``.

        How long to wait for its first byte is for the caller to bound; cancelled then, nothing is lost.
        """
        while True:
            event = self.connection.next_event()
            if isinstance(event, Received):
                return event
            await self._fill()

    async def _fill(self) -> None:
        data = await self._sock.recv(READ_BYTES)
        _some(len(data))
        self.connection.receive_data(data)

    async def receive_payload(self, view: memoryview) -> None:
        """Fill ``view``, whose length is the message's ``payload_bytes``. Raises ``TooSlowError`` when it stalls."""
        connection = self.connection
        try:
            filled = connection.take_payload(view)
            while filled < len(view):
                with trio.fail_after(self._stall_s):
                    count = _some(await self._sock.recv_into(view[filled:]))
                connection.payload_received(count)
                filled += count
            connection.end_payload()
        except BaseException:
            self.broken = True
            raise

    # --- sending -----------------------------------------------------------------------------------------------

    async def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Send a message with its payload. Raises ``OSError``, ``TooSlowError`` when nothing moves for ``stall_s``."""
        digest = block_digest(payload) if payload else bytes(DIGEST_BYTES)
        async with self._send_lock:
            head = self.connection.send(message, len(payload) if payload else 0, digest)
            if payload and len(payload) <= READ_BYTES:
                head, payload = head + bytes(payload), None
            try:
                await self._write(head)
                if payload:
                    await self._write(payload)
            except BaseException:
                self.broken = True
                raise

    async def send_file(self, message: Message, fd: int, offset: int, length: int, digest: bytes) -> None:
        """Send a message whose payload is a piece of a file, by sendfile. ``digest`` is what the bytes should have.

        Raises as ``send``; ``PeerError`` when the file is shorter.
        """
        async with self._send_lock:
            head = self.connection.send(message, length, digest)
            try:
                await self._write(head, more=True)
                await self._sendfile(fd, offset, length)
            except BaseException:
                self.broken = True
                raise

    async def _write(self, data: Buffer, more: bool = False) -> None:
        view = memoryview(data)
        flags = socket.MSG_MORE if more else 0
        while view:
            with trio.fail_after(self._stall_s):
                sent = await self._sock.send(view, flags)
            view = view[sent:]

    async def _sendfile(self, fd: int, offset: int, length: int) -> None:
        inline = is_in_memory(os.fstat(fd).st_dev)
        end = offset + length
        while offset < end:
            count = end - offset
            if inline:
                sent = _sendfile_some(self._sock.fileno(), fd, offset, count)
            else:
                sent = await trio.to_thread.run_sync(_sendfile_some, self._sock.fileno(), fd, offset, count)
            if sent == 0:
                raise PeerError(f"the file to be sent ends at byte {offset}, {count} bytes early")
            if sent < 0:
                with trio.fail_after(self._stall_s):
                    await trio.lowlevel.wait_writable(self._sock)
            else:
                offset += sent
        await trio.lowlevel.checkpoint()


def _some(count: int) -> int:
    if count == 0:
        raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
    return count


def _sendfile_some(sock_fd: int, fd: int, offset: int, count: int) -> int:
    """Bytes that a non-blocking socket took, 0 at the end of the file, -1 when it takes none now."""
    try:
        return os.sendfile(sock_fd, fd, offset, count)
    except BlockingIOError:
        return -1


@functools.lru_cache(maxsize=64)
def is_in_memory(device: int) -> bool:
    """A tmpfs, by its ``st_dev``: reading it never waits for a disk, so it may be done in the trio thread."""
    number = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.kind in ("tmpfs", "ramfs") for mount in mountinfo.read() if mount.device == number), False)


def _set_options(sock: trio.socket.SocketType, stall_s: float) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
