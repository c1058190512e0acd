"""How far what a command waits for has got, in bytes, with the rate of late and the time that the rest takes at it.

Role: part of the control server: the progress of ``wait`` and ``umount``. Concurrency: nothing here waits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from cachexfs.control_answers import Answer
from cachexfs.core.boundary import Boundary
from cachexfs.core.records import Inode, OpKind
from cachexfs.engine.drain_left import copied, left_to_copy
from cachexfs.engine.parts import Parts

FILES_SHOWN = 20


def rounded(seconds: float | None) -> float | None:
    """A tenth of a second is more than anybody knows."""
    return None if seconds is None else round(seconds, 1)


def of_files(parts: Parts, files: Sequence[tuple[bytes, int, Inode]], at: Boundary) -> Answer:
    """Of files (path, file id, record) on their way to a boundary. The part of a file counts that is there."""
    drainer, view = parts.drainer, parts.node.catalogue.view
    behind = [(fid, inode) for _, fid, inode in files if parts.attributes.stage(fid, inode) < at]
    done = sum(inode.size for _, _, inode in files) - sum(inode.size for _, inode in behind)
    answer: Answer = {
        "bytes_done": done, "bytes_total": sum(inode.size for _, _, inode in files),
        "files_done": len(files) - len(behind), "files_total": len(files),
    }  # fmt: skip
    if at != Boundary.PFS:
        return answer | {"rate_bytes_s": round(parts.replicator.throughput.rate()) if behind else 0}
    puts = {
        key: op for fid, inode in behind for key, op in view.ops_of(fid)
        if op.kind == OpKind.PUT and op.gen == inode.gen
    }  # fmt: skip
    left = left_to_copy(drainer, puts.keys()) if behind else None
    answer["bytes_done"] = done + sum(copied(drainer, key, op) for key, op in puts.items())
    if left is not None:
        answer["rate_bytes_s"] = round(drainer.ready.copies.throughput.rate())
        answer["left_s"] = rounded(left.left_s) if len(puts) == len(behind) else None
    return answer


def of_drain(parts: Parts) -> Answer:
    """Of all that this node has to bring to the PFS."""
    drainer = parts.drainer
    pending, left = drainer.own_pending(), left_to_copy(drainer)
    puts = [(key, op) for key, op in pending if op.kind == OpKind.PUT and not drainer.puts.unneeded(key, op)]
    return {
        "bytes_left": sum(op.size - copied(drainer, key, op) for key, op in puts), "ops_left": len(pending),
        "rate_bytes_s": round(drainer.ready.copies.throughput.rate()), "left_s": rounded(left.left_s),
        "files": [os.fsdecode(op.path) for _, op in pending[:FILES_SHOWN]],
    }  # fmt: skip
