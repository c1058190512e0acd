"""What the mount has measured: ``eta.*``, and a record of each checkpoint for the model.

Role: daemon layer, between the engine and ``cachexfs.model`` (which do not know each other). Watches the catalogue:
each file of this node that reaches a boundary teaches the estimator; each checkpoint whose commit file reaches the PFS
becomes one line of ``records`` (``cachexfs fit`` reads them).

Concurrency: ``notice`` is synchronous in the trio thread; lines are written by a thread.
"""

from __future__ import annotations

import logging
import statistics
from pathlib import Path

import trio

from cachexfs.core.commitfiles import is_commit_name, is_pointer_name
from cachexfs.core.records import Inode
from cachexfs.core.replica import Applied
from cachexfs.engine.completeness import Completeness
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError
from cachexfs.model import records
from cachexfs.model.online import Online
from cachexfs.model.records import BoundaryRecord

log = logging.getLogger(__name__)

RECORDS_BYTES_MAX = 4 << 20
QUEUE_MAX = 256


class Forecast:
    """Estimates of this mount, learnt from what it has done."""

    def __init__(self, node: Node, completeness: Completeness, path: Path) -> None:
        self.node = node
        self.completeness = completeness
        self._path = path
        self._online = Online()
        self._send, self._receive = trio.open_memory_channel[int](QUEUE_MAX)

    @property
    def _route(self) -> str:
        return "partner" if self.node.replica_count else "direct"

    def eta_s(self, boundary: str, size: int) -> tuple[float, float] | None:
        """(median, 95% bound) in s from the publication of ``size`` bytes to ``partner`` or ``pfs``; None: unknown."""
        leg = "partner" if boundary == "partner" else "drain" if self.node.replica_count else "direct"
        return self._online.eta_s(leg, float(max(size, 1)))

    def notice(self, changes: Applied) -> None:
        """Catalogue listener."""
        for key, old, new in changes:
            if not isinstance(new, Inode) or not isinstance(old, Inode) or new.origin != self.node.name:
                continue
            if old.gen != new.gen or new.t_pfs_s <= 0 or old.t_pfs_s > 0 or not new.size:
                continue
            self._learn(new)
            fid = int(key[2:], 16)
            names = self.node.catalogue.view.names_of(fid)
            if names and is_commit_name(names[0][1]) and not is_pointer_name(names[0][1]):
                try:
                    self._send.send_nowait(names[0][0])
                except trio.WouldBlock:
                    log.debug("a checkpoint goes unrecorded: too many at once")

    def _learn(self, inode: Inode) -> None:
        def since(time_s: float) -> tuple[float, float] | None:
            seconds = max(time_s - inode.t_returned_s, 0.0)
            return (seconds, seconds) if time_s else None

        try:
            self._online.observe(
                BoundaryRecord(
                    inode.t_returned_s,
                    "",
                    1,
                    float(inode.size),
                    self._route,
                    self.node.name,
                    (0.0, 0.0),
                    since(inode.t_partner_s),
                    since(inode.t_pfs_s),
                )
            )
        except CacheXError as error:
            log.debug("not learnt: %s", error)

    async def run(self) -> None:
        """Write a record of each checkpoint that has reached the PFS, until cancelled."""
        async for fid in self._receive:
            try:
                found = await self._record(fid)
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
        start_s = min(i.t_returned_s for i in members)

        def spread(times: list[float]) -> tuple[float, float] | None:
            waits = [max(time_s - start_s, 0.0) for time_s in times if time_s]
            return (max(waits), statistics.median(waits)) if len(waits) == len(members) else None

        return BoundaryRecord(
            start_s, (checkpoint.path or b".").decode(errors="backslashreplace"), len(members),
            sum(i.size for i in members) / len(members), self._route, self.node.name,
            spread([i.t_returned_s for i in members]), spread([i.t_partner_s for i in members]),
            spread([i.t_pfs_s for i in members]),
        )  # fmt: skip
