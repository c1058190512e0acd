"""etcd's JSON gateway over HTTP/1.1, under trio.

Role: adaptor. ``EtcdClient`` sends a request to one of its endpoints (the first that has not just failed) and gives
typed answers; it never repeats one. ``EtcdUnreachableError`` leaves open whether the request was carried out,
``EtcdRefusedError`` does not: it was not. Speaks through h11, because a request through httpx costs three
times the processor time, and every lookup of the mount is one.

Concurrency: any number of tasks; each call has a connection of its own while it lasts. A cancelled call closes
its connection. Called by ``catalogue_etcd``.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import h11
import msgspec
import trio

A = TypeVar("A", bound=msgspec.Struct)

CONNECT_TIMEOUT_S = 1.0
IDLE_CONNECTIONS_MAX = 8
ANSWER_BYTES_MAX = 256 << 20
RECEIVE_BYTES = 1 << 18
PENALTY_S_MIN = 0.5
PENALTY_S_MAX = 8.0
#: gRPC codes with which etcd says that it has not done, and will not do, what was asked: invalid argument, not
#: found, exists, permission, exhausted (no space, too large), precondition, out of range (compacted), unauthenticated.
REFUSALS = frozenset({3, 5, 6, 7, 8, 9, 11, 16})
CODE_INVALID = 3
CODE_NOT_FOUND = 5
CODE_EXISTS = 9
CODE_EXHAUSTED = 8
_TROUBLE = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, h11.ProtocolError)
_TOO_MANY_REQUESTS = "too many requests"


class EtcdUnreachableError(Exception):
    """No answer, or one that leaves open whether the request was carried out."""


class EtcdRefusedError(Exception):
    """etcd did not carry out the request. ``code`` is the gRPC code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a member listens for clients."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Header(msgspec.Struct, frozen=True):
    """Of every answer. ``revision`` is the store's."""

    revision: int = 0
    cluster_id: int = 0
    member_id: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    """One key. ``create_revision`` is 0 in a deletion."""

    key: bytes
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


class RangeAnswer(msgspec.Struct, frozen=True):
    """Keys in a range; ``more`` when the limit cut it."""

    header: Header = Header()
    kvs: list[KeyValue] = []
    more: bool = False


class OpAnswer(msgspec.Struct, frozen=True):
    """One operation of a transaction (only ranges are of interest)."""

    response_range: RangeAnswer | None = None


class TxnAnswer(msgspec.Struct, frozen=True):
    """A transaction: whether its conditions held, and the answers of the branch that was taken."""

    header: Header = Header()
    succeeded: bool = False
    responses: list[OpAnswer] = []


class LeaseAnswer(msgspec.Struct, frozen=True):
    """A granted lease."""

    ID: int = 0
    TTL: int = 0


class KeepAliveAnswer(msgspec.Struct, frozen=True):
    """A renewed lease: without a TTL it was gone."""

    result: LeaseAnswer = LeaseAnswer()


class Empty(msgspec.Struct, frozen=True):
    """An answer of which nothing is needed."""


class Event(msgspec.Struct, frozen=True):
    """One change of a key."""

    kv: KeyValue
    type: str = "PUT"


class WatchAnswer(msgspec.Struct, frozen=True):
    """Changes of whole revisions, in order. ``compact_revision`` is set when the wanted ones are gone."""

    header: Header = Header()
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: list[Event] = []


class _Failure(msgspec.Struct, frozen=True):
    code: int = 0
    grpc_code: int = 0
    message: str = ""
    error: str = ""


class _WatchLine(msgspec.Struct, frozen=True):
    result: WatchAnswer | None = None
    error: _Failure | None = None


@dataclass(slots=True, eq=False)
class _Place:
    """An endpoint with its idle connections and its record."""

    endpoint: Endpoint
    idle: list[_Connection] = field(default_factory=list)
    penalty_s: float = 0.0
    free_at_s: float = 0.0


