"""The changes of the namespace, each a function over a transaction.

Role: pure. The filesystem calls these through ``Catalogue.mutate``; they read through the ``Tx`` (which turns
reads into conditions), raise ``FsError`` as POSIX demands, and write records and the pending PFS operations
that follow from the change. ``Ctx`` brings what is not in the catalogue: who, when, fresh ids.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from cachexfs.core.commitfiles import is_commit_name, is_pointer_name
from cachexfs.core.order import parent_of
from cachexfs.core.records import (
    ROOT_FID,
    Copy,
    Dirent,
    DirTimes,
    Generation,
    Inode,
    Op,
    OpKind,
    PfsCopy,
    Synced,
    dirent_key,
    dirent_prefix,
    generation_key,
    inode_key,
    op_key,
    times_key,
)
from cachexfs.core.replica import Tx
from cachexfs.errors import FsError

NAME_BYTES_MAX = 255
PATH_BYTES_MAX = 4096
NO_GEN = 0  # in ``PfsCopy``: what is there is no content of this file
XATTR_BYTES_MAX = 64 << 10  # names and values of one file
LINKS_MAX = 65_000  # as ext4: so that the PFS can have as many
EMPTY_DIGEST = bytes.fromhex("99aa06d3014798d86001c324468d497f")  # xxh3_128 of no bytes

#: (fid, generation) of a commit file -> relative names of its members, or None when not known (yet).
MembersOf = Callable[[int, int], Collection[bytes] | None]


@dataclass(frozen=True, slots=True)
class Ctx:
    """What a change needs besides the catalogue. Times in ns and s of the reference clock."""

    node: str
    now_ns: int
    now_s: float
    next_op: Callable[[], str]
    new_fid: Callable[[], int]
    members_of: MembersOf = field(default=lambda fid, gen: None)


@dataclass(frozen=True, slots=True)
class NewAttrs:
    """Attributes of something that is created."""

    mode: int
    uid: int
    gid: int


def path_of(tx: Tx, fid: int) -> bytes:
    """Path of a file id relative to the mount, with conditions on every name of it.

    Raises ENOENT when it has no name any more.
    """
    parts: list[bytes] = []
    while fid != ROOT_FID:
        names = tx.names_of(fid)
        if not names or len(parts) > PATH_BYTES_MAX:
            raise FsError(errno.ENOENT)
        parent, name = names[0]
        tx.read(dirent_key(parent, name))
        parts.append(name)
        fid = parent
    return b"/".join(reversed(parts))


def check_name(name: bytes) -> None:
    """Raises ENAMETOOLONG, or EINVAL for a name that cannot be stored."""
    if len(name) > NAME_BYTES_MAX:
        raise FsError(errno.ENAMETOOLONG)
    if not name or b"/" in name or b"\0" in name or name in (b".", b".."):
        raise FsError(errno.EINVAL)


def directory(tx: Tx, fid: int) -> Inode:
    """The directory's record. The transaction requires that it is not removed, not that it is unchanged.

    Raises ENOENT or ENOTDIR.
    """
    tx.require_same(inode_key(fid))
    record = tx.peek(inode_key(fid))
    if not isinstance(record, Inode):
        raise FsError(errno.ENOENT)
    if record.kind != "d":
        raise FsError(errno.ENOTDIR)
    return record


def _join(parent: bytes, name: bytes) -> bytes:
    return parent + b"/" + name if parent else name


def _issue(tx: Tx, ctx: Ctx, op: Op) -> None:
    tx.put(op_key(ctx.next_op()), op)


def touch(tx: Tx, ctx: Ctx, fid: int) -> None:
    """Move a directory's mtime, and remember that the PFS's follows when all below has landed."""
    tx.put(times_key(fid), DirTimes(ctx.now_ns, ctx.now_ns))
    tx.put(op_key(f"~{fid:x}"), Op(OpKind.DIRATTR, path_of(tx, fid), ctx.node, fid=fid))


def _enter(tx: Tx, ctx: Ctx, parent: int, name: bytes, kind: str, attrs: NewAttrs) -> tuple[int, Inode]:
    """Common part of all creations: checks, the entry, the parent's times. Raises EEXIST."""
    check_name(name)
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
        inode, gen=1, origin=ctx.node, t_returned_s=ctx.now_s, t_partner_s=ctx.now_s if _clustered(tx) else 0.0
    )
    tx.put(inode_key(fid), inode)
    empty = Generation(1, 0, EMPTY_DIGEST, EMPTY_DIGEST, "", ctx.node, open=True)
    tx.put(generation_key(fid), empty)
    return fid, inode


