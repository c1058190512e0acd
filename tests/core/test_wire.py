"""The peer protocol without I/O: who gets in, what is believed, what is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachexfs.core import messages
from cachexfs.core.digest import block_digest
from cachexfs.core.messages import Clock, Commit, Data, Done, Drop, Failed, GetManifest, Message, Ping, Push, Read
from cachexfs.core.wire import (
    HANDSHAKE_HEADER_BYTES_MAX,
    HEADER_BYTES_MAX,
    MAC_BYTES,
    NEED_DATA,
    PREFIX_BYTES,
    READ_AHEAD_BYTES_MAX,
    Authenticated,
    AuthenticationError,
    Connection,
    LocalProtocolError,
    Received,
    RemoteProtocolError,
    hkdf,
)
from cachexfs.errors import PeerError, UsageError

SECRET = b"0123456789abcdef0123456789abcdef"
NODES = {"n1", "n2", "n3"}


def make_client(secret: bytes = SECRET, job: str = "job", node: str = "n1", peer: str = "n2", n: int = 1) -> Connection:
    return Connection.client(secret, job, node, peer, bytes([n]) * 32)


def make_server(secret: bytes = SECRET, job: str = "job", node: str = "n2", n: int = 2) -> Connection:
    return Connection.server(secret, job, node, bytes([n]) * 32, NODES.__contains__)


def shake(client: Connection, server: Connection) -> tuple[bytes, bytes, bytes]:
    """Complete a handshake; returns its three flights."""
    hello = client.data_to_send()
    server.receive_data(hello)
    assert server.next_event() is NEED_DATA
    answer = server.data_to_send()
    client.receive_data(answer)
    assert client.next_event() == Authenticated("n2")
    proof = client.data_to_send()
    server.receive_data(proof)
    assert server.next_event() == Authenticated("n1")
    return hello, answer, proof


def connected() -> tuple[Connection, Connection]:
    client, server = make_client(), make_server()
    shake(client, server)
    return client, server


def pass_on(sender: Connection, receiver: Connection, message: Message) -> object:
    receiver.receive_data(sender.send(message))
    event = receiver.next_event()
    assert isinstance(event, Received)
    return event.message


def test_hkdf_is_that_of_rfc_5869() -> None:
    # RFC 5869, A.1 and A.3.
    assert hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42).hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )
    assert hkdf(b"\x0b" * 22, b"", b"", 42).hex() == (
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    )


def test_every_message_arrives_as_it_was_sent() -> None:
    client, server = connected()
    assert (client.peer, server.peer) == ("n2", "n1")
    for request in (Push(1, "ab.1", 1 << 20), Commit(2, "ab-1"), Read(3, "0", 7, 9), GetManifest(4, "a"), Drop(5, "a")):
        assert pass_on(client, server, request) == request
    assert pass_on(client, server, Ping(6)) == Ping(6)
    for reply in (Done(1, "id"), Data(2), Clock(3, 1.5), messages.failed(4, "os", "x" * 9999, 28)):
        assert pass_on(server, client, reply) == reply


def test_bytes_one_at_a_time() -> None:
    client, server = make_client(), make_server()

    def trickle(data: bytes, receiver: Connection) -> list[object]:
        events = []
        for byte in data:
            receiver.receive_data(bytes([byte]))
            if (event := receiver.next_event()) is not NEED_DATA:
                events.append(event)
        return events

    assert trickle(client.data_to_send(), server) == []
    assert trickle(server.data_to_send(), client) == [Authenticated("n2")]
    assert trickle(client.data_to_send() + client.send(Ping(1)), server) == [
        Authenticated("n1"),
        Received(Ping(1), 0, bytes(16)),
    ]


# --- who gets in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "client",
    [
        lambda: make_client(secret=b"another secret of 32 bytes......"),
        lambda: make_client(job="job2"),
        lambda: make_client(peer="n3"),
        lambda: make_client(node="stranger"),
        lambda: make_client(node="n2"),
    ],
    ids=["secret", "job", "another server", "no member", "itself"],
)
def test_a_stranger_gets_no_byte_in_answer(client: Callable[[], Connection]) -> None:
    server = make_server()
    server.receive_data(client().data_to_send())
    with pytest.raises(AuthenticationError):
        server.next_event()
    assert server.data_to_send() == b""
    assert server.peer == ""


def test_the_server_must_know_the_secret_too() -> None:
    client, server = make_client(), make_server()
    server.receive_data(client.data_to_send())
    server.next_event()
    answer = bytearray(server.data_to_send())
    answer[-1] ^= 1
    client.receive_data(answer)
    with pytest.raises(AuthenticationError):
        client.next_event()


def test_a_recorded_session_opens_nothing() -> None:
    client, server = make_client(), make_server()
    hello, _, proof = shake(client, server)
    drop = client.send(Drop(1, "ab"))
    fresh = make_server(n=3)
    fresh.receive_data(hello + proof + drop)
    with pytest.raises(AuthenticationError):
        fresh.next_event()


def test_a_recorded_server_does_not_satisfy_another_client() -> None:
    client, server = make_client(), make_server()
    _, answer, _ = shake(client, server)
    other = make_client(n=9)
    other.receive_data(answer)
    with pytest.raises(AuthenticationError):
        other.next_event()


def test_reflection_of_every_flight() -> None:
    client, server = make_client(), make_server()
    hello, answer, proof = shake(client, server)
    for target, data in (
        (make_client(), hello),
        (make_server(n=3), answer),
        (make_server(n=3), proof),
        (make_client(), proof),
        (client, client.send(Ping(1))),
        (server, server.send(Done(1))),
    ):
        target.receive_data(data)
        with pytest.raises(RemoteProtocolError):
            target.next_event()


def test_a_hello_cannot_be_passed_on_to_another_node() -> None:
    third = make_server(node="n3")
    third.receive_data(make_client().data_to_send())
    with pytest.raises(AuthenticationError, match="not for this one"):
        third.next_event()


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 16"):
        make_client(secret=b"hunter2")


# --- what is believed ------------------------------------------------------------------------------------------


def test_a_replayed_frame() -> None:
    client, server = connected()
    frame = client.send(Ping(1))
    server.receive_data(frame + frame)
    assert isinstance(server.next_event(), Received)
    with pytest.raises(RemoteProtocolError, match="frame 1 where 2 was due"):
        server.next_event()
    with pytest.raises(LocalProtocolError):
        server.next_event()


def test_a_frame_left_out_or_out_of_order() -> None:
    client, server = connected()
    client.send(Ping(1))
    server.receive_data(client.send(Ping(2)))
    with pytest.raises(RemoteProtocolError):
        server.next_event()


def test_every_flipped_bit_of_a_frame_is_noticed() -> None:
    length = len(connected()[0].send(Push(1, "ab", 0), 100, bytes(16)))
    for bit in range(length * 8):
        client, server = connected()
        frame = bytearray(client.send(Push(1, "ab", 0), 100, bytes(16)))
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):  # noqa: PT012
            server.receive_data(frame)
            # A longer header may be awaited now; it is bounded, and its MAC is wrong.
            while server.next_event() is NEED_DATA:
                server.receive_data(bytes(32 << 10))


def test_every_flipped_bit_of_a_hello_is_noticed() -> None:
    hello = make_client().data_to_send()
    for bit in range(len(hello) * 8):
        server = make_server()
        bad = bytearray(hello)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):  # noqa: PT012
            server.receive_data(bad)
            while server.next_event() is NEED_DATA:
                server.receive_data(bytes(4 << 10))
        assert server.data_to_send() == b""


@pytest.mark.parametrize(
    "request_",
    [
        Push(1, "../../etc/passwd", 0),
        Push(1, "..", 0),
        Push(1, ".hidden", 0),
        Push(1, "a/b", 0),
        Push(1, "ab\n", 0),
        Push(1, "", 0),
        Push(1, "a" * 101, 0),
        Push(1, "a\0", 0),
        Push(1, "ab", 1),
        Push(1, "ab", -(1 << 20)),
        Push(1, "ab", 1 << 60),
        Push(-1, "ab", 0),
        Push(1 << 60, "ab", 0),
        Commit(1, "/"),
        Read(1, "ab", -1, 1),
        Read(1, "ab", 0, (8 << 20) + 1),
        Read(1, "ab", 0, -1),
        GetManifest(1, "store"),
        Drop(1, "../ab"),
    ],
)
def test_an_authentic_request_out_of_bounds_is_refused(request_: Message) -> None:
    client, server = connected()
    server.receive_data(client.send(request_))
    with pytest.raises(RemoteProtocolError, match="out of bounds"):
        server.next_event()


def test_an_authentic_answer_out_of_bounds_is_refused() -> None:
    client, server = connected()
    client.receive_data(server.send(Failed(1, "os", -5, "x")))
    with pytest.raises(RemoteProtocolError, match="out of bounds"):
        client.next_event()


def test_answers_are_no_requests() -> None:
    client, server = connected()
    with pytest.raises(LocalProtocolError, match="wrong end"):
        client.send(Done(1))
    server.receive_data(client._frame(Done(1), 0, bytes(16)))
    with pytest.raises(RemoteProtocolError):
        server.next_event()


# --- lengths ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header_bytes", "payload_bytes"),
    [(HANDSHAKE_HEADER_BYTES_MAX + 1, 0), (0xFFFFFFFF, 0), (10, (8 << 20) + 1), (10, 0xFFFFFFFF)],
)
def test_a_strangers_lengths_are_refused_with_the_prefix(header_bytes: int, payload_bytes: int) -> None:
    server = make_server()
    server.receive_data(struct.pack(">3sBII", b"CXP", 1, header_bytes, payload_bytes))
    with pytest.raises(RemoteProtocolError, match="frame with a header of"):
        server.next_event()


def test_no_payload_before_authentication() -> None:
    server = make_server()
    header = b"x" * 10
    server.receive_data(struct.pack(">3sBII", b"CXP", 1, len(header), 1) + header + bytes(MAC_BYTES))
    with pytest.raises(RemoteProtocolError, match="before authentication"):
        server.next_event()


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"C\0", b"CXP\x02", b"SSH-2.0-x"])
def test_another_protocol_or_version_is_known_by_its_first_bytes(first: bytes) -> None:
    server = make_server()
    server.receive_data(first)
    with pytest.raises(RemoteProtocolError, match="not a frame"):
        server.next_event()


def test_the_input_buffer_is_bounded() -> None:
    server = make_server()
    limit = PREFIX_BYTES + HEADER_BYTES_MAX + MAC_BYTES + READ_AHEAD_BYTES_MAX
    server.receive_data(bytes(limit))
    with pytest.raises(LocalProtocolError):
        server.receive_data(b"x")


def test_payload_within_bounds_only() -> None:
    client, _ = connected()
    with pytest.raises(LocalProtocolError):
        client.send(Commit(1, "ab"), (8 << 20) + 1)


@settings(max_examples=60)
@given(payload=st.binary(min_size=1, max_size=500), read_ahead=st.integers(0, 700), step=st.integers(1, 200))
def test_a_payload_beside_the_header(payload: bytes, read_ahead: int, step: int) -> None:
    client, server = connected()
    head = client.send(Commit(1, "ab"), len(payload), block_digest(payload))
    stream = payload + client.send(Ping(2))
    server.receive_data(head + stream[:read_ahead])
    rest = stream[read_ahead:]
    event = server.next_event()
    assert event == Received(Commit(1, "ab"), len(payload), block_digest(payload))
    with pytest.raises(LocalProtocolError):
        server.next_event()
    buffer = bytearray(len(payload))
    filled = 0
    while count := server.take_payload(memoryview(buffer)[filled : filled + step]):
        filled += count
    while filled < len(payload):
        piece, rest = rest[: min(step, len(payload) - filled)], rest[min(step, len(payload) - filled) :]
        buffer[filled : filled + len(piece)] = piece
        server.payload_received(len(piece))
        filled += len(piece)
    server.end_payload()
    assert bytes(buffer) == payload
    server.receive_data(rest)
    assert server.next_event() == Received(Ping(2), 0, bytes(16))


def test_wrong_use_of_a_payload_is_a_local_error() -> None:
    client, server = connected()
    server.receive_data(client.send(Commit(1, "ab"), 10, bytes(16)) + b"abc")
    server.next_event()
    with pytest.raises(LocalProtocolError):
        server.payload_received(1)
    with pytest.raises(LocalProtocolError):
        server.end_payload()
    assert server.take_payload(memoryview(bytearray(10))) == 3
    with pytest.raises(LocalProtocolError):
        server.payload_received(8)


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=200), max_size=5), st.booleans(), st.booleans())
def test_garbage_never_authenticates(pieces: list[bytes], framed: bool, established: bool) -> None:
    """Whatever arrives, also with a right prefix, also later: no message, no other exception, no answer."""
    server = connected()[1] if established else make_server()
    try:
        for piece in pieces:
            prefix = struct.pack(">3sBII", b"CXP", 1, len(piece), 0) if framed else b""
            server.receive_data(prefix + piece + (bytes(MAC_BYTES) if framed else b""))
            assert server.next_event() is NEED_DATA
    except PeerError:
        with pytest.raises(LocalProtocolError):
            server.receive_data(b"x")
    assert server.data_to_send() == b""


@settings(max_examples=200)
@given(st.data())
def test_damaged_handshakes(data: st.DataObject) -> None:
    """Each flight with bytes replaced, cut or added: the other side never takes it for authentic."""
    client, server = make_client(), make_server()
    hello = client.data_to_send()

    def damage(flight: bytes) -> bytes:
        at = data.draw(st.integers(0, len(flight)))
        until = data.draw(st.integers(at, min(len(flight), at + 8)))
        changed = flight[:at] + data.draw(st.binary(max_size=8)) + flight[until:]
        return changed

    flight = data.draw(st.sampled_from(["hello", "answer", "proof"]))
    if flight == "hello":
        target, good = server, hello
    else:
        server.receive_data(hello)
        server.next_event()
        answer = server.data_to_send()
        if flight == "answer":
            target, good = client, answer
        else:
            client.receive_data(answer)
            client.next_event()
            target, good = server, client.data_to_send()
    bad = damage(good)
    if bad.startswith(good):
        return
    target.receive_data(bad)
    try:
        assert target.next_event() is NEED_DATA
    except RemoteProtocolError:
        pass
    assert target.data_to_send() == b""
    assert target.peer == ""
