"""Retention: how many checkpoints the fast tier keeps once they are on the PFS (``keep_fast``).

Role: when a commit file has landed, the checkpoints beside its own are looked at; of those that are restartable at
``pfs``, all but the newest ``keep_fast`` leave this node's memory and NVMe. Each gives up its own copies, the claim
first, then the bytes. Files outside checkpoints stay until memory or NVMe is short.

Concurrency: one task; a directory is looked at again when the next commit file lands in it.
"""

from __future__ import annotations

import logging

import trio

from cachexfs.core.boundary import Boundary
from cachexfs.core.commitfiles import step_of
from cachexfs.core.order import parent_of
from cachexfs.core.records import ROOT_FID, Op, OpKind
from cachexfs.core.replica import Applied
from cachexfs.engine import candidates
from cachexfs.engine.completeness import Checkpoint, Completeness
from cachexfs.engine.hold import Keeper
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError

log = logging.getLogger(__name__)

SETTLE_S = 0.5  # the rename of a commit file and what follows it count as one


class Retention:
    """Gives up old checkpoints' fast copies."""

    def __init__(self, node: Node, keeper: Keeper, completeness: Completeness) -> None:
        self.node = node
        self.keeper = keeper
        self.completeness = completeness
        self._series: dict[bytes, None] = {}  # directories of checkpoints that may have one too many
        self._wake = trio.Event()

    def notice(self, changes: Applied) -> None:
        """Catalogue listener: a commit operation has landed."""
        for _, old, new in changes:
            if isinstance(old, Op) and new is None and old.commit and old.kind in (OpKind.PUT, OpKind.RENAME):
                landed = old.path2 if old.kind == OpKind.RENAME else old.path
                directory = parent_of(landed)
                self._series |= {directory: None, parent_of(directory): None}
                self._wake.set()

    async def run(self) -> None:
        """Follow what lands, until cancelled."""
        while True:
            await self._wake.wait()
            await trio.sleep(SETTLE_S)
            self._wake = trio.Event()
            series, self._series = self._series, {}
            for directory in series:
                try:
                    await self._look(directory)
                except CacheXError as error:
                    log.warning("old checkpoints below %r stay in the fast tier: %s", directory, error)

    async def _look(self, directory: bytes) -> None:
        view = self.node.catalogue.view
        fid = candidates.find(view, ROOT_FID, directory)
        if fid is None:
            return
        found = []
        for entry in list(view.children(fid).values()):
            if entry.kind == "d":
                checkpoint = await self.completeness.checkpoint(entry.fid)
                if checkpoint is not None and checkpoint.restartable == Boundary.PFS:
                    found.append(checkpoint)
        found.sort(key=_newest_first)
        for checkpoint in found[self.node.options.keep_fast :]:
            for _, child, _ in list(self.completeness.walk(checkpoint.fid)):
                await self.keeper.retire(child)


def _newest_first(checkpoint: Checkpoint) -> tuple[float, bytes]:
    step = step_of(checkpoint.path.rpartition(b"/")[2].decode(errors="surrogateescape"))
    return -(checkpoint.t_returned_s or 0.0) if step is None else -float(step), checkpoint.path
