"""What the mount has measured: ``eta.*``, the route, and a record of each checkpoint for the model.

Role: daemon layer, between the engine and ``cachexfs.model`` (which do not know each other). Watches the catalogue:
each file of this node that reaches a boundary teaches the estimator; each checkpoint whose commit file reaches the PFS
becomes one line of ``records`` (``cachexfs fit`` reads them). What files taught is kept in a file beside it, of each
kind at most one a second, so that a restart knows what the mount knew.

Concurrency: ``notice`` and ``choose`` are synchronous in the trio thread; files are read and written by a thread.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from pathlib import Path

import trio

from cachexfs.core.commitfiles import is_commit_name, is_pointer_name
from cachexfs.core.records import Inode
from cachexfs.core.replica import Applied
from cachexfs.core.routes import DIRECT, LATE, PARTNER
from cachexfs.engine.completeness import Completeness
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError
from cachexfs.model import records
from cachexfs.model.online import Online
from cachexfs.model.records import BoundaryRecord

log = logging.getLogger(__name__)

RECORDS_BYTES_MAX = 4 << 20
FILES_BYTES_MAX = 128 << 10
QUEUE_MAX = 256
KEEP_EVERY_S = 1.0
TYPICAL_COUNT = 32  # recent files whose median size stands for the next ones
BEHIND = 2.0  # over the 95% bound: a file that has waited so long says that the PFS is slower than it was
INTERVAL_S, FAILURES_PER_S, KAPPA = 600.0, 1e-5, 0.1  # of ``advise``; without a stall the first two cancel out


class Forecast:
    """Estimates of this mount, learnt from what it has done."""

    def __init__(self, node: Node, completeness: Completeness, path: Path) -> None:
        self.node = node
        self.completeness = completeness
        self.why = "nothing observed yet"  # the last choice, in words
        self._path = path
        self._files_path = path.with_suffix(".files")
        self._online = Online()
        self._waiting: dict[int, tuple[float, int]] = {}  # own files on their way to the PFS -> (since, bytes)
        self._sizes: deque[int] = deque(maxlen=TYPICAL_COUNT)
        self._kept_s: dict[tuple[str, bool], float] = {}  # of what kind of observation -> when one was written
        self._synced: dict[int, None] = {}  # files whose fsync has told, and whose landing is to be seen yet
        self._send, self._receive = trio.open_memory_channel[int | BoundaryRecord](QUEUE_MAX)

    def eta_s(
        self, boundary: str, size: int, route: str = PARTNER, waited_s: float = 0.0
    ) -> tuple[float, float] | None:
        """(median, 95% bound) in s until ``size`` bytes are at ``partner`` or ``pfs``, ``waited_s`` after their
        publication; None: unknown.

        On the direct route the first boundary that is ``partner`` or better is the PFS.
        """
        alone = self.node.replica_count == 0
        leg = "direct" if alone or route == DIRECT else "partner" if boundary == PARTNER else "drain"
        return self._online.eta_s(leg, float(max(size, 1)), waited_s)

    def choose(self) -> str:
        """The route of what begins now (``route=auto``)."""
        node, now_s = self.node, self.node.clock.now_s()
        if node.pfs is None or node.pfs.state != "ok":
            self.why = "the PFS does not answer"
            return PARTNER
        if self._is_behind(now_s):
            self.why = "what waits for the PFS has waited longer than usual"
            return PARTNER
        size = statistics.median(self._sizes) if self._sizes else 1 << 20
        choice = self._online.choose(
            float(size), now=now_s, interval_s=INTERVAL_S, failures_per_s=FAILURES_PER_S, kappa=KAPPA
        )
        self.why = choice.why
        return choice.route

    def _is_behind(self, now_s: float) -> bool:
        """Whether the file that has waited longest for the PFS is overdue: what is under way counts, too."""
        oldest = next(iter(self._waiting.values()), None)
        if oldest is None:
            return False
        usual = self._online.eta_s("direct", float(oldest[1]))
        return usual is not None and now_s - oldest[0] > BEHIND * usual[1]

    def note_synced(self, fid: int, route: str, size: int, seconds: float) -> None:
        """An fsync of a new file has waited so long for its boundary, before the publication."""
        took = (max(seconds, 1e-6),) * 2
        self._synced[fid] = None
        while len(self._synced) > QUEUE_MAX:
            del self._synced[next(iter(self._synced))]
        self._observe(
            BoundaryRecord(
                self.node.clock.now_s() - seconds, "", 1, float(size), route, self.node.name,
                partner_s=took if route == PARTNER else None, pfs_s=took if route == DIRECT else None,
            )
        )  # fmt: skip

    def note_late(self, size: int, waited_s: float) -> None:
        """The PFS has not taken so many bytes in so many seconds, and they went to the partner."""
        now_s = self.node.clock.now_s()
        self._observe(
            BoundaryRecord(
                now_s, "", 1, float(size), DIRECT, self.node.name, failed=True, waited_s=max(waited_s, 1e-3)
            )
        )  # fmt: skip

    def notice(self, changes: Applied) -> None:
        """Catalogue listener."""
        for key, old, new in changes:
            if not key.startswith(b"i/"):
                continue
            fid = int(key[2:], 16)
            if not isinstance(new, Inode) or new.origin != self.node.name:
                self._waiting.pop(fid, None)
                continue
            names = self.node.catalogue.view.names_of(fid)
            is_commit = bool(names) and is_commit_name(names[0][1])  # it waits for others
            if new.size and not new.t_pfs_s and not is_commit:
                if not isinstance(old, Inode) or old.gen != new.gen:
                    self._waiting.pop(fid, None)
                    self._waiting[fid] = (new.t_returned_s, new.size)
                continue
            self._waiting.pop(fid, None)
            landed = isinstance(old, Inode) and old.gen == new.gen and new.t_pfs_s > 0 and old.t_pfs_s <= 0
            if not landed or not new.size:
                continue
            if not is_commit:
                self._learn(new, synced=fid in self._synced)
                self._synced.pop(fid, None)
            elif not is_pointer_name(names[0][1]):
                self._enqueue(names[0][0])

    def _enqueue(self, what: int | BoundaryRecord) -> None:
        try:
            self._send.send_nowait(what)
        except trio.WouldBlock:
            log.debug("a checkpoint goes unrecorded: too many at once")

    def _learn(self, inode: Inode, *, synced: bool) -> None:
        def since(time_s: float) -> tuple[float, float] | None:
            seconds = max(time_s - inode.t_returned_s, 0.0)
            return (seconds, seconds) if time_s else None

        self._sizes.append(inode.size)
        route = self._route([inode])
        if route == DIRECT and synced:
            return  # what is left after the fsync is a rename
        self._observe(
            BoundaryRecord(
                inode.t_returned_s, "", 1, float(inode.size), route, self.node.name, (0.0, 0.0),
                since(inode.t_partner_s) if route == PARTNER else None, since(inode.t_pfs_s),
            )
        )  # fmt: skip

    def _observe(self, found: BoundaryRecord) -> None:
        try:
            self._online.observe(found)
        except CacheXError as error:
            log.debug("not learnt: %s", error)
        now_s, kind = self.node.clock.now_s(), (found.route, found.pfs_s is None)
        if now_s - self._kept_s.get(kind, 0.0) >= KEEP_EVERY_S or found.failed:
            self._kept_s[kind] = now_s
            self._enqueue(found)

    def _route(self, inodes: list[Inode]) -> str:
        """The route of a checkpoint, as the model has it: what was late at the partner says nothing of that route."""
        if self.node.replica_count == 0:
            return DIRECT
        return DIRECT if {inode.route for inode in inodes} <= {DIRECT, LATE} else PARTNER

    async def run(self) -> None:
        """Recall what was learnt; write a record of each checkpoint that has reached the PFS, until cancelled."""
        try:
            known, _ = await trio.to_thread.run_sync(records.scan, self._files_path)
            self._online.warm(known)
            self._sizes.extend(round(record.bytes_per_writer) for record in known if not record.failed)
        except (CacheXError, OSError) as error:
            log.warning("what was learnt before is not known: %s", error)
        async for what in self._receive:
            try:
                if isinstance(what, BoundaryRecord):
                    await trio.to_thread.run_sync(records.append, self._files_path, what, FILES_BYTES_MAX)
                    continue
                found = await self._record(what)
                if found is not None:
                    await trio.to_thread.run_sync(records.append, self._path, found, RECORDS_BYTES_MAX)
            except (CacheXError, OSError) as error:
                log.warning("a checkpoint could not be recorded: %s", error)

    async def _record(self, fid: int) -> BoundaryRecord | None:
        checkpoint = await self.completeness.checkpoint(fid)
        if checkpoint is None or checkpoint.missing:
            return None
        members = [i for _, _, i in self.completeness.walk(fid) if i.size and i.t_returned_s and i.origin]
        if not members:
            return None
        route = self._route(members)
        start_s = min(i.t_returned_s for i in members)

        def spread(times: list[float]) -> tuple[float, float] | None:
            waits = [max(time_s - start_s, 0.0) for time_s in times if time_s]
            return (max(waits), statistics.median(waits)) if len(waits) == len(members) else None

        return BoundaryRecord(
            start_s, (checkpoint.path or b".").decode(errors="backslashreplace"), len(members),
            sum(i.size for i in members) / len(members), route, self.node.name,
            spread([i.t_returned_s for i in members]),
            spread([i.t_partner_s if i.route == PARTNER else 0.0 for i in members]),
            spread([i.t_pfs_s for i in members]),
        )  # fmt: skip
