"""Reading a published content from wherever a good copy is.

Role: tries this node's staging and NVMe, then live holders (memory before NVMe), then the PFS, where a file that waits
for others may be ready under a hidden name. Every block that comes from elsewhere is checked against the content's
block digests, which are themselves checked against the catalogue's tree digest; a source with a bad or missing block is
reported and the next one is asked.

Concurrency: any number of readers; two readers of one block share one fetch. Fetched blocks stay in a bounded
cache, because a page fault asks for 4 KiB to 128 KiB of a block of 1 MiB.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import trio

from cachexfs.core import manifest as manifests
from cachexfs.core import publication
from cachexfs.core.digest import BLOCK_BYTES, block_count, block_digest, block_length, split_blocks, tree_digest
from cachexfs.core.landed import CHANGED, Landed
from cachexfs.core.records import Copy, Generation, Inode
from cachexfs.engine.copying import copy_bytes, write_all
from cachexfs.engine.fill import Fills
from cachexfs.engine.node import Node
from cachexfs.engine.pfs_copies import PfsCopies
from cachexfs.errors import CacheXError, CorruptError, FsError, quoted

log = logging.getLogger(__name__)

CACHE_BLOCKS_MAX = 128
LOOKS_MAX = 4
BLOCKS_AT_ONCE = 8
DIGESTS_MAX = 1024
SOURCES_MAX = 10_000  # files whose reads are told apart; the oldest are forgotten
READY = b".cachexfs/tmp/"
PFS_DEADLINE_S = 15.0
PFS_LOOKS = 2
PEER_DEADLINE_S = 15.0
ASK_AGAIN_S = 0.25
HOLDER_PATIENCE_S = 30.0  # with holders that are live and do not answer; a dead daemon's lease ends sooner

BlockKey = tuple[int, int, int]  # (file id, generation, block index)


def _nothing() -> None:
    """Nobody counts."""


class Reader:
    """Verified reads of published contents."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._blocks: OrderedDict[BlockKey, bytes] = OrderedDict()
        self._fetching: dict[BlockKey, trio.Event] = {}
        self.copies = PfsCopies(node)
        self.fills = Fills(node, self._copy_segment)
        self._digests: OrderedDict[tuple[str, int], list[bytes] | None] = OrderedDict()
        self.sources: dict[bytes, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    # ---- names
    def path(self, fid: int) -> bytes | None:
        """Path relative to the mount; None when the file has no name."""
        return self.node.catalogue.view.path(fid)

    def pfs_path(self, fid: int) -> bytes | None:
        """Where a file lies on the PFS now: its name, taken back through what has not landed."""
        return next(iter(self.pfs_paths(fid)), None)

    def pfs_paths(self, fid: int) -> list[bytes]:
        """The same, then where it lies once each of that has landed: perhaps it has, and only the record is missing."""
        view = self.node.catalogue.view
        inode = view.inode(fid)
        if inode is not None and inode.pfs is not None and inode.pfs.hidden:
            return [b".cachexfs/held/" + inode.pfs.hidden.encode()]
        path = self.path(fid)
        return self._before_pending(path) if path is not None else []

    def pfs_names(self, fid: int) -> list[bytes]:
        """Where each name of a file lies on the PFS now."""
        view = self.node.catalogue.view
        above = [(view.path(parent), name) for parent, name in view.names_of(fid)]
        paths = [directory + b"/" + name if directory else name for directory, name in above if directory is not None]
        return [self._before_pending(path)[0] for path in paths]

    def _before_pending(self, path: bytes) -> list[bytes]:
        return self.node.catalogue.view.before_renames(path)[::-1]

    # ---- reading
    async def read(self, fid: int, content: Generation, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length) of a content, short at its end. Raises EIO, or ESTALE when it is gone."""
        length = min(length, content.size - offset)
        if length <= 0:
            return b""
        found = await self.fills.read(fid, content, offset, length)
        if found is not None:
            return found
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        parts = []
        for index in range(first, last + 1):
            block = await self._block(fid, content, index)
            start = max(0, offset - index * BLOCK_BYTES)
            parts.append(block[start : offset + length - index * BLOCK_BYTES])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def fetch_into(
        self, fid: int, content: Generation, fd: int, length: int, grown: Callable[[], None] = _nothing
    ) -> None:
        """Copy the first ``length`` bytes of a content into an open file. ``grown`` is called after each piece."""
        if content.stage and self.node.in_memory(content.stage) and self.node.staged(content.stage, content.size):
            source = os.open(self.node.staging.path(content.stage), os.O_RDONLY | os.O_CLOEXEC)
            try:
                await copy_bytes(source, fd, length)
            finally:
                os.close(source)
            return
        await self._fetch_blocks(fid, content, fd, range(block_count(length)), length, grown)

    async def _fetch_blocks(
        self, fid: int, content: Generation, fd: int, blocks: range, end: int, grown: Callable[[], None] = _nothing
    ) -> None:
        """Put blocks of a content, up to byte ``end`` of it, into an open file; some at a time."""
        slots = trio.CapacityLimiter(BLOCKS_AT_ONCE)

        async def one(index: int) -> None:
            async with slots:
                block, source = await self._fetch(fid, content, index)
                write_all(fd, block[: end - index * BLOCK_BYTES], index * BLOCK_BYTES)
                grown()
                self.count(fid, source, len(block))

        try:
            async with trio.open_nursery() as nursery:
                for index in blocks:
                    nursery.start_soon(one, index)
        except BaseExceptionGroup as group:
            raise _first(group) from None

    async def _copy_segment(self, fid: int, content: Generation, fd: int, path: str, offset: int, length: int) -> None:
        """Bring bytes of a content into a staging file (see ``Fills``): in a PFS child, or from a partner."""
        blocks = range(offset // BLOCK_BYTES, block_count(offset + length))
        best = next(iter(self._attempts(fid, content, blocks[0])), None)  # a lost file has none
        if best is not None and best[0] == "pfs" and await self._copy_from_pfs(fid, content, path, offset, length):
            digests = await self._block_digests(fid, content, None)
            if digests is None or await trio.to_thread.run_sync(_match, fd, content.size, digests, blocks):
                self.count(fid, "pfs", length)
                return
        await self._fetch_blocks(fid, content, fd, blocks, offset + length)

    async def _copy_from_pfs(self, fid: int, content: Generation, path: str, offset: int, length: int) -> bool:
        assert self.node.pfs is not None
        if self.node.pfs.state != "ok":  # one wait for a hung PFS is enough: that of the block that the reader asks for
            raise FsError(errno.EIO, f"the PFS is {self.node.pfs.state}")
        asked, expected = self._expected(fid, content)
        for name in self.pfs_paths(fid):
            try:
                return await self.node.pfs.fetch(name, offset, length, path, PFS_DEADLINE_S, expected) == length
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno != CHANGED or asked is None or not await self.copies.found_changed(fid, asked):
                    raise
        return False

    async def _block(self, fid: int, content: Generation, index: int) -> bytes:
        key = (fid, content.gen, index)
        while True:
            found = self._blocks.get(key)
            if found is not None:
                self._blocks.move_to_end(key)
                return found
            if key not in self._fetching:
                break
            await self._fetching[key].wait()
        self._fetching[key] = trio.Event()
        try:
            block, source = await self._fetch(fid, content, index)
        finally:
            self._fetching.pop(key).set()
        self._blocks[key] = block
        while len(self._blocks) > CACHE_BLOCKS_MAX:
            self._blocks.popitem(last=False)
        self.count(fid, source, len(block))
        return block

    def count(self, fid: int, source: str, length: int) -> None:
        """Note which source served a read (shown by ``status`` and the demo)."""
        path = self.path(fid)
        if path is None:
            return
        self.sources[path][source] += length
        if len(self.sources) > SOURCES_MAX:
            del self.sources[next(iter(self.sources))]

    async def _fetch(self, fid: int, content: Generation, index: int) -> tuple[bytes, str]:
        view, looks = self.node.catalogue.view, LOOKS_MAX
        end_s = trio.current_time() + HOLDER_PATIENCE_S
        while True:
            known = view.inode(fid)
            block, source, why, unreached = await self._fetch_as_known(fid, content, index)
            if block is not None:
                return block, source
            if looks > 1 and view.inode(fid) != known:
                looks -= 1  # it has moved meanwhile, say by an eviction: look again where it is now
            elif unreached and trio.current_time() < end_s:
                await trio.sleep(ASK_AGAIN_S)  # its daemon may have died: there will be another, or the node is lost
            else:
                break
        now = view.generation(fid)
        gone = now is None or now.gen != content.gen
        raise FsError(errno.ESTALE if gone else errno.EIO, f"{quoted(self.path(fid))} block {index}: {why}")

    async def _fetch_as_known(self, fid: int, content: Generation, index: int) -> tuple[bytes | None, str, str, bool]:
        """(block, source, "", False), or (None, "", why nobody gives it, whether a live holder could not be asked)."""
        reasons: list[str] = []
        unreached = False
        bad: list[tuple[str, str]] = []
        wanted = block_length(content.size, index)
        for label, copy, holder, attempt in self._attempts(fid, content, index):
            try:
                block = await attempt()
                digests = await self._block_digests(fid, content, holder)
                if len(block) != wanted or (digests is not None and block_digest(block) != digests[index]):
                    raise CorruptError(f"block {index} is not what its digest says")
            except (OSError, CacheXError, trio.TooSlowError) as error:
                reasons.append(f"{label}: {error or type(error).__name__}")
                if copy is not None and isinstance(error, (CorruptError, FileNotFoundError)):
                    bad.append((copy.node, copy.store))
                    if copy.node == self.node.name and isinstance(error, CorruptError):
                        self.node.damaged.add((content.stage, copy.store))
                elif label == "pfs" and isinstance(error, CorruptError):
                    await self.copies.note_bad(fid, content.gen)
                elif copy is not None and holder != self.node.name:
                    unreached = True
                continue
            if bad:
                await self._report(fid, content, bad, reasons)
            if label == "pfs":
                await self.copies.note_found(fid, content.gen)
            return block, label, "", False
        if bad:
            await self._report(fid, content, bad, reasons)
        return None, "", "; ".join(reasons) or "no live node holds it and it is not on the PFS", unreached

    def _attempts(
        self, fid: int, content: Generation, index: int
    ) -> list[tuple[str, Copy | None, str | None, Callable[[], Awaitable[bytes]]]]:
        """(label, copy, read) of every place that may have the block, best first."""
        node, offset, length = self.node, index * BLOCK_BYTES, block_length(content.size, index)
        found: list[tuple[str, Copy | None, str | None, Callable[[], Awaitable[bytes]]]] = []
        inode = node.catalogue.view.inode(fid)
        copies = list(inode.copies) if inode is not None and inode.gen == content.gen else []
        copies.sort(key=lambda c: (c.node != node.name, c.tier != "memory", c.node))
        for copy in copies:
            label = f"{copy.tier}:{copy.node}"
            if copy.node == node.name:
                found.append((label, copy, node.name, partial(self._read_own, content, copy.tier, offset, length)))
            elif node.peers is not None and node.live(copy.node):
                found.append((label, copy, copy.node, partial(self._ask, copy.node, content.stage, offset, length)))
        if inode is not None and inode.pfs is not None and inode.pfs.gen == content.gen and node.pfs is not None:
            found.append(("pfs", None, None, partial(self._read_pfs, fid, content, offset, length)))
        elif (
            inode is not None
            and inode.gen == content.gen
            and node.pfs is not None
            and (op := node.ready_put(fid, inode))
        ):
            path = READY + op.hidden.encode()
            found.append(("pfs:ready", None, None, partial(node.pfs.read, path, offset, length, PFS_DEADLINE_S)))
        if content.stage:
            found += self._unrecorded(content, offset, length, {copy.node for copy in copies})
        return found

    def _unrecorded(
        self, content: Generation, offset: int, length: int, recorded: set[str]
    ) -> list[tuple[str, Copy | None, str | None, Callable[[], Awaitable[bytes]]]]:
        """Places that may have a copy of which this node has not heard: itself, then the origin's next partners.

        In an outage of the catalogue the record of the newest copies may not have arrived.
        """
        node = self.node
        found: list[tuple[str, Copy | None, str | None, Callable[[], Awaitable[bytes]]]] = []
        if node.name not in recorded and node.local_path(content.stage, content.size) is not None:
            found.append((f"nvme:{node.name}", None, node.name, partial(self._read_own, content, "", offset, length)))
        names = [address.name for address in node.options.nodes]
        at = names.index(content.origin) + 1 if content.origin in names else 0
        for name in (names[at:] + names[:at])[: node.replica_count + 1]:
            if node.peers is not None and name not in recorded and name not in (node.name, content.origin):
                found.append((f"nvme:{name}", None, name, partial(self._ask, name, content.stage, offset, length)))
        return found

    async def _read_own(self, content: Generation, tier: str, offset: int, length: int) -> bytes:
        """From this node's copy in memory (or spilled) or on NVMe; ``tier`` "": from any."""
        node, path = self.node, self.node.local_path(content.stage, content.size)
        if tier == "memory" and not node.staged(content.stage, content.size):
            path = None
        if tier == "nvme":
            path = node.held_path(content.stage, content.size)
        if path is None:
            raise FileNotFoundError(errno.ENOENT, "not on this node any more")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if node.in_memory(content.stage) and path == node.staging.path(content.stage):
                return os.pread(fd, length, offset)
            return await trio.to_thread.run_sync(os.pread, fd, length, offset)
        finally:
            os.close(fd)

    async def _ask(self, name: str, stage: str, offset: int, length: int) -> bytes:
        assert self.node.peers is not None
        with trio.fail_after(PEER_DEADLINE_S):
            return await self.node.peers.read(name, stage, offset, length)

    def _expected(self, fid: int, content: Generation) -> tuple[Inode | None, Landed | None]:
        """A file's record, and what the PFS is to have of a content; None where that is not known."""
        inode = self.node.catalogue.view.inode(fid)
        if inode is None or inode.pfs is None or inode.pfs.gen != content.gen:
            return None, None
        return inode, self.copies.expected(fid, inode)

    async def _read_pfs(self, fid: int, content: Generation, offset: int, length: int) -> bytes:
        """Raises ``FileNotFoundError``, and OSError (CHANGED) where the PFS has another file."""
        for again in reversed(range(PFS_LOOKS)):
            asked, expected = self._expected(fid, content)
            try:
                return await self._read_pfs_once(fid, content.gen, offset, length, expected)
            except OSError as error:
                if error.errno != CHANGED or asked is None:
                    raise
                same = await self.copies.found_changed(fid, asked)
                moved = self._expected(fid, content) != (asked, expected)  # what is there is what the record says now
                if not again or not (same or moved):
                    raise
        raise AssertionError

    async def _read_pfs_once(self, fid: int, gen: int, offset: int, length: int, expected: Landed | None) -> bytes:
        missing = FileNotFoundError(errno.ENOENT, "no name on the PFS")
        paths = self.pfs_paths(fid) if self.node.pfs is not None else []
        for path in paths:
            try:
                assert self.node.pfs is not None
                return await self.node.pfs.read(path, offset, length, PFS_DEADLINE_S, expected)
            except FileNotFoundError as error:
                missing = error
        if paths and self.pfs_paths(fid) == paths:  # else it has got another name meanwhile
            with suppress(CacheXError):
                await self.copies.note_gone(fid, paths[0], gen)
        raise missing

    async def _block_digests(self, fid: int, content: Generation, holder: str | None) -> list[bytes] | None:
        """Block digests of a content, checked against the catalogue.

        ``holder`` is whose copy is being read, None for the PFS. The result is None for what has no digests
        (imported files), for this node's memory (not what was spilled), and for the PFS when nobody has a manifest
        any more. A manifest of this node may be of an earlier content in the same stage, which says nothing of others'
        copies; that of the holder tells of its own.
        """
        if not content.tree:
            return None
        if content.size <= BLOCK_BYTES:
            return [content.digest]
        key = (content.stage, content.size)
        if key in self._digests:
            return self._digests[key]
        data = self.node.replicas.manifest(content.stage) if self.node.replicas is not None else None
        found = _digests_in(data, content) if data is not None else None
        if found is None and holder == self.node.name and not self.node.in_memory(content.stage):
            found = await self._own_digests(content)
        elif found is None and holder is None:
            found = await self._any_manifest(fid, content)
        elif found is None and holder != self.node.name and self.node.peers is not None:
            with trio.fail_after(PEER_DEADLINE_S):
                found = _digests_in(await self.node.peers.manifest(str(holder), content.stage), content)
            if found is None:
                raise CorruptError("the holder's manifest does not match the catalogue")
        return self._know(key, found) if found is not None else None

    def _know(self, key: tuple[str, int], digests: list[bytes]) -> list[bytes]:
        self._digests[key] = digests
        while len(self._digests) > DIGESTS_MAX:
            self._digests.popitem(last=False)
        return digests

    async def _own_digests(self, content: Generation) -> list[bytes]:
        """Of what this node has on NVMe and no manifest tells of: by reading all of it, once."""
        path = self.node.local_path(content.stage, content.size)
        if path is None:
            raise FileNotFoundError(errno.ENOENT, "not on this node any more")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _, tree, blocks = await self.node.digests(fd, content.size)
        finally:
            os.close(fd)
        if tree != content.tree:
            raise CorruptError("the file on this node's NVMe is not what its digest says")
        return blocks

    async def _any_manifest(self, fid: int, content: Generation) -> list[bytes] | None:
        """For the PFS's copy: as any live holder's manifest has them."""
        inode = self.node.catalogue.view.inode(fid)
        for name in self.node.holders(inode) if inode is not None and self.node.peers is not None else ():
            try:
                assert self.node.peers is not None
                with trio.fail_after(PEER_DEADLINE_S):
                    found = _digests_in(await self.node.peers.manifest(name, content.stage), content)
            except (CacheXError, OSError, trio.TooSlowError) as error:
                log.debug("no manifest of %s from %s: %s", content.stage, name, error)
                continue
            if found is not None:
                return found
        return None

    async def _report(self, fid: int, content: Generation, bad: list[tuple[str, str]], reasons: list[str]) -> None:
        """A copy is bad or gone: its claim falls now, and replication makes another one."""
        log.warning("copies of %r dropped: %s", self.path(fid), "; ".join(reasons))
        ctx = self.node.ctx()
        why = f"bad or missing copy: {'; '.join(reasons)}"
        await self.node.catalogue.mutate(lambda tx: publication.drop_copies(tx, ctx, fid, content.gen, bad, why))


def _digests_in(manifest: bytes, content: Generation) -> list[bytes] | None:
    """The block digests of an encoded manifest, None when it is of another content. Raises ``CorruptError``."""
    found = list(split_blocks(manifests.decode(manifest).blocks))
    return found if tree_digest(found) == content.tree and len(found) == block_count(content.size) else None


def _match(fd: int, size: int, digests: list[bytes], blocks: range) -> bool:
    """Whether the blocks of a file of ``size`` bytes are what their digests say."""
    return all(
        block_digest(os.pread(fd, block_length(size, index), index * BLOCK_BYTES)) == digests[index] for index in blocks
    )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What failed first; a cancellation goes before all."""
    cancelled = group.subgroup(trio.Cancelled)
    found: BaseException = cancelled or group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
