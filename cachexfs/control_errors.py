"""What ``status`` says is wrong with a mount, and what was wrong and is over.

Role: part of the control server. Errors make ``status`` end with 3, notes do not. Concurrency: nothing here waits.
"""

from __future__ import annotations

import os

from cachexfs.control_answers import Answer
from cachexfs.core.boundary import Boundary
from cachexfs.engine.drain_left import names_awaited
from cachexfs.engine.health import pfs_health
from cachexfs.engine.parts import Parts


def errors_and_notes(parts: Parts) -> tuple[list[Answer], list[str]]:
    """The errors, each with path and node, and the notes."""
    node, drainer, view = parts.node, parts.drainer, parts.node.catalogue.view
    calls, notes = node.failed_calls.look(lambda call, fid: is_over(parts, call, fid))
    errors = [_error("", text, node.name) for text in [*node.known_errors(), *calls]]
    for key, text in drainer.progress.errors.items():
        op = view.op(key)
        errors.append(_error((os.fsdecode(op.path) or ".") if op else "", text, node.name))
    if (text := drainer.errors.outage(drainer.held_up())) and not pfs_health(node).away:  # else the state says it
        errors.append(_error("", text, node.name))
    for lost, origin, text in parts.losses.errors():
        errors.append(_error(os.fsdecode(lost), text, origin))
    shown = {error["path"] for error in errors}
    for fid, record in view.failing():
        path = parts.reader.path(fid)
        if path is not None and os.fsdecode(path) not in shown:
            errors.append(_error(os.fsdecode(path), record.error, record.origin))
    return errors, notes


def _error(path: str, text: str, node: str) -> Answer:
    return {"path": path, "error": text, "node": node}


def is_over(parts: Parts, call: str, fid: int) -> str:
    """Why it does not matter any more that a call of data failed, in words; "" if it does."""
    inode, wanted = parts.node.catalogue.view.inode(fid), parts.node.options.fsync
    if inode is None:
        return "it has been removed since"
    if inode.kind == "d":
        is_there = not names_awaited(parts.drainer, parts.reader.path(fid) or b"")
        return "its names are on the PFS since" if is_there else ""
    stage = parts.attributes.stage(fid, inode)
    if stage in (Boundary.WRITING, Boundary.LOST):
        return ""
    if call != "fsync":
        return "it has been published since"
    is_there = stage >= (Boundary.PFS if wanted == "pfs" else Boundary.PARTNER) or parts.drainer.is_safe(fid)
    return f"it has got to '{wanted}' since" if is_there else ""
