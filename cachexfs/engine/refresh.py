"""Taking over what somebody has changed on the PFS behind the mount's back, when a user asks for it.

Role: compares the PFS's listings with the catalogue at and below a path. New names and changed contents are taken in;
a name that is missing is named, and only forgotten when the user says so, for "not there" may be a server that is down:
until then its claim falls, and what a node still holds is copied there again.
What has changes pending here is left alone: the drain decides about it.

Concurrency: one directory after another. The catalogue's conditions see to it that nothing is taken in over a change
that came between the listing and its effect; what changed is looked at again at the next refresh.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from cachexfs.core import publication
from cachexfs.core import records as rec
from cachexfs.core.changes import issue
from cachexfs.core.landed import Landed
from cachexfs.core.records import ROOT_FID, Dirent, Generation, Inode, Op, OpKind, PfsCopy
from cachexfs.core.transaction import Tx
from cachexfs.engine.content import Reader
from cachexfs.engine.drain import Drainer
from cachexfs.engine.files import Files
from cachexfs.engine.node import Node
from cachexfs.engine.pfs_import import BATCH_NAMES, Importer, NotThereError, Row, enter
from cachexfs.engine.pfs_interface import PfsStat
from cachexfs.errors import FsError


@dataclass(slots=True)
class Refreshed:
    """Paths relative to the mount."""

    new: list[bytes] = field(default_factory=list)
    changed: list[bytes] = field(default_factory=list)
    missing: list[bytes] = field(default_factory=list)
    forgotten: list[bytes] = field(default_factory=list)
    busy: list[bytes] = field(default_factory=list)  # changes of this mount are pending there, or came between


class Refresher:
    """Looks at the PFS again."""

    def __init__(
        self, node: Node, files: Files, reader: Reader, importer: Importer, drainer: Drainer,
        on_stale: Callable[[int, bytes], None] = lambda parent, name: None,
    ) -> None:  # fmt: skip
        """``on_stale`` is told of (directory, name) that the kernel may remember as it was."""
        self.node, self.files, self.reader = node, files, reader
        self.importer, self.drainer, self.on_stale = importer, drainer, on_stale

    async def refresh(self, fid: int, *, forget: bool = False) -> Refreshed:
        """At and below a file or directory. Raises ``FsError`` EIO when the PFS cannot tell."""
        found = Refreshed()
        inode, names = self.node.catalogue.view.inode(fid), self.node.catalogue.view.names_of(fid)
        if inode is None or (fid != ROOT_FID and not names):
            raise FsError(errno.ENOENT)
        if inode.kind != "d":
            await self._directory(names[0][0], found, forget=forget, only=names[0][1])
            return found
        await self.importer.ensure(fid)
        todo = [fid]
        while todo:
            directory = todo.pop()
            await self._directory(directory, found, forget=forget)
            for entry in self.node.catalogue.view.children(directory).values():
                child = self.node.catalogue.view.inode(entry.fid)
                if child is not None and child.kind == "d" and child.imported:
                    todo.append(entry.fid)
        return found

    def _is_pending(self, path: bytes) -> bool:
        return self.drainer.waits.order.pending_at(path)

    async def _directory(self, fid: int, found: Refreshed, *, forget: bool, only: bytes | None = None) -> None:
        view, path = self.node.catalogue.view, self.reader.path(fid)
        if path is None:
            return
        prefix = path + b"/" if path else b""
        before = view.entry(rec.times_key(fid))
        seen = before.modified if before is not None else 0
        names = [name for name in view.children(fid) if only is None or name == only]
        pending = {name for name in names if self._is_pending(prefix + name)}
        try:
            rows = await self.importer.listing(fid)
        except NotThereError:
            return  # its own directory's listing says whether that is so
        rows = [row for row in rows if only is None or row[0] == only]
        pending |= {name for name, _ in rows if self._is_pending(prefix + name)}
        found.busy += [prefix + name for name in sorted(pending)]
        rows = [row for row in rows if row[0] not in pending]
        for start in range(0, len(rows), BATCH_NAMES):
            await self._take(fid, seen, prefix, rows[start : start + BATCH_NAMES], found)
        listed = pending | {name for name, stat in rows if self._is_kind(fid, name, stat.kind)}
        there = {name for name, _ in rows}
        for name in names:
            if name not in listed and self._is_on_pfs(fid, name):
                await self._missing(fid, name, prefix + name, found, forget=forget)
                if not forget and name not in there:
                    await self._fall(fid, name, prefix + name)

    def _is_kind(self, parent: int, name: bytes, kind: str) -> bool:
        """Whether the PFS has under a known name what the mount has: else that is missing there."""
        entry = self.node.catalogue.view.lookup(parent, name)
        return entry is None or entry.kind == kind

    def _is_on_pfs(self, parent: int, name: bytes) -> bool:
        entry = self.node.catalogue.view.lookup(parent, name)
        inode = self.node.catalogue.view.inode(entry.fid) if entry is not None else None
        if entry is None or inode is None:
            return False
        return inode.kind == "d" or (inode.pfs is not None and not inode.pfs.hidden and not inode.pfs.missing)

    async def _take(self, parent: int, seen: int, prefix: bytes, rows: list[Row], found: Refreshed) -> None:
        fids = {name: self.node.new_fid() for name, _ in rows}

        def take(tx: Tx) -> tuple[list[bytes], list[bytes], bool]:
            new: list[bytes] = []
            changed: list[bytes] = []
            tx.read(rec.times_key(parent))
            now = tx.view.entry(rec.times_key(parent))
            if (now.modified if now is not None else 0) != seen:
                return new, changed, False
            for name, stat in rows:
                entry = tx.dirent(parent, name)
                if entry is None:
                    enter(tx, parent, name, fids[name], stat)
                    new.append(name)
                elif self._take_change(tx, entry, stat):
                    changed.append(name)
            return new, changed, True

        new, changed, done = await self.node.catalogue.mutate(take)
        found.new += [prefix + name for name in new]
        found.changed += [prefix + name for name in changed]
        for name in changed:
            self.on_stale(parent, name)
        if not done:
            found.busy += [prefix + name for name, _ in rows]

    def _take_change(self, tx: Tx, entry: Dirent, stat: PfsStat) -> bool:
        """Whether what a known name leads to has changed, and is taken in."""
        inode, known = tx.inode(entry.fid), self.files.known(entry.fid)
        if inode is None or tx.ops_of(entry.fid) or inode.writing or (known is not None and known.dirty):
            return False
        if stat.kind != inode.kind or inode.kind not in "fl":
            return False
        there = inode.pfs
        if there is None and inode.kind == "f" and not self.node.live_copies(inode):
            there = PfsCopy(inode.gen, 0.0, 0, 0, 0)  # it was missing, and is back
        if there is None or there.hidden or there.gen != inode.gen:
            return False
        if inode.kind == "l":
            same = stat.target == inode.target
        else:
            landed = Landed(there.ino, there.size, there.mtime_ns)
            same = landed.is_same(stat.ino, stat.size, stat.mtime_ns)
        if same:
            return publication.pfs_copy_found(tx, self.node.ctx(), entry.fid, inode.gen, lambda _: True)
        gen, mtime_s, there_s = inode.gen + (inode.kind == "f"), stat.mtime_ns / 1e9, stat.ctime_ns / 1e9
        new = msgspec.structs.replace(
            inode, mode=stat.mode & 0o7777, uid=stat.uid, gid=stat.gid, size=stat.size, gen=gen, origin="", copies=(),
            mtime_ns=stat.mtime_ns, ctime_ns=stat.ctime_ns, target=stat.target, error="", t_returned_s=mtime_s,
            t_partner_s=0.0, t_pfs_s=there_s, pfs=PfsCopy(gen, there_s, stat.ino, stat.size, stat.mtime_ns),
            xattrs=stat.xattrs,
        )  # fmt: skip
        tx.put(rec.inode_key(entry.fid), new)
        if inode.kind == "f":
            tx.put(rec.generation_key(entry.fid), Generation(gen, stat.size, b"", b"", "", ""))
        return True

    # ---- missing
    async def _missing(self, parent: int, name: bytes, path: bytes, found: Refreshed, *, forget: bool) -> None:
        if not forget:
            found.missing.append(path)
        elif await self._forget(parent, name):
            found.forgotten.append(path)
        else:
            found.busy.append(path)

    async def _fall(self, parent: int, name: bytes, path: bytes) -> None:
        """What is missing is not claimed to be there; what a live node holds is copied there again."""
        node, view = self.node, self.node.catalogue.view
        entry = view.lookup(parent, name)
        inode = view.inode(entry.fid) if entry is not None else None
        if entry is None or inode is None or self._is_pending(path):
            return
        fid, ctx, why = entry.fid, node.ctx(), "somebody has removed it from the PFS"
        if entry.kind == "d":
            await node.catalogue.mutate(lambda tx: issue(tx, ctx, Op(OpKind.MKDIR, path, ctx.node, fid=fid)))
            for child in list(view.children(fid)):
                await self._fall(fid, child, path + b"/" + child)
        elif entry.kind == "f":
            holders = node.holders(inode)
            await node.catalogue.mutate(lambda tx: publication.pfs_copy_gone(tx, ctx, fid, inode.gen, holders, why))

    async def _forget(self, parent: int, name: bytes) -> bool:
        """Remove a name, and all below it, from the catalogue only. False when changes of it are pending."""
        view = self.node.catalogue.view
        entry = view.lookup(parent, name)
        if entry is None:
            return False
        whole = True
        for child in list(view.children(entry.fid)) if entry.kind == "d" else ():
            whole = await self._forget(entry.fid, child) and whole

        def forget(tx: Tx) -> bool:
            now, inode = tx.dirent(parent, name), tx.inode(entry.fid)
            pending = [key for key, _ in tx.ops_of(entry.fid) if not key.startswith(b"p/~")]
            if now != entry or inode is None or pending or inode.writing:
                return False
            if entry.kind == "d" and not tx.require_empty(rec.dirent_prefix(entry.fid)):
                return False
            tx.delete(rec.dirent_key(parent, name))
            _drop(tx, entry, inode)
            return True

        forgotten = whole and await self.node.catalogue.mutate(forget)
        if forgotten:
            self.on_stale(parent, name)
        return forgotten


def _drop(tx: Tx, entry: Dirent, inode: Inode) -> None:
    if tx.names_of(entry.fid):
        tx.put(rec.inode_key(entry.fid), msgspec.structs.replace(inode, nlink=inode.nlink - 1))
        return
    tx.delete(rec.inode_key(entry.fid))
    if entry.kind == "d":
        tx.delete(rec.times_key(entry.fid))
        tx.delete(rec.op_key(f"~{entry.fid:x}"))
    elif inode.gen:
        tx.delete(rec.generation_key(entry.fid))
