"""The partner port: takes blocks and commits for this node's replica store, and serves copies to peers.

Role: adaptor. The daemon starts one ``serve`` task; the engine supplies the callbacks.

Concurrency: trio tasks in one thread; a task per connection, and up to ``pushes_per_connection`` blocks of one
connection under way to the disk, answered in the order in which they finish. Any other request waits for the pushes
before it. Buffers are taken from a budget per peer, so that one peer cannot use up the memory of all.

A stranger gets no byte in answer: its connection is closed at the first wrong byte, at ``handshake_s``, or when more
than ``strangers_max`` wait (the oldest goes). A log line at most every ``STRANGER_LOG_INTERVAL_S`` says so.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from cachexfs.adapters.file_digest import read_exactly
from cachexfs.adapters.peer_stream import PeerStream
from cachexfs.adapters.replica_store import ReplicaStore
from cachexfs.core import messages
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
)
from cachexfs.core.wire import Connection, Received, check_secret
from cachexfs.errors import CacheXError, CorruptError, PeerError

log = logging.getLogger(__name__)

STRANGER_LOG_INTERVAL_S = 10.0

#: What ends a connection without being a fault of this side.
_CONNECTION_ERRORS = (PeerError, OSError, trio.TooSlowError, trio.ClosedResourceError, trio.BrokenResourceError)

#: (descriptor of the caller's own, bytes) of a copy in memory; the server closes the descriptor. None: not held.
OpenCopy = Callable[[str], tuple[int, int] | None]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of what peers and strangers can cost."""

    handshake_s: float = 5.0
    stall_s: float = 15.0
    idle_s: float = 300.0
    strangers_max: int = 64
    connections_per_peer: int = 64
    pushes_per_connection: int = 4
    buffer_bytes_per_peer: int = 64 << 20


def no_copy(stage: str) -> tuple[int, int] | None:
    """An ``OpenCopy`` of a node that has nothing in memory."""
    return None


async def no_manifest(stage: str) -> bytes | None:
    """The same for manifests."""
    return None


