"""Replication: every published content has a whole, synced copy on a partner's NVMe.

Role: level-triggered. The catalogue says which contents lack copies; the first live holder of each sends them.
So a lost partner, a restart and a new generation are one case. Content in progress is sent ahead in whole blocks
(``grown``); publication or an fsync sends what is missing and what was overwritten, found by block digests.

Concurrency: one task per file, at most ``SENDERS_MAX`` at once; a failure backs off and stays visible in ``error``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from cachexfs.core import manifest as manifests
from cachexfs.core import namespace
from cachexfs.core.digest import BLOCK_BYTES, block_digest
from cachexfs.core.manifest import Manifest
from cachexfs.core.records import AnyRecord, Copy, Generation, Inode, Life
from cachexfs.engine.content import Reader
from cachexfs.engine.files import Files, Vnode
from cachexfs.engine.interfaces import Synced
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError, NotDurableError

log = logging.getLogger(__name__)

SENDERS_MAX = 4
TASKS_MAX = 64
AHEAD_BYTES_MIN = 8 << 20
RETRY_FIRST_S, RETRY_MAX_S = 0.25, 10.0
COMMIT_DEADLINE_S = 120.0


@dataclass(slots=True)
class _Sent:
    """What a partner has received of a stage: block index -> digest, and the bytes counted when last sent ahead."""

    blocks: dict[int, bytes] = field(default_factory=dict)
    ahead_bytes: int = 0
    lock: trio.Lock = field(default_factory=trio.Lock)


class Replicator:
    """Sends contents to partners."""

    def __init__(self, node: Node, files: Files, reader: Reader) -> None:
        self.node = node
        self.files = files
        self.reader = reader
        self._sent: dict[tuple[str, str], _Sent] = {}
        self._wanted: dict[int, None] = {}
        self._busy: set[int] = set()
        self._retry_s: dict[int, float] = {}
        self._wake = trio.Event()
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._slots = trio.CapacityLimiter(SENDERS_MAX)
        self.sent_bytes = 0

    # ---- what is wanted
    def notice(self, changes: list[tuple[bytes, AnyRecord | None, AnyRecord | None]]) -> None:
        """Catalogue listener: contents that changed, nodes that came or went."""
        for key, _, new in changes:
            if isinstance(new, (Inode, Generation)):
                self._want(int(key[2:], 16))
            elif key.startswith(b"l/") or isinstance(new, Life):
                self.review()
        self._changed.set()
        self._changed = trio.Event()

    def review(self) -> None:
        """Look at every file again (a node died or joined)."""
        for key, entry in list(self.node.catalogue.view.items()):
            if isinstance(entry.record, Generation):
                self._want(int(key[2:], 16))

    def _want(self, fid: int) -> None:
        if self._lacking(fid):
            self._wanted[fid] = None
            self._wake.set()

    def _lacking(self, fid: int) -> list[str]:
        """Partners that should get this node's copy of a file's content and have none."""
        if self.node.replica_count == 0 or self.node.peers is None:
            return []
        inode = self.node.catalogue.view.inode(fid)
        content = self.node.catalogue.view.generation(fid)
        if inode is None or content is None or not inode.size or not content.tree:
            return []
        holders = self.node.holders(inode)
        if not holders or holders[0] != self.node.name or len(holders) > self.node.replica_count:
            return []
        return [name for name in self.node.partners() if name not in holders][
            : self.node.replica_count + 1 - len(holders)
        ]

    async def run(self) -> None:
        """Send what is wanted, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.review()
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                for fid in list(self._wanted):
                    if fid not in self._busy and len(self._busy) < TASKS_MAX:
                        del self._wanted[fid]
                        self._busy.add(fid)
                        nursery.start_soon(self._serve, fid)

    async def _serve(self, fid: int) -> None:
        try:
            async with self._slots:
                await self.ensure(fid)
            self._retry_s.pop(fid, None)
        except (CacheXError, OSError, trio.TooSlowError) as error:
            delay = min(self._retry_s.get(fid, RETRY_FIRST_S / 2) * 2, RETRY_MAX_S)
            self._retry_s[fid] = delay
            await self._show(fid, f"replication: {error or type(error).__name__}; next try in {delay:.0f} s")
            await trio.sleep(delay)
        finally:
            self._busy.discard(fid)
            self._want(fid)
            self._wake.set()

    async def _show(self, fid: int, error: str) -> None:
        log.warning("%r: %s", self.reader.path(fid), error)
        ctx = self.node.ctx()
        try:
            await self.node.catalogue.mutate(lambda tx: namespace.note_error(tx, ctx, fid, error))
        except CacheXError as unavailable:
            log.warning("the error could not be recorded: %s", unavailable)

    # ---- sending
    async def ensure(self, fid: int) -> None:
        """Bring a file's current content to its partners now. Raises what stood in the way."""
        view = self.node.catalogue.view
        for name in self._lacking(fid):
            inode, content = view.inode(fid), view.generation(fid)
            if inode is None or content is None:
                return
            path = self.node.local_path(content.stage, content.size)
            if path is None:
                await self._lost_here(fid, content)
                return
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                digests = await self.node.digests(fd, content.size)
                if digests[1] != content.tree:
                    await self._lost_here(fid, content)
                    return
                manifest = self._manifest(fid, inode, content.stage, content.size, digests, content)
                store = await self._send(name, fd, manifest, digests[2])
            finally:
                os.close(fd)
            self._sent.pop((name, content.stage), None)
            ctx, copy = self.node.ctx(), Copy(name, store, "nvme", self.node.clock.now_s())
            await self.node.catalogue.mutate(lambda tx: namespace.add_copy(tx, ctx, fid, content.gen, copy))  # noqa: B023

    async def _lost_here(self, fid: int, content: Generation) -> None:
        """This node's own copy is not what the catalogue says: stop claiming it."""
        stores = [self.node.staging.store] + ([self.node.replicas.store] if self.node.replicas else [])
        gone = [(self.node.name, store) for store in stores]
        ctx = self.node.ctx()
        why = f"the copy on node {self.node.name} is damaged or gone"
        await self.node.catalogue.mutate(lambda tx: namespace.drop_copies(tx, ctx, fid, content.gen, gone, why))

    async def sync(self, vnode: Vnode) -> None:
        """fsync before publication: what is in the file now is at the partner, synced, when this returns.

        Raises ``NotDurableError`` without a live partner, ``OSError`` or ``CacheXError`` of the attempt.
        """
        partners = self.node.partners()
        if len(partners) < self.node.replica_count or not partners:
            raise NotDurableError("no live partner")
        version, size, digests = await self.files.snapshot(vnode)
        if vnode.synced is not None and (vnode.synced.version, vnode.synced.size) == (version, size):
            return
        inode = self.node.catalogue.view.inode(vnode.fid)
        if inode is None or size == 0:
            return
        stage, copies = vnode.stage, []
        fd = os.dup(vnode.fd)
        try:
            for name in partners:
                manifest = self._manifest(vnode.fid, inode, stage, size, digests, None)
                store = await self._send(name, fd, manifest, digests[2])
                copies.append(Copy(name, store, "nvme", self.node.clock.now_s()))
        finally:
            os.close(fd)
        if vnode.stage == stage:
            vnode.synced = Synced(version, size, tuple(copies))
        ctx, fid = self.node.ctx(), vnode.fid
        await self.node.catalogue.mutate(
            lambda tx: namespace.note_synced(tx, ctx, fid, stage, size, digests[0], digests[1], tuple(copies))
        )

    def _manifest(
        self, fid: int, inode: Inode, stage: str, size: int,
        digests: tuple[bytes, bytes, list[bytes]], content: Generation | None,
    ) -> Manifest:  # fmt: skip
        return Manifest(
            fid=fid, path=self.reader.path(fid) or b"", stage=stage, size=size, digest=digests[0], tree=digests[1],
            blocks=b"".join(digests[2]), mode=inode.mode, uid=inode.uid, gid=inode.gid, mtime_ns=inode.mtime_ns,
            atime_ns=inode.atime_ns, gen=content.gen if content else inode.gen + 1, origin=self.node.name,
            revision=self.node.catalogue.view.published_at(fid) if content else 0, published=content is not None,
        )  # fmt: skip

    async def _send(self, name: str, fd: int, manifest: Manifest, digests: Sequence[bytes]) -> str:
        """Send the blocks that the partner lacks, then make the copy durable; returns the partner's store."""
        assert self.node.peers is not None
        sent = self._sent.setdefault((name, manifest.stage), _Sent())
        async with sent.lock:
            lacking = [
                (index * BLOCK_BYTES, min(BLOCK_BYTES, manifest.size - index * BLOCK_BYTES), digest)
                for index, digest in enumerate(digests)
                if sent.blocks.get(index) != digest
            ]
            try:
                with trio.fail_after(COMMIT_DEADLINE_S):
                    if lacking:
                        await self.node.peers.push(name, manifest.stage, fd, lacking)
                    store = await self.node.peers.commit(name, manifest.stage, manifests.encode(manifest))
            except BaseException:
                self._sent.pop((name, manifest.stage), None)
                raise
            self.sent_bytes += sum(length for _, length, _ in lacking)
            sent.blocks = dict(enumerate(digests))
        return store

    # ---- sending ahead
    def grown(self, vnode: Vnode) -> None:
        """A file in progress has changed: send complete blocks ahead when there are enough of them."""
        if self.node.replica_count == 0 or self._nursery is None or vnode.change_lock.locked():
            return
        partners = self.node.partners()
        if not partners:
            return
        size = os.fstat(vnode.fd).st_size
        sent = self._sent.get((partners[0], vnode.stage))
        if size - (sent.ahead_bytes if sent else 0) < AHEAD_BYTES_MIN:
            return
        sent = self._sent.setdefault((partners[0], vnode.stage), _Sent())
        if not sent.lock.locked():
            self._nursery.start_soon(self._send_ahead, partners[0], vnode, sent)

    async def _send_ahead(self, name: str, vnode: Vnode, sent: _Sent) -> None:
        stage = vnode.stage
        if sent.lock.locked() or vnode.fd < 0:
            return
        async with sent.lock:
            fd = os.dup(vnode.fd)
            try:
                whole = os.fstat(fd).st_size // BLOCK_BYTES
                start = sent.ahead_bytes // BLOCK_BYTES
                if whole * BLOCK_BYTES - sent.ahead_bytes < AHEAD_BYTES_MIN:
                    return
                blocks = await trio.to_thread.run_sync(_digest_range, fd, start, whole)
                lacking = [(i * BLOCK_BYTES, BLOCK_BYTES, digest) for i, digest in blocks]
                assert self.node.peers is not None
                with trio.fail_after(COMMIT_DEADLINE_S):
                    await self.node.peers.push(name, stage, fd, lacking)
                sent.blocks.update(blocks)
                sent.ahead_bytes = whole * BLOCK_BYTES
                self.sent_bytes += len(lacking) * BLOCK_BYTES
            except (CacheXError, OSError, trio.TooSlowError) as error:
                # Publication sends everything that is missing, and reports what stands in its way.
                log.debug("sending %s ahead to %s: %s", stage, name, error)
                self._sent.pop((name, stage), None)
            finally:
                os.close(fd)

    def forget(self, stage: str) -> None:
        """A stage is gone for good."""
        for key in [key for key in self._sent if key[1] == stage]:
            del self._sent[key]

    async def changed(self) -> None:
        """Return at the next change of the catalogue."""
        await self._changed.wait()


def _digest_range(fd: int, start: int, end: int) -> list[tuple[int, bytes]]:
    return [(i, block_digest(os.pread(fd, BLOCK_BYTES, i * BLOCK_BYTES))) for i in range(start, end)]
