"""The protocol between two daemons, without I/O.

Role: pure, synchronous. ``PeerClients`` and ``PeerServer`` own sockets and feed one ``Connection`` each. A frame is

    prefix (12 bytes: "CXP", version, header bytes, payload bytes) | msgpack header | MAC (32 bytes) | payload

The MAC (keyed BLAKE2b) covers prefix and header; the header carries the frame's number and the payload's xxh3_128.
So a payload's length is authentic before a byte of it is received, and no frame can be replayed, moved or turned
round: each direction of each connection has a key of its own. The payload itself never enters the ``Connection``,
except for what the adaptor has read too far (``take_payload``).

Authentication, both ways, from the job's secret; "transcript" is the MACs and headers of both hellos:

    client -> server  ClientHello(job, client, server, nonce)   MAC: hello key (secret, job)
    server -> client  ServerHello(server, nonce)                MAC: server key (secret, transcript)
    client -> server  ClientProof(client), frame number 0       MAC: session key of this direction (secret, transcript)

Somebody without the secret gets no byte in answer. A recorded ``ClientHello`` gets a ``ServerHello`` and nothing more.

Errors: ``RemoteProtocolError`` is the peer's fault, ``LocalProtocolError`` ours.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, TypeVar

import msgspec

from cachexfs.core.digest import DIGEST_BYTES
from cachexfs.core.messages import (
    NONCE_BYTES,
    PAYLOAD_BYTES_MAX,
    ClientHello,
    ClientProof,
    Message,
    PayloadDigest,
    Reply,
    Request,
    ServerHello,
)
from cachexfs.errors import CacheXError, PeerError, UsageError

MAGIC = b"CXP"
WIRE_VERSION = 1
HEADER_BYTES_MAX = 64 << 10
HANDSHAKE_HEADER_BYTES_MAX = 4 << 10
MAC_BYTES = 32
SECRET_BYTES_MIN = 16
#: What ``receive_data`` accepts beyond a whole header: an adaptor that reads further loses its connection.
READ_AHEAD_BYTES_MAX = 64 << 10

_PREFIX = struct.Struct(">3sBII")
PREFIX_BYTES = _PREFIX.size
_NO_PAYLOAD = bytes(DIGEST_BYTES)


class RemoteProtocolError(PeerError):
    """The peer sent what the protocol does not allow. The connection is unusable."""


class AuthenticationError(RemoteProtocolError):
    """The peer has not shown that it knows the job's secret, or is not who it should be."""


class LocalProtocolError(CacheXError):
    """This side used the connection wrongly: a bug here."""


class _State(Enum):
    """What is awaited from the peer. Client: SERVER_HELLO, OPEN. Server: CLIENT_HELLO, PROOF, OPEN. Any: BROKEN."""

    CLIENT_HELLO = "client hello"
    SERVER_HELLO = "server hello"
    PROOF = "proof"
    OPEN = "open"
    BROKEN = "broken"


class NeedData(Enum):
    """``next_event`` has nothing until more bytes are received."""

    NEED_DATA = 0


NEED_DATA = NeedData.NEED_DATA


@dataclass(frozen=True, slots=True)
class Authenticated:
    """The peer knows the secret and is ``peer``."""

    peer: str


@dataclass(frozen=True, slots=True)
class Received:
    """An authentic message. With ``payload_bytes`` > 0 the payload must be taken before the next event."""

    message: Message
    payload_bytes: int
    payload_digest: bytes


Event: TypeAlias = Authenticated | Received | NeedData


class _Header(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    payload_digest: PayloadDigest
    message: msgspec.Raw


_header_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int = 32) -> bytes:
    """HKDF-SHA256 (RFC 5869), ``length`` at most 8160 bytes."""
    key = hmac.digest(salt or bytes(32), secret, "sha256")
    out, block, counter = b"", b"", 1
    while len(out) < length:
        block = hmac.digest(key, block + info + bytes([counter]), "sha256")
        out += block
        counter += 1
    return out[:length]


