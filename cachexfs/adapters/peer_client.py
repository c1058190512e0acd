"""``Peers`` over TCP: calls to other nodes' daemons.

Role: adaptor for the engine. Blocks go out by sendfile with a window of them unanswered; other calls are one request
and one reply.

Concurrency: coroutines of one trio thread. A call has a connection to itself, taken from a small pool per node, and
returns it only when every reply has arrived: a call that fails or is cancelled closes its connection. Each kind of
call has its own bound on connections, so that a ping does not wait behind a commit. A connection that the peer closed
while it was idle is replaced, and the call repeated once: all calls may be repeated.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import trio

from cachexfs.adapters.peer_stream import PeerStream
from cachexfs.core.digest import BLOCK_BYTES, block_digest
from cachexfs.core.manifest import MANIFEST_BYTES_MAX
from cachexfs.core.messages import (
    NONCE_BYTES,
    Clock,
    Commit,
    Data,
    Done,
    Drop,
    Failed,
    GetManifest,
    Ping,
    Push,
    Read,
    Reply,
    Request,
)
from cachexfs.core.wire import AuthenticationError, Connection, LocalProtocolError, Received, check_secret
from cachexfs.errors import CorruptError, PeerError

T = TypeVar("T")
R = TypeVar("R", bound=Reply)

READ_AHEAD_PIECES = 4
CALL_ERRORS = (PeerError, OSError, trio.TooSlowError)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Deadlines and bounds of calls to one node."""

    connect_s: float = 5.0
    stall_s: float = 15.0  # without progress in one call, commits excepted
    commit_s: float = 60.0  # an NVMe that has GiBs to sync
    ping_s: float = 5.0
    idle_s: float = 60.0  # then the connection is closed (before the server would)
    window_blocks: int = 8
    bulk_connections: int = 4
    read_connections: int = 8
    commit_connections: int = 16
    quick_connections: int = 4


