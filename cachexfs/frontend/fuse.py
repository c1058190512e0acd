"""The FUSE front end: pyfuse3's requests, translated.

Role: no policy and no storage. Each handler calls one operation of ``Filesystem`` and translates values and errors.
One decorator stands on every handler: our errors become their errno; anything else is logged with its traceback,
shown as the daemon's failed state and answered with EIO, so that the mount lives.

Concurrency: pyfuse3 starts one trio task per request, at most ``TASKS_MAX``; requests that may wait long (fsync,
flush, rename) leave ``TASKS_RESERVED`` of them for the others.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, TypeVar, cast

import pyfuse3
import trio
import xxhash
from pyfuse3 import EntryAttributes, FileInfo, FUSEError

from cachexfs.core.attrs import without_set_id
from cachexfs.core.changes import NewAttrs
from cachexfs.core.records import ROOT_FID
from cachexfs.engine.attributes import DIGEST, PREFIX
from cachexfs.engine.failed_calls import Asked
from cachexfs.engine.filesystem import Filesystem
from cachexfs.engine.stat import BLKSIZE, Attr
from cachexfs.engine.vnode import Handle
from cachexfs.errors import CacheXError, FsError, LateError
from cachexfs.supervisor.client import Supervisor
from cachexfs.supervisor.payloads import SharedPayloads

log = logging.getLogger(__name__)

TASKS_MAX = 256
TASKS_RESERVED = 64
KIND_BITS = {
    "f": stat.S_IFREG, "d": stat.S_IFDIR, "l": stat.S_IFLNK, "p": stat.S_IFIFO, "s": stat.S_IFSOCK,
    "c": stat.S_IFCHR, "b": stat.S_IFBLK,
}  # fmt: skip

#: What an application gets through no fault of its own: ``status`` tells of it, too.
TOLD = (errno.EIO, errno.ENOSPC)

H = TypeVar("H", bound=Callable[..., Awaitable[Any]])


def handler(function: H) -> H:
    """Errors of a handler become an errno; an unexpected one is EIO and the daemon's failed state."""

    @functools.wraps(function)
    async def guarded(self: Operations, *args: Any, **kwargs: Any) -> Any:
        try:
            found = await function(self, *args, **kwargs)
            if self.filesystem.node.failed_calls:
                self.filesystem.node.failed_calls.worked(self.asked(function.__name__, args))
            return found
        except FUSEError:
            raise
        except CacheXError as error:  # without an errno: the catalogue, a partner or a disk, not this daemon
            code = error.errno if isinstance(error, FsError) else errno.EIO
            if code in TOLD:
                log.warning("%s: %s", function.__name__, error)
                asked = self.asked(function.__name__, args, error)
                self.filesystem.node.failed_calls.failed(asked, f"{function.__name__}: {error}")
            raise FUSEError(code) from None
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None
        except Exception as error:
            log.exception("%s failed", function.__name__)
            self.filesystem.node.failed = f"{function.__name__}: {type(error).__name__}: {error}"
            raise FUSEError(errno.EIO) from None

    return cast(H, guarded)


#: Calls whose first argument is an open file, or an open directory.
ON_HANDLE = ("read", "write", "flush", "fsync", "release")
ON_LISTING = ("readdir", "fsyncdir")
DOTS = (b".", b"..")  # at places 1 and 2


def _place(name: bytes) -> int:
    """Where a name stands in the listings of any daemon, from 3: a reader goes on there after a daemon's death."""
    return (xxhash.xxh3_64_intdigest(name) >> 2) + 3


