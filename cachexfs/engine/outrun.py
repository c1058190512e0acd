"""Checkpoints that are removed before they have landed, one after the other: none gets to the PFS.

Role: what is removed need not land, so who keeps one checkpoint and saves faster than the PFS takes them never has a
whole one there, while everything works; and the last one there goes, once nothing that was written before its removal
has still to land, unless it stays for the next (``LastWhole``). ``status`` says so until a commit file lands or nothing
is pending any more. Each directory of checkpoints counts by itself, and so does each name of commit files.
Concurrency: none; a catalogue listener.
"""

from __future__ import annotations

import logging
from collections import Counter

from cachexfs.core.commitfiles import is_commit_name
from cachexfs.core.order import lands_at, parent_of
from cachexfs.core.records import ROOT_FID, Inode, Op, OpKind
from cachexfs.core.replica import Applied
from cachexfs.engine.node import Node

log = logging.getLogger(__name__)

IN_A_ROW = 3
_ERROR = "outrun"
_LANDS = (OpKind.PUT, OpKind.RENAME)

Series = tuple[bytes, bytes]  # directory of checkpoints, name of their commit files


class Outrun:
    """Counts them, of all nodes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._removed: Counter[Series] = Counter()  # since one has landed
        self._leaving: dict[Series, set[bytes]] = {}  # removals of what had landed, by key
        self._staying: dict[Series, set[bytes]] = {}  # the same, that wait until the next is there
        self._gone: set[Series] = set()  # of which one had landed, and none is left

    def notice(self, changes: Applied) -> None:
        """Catalogue listener."""
        records = {int(k[2:], 16): old for k, old, new in changes if new is None and isinstance(old, Inode)}
        for key, old, new in changes:
            op = new or old
            if isinstance(old, Op) and _stays(old) and not _stays(new):
                self._leaving.setdefault(_series(old), set()).update(self._staying.pop(_series(old), ()))
            elif isinstance(old, Op) and _stays(new) and not _stays(old):
                self._staying.setdefault(_series(old), set()).update(self._leaving.pop(_series(old), ()))
            if isinstance(op, Op) and is_commit_name(_series(op)[1]):
                self._count(key, op, records.get(op.fid), issued=old is None, over=new is None)
        if self._removed or self.node.errors.get(_ERROR):
            self._tell()

    def _count(self, key: bytes, op: Op, record: Inode | None, *, issued: bool, over: bool) -> None:
        series = _series(op)
        if op.kind == OpKind.UNLINK and issued and record is not None and record.kind == "f":
            others = [other for _, other in self.node.catalogue.view.ops_of(op.fid)]
            if record.pfs is None or any(other.kind == OpKind.RENAME for other in others):
                self._removed[series] += 1
            else:
                (self._staying if any(map(_stays, others)) else self._leaving).setdefault(series, set()).add(key)
        elif op.kind == OpKind.UNLINK and over and key in (leaving := self._leaving.get(series, set())):
            leaving.discard(key)
            if not self._is_one_there(series):
                self._gone.add(series)
        elif op.kind in _LANDS and over:
            inode = self.node.catalogue.view.inode(op.fid)
            if inode is not None and self.node.was_landed(inode):
                self._removed.pop(series, None)
                self._gone.discard(series)

    def _is_one_there(self, series: Series) -> bool:
        """Whether a commit file has landed that the mount still has."""
        view, (directory, name) = self.node.catalogue.view, series
        above = view.find(ROOT_FID, directory) if directory else ROOT_FID
        for child in view.children(above).values() if above is not None else ():
            entry = view.lookup(child.fid, name)
            inode = view.inode(entry.fid) if entry is not None else None
            if inode is not None and inode.pfs is not None and not inode.pfs.hidden:
                return True
        return False

    def _is_outrun(self, series: Series) -> bool:
        return self._removed[series] >= (1 if self._leaves_none(series) else IN_A_ROW)

    def _tell(self) -> None:
        errors = self.node.errors
        outrun = [series for series in self._removed if self._is_outrun(series)]
        if not outrun or not self.node.catalogue.view.op_count:
            errors.pop(_ERROR, None)
            return
        if _ERROR not in errors:
            log.warning("checkpoints are removed before they are on the PFS")
        count = max(self._removed[series] for series in outrun)
        last = "; the one that was there goes, or has gone" if any(map(self._leaves_none, outrun)) else ""
        errors[_ERROR] = (
            f"the last {count} checkpoint{'s were' if count > 1 else ' was'} removed or replaced before "
            f"{'they were' if count > 1 else 'it was'} on the PFS, and none has got there since{last}: "
            "keep more of them, or save less often"
        )

    def _leaves_none(self, series: Series) -> bool:
        leaves = series in self._gone or bool(self._leaving.get(series))
        return leaves and not self._is_one_there(series)


def _stays(record: object) -> bool:
    """Whether it is the withdrawal of the last one on the PFS, which waits for the next (``LastWhole``)."""
    return isinstance(record, Op) and record.lasting and record.held


def _series(op: Op) -> Series:
    above, _, name = lands_at(op).rpartition(b"/")
    return parent_of(above), name