class _Connection:
    """One HTTP/1.1 connection, used by one task at a time."""

    def __init__(self, stream: trio.abc.Stream, host: str) -> None:
        self._stream = stream
        self._host = host
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)

    async def request(self, path: str, body: bytes, headers: Sequence[tuple[str, str]] = ()) -> int:
        """Send a request; returns the status of the answer once its head has come."""
        head = h11.Request(
            method="POST",
            target=path,
            headers=[
                ("host", self._host),
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                *headers,
            ],
        )
        parts = [self._http.send(head), self._http.send(h11.Data(body)), self._http.send(h11.EndOfMessage())]
        await self._stream.send_all(b"".join(part for part in parts if part))
        event = await self._next()
        while isinstance(event, h11.InformationalResponse):
            event = await self._next()
        assert isinstance(event, h11.Response)
        return event.status_code

    async def piece(self) -> bytes:
        """The next piece of the answer's body, as it comes; empty at its end."""
        event = await self._next()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        if isinstance(event, h11.EndOfMessage):
            return b""
        raise EtcdUnreachableError("the connection was closed")

    def reusable(self) -> bool:
        """Whether another request may follow; makes it so."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            return True
        return False

    async def close(self) -> None:
        await trio.aclose_forcefully(self._stream)

    async def _next(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event  # type: ignore[return-value]  # NEED_DATA is excluded
            self._http.receive_data(bytes(await self._stream.receive_some(RECEIVE_BYTES)))


class Watch:
    """The answers of an open watch."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._rest = bytearray()

    async def next(self) -> list[WatchAnswer]:
        """What has come, at least one answer. Raises ``EtcdUnreachableError`` when the watch has ended."""
        while True:
            piece = await self._connection.piece()
            if not piece:
                raise EtcdUnreachableError("the watch has ended")
            self._rest += piece
            if b"\n" not in piece:
                continue
            *lines, self._rest = self._rest.split(b"\n")
            answers = [self._answer(bytes(line)) for line in lines if line.strip()]
            if answers:
                return answers

    def _answer(self, line: bytes) -> WatchAnswer:
        parsed = _decode(line, _WatchLine)
        if parsed.error is not None or parsed.result is None:
            raise EtcdUnreachableError(f"watch: {parsed.error.message if parsed.error else 'no result'}")
        return parsed.result


