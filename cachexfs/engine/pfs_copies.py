"""The PFS's copies: whether they are still what landed, and what becomes of the claims on those that are not.

Role: nothing tells this mount when somebody removes or replaces a file on the PFS. So who is about to rest on such a
copy asks here: eviction and retention before the last other copy goes, reading when it meets another file. A copy
that is gone is made again from those that are left; one that was replaced is not claimed any more, nor read, so the
content is lost where nobody else has it: ``status --refresh`` takes in what lies there.

Concurrency: any number of callers. A verdict comes only after a barrier, and takes effect only if the record is then
still the one that was asked about.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import trio

from cachexfs.core import publication
from cachexfs.core.landed import Landed
from cachexfs.core.records import Inode
from cachexfs.core.transaction import Tx
from cachexfs.engine.node import Node
from cachexfs.engine.pfs_interface import PfsStat
from cachexfs.errors import CacheXError

log = logging.getLogger(__name__)

DEADLINE_S = 20.0
LOOK_FILES = 64  # of one call
LOOK_AGAIN_S = 10.0  # after the PFS has not answered
AGAIN_S = 60.0  # a file that was found changed is not read through again before
GONE = "somebody has removed it from the PFS"
CHANGED = "somebody has changed it on the PFS: 'cachexfs status --refresh' takes in what is there now"


class PfsCopies:
    """What is known of them."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._looked_s: dict[tuple[int, int], float] = {}  # (file id, generation) found changed -> when

    def expected(self, fid: int, inode: Inode) -> Landed | None:
        """What the PFS is to have of a file; None when that is not known."""
        there = inode.pfs
        if there is None or not there.ino:
            return None
        pending = inode.writing or self.node.catalogue.view.has_ops(fid)
        return Landed(there.ino, there.size, None if pending else there.mtime_ns)

    async def there(self, fids: Sequence[int]) -> set[int] | None:
        """Those of some files whose current content is on the PFS as it landed; None when the PFS does not answer."""
        node, view = self.node, self.node.catalogue.view
        if node.pfs is None or node.pfs.state != "ok":
            return None
        asked = [(fid, path, inode) for fid in fids if (inode := view.inode(fid)) and (path := view.path(fid))]
        asked = [row for row in asked if node.on_pfs(row[0], row[2])]
        try:
            rows = await node.pfs.stats([path for _, path, _ in asked], DEADLINE_S)
        except (OSError, trio.TooSlowError) as error:
            log.debug("whether %d files are on the PFS: %s", len(asked), error or "no answer")
            return None
        found = set()
        for (fid, path, inode), row in zip(asked, rows, strict=True):
            if not isinstance(row, int) and await self._is_there(fid, path, inode, row):
                found.add(fid)
        return found

    async def look_at_all(self) -> None:
        """The catalogue has lost its last changes, which the PFS has seen: what it has of all that is claimed there.

        Returns once it has answered; about a file of which changes are pending, when these have landed.
        """
        node, left = self.node, list[int]()
        for fid, inode in node.catalogue.view.inodes():
            if inode.kind == "f" and node.was_landed(inode):
                left.append(fid)
        while left:
            asked, found = left[:LOOK_FILES], None
            try:
                found = await self.there(asked)
            except CacheXError as error:
                log.debug("what the PFS has is not noted yet: %s", error)
            again = [fid for fid in asked if found is None or node.catalogue.view.ops_of(fid)]
            left = [*left[LOOK_FILES:], *again]
            if again:
                await trio.sleep(LOOK_AGAIN_S)

    async def _is_there(self, fid: int, path: bytes, inode: Inode, found: PfsStat | None) -> bool:
        if found is None:
            await self.note_gone(fid, path, inode.gen)
            return False
        expected = self.expected(fid, inode)
        if expected is None:
            return (found.kind, found.size) == ("f", inode.size)
        if found.kind == "f" and expected.is_same(found.ino, found.size, found.mtime_ns):
            return True
        return await self.found_changed(fid, inode)

    async def note_gone(self, fid: int, path: bytes, gen: int) -> None:
        """The PFS is whole and has no content under its path: the claim falls, and it is copied there again."""
        node, view = self.node, self.node.catalogue.view
        inode = view.inode(fid)
        if inode is None or inode.gen != gen or not node.on_pfs(fid, inode) or view.path(fid) != path:
            return
        ctx, holders = node.ctx(), node.holders(inode)
        log.error("%r is gone from the PFS%s", path, ": it is copied there again" if holders else "")
        await node.catalogue.mutate(lambda tx: publication.pfs_copy_gone(tx, ctx, fid, gen, holders, GONE))

    async def found_changed(self, fid: int, asked: Inode) -> bool:
        """The PFS has another file than ``asked``, a file's record, says. Whether it has its content all the same: with
        bytes of the same digest. What the record says now may be something else: then False, and nothing is noted.

        Raises ``CacheXError`` when the catalogue does not answer.
        """
        node, view = self.node, self.node.catalogue.view
        await node.catalogue.barrier()
        inode, path = view.inode(fid), view.path(fid)
        if inode is None or path is None or asked.pfs is None or (inode.gen, inode.pfs) != (asked.gen, asked.pfs):
            return False
        if inode.writing or view.has_ops(fid) or view.is_moving(fid) or asked.pfs.gen != inode.gen or asked.pfs.hidden:
            return False
        now_s, key = trio.current_time(), (fid, inode.gen)
        if now_s - self._looked_s.get(key, -AGAIN_S) < AGAIN_S:
            return False
        found, before, ctx = await self._same_bytes(fid, path), asked.pfs, node.ctx()
        if isinstance(found, PfsStat):
            there = msgspec.structs.replace(before, ino=found.ino, size=found.size, mtime_ns=found.mtime_ns)

            def note(tx: Tx) -> None:
                publication.note_pfs_copy(tx, fid, before, there)
                publication.pfs_copy_found(tx, ctx, fid, there.gen, lambda copy: copy == there)

            log.warning("somebody has touched %r on the PFS: its bytes are the same", path)
            await node.catalogue.mutate(note)
            return True
        if found is not False:
            return False
        self._looked_s[key] = now_s
        while len(self._looked_s) > 1000:
            del self._looked_s[next(iter(self._looked_s))]
        log.error("%r: %s", path, CHANGED)
        await node.catalogue.mutate(lambda tx: publication.pfs_copy_changed(tx, fid, before, CHANGED))
        return False

    async def _same_bytes(self, fid: int, path: bytes) -> PfsStat | bool | None:
        """Its stat when a file on the PFS has the bytes of the recorded content, else False; None: cannot tell now."""
        content, pfs = self.node.catalogue.view.generation(fid), self.node.pfs
        if content is None or not content.digest or pfs is None:
            return False
        try:
            return await pfs.check(path, content.size, content.digest, DEADLINE_S) or False
        except FileNotFoundError:
            return None
        except (OSError, trio.TooSlowError) as error:
            log.debug("whether %r is unchanged on the PFS: %s", path, error or "no answer")
            return None

    async def note_found(self, fid: int, gen: int) -> None:
        """What the PFS had denied was read there, and is what was there before: it is claimed again."""
        node, inode = self.node, self.node.catalogue.view.inode(fid)
        there = inode.pfs if inode is not None and inode.gen == gen else None
        if inode is None or there is None or not there.missing:
            return
        expected, ctx = self.expected(fid, inode), node.ctx()
        if expected is None or expected.mtime_ns is None:
            return  # which file it was that was read is not known
        try:
            if await node.catalogue.mutate(
                lambda tx: publication.pfs_copy_found(tx, ctx, fid, gen, lambda copy: copy == there)
            ):
                log.warning("%r is on the PFS after all", node.catalogue.view.path(fid))
        except CacheXError as error:
            log.debug("that %x is on the PFS after all could not be recorded: %s", fid, error)

    async def note_bad(self, fid: int, gen: int) -> None:
        """The PFS has the very file that landed, with other bytes: it is copied there again, or lost."""
        node, inode = self.node, self.node.catalogue.view.inode(fid)
        if inode is None or inode.gen != gen:
            return
        ctx, holders, why = node.ctx(), node.holders(inode), "the bytes on the PFS are not what their digest says"
        log.error("%r: %s", self.node.catalogue.view.path(fid), why)
        try:
            await node.catalogue.mutate(lambda tx: publication.pfs_copy_gone(tx, ctx, fid, gen, holders, why))
        except CacheXError as error:
            log.warning("that could not be recorded: %s", error)