class PeerClients:
    """Implements ``engine.interfaces.Peers``. ``resolve`` gives a node's (host, port); it raises ``PeerError`` or
    ``OSError`` for a node it does not know.

    An errno that the peer's disk caused (ENOSPC, EIO, EDQUOT, EROFS) arrives as ``OSError`` with that errno.
    """

    def __init__(
        self,
        *,
        node: str,
        job: str,
        secret: bytes,
        resolve: Callable[[str], tuple[str, int]],
        limits: ClientLimits | None = None,
    ) -> None:
        check_secret(secret)
        self._node = node
        self._job = job
        self._secret = secret
        self._resolve = resolve
        self._limits = limits or ClientLimits()
        self._pools: dict[str, _Pool] = {}

    def close(self) -> None:
        """Close idle connections. Calls under way are the caller's to cancel."""
        for pool in self._pools.values():
            pool.close_idle()

    def forget(self, node: str) -> None:
        """Close the idle connections to a node that is lost or has moved."""
        pool = self._pools.get(node)
        if pool:
            pool.close_idle()

    # --- Peers -------------------------------------------------------------------------------------------------

    async def push(self, node: str, stage: str, source_fd: int, blocks: Sequence[tuple[int, int, bytes]]) -> None:
        """See ``Peers.push``. A block whose bytes changed while they were sent is a ``PeerError`` that names it."""
        for offset, length, _ in blocks:
            if offset % BLOCK_BYTES or not 0 < length <= BLOCK_BYTES:
                raise LocalProtocolError(f"{length} bytes at {offset} are no block")
        if blocks:
            await self._call(node, "bulk", lambda link: self._push(link, stage, source_fd, blocks))

    async def commit(self, node: str, stage: str, manifest: bytes) -> str:
        """See ``Peers.commit``."""

        async def call(link: _Link) -> str:
            await link.request(Commit(1, stage), manifest)
            return (await link.reply(Done, 1, self._limits.commit_s)).text

        return await self._call(node, "commit", call)

    async def read(self, node: str, stage: str, offset: int, length: int) -> bytes:
        """See ``Peers.read``."""
        buffer = memoryview(bytearray(max(length, 0)))
        return bytes(buffer[: await self.read_into(node, stage, offset, buffer)])

    async def read_into(self, node: str, stage: str, offset: int, view: memoryview) -> int:
        """``read`` into a buffer of the caller's; returns the bytes that there were."""
        return await self._call(node, "read", lambda link: self._read(link, stage, offset, view))

    async def manifest(self, node: str, stage: str) -> bytes:
        """See ``Peers.manifest``."""

        async def call(link: _Link) -> bytes:
            await link.request(GetManifest(1, stage))
            return bytes(await link.data(1, self._limits.stall_s, MANIFEST_BYTES_MAX))

        return await self._call(node, "quick", call)

    async def drop(self, node: str, stage: str) -> None:
        """See ``Peers.drop``."""

        async def call(link: _Link) -> None:
            await link.request(Drop(1, stage))
            await link.reply(Done, 1, self._limits.commit_s)

        await self._call(node, "quick", call)

    async def ping(self, node: str) -> float:
        """See ``Peers.ping``."""

        async def call(link: _Link) -> float:
            start_s = time.monotonic()
            await link.request(Ping(1))
            reply = await link.reply(Clock, 1, self._limits.ping_s)
            return reply.time_s + (time.monotonic() - start_s) / 2

        with trio.fail_after(self._limits.ping_s):
            return await self._call(node, "quick", call)

    # --- one call on one connection ----------------------------------------------------------------------------

    async def _push(self, link: _Link, stage: str, fd: int, blocks: Sequence[tuple[int, int, bytes]]) -> None:
        window = trio.Semaphore(self._limits.window_blocks)
        failures: list[Exception] = []

        async def replies(scope: trio.CancelScope) -> None:
            outstanding = set(range(len(blocks)))
            try:
                while outstanding:
                    done = await link.reply(Done, outstanding, self._limits.stall_s)
                    outstanding.remove(done.id)
                    window.release()
            except CALL_ERRORS as error:
                failures.append(error)
                scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(replies, nursery.cancel_scope)
            try:
                for number, (offset, length, digest) in enumerate(blocks):
                    await window.acquire()
                    await link.request_file(Push(number, stage, offset), fd, offset, length, digest)
            except CALL_ERRORS as error:
                failures.append(error)
                nursery.cancel_scope.cancel()
        if failures:
            raise failures[0]

    async def _read(self, link: _Link, stage: str, offset: int, view: memoryview) -> int:
        end = offset + len(view)
        edges = [offset, *range((offset // BLOCK_BYTES + 1) * BLOCK_BYTES, end, BLOCK_BYTES), end]
        pieces = list(itertools.pairwise(edges)) if view else []
        count, ended = 0, False
        for number, (low, high) in enumerate(pieces):
            # Requests are small: a few are on their way while a reply is received.
            for ahead in range(number + READ_AHEAD_PIECES if number else 0, number + READ_AHEAD_PIECES + 1):
                if ahead < len(pieces):
                    await link.request(Read(ahead, stage, pieces[ahead][0], pieces[ahead][1] - pieces[ahead][0]))
            got = await link.data_into(number, self._limits.stall_s, view[low - offset : high - offset])
            if not ended:  # a file that has grown since then is still short here
                count += got
            ended = ended or got < high - low
        return count

    # --- connections -------------------------------------------------------------------------------------------

    async def _call(self, node: str, lane: str, work: Callable[[_Link], Awaitable[T]]) -> T:
        pool = self._pools.get(node)
        if pool is None:
            pool = self._pools[node] = _Pool(self._limits)
        async with pool.lanes[lane]:
            link = pool.take_idle()
            if link is not None:
                try:
                    return await self._on(pool, link, work)
                except (ConnectionResetError, BrokenPipeError):
                    pool.close_idle()  # the peer was started again: the other connections are gone as well
            return await self._on(pool, await self._connect(node), work)

    async def _on(self, pool: _Pool, link: _Link, work: Callable[[_Link], Awaitable[T]]) -> T:
        try:
            return await work(link)
        finally:
            # Cancelled, failed or refused: what counts is whether every request has its whole answer.
            if link.reusable:
                pool.give(link)
            else:
                link.stream.close()

    async def _connect(self, node: str) -> _Link:
        host, port = self._resolve(node)
        with trio.fail_after(self._limits.connect_s):
            socket_stream = await trio.open_tcp_stream(host, port)
            connection = Connection.client(self._secret, self._job, self._node, node, os.urandom(NONCE_BYTES))
            stream = PeerStream(socket_stream.socket, connection, self._limits.stall_s)
            try:
                await stream.handshake()
            except ConnectionResetError:
                stream.close()
                raise AuthenticationError(
                    f"{node} at {host}:{port} closed the connection during authentication: another secret, another "
                    "job, or this node is not in its list"
                ) from None
            except BaseException:
                stream.close()
                raise
        return _Link(node, stream)


class _Link:
    """An authenticated connection and the number of requests on it that have no whole answer yet."""

    def __init__(self, node: str, stream: PeerStream) -> None:
        self.node = node
        self.stream = stream
        self.idle_since_s = 0.0
        self._unanswered = 0

    @property
    def reusable(self) -> bool:
        """No answer can be confused with that to a later call."""
        return not self.stream.broken and self._unanswered == 0

    async def request(self, request: Request, payload: bytes | None = None) -> None:
        """Send a request."""
        self._unanswered += 1
        await self.stream.send(request, payload)

    async def request_file(self, request: Request, fd: int, offset: int, length: int, digest: bytes) -> None:
        """Send a request with a piece of a file as payload."""
        self._unanswered += 1
        await self.stream.send_file(request, fd, offset, length, digest)

    async def _receive(
        self, kind: type[R], request_ids: int | AbstractSet[int], deadline_s: float
    ) -> tuple[R, Received]:
        with trio.fail_after(deadline_s):
            received = await self.stream.receive()
        reply = received.message
        if reply.id not in ({request_ids} if isinstance(request_ids, int) else request_ids):
            self._break(f"answered request {reply.id}, which was not made")
        if received.payload_bytes and not isinstance(reply, Data):
            self._break(f"sent a payload with a {type(reply).__name__}")
        if isinstance(reply, Failed):
            self._unanswered -= 1
            raise _error_of(self.node, reply)
        if not isinstance(reply, kind):
            self._break(f"answered with a {type(reply).__name__} where a {kind.__name__} was due")
        return reply, received

    async def reply(self, kind: type[R], request_ids: int | AbstractSet[int], deadline_s: float) -> R:
        """The answer to one of these requests, without payload. Raises the error that it names."""
        reply, _ = await self._receive(kind, request_ids, deadline_s)
        self._unanswered -= 1
        return reply

    async def data_into(self, request_id: int, deadline_s: float, view: memoryview) -> int:
        """The payload of the answer, in ``view``; returns its length."""
        _, received = await self._receive(Data, request_id, deadline_s)
        if received.payload_bytes > len(view):
            self._break(f"sent {received.payload_bytes} bytes where {len(view)} were asked for")
        await self._payload(received, view[: received.payload_bytes])
        return received.payload_bytes

    async def data(self, request_id: int, deadline_s: float, bytes_max: int) -> bytearray:
        """The payload of the answer, in a buffer of its own."""
        _, received = await self._receive(Data, request_id, deadline_s)
        if received.payload_bytes > bytes_max:
            self._break(f"sent {received.payload_bytes} bytes where at most {bytes_max} are allowed")
        buffer = bytearray(received.payload_bytes)
        await self._payload(received, memoryview(buffer))
        return buffer

    async def _payload(self, received: Received, view: memoryview) -> None:
        if view:
            await self.stream.receive_payload(view)
            if block_digest(view) != received.payload_digest:
                self._break("sent bytes that are not those of their digest")
        self._unanswered -= 1

    def _break(self, what: str) -> NoReturn:
        self.stream.broken = True
        raise PeerError(f"{self.node} {what}")


class _Pool:
    """Connections to one node: idle ones, and how many calls of each kind may run."""

    def __init__(self, limits: ClientLimits) -> None:
        self._idle_s = limits.idle_s
        self._idle: list[_Link] = []
        self.lanes = {
            "bulk": trio.CapacityLimiter(limits.bulk_connections),
            "read": trio.CapacityLimiter(limits.read_connections),
            "commit": trio.CapacityLimiter(limits.commit_connections),
            "quick": trio.CapacityLimiter(limits.quick_connections),
        }

    def take_idle(self) -> _Link | None:
        """The connection used last, if it is still of use."""
        now_s = time.monotonic()
        while self._idle:
            link = self._idle.pop()
            if now_s - link.idle_since_s < self._idle_s and not link.stream.is_readable():
                return link
            link.stream.close()
        return None

    def give(self, link: _Link) -> None:
        """Keep a connection for the next call."""
        link.idle_since_s = time.monotonic()
        self._idle.append(link)
        while self._idle and link.idle_since_s - self._idle[0].idle_since_s > self._idle_s:
            self._idle.pop(0).stream.close()

    def close_idle(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().stream.close()


class PeerCorruptError(PeerError, CorruptError):
    """The peer has looked at its copy and found it damaged: certain, unlike a call that failed."""


def _error_of(node: str, reply: Failed) -> Exception:
    text = f"{node}: {reply.text}"
    if reply.code == "missing":
        return FileNotFoundError(errno.ENOENT, text)
    if reply.code == "os":
        return OSError(reply.errno or errno.EIO, text)
    return PeerCorruptError(text) if reply.code == "corrupt" else PeerError(text)
