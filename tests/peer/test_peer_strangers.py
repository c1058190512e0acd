"""The partner port is closed to strangers, and a broken peer costs its own connection only."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from peer_support import MIB, SECRET, STAGE, Pair, blocks_of, content, manifest_of, pair, source

from cachexfs.adapters.peer_client import ClientLimits
from cachexfs.adapters.peer_server import ServerLimits
from cachexfs.adapters.peer_stream import PeerStream
from cachexfs.core.digest import block_digest
from cachexfs.core.messages import Commit, Message, Ping, Push, Read
from cachexfs.core.wire import Connection
from cachexfs.errors import CacheXError

LOST = r"closed|reset|Broken pipe"


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair(tmp_path / "replicas") as made:
        yield made


async def answer_to(link: Pair, *pieces: bytes, end: bool = False) -> bytes:
    """All bytes that the server answers until it closes."""
    stream = await trio.open_tcp_stream(*link.address)
    answer = b""
    async with stream:
        with contextlib.suppress(trio.BrokenResourceError):
            for piece in pieces:
                await stream.send_all(piece)
            if end:
                await stream.send_eof()
            async for data in stream:
                answer += data
    return answer


def hello() -> bytes:
    return Connection.client(SECRET, "job", "n1", "n2", bytes(32)).data_to_send()


async def member(link: Pair) -> PeerStream:
    """An authenticated connection, to misuse."""
    stream = await trio.open_tcp_stream(*link.address)
    connection = Connection.client(SECRET, "job", "n1", "n2", bytes(32))
    made = PeerStream(stream.socket, connection, 5)
    await made.handshake()
    return made


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0" * 5000,
        b"CXP\x01\xff\xff\xff\xff\xff\xff\xff\xff",
        b"CXP\x01" + struct.pack(">II", 4096, 0) + bytes(4096 + 32),
        b"CXP\x02" + bytes(100),
        hello()[:-1] + bytes([hello()[-1] ^ 1]),
        Connection.client(b"another secret....", "job", "n1", "n2", bytes(32)).data_to_send(),
        Connection.client(SECRET, "job", "n2", "n1", bytes(32)).data_to_send(),
    ],
    ids=["http", "tls", "zeros", "huge", "frame", "version", "mac", "secret", "reflected"],
)
async def test_no_byte_for_a_stranger(link: Pair, first: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert await answer_to(link, first) == b""
    assert len(caplog.records) == 1
    assert "refused" in caplog.text
    await link.clients.ping("n2")


async def test_a_stranger_that_says_nothing_or_little(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with pair(tmp_path / "replicas", ServerLimits(handshake_s=0.1)) as link:
        assert await answer_to(link) == b""
        assert await answer_to(link, hello()[:20]) == b""
        assert "nothing that proves membership" in caplog.text
        assert not link.server._strangers


async def test_a_right_hello_without_a_proof(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with pair(tmp_path / "replicas", ServerLimits(handshake_s=3)) as link:
        assert 0 < len(await answer_to(link, hello())) < 200
        assert "nothing that proves membership" in caplog.text


async def test_one_byte_at_a_time_does_not_prolong_the_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(tmp_path / "replicas", ServerLimits(handshake_s=0.2)) as link:
        stream = await trio.open_tcp_stream(*link.address)
        sent = 0
        with contextlib.suppress(trio.BrokenResourceError):
            for byte in hello() * 100:
                await stream.send_all(bytes([byte]))
                sent += 1
                await trio.sleep(0.02)
        assert sent < len(hello())
        await stream.aclose()
        assert "refused" in caplog.text


async def test_many_strangers_do_not_keep_members_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with pair(tmp_path / "replicas", ServerLimits(handshake_s=60, strangers_max=10)) as link:
        strangers = [await trio.open_tcp_stream(*link.address) for _ in range(50)]
        await link.clients.ping("n2")
        assert len(link.server._strangers) <= 10
        # The first ones were turned away, without a byte.
        assert await strangers[0].receive_some() == b""
        for stranger in strangers:
            await stranger.aclose()
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


async def test_the_log_is_not_a_weapon(link: Pair, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(30):
        await answer_to(link, b"garbage")
    assert len(caplog.records) == 1


async def test_a_recorded_session_sent_again(link: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A relay records what a member says, and says it again."""
    recorded = b""
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = listener.socket.getsockname()[1]

    async def relay() -> None:
        nonlocal recorded
        client = await listener.accept()
        server = await trio.open_tcp_stream(*link.address)

        async def back() -> None:
            async for data in server:
                await client.send_all(data)

        async with client, server, trio.open_nursery() as nursery:
            nursery.start_soon(back)
            async for data in client:
                recorded += data
                await server.send_all(data)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay)
        through = link.client(resolve=lambda name: ("127.0.0.1", port))
        with source(tmp_path, b"data") as fd:
            await through.push("n2", STAGE, fd, blocks_of(b"data"))
        await through.commit("n2", STAGE, manifest_of(b"data"))
        await through.drop("n2", STAGE)
        through.close()
    await listener.aclose()
    assert len(recorded) > 400
    # A server hello is all that a replay gets.
    assert len(await answer_to(link, recorded, end=True)) < 200
    assert link.store.list() == ()
    assert link.store.unfinished() == ()
    assert "MAC is wrong" in caplog.text


