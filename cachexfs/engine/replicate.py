"""Replication: every published content has a whole, synced copy on a partner's NVMe.

Role: level-triggered. The catalogue says which contents lack copies; the first live holder of each sends them.
So a lost partner, a restart and a new generation are one case. Content in progress is sent ahead in whole blocks
(``grown``); publication or an fsync sends what is missing and what was overwritten, found by block digests.

Concurrency: one task per file, at most ``SENDERS_MAX`` at once; a failure backs off and stays visible in ``error``.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import trio

from cachexfs.core import manifest as manifests
from cachexfs.core import publication
from cachexfs.core.digest import BLOCK_BYTES, block_digest
from cachexfs.core.manifest import Manifest
from cachexfs.core.records import Copy, Dirent, Generation, Inode, Life, OpKind
from cachexfs.core.replica import Applied
from cachexfs.core.routes import DIRECT
from cachexfs.engine.content import Reader
from cachexfs.engine.damaged import drop
from cachexfs.engine.drain_progress import Throughput
from cachexfs.engine.files import Files
from cachexfs.engine.interfaces import Synced
from cachexfs.engine.node import Node
from cachexfs.engine.replica_manifests import Manifests
from cachexfs.engine.route import Router
from cachexfs.engine.vnode import Vnode
from cachexfs.errors import CacheXError, NotDurableError

log = logging.getLogger(__name__)

SENDERS_MAX = 4
TASKS_MAX = 64
AHEAD_BYTES_MIN = 8 << 20
RETRY_FIRST_S, RETRY_MAX_S = 0.25, 10.0
COMMIT_DEADLINE_S = 120.0
RENEW_AGAIN_S = 0.5
_TOLD = (OpKind.PUT, OpKind.RENAME)  # what changes the path or the content that partners' manifests have


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
        self.manifests = Manifests(node, reader)
        self._sent: dict[tuple[str, str], _Sent] = {}
        self._wanted: dict[int, None] = {}
        # Files whose partners' manifests may say what is past; True: a partner could not be told, the log has it.
        self._renewed: dict[int, bool] = {}
        self._busy: set[int] = set()
        self._retry_s: dict[int, float] = {}
        self._wake = trio.Event()
        self._renew_wake = trio.Event()
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._slots = trio.CapacityLimiter(SENDERS_MAX)
        self.router = Router(node)
        self.throughput = Throughput()

    # ---- what is wanted
    def notice(self, changes: Applied) -> None:
        """Catalogue listener: contents that changed, nodes that came or went."""
        if self.node.replica_count:
            self._follow(changes)
        self._changed.set()
        self._changed = trio.Event()

    def _follow(self, changes: Applied) -> None:
        self.manifests.note_past(changes)
        for key, old, new in changes:
            if isinstance(old, Inode) or isinstance(new, Inode):
                self.router.note(int(key[2:], 16), new if isinstance(new, Inode) else None)
            if isinstance(new, (Inode, Generation)):
                self._want(int(key[2:], 16))
                if isinstance(new, Generation) or (isinstance(old, Inode) and _outdates(old, new)):
                    self._renew(int(key[2:], 16))  # copies that are there already: of an fsync, before the publication
            elif isinstance(new, Dirent) and new != old:
                self._renew(new.fid)
            elif key.startswith(b"l/") or isinstance(new, Life):
                self.review()

    def review(self) -> None:
        """Look at every file again (a node died or joined)."""
        for key, _ in list(self.node.catalogue.view.items()):
            if key.startswith(b"g/"):
                self._want(int(key[2:], 16))
        for fid in self._untold():
            self._renew(fid)

    def _want(self, fid: int) -> None:
        if self._lacking(fid):
            self._wanted[fid] = None
            self._wake.set()

    def _renew(self, fid: int) -> None:
        """A file, or all below a directory, may have another path or base than its partners' manifests say."""
        stack, view = [fid], self.node.catalogue.view
        while stack and self.node.replica_count and self.node.peers is not None:
            fid = stack.pop()
            stack += [entry.fid for entry in view.children(fid).values()]
            if self._holders_beyond(fid) or self._has_moved(fid):
                self._renewed.setdefault(fid, False)
                self._renew_wake.set()

    def _has_moved(self, fid: int) -> bool:
        """Whether partners know what was fsynced of a file in progress by another path than it has now."""
        vnode, inode = self.files.known(fid), self.node.catalogue.view.inode(fid)
        if vnode is None or not vnode.dirty or inode is None or inode.synced is None:
            return False
        return vnode.synced is None or vnode.synced.path != self.reader.path(fid)  # None: by the daemon before

    def _holders_beyond(self, fid: int) -> list[str]:
        """Other nodes with a replica of a file's content, if it is this node that keeps their manifests right."""
        inode = self.node.catalogue.view.inode(fid)
        if inode is None or not inode.copies or self.node.holders(inode)[:1] != [self.node.name]:
            return []
        copies = [copy for copy in self.node.live_copies(inode) if copy.tier == "nvme"]
        return [copy.node for copy in copies if copy.node != self.node.name]

    def _lacking(self, fid: int) -> list[str]:
        """Partners that should get this node's copy of a file's content and have none."""
        if self.node.replica_count == 0 or self.node.peers is None:
            return []
        inode = self.node.catalogue.view.inode(fid)
        content = self.node.catalogue.view.generation(fid)
        if inode is None or content is None or not inode.size or not content.tree or inode.route == DIRECT:
            return []
        if inode.retired == inode.gen and self.node.on_pfs(fid, inode):
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
            nursery.start_soon(self._keep_manifests)
            nursery.start_soon(self.router.run)
            self.review()
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                for fid in list(self._wanted):
                    if fid not in self._busy and len(self._busy) < TASKS_MAX:
                        del self._wanted[fid]
                        self._busy.add(fid)
                        nursery.start_soon(self._serve, fid)

    def _untold(self) -> set[int]:
        """Files that are not on the PFS, of which partners may not have been told everything: they were away, or the
        daemon before has died."""
        view = self.node.catalogue.view
        unlanded = {op.fid for _, op, _ in view.ops() if op.kind in _TOLD and op.owner == self.node.name}
        writing = (fid for fid, inode in view.inodes() if inode.synced is not None and inode.writing == self.node.name)
        return unlanded.union(writing)

    async def _keep_manifests(self) -> None:
        while True:
            await self._renew_wake.wait()
            self._renew_wake = trio.Event()
            silent: set[str] = set()  # partners that one file of this round could not be told to
            for fid in list(self._renewed):
                vnode = self.files.known(fid)
                if vnode is not None and vnode.dirty:
                    if self._has_moved(fid):
                        await self._sync_again(vnode)
                elif silent.isdisjoint(self._holders_beyond(fid)):
                    await self._renew_manifests(fid, silent, is_logged=self._renewed.pop(fid))
            if self._renewed:  # being written, just being published, or not told: a node lives before it listens
                with trio.move_on_after(RENEW_AGAIN_S):
                    await self._renew_wake.wait()
                self._renew_wake.set()

    async def _sync_again(self, vnode: Vnode) -> None:
        try:
            await self.sync(vnode)
        except (CacheXError, OSError, trio.TooSlowError) as error:
            log.debug("what was fsynced of %r has its old path at the partner: %s", vnode.fid, error)

    async def _renew_manifests(self, fid: int, silent: set[str], *, is_logged: bool) -> None:
        """Tell the partners a file's present path, attributes and base. The bytes stay as they are.

        One that cannot be told joins ``silent``, and the file comes after all others in the next round.
        """
        view = self.node.catalogue.view
        inode, content = view.inode(fid), view.generation(fid)
        if inode is None or content is None or self.node.peers is None:
            return
        for name in self._holders_beyond(fid):
            sent = self._sent.setdefault((name, content.stage), _Sent())
            try:
                async with sent.lock:
                    with trio.fail_after(COMMIT_DEADLINE_S):
                        held = manifests.decode(await self.node.peers.manifest(name, content.stage))
                        digests = held.digest, held.tree, [held.blocks]
                        manifest = self.manifests.make(fid, inode, content.stage, content.size, digests, content)
                        # What the commit file stood for does not change with what lies beside it later.
                        members = held.members or manifest.members
                        manifest = msgspec.structs.replace(
                            manifest, origin=held.origin, members=members, made_ns=held.made_ns
                        )
                        vnode = self.files.known(fid)
                        if vnode is not None and vnode.dirty:
                            self._renew(fid)  # a commit now would disturb what is being sent ahead
                            return
                        if held.tree != content.tree or manifest == held:
                            continue  # a newer content has brought its own manifest
                        await self.node.peers.commit(name, content.stage, manifests.encode(manifest))
            except FileNotFoundError as error:  # whoever reads the copy finds that out, too, and says so
                log.warning("the manifest of %r at %s is not there: %s", self.reader.path(fid), name, error)
            except (CacheXError, OSError, trio.TooSlowError) as error:
                # Only ``recover`` reads it, and nothing claims that it is new.
                level = logging.DEBUG if is_logged else logging.WARNING
                log.log(level, "the manifest of %r at %s stays as it was: %s", self.reader.path(fid), name, error)
                silent.add(name)
                self._renewed[fid] = True
            finally:
                if not sent.blocks and not sent.ahead_bytes and not sent.lock.locked():
                    self._sent.pop((name, content.stage), None)

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
            await self.node.catalogue.mutate(lambda tx: publication.note_error(tx, ctx, fid, error))
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
                await drop(self.node, fid, content, None)
                return
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                digests = await self.node.digests(fd, content.size)
                if digests[1] != content.tree:
                    await drop(self.node, fid, content, path)
                    return  # another copy here may be whole: it is looked at next
                manifest = self.manifests.make(fid, inode, content.stage, content.size, digests, content)
                store = await self._send(name, fd, manifest, digests[2])
            finally:
                os.close(fd)
            self._sent.pop((name, content.stage), None)
            ctx, copy = self.node.ctx(), Copy(name, store, "nvme", self.node.clock.now_s())
            await self.node.catalogue.mutate(lambda tx: publication.add_copy(tx, ctx, fid, content.gen, copy))  # noqa: B023
            now = view.inode(fid)
            if now is not None and (self.reader.path(fid) != manifest.path or _outdates(inode, now)):
                self._renew(fid)  # renamed or changed while it was sent

    async def sync(self, vnode: Vnode) -> None:
        """fsync before publication: what is in the file now is at the partner, synced, when this returns.

        Raises ``NotDurableError`` without a live partner, ``OSError`` or ``CacheXError`` of the attempt.
        """
        partners = self.node.partners()
        if len(partners) < self.node.replica_count or not partners:
            raise NotDurableError("no live partner")
        base_gen = vnode.content.gen
        version, size, digests = await self.files.publishing.snapshot(vnode)
        is_same = vnode.synced is not None and (vnode.synced.version, vnode.synced.size) == (version, size)
        if is_same and not self._has_moved(vnode.fid):
            return
        inode = self.node.catalogue.view.inode(vnode.fid)
        if inode is None or size == 0:
            return
        stage = vnode.stage
        fd = os.dup(vnode.fd)
        try:
            manifest = self.manifests.make(vnode.fid, inode, stage, size, digests, None)
            copies = await self._send_to_all(fd, manifest, digests[2])
        finally:
            os.close(fd)
        if vnode.stage == stage:
            vnode.synced = Synced(version, size, tuple(copies), manifest.path)
        ctx, fid = self.node.ctx(), vnode.fid
        noted = await self.node.catalogue.mutate(
            lambda tx: publication.note_synced(
                tx, ctx, fid, base_gen, stage, size, digests[0], digests[1], tuple(copies)
            )
        )
        if not noted:  # see ``taken``: the next attempt is of a stage of its own
            raise OSError(errno.EAGAIN, "this node counted as lost meanwhile")

    async def _send_to_all(self, fd: int, manifest: Manifest, digests: Sequence[bytes]) -> list[Copy]:
        """Make a copy on each partner, in the place of one whose disk refuses it on the next. Raises as ``sync``."""
        found: dict[str, Copy] = {}
        while len(found) < self.node.replica_count:
            name = next((name for name in self.node.partners() if name not in found), None)
            if name is None:
                raise NotDurableError("no live partner")
            try:
                store = await self._send(name, fd, manifest, digests)
            except OSError:
                if name in self.node.partners():
                    raise  # there is nobody else
                continue
            found[name] = Copy(name, store, "nvme", self.node.clock.now_s())
        return list(found.values())

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
            except BaseException as error:
                self._sent.pop((name, manifest.stage), None)
                if isinstance(error, OSError):
                    self.node.note_sent(name, error)
                raise
            self.node.note_sent(name)
            self.throughput.moved(sum(length for _, length, _ in lacking))
            sent.blocks = dict(enumerate(digests))
        return store

    # ---- sending ahead
    def grown(self, vnode: Vnode) -> None:
        """A file in progress has changed: send complete blocks ahead when there are enough of them."""
        if self.node.replica_count == 0 or self._nursery is None or vnode.change_lock.locked():
            return
        partners = self.node.partners()
        if not partners or self.router.is_direct(vnode):
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
                self.throughput.moved(len(lacking) * BLOCK_BYTES)
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


def _outdates(old: Inode, new: Inode) -> bool:
    """Whether a change of the record makes the partners' manifests say what is past."""
    attributes = (old.mode, old.uid, old.gid, old.mtime_ns) != (new.mode, new.uid, new.gid, new.mtime_ns)
    landed = new.pfs is not None and old.pfs != new.pfs and new.pfs.gen != new.gen
    return old.gen == new.gen and (attributes or landed)


def _digest_range(fd: int, start: int, end: int) -> list[tuple[int, bytes]]:
    return [(i, block_digest(os.pread(fd, BLOCK_BYTES, i * BLOCK_BYTES))) for i in range(start, end)]
