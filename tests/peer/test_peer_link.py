"""``PeerClients`` against ``PeerServer`` over real TCP on loopback."""

from __future__ import annotations

import errno
import mmap
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
import trio.testing
from peer_support import MIB, SECRET, STAGE, Pair, blocks_of, content, manifest_of, pair, source

from cachexfs.adapters.peer_client import ClientLimits
from cachexfs.adapters.peer_server import ServerLimits
from cachexfs.core.digest import block_digest
from cachexfs.core.wire import AuthenticationError, LocalProtocolError
from cachexfs.errors import PeerError


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair(tmp_path / "replicas") as made:
        yield made


def connections(link: Pair) -> int:
    """Authenticated connections of n1 that the server has."""
    return link.server._connections["n1"]


async def until(condition: object) -> None:
    """Wait until a callable is true; the test's own time limit ends it otherwise."""
    assert callable(condition)
    while not condition():  # noqa: ASYNC110 (what is awaited is in the kernel)
        await trio.sleep(0.005)


@pytest.mark.parametrize("size", [1, MIB, 2 * MIB + 7, 20 * MIB])
async def test_push_commit_read_manifest_drop(link: Pair, tmp_path: Path, size: int) -> None:
    data = content(size)
    with source(tmp_path, data) as fd:
        await link.clients.push("n2", STAGE, fd, blocks_of(data))
    with pytest.raises(FileNotFoundError):
        await link.clients.read("n2", STAGE, 0, size)
    assert await link.clients.commit("n2", STAGE, manifest_of(data)) == link.store.identity
    assert await link.clients.read("n2", STAGE, 0, size + 5) == data
    assert await link.clients.manifest("n2", STAGE) == manifest_of(data)
    await link.clients.drop("n2", STAGE)
    with pytest.raises(FileNotFoundError, match="n2"):
        await link.clients.manifest("n2", STAGE)
    assert link.store.list() == ()
    assert connections(link) == 1


async def test_an_empty_file(link: Pair) -> None:
    await link.clients.push("n2", STAGE, -1, [])
    await link.clients.commit("n2", STAGE, manifest_of(b""))
    assert await link.clients.read("n2", STAGE, 0, 10) == b""


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 0), (0, 1), (MIB - 1, 2), (3, 2 * MIB), (2 * MIB + 3, 99), (9 * MIB, 1), (5, 12 * MIB)]
)
@pytest.mark.parametrize("where", ["memory", "nvme"])
async def test_ranges_from_memory_and_nvme(link: Pair, tmp_path: Path, where: str, offset: int, length: int) -> None:
    data = content(2 * MIB + 5)
    with source(tmp_path, data) as fd:
        if where == "memory":
            link.memory[STAGE] = tmp_path / "source"
        else:
            await link.clients.push("n2", STAGE, fd, blocks_of(data))
            await link.clients.commit("n2", STAGE, manifest_of(data))
    assert await link.clients.read("n2", STAGE, offset, length) == data[offset : offset + length]
    assert connections(link) <= 1


async def test_the_copy_in_memory_comes_first(link: Pair, tmp_path: Path) -> None:
    data = content(100)
    await link.store.write_block(STAGE, 0, data, block_digest(data))
    await link.store.commit(STAGE, manifest_of(data))
    (tmp_path / "memory").write_bytes(b"memory")
    link.memory[STAGE] = tmp_path / "memory"
    before = len(os.listdir("/proc/self/fd"))
    assert await link.clients.read("n2", STAGE, 0, 100) == b"memory"
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)  # the connection's two ends, no file


async def test_reads_do_not_mix_when_there_are_many(link: Pair, tmp_path: Path) -> None:
    data = content(4 * MIB)
    (tmp_path / "memory").write_bytes(data)
    link.memory[STAGE] = tmp_path / "memory"
    failures = 0

    async def read(offset: int) -> None:
        nonlocal failures
        failures += await link.clients.read("n2", STAGE, offset, 100_000) != data[offset : offset + 100_000]

    async with trio.open_nursery() as nursery:
        for number in range(60):
            nursery.start_soon(read, number * 61_001)
    assert failures == 0
    assert connections(link) <= ClientLimits().read_connections