# --- members that break the protocol ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (Push(1, "../../../tmp/x", 0), b"x"),
        (Push(1, "..", 0), b"x"),
        (Push(1, STAGE, 5), b"x"),
        (Push(1, STAGE, 0), None),
        (Push(1, STAGE, 0), bytes(MIB + 1)),
        (Commit(1, STAGE), None),
        (Ping(1), b"payload"),
        (Read(1, "/etc/passwd", 0, 10), None),
        (Read(1, STAGE, 0, 1 << 40), None),
    ],
)
async def test_a_member_out_of_bounds_loses_its_connection(link: Pair, message: Message, payload: bytes | None) -> None:
    stream = await member(link)
    with pytest.raises(OSError, match=LOST):  # noqa: PT012 (either may notice)
        await stream.send(message, payload)
        await stream.receive()
    stream.close()
    await link.clients.ping("n2")
    assert link.store.unfinished() == ()


async def test_a_frame_flipped_on_the_way(link: Pair) -> None:
    stream = await member(link)
    frame = bytearray(stream.connection.send(Push(1, STAGE, 0), 4, block_digest(b"data")))
    frame[20] ^= 4
    await stream._write(frame + b"data")
    with pytest.raises(OSError, match=LOST):
        await stream.receive()
    stream.close()
    assert link.store.unfinished() == ()


async def test_a_payload_flipped_on_the_way_is_refused_by_its_block(link: Pair) -> None:
    stream = await member(link)
    await stream._write(stream.connection.send(Push(1, STAGE, MIB), 4, block_digest(b"data")) + b"dat!")
    reply = (await stream.receive()).message
    assert "block 1 of 2000.3.ab arrived with other bytes" in reply.text  # type: ignore[union-attr]
    stream.close()


async def test_a_manifest_flipped_on_the_way(link: Pair) -> None:
    stream = await member(link)
    manifest = bytearray(manifest_of(b""))
    head = stream.connection.send(Commit(1, STAGE), len(manifest), block_digest(manifest))
    manifest[20] ^= 1
    await stream._write(head + manifest)
    with pytest.raises(OSError, match=LOST):
        await stream.receive()
    stream.close()
    assert link.store.list() == ()


async def test_a_payload_that_stalls(tmp_path: Path) -> None:
    async with pair(tmp_path / "replicas", ServerLimits(stall_s=0.1)) as link:
        stream = await member(link)
        await stream._write(stream.connection.send(Push(1, STAGE, 0), MIB, bytes(16)) + b"some")
        with pytest.raises(OSError, match=LOST):
            await stream.receive()
        stream.close()
        assert link.server._budgets == {}


