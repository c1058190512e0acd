"""Commit files on the PFS, and when their claim falls there: before what they name changes.

Role: pure; see ``changes``. A member that is *removed* takes the commit file off the PFS first; the last whole
checkpoint there stays until the next one has landed (``lasting``). A member that is
*overwritten* must not take the last whole checkpoint away while the next one is being written: the withdrawal is issued
*held*, all that is later in the directory waits for it (``order``), ready under hidden names, and ``engine/claims``
releases it when the mount has another commit file there and everything before that is ready (``successor``), or when
the commit file turns out to be whole with its new members: then it comes back after them (``restore``).
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

import msgspec

from cachexfs.core.changes import Ctx, issue, issue_dirattr, join, path_of
from cachexfs.core.commitfiles import is_commit_name
from cachexfs.core.order import PendingOrder, lands_at, parent_of, paths_of
from cachexfs.core.records import Op, OpKind, inode_key
from cachexfs.core.replica import Replica
from cachexfs.core.transaction import Tx

_LANDS = (OpKind.PUT, OpKind.RENAME, OpKind.LINK, OpKind.RESTORE)
_NEXT = (OpKind.PUT, OpKind.RENAME, OpKind.LINK, OpKind.UNLINK, OpKind.SYMLINK, OpKind.MKNOD)


def withdraw_commits(
    tx: Tx, ctx: Ctx, parent: int, above: bytes, name: bytes, *, hold: bool, torn: bool = False
) -> bool:
    """Before a member changes or goes: take the commit files that name it off the PFS, and note that they are stale.

    ``hold``: not before the next commit file is ready. ``torn``: what those that have still to land need is not there
    any more, so they must not be seen there at all. They stay in the mount; ``restartable`` there follows from
    generations. A commit file whose members are not known counts as naming everything beside it. Returns whether one of
    them has still to land before it is withdrawn.
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
        path = join(above, commit)
        visible = inode.pfs is not None and not inode.pfs.hidden
        landing, pending = False, b""
        gens = {inode.gen, inode.pfs.gen if inode.pfs is not None else inode.gen}
        for key, op in tx.ops_of(entry.fid):
            if op.kind in _LANDS:
                visible, landing = True, landing or op.kind != OpKind.RESTORE
                gens.add(op.gen or inode.gen)
            elif op.kind == OpKind.WITHDRAW and op.path == path:  # each of its names waits for its own
                visible, pending = False, key
        listed = [ctx.members_of(entry.fid, gen) for gen in gens]
        if not any(members is None or name in members for members in listed):
            continue
        named = not name.startswith(b".") or any(members is not None and name in members for members in listed)
        mixed = inode.mixed or (named and _is_newer(tx, parent, name, entry.fid))  # a copy's hidden name is no member
        if (inode.stale, inode.mixed) != (True, mixed):
            tx.put(inode_key(entry.fid), msgspec.structs.replace(inode, stale=True, mixed=mixed))
        claimed = claimed or landing
        lasting = not hold and not torn and ctx.keeps(entry.fid)
        for key, op in tx.ops_of(entry.fid) if torn else ():
            if op.kind in _LANDS and lands_at(op) == path:
                tx.put(key, msgspec.structs.replace(op, cancelled=True))
        if visible:
            _withdraw(tx, ctx, parent, path, entry.fid, inode.gen, hold=hold, lasting=lasting)
        elif pending and not hold and not lasting:
            release(tx, pending)
    return claimed


def _withdraw(tx: Tx, ctx: Ctx, parent: int, path: bytes, fid: int, gen: int, *, hold: bool, lasting: bool) -> None:
    held = hold or lasting
    issue(tx, ctx, Op(OpKind.WITHDRAW, path, ctx.node, fid=fid, gen=gen, held=held, lasting=lasting))
    issue_dirattr(tx, ctx, parent)


def keep_last(tx: Tx, ctx: Ctx, parent: int, path: bytes, fid: int) -> None:
    """Before a commit file is removed itself: if it is the last one on the PFS it stays there for now."""
    inode = tx.inode(fid)
    if inode is None or inode.pfs is None or inode.pfs.hidden or inode.nlink > 1 or not ctx.keeps(fid):
        return
    if not any(op.kind in (*_LANDS, OpKind.WITHDRAW) for _, op in tx.ops_of(fid)):
        _withdraw(tx, ctx, parent, path, fid, inode.gen, hold=False, lasting=True)


def _is_newer(tx: Tx, parent: int, name: bytes, commit: int) -> bool:
    """Whether what a member's name leads to was published after a commit file (file id), before it changes now."""
    member = tx.view.lookup(parent, name)
    content = tx.view.generation(member.fid) if member is not None else None
    if member is None or content is None or content.open:
        return False  # created just now: its bytes are still to come
    return tx.view.published_at(member.fid) > tx.view.published_at(commit)


