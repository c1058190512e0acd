"""How a mount is taken down by ``cachexfs umount``: what it waits for, and what it says is left.

Role: used by ``control_server``. A node that has drained goes on serving the others; of one that ends with its drain
undone it takes over what it can, and keeps its replicas of the rest: they may be all that is left.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import trio

from cachexfs import control_explain
from cachexfs.control_answers import Answer, Send, pause
from cachexfs.control_progress import of_drain
from cachexfs.core.boundary import Boundary
from cachexfs.core.records import ROOT_FID, Op, OpKind
from cachexfs.ending import Ending
from cachexfs.engine.drain_progress import IS_BEING_COPIED
from cachexfs.engine.drain_reasons import LANDS_BY_ITSELF, UNKNOWN
from cachexfs.engine.parts import Parts

STALLED_S = 60.0
#: Until the deadline (by trio's clock; None: without), yields now and then while other nodes are not done.
Leaving = Callable[[float | None], AsyncIterator[None]]


@dataclass(frozen=True, slots=True)
class Others:
    """What the daemon does about the job's other nodes at the end. ``settle``: of those that went before this one, when
    it is the last; ``staying``: what stays for those that are still there, in words."""

    leaving: Leaving
    settle: Callable[[], Awaitable[None]]
    staying: Callable[[], str]


class Unmount:
    """One request to unmount. ``others``: None where this node is alone."""

    def __init__(self, parts: Parts, ending: Ending, others: Others | None) -> None:
        self.parts = parts
        self.node = parts.node
        self.ending = ending
        self.others = others

    async def answer(self, request: Answer, send: Send) -> None:
        """Drain, serve the others until they are done, tell what is left, and end the mount."""
        timeout = request.get("timeout_s")
        ending = self.ending
        ending.abandoned = bool(request.get("abandon"))
        failed = await self.parts.files.publish_all()
        ending.is_published = not failed and not self.node.orphans()
        left: list[Answer] = [{"path": "", "reason": text} for text in failed]
        if left and self.node.is_cut_off:
            left.append({"path": "", "reason": self.node.cut_off_words()})
        if orphans := self.node.orphans():
            left.append({"path": "", "reason": orphans})
        deadline_s = trio.current_time() + (float("inf") if timeout is None else float(timeout))
        if not ending.abandoned:
            with self.node.foreground.awaited():
                await self._drain(send, deadline_s, patient=timeout is not None)
        left += self._left_behind()
        if self.others is not None and not ending.abandoned and not left:
            async for _ in self.others.leaving(deadline_s):
                await send({"progress": of_drain(self.parts)})
            with self.node.foreground.awaited():  # of a node that has ended before its own drain was done
                await self._drain(send, deadline_s, patient=timeout is not None)
            await self._await_others(send, deadline_s)
            left += self._left_behind()
            left += self._kept_for_others({str(item["path"]) for item in left})
        notes: list[str] = []
        if self.others is not None and not left and not ending.abandoned:
            await self.others.settle()
            notes = list(filter(None, [self.others.staying()]))
        ending.left = len(left)
        await send({"done": True, "left": left, "notes": notes})
        ending.requested.set()

    def _left_behind(self) -> list[Answer]:
        """What this node answers for and the PFS does not have, each with why."""
        left: list[Answer] = [{"path": "", "reason": UNKNOWN}] if self.parts.drainer.is_paused else []
        undrained = self._undrained()
        for key, op in [row for row in undrained if row[1].kind != OpKind.DIRATTR] or undrained:
            left.append({"path": os.fsdecode(op.path) or ".", "reason": self._reason(key, op)})
        return left + self._not_on_pfs({str(item["path"]) for item in left})

    def _reason(self, key: bytes, op: Op) -> str:
        """Why a change has not landed; nothing goes on by itself once the mount has ended."""
        reason = control_explain.reason_of(self.parts, key, op).removesuffix(f"; {LANDS_BY_ITSELF}")
        return f"{op.kind}: time ran out while it was copied" if IS_BEING_COPIED in reason else reason

    async def _await_others(self, send: Send, deadline_s: float) -> None:
        """Serve the copies that this node has until the PFS has their files, or for a while nothing lands."""
        count, since_s = 0, trio.current_time()
        while (left := len(self.parts.keeper.kept_for_others())) and trio.current_time() < deadline_s:
            if left != count:
                count, since_s = left, trio.current_time()
            elif trio.current_time() - since_s > STALLED_S:
                return
            began_s = trio.current_time()
            await send({"progress": of_drain(self.parts)})
            await pause(began_s)

    def _kept_for_others(self, told: set[str]) -> list[Answer]:
        found: list[Answer] = []
        for fid in self.parts.keeper.kept_for_others():
            inode, path = self.node.catalogue.view.inode(fid), os.fsdecode(self.parts.reader.path(fid) or b"")
            whose = inode.origin or inode.writing if inode is not None else ""
            if path not in told:
                found.append({"path": path, "reason": f"not on the PFS: this node keeps a replica of it for {whose}"})
        return found

    def _not_on_pfs(self, told: set[str]) -> list[Answer]:
        """Files of this node, or of a lost one, that the PFS does not have though nothing of them is pending."""
        found: list[Answer] = []
        for path, fid, inode in self.parts.completeness.walk(ROOT_FID):
            mine = inode.origin == self.node.name or not self.node.live(inode.origin)
            if (
                inode.kind != "f"
                or not inode.origin
                or not mine
                or self.node.on_pfs(fid, inode)
                or os.fsdecode(path) in told
            ):
                continue
            reason = inode.error or "not on the PFS"
            if self.node.boundary(fid, inode) == Boundary.LOST:
                reason = f"lost: {reason}"
            found.append({"path": os.fsdecode(path), "reason": reason})
        return found

    async def _drain(self, send: Send, deadline_s: float, *, patient: bool) -> None:
        """Wait for the drain; without a time given, until nothing lands for a while and errors, or a commit file that
        does not come, say why."""
        drainer = self.parts.drainer
        progress, landed, since_s = drainer.progress, -1, trio.current_time()
        while trio.current_time() < deadline_s and drainer.left():
            if progress.landed_ops != landed:
                landed, since_s = progress.landed_ops, trio.current_time()
            hopeless = progress.errors or progress.held_up or drainer.is_idle() or drainer.is_paused
            if not patient and hopeless and trio.current_time() - since_s > STALLED_S:
                return
            began_s = trio.current_time()
            await send({"progress": of_drain(self.parts)})
            await pause(began_s)

    def _undrained(self) -> list[tuple[bytes, Op]]:
        return self.parts.drainer.own_pending()