async def test_ping_is_the_peers_clock(link: Pair) -> None:
    assert 1000.0 <= await link.clients.ping("n2") < 1005.0


async def test_a_ping_does_not_wait_for_commits(link: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections for commits taken by ones that do not end."""
    release = trio.Event()

    async def commit(stage: str, manifest: bytes) -> str:
        await release.wait()
        return "x"

    monkeypatch.setattr(link.store, "commit", commit)
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(link.clients.commit, "n2", f"{number:x}", manifest_of(b"", f"{number:x}"))
        await until(lambda: connections(link) == ClientLimits().commit_connections)
        await link.clients.ping("n2")
        release.set()


async def test_large_manifest(link: Pair) -> None:
    """That of 200 GiB travels; the commit then names the first missing block."""
    blocks = b"".join(i.to_bytes(16, "big") for i in range(200 * 1024))
    manifest = manifest_of(b"", size=200 << 30, blocks=blocks, tree=block_digest(blocks))
    with pytest.raises(PeerError, match=r"n2: block 0 of .* is missing"):
        await link.clients.commit("n2", STAGE, manifest)
    assert connections(link) == 1


# --- refusals --------------------------------------------------------------------------------------------------


async def test_a_file_that_changed_while_it_was_sent_names_the_block(link: Pair, tmp_path: Path) -> None:
    data = content(12 * MIB)
    with (
        source(tmp_path, data[: 7 * MIB] + b"!" + data[7 * MIB + 1 :]) as fd,
        pytest.raises(PeerError, match="n2: block 7 of 2000"),
    ):
        await link.clients.push("n2", STAGE, fd, blocks_of(data))
    # The rest may be sent again, and the connection pool is in order.
    with source(tmp_path, data) as fd:
        await link.clients.push("n2", STAGE, fd, blocks_of(data))
    await link.clients.commit("n2", STAGE, manifest_of(data))
    assert await link.clients.read("n2", STAGE, 0, 12 * MIB) == data


async def test_a_file_that_became_shorter(link: Pair, tmp_path: Path) -> None:
    data = content(3 * MIB)
    with source(tmp_path, data[: 2 * MIB + 5]) as fd, pytest.raises(PeerError, match=f"ends at byte {2 * MIB + 5}"):
        await link.clients.push("n2", STAGE, fd, blocks_of(data))
    await link.clients.ping("n2")


async def test_a_bad_manifest_is_refused_and_the_connection_goes_on(link: Pair) -> None:
    with pytest.raises(PeerError, match="n2: not a manifest"):
        await link.clients.commit("n2", STAGE, b"nonsense")
    with pytest.raises(PeerError, match="n2: manifest of beef for 2000"):
        await link.clients.commit("n2", STAGE, manifest_of(b"", "beef"))
    await link.clients.ping("n2")
    assert connections(link) == 1


async def test_a_damaged_replica_is_not_served(link: Pair, tmp_path: Path) -> None:
    data = content(2 * MIB)
    with source(tmp_path, data) as fd:
        await link.clients.push("n2", STAGE, fd, blocks_of(data))
    await link.clients.commit("n2", STAGE, manifest_of(data))
    os.truncate(tmp_path / "replicas" / f"{STAGE}.1.data", 2 * MIB - 1)
    os.truncate(tmp_path / "replicas" / f"{STAGE}.1.data", 2 * MIB)
    assert await link.clients.read("n2", STAGE, 0, MIB) == data[:MIB]
    with pytest.raises(PeerError, match="n2: block 1 of the replica"):
        await link.clients.read("n2", STAGE, MIB, MIB)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
async def test_an_error_of_the_peers_disk_keeps_its_errno(
    link: Pair, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    async def commit(stage: str, manifest: bytes) -> str:
        raise OSError(code, "the disk of n2")

    monkeypatch.setattr(link.store, "commit", commit)
    with pytest.raises(OSError, match="the disk of n2") as caught:
        await link.clients.commit("n2", STAGE, manifest_of(b""))
    assert caught.value.errno == code


async def test_nobody_listens(link: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = link.client(resolve=lambda name: ("127.0.0.1", port))
    with pytest.raises(OSError, match="all attempts to connect to 127"):
        await client.ping("n2")


async def test_a_node_without_an_address(link: Pair) -> None:
    def resolve(name: str) -> tuple[str, int]:
        raise PeerError(f"{name} is not in the catalogue")

    with pytest.raises(PeerError, match="n9 is not in"):
        await link.client(resolve=resolve).ping("n9")


@pytest.mark.parametrize(
    "change",
    [{"secret": b"another secret of thirty-two byte"}, {"job": "job2"}, {"node": "n9"}, {"node": "n2"}],
    ids=["secret", "job", "no member", "itself"],
)
async def test_wrong_credentials(link: Pair, change: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AuthenticationError, match="closed the connection during authentication"):
        await link.client(**change).ping("n2")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_the_wrong_node_answers(link: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AuthenticationError):
        await link.clients.ping("n3")
    assert "asks for node n3" in caplog.text


# --- lost connections, restarts, cancellation ------------------------------------------------------------------


async def test_a_restarted_peer_is_found_again(tmp_path: Path) -> None:
    data = content(MIB + 5)
    async with pair(tmp_path / "replicas") as first:
        with source(tmp_path, data) as fd:
            await first.clients.push("n2", STAGE, fd, blocks_of(data))
        await first.clients.commit("n2", STAGE, manifest_of(data))
        clients = first.clients
        first.clients = first.client()
    async with pair(tmp_path / "replicas", port=first.address[1]) as second:
        assert await clients.read("n2", STAGE, 0, 2 * MIB) == data
        assert connections(second) == 1
        clients.close()
        await until(lambda: connections(second) == 0)


async def test_a_connection_that_died_unseen_is_replaced_once(link: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks alive when it is taken, is reset when it is used."""
    await link.clients.ping("n2")
    pool = link.clients._pools["n2"]
    pool._idle[0].stream._sock.shutdown(socket.SHUT_RDWR)
    monkeypatch.setattr("cachexfs.adapters.peer_stream.PeerStream.is_readable", lambda self: False)
    await link.clients.ping("n2")


async def test_an_idle_connection_is_closed_before_the_server_does(tmp_path: Path) -> None:
    async with pair(tmp_path / "replicas", client_limits=ClientLimits(idle_s=0)) as link:
        await link.clients.ping("n2")
        await link.clients.ping("n2")
        await until(lambda: connections(link) == 1)


async def test_the_server_closes_what_is_idle_too_long(tmp_path: Path) -> None:
    async with pair(tmp_path / "replicas", ServerLimits(idle_s=1)) as link:
        await link.clients.ping("n2")
        await until(lambda: connections(link) == 0)
        await link.clients.ping("n2")


@pytest.mark.parametrize("steps", range(0, 60, 3))
async def test_cancelled_after_some_steps(link: Pair, tmp_path: Path, steps: int) -> None:
    """A call cancelled at any moment leaves no answer behind that a later call could take for its own."""
    data = content(6 * MIB, seed=steps)
    link.memory["beef"] = tmp_path / "source"
    with source(tmp_path, data) as fd:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.clients.push, "n2", STAGE, fd, blocks_of(data))
            nursery.start_soon(link.clients.read, "n2", "beef", 0, 3 * MIB)
            nursery.start_soon(link.clients.ping, "n2")
            for _ in range(steps):
                await trio.testing.wait_all_tasks_blocked() if steps % 2 else await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert await link.clients.read("n2", "beef", 5, 2 * MIB) == data[5 : 2 * MIB + 5]
        await link.clients.push("n2", STAGE, fd, blocks_of(data))
    await link.clients.commit("n2", STAGE, manifest_of(data))
    assert await link.clients.read("n2", STAGE, 0, 6 * MIB) == data
    link.clients.close()
    await until(lambda: connections(link) == 0)


