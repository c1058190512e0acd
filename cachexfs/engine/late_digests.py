"""Digests that a close did not wait for: they are told as soon as they are known.

Role: hashing is a part of the time of writing by the handler, and nobody needs it before the bytes leave this node.
``Publishing`` adds a content that it has published without digests; replication begins when it sees them, the copy to
the PFS waits for them here. What the daemon still owed when it died, the next one makes up for (``recover``). Passed
files are not here: their bytes may change until the last of their writers has gone.

Concurrency: one task, one content after the other; the hashing itself is in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from cachexfs.core.records import Generation
from cachexfs.engine.vnode import Vnode
from cachexfs.errors import CacheXError, CatalogueUnavailableError

log = logging.getLogger(__name__)

RETRY_S = 0.5  # of a catalogue without a majority


class LateDigests:
    """The contents whose digests are owed. ``tell``: finds and tells those of one; raises ``OSError``."""

    def __init__(self, tell: Callable[[Vnode, Generation], Awaitable[None]]) -> None:
        self._tell = tell
        self._owed: dict[int, tuple[Vnode, Generation]] = {}
        self._added, self._paid = trio.Event(), trio.Event()

    def add(self, vnode: Vnode, content: Generation) -> None:
        """A content has been published without digests, in place of an earlier one of that file."""
        self._owed[vnode.fid] = vnode, content
        self._added.set()

    async def wait(self, fid: int) -> None:
        """Return once none are owed of a file."""
        while fid in self._owed:
            await self._paid.wait()

    async def run(self) -> None:
        """Pay what is owed, until cancelled."""
        while True:
            await self._added.wait()
            self._added = trio.Event()
            while self._owed:
                fid, (vnode, content) = next(iter(self._owed.items()))
                try:
                    await self._tell(vnode, content)
                except CatalogueUnavailableError:
                    await trio.sleep(RETRY_S)
                    continue
                except (CacheXError, OSError) as error:  # it was removed meanwhile; or cut: who reads it finds out
                    log.debug("no digests of %x: %s", fid, error)
                if self._owed.get(fid, (None, None))[1] is content:
                    del self._owed[fid]
                paid, self._paid = self._paid, trio.Event()
                paid.set()