def _mac(key: bytes, *parts: bytes | bytearray | memoryview) -> bytes:
    state = hashlib.blake2b(key=key, digest_size=MAC_BYTES, person=b"cachexfs peer")
    for part in parts:
        state.update(part)
    return state.digest()


def check_secret(secret: bytes) -> None:
    """Raises ``UsageError`` for a secret that could be guessed from a recorded hello."""
    if len(secret) < SECRET_BYTES_MIN:
        raise UsageError(
            f"the job's secret has {len(secret)} bytes: at least {SECRET_BYTES_MIN} random ones are needed "
            "(head -c 32 /dev/urandom > FILE)"
        )


class Connection:
    """One end of one connection: bytes in, events out; messages in, bytes out.

    Use ``Connection.client`` or ``Connection.server``. The adaptor calls ``receive_data`` with what it has read,
    then ``next_event`` until ``NEED_DATA``, and writes ``data_to_send`` after each. ``nonce`` is 32 fresh random bytes.
    """

    def __init__(self, secret: bytes, job: str, node: str, nonce: bytes) -> None:
        check_secret(secret)
        if len(nonce) != NONCE_BYTES:
            raise LocalProtocolError(f"a nonce has {NONCE_BYTES} bytes")
        self._secret = secret
        self._job = job
        self._node = node
        self._nonce = nonce
        self._is_member: Callable[[str], bool] = lambda name: False
        self._is_client = False
        self._state = _State.CLIENT_HELLO
        self._peer = ""
        self._hello = b""  # the client's hello with its MAC: first half of the transcript
        self._key_out = self._key_in = b""
        self._sequence_out = self._sequence_in = 0
        self._input = bytearray()
        self._output = bytearray()
        self._payload_left = 0
        self._payload_digest: bytes | None = None

    @classmethod
    def client(cls, secret: bytes, job: str, node: str, peer: str, nonce: bytes) -> Connection:
        """The end that connects: ``node`` to ``peer``. Its hello is in ``data_to_send`` at once."""
        self = cls(secret, job, node, nonce)
        self._is_client = True
        self._peer = peer
        self._state = _State.SERVER_HELLO
        header = _header_encoder.encode(ClientHello(job, node, peer, nonce))
        self._hello = self._put(header, 0, self._hello_key())
        return self

    @classmethod
    def server(cls, secret: bytes, job: str, node: str, nonce: bytes, is_member: Callable[[str], bool]) -> Connection:
        """The end that was connected to; ``is_member`` says whether a name is a node of the job."""
        self = cls(secret, job, node, nonce)
        self._is_member = is_member
        return self

    @property
    def peer(self) -> str:
        """The authenticated peer's name, "" before."""
        return self._peer if self._state is _State.OPEN else ""

    # --- out ---------------------------------------------------------------------------------------------------

    def data_to_send(self) -> bytes:
        """Handshake bytes to be written now."""
        data = bytes(self._output)
        self._output.clear()
        return data

    def send(self, message: Message, payload_bytes: int = 0, payload_digest: bytes = _NO_PAYLOAD) -> bytes:
        """Bytes of a message's frame; the caller writes them, then exactly ``payload_bytes`` of payload."""
        if self._state is not _State.OPEN:
            raise LocalProtocolError(f"send while waiting for: {self._state.value}")
        if isinstance(message, Request) != self._is_client:
            raise LocalProtocolError(f"{type(message).__name__} from the wrong end")
        return self._frame(message, payload_bytes, payload_digest)

    def _frame(self, message: Message | ClientProof, payload_bytes: int, payload_digest: bytes) -> bytes:
        if not 0 <= payload_bytes <= PAYLOAD_BYTES_MAX or len(payload_digest) != DIGEST_BYTES:
            raise LocalProtocolError(f"a payload of {payload_bytes} bytes, digest {payload_digest!r}")
        raw = msgspec.Raw(_header_encoder.encode(message))
        header = _header_encoder.encode(_Header(self._sequence_out, payload_digest, raw))
        if len(header) > HEADER_BYTES_MAX:
            raise LocalProtocolError(f"a header of {len(header)} bytes")
        prefix = _PREFIX.pack(MAGIC, WIRE_VERSION, len(header), payload_bytes)
        self._sequence_out += 1
        return b"".join((prefix, header, _mac(self._key_out, prefix, header)))

    def _put(self, header: bytes, payload_bytes: int, key: bytes) -> bytes:
        """Queue a handshake frame; returns header and MAC."""
        prefix = _PREFIX.pack(MAGIC, WIRE_VERSION, len(header), payload_bytes)
        mac = _mac(key, prefix, header)
        self._output += prefix + header + mac
        return header + mac

    # --- in ----------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Append received bytes. While a payload is pending, read it with ``take_payload`` instead."""
        if self._state is _State.BROKEN:
            raise LocalProtocolError("receive_data on a broken connection")
        if len(self._input) + len(data) > PREFIX_BYTES + HEADER_BYTES_MAX + MAC_BYTES + READ_AHEAD_BYTES_MAX:
            raise LocalProtocolError("received bytes were not consumed")
        self._input += data

    def next_event(self) -> Event:
        """The next event in what was received. Raises ``RemoteProtocolError``; the connection is then broken."""
        if self._state is _State.BROKEN:
            raise LocalProtocolError("next_event on a broken connection")
        if self._payload_digest is not None:
            raise LocalProtocolError("the last message's payload was not taken")
        try:
            return self._next_event()
        except RemoteProtocolError:
            self._state = _State.BROKEN
            self._input.clear()
            self._output.clear()
            raise

    def _next_event(self) -> Event:
        header_max = HEADER_BYTES_MAX if self._state is _State.OPEN else HANDSHAKE_HEADER_BYTES_MAX
        known = bytes(self._input[: len(MAGIC) + 1])
        expected = MAGIC + bytes([WIRE_VERSION])
        if not expected.startswith(known):
            # A stranger's first bytes are enough to turn it away; so is another version.
            raise RemoteProtocolError(f"not a frame of version {WIRE_VERSION}: starts with {known!r}")
        if len(self._input) < PREFIX_BYTES:
            return NEED_DATA
        _, _, header_bytes, payload_bytes = _PREFIX.unpack_from(self._input)
        if header_bytes > header_max or payload_bytes > PAYLOAD_BYTES_MAX:
            raise RemoteProtocolError(f"frame with a header of {header_bytes} and a payload of {payload_bytes} bytes")
        end = PREFIX_BYTES + header_bytes
        if len(self._input) < end + MAC_BYTES:
            return NEED_DATA
        prefix, header = bytes(self._input[:PREFIX_BYTES]), bytes(self._input[PREFIX_BYTES:end])
        mac = bytes(self._input[end : end + MAC_BYTES])
        del self._input[: end + MAC_BYTES]
        if self._state is not _State.OPEN and payload_bytes:
            raise RemoteProtocolError("payload before authentication")
        if self._state is _State.CLIENT_HELLO:
            return self._on_client_hello(prefix, header, mac)
        if self._state is _State.SERVER_HELLO:
            return self._on_server_hello(prefix, header, mac)
        return self._on_frame(prefix, header, mac, payload_bytes)

    def _on_client_hello(self, prefix: bytes, header: bytes, mac: bytes) -> Event:
        _check_mac(self._hello_key(), mac, prefix, header)
        hello = _decode(ClientHello, header)
        if hello.job != self._job or hello.server != self._node:
            raise AuthenticationError(
                f"{hello.client} asks for node {hello.server} of job {hello.job}, not for this one"
            )
        if hello.client == self._node or not self._is_member(hello.client):
            raise AuthenticationError(f"{hello.client} is not another node of the job")
        self._peer = hello.client
        self._hello = header + mac
        answer = _header_encoder.encode(ServerHello(self._node, self._nonce))
        self._put(answer, 0, self._key(b"server hello", hello.nonce + self._nonce))
        self._open_keys(answer)
        self._state = _State.PROOF
        return NEED_DATA if not self._input else self._next_event()

    def _on_server_hello(self, prefix: bytes, header: bytes, mac: bytes) -> Event:
        # The key needs the server's nonce, which the header itself carries: decoded before its MAC is checked.
        hello = _decode(ServerHello, header)
        _check_mac(self._key(b"server hello", self._nonce + hello.nonce), mac, prefix, header)
        if hello.server != self._peer:
            raise AuthenticationError(f"{hello.server} answers where {self._peer} should")
        self._open_keys(header)
        self._output += self._frame(ClientProof(self._node), 0, _NO_PAYLOAD)
        self._state = _State.OPEN
        return Authenticated(self._peer)

    def _on_frame(self, prefix: bytes, header: bytes, mac: bytes, payload_bytes: int) -> Event:
        _check_mac(self._key_in, mac, prefix, header)
        frame = _decode(_Header, header)
        if frame.sequence != self._sequence_in:
            raise RemoteProtocolError(f"frame {frame.sequence} where {self._sequence_in} was due")
        self._sequence_in += 1
        if self._state is _State.PROOF:
            proof = _decode(ClientProof, frame.message)
            if proof.client != self._peer:
                raise AuthenticationError(f"hello from {self._peer}, proof from {proof.client}")
            self._state = _State.OPEN
            return Authenticated(self._peer)
        try:
            message: Message = (_reply_decoder if self._is_client else _request_decoder).decode(frame.message)
        except msgspec.DecodeError as error:
            raise RemoteProtocolError(f"message out of bounds: {error}") from None
        self._payload_left = payload_bytes
        self._payload_digest = frame.payload_digest if payload_bytes else None
        return Received(message, payload_bytes, frame.payload_digest)

    def take_payload(self, view: memoryview) -> int:
        """Move payload that was read too far into ``view``; returns the number of bytes, 0 when there is none left."""
        count = min(len(view), len(self._input), self._payload_left)
        view[:count] = self._input[:count]
        del self._input[:count]
        self._payload_left -= count
        return count

    def payload_received(self, count: int) -> None:
        """The adaptor has read ``count`` bytes of payload directly into its own buffer."""
        if count > self._payload_left or self._input:
            raise LocalProtocolError(f"{count} bytes of payload where {self._payload_left} were due")
        self._payload_left -= count

    def end_payload(self) -> None:
        """The whole payload is in the adaptor's hands; whether its digest is right, it knows better."""
        if self._payload_left or self._payload_digest is None:
            raise LocalProtocolError(f"end of payload with {self._payload_left} bytes due")
        self._payload_digest = None

    # --- keys --------------------------------------------------------------------------------------------------

    def _hello_key(self) -> bytes:
        return hkdf(self._secret, b"cachexfs peer hello", self._job.encode())

    def _key(self, role: bytes, transcript: bytes) -> bytes:
        whole = hashlib.sha256(self._hello + transcript).digest()
        return hkdf(self._secret, b"cachexfs peer session", role + b"\0" + whole)

    def _open_keys(self, server_hello: bytes) -> None:
        to_server, to_client = self._key(b"to server", server_hello), self._key(b"to client", server_hello)
        self._key_out, self._key_in = (to_server, to_client) if self._is_client else (to_client, to_server)


def _check_mac(key: bytes, mac: bytes, prefix: bytes, header: bytes) -> None:
    if not hmac.compare_digest(_mac(key, prefix, header), mac):
        raise AuthenticationError("a frame's MAC is wrong: another secret, another session, or damaged on the way")


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def _decode(kind: type[_Struct], data: bytes | msgspec.Raw) -> _Struct:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"not a {kind.__name__}: {error}") from None
