"""The changes of names: create, link, remove, rename.

Role: pure; see ``changes``. The filesystem calls these through ``Catalogue.mutate``.
"""

from __future__ import annotations

import errno
import stat

import msgspec

from cachexfs.core.changes import (
    EMPTY_DIGEST,
    NO_GEN,
    PATH_BYTES_MAX,
    Ctx,
    NewAttrs,
    check_name,
    directory,
    has_own_place,
    is_clustered,
    issue,
    issue_dirattr,
    join,
    may_be_on_pfs,
    path_of,
    touch,
)
from cachexfs.core.claims import keep_last, withdraw_commits
from cachexfs.core.order import lists_members, parent_of
from cachexfs.core.records import (
    ROOT_FID,
    Dirent,
    DirTimes,
    Generation,
    Inode,
    Op,
    OpKind,
    PfsCopy,
    dirent_key,
    dirent_prefix,
    generation_key,
    inode_key,
    op_key,
    times_key,
)
from cachexfs.core.routes import route_for
from cachexfs.core.transaction import Tx
from cachexfs.errors import FsError

LINKS_MAX = 65_000  # as ext4: so that the PFS can have as many


def _enter(tx: Tx, ctx: Ctx, parent: int, name: bytes, kind: str, attrs: NewAttrs) -> tuple[int, Inode]:
    """Common part of all creations: checks, the entry, the parent's times. Raises EEXIST."""
    check_name(parent, name)
    above = directory(tx, parent)
    if tx.dirent(parent, name) is not None:
        raise FsError(errno.EEXIST)
    fid = ctx.new_fid()
    mode, gid = attrs.mode & 0o7777, attrs.gid
    if above.mode & stat.S_ISGID:
        gid = above.gid
        if kind == "d":
            mode |= stat.S_ISGID
    inode = Inode(kind, mode, attrs.uid, gid, ctx.now_ns, ctx.now_ns, ctx.now_ns)
    tx.put(dirent_key(parent, name), Dirent(fid, kind))
    tx.put(inode_key(fid), inode)
    touch(tx, ctx, parent)
    return fid, inode


def create(tx: Tx, ctx: Ctx, parent: int, name: bytes, attrs: NewAttrs) -> tuple[int, Inode]:
    """A new empty file, visible at once; its drain waits for the first FLUSH. Returns (fid, inode)."""
    fid, inode = _enter(tx, ctx, parent, name, "f", attrs)
    inode = msgspec.structs.replace(
        inode, gen=1, origin=ctx.node, t_returned_s=ctx.now_s, t_partner_s=ctx.now_s if is_clustered(tx) else 0.0,
        route=route_for(tx, ctx, parent),
    )  # fmt: skip
    tx.put(inode_key(fid), inode)
    empty = Generation(1, 0, EMPTY_DIGEST, EMPTY_DIGEST, "", ctx.node, open=True)
    tx.put(generation_key(fid), empty)
    return fid, inode


def mkdir(tx: Tx, ctx: Ctx, parent: int, name: bytes, attrs: NewAttrs) -> tuple[int, Inode]:
    """A new directory. Returns (fid, inode)."""
    path = join(path_of(tx, parent), name)
    fid, inode = _enter(tx, ctx, parent, name, "d", attrs)
    tx.put(times_key(fid), DirTimes(ctx.now_ns, ctx.now_ns))
    issue(tx, ctx, Op(OpKind.MKDIR, path, ctx.node, fid=fid))
    issue_dirattr(tx, ctx, fid)
    return fid, inode


