"""The changes of attributes: mode, owner, times, the user's extended attributes.

Role: pure; see ``changes``.
"""

from __future__ import annotations

import errno
import stat

import msgspec

from cachexfs.core.changes import Ctx, covers_another, has_own_place, issue, issue_dirattr, path_of
from cachexfs.core.records import DirTimes, Inode, Op, OpKind, inode_key, times_key
from cachexfs.core.transaction import Tx
from cachexfs.errors import FsError

XATTR_BYTES_MAX = 64 << 10  # names and values of one file


def without_set_id(mode: int) -> int:
    """A mode after a chown, or a change of bytes without privilege; as on Linux, set-gid stays without execution."""
    return mode & ~(stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0))


def changed(
    inode: Inode, ctx: Ctx, *, mode: int | None = None, uid: int | None = None, gid: int | None = None,
    atime_ns: int | None = None, mtime_ns: int | None = None,
) -> Inode:  # fmt: skip
    """A record after chmod, chown, utimens; what is None stays. A new owner is not lent the old one's rights."""
    if mode is None and inode.kind != "d" and not (uid is None and gid is None):
        mode = without_set_id(inode.mode)
    return msgspec.structs.replace(
        inode,
        mode=inode.mode if mode is None else mode & 0o7777,
        uid=inode.uid if uid is None else uid,
        gid=inode.gid if gid is None else gid,
        atime_ns=inode.atime_ns if atime_ns is None else atime_ns,
        mtime_ns=inode.mtime_ns if mtime_ns is None else mtime_ns,
        dated=inode.dated or mtime_ns is not None,
        ctime_ns=ctx.now_ns,
    )


def set_attrs(
    tx: Tx, ctx: Ctx, fid: int, *, mode: int | None = None, uid: int | None = None, gid: int | None = None,
    atime_ns: int | None = None, mtime_ns: int | None = None,
) -> Inode:  # fmt: skip
    """chmod, chown, utimens; what is None stays. Returns the new record. Raises ENOENT."""
    inode = tx.inode(fid)
    if inode is None:
        raise FsError(errno.ENOENT)
    times = tx.peek(times_key(fid))
    new = changed(inode, ctx, mode=mode, uid=uid, gid=gid, atime_ns=atime_ns, mtime_ns=mtime_ns)
    tx.put(inode_key(fid), new)
    if inode.kind == "d":
        old_mtime = times.mtime_ns if isinstance(times, DirTimes) else inode.mtime_ns
        tx.put(times_key(fid), DirTimes(old_mtime if mtime_ns is None else mtime_ns, ctx.now_ns))
        issue_dirattr(tx, ctx, fid)
        return new
    _issue_attr(tx, ctx, fid, inode)
    return new


def _issue_attr(tx: Tx, ctx: Ctx, fid: int, inode: Inode) -> None:
    """What is on the PFS, or on its way there, gets a file's new attributes."""
    _, newest = next(tx.latest_ops_of(fid), (b"", None))
    if covers_another(inode) and not has_own_place(tx, fid):
        return  # its bytes bring them
    if (inode.pfs is not None or newest is not None) and tx.names_of(fid):
        path = path_of(tx, fid)
        if newest is None or newest.kind != OpKind.ATTR or newest.path != path:
            issue(tx, ctx, Op(OpKind.ATTR, path, ctx.node, fid=fid))


def with_xattr(inode: Inode, ctx: Ctx, name: bytes, value: bytes | None) -> Inode:
    """A record with a user's extended attribute set; None removes it. Raises ENOSPC (``XATTR_BYTES_MAX``), ENODATA."""
    found = dict(inode.xattrs)
    if value is not None:
        found[name] = value
    elif found.pop(name, None) is None:
        raise FsError(errno.ENODATA)
    if sum(len(key) + len(data) for key, data in found.items()) > XATTR_BYTES_MAX:
        raise FsError(errno.ENOSPC, "the extended attributes of one file take more than 64 KiB")
    return msgspec.structs.replace(inode, xattrs=tuple(found.items()), ctime_ns=ctx.now_ns)


def set_xattr(tx: Tx, ctx: Ctx, fid: int, name: bytes, value: bytes | None) -> None:
    """Set or remove a user's extended attribute (``with_xattr``). Raises ENOENT too."""
    inode = tx.inode(fid)
    if inode is None:
        raise FsError(errno.ENOENT)
    tx.put(inode_key(fid), with_xattr(inode, ctx, name, value))
    if inode.kind == "d":
        issue_dirattr(tx, ctx, fid)
    elif inode.kind == "f":
        _issue_attr(tx, ctx, fid, inode)
