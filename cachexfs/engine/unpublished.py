"""Bytes whose last close (or truncate(2)) has failed: nobody has the file open, the catalogue does not know of them.

Role: the application was told (EIO, ENOSPC), and may do nothing about it. The bytes stay staged and are shown here, as
``writing``; this publishes them once that works (the catalogue answers again, NVMe takes them), if the content that
they were written over is still the newest. Else they wait for the end of the mount, or the file's next writer. Used by
``Files``.

Concurrency: ``run`` is a task; it waits for the catalogue only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from cachexfs.engine.interfaces import ContentSource
from cachexfs.engine.node import Node
from cachexfs.engine.publishing import Publishing
from cachexfs.engine.vnode import Vnode
from cachexfs.errors import CacheXError, quoted

log = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_MAX_S = 0.25, 15.0


class Unpublished:
    """Tries again to publish what no close has published. ``drop``: forgets a vnode that nobody needs."""

    def __init__(
        self, node: Node, source: ContentSource, publishing: Publishing, drop: Callable[[Vnode], None]
    ) -> None:
        self.node = node
        self.source = source
        self.publishing = publishing
        self._drop = drop
        self._vnodes: dict[Vnode, None] = {}
        self._wake = trio.Event()

    def add(self, vnode: Vnode, error: BaseException) -> None:
        """The last close of a file has failed."""
        self._vnodes[vnode] = None
        self._tell(vnode, f"{error or type(error).__name__}; it is tried again")
        self._wake.set()

    def _tell(self, vnode: Vnode, why: str) -> None:
        text = f"{quoted(self.source.path(vnode.fid))} has bytes that could not be published when it was closed: {why}"
        self.node.errors[f"unpublished:{vnode.ino:x}"] = text
        log.error("%s", text)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake, delay_s = trio.Event(), RETRY_FIRST_S
            while self._vnodes:
                await trio.sleep(delay_s)
                delay_s = min(2 * delay_s, RETRY_MAX_S)
                for vnode in list(self._vnodes):
                    try:
                        if not await self._publish(vnode):
                            continue
                    except (CacheXError, OSError) as error:
                        log.debug("%x is not published yet: %s", vnode.fid, error)
                        continue
                    del self._vnodes[vnode]
                    self.node.errors.pop(f"unpublished:{vnode.ino:x}", None)
                    self._drop(vnode)

    async def _publish(self, vnode: Vnode) -> bool:
        """Whether nothing of it is left to be published here. Raises what stands in the way."""
        if vnode.writers or vnode.removed or not vnode.dirty:
            return True  # the next close does it, or there is nothing to do
        await self.node.catalogue.barrier()
        now = self.node.catalogue.view.generation(vnode.fid)
        if now is not None and now.gen != vnode.content.gen:
            self._tell(vnode, f"node {now.origin} has published another content since; these bytes stay as they are")
            return False
        await self.publishing.publish(vnode)
        return not vnode.dirty
