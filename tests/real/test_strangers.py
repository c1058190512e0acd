"""Somebody without the secret on the partner port: gets nothing, harms nothing."""

import contextlib
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_support import until_stage, write_file

from cachexfs.core.wire import MAGIC
from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr

CONNECTIONS = 200
ANSWER_TIMEOUT_S = 100.0
FLOOD_BYTES = 8 << 20
KIB = 1 << 10

DICE = random.Random(7)
PREFIX = struct.Struct(">3sBII")
WHAT_STRANGERS_SAY = {
    "nothing": b"",
    "noise": DICE.randbytes(64 * KIB),
    "http": b"GET /v3/kv/range HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + DICE.randbytes(500),
    "huge header": PREFIX.pack(MAGIC, 1, 0xFFFFFFFF, 0xFFFFFFFF) + bytes(KIB),
    "huge payload": PREFIX.pack(MAGIC, 1, 64, 0xFFFFFFFF) + bytes(64 * KIB),
    "msgpack bomb": PREFIX.pack(MAGIC, 1, KIB, 0) + b"\xdd\xff\xff\xff\xff" + bytes(KIB + 27),
    "nested": PREFIX.pack(MAGIC, 1, KIB, 0) + b"\x91" * KIB + bytes(32),
    "cut": PREFIX.pack(MAGIC, 1, 100, 0)[:7],
}


@pytest.fixture(scope="module")
def pair(make_module_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    return make_module_cluster(2)


@pytest.fixture
def unharmed(pair: LocalCluster) -> Iterator[LocalCluster]:
    """Afterwards the cluster still replicates, drains and answers, with the same daemons."""
    pids = [pair.status(index).pid for index in range(2)]
    yield pair
    path = pair.nodes[0].mountpoint / f"after-{random.randrange(10**9)}"
    data = os.urandom(100_000)
    write_file(path, data)
    assert xattr(path, "stage") in ("partner", "pfs")
    until_stage(path, "pfs")
    assert (pair.nodes[1].mountpoint / path.name).read_bytes() == data
    assert [pair.status(index).pid for index in range(2)] == pids
    assert [pair.status(index).failed for index in range(2)] == [None, None]


def connect(cluster: LocalCluster) -> socket.socket:
    node = cluster.nodes[1]
    return socket.create_connection((node.host, node.port), timeout=ANSWER_TIMEOUT_S)


@pytest.mark.parametrize("words", WHAT_STRANGERS_SAY)
def test_a_stranger_gets_no_byte(unharmed: LocalCluster, words: str) -> None:
    with connect(unharmed) as link:
        with contextlib.suppress(OSError):  # it may have hung up already
            link.sendall(WHAT_STRANGERS_SAY[words])
            link.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            assert link.recv(1) == b""


def test_many_silent_connections_do_not_keep_the_partner_out(unharmed: LocalCluster) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            with contextlib.suppress(OSError):  # being refused is as good
                stack.enter_context(connect(unharmed))
        path = unharmed.nodes[0].mountpoint / f"during-{random.randrange(10**9)}"
        write_file(path, os.urandom(50_000))
        assert xattr(path, "stage") in ("partner", "pfs")


def test_a_flood_is_not_kept_in_memory(unharmed: LocalCluster) -> None:
    pid = unharmed.status(1).pid
    before = _resident_bytes(pid)
    for _ in range(8):
        with connect(unharmed) as link, contextlib.suppress(OSError):
            link.sendall(PREFIX.pack(MAGIC, 1, 64, 8 << 20) + bytes(FLOOD_BYTES))
    assert _resident_bytes(pid) - before < FLOOD_BYTES


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_another_jobs_secret_is_a_stranger(make_cluster: Callable[..., LocalCluster]) -> None:
    """A node with the wrong secret neither joins nor reads, and says so in one line."""
    cluster = make_cluster(3, mounted=False)
    other = cluster.root / "other-secret"
    other.touch(0o600)
    other.write_bytes(os.urandom(32))
    cluster.node_options[2] = {"secret": str(other)}
    cluster.mount([0, 1])
    write_file(cluster.nodes[0].mountpoint / "private", b"x" * 1000)
    ended = cluster.run(2, *cluster.mount_arguments(2), "--timeout", "6")
    if ended.code == 0:
        with pytest.raises(OSError):  # noqa: PT011 (any error will do)
            (cluster.nodes[2].mountpoint / "private").read_bytes()
    else:
        assert len(ended.err.strip().splitlines()) == 1
    until_stage(cluster.nodes[0].mountpoint / "private", "pfs")
    assert (cluster.nodes[1].mountpoint / "private").read_bytes() == b"x" * 1000


def test_the_catalogue_refuses_who_has_no_certificate(unharmed: LocalCluster) -> None:
    """Every port of the node but the partner port closes the connection before it has said anything useful."""
    node = unharmed.nodes[0]
    for port in range(node.port + 1, node.port + 4):
        try:
            link = socket.create_connection((node.host, port), timeout=ANSWER_TIMEOUT_S)
        except ConnectionRefusedError:
            continue
        with link, contextlib.suppress(ConnectionError):
            link.sendall(b"GET /v2/keys/?recursive=true HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b"200" not in link.recv(4096)