class Operations(pyfuse3.Operations):  # type: ignore[misc]
    """pyfuse3's operations on a ``Filesystem``."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self, filesystem: Filesystem, payloads: SharedPayloads | None = None, *, timeout_s: float, hide_xattrs: bool
    ) -> None:
        super().__init__()
        self._payloads = payloads
        self.filesystem = filesystem
        self.files = filesystem.files
        self._timeout_s = timeout_s
        self._hide_xattrs = hide_xattrs
        self._handles: dict[int, Handle] = {}
        self._listings: dict[int, tuple[int, list[tuple[int, bytes, Attr]] | None]] = {}
        self._next_handle = 1
        self._supervisor: Supervisor | None = None
        self._waiters = trio.CapacityLimiter(TASKS_MAX - TASKS_RESERVED)

    # ---- a new daemon under a live mount
    def resume(self, supervisor: Supervisor) -> None:
        """Take up the handles that applications hold open, and what the last daemon left unanswered."""
        self._supervisor = supervisor
        self.filesystem.node.requests.resume(supervisor.mount_id, supervisor.replays)
        for old in supervisor.state.handles:
            self._next_handle = max(self._next_handle, old.fh + 1)
            if old.is_dir:
                self._listings[old.fh] = (self._fid(old.node), None)
                self.files.reopen_directory(self._fid(old.node))
            else:
                self._handles[old.fh] = self.files.reopen(old.node, old.flags, passed=old.passthrough, file=old.file)
        for fid, inode in self.filesystem.node.requests.gone(self.filesystem.node.catalogue.view):
            self.files.was_orphaned(fid, inode)

    async def end(self) -> None:
        """The mount has ended: handles are closed, whose RELEASE the kernel may have dropped."""
        for number in list(self._handles):
            try:
                await self.files.release(self._handles.pop(number))
            except (CacheXError, OSError) as error:
                log.error("closing a file at the end of the mount: %s", error)

    @contextmanager
    def _request(self, ctx: pyfuse3.RequestContext) -> Iterator[int | None]:
        """While a changing request is worked on: its id, under which a later daemon may be asked again."""
        request = None if self._supervisor is None else self._supervisor.request_id(ctx.pid)
        self.filesystem.node.foreground.busy()
        with self.filesystem.node.requests.answering(request):
            yield request

    # ---- translation
    @staticmethod
    def _fid(ino: int) -> int:
        return ROOT_FID if ino == pyfuse3.ROOT_INODE else ino

    def asked(self, function: str, args: Sequence[Any], error: CacheXError | None = None) -> Asked:
        """What a call was about. A write that waits for its boundary (O_SYNC) fails as an fsync does."""
        if function in ON_HANDLE:
            handle = self._handles.get(args[0])
            fid = handle.vnode.fid if handle is not None else error.fid if isinstance(error, FsError) else 0
            return "fsync" if isinstance(error, LateError) else function, fid, b""
        if function in ON_LISTING:
            return function, self._listings.get(args[0], (0, None))[0], b""
        return function, self._fid(args[0]), args[1] if len(args) > 1 and isinstance(args[1], bytes) else b""

    def _entry(self, attr: Attr) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = pyfuse3.ROOT_INODE if attr.ino == ROOT_FID else attr.ino
        entry.generation = 0
        entry.entry_timeout = entry.attr_timeout = self._timeout_s
        if attr.kind == "f" and without_set_id(attr.mode) != attr.mode:
            entry.attr_timeout = (
                0  # a write takes them away, and the kernel takes only size and times for changed by it
            )
        entry.st_mode = KIND_BITS[attr.kind] | attr.mode
        entry.st_nlink, entry.st_uid, entry.st_gid, entry.st_rdev = attr.nlink, attr.uid, attr.gid, attr.rdev
        entry.st_size, entry.st_blksize, entry.st_blocks = attr.size, BLKSIZE, attr.blocks
        entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns = attr.atime_ns, attr.mtime_ns, attr.ctime_ns
        return entry

    def _given(self, attr: Attr) -> EntryAttributes:
        """An entry that counts as a reference of the kernel."""
        if attr.kind == "f":
            self.files.remember(self.files.by_ino(attr.ino))
        return self._entry(attr)

    def _register(self, handle: Handle) -> FileInfo:
        number, self._next_handle = self._next_handle, self._next_handle + 1
        self._handles[number] = handle
        if self._supervisor is not None and self._supervisor.passthrough:
            fd = self.files.backing(handle)
            if fd is not None and self._supervisor.offer(number, fd):
                self.files.passing.begin(handle)
                return FileInfo(fh=number)
        keep = self.files.keep_pages(handle)
        return FileInfo(fh=number, direct_io=not handle.cached, keep_cache=keep)

    # ---- names
    @handler
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> EntryAttributes:
        return self._given(await self.filesystem.lookup(self._fid(parent_inode), name))

    @handler
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> EntryAttributes:
        return self._entry(await self.filesystem.getattr(self._fid(inode)))

    def forget_entry(self, parent: int, name: bytes) -> None:
        """Have the kernel ask again for a name of a directory that it may remember."""
        parent = pyfuse3.ROOT_INODE if parent == ROOT_FID else parent
        pyfuse3.invalidate_entry_async(parent, name, ignore_enoent=True)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for ino, count in inode_list:
            self.files.forget(ino, count)

    @handler
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        attrs = NewAttrs(stat.S_IMODE(mode) & ~ctx.umask, ctx.uid, ctx.gid)
        with self._request(ctx) as request:
            handle, attr = await self.filesystem.create(self._fid(parent_inode), name, attrs, flags, request)
            handle.drops_set_id = ctx.uid != 0
            if self._supervisor is not None and self._supervisor.passthrough:
                await self.files.passing.ask_room()
            return self._register(handle), self._given(attr)

    @handler
    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext) -> EntryAttributes:
        attrs = NewAttrs(stat.S_IMODE(mode) & ~ctx.umask, ctx.uid, ctx.gid)
        with self._request(ctx) as request:
            return self._entry(await self.filesystem.mkdir(self._fid(parent_inode), name, attrs, request))

    @handler
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        kind = next((k for k, bits in KIND_BITS.items() if stat.S_IFMT(mode) == bits), "f")
        attrs = NewAttrs(stat.S_IMODE(mode) & ~ctx.umask, ctx.uid, ctx.gid)
        with self._request(ctx) as request:
            made = await self.filesystem.mknod(self._fid(parent_inode), name, kind, rdev, attrs, request)
            return self._given(made)

    @handler
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        attrs = NewAttrs(0o777, ctx.uid, ctx.gid)
        with self._request(ctx) as request:
            return self._entry(await self.filesystem.symlink(self._fid(parent_inode), name, target, attrs, request))

    @handler
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        return await self.filesystem.readlink(self._fid(inode))

    @handler
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        with self._request(ctx) as request:
            return self._given(await self.filesystem.link(inode, self._fid(new_parent_inode), new_name, request))

    @handler
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        with self._request(ctx) as request:
            await self.filesystem.unlink(self._fid(parent_inode), name, request)

    @handler
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        with self._request(ctx) as request:
            await self.filesystem.rmdir(self._fid(parent_inode), name, request)

    @handler
    async def rename(
        self, parent_inode_old: int, name_old: bytes, parent_inode_new: int, name_new: bytes, flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:  # fmt: skip
        with self._request(ctx) as request:
            async with self._waiters:
                old, new = self._fid(parent_inode_old), self._fid(parent_inode_new)
                await self.filesystem.rename(old, name_old, new, name_new, flags, request)

    @handler
    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: pyfuse3.SetattrFields, fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> EntryAttributes:  # fmt: skip
        atime_ns = attr.st_atime_ns if fields.update_atime else None
        mtime_ns = attr.st_mtime_ns if fields.update_mtime else None
        if fields.update_size and fields.update_mtime:
            mtime_ns = None  # O_TRUNC carries "now": the write's own stamp is used
        with self._request(ctx) as request:
            changed = await self.filesystem.setattr(
                self._fid(inode),
                self._handles.get(fh) if fh is not None else None,
                size=attr.st_size if fields.update_size else None,
                mode=stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
                uid=attr.st_uid if fields.update_uid else None,
                gid=attr.st_gid if fields.update_gid else None,
                atime_ns=atime_ns,
                mtime_ns=mtime_ns,
                request=request,
            )
            if fields.update_size and ctx.uid != 0 and without_set_id(changed.mode) != changed.mode:
                await self.filesystem.drop_set_id(self._fid(inode))
                changed = await self.filesystem.getattr(self._fid(inode))
            return self._entry(changed)

    # ---- files
    @handler
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> FileInfo:
        handle = await self.filesystem.open(inode, flags)
        handle.drops_set_id = ctx.uid != 0
        if flags & os.O_TRUNC and handle.drops_set_id:
            await self.filesystem.drop_set_id(handle.vnode.fid)
        return self._register(handle)

    @handler
    async def read(self, fh: int, off: int, size: int) -> bytes:
        return await self.filesystem.read(self._handles[fh], off, size)

    @handler
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        self.filesystem.node.foreground.busy()
        handle, data = self._handles[fh], buf if self._payloads is None else self._payloads.of(buf)
        if not handle.syncs:
            return await self.filesystem.write(handle, off, data)
        async with self._waiters:
            return await self.filesystem.write(handle, off, data)

    @handler
    async def flush(self, fh: int) -> None:
        handle = self._handles.get(fh)
        if handle is None:
            return  # ended in a former life
        async with self._waiters:
            await self.filesystem.flush(handle)

    @handler
    async def fsync(self, fh: int, datasync: bool) -> None:
        async with self._waiters:
            await self.filesystem.fsync(self._handles[fh])

    @handler
    async def release(self, fh: int) -> None:
        handle = self._handles.pop(fh, None)
        if handle is None:
            return
        try:
            await self.filesystem.release(handle)
        except FsError as error:
            error.fid = handle.vnode.fid
            raise

    # ---- directories
    @handler
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        number, self._next_handle = self._next_handle, self._next_handle + 1
        self._listings[number] = (self._fid(inode), None)
        return number

    @handler
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        ino, names = self._listings[fh]
        if names is None or start_id == 0:
            names = sorted((_place(name), name, attr) for name, attr in await self.filesystem.names(ino))
            names[:0] = [(at, dot, await self.filesystem.lookup(ino, dot)) for at, dot in enumerate(DOTS, 1)]
            self._listings[fh] = (ino, names)
        for place, name, attr in names[bisect_right(names, start_id, key=itemgetter(0)) :]:
            if not pyfuse3.readdir_reply(token, name, self._entry(attr), place):
                return
            if attr.kind == "f":
                try:
                    self.files.remember(self.files.by_ino(attr.ino))
                except FsError:
                    continue  # removed since the snapshot: the kernel's reference names nothing

    @handler
    async def releasedir(self, fh: int) -> None:
        self._listings.pop(fh, None)

    @handler
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        async with self._waiters:
            await self.filesystem.fsyncdir(self._listings[fh][0])

    # ---- attributes
    @handler
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if not name.startswith(b"user."):  # the kernel asks for security.capability at every write
            raise FUSEError(errno.ENODATA)
        if (found := self._before_setxattr(ctx)) is not None:
            return found
        ours = name.startswith(PREFIX)
        if name == DIGEST:
            await self.filesystem.await_digest(self._fid(inode))
        attributes = self.filesystem.xattrs if ours else self.filesystem.user_xattrs
        found = (await attributes(self._fid(inode))).get(name)
        if found is None:
            raise FUSEError(errno.ENODATA)
        return found

    def _before_setxattr(self, ctx: pyfuse3.RequestContext) -> bytes | None:
        """What pyfuse3's own look before a setxattr with XATTR_CREATE or _REPLACE finds when that was applied before.

        None: it is an ordinary getxattr, or the first time: look.
        """
        supervisor, node = self._supervisor, self.filesystem.node
        request = None if supervisor is None else supervisor.request_id(ctx.pid)
        if request is None or node.requests.result(node.catalogue.view, request) is None:
            return None
        if supervisor is not None and supervisor.replays.creates_xattr(request):
            raise FUSEError(errno.ENODATA)
        return b""

    @handler
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        if (await self.filesystem.getattr(self._fid(inode) if inode == pyfuse3.ROOT_INODE else inode)).kind not in "fd":
            return []  # the kernel itself answers ENODATA for every ``user.*`` of these
        users = list(await self.filesystem.user_xattrs(self._fid(inode)))
        return users if self._hide_xattrs else users + list(await self.filesystem.xattrs(self._fid(inode)))

    @handler
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        with self._request(ctx) as request:
            await self.filesystem.set_xattr(self._fid(inode), name, bytes(value), request)

    @handler
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        with self._request(ctx) as request:
            await self.filesystem.set_xattr(self._fid(inode), name, None, request)

    @handler
    async def access(self, inode: int, mode: int, ctx: pyfuse3.RequestContext) -> bool:
        return True  # the kernel checks (default_permissions)

    @handler
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        found = pyfuse3.StatvfsData()
        size, blocks, free = self.filesystem.statfs()
        found.f_bsize = found.f_frsize = size
        found.f_blocks, found.f_bfree, found.f_bavail = blocks, free, free
        found.f_files = found.f_ffree = found.f_favail = 1 << 20
        found.f_namemax = 255
        return found

    def stacktrace(self) -> None:
        log.warning("stack trace requested through the mount; ignored")
