"""Who carries out a pending operation: its owner, or a survivor, and when that one may.

Role: asked by ``drain`` before anything of an operation is begun. An owner that is lost may only be cut off, with calls
on the PFS under way that nobody can take back: a process that hangs there does its last system call whenever the PFS
answers. So no two nodes carry out one operation at a time:

- The catalogue says whose it is, and is asked before each attempt (``own``). A survivor writes itself there first; who
  comes back finds that, and leaves it alone.
- Before a change of names begins its owner notes that (``begun``), and takes the note back once the PFS has refused it.
  A survivor carries out what was begun only when the owner has been lost for ``FENCE_S``: by then a call has landed, or
  its process was killed at its deadline. Until then the operation is pending and what comes after it in the order
  waits, so a late call hits what it was meant for.
- What lands a file needs no note: it renames a hidden file, which is not there any more once somebody has landed it.
  Nor does what gives a directory its times and mode, the last change of each: a late call gives it what it was meant to
  have, and no other change waits for it.

Concurrency: none; everything but ``own`` looks at the view.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import trio

from cachexfs.core.changes import take_op
from cachexfs.core.records import Inode, Life, Op, OpKind
from cachexfs.core.replica import Applied
from cachexfs.core.transaction import Tx
from cachexfs.engine.node import Node
from cachexfs.errors import CatalogueUnavailableError

#: A call begins within half the node timeout of the last word with the catalogue and is given up 20 s later (STALL_S).
FENCE_S = 100.0


def check_reach(node: Node) -> None:
    """Raise where the catalogue has been silent for so long that others may be about to take over."""
    if node.catalogue.outage_s > node.options.node_timeout_s / 2:
        raise CatalogueUnavailableError("the catalogue does not answer: the PFS is left to those that it answers")


class Owners:
    """Whose the pending operations are."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._lost_s: dict[str, float] = {}  # node -> when this one noticed that it is gone, by trio's clock

    # ---- following the catalogue
    def notice(self, changes: Applied) -> list[str]:
        """Follow who lives; returns the nodes that have gone."""
        gone = []
        for _, old, new in changes:
            if isinstance(new, Life):
                self._lost_s.pop(new.node, None)
            elif isinstance(old, Life) and new is None:
                self._lost_s[old.node] = trio.current_time()
                gone.append(old.node)
        return gone

    def fences(self) -> Iterable[str]:
        """Nodes that are gone and may have calls under way."""
        begun = {op.owner for _, op, _ in self.node.catalogue.view.ops() if op.begun}
        return sorted(name for name in begun if not self.node.live(name))

    # ---- answers
    def holders(self, op: Op) -> list[str]:
        """Live nodes that have the bytes of a PUT."""
        inode = self.node.catalogue.view.inode(op.fid)
        if inode is not None:
            return self.node.holders(inode)
        return sorted({copy.node for copy in op.copies if self.node.valid(copy)})

    def has_part(self, op: Op, inode: Inode) -> bool:
        """Whether who has the current content of a file has what a PUT lands: that, or what it was appended to."""
        content = self.node.catalogue.view.generation(op.fid)
        return inode.gen == op.gen or (content is not None and content.stage == op.stage)

    def responsible(self, op: Op) -> bool:
        """Whether this node carries the operation out: its owner, or the survivor that comes first."""
        node = self.node
        if node.options.alone:
            return True
        wanted = op.kind == OpKind.PUT and op.size and not op.ready and not op.cancelled
        holders = self.holders(op) if wanted else []
        if node.live(op.owner):
            # Who came back without its memory gets the bytes again only where others have too few copies.
            inode = node.catalogue.view.inode(op.fid)
            left = holders and op.owner not in holders and (inode is None or self.has_part(op, inode))
            return (holders[0] if left else op.owner) == node.name
        if holders:
            return holders[0] == node.name
        return node.name == min((n for n in node.catalogue.view.nodes if node.live(n)), default=node.name)

    def fence_s(self, op: Op) -> float:
        """Seconds until a call of its lost owner cannot come any more; 0 when nothing need be waited for."""
        if not op.begun or self.node.live(op.owner):
            return 0.0
        now_s = trio.current_time()
        return max(0.0, self._lost_s.setdefault(op.owner, now_s) + FENCE_S - now_s)

    async def own(self, key: bytes, *, begin: bool) -> Op | None:
        """An operation that is this node's to carry out by what the catalogue says now; None: it is not, or is done.

        ``begin``: what follows may come late. Raises ``CatalogueUnavailableError``.
        """
        node, catalogue = self.node, self.node.catalogue
        check_reach(node)
        if not node.options.alone:
            await catalogue.barrier()
        op = catalogue.view.op(key)
        if op is None or not self.responsible(op) or self.fence_s(op):
            return None
        if node.options.alone or (op.owner == node.name and (op.begun or not begin)):
            return op
        owner, lives = op.owner, catalogue.view.is_live(op.owner)
        return await catalogue.mutate(lambda tx: take_op(tx, node.name, key, owner, lives=lives, begun=begin))

    async def ended(self, key: bytes) -> None:
        """The PFS has answered all calls of an operation, if with an error: nothing of it comes late."""

        def note(tx: Tx) -> None:
            op = tx.read(key)
            if isinstance(op, Op) and op.owner == self.node.name and op.begun:
                tx.put(key, msgspec.structs.replace(op, begun=False))

        await self.node.catalogue.mutate(note)