class EtcdClient:
    """``endpoints`` in order of preference: this node's own member first. ``tls`` None: in the clear."""

    def __init__(self, endpoints: Sequence[Endpoint], tls: ssl.SSLContext | None, timeout_s: float) -> None:
        if not endpoints:
            raise ValueError("no endpoints")
        self._places = [_Place(endpoint) for endpoint in endpoints]
        self._tls = tls
        self.timeout_s = timeout_s

    async def call(
        self, path: str, request: object, answer: type[A], timeout_s: float | None = None, *, probe: bool = False
    ) -> A:
        """Send one request, once. Raises ``EtcdUnreachableError`` (also at the deadline), ``EtcdRefusedError``.

        With ``probe`` an endpoint that has failed is tried again when its time has come; others avoid it.
        """
        body = msgspec.json.encode(request)
        with trio.move_on_after(self.timeout_s if timeout_s is None else timeout_s):
            async with self._connection(probe=probe) as connection:
                status = await connection.request(path, body)
                data = bytearray()
                while piece := await connection.piece():
                    data += piece
                    if len(data) > ANSWER_BYTES_MAX:
                        raise EtcdUnreachableError("an answer is too long")
                if status != 200:
                    raise _failure(bytes(data), status)
                return _decode(bytes(data), answer)
        raise EtcdUnreachableError("no answer in time")

    @asynccontextmanager
    async def watch(self, request: object) -> AsyncIterator[Watch]:
        """An open watch. It ends with ``EtcdUnreachableError`` also when the member has lost its leader."""
        async with self._connection(fresh=True) as connection:
            with trio.fail_after(self.timeout_s):
                status = await connection.request(
                    "/v3/watch", msgspec.json.encode(request), [("grpc-metadata-hasleader", "true")]
                )
            if status != 200:
                raise EtcdUnreachableError(f"watch: HTTP status {status}")
            yield Watch(connection)

    async def aclose(self) -> None:
        """Close idle connections."""
        for place in self._places:
            await _close_all(place.idle)

    @asynccontextmanager
    async def _connection(self, *, fresh: bool = False, probe: bool = False) -> AsyncIterator[_Connection]:
        """A connection to the best endpoint, for one request. Failures count against the endpoint."""
        place = self._choose(probe=probe)
        connection = None
        done = False
        try:
            connection = place.idle.pop() if place.idle and not fresh else await self._connect(place.endpoint)
            yield connection
            done = True
        except EtcdRefusedError:
            done = True
            raise
        except (
            OSError,
            trio.BrokenResourceError,
            trio.ClosedResourceError,
            trio.TooSlowError,
            h11.ProtocolError,
        ) as error:
            raise EtcdUnreachableError(f"etcd at {place.endpoint}: {_describe(error)}") from error
        finally:
            # at a deadline, and when the caller was cancelled, `done` is false too: the first is a failure, and for the
            # second another endpoint is as good
            self._note(place, good=done)
            if connection is not None:
                if done and not fresh and connection.reusable() and len(place.idle) < IDLE_CONNECTIONS_MAX:
                    place.idle.append(connection)
                else:
                    await connection.close()
            if not done:  # the idle ones have met the same fate, and each would fail another request
                await _close_all(place.idle)

    def _choose(self, *, probe: bool) -> _Place:
        """The first endpoint without a failure; else, and for a probe first, the one whose penalty ends first."""
        suspects = sorted((place for place in self._places if place.penalty_s), key=lambda place: place.free_at_s)
        if len(suspects) == len(self._places) or (probe and suspects and suspects[0].free_at_s <= trio.current_time()):
            return suspects[0]
        return next(place for place in self._places if not place.penalty_s)

    async def _connect(self, endpoint: Endpoint) -> _Connection:
        with trio.fail_after(CONNECT_TIMEOUT_S):
            raw = await trio.open_tcp_stream(endpoint.host, endpoint.port)
            _detect_dead_peer(raw)
            if self._tls is None:
                return _Connection(raw, str(endpoint))
            stream = trio.SSLStream(raw, self._tls, server_hostname=endpoint.host, https_compatible=True)
            try:
                await stream.do_handshake()
            except BaseException:
                await trio.aclose_forcefully(stream)
                raise
            return _Connection(stream, str(endpoint))

    def _note(self, place: _Place, *, good: bool) -> None:
        if good:
            place.penalty_s = place.free_at_s = 0.0
        else:
            place.penalty_s = min(max(2 * place.penalty_s, PENALTY_S_MIN), PENALTY_S_MAX)
            place.free_at_s = trio.current_time() + place.penalty_s


async def _close_all(connections: list[_Connection]) -> None:
    while connections:
        await connections.pop().close()


def _decode(data: bytes, kind: type[A]) -> A:
    try:
        return msgspec.json.decode(data, type=kind, strict=False)  # the gateway writes 64-bit numbers as strings
    except msgspec.DecodeError as error:
        raise EtcdUnreachableError(f"an answer is not etcd's: {error}") from error


def _failure(data: bytes, status: int) -> EtcdUnreachableError | EtcdRefusedError:
    try:
        found = msgspec.json.decode(data, type=_Failure, strict=False)
    except msgspec.DecodeError:
        return EtcdUnreachableError(f"HTTP status {status}")
    message = found.message or found.error
    if found.code in REFUSALS and _TOO_MANY_REQUESTS not in message:
        return EtcdRefusedError(found.code, message)
    return EtcdUnreachableError(message)


def _describe(error: Exception) -> str:
    if isinstance(error, trio.TooSlowError):
        return "no answer in time"
    if isinstance(error.__cause__, ssl.SSLError):
        return f"TLS: {error.__cause__.reason}"
    return str(error) or type(error).__name__


def _detect_dead_peer(stream: trio.SocketStream) -> None:
    """A watch waits for days; a host that is switched off must still be noticed, within some 10 s."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
