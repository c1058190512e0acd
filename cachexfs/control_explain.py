"""The control requests ``explain`` and ``latest``: what holds a path back, and which checkpoint is the newest.

Role: part of the control server: turns what the engine knows into words, each with what would mend it.
"""

from __future__ import annotations

import os
import shlex

import trio

from cachexfs.control_answers import Answer
from cachexfs.core import formats
from cachexfs.core.boundary import Boundary
from cachexfs.core.formats import may_be_checkpoint
from cachexfs.core.records import Inode, Op
from cachexfs.core.routes import DIRECT
from cachexfs.engine.candidates import Candidate
from cachexfs.engine.commit_files import UNREADABLE, UNREADABLE_NOW
from cachexfs.engine.completeness import Checkpoint, Completeness, Piece
from cachexfs.engine.drain_reasons import LANDS_BY_ITSELF, why_pending
from cachexfs.engine.health import pfs_health
from cachexfs.engine.parts import Parts

PIECES_MAX = 1000
GOES_ON = "nothing: it goes on by itself"
PFS_BACK = "nothing here: see the PFS (docs/pfs.md); what is pending lands by itself once it answers"
BRING_BACK = "bring the node or the PFS that has it back; else save the checkpoint again"
KINDS = {"f": "file", "d": "directory", "l": "symbolic link"}


def reason_of(parts: Parts, key: bytes, op: Op) -> str:
    """Why a change of the PFS has not landed: ``put: No space left on device; next try in 2 s``."""
    return f"{op.kind}: " + why_pending(parts.drainer, key).removeprefix(f"drain: {op.kind}: ")


def words_of(piece: Piece) -> str:
    """``NAME (NODE): REASON``; without the node where it is not known."""
    return f"{os.fsdecode(piece.name)}{f' ({piece.node})' if piece.node else ''}: {piece.reason}"


def explain(
    parts: Parts, path: str, fid: int, inode: Inode, checkpoint: Checkpoint | None,
    attributes: dict[str, str], cut: str = "",
) -> Answer:  # fmt: skip
    """The answer about one file or directory; ``cut``: why a single file is not whole by its own bytes."""
    base = parts.reader.path(fid) or b""
    pieces = [_member(piece) for piece in (checkpoint.missing if checkpoint is not None else ())]
    if cut:
        pieces.append(_piece(os.fsdecode(base), inode.origin, "restartable", cut, "save it again"))
    pieces += _pending(parts, base)
    records = [(base, fid, inode)] if inode.kind == "f" else list(parts.completeness.walk(fid))
    shown = {piece["path"] for piece in pieces if piece["boundary"] == "pfs"}
    prefix = base + b"/" if base and inode.kind == "d" else b""
    for name, child, record in records:
        where = os.fsdecode(name if inode.kind == "f" else prefix + name)
        if parts.node.replica_count and parts.node.boundary(child, record) in (Boundary.RETURNED, Boundary.LOST):
            pieces.append(_unreplicated(parts, where, record))
        if record.error and where not in shown and record.kind == "f" and not parts.node.on_pfs(child, record):
            pieces.append(_piece(where, record.origin, "pfs", record.error, _mend(parts, where, record)))
    stage, restartable = attributes.get("stage", "pfs"), attributes.get("restartable")
    health = pfs_health(parts.node)
    if health.away and not shown:
        only_there = any(record.size and not parts.node.live_copies(record) for _, _, record in records)
        what = "what lies only there cannot be read now" if only_there else "its copies on nodes can be read meanwhile"
        pieces.append(_piece(path, "", "pfs", f"{health.words}; {what}", PFS_BACK))
    kind = "checkpoint" if checkpoint is not None else KINDS.get(inode.kind, "special file")
    return {
        "path": path, "kind": kind, "stage": stage, "restartable": restartable, "pieces": pieces[:PIECES_MAX],
        "summary": _summary(len(pieces), stage),
    }  # fmt: skip


def _summary(count: int, stage: str) -> str:
    if count:
        return f"{count} things hold it back" if count > 1 else ""
    return "nothing holds it back" if stage == "pfs" else "it is on its way"


def _piece(path: str, node: str, boundary: str, reason: str, fix: str) -> Answer:
    return {"path": path, "node": node, "boundary": boundary, "reason": reason, "fix": fix}


def _member(piece: Piece) -> Answer:
    return _piece(os.fsdecode(piece.name), piece.node, "restartable", piece.reason, fix_of(piece))


