"""The filesystem's operations, without FUSE: what the front end calls and a test can call without a mount.

Role: what concerns attributes and open files, on top of ``Names``. Each operation brings the view up to date, reads the
catalogue's replica or changes it by one mutation, and returns plain values. Errors are ``FsError``.

Concurrency: operations run interleaved; whatever two of them could do to each other is decided by the catalogue's
transactions or by the locks of ``files``.
"""

from __future__ import annotations

import contextlib
import errno
import os

import trio

from cachexfs.core import attrs, namespace
from cachexfs.core.boundary import Boundary
from cachexfs.core.changes import NewAttrs
from cachexfs.core.digest import Buffer
from cachexfs.core.order import covers
from cachexfs.core.records import Inode, OpKind
from cachexfs.core.routes import PARTNER
from cachexfs.engine.attributes import PREFIX
from cachexfs.engine.drain_left import is_awaited, names_awaited
from cachexfs.engine.drain_reasons import why_pending
from cachexfs.engine.names import Names
from cachexfs.engine.stat import Attr
from cachexfs.engine.vnode import WRITABLE, Handle, Vnode, keep_last, keep_time
from cachexfs.errors import CacheXError, CatalogueUnavailableError, FsError, LateError, NotDurableError, quoted

DIGEST_WAIT_S = 1.0
LARGE_READ_BYTES = 64 << 10  # by whoever reads ahead; less is not worth spare memory