async def test_a_peer_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ClientLimits(stall_s=0.1, commit_s=0.1, ping_s=0.1)
    async with pair(tmp_path / "replicas", client_limits=limits) as link:

        async def forever(*args: object) -> str:
            await trio.sleep_forever()
            return ""

        for name in ("commit", "write_block", "read_into", "drop"):
            monkeypatch.setattr(link.store, name, forever)
        data = content(MIB)
        with source(tmp_path, data) as fd:
            for call in (
                link.clients.push("n2", STAGE, fd, blocks_of(data)),
                link.clients.commit("n2", STAGE, manifest_of(data)),
                link.clients.read("n2", STAGE, 0, 5),
                link.clients.drop("n2", STAGE),
            ):
                with pytest.raises(trio.TooSlowError):
                    await call


async def test_more_connections_than_a_peer_may_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with pair(tmp_path / "replicas", ServerLimits(connections_per_peer=1)) as link:
        await link.clients.ping("n2")
        other = link.client()
        with pytest.raises(OSError, match="closed"):
            await other.ping("n2")
        assert "another was refused" in caplog.text
        await link.clients.ping("n2")


async def test_memory_for_payloads_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pushes while the disk stands still: what the server holds stays within its budget, then all arrives."""
    limits = ServerLimits(buffer_bytes_per_peer=8 * MIB)
    async with pair(tmp_path / "replicas", limits, ClientLimits(stall_s=60)) as link:
        release = trio.Event()
        held: set[int] = set()
        write_block = link.store.write_block

        async def slow(stage: str, offset: int, block: memoryview, digest: bytes) -> None:
            held.add(id(block.obj))
            await release.wait()
            await write_block(stage, offset, block, digest)

        monkeypatch.setattr(link.store, "write_block", slow)
        data = content(8 * MIB)
        with source(tmp_path, data) as fd:
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(link.clients.push, "n2", f"{number:x}.1", fd, blocks_of(data))
                await until(lambda: len(held) == 8)
                await trio.sleep(0.05)
                assert len(held) == 8
                release.set()
        assert len(link.store.unfinished()) == 4


async def test_a_push_from_a_mapped_file_that_is_being_written(link: Pair, tmp_path: Path) -> None:
    """A writer scribbles over the source all the time: each push is refused or exact, never a mixture."""
    data = content(4 * MIB)
    path = tmp_path / "source"
    with source(tmp_path, data) as fd:
        write_fd = os.open(path, os.O_RDWR)
        mapped = mmap.mmap(write_fd, 4 * MIB)
        stop = False

        def scribble() -> None:
            value = 0
            while not stop:
                value = (value + 1) % 256
                for at in range(0, 4 * MIB, MIB // 2):
                    mapped[at] = value
            mapped[:] = data

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, scribble)
            for _ in range(10):
                with pytest.raises(PeerError, match="other bytes than its digest"):
                    await link.clients.push("n2", STAGE, fd, blocks_of(data))
            stop = True
        mapped.close()
        os.close(write_fd)
        await link.clients.push("n2", STAGE, fd, blocks_of(data))
    await link.clients.commit("n2", STAGE, manifest_of(data))
    assert await link.clients.read("n2", STAGE, 0, 4 * MIB) == data


@pytest.mark.parametrize("block", [(1, 5, bytes(16)), (0, 0, bytes(16)), (0, MIB + 1, bytes(16))])
async def test_what_is_no_block_is_not_sent(link: Pair, block: tuple[int, int, bytes]) -> None:
    with pytest.raises(LocalProtocolError, match="no block"):
        await link.clients.push("n2", STAGE, -1, [block])
    assert connections(link) == 0


async def test_a_secret_must_be_long_enough(link: Pair) -> None:
    assert len(SECRET) >= 16
    with pytest.raises(Exception, match="at least 16"):
        link.client(secret=b"short")
