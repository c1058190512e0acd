"""Contents, manifests and a pair of nodes for the tests of the peer link."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import trio

from cachexfs.adapters.peer_client import ClientLimits, PeerClients
from cachexfs.adapters.peer_server import PeerServer, ServerLimits
from cachexfs.adapters.replica_store import ReplicaStore
from cachexfs.core import manifest as manifests
from cachexfs.core.digest import BLOCK_BYTES, FileDigest, block_digest
from cachexfs.core.manifest import Manifest

SECRET = b"0123456789abcdef0123456789abcdef"
STAGE = "2000.3.ab"
MIB = BLOCK_BYTES


def content(size: int, seed: int = 0) -> bytes:
    """Bytes that differ everywhere, the same for the same seed."""
    return random.Random(seed).randbytes(size)


def manifest_of(data: bytes, stage: str = STAGE, **changes: Any) -> bytes:
    """An encoded manifest of a content."""
    digest = FileDigest()
    digest.update(data)
    found = digest.result()
    manifest = Manifest(
        fid=8192,
        path=b"run/step-1/shard",
        stage=stage,
        size=len(data),
        digest=found.file,
        tree=found.tree,
        blocks=b"".join(found.blocks),
        mode=0o644,
        uid=0,
        gid=0,
        mtime_ns=1,
        atime_ns=2,
        gen=1,
        origin="n1",
        revision=7,
        published=True,
    )
    return manifests.encode(msgspec.structs.replace(manifest, **changes))


def blocks_of(data: bytes) -> list[tuple[int, int, bytes]]:
    """(offset, length, digest) of each block, as ``Peers.push`` takes them."""
    pieces = [(at, data[at : at + MIB]) for at in range(0, len(data), MIB)]
    return [(at, len(piece), block_digest(piece)) for at, piece in pieces]


async def write_blocks(store: ReplicaStore, data: bytes, only: list[int] | None = None, stage: str = STAGE) -> None:
    """Write a content's blocks, or some of them, into a store's copy in progress."""
    for index, (offset, length, digest) in enumerate(blocks_of(data)):
        if only is None or index in only:
            await store.write_block(stage, offset, data[offset : offset + length], digest)


async def put(store: ReplicaStore, data: bytes, stage: str = STAGE) -> None:
    """Write and commit a content."""
    await write_blocks(store, data, stage=stage)
    await store.commit(stage, manifest_of(data, stage))


@contextlib.contextmanager
def source(tmp_path: Path, data: bytes, name: str = "source") -> Iterator[int]:
    """A descriptor of a file with this content."""
    path = tmp_path / name
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


@dataclass
class Pair:
    """Node n2 with a server and a store, and n1's client."""

    store: ReplicaStore
    server: PeerServer
    clients: PeerClients
    address: tuple[str, int]
    memory: dict[str, Path]
    server_scope: trio.CancelScope

    def client(self, **changes: Any) -> PeerClients:
        """Another client of n1 (or of the node, job or secret given)."""
        settings: dict[str, Any] = {"node": "n1", "job": "job", "secret": SECRET, "resolve": lambda name: self.address}
        return PeerClients(**{**settings, **changes})


PATIENT_CLIENT = ClientLimits(connect_s=100, stall_s=100, commit_s=100)


@contextlib.asynccontextmanager
async def pair(
    directory: Path, limits: ServerLimits | None = None, client_limits: ClientLimits = PATIENT_CLIENT, port: int = 0
) -> AsyncIterator[Pair]:
    """Two nodes on loopback, taken down at the end."""
    store = await ReplicaStore.open(str(directory))
    memory: dict[str, Path] = {}

    def open_copy(stage: str) -> tuple[int, int] | None:
        path = memory.get(stage)
        return (os.open(path, os.O_RDONLY), path.stat().st_size) if path else None

    server = PeerServer(
        node="n2",
        job="job",
        secret=SECRET,
        store=store,
        is_member={"n1", "n2", "n3"}.__contains__,
        open_copy=open_copy,
        now_s=lambda: 1000.0,
        limits=limits,
    )
    async with trio.open_nursery() as nursery:
        address = await nursery.start(server.serve, "127.0.0.1", port)
        made = Pair(store, server, None, address, memory, nursery.cancel_scope)  # type: ignore[arg-type]
        made.clients = made.client(limits=client_limits)
        yield made
        made.clients.close()
        nursery.cancel_scope.cancel()
    store.close()