def mkdir(tx: Tx, ctx: Ctx, parent: int, name: bytes, attrs: NewAttrs) -> tuple[int, Inode]:
    """A new directory. Returns (fid, inode)."""
    path = _join(path_of(tx, parent), name)
    fid, inode = _enter(tx, ctx, parent, name, "d", attrs)
    tx.put(times_key(fid), DirTimes(ctx.now_ns, ctx.now_ns))
    _issue(tx, ctx, Op(OpKind.MKDIR, path, ctx.node, fid=fid))
    tx.put(op_key(f"~{fid:x}"), Op(OpKind.DIRATTR, path, ctx.node, fid=fid))
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
        OpKind.SYMLINK, _join(above, name), ctx.node, fid=fid, path2=target, commit=True, below=above,
        target=resolve(above, target),
    )  # fmt: skip
    _issue(tx, ctx, op)
    return fid, inode


def mknod(tx: Tx, ctx: Ctx, parent: int, name: bytes, kind: str, rdev: int, attrs: NewAttrs) -> tuple[int, Inode]:
    """A FIFO, socket or device node (``kind`` p, s, c, b). Returns (fid, inode)."""
    path = _join(path_of(tx, parent), name)
    fid, inode = _enter(tx, ctx, parent, name, kind, attrs)
    inode = msgspec.structs.replace(inode, rdev=rdev)
    tx.put(inode_key(fid), inode)
    _issue(tx, ctx, Op(OpKind.MKNOD, path, ctx.node, fid=fid))
    return fid, inode


def link(tx: Tx, ctx: Ctx, fid: int, parent: int, name: bytes) -> Inode:
    """A further name of a file. Returns its record. Raises ENOENT, EPERM (a directory), EEXIST, EMLINK."""
    check_name(name)
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
    present = _may_be_on_pfs(tx, fid)
    tx.put(dirent_key(parent, name), Dirent(fid, inode.kind))
    tx.put(inode_key(fid), inode)
    touch(tx, ctx, parent)
    if present:
        target = parent_of(old)
        op = Op(
            OpKind.LINK, old, ctx.node, fid=fid, path2=_join(above, name), commit=True, below=above,
            target=target if target != above else None,
        )  # fmt: skip
        _issue(tx, ctx, op)
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
    claimed = _withdraw_commits(tx, ctx, parent, above, name)
    tx.delete(dirent_key(parent, name))
    touch(tx, ctx, parent)
    _remove_name(tx, ctx, entry.fid, _join(above, name), claimed=claimed)
    return entry.fid


def _remove_name(tx: Tx, ctx: Ctx, fid: int, path: bytes | None, *, claimed: bool) -> None:
    """A name is gone, with the last one the file (``path`` None: the name is another file's now)."""
    inode = tx.inode(fid)
    if inode is None or not tx.names_of(fid):
        _remove_file(tx, ctx, fid, path, claimed=claimed)
        return
    present = _may_be_on_pfs(tx, fid)
    tx.put(inode_key(fid), msgspec.structs.replace(inode, nlink=inode.nlink - 1, ctime_ns=ctx.now_ns))
    if path is not None and present:
        _issue(tx, ctx, Op(OpKind.UNLINK, path, ctx.node, fid=fid, commit=True, below=parent_of(path)))


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
        if op.kind == OpKind.PUT and not op.cancelled and not claimed:
            tx.put(key, msgspec.structs.replace(op, cancelled=True))
    hidden = inode.pfs.hidden.encode() if inode.pfs is not None else b""
    if path is not None and (inode.pfs is not None or pending):
        op = Op(OpKind.UNLINK, path, ctx.node, fid=fid, path2=hidden, commit=True, below=parent_of(path))
        _issue(tx, ctx, op)
    elif hidden:
        _issue(tx, ctx, Op(OpKind.UNLINK, b".cachexfs/held/" + hidden, ctx.node, fid=fid))
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
    op = Op(OpKind.RMDIR, _join(above, name), ctx.node, fid=entry.fid, commit=True, below=above)
    _issue(tx, ctx, op)
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
    check_name(name2)
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
    old, new = _join(above, name), _join(above2, name2)
    if entry.kind == "d" and (new + b"/").startswith(old + b"/"):
        raise FsError(errno.EINVAL)
    _check_replaceable(tx, entry, replaced)
    present = entry.kind == "d" or _may_be_on_pfs(tx, entry.fid)
    covers = None if present or replaced is None else _covered(tx, replaced)
    claimed = False
    if entry.kind != "d":
        _withdraw_commits(tx, ctx, parent, above, name)
        if replaced is not None:
            claimed = _withdraw_commits(tx, ctx, parent2, above2, name2)
    if replaced is not None:
        tx.put(dirent_key(parent2, name2), entry)
        if replaced.kind == "d":
            _remove_directory(tx, replaced.fid)
        else:
            _remove_name(tx, ctx, replaced.fid, None, claimed=claimed)
    tx.delete(dirent_key(parent, name))
    tx.put(dirent_key(parent2, name2), entry)
    inode = tx.inode(entry.fid)
    if inode is not None:
        tx.put(inode_key(entry.fid), msgspec.structs.replace(inode, ctime_ns=ctx.now_ns, pfs=inode.pfs or covers))
    touch(tx, ctx, parent)
    if parent2 != parent:
        touch(tx, ctx, parent2)
    if present:
        op = Op(
            OpKind.RENAME, old, ctx.node, fid=entry.fid, path2=new, commit=True, below=above2,
            target=above if above != above2 else None,
        )  # fmt: skip
        _issue(tx, ctx, op)
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
    if inode is None or replaced.kind == "d" or not _may_be_on_pfs(tx, replaced.fid):
        return None
    if inode.pfs is None:
        return PfsCopy(NO_GEN, 0.0, 0, 0, 0)
    return PfsCopy(NO_GEN, 0.0, inode.pfs.ino, inode.pfs.size, inode.pfs.mtime_ns)


