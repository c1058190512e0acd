"""The control requests ``drill`` and ``dead``.

Role: part of the control server: turns a request into calls of the engine, and their outcome into lines.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import trio

from cachexfs.control_answers import Answer, NotFoundError, Send
from cachexfs.core.records import ROOT_FID
from cachexfs.engine.completeness import Completeness
from cachexfs.engine.drill import Drill, Report
from cachexfs.engine.node import Node
from cachexfs.errors import UsageError

POLL_S = 0.2

Vouch = Callable[[list[str]], Awaitable[tuple[bool, str]]]


async def drill(node: Node, completeness: Completeness, request: Answer, send: Send) -> None:
    """``{"op":"drill","path","without":null|str}``: progress in bytes, then the files as they were read."""
    path = str(request.get("path") or "")
    without = request.get("without")
    await node.catalogue.barrier()
    fid = _resolve(node, path)
    done = 0
    reports: list[Report] = []

    def count(length: int) -> None:
        nonlocal done
        done += length

    async with trio.open_nursery() as nursery:

        async def run() -> None:
            reports.append(await Drill(node, completeness).run(fid, None if without is None else str(without), count))
            nursery.cancel_scope.cancel()

        nursery.start_soon(run)
        total = sum(inode.size for _, _, inode in completeness.walk(fid))
        while True:
            await send({"progress": {"bytes_done": done, "bytes_total": total}})
            await trio.sleep(POLL_S)
    report = reports[0]
    await send({
        "done": True, "path": path, "without": report.without, "ok": report.ok, "certain": report.certain,
        "reason": report.reason, "notes": report.notes,
        "files": [
            {"file": os.fsdecode(f.name), "source": f.source, "bytes": f.size, "ok": f.ok, "reason": f.reason}
            for f in report.files
        ],
    })  # fmt: skip


def _resolve(node: Node, path: str) -> int:
    """The directory of a path, as the catalogue has it: what was never looked at lies only on the PFS."""
    fid, view = ROOT_FID, node.catalogue.view
    for part in os.fsencode(path).split(b"/"):
        if part in (b"", b"."):
            continue
        entry = view.lookup(fid, part)
        if entry is None:
            raise NotFoundError(f"{path}: no such directory in the mount, as far as it has been looked at")
        fid = entry.fid
    inode = view.inode(fid)
    if inode is None or inode.kind != "d":
        raise UsageError(f"{path}: a drill is for a checkpoint's directory")
    return fid


async def dead(vouch: Vouch | None, request: Answer, send: Send) -> None:
    """``{"op":"dead","nodes":[str]}``: ``{"changed":bool,"reason":str}``."""
    nodes = request.get("nodes")
    if vouch is None:
        raise UsageError("this mount is alone: there is no other node that could be dead")
    if not isinstance(nodes, list) or not nodes:
        raise UsageError("no node was named")
    changed, reason = await vouch([str(name) for name in nodes])
    await send({"done": True, "changed": changed, "reason": reason})
