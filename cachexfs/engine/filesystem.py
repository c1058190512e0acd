"""The filesystem's operations, without FUSE: what the front end calls and a test can call without a mount.

Role: each operation brings the view up to date (``barrier``), imports what it touches for the first time, reads the
catalogue's replica or changes it by one mutation, and returns plain values. Errors are ``FsError``.

Concurrency: operations run interleaved; whatever two of them could do to each other is decided by the catalogue's
transactions or by the locks of ``files``.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import trio

from cachexfs.core import attrs, changes, namespace
from cachexfs.core.boundary import Boundary
from cachexfs.core.changes import NewAttrs
from cachexfs.core.order import parent_of
from cachexfs.core.records import FID_STEP, Inode, OpKind
from cachexfs.core.replica import Tx
from cachexfs.engine.attributes import PREFIX
from cachexfs.engine.parts import Parts
from cachexfs.engine.vnode import WRITABLE, Handle, Vnode, attrs_of
from cachexfs.errors import CacheXError, CatalogueUnavailableError, FsError, NotDurableError, quoted

log = logging.getLogger(__name__)

BLKSIZE = 128 << 10  # Python's buffer size: with 1 MiB every 4 KiB tail read of a load would read 1 MiB
STALE_AFTER_S = 5.0
MEMBERS_PATIENCE_S = 10.0
COMMIT_BYTES_MAX = 64 << 20  # a rename waits for the partner's copy of files up to this size


@dataclass(frozen=True, slots=True)
class Attr:
    """What stat(2) shows. Times in ns, size in bytes, ``blocks`` of 512 bytes."""

    ino: int
    kind: str
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int


class Filesystem:
    """The operations."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.node = parts.node
        self.files = parts.files
        self._waiting = 0

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

    def _attr(self, fid: int, inode: Inode, vnode: Vnode | None = None) -> Attr:
        view = self.node.catalogue.view
        if vnode is not None:
            self.files.passing.refresh(vnode)
        if inode.kind == "d":
            times = view.dir_times(fid)
            mtime, ctime = (
                (times.mtime_ns, max(times.ctime_ns, inode.ctime_ns)) if times else (inode.mtime_ns, inode.ctime_ns)
            )
            return Attr(
                fid,
                "d",
                inode.mode,
                2 + view.subdirs(fid),
                inode.uid,
                inode.gid,
                0,
                4096,
                8,
                inode.atime_ns,
                mtime,
                ctime,
            )
        size, mtime = attrs_of(inode, vnode)
        if vnode is not None and not vnode.dirty and vnode.content.gen != inode.gen:
            size = vnode.content.size
        ino = vnode.ino if vnode is not None else fid
        blocks = -(-size // 512)
        if vnode is not None and vnode.dirty and vnode.fd >= 0:
            blocks = os.fstat(vnode.fd).st_blocks
        return Attr(
            ino, inode.kind, inode.mode, inode.nlink, inode.uid, inode.gid, inode.rdev, size, blocks,
            inode.atime_ns, mtime, max(inode.ctime_ns, mtime if vnode is not None and vnode.dirty else 0),
        )  # fmt: skip

    def _entry(self, fid: int, kind: str) -> Attr:
        """Attributes of a current name; raises ENOENT."""
        inode = self.node.catalogue.view.inode(fid)
        if inode is None:
            raise FsError(errno.ENOENT)
        vnode = self.files.vnode(fid) if kind == "f" else None
        return self._attr(fid, inode, vnode)

    def _fid(self, ino: int) -> int:
        return ino // FID_STEP * FID_STEP

    # ---- names
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
        return self._entry(entry.fid, entry.kind)

    async def _dot(self, ino: int, name: bytes) -> Attr:
        fid = self._fid(ino)
        if name == b"..":
            names = self.node.catalogue.view.names_of(fid)
            fid = names[0][0] if names else fid
        inode = self.node.catalogue.view.inode(fid)
        if inode is None:
            raise FsError(errno.ENOENT)
        return self._attr(fid, inode)

    async def getattr(self, ino: int) -> Attr:
        """Attributes of an inode number that the kernel knows."""
        fid = self._fid(ino)
        known = self.files.known(fid)
        if known is None or known.ino != ino or not (known.dirty or known.removed):
            await self._current()
        inode = self.node.catalogue.view.inode(fid)
        if inode is None:
            return self._removed_attr(ino)
        if inode.kind != "f":
            return self._attr(fid, inode)
        vnode = self.files.by_ino(ino)
        if vnode is self.files.known(fid):
            current = self.files.vnode(fid)
            vnode = current if current.ino == ino else vnode
        return self._attr(fid, inode, vnode)

    def _removed_attr(self, ino: int) -> Attr:
        """A file that is open and has no name any more."""
        vnode = self.files.by_ino(ino)
        size, last = vnode.size, vnode.last
        blocks = -(-size // 512)
        if last is None:  # its daemon died since
            at_ns = vnode.mtime_ns
            return Attr(ino, "f", 0o600, 0, 0, 0, 0, size, blocks, at_ns, at_ns, at_ns)
        mtime_ns = max(vnode.mtime_ns, last.mtime_ns) if vnode.version else last.mtime_ns
        return Attr(
            ino, "f", last.mode, 0, last.uid, last.gid, 0, size, blocks, last.atime_ns, mtime_ns,
            max(last.ctime_ns, mtime_ns),
        )  # fmt: skip

    async def names(self, ino: int) -> list[tuple[bytes, Attr]]:
        """A snapshot of a directory's entries."""
        await self._current(ino)
        found = []
        for name, entry in list(self.node.catalogue.view.children(self._fid(ino)).items()):
            try:
                if not await self.parts.losses.hides(self._fid(ino), name):
                    found.append((name, self._entry(entry.fid, entry.kind)))
            except FsError:
                continue
        return found

    async def create(
        self, parent: int, name: bytes, attrs: NewAttrs, flags: int, request: int | None = None
    ) -> tuple[Handle, Attr]:
        """Create and open a file; without O_EXCL an existing one is opened."""
        fid = self._applied(request)
        if fid is None:
            await self._current(parent)
            ctx = self.node.ctx()
            try:
                fid = await self._mutate(lambda tx: namespace.create(tx, ctx, parent, name, attrs), request)
            except FsError as error:
                if error.errno != errno.EEXIST or flags & os.O_EXCL:
                    raise
                found = await self.lookup(parent, name, withheld=True)
                if found.kind != "f":
                    raise FsError(errno.EISDIR if found.kind == "d" else errno.EEXIST) from None
                return await self.open(found.ino, flags), found
        attr = self._made(fid, "f", attrs)
        vnode = self.files.by_ino(attr.ino)
        return self.files.open(vnode, flags), attr

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
        return self._made(fid, kind, attrs)

    def _made(self, fid: int, kind: str, attrs: NewAttrs) -> Attr:
        """Attributes of what was made; another node may have removed it already."""
        inode = self.node.catalogue.view.inode(fid)
        if inode is not None:
            return self._entry(fid, inode.kind)
        now_ns = self.node.clock.now_ns()
        inode = Inode(kind, attrs.mode, attrs.uid, attrs.gid, now_ns, now_ns, now_ns)
        if kind == "f":
            vnode = self.files.known(fid) or self.files.without_name(fid)
            vnode.last = vnode.last or inode
            return self._removed_attr(vnode.ino)
        return Attr(fid, kind, attrs.mode, 0, attrs.uid, attrs.gid, 0, 0, 0, now_ns, now_ns, now_ns)

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

    async def mknod(
        self, parent: int, name: bytes, kind: str, rdev: int, attrs: NewAttrs, request: int | None = None
    ) -> Attr:
        """A file without opening it, a FIFO, a socket or a device node."""
        if kind == "f":
            handle, found = await self.create(parent, name, attrs, os.O_WRONLY | os.O_EXCL, request)
            await self.files.publishing.flush(handle)
            await self.files.release(handle)
            return found
        return await self._make(
            parent, kind, attrs, lambda tx, ctx: namespace.mknod(tx, ctx, parent, name, kind, rdev, attrs), request
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

    async def readlink(self, ino: int) -> bytes:
        """Target of a symbolic link."""
        inode = self.node.catalogue.view.inode(self._fid(ino))
        if inode is None or inode.kind != "l":
            raise FsError(errno.ENOENT if inode is None else errno.EINVAL)
        return inode.target

    async def unlink(self, parent: int, name: bytes, request: int | None = None) -> None:
        """Remove a file."""
        if self._applied(request) is not None:
            return
        await self._current(parent)
        await self._know_members(parent, name)
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
        ctx = self.node.ctx()
        await self._mutate(lambda tx: namespace.rename(tx, ctx, parent, name, parent2, name2, flags), request)

    async def _know_members(self, parent: int, name: bytes) -> None:
        """Before a file that the PFS has changes or goes: find out whether a commit file beside it names it.

        Without knowing, the commit file would have to leave the PFS to be safe, whatever the file is.
        """
        view, completeness = self.node.catalogue.view, self.parts.completeness
        entry = view.lookup(parent, name)
        inode = view.inode(entry.fid) if entry is not None else None
        if inode is None or inode.kind != "f" or (inode.pfs is None and not view.ops_of(entry.fid if entry else 0)):
            return
        for commit in view.listers(parent):
            found = view.lookup(parent, commit)
            record = view.inode(found.fid) if found is not None else None
            if found is None or record is None or commit == name:
                continue
            if record.pfs is None and not view.ops_of(found.fid):
                continue  # it neither is on the PFS nor will be before this change
            if completeness.members_of(found.fid, record.gen) is None:
                try:
                    with trio.move_on_after(MEMBERS_PATIENCE_S):
                        await completeness.checkpoint(parent)
                except (CacheXError, OSError) as error:
                    log.debug("the members of %r are not known: %s", commit, error)

    async def _protect_before_rename(self, fid: int) -> None:
        inode, vnode = self.node.catalogue.view.inode(fid), self.files.known(fid)
        if self.node.options.fsync == "returned" or not self.node.partners():
            return
        if inode is None or inode.size > COMMIT_BYTES_MAX or (vnode is not None and vnode.dirty):
            return
        if self.node.boundary(fid, inode) != Boundary.RETURNED:
            return
        try:
            with trio.fail_after(self.node.options.fsync_timeout_s):
                await self.parts.replicator.ensure(fid)
        except (CacheXError, OSError, trio.TooSlowError) as error:
            log.warning("a rename goes ahead of its file's replica: %s", error or type(error).__name__)

    # ---- attributes
    async def setattr(
        self, ino: int, handle: Handle | None, *, size: int | None = None, mode: int | None = None,
        uid: int | None = None, gid: int | None = None, atime_ns: int | None = None, mtime_ns: int | None = None,
        request: int | None = None,
    ) -> Attr:  # fmt: skip
        """chmod, chown, truncate, utimens."""
        if self._applied(request) is not None:
            return await self.getattr(ino)
        fid = self._fid(ino)
        await self._current()
        others = any(value is not None for value in (mode, uid, gid, atime_ns, mtime_ns))
        if size is not None:
            await self._truncate(ino, handle, size, None if others else request)
        if others:
            vnode = self.files.known(fid)
            if mtime_ns is not None and vnode is not None:
                vnode.mtime_ns = mtime_ns
            ctx = self.node.ctx()
            if self.node.catalogue.view.inode(fid) is not None:
                await self._mutate(
                    lambda tx: attrs.set_attrs(
                        tx, ctx, fid, mode=mode, uid=uid, gid=gid, atime_ns=atime_ns, mtime_ns=mtime_ns
                    ),
                    request,
                )
            elif vnode is not None and vnode.last is not None:
                vnode.last = attrs.changed(
                    vnode.last, ctx, mode=mode, uid=uid, gid=gid, atime_ns=atime_ns, mtime_ns=mtime_ns
                )
                self.files.keep_last(vnode)
        return await self.getattr(ino)

    async def _truncate(self, ino: int, handle: Handle | None, size: int, request: int | None) -> None:
        inode = self.node.catalogue.view.inode(self._fid(ino))
        if inode is not None and inode.kind != "f":
            raise FsError(errno.EISDIR if inode.kind == "d" else errno.EINVAL)
        vnode = handle.vnode if handle is not None else self.files.by_ino(ino)
        await self.files.writing.truncate(vnode, size)
        if handle is not None:
            handle.wrote = handle.wrote or vnode.dirty
        elif vnode.dirty and vnode.writers == 0:
            await self.files.publishing.publish(vnode, request)

    # ---- files
    def _to_open(self, ino: int, inode: Inode | None) -> Vnode:
        """The vnode to open. ESTALE for what has no name and no handle: the kernel remembers a name that is gone (it
        was removed on another node, or forgotten by ``status --refresh``). It asks again then, and O_CREAT creates."""
        try:
            vnode = self.files.by_ino(ino)
        except FsError as error:
            raise FsError(errno.ESTALE, str(error)) from error
        if inode is None and not vnode.handles:
            raise FsError(errno.ESTALE, "the file has no name any more")
        return vnode

    async def open(self, ino: int, flags: int) -> Handle:
        """Open a file; O_TRUNC empties it."""
        await self._current()
        inode = self.node.catalogue.view.inode(self._fid(ino))
        if inode is not None and inode.kind == "d":
            raise FsError(errno.EISDIR)
        vnode = self._to_open(ino, inode)
        if flags & WRITABLE:
            await self.files.passing.settle(vnode)
            await self.files.writing.unshare(vnode)
        if inode is not None and vnode is self.files.known(vnode.fid):
            vnode = self.files.vnode(vnode.fid)
        self.files.passing.refresh(vnode)
        handle = self.files.open(vnode, flags)
        if flags & os.O_TRUNC and handle.writable and vnode.size:
            try:
                await self.files.writing.truncate(vnode, 0)
            except BaseException:
                await self.files.release(handle)
                raise
            handle.wrote = True
        return handle

    async def read(self, handle: Handle, offset: int, length: int) -> bytes:
        """Bytes of an open file."""
        return await self.files.read(handle.vnode, offset, length)

    async def write(self, handle: Handle, offset: int, data: bytes) -> int:
        """Write to an open file. The set-id bits fall unless its opener may keep them."""
        done = await self.files.writing.write(handle, offset, data)
        if handle.drops_set_id:
            await self.drop_set_id(handle.vnode.fid)
        return done

    async def drop_set_id(self, fid: int) -> None:
        """Somebody without privilege has changed a file's bytes: its set-id bits fall."""
        inode = self.node.catalogue.view.inode(fid)
        kept = attrs.without_set_id(inode.mode) if inode is not None else 0
        if inode is not None and kept != inode.mode:
            ctx = self.node.ctx()
            await self._mutate(lambda tx: attrs.set_attrs(tx, ctx, fid, mode=kept))

    async def flush(self, handle: Handle) -> None:
        """close(2) waits for this: publication."""
        if handle.passed and handle.drops_set_id:
            self.files.passing.refresh(handle.vnode)
            if handle.vnode.dirty:
                await self.drop_set_id(handle.vnode.fid)
        if handle.wrote or handle.passed:
            for parent, name in self.node.catalogue.view.names_of(handle.vnode.fid)[:1]:
                await self._know_members(parent, name)
        try:
            await self.files.publishing.flush(handle)
        except CatalogueUnavailableError as error:
            raise FsError(errno.EIO, str(error)) from error

    async def release(self, handle: Handle) -> None:
        """The last close. Its errors reach nobody but the log and ``status``."""
        await self.files.release(handle)

    async def fsync(self, handle: Handle) -> None:
        """Wait until the bytes so far have the boundary that the option ``fsync`` names. EIO at the deadline."""
        vnode = handle.vnode
        self.files.passing.refresh(vnode)
        if vnode.removed:
            return
        wanted = self.node.options.fsync
        if wanted == "returned":
            return
        reason = ""
        with trio.move_on_after(self.node.options.fsync_timeout_s):
            while True:
                try:
                    await self._fsync_once(vnode, wanted)
                    return
                except (CacheXError, OSError, trio.TooSlowError) as error:
                    reason = str(error) or "the PFS does not answer"
                await trio.sleep(0.2)
        raise FsError(
            errno.EIO,
            f"fsync: {wanted!r} not reached in {self.node.options.fsync_timeout_s:.0f} s: {reason or 'no answer'}",
        )

    async def _fsync_once(self, vnode: Vnode, wanted: str) -> None:
        if wanted == "pfs":
            await self._pfs_boundary(vnode)
            return
        if vnode.dirty:
            try:
                await self.parts.replicator.sync(vnode)
            except NotDurableError:
                await self._pfs_boundary(vnode)
            return
        while True:
            inode = self.node.catalogue.view.inode(vnode.fid)
            if inode is None or self.node.boundary(vnode.fid, inode) >= Boundary.PARTNER:
                return
            if not self.node.partners():
                await self._pfs_boundary(vnode)
                return
            await self.parts.replicator.ensure(vnode.fid)
            with trio.move_on_after(0.5):
                await self.parts.replicator.changed()

    async def _pfs_boundary(self, vnode: Vnode) -> None:
        if self.node.pfs is None:
            raise NotDurableError("no partner, and the PFS is switched off")
        await self.parts.drainer.sync(vnode)

    async def fsyncdir(self, ino: int) -> None:
        """Names are in the catalogue's synced log; alone, wait until they are on the PFS."""
        if self.node.options.fsync != "pfs":
            return
        path = self.parts.reader.path(self._fid(ino))
        if path is None:
            return
        with trio.move_on_after(self.node.options.fsync_timeout_s):
            drainer = self.parts.drainer  # what is held for the next commit file is safe with its recovery record
            while any(
                parent_of(op.path) == path and op.kind != OpKind.DIRATTR and not drainer.waits.is_held(key)
                for key, op in drainer.own_pending()
            ):
                await drainer.changed()
            return
        raise FsError(errno.EIO, "fsync: the directory's names did not reach the PFS in time")

    # ---- xattrs and statfs
    async def user_xattrs(self, ino: int) -> dict[bytes, bytes]:
        """What users have set on a file or directory."""
        await self._current()
        fid = self._fid(ino)
        inode, vnode = self.node.catalogue.view.inode(fid), self.files.known(fid)
        if inode is None and vnode is not None:
            inode = vnode.last
        return dict(inode.xattrs) if inode is not None else {}

    async def set_xattr(self, ino: int, name: bytes, value: bytes | None, request: int | None = None) -> None:
        """Set a user's attribute, or remove it. Raises ENOTSUP for names that are not ``user.*`` or are ours."""
        if not name.startswith(b"user.") or name.startswith(PREFIX):
            raise FsError(errno.ENOTSUP)
        if self._applied(request) is not None:
            return
        await self._current()
        ctx, fid = self.node.ctx(), self._fid(ino)
        await self._mutate(lambda tx: attrs.set_xattr(tx, ctx, fid, name, value), request)

    async def xattrs(self, ino: int) -> dict[bytes, bytes]:
        """All ``user.cachex.*`` attributes of a file or directory."""
        await self._current(ino)
        found = await self.parts.attributes.of(self._fid(ino))
        return {PREFIX + name.encode(): value.encode(errors="surrogateescape") for name, value in found.items()}

    def statfs(self) -> tuple[int, int, int]:
        """(block size, blocks, available blocks): what a writer will get from staging."""
        staging = self.node.staging
        free = max(0, staging.limit_bytes - staging.used_bytes) + self.parts.keeper.evictable_bytes()
        spill = self.parts.keeper.spiller.room_bytes()
        size = staging.limit_bytes + staging.spilled_bytes + spill
        return 4096, size // 4096, min(free + spill, size) // 4096