def _may_be_on_pfs(tx: Tx, fid: int) -> bool:
    inode = tx.inode(fid)
    return inode is not None and (inode.pfs is not None or bool(tx.ops_of(fid)))


def _withdraw_commits(tx: Tx, ctx: Ctx, parent: int, above: bytes, name: bytes) -> bool:
    """Before a member changes or goes: take the commit files that name it off the PFS.

    They stay in the mount; ``restartable`` there follows from generations. A commit file whose members are not
    known counts as naming everything beside it. Returns whether one of them has still to land before it is withdrawn.
    """
    claimed = False
    if is_commit_name(name):
        return claimed
    for commit in tx.listers(parent):
        entry = tx.dirent(parent, commit)
        if entry is None or entry.kind != "f":
            continue
        inode = tx.inode(entry.fid)
        if inode is None:
            continue
        visible = inode.pfs is not None and not inode.pfs.hidden
        landing = False
        gens = {inode.gen, inode.pfs.gen if inode.pfs is not None else inode.gen}
        for _, op in tx.ops_of(entry.fid):
            if op.kind in (OpKind.PUT, OpKind.RENAME, OpKind.LINK):
                visible = landing = True
                gens.add(op.gen or inode.gen)
            elif op.kind == OpKind.WITHDRAW:
                visible = False
        listed = [ctx.members_of(entry.fid, gen) for gen in gens]
        if not any(members is None or name in members for members in listed):
            continue
        claimed = claimed or landing
        if visible:
            path = _join(above, commit)
            _issue(tx, ctx, Op(OpKind.WITHDRAW, path, ctx.node, fid=entry.fid, gen=inode.gen))
    return claimed


def without_set_id(mode: int) -> int:
    """A mode after somebody without privilege has changed the bytes; as on Linux, set-gid stays without execution."""
    return mode & ~(stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0))


