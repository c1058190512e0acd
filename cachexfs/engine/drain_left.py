"""What the drain has to do before something is on the PFS: for who waits, and for who asks how long that takes.

Role: looks at what is pending, for ``status``, ``wait``, ``umount`` and fsync of a directory. The numbers are told to
people; no change of the PFS depends on them. Concurrency: nothing here waits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cachexfs.core.order import parent_of
from cachexfs.core.records import Op, OpKind
from cachexfs.engine.drain import Drainer
from cachexfs.engine.health import pfs_health


@dataclass(frozen=True, slots=True)
class Left:
    """Of what this node is to copy: bytes that are there already, bytes that are not, and how long these take at the
    rate of late (None: nothing has moved of late, the PFS does not answer, or other nodes have a part in it)."""

    copied: int = 0
    left: int = 0
    left_s: float | None = None


def copied(drainer: Drainer, key: bytes, op: Op) -> int:
    """Bytes of a PUT that are on the PFS already, under a hidden name."""
    if drainer.is_ready(key, op):
        return op.size
    under_way = drainer.ready.copies.get(op.hidden)
    return 0 if under_way is None else min(under_way.copied, op.size)


def copy_left_s(drainer: Drainer, fid: int) -> float | None:
    """Seconds that the copy of a file to the PFS still takes at its pace so far; None: none is under way, or new."""
    view = drainer.node.catalogue.view
    inode = view.inode(fid)
    for _, op in view.ops_of(fid):
        if op.kind == OpKind.PUT and inode is not None and op.gen == inode.gen:
            under_way = drainer.ready.copies.get(op.hidden)
            return under_way.left_s if under_way is not None else None
    return None


def left_to_copy(drainer: Drainer, wanted: Collection[bytes] | None = None) -> Left:
    """What this node has to copy before all of these PUTs are there (None: all of its own).

    The oldest go first: what is older than the last of them counts, too. What waits for its writer does not.
    """
    puts = [(key, op) for key, op in drainer.in_progress() if op.kind == OpKind.PUT and not op.cancelled]
    unneeded = drainer.puts.unneeded
    own = {key: op for key, op in puts if not drainer.files.busy(op.fid) and not unneeded(key, op)}
    seq, asked = drainer.waits.order.seq, [key for key in own if wanted is None or key in wanted]
    if not asked:
        return Left()
    last = max(seq(key) for key in asked)
    before = [(key, op) for key, op in own.items() if seq(key) <= last]
    there = sum(copied(drainer, key, op) for key, op in before)
    left, rate = sum(op.size for _, op in before) - there, drainer.ready.copies.throughput.rate()
    is_known = rate > 0 and not pfs_health(drainer.node).away and (wanted is None or len(asked) == len(wanted))
    return Left(there, left, left / rate if is_known else None)


def names_awaited(drainer: Drainer, path: bytes) -> dict[bytes, int]:
    """Pending changes of names in a directory that its fsync waits for, with the file that each is about."""
    ops = drainer.waits.order.at_or_below(path)
    return {key: op.fid for key, op in ops if parent_of(op.path) == path and is_awaited(drainer, key, op)}


def is_awaited(drainer: Drainer, key: bytes, op: Op) -> bool:
    """Whether an fsync of its directory waits for a pending change.

    Not of what a writer has open: it lands once that has closed it, as a created file does. Nor of what is held for the
    next commit file: that is safe with its recovery record.
    """
    return not drainer.files.busy(op.fid) and drainer.responsible(op) and not drainer.waits.is_held(key)
