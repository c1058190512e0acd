"""What every change of the catalogue is made of: its context, names and paths, pending operations.

Role: pure. A change is a function over a transaction (``Tx``): it reads through it, which turns reads into conditions,
raises ``FsError`` as POSIX demands, and writes records and the pending PFS operations that follow. ``namespace`` has
the changes of names, ``claims`` what they do to commit files on the PFS, ``publication`` the changes of contents,
``attrs`` those of attributes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from cachexfs.core.records import (
    ROOT_FID,
    DirTimes,
    Inode,
    Op,
    OpKind,
    dirent_key,
    inode_key,
    life_key,
    op_key,
    times_key,
)
from cachexfs.core.reserved import BESIDE_PREFIX, STATE_DIR, WHY
from cachexfs.core.transaction import Tx
from cachexfs.errors import FsError

NAME_BYTES_MAX = 255
PATH_BYTES_MAX = 4096
NO_GEN = 0  # in ``PfsCopy``: what is there is no content of this file
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
    route: str = "partner"  # or ``direct``, or ``auto``: then ``choose`` says, where nothing is decided yet
    choose: Callable[[], str] = field(default=lambda: "partner")
    keeps: Callable[[int], bool] = field(default=lambda fid: False)  # commit file: the last one on the PFS, for now


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


def check_name(parent: int, name: bytes) -> None:
    """Raises ENAMETOOLONG, EINVAL for a name that cannot be stored, EPERM for one that is ours on the PFS."""
    if len(name) > NAME_BYTES_MAX:
        raise FsError(errno.ENAMETOOLONG)
    if not name or b"/" in name or b"\0" in name or name in (b".", b".."):
        raise FsError(errno.EINVAL)
    if name.startswith(BESIDE_PREFIX) or (parent == ROOT_FID and name == STATE_DIR):
        raise FsError(errno.EPERM, WHY)


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


def join(parent: bytes, name: bytes) -> bytes:
    return parent + b"/" + name if parent else name


def issue(tx: Tx, ctx: Ctx, op: Op) -> None:
    tx.put(op_key(ctx.next_op()), op)


def touch(tx: Tx, ctx: Ctx, fid: int) -> None:
    """Move a directory's mtime, and remember that the PFS's follows when all below has landed."""
    tx.put(times_key(fid), DirTimes(ctx.now_ns, ctx.now_ns))
    issue_dirattr(tx, ctx, fid)


def issue_dirattr(tx: Tx, ctx: Ctx, fid: int) -> None:
    """A directory's attributes go to the PFS (again). Who does that already goes on: two at a time could end with the
    older ones there."""
    key = op_key(f"~{fid:x}")
    now = tx.peek(key)
    owner, begun = (now.owner, now.begun) if isinstance(now, Op) else (ctx.node, False)
    tx.put(key, Op(OpKind.DIRATTR, path_of(tx, fid), owner, fid=fid, begun=begun))


def may_be_on_pfs(tx: Tx, fid: int) -> bool:
    """Whether the PFS may have something under a name of this file, another file's content included."""
    inode = tx.inode(fid)
    return inode is not None and (inode.pfs is not None or tx.has_ops(fid))


def covers_another(inode: Inode) -> bool:
    """Whether all that the PFS may have under a file's name is another one's content, which it has replaced."""
    return inode.kind == "f" and inode.pfs is not None and inode.pfs.gen == NO_GEN


def has_own_place(tx: Tx, fid: int) -> bool:
    """Whether a file itself is on the PFS, or on its way there: only then can something be done to it there."""
    inode = tx.inode(fid)
    if inode is None or inode.kind != "f" or (inode.pfs is not None and not covers_another(inode)):
        return may_be_on_pfs(tx, fid)
    kinds = (OpKind.PUT, OpKind.RENAME, OpKind.LINK)  # the last two are issued for what has a place only
    return any(op.kind in kinds for _, op in tx.latest_ops_of(fid))


def is_clustered(tx: Tx) -> bool:
    job = tx.view.job
    return job is not None and job.replicas > 0


def finish_op(tx: Tx, ctx: Ctx, key: bytes) -> Op | None:
    """Remove a pending operation that landed or need not land. None when another node has done so."""
    op = tx.read(key)
    if not isinstance(op, Op):
        return None
    tx.delete(key)
    return op


def take_op(tx: Tx, node: str, key: bytes, owner: str, *, lives: bool, begun: bool) -> Op | None:
    """Make a pending operation of ``owner`` that of ``node``, or note of one's own that it is begun. None when it is
    gone or somebody else's by now, or ``owner`` is not any more what it was (``lives``)."""
    op = tx.read(key)
    if not isinstance(op, Op) or op.owner != owner:
        return None
    if owner != node and (tx.read(life_key(owner)) is not None) != lives:
        return None
    op = msgspec.structs.replace(op, owner=node, begun=begun)
    tx.put(key, op)
    return op


def errno_name(code: int) -> str:
    """Symbolic name and text of an errno, for messages."""
    return f"{errno.errorcode.get(code, str(code))} ({os.strerror(code)})"
