"""Files that stay open: their published contents cannot land yet, and nobody's commit files are to wait for them.

Role: the kernel may be writing to a passed file until its last close, so its PUT waits for that. But a close of a
duplicate publishes, too, and every child that ends closes its duplicates: a log that a job keeps open would hold up
each later rename of its directory for as long as the job runs. Such a PUT is *parked*, so that commit files that do not
name it pass it. Used by ``Drainer``, and by ``Filesystem`` at each close.

Concurrency: ``run`` is a task that waits for the catalogue only.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec
import trio

from cachexfs.core.records import Op, OpKind
from cachexfs.core.transaction import Tx
from cachexfs.engine.files import Files
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError

OPEN = "open"  # as ``parked``
LOOK_S, PATIENCE_S = 0.5, 2.0


class StayOpen:
    """Parks what waits for a writer that has not closed its file, and takes that back at the close."""

    def __init__(self, node: Node, files: Files) -> None:
        self.node = node
        self.files = files

    async def run(self) -> None:
        """Until cancelled."""
        since_s: dict[bytes, float] = {}
        while True:
            await trio.sleep(LOOK_S)
            now_s, before_s, since_s = trio.current_time(), since_s, {}
            for vnode in list(self.files.passing.vnodes):
                for key, op in self.node.catalogue.view.ops_of(vnode.fid):
                    if op.kind != OpKind.PUT or op.cancelled or op.parked:
                        continue
                    since_s[key] = before_s.get(key, now_s)
                    if now_s - since_s[key] >= PATIENCE_S and self.files.passing.held_open(vnode):
                        with suppress(CacheXError):  # tried again at the next look
                            await self._note(key, OPEN)

    async def closing(self, fid: int) -> None:
        """A file is being closed, perhaps for good: commit files that come later wait for it again."""
        for key, op in list(self.node.catalogue.view.ops_of(fid)):
            if op.parked == OPEN:
                await self._note(key, "")

    async def _note(self, key: bytes, parked: str) -> None:
        def note(tx: Tx) -> None:
            op = tx.read(key)
            if isinstance(op, Op) and op.parked == ("" if parked else OPEN):
                tx.put(key, msgspec.structs.replace(op, parked=parked))

        await self.node.catalogue.mutate(note)
