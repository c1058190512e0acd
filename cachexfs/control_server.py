"""The control socket: what ``cachexfs status``, ``wait``, ``latest``, ``explain`` and ``umount`` ask.

Role: one request per connection, a JSON object on a line; answers are JSON objects on lines, the last has
``"done": true``. Only the daemon's user can connect. Requests never touch the mount; waits have the client's deadline.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import TypeVar

import trio

from cachexfs import control_explain, control_recovery, control_umount
from cachexfs.control_answers import Answer, Facts, NotFoundError, Send, pause
from cachexfs.control_errors import errors_and_notes
from cachexfs.control_progress import of_files, rounded
from cachexfs.core.boundary import Boundary
from cachexfs.core.records import ROOT_FID, Inode
from cachexfs.core.routes import AUTO
from cachexfs.ending import Ending
from cachexfs.engine.attributes import rfc3339
from cachexfs.engine.completeness import BEING_WRITTEN, Checkpoint
from cachexfs.engine.drain_left import left_to_copy
from cachexfs.engine.health import pfs_health
from cachexfs.engine.names import STALE_AFTER_S
from cachexfs.engine.parts import Parts
from cachexfs.engine.refresh import Refresher
from cachexfs.errors import (
    EXIT_CANNOT_TELL,
    EXIT_NOT_DURABLE,
    EXIT_TIMEOUT,
    EXIT_USAGE,
    CacheXError,
    CannotTellError,
    CatalogueUnavailableError,
    FsError,
    quoted,
)

log = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 64 << 10
HEARTBEAT_S = 2.0  # a client takes 10 s of silence for a daemon that hangs
PATIENCE_S = 2.0  # for a commit file that is being read
LATEST_PATIENCE_S = 240.0
LOST_S = 10.0  # a node that is only late with its daemon brings back what is lost without it
T = TypeVar("T")
AT = {"returned": Boundary.RETURNED, "partner": Boundary.PARTNER, "pfs": Boundary.PFS}


def _text(path: bytes) -> str:
    return os.fsdecode(path)


class ControlServer:
    """Answers control requests about one mount."""

    def __init__(self, parts: Parts, facts: Facts) -> None:
        self.parts = parts
        self.node = parts.node
        self.completeness = parts.completeness
        self.facts = facts
        self.ending = Ending()
        self.started_s = time.time()
        self.others: control_umount.Others | None = None
        self.vouch: control_recovery.Vouch | None = None
        self.on_stale: Callable[[int, bytes], None] = lambda parent, name: None  # the kernel's entry is old

    async def serve(self, path: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen on a unix socket until cancelled."""
        if os.path.lexists(path):
            os.unlink(path)
        listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        old = os.umask(0o177)
        try:
            await listener.bind(path)
        finally:
            os.umask(old)
        listener.listen(16)
        task_status.started()
        await trio.serve_listeners(self._handle, [trio.SocketListener(listener)])

    async def _handle(self, stream: trio.SocketStream) -> None:
        async def send(answer: Answer) -> None:
            await stream.send_all(json.dumps(answer, ensure_ascii=True).encode() + b"\n")

        async with stream:
            try:
                with trio.fail_after(5):
                    request = await self._request(stream)
                await self._answer(request, send)
            except CatalogueUnavailableError as error:
                way = f"; without a node that is dead for good: {self.node.vouch_command}" if self.vouch else ""
                await self._fail(send, f"{error}{way}", error.exit_code)
            except CacheXError as error:
                await self._fail(send, str(error), error.exit_code)
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                return
            except Exception as error:
                log.exception("a control request failed")
                await self._fail(send, f"{type(error).__name__}: {error}; see the log", EXIT_CANNOT_TELL)

    async def _fail(self, send: Send, error: str, code: int) -> None:
        try:
            await send({"done": True, "error": error, "exit": code})
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    async def _request(self, stream: trio.SocketStream) -> Answer:
        data = b""
        while b"\n" not in data:
            piece = await stream.receive_some(4096)
            if not piece or len(data) > REQUEST_BYTES_MAX:
                raise FsError(22, "no request, or too long a one")
            data += piece
        found = json.loads(data)
        if not isinstance(found, dict):
            raise FsError(22, "a request is a JSON object")
        return found

    async def _answer(self, request: Answer, send: Send) -> None:
        operations: dict[str, Callable[[Answer, Send], Awaitable[None]]] = {
            "ping": self._ping, "status": self._status, "explain": self._explain, "wait": self._wait,
            "latest": self._latest, "umount": self._umount, "sources": self._sources, "refresh": self._refresh,
            "drill": partial(control_recovery.drill, self.node, self.completeness),
            "dead": partial(control_recovery.dead, self.vouch),
        }  # fmt: skip
        found = operations.get(str(request.get("op")))
        if found is None:
            await send({"done": True, "error": f"unknown request {request.get('op')!r}", "exit": EXIT_USAGE})
            return
        await found(request, send)

    # ---- finding
    async def _resolve(self, path: str | None, *, may_be_old: bool = False) -> tuple[int, Inode]:
        """(file id, record) of a path relative to the mount. ``may_be_old``: as seen last, while nobody can tell."""
        try:
            with trio.move_on_after(STALE_AFTER_S if may_be_old else float("inf")):
                await self.node.catalogue.barrier()
        except CatalogueUnavailableError:
            if not may_be_old:
                raise
        if self.node.pfs is not None:
            await self.node.pfs.look_again()
        fid, view = ROOT_FID, self.node.catalogue.view
        for part in os.fsencode(path or "").split(b"/"):
            if part in (b"", b"."):
                continue
            await self.parts.importer.ensure(fid)
            entry = view.lookup(fid, part)
            if entry is None:
                raise NotFoundError(f"'{self._absolute(path)}' does not exist")
            fid = entry.fid
        await self.parts.importer.ensure(fid)
        inode = view.inode(fid)
        if inode is None:
            raise NotFoundError(f"'{self._absolute(path)}' was removed")
        return fid, inode

    def _absolute(self, path: str | None) -> str:
        return os.path.join(self.node.options.mountpoint, path or "")

    async def _alive(self, send: Send, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work()``; while it takes long, the client is told that the daemon lives."""
        results: list[T] = []
        errors: list[CacheXError] = []

        async def run() -> None:
            try:
                results.append(await work())
            except CacheXError as error:
                errors.append(error)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            while True:
                await trio.sleep(HEARTBEAT_S)
                try:
                    await send({"progress": {}})
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    nursery.cancel_scope.cancel()  # nobody waits any more
        if errors:
            raise errors[0]
        if not results:
            raise CannotTellError("the client is gone")
        return results[0]

    async def _ping(self, request: Answer, send: Send) -> None:
        await send({"done": True, "node": self.node.name, "pid": os.getpid()})

    # ---- status
    async def _status(self, request: Answer, send: Send) -> None:
        path = request.get("path")
        fid, inode = await self._resolve(path, may_be_old=True)
        if inode.kind == "d":
            checkpoints = await self._alive(send, lambda: self.completeness.below(fid, patience_s=PATIENCE_S))
            answer = self._mount_facts()
            answer["checkpoints"] = [self._checkpoint(c) for c in checkpoints]
        else:
            attributes = await self.parts.attributes.of(fid)
            answer = self._mount_facts()
            answer["checkpoints"] = []
            answer["file"] = self._file(str(path), inode, attributes)
        await send(answer)

    async def _refresh(self, request: Answer, send: Send) -> None:
        """Look at the PFS again, at and below a path."""
        fid, _ = await self._resolve(request.get("path"))
        parts = self.parts
        refresher = Refresher(self.node, parts.files, parts.reader, parts.importer, parts.drainer, self.on_stale)
        found = await self._alive(send, lambda: refresher.refresh(fid, forget=bool(request.get("forget"))))
        lists = {name: getattr(found, name) for name in ("new", "changed", "missing", "forgotten", "busy")}
        await send({"done": True, **{name: [_text(path) for path in paths] for name, paths in lists.items()}})

    def _mount_facts(self) -> Answer:
        node, drainer, view = self.node, self.parts.drainer, self.node.catalogue.view
        now_s, left = time.time(), left_to_copy(drainer)
        partners = node.partners()
        health = pfs_health(node)
        errors, notes = errors_and_notes(self.parts)
        return {
            "done": True, **asdict(self.facts), "node": node.name, "job": node.options.job, "pid": os.getpid(),
            "uptime_s": round(now_s - self.started_s, 1), "fsync": node.options.fsync, "route": node.options.route,
            "route_now": node.choose_route() if node.route == AUTO else node.route,
            "route_why": node.route_why() if node.route == AUTO else "",
            "nodes": [
                {"name": a.name, "live": node.live(a.name), "host": a.host, "port": a.port} for a in node.options.nodes
            ],
            "partner": partners[0] if partners else None,
            "protected": len(partners) >= node.replica_count and not (node.replica_count and node.is_cut_off),
            "cut_off": node.is_cut_off,
            "pfs_state": health.state, "pfs_error": health.why, "pfs_away_s": round(health.for_s, 1),
            "pfs_refuses": drainer.errors.refusal(), "held_up": drainer.held_up(),
            "staging_used": node.staging.used_bytes, "staging_limit": node.staging.limit_bytes,
            "nvme_used": node.staging.spilled_bytes + (node.replicas.used_bytes if node.replicas is not None else 0),
            "pending_bytes": drainer.pending_bytes(), "pending_ops": view.op_count,
            "own_copied_bytes": left.copied, "own_left_bytes": left.left, "own_left_s": rounded(left.left_s),
            "drain_bytes_s": round(drainer.ready.copies.throughput.rate()),
            "replicate_bytes_s": round(self.parts.replicator.throughput.rate()),
            "failed": node.failed or None, "errors": errors, "notes": notes,
        }  # fmt: skip

    def _checkpoint(self, found: Checkpoint) -> Answer:
        records = [(child, inode) for _, child, inode in self.completeness.walk(found.fid)]
        stage = min((self.node.boundary(f, i) for f, i in records), default=Boundary.PFS)
        routes = {self.parts.attributes.route(f, i) for f, i in records if i.size}
        if any(piece.reason == BEING_WRITTEN for piece in found.missing):
            stage = Boundary.WRITING
        return {
            "path": _text(found.path), "format": found.format, "stage": stage.label,
            "restartable": "no" if found.restartable is None else found.restartable.label,
            "t_returned": _time(found.t_returned_s), "t_partner": _time(found.t_partner_s),
            "t_pfs": _time(found.t_pfs_s), "t_restartable": _time(found.t_restartable_s),
            "files": found.files, "bytes": found.bytes, "pending": found.pending,
            "route": routes.pop() if len(routes) == 1 else "mixed" if routes else "",
            "missing": [{"name": _text(p.name), "node": p.node, "reason": p.reason} for p in found.missing],
            "error": found.error or None, "holders": list(found.holders),
        }  # fmt: skip

    def _file(self, path: str, inode: Inode, attributes: dict[str, str]) -> Answer:
        answer: Answer = {
            "path": path,
            "size": inode.size,
            "error": None,
            "t_returned": None,
            "t_partner": None,
            "t_pfs": None,
        }
        for name, value in attributes.items():
            answer[name.replace(".", "_")] = value
        answer["holders"] = [h for h in attributes.get("holders", "").split(",") if h]
        answer["generation"] = inode.gen
        answer["pending"] = int(attributes.get("pending", "0"))
        for name in ("origin", "digest", "route"):
            answer.setdefault(name, "")
        return answer

    # ---- explain
    async def _explain(self, request: Answer, send: Send) -> None:
        path = str(request.get("path") or "")
        fid, inode = await self._resolve(path, may_be_old=True)
        attributes = await self.parts.attributes.of(fid)
        checkpoint = await self.completeness.checkpoint(fid, PATIENCE_S) if inode.kind == "d" else None
        name = os.fsencode(path).rpartition(b"/")[2]
        cut = await self.completeness.commit_files.cut(fid, name) if inode.kind == "f" else ""
        answer = control_explain.explain(self.parts, path, fid, inode, checkpoint, attributes, cut)
        await send({"done": True, **answer})

    # ---- wait
    async def _wait(self, request: Answer, send: Send) -> None:
        at = AT.get(str(request.get("at")))
        if at is None:
            await send({"done": True, "error": "--at is partner or pfs", "exit": EXIT_USAGE})
            return
        if at == Boundary.PARTNER and self.node.replica_count == 0:
            await send({"done": True, "error": "this mount has no partner: wait --at pfs", "exit": EXIT_USAGE})
            return
        timeout = request.get("timeout_s")
        path = str(request.get("path") or "")
        reason, lost_since_s = "", 0.0
        patience = trio.move_on_after(float("inf") if timeout is None else float(timeout))
        with self.node.foreground.awaited(), patience:
            while True:
                began_s = trio.current_time()
                reached, reason, progress = await self._reached(path, at)
                if reached:
                    await send({"done": True, "reached": True, "reason": "", "exit": 0})
                    return
                lost = self._lost(path)
                lost_since_s = (lost_since_s or began_s) if lost else 0.0
                if lost and began_s - lost_since_s >= LOST_S:
                    await send({"done": True, "reached": False, "reason": lost, "exit": EXIT_NOT_DURABLE})
                    return
                await send({"progress": progress})
                await pause(began_s)
        await send({"done": True, "reached": False, "reason": reason or "not reached in time", "exit": EXIT_TIMEOUT})

    async def _reached(self, path: str, at: Boundary) -> tuple[bool, str, Answer]:
        fid, inode = await self._resolve(path)
        if inode.kind != "d":
            stage = self.parts.attributes.stage(fid, inode)
            reasons = [
                control_explain.reason_of(self.parts, key, op) for key, op in self.node.catalogue.view.ops_of(fid)
            ]
            why = "; ".join([f"it is at '{stage.label}'", *reasons])
            return stage >= at, why, of_files(self.parts, [(b"", fid, inode)], at)
        checkpoint = await self.completeness.checkpoint(fid)
        below = list(self.completeness.walk(fid))
        progress = of_files(self.parts, below, at)
        if checkpoint is None:
            behind = next((n for n, f, i in below if self.parts.attributes.stage(f, i) < at), None)
            return behind is None, f"files below have not reached it, '{_text(behind or b'')}' for one", progress
        if checkpoint.missing:
            piece = checkpoint.missing[0]
            return False, control_explain.words_of(piece), progress
        done = checkpoint.restartable is not None and checkpoint.restartable >= at
        now = "no" if checkpoint.restartable is None else checkpoint.restartable.label
        return done, f"it is restartable at '{now}'", progress

    def _lost(self, path: str) -> str:
        """Why more waiting for a path, which was looked at a moment ago, does not help: the first file that no node and
        not the PFS has; "" for none. Who cannot tell which nodes live cannot tell that."""
        fid, view = ROOT_FID, self.node.catalogue.view
        for part in os.fsencode(path).split(b"/"):
            entry = view.lookup(fid, part) if part not in (b"", b".") else None
            fid = entry.fid if entry is not None else fid
        inode = view.inode(fid)
        if inode is None or self.node.is_cut_off:
            return ""
        files = self.completeness.walk(fid) if inode.kind == "d" else [(os.fsencode(path), fid, inode)]
        lost = (name for name, f, i in files if i.kind == "f" and self.parts.attributes.stage(f, i) == Boundary.LOST)
        name = next(lost, None)
        return "" if name is None else f"{quoted(name)} is lost: {control_explain.BRING_BACK}"

    # ---- latest
    async def _latest(self, request: Answer, send: Send) -> None:
        at = AT.get(str(request.get("at") or "returned"), Boundary.RETURNED)
        below = request.get("below")
        try:
            fid, _ = await self._resolve(str(request.get("dir") or ""))
            answer = await self._alive(send, lambda: self._newest(fid, at, None if below is None else int(below)))
        except NotFoundError as error:
            reason = f"{error} (for a first run, mkdir -p it)"
            await send({"done": True, "path": None, "certain": False, "reason": reason})
            return
        except CacheXError as error:
            await send({"done": True, "path": None, "certain": False, "reason": str(error)})
            return
        await send(answer)

    async def _newest(self, fid: int, at: Boundary, below: int | None) -> Answer:
        found = await self.completeness.newest_first(fid, self.parts.importer.ensure)
        return await control_explain.latest(self.completeness, fid, found, at, below, LATEST_PATIENCE_S)

    # ---- umount
    async def _umount(self, request: Answer, send: Send) -> None:
        await control_umount.Unmount(self.parts, self.ending, self.others).answer(request, send)

    async def _sources(self, request: Answer, send: Send) -> None:
        prefix = os.fsencode(str(request.get("path") or ""))
        files = [
            {"path": _text(path), "sources": dict(sources)}
            for path, sources in self.parts.reader.sources.items()
            if path.startswith(prefix)
        ]
        await send({"done": True, "files": files})


def _time(time_s: float) -> str | None:
    return rfc3339(time_s) if time_s else None