def symlink(tx: Tx, ctx: Ctx, parent: int, name: bytes, target: bytes, attrs: NewAttrs) -> tuple[int, Inode]:
    """A new symbolic link: a pointer, so it lands after what is at or below its target. Returns (fid, inode)."""
    if not 0 < len(target) < PATH_BYTES_MAX:
        raise FsError(errno.ENAMETOOLONG if target else errno.ENOENT)
    above = path_of(tx, parent)
    fid, inode = _enter(tx, ctx, parent, name, "l", attrs)
    inode = msgspec.structs.replace(inode, mode=0o777, target=target, size=len(target))
    tx.put(inode_key(fid), inode)
    op = Op(
        OpKind.SYMLINK, join(above, name), ctx.node, fid=fid, path2=target, commit=True, below=above,
        target=resolve(above, target),
    )  # fmt: skip
    issue(tx, ctx, op)
    return fid, inode


def mknod(tx: Tx, ctx: Ctx, parent: int, name: bytes, kind: str, rdev: int, attrs: NewAttrs) -> tuple[int, Inode]:
    """A FIFO, socket or device node (``kind`` p, s, c, b). Returns (fid, inode)."""
    path = join(path_of(tx, parent), name)
    fid, inode = _enter(tx, ctx, parent, name, kind, attrs)
    inode = msgspec.structs.replace(inode, rdev=rdev)
    tx.put(inode_key(fid), inode)
    issue(tx, ctx, Op(OpKind.MKNOD, path, ctx.node, fid=fid))
    return fid, inode


def link(tx: Tx, ctx: Ctx, fid: int, parent: int, name: bytes) -> Inode:
    """A further name of a file. Returns its record. Raises ENOENT, EPERM (a directory), EEXIST, EMLINK."""
    check_name(parent, name)
    directory(tx, parent)
    inode = tx.inode(fid)
    if inode is None or not tx.names_of(fid):
        raise FsError(errno.ENOENT)
    if inode.kind == "d":
        raise FsError(errno.EPERM)
    if tx.dirent(parent, name) is not None:
        raise FsError(errno.EEXIST)
    if inode.nlink >= LINKS_MAX:
        raise FsError(errno.EMLINK)
    old, above = path_of(tx, fid), path_of(tx, parent)
    inode = msgspec.structs.replace(inode, nlink=inode.nlink + 1, ctime_ns=ctx.now_ns)
    present = has_own_place(tx, fid)
    tx.put(dirent_key(parent, name), Dirent(fid, inode.kind))
    tx.put(inode_key(fid), inode)
    touch(tx, ctx, parent)
    if present:
        target = parent_of(old)
        op = Op(
            OpKind.LINK, old, ctx.node, fid=fid, path2=join(above, name), commit=True, below=above,
            target=target if target != above else None,
        )  # fmt: skip
        issue(tx, ctx, op)
    return inode


def resolve(base: bytes, target: bytes) -> bytes | None:
    """Where a relative link in directory ``base`` points, relative to the mount; None when it leads outside."""
    if target.startswith(b"/"):
        return None
    parts: list[bytes] = base.split(b"/") if base else []
    for part in target.split(b"/"):
        if part == b"..":
            if not parts:
                return None
            parts.pop()
        elif part not in (b"", b"."):
            parts.append(part)
    return b"/".join(parts)


def unlink(tx: Tx, ctx: Ctx, parent: int, name: bytes) -> int:
    """Remove a name of something that is not a directory. Returns the file id. Raises ENOENT, EISDIR."""
    directory(tx, parent)
    entry = tx.dirent(parent, name)
    if entry is None:
        raise FsError(errno.ENOENT)
    if entry.kind == "d":
        raise FsError(errno.EISDIR)
    above = path_of(tx, parent)
    claimed = withdraw_commits(tx, ctx, parent, above, name, hold=False)
    if lists_members(name):
        keep_last(tx, ctx, parent, join(above, name), entry.fid)
    tx.delete(dirent_key(parent, name))
    touch(tx, ctx, parent)
    _remove_name(tx, ctx, entry.fid, join(above, name), claimed=claimed)
    return entry.fid


