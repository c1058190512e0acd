"""The other nodes' daemons, reached through a network that delays, drops and parts.

Role: ``Peers`` for simulations: the answers are those of ``PeerServer`` (memory before NVMe, digests checked by the
replica store), the store is the real one. An exchange may fail before or after its effect.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio
from sim_life import Life

from cachexfs.adapters.file_digest import digest_file
from cachexfs.core import manifest as manifests
from cachexfs.errors import CorruptError, PeerError

SILENCE_S = 60.0  # longer than anybody waits


@dataclass
class NetFaults:
    """Probabilities, and pairs of nodes that do not reach each other."""

    drop: float = 0.0
    slow: float = 0.0
    parted: set[frozenset[str]] = field(default_factory=set)

    def calm(self) -> None:
        self.drop = self.slow = 0.0
        self.parted.clear()


class Network(Protocol):
    """What peers need of the run."""

    random: random.Random
    net: NetFaults

    def trace(self, text: str) -> None:
        """Say what happens."""
        ...

    def life_of(self, name: str) -> Life | None:
        """The daemon that lives on a node."""
        ...


class SimPeers:
    """One node's way to the others."""

    def __init__(self, network: Network, name: str) -> None:
        self._network, self._name = network, name

    async def _way(self, node: str) -> Life:
        """One way through the network. Raises when nobody is there."""
        rng, net = self._network.random, self._network.net
        await trio.sleep(rng.choice([0, 0.0005, 0.003]))
        if rng.random() < net.slow:
            await trio.sleep(rng.choice([1, 10, SILENCE_S]))
        if frozenset({self._name, node}) in net.parted:
            await trio.sleep(SILENCE_S)
            raise OSError(errno.ETIMEDOUT, "no answer", node)
        life = self._network.life_of(node)
        if rng.random() < net.drop or life is None or life.store is None:
            raise ConnectionResetError(errno.ECONNRESET, "the connection has ended", node)
        return life

    async def push(self, node: str, stage: str, source_fd: int, blocks: Sequence[tuple[int, int, bytes]]) -> None:
        """See ``Peers``."""
        for offset, length, digest in blocks:
            data = os.pread(source_fd, length, offset)
            if len(data) < length:
                raise PeerError(f"{stage} has been cut at {offset + len(data)}")
            life = await self._way(node)
            assert life.store is not None
            try:
                await life.store.write_block(stage, offset, data, digest)
            except CorruptError as error:
                raise PeerError(str(error)) from error
        await self._way(node)

    async def commit(self, node: str, stage: str, manifest: bytes) -> str:
        """See ``Peers``."""
        life = await self._way(node)
        assert life.store is not None
        found = manifests.decode(manifest)
        self._network.trace(f"{self._name} -> {node} commit {found.path!r} {stage} {found.size} bytes, gen {found.gen}")
        try:
            store = await life.store.commit(stage, manifest)
        except CorruptError as error:
            raise PeerError(str(error)) from error
        await self._way(node)
        return store

    async def read(self, node: str, stage: str, offset: int, length: int) -> bytes:
        """See ``Peers``."""
        life = await self._way(node)
        assert life.store is not None
        if life.node.staged(stage):
            fd = life.staging.open_file(stage)
            try:
                found = os.pread(fd, length, offset)
            finally:
                os.close(fd)
        else:
            found = await life.store.read(stage, offset, length)
        await self._way(node)
        return found

    async def manifest(self, node: str, stage: str) -> bytes:
        """See ``Peers``."""
        life = await self._way(node)
        assert life.store is not None
        found = _memory_manifest(life, stage) or life.store.manifest(stage)
        await self._way(node)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no copy", stage)
        return found

    async def drop(self, node: str, stage: str) -> None:
        """See ``Peers``."""
        life = await self._way(node)
        assert life.store is not None
        await life.store.drop(stage)

    async def ping(self, node: str) -> float:
        """See ``Peers``."""
        return (await self._way(node)).node.clock.now_s()


def _memory_manifest(life: Life, stage: str) -> bytes | None:
    """As the daemon computes it for what it has staged."""
    if not life.node.staged(stage):
        return None
    fid = int(stage.partition(".")[0], 16)
    content, inode = life.catalogue.view.generation(fid), life.catalogue.view.inode(fid)
    if content is None or inode is None or content.stage != stage:
        return None
    fd = life.staging.open_file(stage)
    try:
        digests = digest_file(fd, content.size)
    finally:
        os.close(fd)
    manifest = manifests.Manifest(
        fid=fid,
        path=b"",
        stage=stage,
        size=content.size,
        digest=digests[0],
        tree=digests[1],
        blocks=b"".join(digests[2]),
        mode=inode.mode,
        uid=inode.uid,
        gid=inode.gid,
        mtime_ns=inode.mtime_ns,
        atime_ns=inode.atime_ns,
        gen=content.gen,
        origin=content.origin,
        revision=0,
        published=True,
    )
    return manifests.encode(manifest)
