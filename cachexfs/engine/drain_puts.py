"""Contents on their way to the PFS: whether their bytes are lost, and which need not land any more.

Role: answers for ``drain``, from the catalogue alone, so that all nodes give the same. Concurrency: nothing here waits
but ``tear``, which is one mutation.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from cachexfs.core import claims
from cachexfs.core.records import Op
from cachexfs.core.routes import DIRECT
from cachexfs.core.waits import Waits
from cachexfs.engine.drain_files import DrainFiles
from cachexfs.engine.node import Node
from cachexfs.engine.owners import Owners

log = logging.getLogger(__name__)


class Puts:
    """What holds of the pending contents. ``waits``: the order that they stand in."""

    def __init__(self, node: Node, owners: Owners, files: DrainFiles) -> None:
        self.node = node
        self.owners = owners
        self.files = files
        self.waits = Waits(self.lost, self.members)

    def lost(self, op: Op) -> bool:
        """Whether nobody has the bytes of a PUT any more."""
        if not op.size or op.cancelled:
            return False
        inode = self.node.catalogue.view.inode(op.fid)
        if inode is None or (op.gen != inode.gen and self.node.live(op.owner)):
            return False
        return not any(map(self.node.valid, inode.copies))

    def members(self, op: Op) -> Collection[bytes] | None:
        """What the commit file that an operation lands lists."""
        inode = self.node.catalogue.view.inode(op.fid)
        return self.node.members(op.fid, op.gen or (inode.gen if inode is not None else 0))

    def is_gone(self, key: bytes, op: Op) -> bool:
        """Whether no node has the bytes of a file that was removed or written anew: they do not come back."""
        inode = self.node.catalogue.view.inode(op.fid)
        if inode is None:
            return not self.files.has_source(op) and all(name == self.node.name for name in self.owners.holders(op))
        if self.waits.order.next_put(key) is None or self.files.has_own(op):
            return False
        if not self.owners.has_part(op, inode) or self.files.overwritten(op):
            return True
        return all(name == self.node.name for name in self.owners.holders(op))

    async def tear(self, key: bytes, op: Op) -> None:
        """A commit file was to land after bytes that are lost, and whose file is removed or has other bytes since."""
        view, order, torn = self.node.catalogue.view, self.waits.order, list[bytes]()
        following = order.next_put(key)
        for other, names in order.claimants(key, view.has_inode):
            if following is not None and order.seq(other) > order.seq(following):
                break  # it claims what is there then
            commit = view.op(other)
            if commit is not None and any(map(self.waits.claims(commit), names)):
                torn.append(other)
        inode = view.inode(op.fid)
        nowhere = inode is not None and inode.pfs is None
        moved = nowhere and following is not None and order.moved_between(op.path, key, following)
        log.warning("%r: its bytes are lost, and it has changed: %d commit files do not land", op.path, len(torn))
        await self.node.catalogue.mutate(lambda tx: claims.tear(tx, key, torn, keep_name=moved))

    def is_only_copy(self, op: Op) -> bool:
        """Whether what is ready is all that the loss of this node would leave: a survivor lands it then."""
        inode = self.node.catalogue.view.inode(op.fid)
        return inode is not None and inode.route == DIRECT and self.node.replica_count > 0

    def unneeded(self, key: bytes, op: Op) -> bool:
        """Whether a PUT need not land: removed since (and no commit file wants it all the same), or superseded."""
        view = self.node.catalogue.view
        if op.cancelled:
            return True
        if view.has_inode(op.fid):
            return self._superseded(key, op)
        return not self.waits.order.claimed_after(key, view.has_inode)

    def _superseded(self, key: bytes, op: Op) -> bool:
        """A later content of the same file is pending and nothing in between waits for this one."""
        following = self.waits.order.next_put(key)
        return following is not None and not self.waits.order.commit_between(op.path, key, following)