def _remove_name(tx: Tx, ctx: Ctx, fid: int, path: bytes | None, *, claimed: bool) -> None:
    """A name is gone, with the last one the file (``path`` None: the name is another file's now)."""
    inode = tx.inode(fid)
    if inode is None or not tx.names_of(fid):
        _remove_file(tx, ctx, fid, path, claimed=claimed)
        return
    present = may_be_on_pfs(tx, fid)
    tx.put(inode_key(fid), msgspec.structs.replace(inode, nlink=inode.nlink - 1, ctime_ns=ctx.now_ns))
    if path is not None and present:
        issue(tx, ctx, Op(OpKind.UNLINK, path, ctx.node, fid=fid, commit=True, below=parent_of(path)))


def _remove_file(tx: Tx, ctx: Ctx, fid: int, path: bytes | None, *, claimed: bool) -> None:
    """Drop a file whose last name is gone: cancel its drains, remove it from the PFS (path None: it is replaced).

    ``claimed``: a commit file that names it has yet to land. Then its bytes must land before, or the commit file
    would be there without them until its withdrawal: the drain decides (``PendingOrder.claimed_after``).
    """
    inode = tx.inode(fid)
    if inode is None:
        return
    pending = tx.ops_of(fid)
    claimed = claimed or any(
        op.kind in (OpKind.RENAME, OpKind.LINK) for _, op in pending
    )  # perhaps under an earlier name
    for key, op in pending:
        if op.kind == OpKind.PUT and not op.cancelled:
            copies = inode.copies if op.gen == inode.gen else ()
            tx.put(key, msgspec.structs.replace(op, cancelled=not claimed, copies=copies if claimed else ()))
    hidden = inode.pfs.hidden.encode() if inode.pfs is not None else b""
    if path is not None and (inode.pfs is not None or pending):
        op = Op(OpKind.UNLINK, path, ctx.node, fid=fid, path2=hidden, commit=True, below=parent_of(path))
        issue(tx, ctx, op)
    elif hidden:
        issue(tx, ctx, Op(OpKind.UNLINK, b".cachexfs/held/" + hidden, ctx.node, fid=fid))
    tx.delete(inode_key(fid))
    if inode.gen:
        tx.delete(generation_key(fid))


def rmdir(tx: Tx, ctx: Ctx, parent: int, name: bytes) -> int:
    """Remove an empty directory. Returns its file id. Raises ENOENT, ENOTDIR, ENOTEMPTY."""
    directory(tx, parent)
    entry = tx.dirent(parent, name)
    if entry is None:
        raise FsError(errno.ENOENT)
    if entry.kind != "d":
        raise FsError(errno.ENOTDIR)
    above = path_of(tx, parent)
    _require_empty(tx, entry.fid)
    tx.delete(dirent_key(parent, name))
    _remove_directory(tx, entry.fid)
    touch(tx, ctx, parent)
    op = Op(OpKind.RMDIR, join(above, name), ctx.node, fid=entry.fid, commit=True, below=above)
    issue(tx, ctx, op)
    return entry.fid


def _require_empty(tx: Tx, fid: int) -> None:
    if not tx.require_empty(dirent_prefix(fid)):
        raise FsError(errno.ENOTEMPTY)


def _remove_directory(tx: Tx, fid: int) -> None:
    tx.read(inode_key(fid))
    tx.delete(inode_key(fid))
    tx.delete(times_key(fid))
    tx.delete(op_key(f"~{fid:x}"))


RENAME_NOREPLACE = 1