def changed(
    inode: Inode, ctx: Ctx, *, mode: int | None = None, uid: int | None = None, gid: int | None = None,
    atime_ns: int | None = None, mtime_ns: int | None = None,
) -> Inode:  # fmt: skip
    """A record after chmod, chown, utimens; what is None stays."""
    return msgspec.structs.replace(
        inode,
        mode=inode.mode if mode is None else mode & 0o7777,
        uid=inode.uid if uid is None else uid,
        gid=inode.gid if gid is None else gid,
        atime_ns=inode.atime_ns if atime_ns is None else atime_ns,
        mtime_ns=inode.mtime_ns if mtime_ns is None else mtime_ns,
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
        tx.put(op_key(f"~{fid:x}"), Op(OpKind.DIRATTR, path_of(tx, fid), ctx.node, fid=fid))
        return new
    pending = tx.ops_of(fid)
    if (inode.pfs is not None or pending) and tx.names_of(fid):
        path = path_of(tx, fid)
        if not pending or pending[-1][1].kind != OpKind.ATTR or pending[-1][1].path != path:
            _issue(tx, ctx, Op(OpKind.ATTR, path, ctx.node, fid=fid))
    return new


def set_xattr(tx: Tx, ctx: Ctx, fid: int, name: bytes, value: bytes | None) -> None:
    """Set a user's extended attribute; None removes it. Raises ENOENT, ENOSPC (``XATTR_BYTES_MAX``), ENODATA."""
    inode = tx.inode(fid)
    if inode is None:
        raise FsError(errno.ENOENT)
    found = dict(inode.xattrs)
    if value is not None:
        found[name] = value
    elif found.pop(name, None) is None:
        raise FsError(errno.ENODATA)
    if sum(len(key) + len(data) for key, data in found.items()) > XATTR_BYTES_MAX:
        raise FsError(errno.ENOSPC, "the extended attributes of one file take more than 64 KiB")
    tx.put(inode_key(fid), msgspec.structs.replace(inode, xattrs=tuple(found.items()), ctime_ns=ctx.now_ns))


def begin_change(tx: Tx, ctx: Ctx, fid: int) -> None:
    """Note that published content is being changed here: what names it stops being restartable.

    Called before the change; the publication of the change takes the note away.
    """
    inode = tx.inode(fid)
    if inode is not None and inode.writing != ctx.node:
        tx.put(inode_key(fid), msgspec.structs.replace(inode, writing=ctx.node))


@dataclass(frozen=True, slots=True)
class Content:
    """What a publication says of the bytes. ``target`` is where a tracker's content points, relative to the
    mount; ``copies`` are those that are whole at this moment."""

    size: int
    digest: bytes
    tree: bytes
    stage: str
    copies: tuple[Copy, ...]
    mtime_ns: int
    target: bytes | None = None


def publish(tx: Tx, ctx: Ctx, fid: int, base_gen: int, content: Content) -> Generation | None:
    """Make a new generation visible and issue its drain. None when the file was removed meanwhile.

    The last publication wins; one whose base is not the current generation is marked as a conflict.
    """
    inode = tx.inode(fid)
    before = tx.generation(fid)
    names = tx.names_of(fid)
    if inode is None or before is None or not names:
        return None
    path = path_of(tx, fid)
    conflict = before.origin if before.gen != base_gen else ""
    gen = before.gen + 1
    new = msgspec.structs.replace(
        inode,
        size=content.size,
        gen=gen,
        origin=ctx.node,
        copies=content.copies,
        writing="" if inode.writing in ("", ctx.node) else inode.writing,
        synced=None,
        mtime_ns=content.mtime_ns,
        ctime_ns=ctx.now_ns,
        t_returned_s=ctx.now_s,
        t_partner_s=ctx.now_s if _at_partner(tx, content) else 0.0,
        t_pfs_s=0.0,
        error="",
    )
    tx.put(inode_key(fid), new)
    generation = Generation(gen, content.size, content.digest, content.tree, content.stage, ctx.node, conflict=conflict)
    tx.put(generation_key(fid), generation)
    if inode.pfs is not None or tx.ops_of(fid):
        for parent, name in names:
            _withdraw_commits(tx, ctx, parent, path_of(tx, parent), name)
    _issue_put(tx, ctx, fid, path, gen, content)
    return generation


def _issue_put(tx: Tx, ctx: Ctx, fid: int, path: bytes, gen: int, content: Content) -> None:
    name = path.rpartition(b"/")[2]
    commit = is_commit_name(name)
    op = Op(
        OpKind.PUT, path, ctx.node, fid=fid, gen=gen, commit=commit, below=parent_of(path) if commit else b"",
        target=content.target if is_pointer_name(name) else None, size=content.size, stage=content.stage,
    )  # fmt: skip
    _issue(tx, ctx, op)
    for parent, other in tx.names_of(fid)[1:]:  # what lands is a new file there: its further names follow
        above = path_of(tx, parent)
        commit = is_commit_name(other)
        op = Op(
            OpKind.LINK, path, ctx.node, fid=fid, path2=_join(above, other), commit=commit,
            below=above if commit else b"",
        )  # fmt: skip
        _issue(tx, ctx, op)


def complete(tx: Tx, fid: int, content: Generation, digest: bytes, tree: bytes) -> None:
    """Digests of a generation that was published before they were known."""
    now = tx.generation(fid)
    if now is not None and now.gen == content.gen and now.stage == content.stage and not now.tree:
        tx.put(generation_key(fid), msgspec.structs.replace(now, digest=digest, tree=tree))


def close_created(tx: Tx, ctx: Ctx, fid: int) -> None:
    """The first FLUSH of a created file that nobody wrote to: the empty generation is worth draining now."""
    before = tx.generation(fid)
    if before is None or not before.open or not tx.names_of(fid):
        return
    tx.put(generation_key(fid), msgspec.structs.replace(before, open=False))
    content = Content(0, EMPTY_DIGEST, EMPTY_DIGEST, "", (), 0)
    _issue_put(tx, ctx, fid, path_of(tx, fid), before.gen, content)


def _clustered(tx: Tx) -> bool:
    job = tx.view.job
    return job is not None and job.replicas > 0


def _at_partner(tx: Tx, content: Content) -> bool:
    job = tx.view.job
    replicas = job.replicas if job is not None else 0
    return replicas > 0 and (content.size == 0 or len({copy.node for copy in content.copies}) > replicas)


def add_copy(tx: Tx, ctx: Ctx, fid: int, gen: int, copy: Copy) -> None:
    """A partner has acknowledged a whole, synced copy of a generation."""
    inode = tx.inode(fid)
    if inode is None or inode.gen != gen:
        return
    copies = (*(c for c in inode.copies if (c.node, c.tier) != (copy.node, copy.tier)), copy)
    job = tx.view.job
    replicas = job.replicas if job is not None else 0
    enough = len({c.node for c in copies if tx.view.is_live(c.node)}) > replicas >= 1
    before = len({c.node for c in inode.copies if tx.view.is_live(c.node)}) > replicas
    tx.put(
        inode_key(fid),
        msgspec.structs.replace(
            inode,
            copies=copies,
            error="",
            t_partner_s=inode.t_partner_s if before and inode.t_partner_s else ctx.now_s if enough else 0.0,
        ),
    )


def note_synced(
    tx: Tx,
    ctx: Ctx,
    fid: int,
    base_gen: int,
    stage: str,
    size: int,
    digest: bytes,
    tree: bytes,
    copies: tuple[Copy, ...],
) -> None:
    """An fsync has made unpublished bytes safe: what is published should this node be lost.

    Nothing to note when they have been published meanwhile, on top of ``base_gen``.
    """
    inode = tx.inode(fid)
    if inode is not None and inode.gen == base_gen:
        synced = Synced(stage, size, digest, tree, copies)
        tx.put(inode_key(fid), msgspec.structs.replace(inode, synced=synced, writing=ctx.node))


def drop_copies(tx: Tx, ctx: Ctx, fid: int, gen: int, gone: Collection[tuple[str, str]], error: str) -> None:
    """Copies (node, store) turned out to be gone or bad: the boundary falls with its evidence, and says why."""
    inode = tx.inode(fid)
    if inode is None or inode.gen != gen:
        return
    copies = tuple(c for c in inode.copies if (c.node, c.store) not in gone)
    if len(copies) != len(inode.copies):
        tx.put(inode_key(fid), msgspec.structs.replace(inode, copies=copies, t_partner_s=0.0, error=error))


def forget_copies(tx: Tx, fid: int, gone: Collection[tuple[str, str]]) -> None:
    """Copies (node, store) were evicted because the content is on the PFS: no boundary falls."""
    inode = tx.inode(fid)
    if inode is not None:
        copies = tuple(c for c in inode.copies if (c.node, c.store) not in gone)
        tx.put(inode_key(fid), msgspec.structs.replace(inode, copies=copies))


def note_error(tx: Tx, ctx: Ctx, fid: int, error: str) -> None:
    """Show the last error of replication or drain on a file; empty clears it."""
    inode = tx.inode(fid)
    if inode is not None and inode.error != error:
        tx.put(inode_key(fid), msgspec.structs.replace(inode, error=error))


def finish_op(tx: Tx, ctx: Ctx, key: bytes) -> Op | None:
    """Remove a pending operation that landed or need not land. None when another node has done so."""
    op = tx.read(key)
    if not isinstance(op, Op):
        return None
    tx.delete(key)
    return op


def join_root(tx: Tx, ctx: Ctx, attrs: NewAttrs, imported: bool) -> None:
    """The first node makes the root directory."""
    if tx.inode(ROOT_FID) is None:
        now = ctx.now_ns
        inode = Inode("d", attrs.mode & 0o7777, attrs.uid, attrs.gid, now, now, now, imported=imported)
        tx.put(inode_key(ROOT_FID), inode)
        tx.put(times_key(ROOT_FID), DirTimes(now, now))


def errno_name(code: int) -> str:
    """Symbolic name and text of an errno, for messages."""
    return f"{errno.errorcode.get(code, str(code))} ({os.strerror(code)})"