async def test_a_member_that_does_not_read_its_answers(tmp_path: Path) -> None:
    """It loses the connection; what it asked for is not kept in memory for it."""
    async with pair(tmp_path / "replicas", ServerLimits(stall_s=0.2)) as link:
        (tmp_path / "memory").write_bytes(bytes(8 * MIB))
        link.memory[STAGE] = tmp_path / "memory"
        stream = await member(link)
        with contextlib.suppress(OSError):
            for number in range(200):
                await stream.send(Read(number, STAGE, 0, 8 * MIB))
        while link.server._connections:  # noqa: ASYNC110 (what is awaited is the server's deadline)
            await trio.sleep(0.01)
        stream.close()


# --- a relay that cuts the connection after each number of bytes -----------------------------------------------


class CuttingRelay:
    """Passes a connection on, and cuts both ends after so many bytes in one direction."""

    def __init__(self, link: Pair, nursery: trio.Nursery, listener: trio.SocketListener) -> None:
        self.link = link
        self.listener = listener
        self.left = 0  # bytes that may still pass, over all connections
        self.to_server = True
        nursery.start_soon(self._accept)

    async def _accept(self) -> None:
        while True:
            client = await self.listener.accept()
            server = await trio.open_tcp_stream(*self.link.address)
            async with client, server, trio.open_nursery() as nursery:
                plain, cut = (
                    ((server, client), (client, server)) if self.to_server else ((client, server), (server, client))
                )

                async def forward(
                    source: trio.SocketStream, target: trio.SocketStream, nursery: trio.Nursery = nursery
                ) -> None:
                    with contextlib.suppress(trio.BrokenResourceError):
                        async for data in source:
                            await target.send_all(data)
                    nursery.cancel_scope.cancel()

                nursery.start_soon(forward, *plain)
                with contextlib.suppress(trio.BrokenResourceError):
                    while self.left:
                        data = await cut[0].receive_some(self.left)
                        if not data:
                            break
                        self.left -= len(data)
                        await cut[1].send_all(data)
                nursery.cancel_scope.cancel()


@pytest.mark.parametrize("to_server", [True, False], ids=["to the server", "to the client"])
async def test_cut_at_every_byte(link: Pair, tmp_path: Path, to_server: bool) -> None:
    """Push, commit, read: each fails cleanly or is whole, wherever the connection ends; a retry succeeds."""
    data = content(100)
    cut_at = whole_at = 0
    limits = ClientLimits(connect_s=5, stall_s=5)
    with source(tmp_path, data) as fd:
        async with trio.open_nursery() as nursery:
            listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
            relay = CuttingRelay(link, nursery, listener)
            relay.to_server = to_server
            port = listener.socket.getsockname()[1]
            while not whole_at:
                relay.left = cut_at = cut_at + 1
                cutting = link.client(resolve=lambda name: ("127.0.0.1", port), limits=limits)
                done = []
                try:
                    await cutting.push("n2", STAGE, fd, blocks_of(data))
                    done.append("push")
                    await cutting.commit("n2", STAGE, manifest_of(data))
                    done.append("commit")
                    assert await cutting.read("n2", STAGE, 0, 200) == data
                    whole_at = cut_at
                except (CacheXError, OSError):
                    pass
                cutting.close()
                held = link.store.find(STAGE)
                if "commit" in done:
                    assert held is not None, cut_at
                if held is not None:
                    assert await link.store.verify(STAGE) == ()
                await link.clients.drop("n2", STAGE)
            nursery.cancel_scope.cancel()
            await listener.aclose()
    # Every byte of every frame was an end once.
    assert whole_at > 400
    assert not link.server._strangers


async def test_reset_instead_of_end(link: Pair, tmp_path: Path) -> None:
    """A peer killed with data under way resets the connection."""
    for sent in (0, 10, 100, MIB // 2):
        stream = await member(link)
        await stream._write(stream.connection.send(Push(1, STAGE, 0), MIB, bytes(16)) + bytes(sent))
        stream._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.close()
    await link.clients.ping("n2")
    assert link.store.unfinished() == ()
