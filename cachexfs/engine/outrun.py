"""Checkpoints that are removed before they have landed, one after the other: none gets to the PFS.

Role: what is removed need not land, so who keeps one checkpoint and saves faster than the PFS takes them never has a
whole one there, while everything works. ``status`` says so until a commit file lands or nothing is pending any more.
Concurrency: none; a catalogue listener.
"""

from __future__ import annotations

import logging
from collections import Counter

from cachexfs.core.commitfiles import is_commit_name
from cachexfs.core.order import lands_at
from cachexfs.core.records import Inode, Op, OpKind
from cachexfs.core.replica import Applied
from cachexfs.engine.node import Node

log = logging.getLogger(__name__)

IN_A_ROW = 3
_ERROR = "outrun"


class Outrun:
    """Counts them, of all nodes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._removed: Counter[bytes] = Counter()  # by the commit file's name, since one has landed

    def notice(self, changes: Applied) -> None:
        """Catalogue listener."""
        view, errors = self.node.catalogue.view, self.node.errors
        never_landed = {int(k[2:], 16) for k, old, new in changes if new is None and _is_unlanded(old)}
        for _, old, new in changes:
            op = new or old
            if not isinstance(op, Op) or not is_commit_name(lands_at(op).rpartition(b"/")[2]):
                continue
            if old is None and op.kind == OpKind.UNLINK and op.fid in never_landed:
                self._removed[lands_at(op).rpartition(b"/")[2]] += 1
            elif new is None and op.kind in (OpKind.PUT, OpKind.RENAME):
                inode = view.inode(op.fid)
                if inode is not None and self.node.was_landed(inode):
                    self._removed.clear()
        count = max(self._removed.values(), default=0)
        if count < IN_A_ROW or not view.op_count:
            errors.pop(_ERROR, None)
            return
        if _ERROR not in errors:
            log.warning("checkpoints are removed before they are on the PFS")
        errors[_ERROR] = (
            f"the last {count} checkpoints were removed or replaced before they were on the PFS, and none has got "
            "there since: keep more of them, or save less often"
        )


def _is_unlanded(record: object) -> bool:
    return isinstance(record, Inode) and record.kind == "f" and record.pfs is None