def tear(tx: Tx, key: bytes, claimants: Collection[bytes], *, keep_name: bool = False) -> None:
    """The bytes of a file that was removed or written anew are gone, too: its PUT is given up, and commit files that
    claim it are not seen. ``keep_name``: what waits for the name finds an empty file there.
    """
    put = tx.read(key)
    if not isinstance(put, Op):
        return
    if keep_name:
        tx.put(key, msgspec.structs.replace(put, size=0, stage="", tree=b""))
    else:
        tx.delete(key)
    for other in claimants:
        op = tx.read(other)
        if isinstance(op, Op) and op.kind in _LANDS:
            tx.put(other, msgspec.structs.replace(op, cancelled=True))


def release(tx: Tx, key: bytes, *, ready: bool = False, anyway: bool = False) -> bool:
    """Let a held withdrawal land; ``ready``: only as long as its successor is; ``anyway``: whatever comes. False when
    it is not there, or not held."""
    op = tx.read(key)
    if not isinstance(op, Op) or not op.held:
        return False
    tx.put(key, msgspec.structs.replace(op, held=False, ready=ready, lasting=op.lasting and not anyway))
    return True


def hold_again(tx: Tx, key: bytes) -> None:
    """The successor that a withdrawal was released for is removed or replaced, and none is ready; or the last one on
    the PFS was to go, and by now the next one comes."""
    op = tx.read(key)
    if isinstance(op, Op) and (op.ready or op.lasting):
        tx.put(key, msgspec.structs.replace(op, held=True, ready=False))


def take_back(tx: Tx, key: bytes) -> None:
    """A held withdrawal that is not needed does not happen."""
    op = tx.read(key)
    if isinstance(op, Op) and op.held:
        tx.delete(key)


def restore(tx: Tx, ctx: Ctx, fid: int) -> None:
    """A withdrawn commit file comes back after everything earlier in or below its directory, if it is whole then."""
    inode = tx.inode(fid)
    if inode is None or not tx.names_of(fid) or any(op.kind == OpKind.RESTORE for _, op in tx.ops_of(fid)):
        return
    path = path_of(tx, fid)
    op = Op(OpKind.RESTORE, path, ctx.node, fid=fid, gen=inode.gen, commit=True, below=parent_of(path))
    issue(tx, ctx, op)
    issue_dirattr(tx, ctx, tx.names_of(fid)[0][0])


class Successor(Enum):
    """What the mount has instead of a commit file that is to be withdrawn."""

    NONE = "none"  # itself, or not everything before the next one is ready
    REMOVED = "removed"
    REPLACED = "replaced"


def successor(view: Replica, order: PendingOrder, key: bytes) -> Successor:
    """What comes after a held withdrawal, once all files that land before the next commit file are ready.

    A commit file that is not on the PFS anyway counts as replaced.
    """
    op, seq = order.op(key), order.seq(key)
    if op is None:
        return Successor.NONE
    inode = view.inode(op.fid)
    mine = [(order.seq(k), o) for k, o in view.ops_of(op.fid) if order.op(k) is not None]
    absent = inode is not None and (inode.pfs is None or bool(inode.pfs.hidden))
    if absent and not any(s < seq and o.kind in _LANDS for s, o in mine):
        return Successor.REPLACED
    end, kind, lands = None, "", False
    for at, later in order.after(key, parent_of(op.path)):
        if later.kind == OpKind.WITHDRAW and later.path == op.path and lands:
            break  # the one after the next
        if later.kind in _NEXT and op.path in paths_of(later):
            end, kind = at, later.kind if lands_at(later) == op.path else OpKind.UNLINK
            lands = kind != OpKind.UNLINK and view.inode(later.fid) is not None
    gone = inode is None or inode.gen != op.gen or any(s > seq and o.kind == OpKind.RENAME for s, o in mine)
    if not (end is not None or gone) or not all_ready(order, key, end):
        return Successor.NONE
    return Successor.REMOVED if kind == OpKind.UNLINK else Successor.REPLACED


def all_ready(order: PendingOrder, key: bytes, end: tuple[int, bytes] | None = None) -> bool:
    """Whether all files that land after a withdrawal in or below its directory, up to ``end``, are ready."""
    op = order.op(key)
    for seq, later in order.after(key, parent_of(op.path)) if op is not None else ():
        if end is not None and seq > end:
            break
        if later.kind == OpKind.PUT and not later.cancelled and not later.ready:
            return False
    return True
