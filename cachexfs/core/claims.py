"""Commit files on the PFS, and when their claim must fall: before what they name changes there.

Role: pure; see ``changes``. ``namespace`` and ``publication`` ask before they change a file.
"""

from __future__ import annotations

from cachexfs.core.changes import Ctx, issue, join
from cachexfs.core.commitfiles import is_commit_name
from cachexfs.core.records import Op, OpKind
from cachexfs.core.replica import Tx


def withdraw_commits(tx: Tx, ctx: Ctx, parent: int, above: bytes, name: bytes) -> bool:
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
            path = join(above, commit)
            issue(tx, ctx, Op(OpKind.WITHDRAW, path, ctx.node, fid=entry.fid, gen=inode.gen))
    return claimed
