"""The changes of contents: a new generation, its copies, and what was made safe before it is published.

Role: pure; see ``changes``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import msgspec

from cachexfs.core.changes import EMPTY_DIGEST, Ctx, issue, issue_dirattr, join, path_of
from cachexfs.core.claims import withdraw_commits
from cachexfs.core.commitfiles import is_commit_name, is_pointer_name
from cachexfs.core.order import parent_of
from cachexfs.core.records import Copy, Generation, Op, OpKind, PfsCopy, Synced, generation_key, inode_key
from cachexfs.core.routes import DIRECT, LATE, PARTNER, give_up_direct, route_for
from cachexfs.core.transaction import Tx

FIRST_REVISION = 1  # earlier than any publication that is known


def begin_change(tx: Tx, ctx: Ctx, fid: int) -> str:
    """Note that published content is being changed here: what names it stops being restartable.

    Called before the change; the publication of the change takes the note away. Returns the route of what begins.
    """
    inode = tx.inode(fid)
    if inode is not None and inode.writing != ctx.node:
        tx.put(inode_key(fid), msgspec.structs.replace(inode, writing=ctx.node))
    names = tx.names_of(fid)
    return route_for(tx, ctx, names[0][0]) if names else PARTNER


def end_change(tx: Tx, ctx: Ctx, fid: int) -> None:
    """Take the note back: nothing was changed after all."""
    inode = tx.inode(fid)
    if inode is not None and inode.writing == ctx.node:
        tx.put(inode_key(fid), msgspec.structs.replace(inode, writing=""))


@dataclass(frozen=True, slots=True)
class Content:
    """What a publication says of the bytes. ``target`` is where a tracker's content points, relative to the
    mount; ``copies`` are those that are whole at this moment. ``torn``: it may lie over an earlier content in the same
    staged file. ``route``: the way that was chosen for them when they began. ``stamp_ns``, ``taken``: see
    ``Generation``."""

    size: int
    digest: bytes
    tree: bytes
    stage: str
    copies: tuple[Copy, ...]
    mtime_ns: int
    target: bytes | None = None
    torn: bool = False
    route: str = PARTNER
    stamp_ns: int = 0
    taken: str = ""


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
    conflict = before.origin if before.gen != base_gen and before.taken != ctx.node else ""
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
        route=content.route,
        stale=False,
        mixed=False,
        dated=inode.dated and content.mtime_ns == inode.mtime_ns,
    )
    tx.put(inode_key(fid), new)
    generation = Generation(
        gen, content.size, content.digest, content.tree, content.stage, ctx.node,
        conflict=conflict, stamp_ns=content.stamp_ns, taken=content.taken,
    )  # fmt: skip
    tx.put(generation_key(fid), generation)
    torn = content.torn and any(
        o.kind == OpKind.PUT and o.stage == content.stage and not o.ready for _, o in tx.latest_ops_of(fid)
    )
    if inode.pfs is not None or tx.has_ops(fid):
        for parent, name in names:
            withdraw_commits(tx, ctx, parent, path_of(tx, parent), name, hold=not torn, torn=torn)
    _issue_put(tx, ctx, fid, path, gen, content)
    return generation


def _issue_put(tx: Tx, ctx: Ctx, fid: int, path: bytes, gen: int, content: Content, *, withheld: bool = False) -> None:
    name = path.rpartition(b"/")[2]
    commit = is_commit_name(name)
    op = Op(
        OpKind.PUT, path, ctx.node, fid=fid, gen=gen, commit=commit, below=parent_of(path) if commit else b"",
        target=content.target if is_pointer_name(name) else None, size=content.size, stage=content.stage,
        tree=content.tree, cancelled=withheld,
    )  # fmt: skip
    issue(tx, ctx, op)
    (first, _), *others = tx.names_of(fid)
    issue_dirattr(tx, ctx, first)  # what lands moves a directory's mtime on the PFS, not on the mount
    for parent, other in others:  # what lands is a new file there: its further names follow
        above = path_of(tx, parent)
        issue_dirattr(tx, ctx, parent)
        commit = is_commit_name(other)
        op = Op(
            OpKind.LINK, path, ctx.node, fid=fid, path2=join(above, other), commit=commit,
            below=above if commit else b"",
        )  # fmt: skip
        issue(tx, ctx, op)


def complete(tx: Tx, fid: int, content: Generation, digest: bytes, tree: bytes) -> None:
    """Digests of a generation that was published before they were known."""
    now = tx.generation(fid)
    if now is not None and now.gen == content.gen and now.stage == content.stage and not now.tree:
        told = msgspec.structs.replace(now, digest=digest, tree=tree, published=tx.view.published_at(fid))
        tx.put(generation_key(fid), told)
        put = next(((key, op) for key, op in tx.latest_ops_of(fid) if op.kind == OpKind.PUT), None)
        if put is not None and put[1].gen == now.gen:
            tx.put(put[0], msgspec.structs.replace(put[1], tree=tree))


def doubt(tx: Tx, fid: int, *, late: bool) -> None:
    """When a commit file was published is not known any more: what is published beside it later is no part of it.

    ``late``: something beside it has changed since it was first published, so that nothing there is known to be of it.
    """
    inode, content = tx.inode(fid), tx.generation(fid)
    if inode is None or content is None:
        return
    tx.put(inode_key(fid), msgspec.structs.replace(inode, stale=True, mixed=inode.mixed or late))
    if late:
        tx.put(generation_key(fid), msgspec.structs.replace(content, published=FIRST_REVISION))


def close_created(tx: Tx, ctx: Ctx, fid: int) -> None:
    """The first FLUSH of a created file that nobody wrote to: the empty generation is worth draining now."""
    before = tx.generation(fid)
    if before is None or not before.open or not tx.names_of(fid):
        return
    tx.put(generation_key(fid), msgspec.structs.replace(before, open=False))
    content = Content(0, EMPTY_DIGEST, EMPTY_DIGEST, "", (), 0)
    _issue_put(tx, ctx, fid, path_of(tx, fid), before.gen, content)


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
) -> bool:
    """An fsync has made unpublished bytes safe: what is published should this node be lost.

    Nothing to note when they have been published meanwhile, on top of ``base_gen``. False: others have published what
    an earlier fsync had made safe, and these bytes lie in its place.
    """
    inode = tx.inode(fid)
    if inode is not None and inode.gen == base_gen:
        synced = Synced(stage, size, digest, tree, copies)
        tx.put(inode_key(fid), msgspec.structs.replace(inode, synced=synced, writing=ctx.node))
    generation = tx.generation(fid)
    return generation is None or generation.gen == base_gen or (generation.stage, generation.taken) != (stage, ctx.node)


def fall_back(tx: Tx, ctx: Ctx, fid: int, gen: int) -> None:
    """The PFS has kept a content waiting that goes there directly: it goes to the partner after all."""
    inode = tx.inode(fid)
    if inode is None:
        return
    there = inode.pfs is not None and inode.pfs.gen == gen and gen > 0
    if inode.gen == gen and inode.route == DIRECT and not there:
        tx.put(inode_key(fid), msgspec.structs.replace(inode, route=LATE))
    give_up_direct(tx, ctx, fid)


def drop_copies(tx: Tx, ctx: Ctx, fid: int, gen: int, gone: Collection[tuple[str, str]], error: str) -> None:
    """Copies (node, store) turned out to be gone or bad: the boundary falls with its evidence, and says why."""
    inode = tx.inode(fid)
    if inode is None or inode.gen != gen:
        return
    copies = tuple(c for c in inode.copies if (c.node, c.store) not in gone)
    if len(copies) != len(inode.copies):
        tx.put(inode_key(fid), msgspec.structs.replace(inode, copies=copies, t_partner_s=0.0, error=error))


def forget_copies(tx: Tx, fid: int, gen: int, gone: Collection[tuple[str, str]]) -> None:
    """Copies (node, store) of a generation were evicted because it is on the PFS: no boundary falls.

    Those of a later one, in the same stores, are not meant.
    """
    inode = tx.inode(fid)
    if inode is not None and inode.gen == gen:
        copies = tuple(c for c in inode.copies if (c.node, c.store) not in gone)
        tx.put(inode_key(fid), msgspec.structs.replace(inode, copies=copies, retired=inode.gen))


def pfs_copy_gone(tx: Tx, ctx: Ctx, fid: int, gen: int, holders: Sequence[str], error: str) -> None:
    """The PFS has lost a content that had landed: the claim falls, and one of ``holders`` (live nodes with a copy)
    copies it again. If there are none, where it was stays known: servers and their clients' caches have said so of what
    was there. Nothing happens while a change of the file is pending."""
    inode, content = tx.inode(fid), tx.generation(fid)
    there = inode.pfs if inode is not None else None
    if inode is None or content is None or there is None or there.hidden or tx.has_ops(fid):
        return
    if (inode.gen, there.gen) != (gen, gen) or inode.writing or not tx.names_of(fid):
        return
    again = bool(holders) or not content.size
    pfs = None if again else msgspec.structs.replace(there, missing=True)
    tx.put(inode_key(fid), msgspec.structs.replace(inode, pfs=pfs, t_pfs_s=0.0, error=error))
    if again:
        owner = ctx.node if ctx.node in holders or not holders else holders[0]
        same = Content(content.size, content.digest, content.tree, content.stage, inode.copies, inode.mtime_ns)
        _issue_put(tx, replace(ctx, node=owner), fid, path_of(tx, fid), gen, same)


def put_again(tx: Tx, ctx: Ctx, fid: int, path: bytes, *, withheld: bool) -> None:
    """A file's content is to land (again), whatever the catalogue has said of it. ``withheld``: not to be seen there
    before it is whole."""
    inode, content = tx.inode(fid), tx.generation(fid)
    if inode is None or content is None or not tx.names_of(fid):
        return
    tx.put(inode_key(fid), msgspec.structs.replace(inode, pfs=None, t_pfs_s=0.0))
    same = Content(content.size, content.digest, content.tree, content.stage, inode.copies, inode.mtime_ns)
    _issue_put(tx, ctx, fid, path, content.gen, same, withheld=withheld)


def pfs_copy_found(tx: Tx, ctx: Ctx, fid: int, gen: int, same: Callable[[PfsCopy], bool]) -> bool:
    """A content that was missing on the PFS is there all the same (``same``: what is there is what was): it is claimed
    again. False when it was not missing, or is another one."""
    inode = tx.inode(fid)
    there = inode.pfs if inode is not None else None
    if inode is None or there is None or not there.missing or (inode.gen, there.gen) != (gen, gen) or not same(there):
        return False
    pfs = msgspec.structs.replace(there, missing=False)
    tx.put(inode_key(fid), msgspec.structs.replace(inode, pfs=pfs, t_pfs_s=ctx.now_s, error=""))
    return True


def pfs_copy_changed(tx: Tx, fid: int, before: PfsCopy, error: str) -> None:
    """The PFS has another file where a content had landed (``before``): that counts as missing there, and is lost where
    nobody else has it. It is not copied there again: that file is somebody's."""
    inode = tx.inode(fid)
    if inode is None or inode.pfs != before or inode.writing or tx.has_ops(fid):
        return
    there = msgspec.structs.replace(before, missing=True)
    if (inode.pfs, inode.error) != (there, error):
        tx.put(inode_key(fid), msgspec.structs.replace(inode, pfs=there, t_pfs_s=0.0, error=error))


def note_pfs_copy(tx: Tx, fid: int, before: PfsCopy, after: PfsCopy) -> None:
    """What identifies a content on the PFS is something else now: its attributes were set there."""
    inode = tx.inode(fid)
    if inode is not None and inode.pfs == before:
        tx.put(inode_key(fid), msgspec.structs.replace(inode, pfs=after))


def note_error(tx: Tx, ctx: Ctx, fid: int, error: str) -> None:
    """Show the last error of replication or drain on a file; empty clears it."""
    inode = tx.inode(fid)
    if inode is not None and inode.error != error:
        tx.put(inode_key(fid), msgspec.structs.replace(inode, error=error))
