"""Routes: whether a content goes to the partner first, or to the PFS directly.

Role: pure; see ``changes``. With ``route=auto`` the node that begins the first file of a directory decides for all
that begin there, on any node, for ``HOLDS_S``: a checkpoint is not mixed. Directories that begin within ``NEAR_S`` of
a decision take it over (ranks that write into directories of their own); it is kept with the root for them.
"""

from __future__ import annotations

import msgspec

from cachexfs.core.changes import Ctx
from cachexfs.core.records import ROOT_FID, Inode, inode_key
from cachexfs.core.transaction import Tx

PARTNER, DIRECT, AUTO = "partner", "direct", "auto"
LATE = "late"  # of a content: begun as ``direct``, sent to the partner because the PFS did not take it in time
HOLDS_S, NEAR_S = 120.0, 10.0


def route_for(tx: Tx, ctx: Ctx, parent: int) -> str:
    """The route of a content that begins in a directory now: ``partner`` or ``direct``."""
    if ctx.route != AUTO:
        return ctx.route
    own = _decided(tx.peek(inode_key(parent)), ctx, HOLDS_S)
    if own:
        return own
    route = _decided(tx.peek(inode_key(ROOT_FID)), ctx, NEAR_S)
    if not route:
        route = ctx.choose()
        _decide(tx, ctx, ROOT_FID, route)
    _decide(tx, ctx, parent, route)
    return route


def give_up_direct(tx: Tx, ctx: Ctx, fid: int) -> None:
    """The PFS has kept a file waiting: what begins beside it from now on goes to the partner."""
    for parent in {ROOT_FID, *(parent for parent, _ in tx.names_of(fid)[:1])}:
        record = tx.peek(inode_key(parent))
        if isinstance(record, Inode) and record.route == DIRECT:
            _decide(tx, ctx, parent, PARTNER)


def _decided(record: object, ctx: Ctx, valid_s: float) -> str:
    """The decision that a directory's record holds, "" without one that is still good."""
    if not isinstance(record, Inode) or not record.route or abs(ctx.now_s - record.routed_s) > valid_s:
        return ""
    return record.route


def _decide(tx: Tx, ctx: Ctx, directory: int, route: str) -> None:
    inode = tx.inode(directory)  # guarded: of two nodes that decide at once, the second finds the first one's
    if inode is not None:
        tx.put(inode_key(directory), msgspec.structs.replace(inode, route=route, routed_s=ctx.now_s))
