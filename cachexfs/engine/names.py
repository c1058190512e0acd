"""The operations on names, without FUSE: looking up, making, linking, removing, renaming.

Role: each operation brings the view up to date (``barrier``), imports what it touches for the first time, reads the
catalogue's replica or changes it by one mutation, and returns plain values. Errors are ``FsError``. ``Filesystem`` adds
what concerns open files.

Concurrency: operations run interleaved; whatever two of them could do to each other is decided by the catalogue's
transactions.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

import trio

from cachexfs.core import changes, namespace
from cachexfs.core.boundary import Boundary
from cachexfs.core.changes import NewAttrs
from cachexfs.core.records import FID_STEP, Inode
from cachexfs.core.routes import DIRECT
from cachexfs.core.transaction import Tx
from cachexfs.engine.parts import Parts
from cachexfs.engine.stat import Attr, Stat
from cachexfs.errors import CacheXError, CatalogueUnavailableError, FsError, quoted

log = logging.getLogger(__name__)

STALE_AFTER_S = 5.0
MEMBERS_PATIENCE_S = 10.0
KEEP_PATIENCE_S = 10.0  # a removal does not wait longer for a PFS that has the only copy
PROTECTED_BYTES_MAX = 64 << 20  # a rename waits for the partner's copy of files up to this size


class Names:
    """The operations on names."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.node = parts.node
        self.files = parts.files
        self.stat = Stat(parts.node, parts.files)

    # ---- helpers
    async def _current(self, ino: int | None = None) -> bool:
        """See everything that had returned on any node; returns whether that is certain.

        In an outage of the catalogue reading goes on with what this node has seen: survivors must be able to load.
        Changes fail by themselves, and what is not there then is EIO, not ENOENT.
        """
        fresh = False
        if self.node.catalogue.outage_s < STALE_AFTER_S:
            try:
                with trio.move_on_after(STALE_AFTER_S):
                    await self.node.catalogue.barrier()
                    fresh = True
            except CatalogueUnavailableError as error:
                log.debug("reading without the catalogue: %s", error)
        if ino is not None and fresh:
            await self.parts.importer.ensure(ino // FID_STEP * FID_STEP)
        return fresh

    async def _mutate(self, change: Callable[[Tx], object], request: int | None = None) -> int:
        """Carry out a change once; the id of the file that it makes (0: none)."""

        def work(tx: Tx) -> int:
            made = change(tx)
            return made[0] if isinstance(made, tuple) else 0

        try:
            return await self.node.catalogue.mutate(self.node.requests.once(request, work))
        except CatalogueUnavailableError as error:
            raise FsError(errno.EIO, str(error)) from error

    def _applied(self, request: int | None) -> int | None:
        """What a repeated request had made when it was applied the first time; None: it was not."""
        return self.node.requests.result(self.node.catalogue.view, request)

    def _fid(self, ino: int) -> int:
        return ino // FID_STEP * FID_STEP

    # ---- looking
    async def lookup(self, parent: int, name: bytes, *, withheld: bool = False) -> Attr:
        """The entry ``name`` of a directory. Raises ENOENT (never a cached negative); also for a commit file that needs
        what is lost, unless ``withheld``."""
        fresh = await self._current(parent)
        if len(name) > changes.NAME_BYTES_MAX:
            raise FsError(errno.ENAMETOOLONG)
        if name in (b".", b".."):
            return await self._dot(parent, name)
        entry = self.node.catalogue.view.lookup(parent, name)
        if entry is None and not fresh:
            raise FsError(errno.EIO, f"cannot tell whether {quoted(name)} exists: the catalogue does not answer")
        if entry is None or (not withheld and await self.parts.losses.hides(parent, name)):
            raise FsError(errno.ENOENT)
        return self.stat.entry(entry.fid, entry.kind)

    async def _dot(self, ino: int, name: bytes) -> Attr:
        fid = self._fid(ino)
        if name == b"..":
            names = self.node.catalogue.view.names_of(fid)
            fid = names[0][0] if names else fid
        inode = self.node.catalogue.view.inode(fid)
        if inode is None:
            raise FsError(errno.ENOENT)
        return self.stat.of(fid, inode)

    async def names(self, ino: int) -> list[tuple[bytes, Attr]]:
        """A snapshot of a directory's entries."""
        await self._current(ino)
        found = []
        for name, entry in list(self.node.catalogue.view.children(self._fid(ino)).items()):
            try:
                if not await self.parts.losses.hides(self._fid(ino), name):
                    found.append((name, self.stat.entry(entry.fid, entry.kind)))
            except FsError:
                continue
        return found

    async def readlink(self, ino: int) -> bytes:
        """Target of a symbolic link."""
        inode = self.node.catalogue.view.inode(self._fid(ino))
        if inode is None or inode.kind != "l":
            raise FsError(errno.ENOENT if inode is None else errno.EINVAL)
        return inode.target

    # ---- making
    async def _make(
        self, parent: int, kind: str, attrs: NewAttrs, function: Callable[[Tx, changes.Ctx], tuple[int, Inode]],
        request: int | None,
    ) -> Attr:  # fmt: skip
        """Run a creating change (mkdir, symlink, mknod, link) and return the entry."""
        fid = self._applied(request)
        if fid is None:
            await self._current(parent)
            ctx = self.node.ctx()
            fid = await self._mutate(lambda tx: function(tx, ctx), request)
        return self.stat.made(fid, kind, attrs)

    async def mkdir(self, parent: int, name: bytes, attrs: NewAttrs, request: int | None = None) -> Attr:
        """A new directory."""
        return await self._make(
            parent, "d", attrs, lambda tx, ctx: namespace.mkdir(tx, ctx, parent, name, attrs), request
        )

    async def symlink(
        self, parent: int, name: bytes, target: bytes, attrs: NewAttrs, request: int | None = None
    ) -> Attr:
        """A new symbolic link."""
        return await self._make(
            parent, "l", attrs, lambda tx, ctx: namespace.symlink(tx, ctx, parent, name, target, attrs), request
        )

    async def link(self, ino: int, parent: int, name: bytes, request: int | None = None) -> Attr:
        """A further name of a file."""
        fid = self._fid(ino)
        known = self.node.catalogue.view.inode(fid)
        attrs = NewAttrs(known.mode, known.uid, known.gid) if known is not None else NewAttrs(0o600, 0, 0)
        kind = known.kind if known is not None else "f"
        return await self._make(
            parent, kind, attrs, lambda tx, ctx: (fid, namespace.link(tx, ctx, fid, parent, name)), request
        )

    # ---- removing and renaming
    async def unlink(self, parent: int, name: bytes, request: int | None = None) -> None:
        """Remove a file."""
        if self._applied(request) is not None:
            return
        await self._current(parent)
        await self._know_members(parent, name)
        await self._keep_for_handles(parent, name)
        ctx = self.node.ctx()
        await self._mutate(lambda tx: namespace.unlink(tx, ctx, parent, name), request)

    async def rmdir(self, parent: int, name: bytes, request: int | None = None) -> None:
        """Remove an empty directory (one of the PFS is imported first: it may not be empty)."""
        if self._applied(request) is not None:
            return
        await self._current(parent)
        await self._import_child(parent, name)
        entry = self.node.catalogue.view.lookup(parent, name)
        if entry is not None:
            for left in await self.parts.losses.only_withheld(entry.fid):
                await self.unlink(entry.fid, left)  # nobody sees it, so nobody else can
        ctx = self.node.ctx()
        await self._mutate(lambda tx: namespace.rmdir(tx, ctx, parent, name), request)

    async def _import_child(self, parent: int, name: bytes) -> None:
        entry = self.node.catalogue.view.lookup(parent, name)
        if entry is not None and entry.kind == "d":
            await self.parts.importer.ensure(entry.fid)

    async def rename(
        self, parent: int, name: bytes, parent2: int, name2: bytes, flags: int, request: int | None = None
    ) -> None:
        """Rename. A small closed file is brought to the partner first: the new name is never safer than the bytes."""
        if self._applied(request) is not None:
            return
        await self._current(parent)
        await self.parts.importer.ensure(self._fid(parent2))
        await self._import_child(parent2, name2)
        entry = self.node.catalogue.view.lookup(parent, name)
        if entry is not None and entry.kind == "f":
            await self._protect_before_rename(entry.fid)
            await self._know_members(parent, name)
        await self._know_members(parent2, name2)
        await self._keep_for_handles(parent2, name2)
        ctx = self.node.ctx()
        await self._mutate(lambda tx: namespace.rename(tx, ctx, parent, name, parent2, name2, flags), request)

    async def _keep_for_handles(self, parent: int, name: bytes) -> None:
        """What applications have open goes on without a name, also where only the PFS or another node has its bytes."""
        entry = self.node.catalogue.view.lookup(parent, name)
        vnode = self.files.known(entry.fid) if entry is not None else None
        inode = self.node.catalogue.view.inode(entry.fid) if entry is not None else None
        if vnode is None or inode is None or inode.nlink > 1 or not vnode.handles or not vnode.content.size:
            return
        try:
            with trio.move_on_after(KEEP_PATIENCE_S):
                await self.files.writing.keep(vnode)
        except (CacheXError, OSError) as error:
            log.warning("%r is open, and loses its last name without its bytes: %s", name, error)

    async def _know_members(self, parent: int, name: bytes) -> None:
        """Before a file that the PFS has changes or goes: find out whether a commit file beside it names it.

        Without knowing, the commit file would have to leave the PFS to be safe, whatever the file is.
        """
        view, completeness = self.node.catalogue.view, self.parts.completeness
        entry = view.lookup(parent, name)
        inode = view.inode(entry.fid) if entry is not None else None
        if inode is None or inode.kind != "f" or (inode.pfs is None and not view.has_ops(entry.fid if entry else 0)):
            return
        for commit in view.listers(parent):
            found = view.lookup(parent, commit)
            record = view.inode(found.fid) if found is not None else None
            if found is None or record is None or commit == name:
                continue
            if record.pfs is None and not view.has_ops(found.fid):
                continue  # it neither is on the PFS nor will be before this change
            if completeness.commit_files.members_of(found.fid, record.gen) is None:
                try:
                    with trio.move_on_after(MEMBERS_PATIENCE_S):
                        await completeness.checkpoint(parent)
                except (CacheXError, OSError) as error:
                    log.debug("the members of %r are not known: %s", commit, error)

    async def _protect_before_rename(self, fid: int) -> None:
        inode, vnode = self.node.catalogue.view.inode(fid), self.files.known(fid)
        if self.node.options.fsync == "returned" or not self.node.partners():
            return
        if inode is None or inode.size > PROTECTED_BYTES_MAX or (vnode is not None and vnode.dirty):
            return
        if self.node.boundary(fid, inode) != Boundary.RETURNED:
            return
        try:
            with trio.fail_after(self.node.options.fsync_timeout_s):
                reach, until_ready = self.parts.replicator.router.directly, self.parts.drainer.until_ready
                if inode.route != DIRECT or not await reach(fid, None, lambda: until_ready(fid)):
                    await self.parts.replicator.ensure(fid)
        except (CacheXError, OSError, trio.TooSlowError) as error:
            log.warning("a rename goes ahead of its file's replica: %s", error or type(error).__name__)