class Filesystem(Names):
    """All operations of a mount."""

    # ---- attributes
    async def getattr(self, ino: int) -> Attr:
        """Attributes of an inode number that the kernel knows."""
        fid = self._fid(ino)
        known = self.files.known(fid)
        if known is None or known.ino != ino or not (known.dirty or known.removed):
            await self._current()
        inode = self.node.catalogue.view.inode(fid)
        if inode is None:
            return self.stat.removed(ino)
        if inode.kind != "f":
            return self.stat.of(fid, inode)
        vnode = self.files.by_ino(ino)
        if vnode is self.files.known(fid):
            current = self.files.vnode(fid)
            vnode = current if current.ino == ino else vnode
        return self.stat.of(fid, inode, vnode)

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
        if size is not None and not await self._truncate(ino, handle, size, None if others else request):
            mtime_ns, others = self.node.clock.now_ns() if mtime_ns is None else mtime_ns, True
        if others:
            vnode = self.files.known(fid)
            if mtime_ns is not None and vnode is not None:
                self.files.passing.refresh(vnode)
                vnode.mtime_ns = mtime_ns
                if vnode.dirty or vnode.passed:
                    keep_time(vnode, mtime_ns)
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
                keep_last(vnode)
        return await self.getattr(ino)

    async def _truncate(self, ino: int, handle: Handle | None, size: int, request: int | None) -> bool:
        """Whether the file had another length."""
        inode = self.node.catalogue.view.inode(self._fid(ino))
        if inode is not None and inode.kind != "f":
            raise FsError(errno.EISDIR if inode.kind == "d" else errno.EINVAL)
        if handle is not None:
            before = handle.vnode.size
            await self.files.writing.truncate(handle.vnode, size)
            handle.wrote = handle.wrote or handle.vnode.dirty
            return size != before
        await self.files.passing.settle(self.files.by_ino(ino))  # else what is published would be cut in place
        vnode = self.files.by_ino(ino)
        before = vnode.size
        try:
            await self._truncate_closed(vnode, size, request)
        except (CacheXError, OSError) as error:
            if vnode.dirty and not vnode.writers:
                self.files.unpublished.add(vnode, error)
            with contextlib.suppress(CacheXError, OSError):
                await self.files.writing.end_change(vnode)
            raise
        return size != before

    async def _truncate_closed(self, vnode: Vnode, size: int, request: int | None) -> None:
        """truncate(2): no close follows it, and a writer may be one whose RELEASE is on its way."""
        publishing, writing = self.files.publishing, self.files.writing
        may_be_refused = self.node.staging.is_spilled(vnode.stage) or size < vnode.sealed
        if vnode.dirty and not vnode.passed and may_be_refused:
            await publishing.publish(vnode)  # so that a truncation that NVMe refuses leaves the file as it was
        clean = not vnode.dirty
        await writing.truncate(vnode, size)
        version = vnode.version
        if vnode.dirty:
            await publishing.publish(vnode, request, (lambda: writing.take_back(vnode, version)) if clean else None)

    # ---- files
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
        attr = self.stat.made(fid, "f", attrs)
        vnode = self.files.by_ino(attr.ino)
        return self.files.open(vnode, flags), attr

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
        if flags & (WRITABLE | os.O_TRUNC):
            await self.files.passing.settle(vnode)
            await self.files.writing.unshare(vnode)
        if inode is not None and vnode is self.files.known(vnode.fid):
            vnode = self.files.vnode(vnode.fid)
        self.files.passing.refresh(vnode)
        handle = self.files.open(vnode, flags)
        if flags & os.O_TRUNC:
            try:
                if vnode.size:
                    await self.files.writing.truncate(vnode, 0)
                    handle.wrote = True
                else:  # empty already: its times move all the same
                    await self.setattr(vnode.ino, handle, mtime_ns=self.node.clock.now_ns())
            except BaseException:
                await self.files.release(handle)
                raise
        return handle

    async def read(self, handle: Handle, offset: int, length: int) -> bytes:
        """Bytes of an open file."""
        if handle.cached and length >= LARGE_READ_BYTES:
            self.node.staging.make_cache_ready(length)
        return await self.files.read(handle.vnode, offset, length)

    async def write(self, handle: Handle, offset: int, data: Buffer) -> int:
        """Write to an open file. The set-id bits fall unless its opener may keep them."""
        done = await self.files.writing.write(handle, offset, data)
        if handle.drops_set_id:
            await self.drop_set_id(handle.vnode.fid)
        if handle.syncs and not handle.cached:  # after cached writes the kernel asks for it
            await self.fsync(handle)
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
            if handle.passed:
                await self.parts.drainer.stay_open.closing(handle.vnode.fid)
        except CatalogueUnavailableError as error:
            raise FsError(errno.EIO, str(error)) from error

    async def release(self, handle: Handle) -> None:
        """The last close. Its errors reach nobody but the log and ``status``."""
        await self.files.release(handle)

    async def fsync(self, handle: Handle) -> None:
        """Wait until the bytes so far have the boundary that the option ``fsync`` names. EIO at the deadline."""
        vnode = handle.vnode
        await self.files.publishing.look(vnode)
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
        raise LateError(
            errno.EIO,
            f"{quoted(self.parts.reader.path(vnode.fid) or b'')} not at {wanted!r} within "
            f"{self.node.options.fsync_timeout_s:.0f} s: "
            f"{reason or self._held_back(vnode) or 'no answer'}",
        )

    def _held_back(self, vnode: Vnode) -> str:
        """Why a published content has not reached the PFS."""
        puts = [key for key, op in self.node.catalogue.view.ops_of(vnode.fid) if op.kind == OpKind.PUT]
        return why_pending(self.parts.drainer, puts[-1]) if puts else ""

    async def _fsync_once(self, vnode: Vnode, wanted: str) -> None:
        if wanted == "pfs":
            await self._pfs_boundary(vnode)
            return
        router = self.parts.replicator.router
        if router.is_direct(vnode) and await router.directly(vnode.fid, vnode, lambda: self._pfs_boundary(vnode)):
            return
        await self.files.publishing.complete_open(vnode)
        if vnode.dirty:
            try:
                with router.measured(vnode, PARTNER):
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
        """Names are in the catalogue's synced log; alone, wait until those that are there now are on the PFS.

        Others may go on rewriting what is there: that is not waited for.
        """
        if self.node.options.fsync != "pfs":
            return
        path = self.parts.reader.path(self._fid(ino))
        if path is None:
            return
        drainer = self.parts.drainer
        wanted = names_awaited(drainer, path)
        with trio.move_on_after(self.node.options.fsync_timeout_s), self.node.foreground.awaited():
            await self._record_names(path)
            while wanted:
                last = next(reversed(wanted))  # they land about in order: not all of them are looked at each time
                while (op := drainer.waits.order.op(last)) is not None and is_awaited(drainer, last, op):
                    await drainer.changed()
                now = names_awaited(drainer, path)
                left_out = {fid for key, fid in wanted.items() if key not in now and not self._has_landed(fid)}
                wanted = {key: fid for key, fid in now.items() if key in wanted or fid in left_out}
            return
        raise LateError(errno.EIO, "fsync: the directory's names did not reach the PFS in time")

    async def _record_names(self, directory: bytes) -> None:
        """What was fsynced and renamed while a writer has it open lands at the close: until then its record counts."""
        ready, reader = self.parts.drainer.ready, self.parts.reader
        for vnode in self.files.being_written():
            path = reader.path(vnode.fid)
            if path is not None and covers(directory, path) and ready.is_named_otherwise(vnode.fid, path):
                await self.parts.drainer.sync(vnode)

    def _has_landed(self, fid: int) -> bool:
        """Whether some content of a file is on the PFS, or it is gone; else a later one lands in its place."""
        inode = self.node.catalogue.view.inode(fid)
        return inode is None or inode.pfs is not None

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
        vnode = self.files.known(fid)
        if vnode is not None and vnode.last is not None and self.node.catalogue.view.inode(fid) is None:
            if value is None and self.node.requests.is_repeated(request) and name not in dict(vnode.last.xattrs):
                return  # it was removed the first time: no catalogue knows this file, nor what was asked of it
            vnode.last = attrs.with_xattr(vnode.last, ctx, name, value)
            keep_last(vnode)
            return
        await self._mutate(lambda tx: attrs.set_xattr(tx, ctx, fid, name, value), request)

    async def await_digest(self, ino: int) -> None:
        """Somebody asks for the digest of a file that may have been closed just now: a moment until it is known."""
        with trio.move_on_after(DIGEST_WAIT_S):
            await self.files.publishing.late_digests.wait(self._fid(ino))

    async def xattrs(self, ino: int) -> dict[bytes, bytes]:
        """All ``user.cachex.*`` attributes of a file or directory."""
        await self._current(ino)
        if self.node.pfs is not None:
            await self.node.pfs.look_again()
        found = await self.parts.attributes.of(self._fid(ino))
        return {PREFIX + name.encode(): value.encode(errors="surrogateescape") for name, value in found.items()}

    def statfs(self) -> tuple[int, int, int]:
        """(block size, blocks, available blocks): what a writer will get from staging."""
        staging = self.node.staging
        free = max(0, staging.limit_bytes - staging.used_bytes) + self.parts.keeper.evictable_bytes()
        spill = self.parts.keeper.spiller.room_bytes()
        size = staging.limit_bytes + staging.spilled_bytes + spill
        return 4096, size // 4096, min(free + spill, size) // 4096