def fix_of(piece: Piece) -> str:
    """What would make a member of a checkpoint whole."""
    reason = piece.reason
    if UNREADABLE_NOW in reason:
        return "wait: it is tried again"
    if "the limit" in reason:
        return "docs/formats.md says what may be read; the files themselves are not affected"
    if UNREADABLE in reason:
        return "save the checkpoint again, or see docs/formats.md if a class in it is your own"
    if "being written" in reason or "not saved yet" in reason:
        return f"wait for the writer{f' on {piece.node}' if piece.node else ''}; if it has died, save again"
    if "no live copy" in reason:
        return BRING_BACK
    if "is newer than" in reason:
        commit = reason.rpartition("is newer than ")[2]
        return (
            "save the checkpoint again; or, if all its files are of one save and were copied here, write the commit "
            f"file once more, last: cp {commit} {commit}.tmp && mv {commit}.tmp {commit}"
        )
    return "if its save has ended, save the checkpoint again or remove it"


def _mend(parts: Parts, where: str, record: Inode) -> str:
    error = record.error
    if record.pfs is not None and record.pfs.missing and not parts.node.live_copies(record):
        command = ["cachexfs", "status", os.path.join(parts.node.options.mountpoint, where), "--refresh", "--forget"]
        return f"bring it back there; if it is gone for good, '{shlex.join(command)}' forgets its name"
    if "taken off the PFS" in error:
        return "save the checkpoint again or remove it; 'cachexfs umount' names it until then"
    return "mend what the error says; it is tried again"


def _pending(parts: Parts, base: bytes) -> list[Answer]:
    """Pending changes of the PFS at or below a path."""
    order, found = parts.drainer.waits.order, list[Answer]()
    for key, op in order.at_or_below(base):
        if len(found) >= PIECES_MAX:  # counted only
            found.append(_piece(os.fsdecode(op.path), op.owner, "pfs", "", ""))
            continue
        reason = reason_of(parts, key, op)
        fix = "mend what the error says; it is tried again" if "next try" in reason else GOES_ON
        if LANDS_BY_ITSELF in reason:
            fix = PFS_BACK
        if "no copy of its bytes is left" in reason:
            fix = BRING_BACK
        found.append(_piece(os.fsdecode(op.path), op.owner, "pfs", reason, fix))
    return found


def _unreplicated(parts: Parts, where: str, record: Inode) -> Answer:
    alone = not parts.node.partners()
    under_way = "it goes to the PFS directly" if record.route == DIRECT else "its replica is under way"
    reason = record.error or ("no live partner" if alone else under_way)
    fix = "bring a partner back: 'cachexfs status' names the lost nodes" if alone else GOES_ON
    return _piece(where, record.origin, "partner", reason, fix)


async def latest(
    completeness: Completeness,
    fid: int,
    candidates: list[Candidate],
    at: Boundary,
    below: int | None,
    patience_s: float,
) -> Answer:
    """The newest of ``candidates`` (newest first) that is restartable at ``at``; without one, whether that is certain.

    None but those that are newer than it is read.
    """
    unreadable, empty, found = "", "", []
    for candidate in candidates:
        await trio.lowlevel.checkpoint()  # a hundred checkpoints of a thousand files take a second
        if below is not None and not 0 <= candidate.step < below:
            continue
        checkpoint = await completeness.checkpoint(candidate.fid, patience_s)
        if checkpoint is None:
            continue
        found.append(checkpoint)
        if checkpoint.restartable is not None and checkpoint.restartable >= at:
            return {"done": True, "path": os.fsdecode(checkpoint.path), "certain": not unreadable, "reason": unreadable}
        cannot = [p for p in checkpoint.missing if UNREADABLE in p.reason]
        if cannot:
            unreadable = f"{os.fsdecode(checkpoint.path)}: {cannot[0].reason}"
    if not candidates:
        files = [(path, i) for path, _, i in completeness.walk(fid) if i.kind == "f" and may_be_checkpoint(path)]
        unreadable = formats.unknown_files([path for path, inode in files if inode.size])
        empty = formats.empty_files([path for path, inode in files if not inode.size])
    pfs = completeness.node.pfs
    if at == Boundary.PFS and candidates and not unreadable and pfs is not None and pfs.state != "ok":
        unreadable = f"the PFS cannot be read now ({pfs.state}): what lies only there is not counted"
    return {
        "done": True,
        "path": None,
        "certain": not unreadable,
        "reason": unreadable or _why(found, at, below, empty),
    }


def _why(counted: list[Checkpoint], at: Boundary, below: int | None, empty: str) -> str:
    what = "no checkpoint there can be restarted from" + (f" below step {below}" if below is not None else "")
    lacking = [f"{os.fsdecode(c.path)}: {words_of(c.missing[0])}" for c in counted if c.missing]
    if lacking or empty:
        return f"{what} ({lacking[0] if lacking else empty})"
    return f"{what} at '{at.label}' or better: see 'cachexfs status'" if counted and at > Boundary.RETURNED else what
