"""Why an operation has not landed, in words: for ``explain``, ``umount``, an fsync that fails.

Role: asks the parts of ``drain`` in the order in which they would hold the operation up; decides nothing.
Concurrency: none.
"""

from __future__ import annotations

from cachexfs.core.records import OpKind
from cachexfs.engine.drain import Drainer
from cachexfs.engine.drain_open import OPEN
from cachexfs.engine.health import pfs_health
from cachexfs.errors import quoted

UNKNOWN = "the PFS has not said yet what it has: the journal was damaged, and some of it may be forgotten"
LANDS_BY_ITSELF = "it lands by itself once that answers"


def why_pending(drainer: Drainer, key: bytes) -> str:
    """Why an operation has not landed, in words."""
    op = drainer.node.catalogue.view.op(key)
    if op is not None and op.kind == OpKind.PUT and not op.ready and drainer.puts.lost(op):
        return "is lost: no copy of its bytes is left"
    if key in drainer.progress.errors:
        return drainer.progress.errors[key]
    if drainer.is_paused:
        return UNKNOWN
    blocker = drainer.waits.blocker(key)
    waits = drainer.node.catalogue.view.op(blocker) if blocker is not None else None
    if op is not None and drainer.waits.is_held(key):
        ready = "is ready under a hidden name and " if op.kind == OpKind.PUT and op.ready else ""
        return f"{ready}waits for a new commit file: the checkpoint that is whole on the PFS stays until then"
    if op is not None and op.kind == OpKind.PUT and drainer.files.busy(op.fid):
        return "waits until the writer that has the file open closes it"
    health = pfs_health(drainer.node)
    if health.away or key in drainer.progress.held_up:
        return f"{health.words if health.away else 'the PFS did not answer'}; {LANDS_BY_ITSELF}"
    if op is not None and op.parked and op.parked != OPEN:
        return f"was refused repeatedly ({op.parked}) and is tried again slowly (node {op.owner})"
    if waits is not None:
        return f"waits for the {waits.kind} of {quoted(waits.path)} (node {waits.owner}), which must land first"
    if op is not None and not drainer.node.live(op.owner):
        fence_s = drainer.owners.fence_s(op)
        late = f" in {fence_s:.0f} s, when no call that it had begun can land late any more" if fence_s else ""
        return f"its node {op.owner} is lost; a survivor takes over{late}"
    return drainer.ready.copies.words(op.hidden) if op is not None and op.kind == OpKind.PUT else "is under way"
