"""Contents that the PFS has said it does not have: they are looked for again.

Role: a server that is down, or a client's cache, denies what is there. Nothing is claimed of it meanwhile
(``PfsCopy.missing``), it may hide a commit file, and then no reader ever asks again. So one live node does.

Concurrency: one task, one question at a time.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import trio

from cachexfs.core.records import Inode
from cachexfs.core.replica import Applied
from cachexfs.engine.content import Reader
from cachexfs.engine.node import Node
from cachexfs.engine.pfs_copies import DEADLINE_S
from cachexfs.errors import CacheXError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 15.0


class Denied:
    """Follows the catalogue, looks at the PFS."""

    def __init__(self, node: Node, reader: Reader) -> None:
        self.node = node
        self.reader = reader
        self._missing: dict[int, None] = {}

    def load(self) -> None:
        """Take in the state when the engine starts."""
        for fid, inode in self.node.catalogue.view.inodes():
            self._look(fid, inode)

    def notice(self, changes: Applied) -> None:
        """Catalogue listener."""
        for key, old, new in changes:
            if isinstance(old or new, Inode):
                self._look(int(key[2:], 16), new if isinstance(new, Inode) else None)

    def _look(self, fid: int, inode: Inode | None) -> None:
        if inode is not None and inode.pfs is not None and inode.pfs.missing:
            self._missing[fid] = None
        else:
            self._missing.pop(fid, None)

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await trio.sleep(LOOK_EVERY_S)
            view, node = self.node.catalogue.view, self.node
            if node.name != min((n for n in view.nodes if node.live(n)), default=node.name):
                continue
            for fid in list(self._missing):
                try:
                    await self._ask(fid)
                except (CacheXError, OSError, trio.TooSlowError) as error:
                    log.debug("%x is not on the PFS: %s", fid, error or "no answer")

    async def _ask(self, fid: int) -> None:
        """Read a byte of the very file that landed; it is claimed again."""
        node, copies, inode = self.node, self.reader.copies, self.node.catalogue.view.inode(fid)
        expected = copies.expected(fid, inode) if inode is not None else None
        if inode is None or expected is None or node.pfs is None:
            return
        for path in self.reader.pfs_paths(fid):
            with suppress(FileNotFoundError):
                await node.pfs.read(path, 0, 1, DEADLINE_S, expected)
                await copies.note_found(fid, inode.gen)
                return
