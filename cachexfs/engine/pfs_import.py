"""Taking over what was on the PFS before the mount: each directory once, at its first touch.

Role: after that the catalogue is the truth of the directory, and a miss never asks the PFS. "Not there" on the PFS
never removes a name that is known. An import that meets the deadline fails with EIO: it cannot tell.

Concurrency: one import per directory at a time; callers wait for it.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import replace

import msgspec
import trio

from cachexfs.core import records as rec
from cachexfs.core.records import Dirent, DirTimes, Generation, Inode, PfsCopy
from cachexfs.core.transaction import Tx
from cachexfs.engine.content import Reader
from cachexfs.engine.node import Node
from cachexfs.engine.pfs_interface import PfsStat
from cachexfs.errors import FsError, quoted

log = logging.getLogger(__name__)

IMPORT_DEADLINE_S = 20.0
BATCH_NAMES = 24  # a transaction of an etcd that the site runs has 128 operations at most


Row = tuple[bytes, PfsStat]


class NotThereError(FsError):
    """A directory that the PFS is whole without."""


class Importer:
    """Imports directories of the PFS."""

    def __init__(self, node: Node, reader: Reader) -> None:
        self.node = node
        self.reader = reader
        self._locks: dict[int, trio.Lock] = {}

    async def ensure(self, fid: int) -> None:
        """Bring the directory's entries into the catalogue. Raises ``FsError`` EIO when the PFS cannot tell."""
        inode = self.node.catalogue.view.inode(fid)
        if inode is None or inode.kind != "d" or inode.imported:
            return
        lock = self._locks.setdefault(fid, trio.Lock())
        try:
            async with lock:
                inode = self.node.catalogue.view.inode(fid)
                if inode is not None and not inode.imported:
                    await self._import(fid)
        finally:
            if not lock.locked():
                self._locks.pop(fid, None)

    async def _import(self, fid: int) -> None:
        if self.reader.path(fid) is None:
            raise FsError(errno.ENOENT)
        entries: list[Row] = []
        if self.node.pfs is not None and not self.node.options.offline:
            entries = await self.listing(fid)
        for start in range(0, len(entries), BATCH_NAMES):
            await self._take(fid, entries[start : start + BATCH_NAMES])

        def done(tx: Tx) -> None:
            now = tx.inode(fid)
            if now is not None:
                tx.put(rec.inode_key(fid), msgspec.structs.replace(now, imported=True))

        await self.node.catalogue.mutate(done)

    async def listing(self, fid: int) -> list[Row]:
        """What a directory has on the PFS, under its old name or, when a rename has landed meanwhile, its new one.

        Raises ``NotThereError`` when it is under none of them, ``FsError`` EIO when the PFS cannot tell.
        """
        pfs = self.node.pfs
        if pfs is None or self.node.options.offline:
            raise FsError(errno.EIO, "the PFS is switched off (-o offline)")
        inode, paths = self.node.catalogue.view.inode(fid), self.reader.pfs_paths(fid)
        ino = inode.pfs.ino if inode is not None and inode.pfs is not None else 0
        why: Exception | None = None
        for path in paths:
            try:
                if path == paths[0] or (await pfs.stat(path, IMPORT_DEADLINE_S)).ino == ino:
                    rows = await pfs.listing(path, IMPORT_DEADLINE_S)
                    xattrs = await pfs.xattrs(path, IMPORT_DEADLINE_S)
                    return [(name, replace(row, xattrs=xattrs.get(name, ()))) for name, row in rows]
            except FileNotFoundError as error:
                why = error
            except (OSError, trio.TooSlowError) as error:
                raise FsError(errno.EIO, f"the PFS cannot list {quoted(path)}: {error or 'no answer'}") from error
        shown = quoted(paths[-1]) if paths else "a directory"
        raise NotThereError(errno.EIO, f"{shown} was on the PFS and is not there now: {why or 'it has no name'}")

    async def _take(self, parent: int, entries: list[Row]) -> None:
        fids = [self.node.new_fid() for _ in entries]

        def take(tx: Tx) -> None:
            now = tx.inode(parent)
            if now is None or now.imported:
                return
            for fid, (name, found) in zip(fids, entries, strict=True):
                if tx.dirent(parent, name) is None:
                    enter(tx, parent, name, fid, found)

        await self.node.catalogue.mutate(take)


def enter(tx: Tx, parent: int, name: bytes, fid: int, found: PfsStat) -> None:
    """A name that the PFS has and the catalogue did not know. A file with several names there becomes several files."""
    file = found.kind == "f"
    mtime_s, there_s = found.mtime_ns / 1e9, found.ctime_ns / 1e9  # landing is a rename, which moves the ctime
    gen = 1 if file else 0
    tx.put(rec.dirent_key(parent, name), Dirent(fid, found.kind))
    tx.put(
        rec.inode_key(fid),
        Inode(
            found.kind, found.mode & 0o7777, found.uid, found.gid, found.atime_ns, found.mtime_ns, found.ctime_ns,
            size=found.size if found.kind in "fl" else 0, gen=gen, rdev=found.rdev, target=found.target,
            pfs=PfsCopy(gen, there_s, found.ino, found.size, found.mtime_ns), t_returned_s=mtime_s, t_pfs_s=there_s,
            imported=found.kind != "d", xattrs=found.xattrs,
        ),
    )  # fmt: skip
    if file:
        tx.put(rec.generation_key(fid), Generation(gen, found.size, b"", b"", "", ""))
    elif found.kind == "d":
        tx.put(rec.times_key(fid), DirTimes(found.mtime_ns, found.ctime_ns))