def rename(tx: Tx, ctx: Ctx, parent: int, name: bytes, parent2: int, name2: bytes, flags: int = 0) -> int | None:
    """Rename a name, replacing what POSIX lets it replace. Returns the file id that lost its name, if any.

    ``flags``: RENAME_NOREPLACE; others are refused with EINVAL. Raises ENOENT, EEXIST, EISDIR, ENOTDIR,
    ENOTEMPTY, EINVAL (a directory into itself).
    """
    if flags & ~RENAME_NOREPLACE:
        raise FsError(errno.EINVAL, "only RENAME_NOREPLACE is supported")
    check_name(parent2, name2)
    directory(tx, parent)
    directory(tx, parent2)
    entry = tx.dirent(parent, name)
    if entry is None:
        raise FsError(errno.ENOENT)
    replaced = tx.dirent(parent2, name2)
    if replaced is not None and flags & RENAME_NOREPLACE:
        raise FsError(errno.EEXIST)
    if replaced is not None and replaced.fid == entry.fid:
        return None
    above, above2 = path_of(tx, parent), path_of(tx, parent2)
    old, new = join(above, name), join(above2, name2)
    if entry.kind == "d" and (new + b"/").startswith(old + b"/"):
        raise FsError(errno.EINVAL)
    _check_replaceable(tx, entry, replaced)
    present = entry.kind == "d" or has_own_place(tx, entry.fid)
    covers = None if present or replaced is None else _covered(tx, replaced)
    claimed = False
    if entry.kind != "d":
        withdraw_commits(tx, ctx, parent, above, name, hold=False)
        if replaced is not None:
            claimed = withdraw_commits(tx, ctx, parent2, above2, name2, hold=True)
    if replaced is not None:
        tx.put(dirent_key(parent2, name2), entry)
        if replaced.kind == "d":
            _remove_directory(tx, replaced.fid)
        else:
            _remove_name(tx, ctx, replaced.fid, None, claimed=claimed)
    tx.delete(dirent_key(parent, name))
    tx.put(dirent_key(parent2, name2), entry)
    inode = tx.inode(entry.fid)
    covered = None if present or inode is None else inode.pfs  # under its old name: that goes
    if inode is not None:
        stays = inode.pfs if covered is None or inode.nlink > 1 else None
        tx.put(inode_key(entry.fid), msgspec.structs.replace(inode, ctime_ns=ctx.now_ns, pfs=covers or stays))
    touch(tx, ctx, parent)
    if parent2 != parent:
        touch(tx, ctx, parent2)
    if present:
        op = Op(
            OpKind.RENAME, old, ctx.node, fid=entry.fid, path2=new, commit=True, below=above2,
            target=above if above != above2 else None,
        )  # fmt: skip
        issue(tx, ctx, op)
    elif covered is not None:
        issue(tx, ctx, Op(OpKind.UNLINK, old, ctx.node, fid=entry.fid, commit=True, below=above))
    return replaced.fid if replaced is not None else None


def _check_replaceable(tx: Tx, entry: Dirent, replaced: Dirent | None) -> None:
    if replaced is None:
        return
    if replaced.kind == "d":
        if entry.kind != "d":
            raise FsError(errno.EISDIR)
        _require_empty(tx, replaced.fid)
    elif entry.kind == "d":
        raise FsError(errno.ENOTDIR)


def _covered(tx: Tx, replaced: Dirent) -> PfsCopy | None:
    """What a file that is not on the PFS finds there under its new name: it must go should the name go before."""
    inode = tx.inode(replaced.fid)
    if inode is None or replaced.kind == "d" or not may_be_on_pfs(tx, replaced.fid):
        return None
    if inode.pfs is None:
        return PfsCopy(NO_GEN, 0.0, 0, 0, 0)
    return PfsCopy(NO_GEN, 0.0, inode.pfs.ino, inode.pfs.size, inode.pfs.mtime_ns)


def join_root(tx: Tx, ctx: Ctx, attrs: NewAttrs, imported: bool) -> None:
    """The first node makes the root directory."""
    if tx.inode(ROOT_FID) is None:
        now = ctx.now_ns
        inode = Inode("d", attrs.mode & 0o7777, attrs.uid, attrs.gid, now, now, now, imported=imported)
        tx.put(inode_key(ROOT_FID), inode)
        tx.put(times_key(ROOT_FID), DirTimes(now, now))