class PeerServer:
    """See the module. ``is_member`` says which names may connect, ``now_s`` is the clock that ``Ping`` reads."""

    def __init__(
        self,
        *,
        node: str,
        job: str,
        secret: bytes,
        store: ReplicaStore,
        is_member: Callable[[str], bool],
        open_copy: OpenCopy = no_copy,
        memory_manifest: Callable[[str], Awaitable[bytes | None]] = no_manifest,
        now_s: Callable[[], float] = time.time,
        limits: ServerLimits | None = None,
    ) -> None:
        check_secret(secret)
        self._node = node
        self._job = job
        self._secret = secret
        self._store = store
        self._is_member = is_member
        self._open_copy = open_copy
        self._memory_manifest = memory_manifest
        self.now_s = now_s
        self.limits = limits or ServerLimits()
        self._read_limiter = trio.CapacityLimiter(8)
        self._strangers: dict[trio.SocketStream, trio.CancelScope] = {}
        self._connections: Counter[str] = Counter()
        self._budgets: dict[str, _Budget] = {}
        self._refusals = _RateLimitedLog()

    async def serve(
        self, host: str, port: int, task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Listen and serve until cancelled. ``nursery.start`` returns (address, port); port 0 lets the system choose.

        Raises ``OSError`` when the address cannot be bound.
        """
        listeners = await trio.open_tcp_listeners(port, host=host, backlog=256)
        name = listeners[0].socket.getsockname()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self._handle, listeners)
            task_status.started((name[0], name[1]))

    async def _handle(self, socket_stream: trio.SocketStream) -> None:
        try:
            async with socket_stream:
                await self._handle_stream(socket_stream)
        except _CONNECTION_ERRORS as error:
            log.debug("connection ended: %s", error)
        except Exception:
            # One peer's request must not take the daemon with it; what it was is in the log.
            log.exception("a peer's connection failed")

    async def _handle_stream(self, socket_stream: trio.SocketStream) -> None:
        connection = Connection.server(self._secret, self._job, self._node, os.urandom(NONCE_BYTES), self._is_member)
        stream = PeerStream(socket_stream.socket, connection, self.limits.stall_s)
        peer = await self._authenticate(socket_stream, stream)
        if peer is None:
            return
        if self._connections[peer] >= self.limits.connections_per_peer:
            self._refusals.warn(f"{peer} has {self._connections[peer]} connections already: another was refused")
            return
        self._connections[peer] += 1
        budget = self._budgets.setdefault(peer, _Budget(self.limits.buffer_bytes_per_peer))
        try:
            why = await _Session(self, stream, budget, self._store).run()
            log.debug("connection from %s ended: %s", peer, why)
        finally:
            self._connections[peer] -= 1
            if not self._connections[peer]:
                del self._connections[peer], self._budgets[peer]

    async def _authenticate(self, socket_stream: trio.SocketStream, stream: PeerStream) -> str | None:
        address = socket_stream.socket.getpeername()[0]
        if len(self._strangers) >= self.limits.strangers_max:
            next(iter(self._strangers.values())).cancel()
        why = f"nothing that proves membership within {self.limits.handshake_s:g} s"
        with trio.move_on_after(self.limits.handshake_s) as scope:
            self._strangers[socket_stream] = scope
            try:
                return await stream.handshake()
            except (PeerError, OSError, trio.TooSlowError) as error:
                why = str(error)
            finally:
                del self._strangers[socket_stream]
        self._refusals.warn(f"connection from {address} refused: {why}")
        return None

    # --- requests, called by ``_Session`` ----------------------------------------------------------------------

    async def read(self, stage: str, offset: int, view: memoryview) -> int:
        """Fill ``view`` from memory, else from the replica store."""
        found = self._open_copy(stage)
        if found is None:
            return await self._store.read_into(stage, offset, view)
        fd, size = found
        try:
            count = max(0, min(len(view), size - offset))
            await trio.to_thread.run_sync(read_exactly, fd, view[:count], offset, limiter=self._read_limiter)
        finally:
            os.close(fd)
        return count

    async def manifest(self, stage: str) -> bytes | None:
        """From memory, else from the replica store."""
        return await self._memory_manifest(stage) or self._store.manifest(stage)


class _Session:
    """One authenticated connection."""

    def __init__(self, server: PeerServer, stream: PeerStream, budget: _Budget, store: ReplicaStore) -> None:
        self._server = server
        self._store = store
        self._stream = stream
        self._budget = budget
        self._limits = server.limits
        self._pushes = trio.Semaphore(self._limits.pushes_per_connection)

    async def run(self) -> str:
        """Requests until the peer closes, is idle too long or breaks the protocol; returns why it ended."""
        async with trio.open_nursery() as nursery:
            why = "a reply could not be sent"
            try:
                while True:
                    with trio.fail_after(self._limits.idle_s):
                        received = await self._stream.receive()
                    await self._dispatch(received, nursery)
            except _CONNECTION_ERRORS as error:
                why = str(error)
            # Blocks on their way to the disk get there; nobody is left to be told.
            nursery.cancel_scope.cancel()
        return why

    async def _dispatch(self, received: Received, nursery: trio.Nursery) -> None:
        request = received.message
        if isinstance(request, Push):
            await self._pushes.acquire()
            buffer = await self._payload(received, BLOCK_BYTES)
            nursery.start_soon(self._push, request, buffer, received.payload_digest, nursery.cancel_scope)
            return
        # Every push before this request is to be finished, and none follows until it is answered.
        for _ in range(self._limits.pushes_per_connection):
            await self._pushes.acquire()
        if isinstance(request, Commit):
            await self._commit(request, received)
        elif received.payload_bytes:
            raise PeerError(f"payload with a {type(request).__name__}")
        elif isinstance(request, Read):
            await self._read(request)
        elif isinstance(request, GetManifest):
            found = await self._server.manifest(request.stage)
            missing = messages.failed(request.id, "missing", f"no manifest of {request.stage} here")
            await (self._stream.send(missing) if found is None else self._stream.send(Data(request.id), found))
        elif isinstance(request, Drop):
            await self._stream.send(await self._outcome(request.id, self._drop(request.stage)))
        elif isinstance(request, Ping):
            await self._stream.send(Clock(request.id, self._server.now_s()))
        else:
            raise PeerError(f"{type(request).__name__} is no request")
        for _ in range(self._limits.pushes_per_connection):
            self._pushes.release()

    async def _payload(self, received: Received, bytes_max: int) -> memoryview:
        count = received.payload_bytes
        if not 0 < count <= bytes_max:
            raise PeerError(f"{type(received.message).__name__} with a payload of {count} bytes")
        view = await self._budget.take(count)
        try:
            await self._stream.receive_payload(view)
        except BaseException:
            self._budget.give(view)
            raise
        return view

    async def _push(self, request: Push, view: memoryview, digest: bytes, session: trio.CancelScope) -> None:
        try:
            writing = self._store.write_block(request.stage, request.offset, view, digest)
            reply = await self._outcome(request.id, self._no_text(writing))
            await self._stream.send(reply)
        except _CONNECTION_ERRORS:
            session.cancel()
        finally:
            self._budget.give(view)
            self._pushes.release()

    async def _commit(self, request: Commit, received: Received) -> None:
        view = await self._payload(received, MANIFEST_BYTES_MAX)
        try:
            manifest = bytes(view)
            right = block_digest(manifest) == received.payload_digest
        finally:
            self._budget.give(view)
        if not right:
            raise PeerError("a manifest arrived with other bytes than its digest says")
        await self._stream.send(await self._outcome(request.id, self._store.commit(request.stage, manifest)))

    async def _read(self, request: Read) -> None:
        view = await self._budget.take(max(request.length, 1))
        try:
            try:
                count = await self._server.read(request.stage, request.offset, view[: request.length])
            except FileNotFoundError:
                await self._stream.send(messages.failed(request.id, "missing", f"no copy of {request.stage} here"))
            except CorruptError as error:
                await self._stream.send(messages.failed(request.id, "corrupt", str(error)))
            except OSError as error:
                await self._stream.send(messages.failed(request.id, "os", str(error), error.errno or 0))
            else:
                await self._stream.send(Data(request.id), view[:count])
        finally:
            self._budget.give(view)

    async def _drop(self, stage: str) -> str:
        await self._store.drop(stage)
        return ""

    async def _no_text(self, work: Awaitable[None]) -> str:
        await work
        return ""

    async def _outcome(self, request_id: int, work: Awaitable[str]) -> Done | Failed:
        try:
            return Done(request_id, await work)
        except OSError as error:
            return messages.failed(request_id, "os", str(error), error.errno or errno.EIO)
        except (CacheXError, ValueError) as error:
            return messages.failed(request_id, "refused", str(error))


class _Budget:
    """Buffers for one peer's payloads, at most ``limit_bytes`` at a time. Whole blocks are used again: touching
    fresh memory costs more than receiving into it. They begin on a page: a disk can take them from where they are."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._free: list[mmap.mmap] = []
        self._waiting = trio.lowlevel.ParkingLot()

    async def take(self, count: int) -> memoryview:
        """A buffer of ``count`` bytes, once the budget allows it."""
        cost = max(count, BLOCK_BYTES)
        while self._used_bytes + cost > self._limit_bytes:
            await self._waiting.park()
        self._used_bytes += cost
        if count > BLOCK_BYTES:
            return memoryview(bytearray(count))
        return memoryview(self._free.pop() if self._free else mmap.mmap(-1, BLOCK_BYTES))[:count]

    def give(self, view: memoryview) -> None:
        """Return a buffer that ``take`` gave."""
        buffer = view.obj
        assert isinstance(buffer, mmap.mmap | bytearray)
        self._used_bytes -= len(buffer)
        if isinstance(buffer, mmap.mmap):
            self._free.append(buffer)
        self._waiting.unpark_all()


class _RateLimitedLog:
    """One warning per ``STRANGER_LOG_INTERVAL_S``, with the number of those that were left out."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._left_out = 0

    def warn(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._left_out += 1
            return
        log.warning("partner port: %s (%d more since the last line)", text, self._left_out)
        self._next_s, self._left_out = now_s + STRANGER_LOG_INTERVAL_S, 0
