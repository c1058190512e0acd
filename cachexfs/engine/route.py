"""The direct route: contents that go to the PFS without a copy on a partner, and what becomes of them when it is late.

Role: a content on the route ``direct`` has as long as ``patience_s`` to reach the PFS. When a drain fails, the PFS
does not answer or the time is up, it goes to the partner after all: late protection beats none. That is recorded
(``LATE``), so every node and the estimates know. What is chosen, and when, is in ``core.routes`` and ``Forecast``.

Concurrency: ``note`` is synchronous; one task waits for deadlines; callers of ``directly`` wait for themselves.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
from collections.abc import Awaitable, Callable, Iterator

import trio

from cachexfs.core import publication
from cachexfs.core.records import Inode
from cachexfs.core.routes import DIRECT, LATE
from cachexfs.engine.node import Node
from cachexfs.engine.vnode import Vnode, route_of
from cachexfs.errors import CacheXError

log = logging.getLogger(__name__)

PATIENCE_MIN_S = 2.0
MARGIN = 3.0  # over the bound that 95% of the partner's copies keep
SLOWEST_RATE = 100e6  # bytes/s that a PFS has to take while nothing is known of the partner
POLL_S = 0.25
AT_ONCE_MAX = 64
DRAIN_ERROR = "drain: "


class Router:
    """Watches over contents on the direct route."""

    def __init__(self, node: Node) -> None:
        #: bytes -> (median, 95% bound) s that the partner would take, or None
        self.partner_s: Callable[[int], tuple[float, float] | None] = lambda size: None
        #: told of a content of so many bytes that the PFS had not taken after so many s
        self.on_late: Callable[[int, float], None] = lambda size, waited_s: None
        #: told of a new file's first fsync: file id, route, bytes, s
        self.on_synced: Callable[[int, str, int, float], None] = lambda fid, route, size, seconds: None
        self.node = node
        self._waiting: dict[int, tuple[int, int, float]] = {}  # file id -> generation, bytes, since when
        self._bytes = 0
        self._due: list[tuple[float, int, int]] = []  # heap of (deadline, file id, generation)
        self._scopes: dict[int, set[trio.CancelScope]] = {}  # those who wait in ``directly``
        self._wake = trio.Event()

    def patience_s(self, size: int) -> float:
        """How long the PFS may take for ``size`` bytes more than those that already wait for it."""
        known = self.partner_s(self._bytes + size)
        if known is None:
            return self.node.options.fsync_timeout_s / 3 + (self._bytes + size) / SLOWEST_RATE
        return max(PATIENCE_MIN_S, MARGIN * known[1])

    # ---- published contents
    def note(self, fid: int, inode: Inode | None) -> None:
        """A file's record has changed."""
        waits = (
            inode is not None and inode.route == DIRECT and inode.origin == self.node.name and inode.size > 0
            and self.node.replica_count > 0 and (inode.pfs is None or inode.pfs.gen != inode.gen)
        )  # fmt: skip
        before = self._waiting.get(fid)
        if before is not None and (not waits or inode is None or before[0] != inode.gen):
            del self._waiting[fid]
            self._bytes -= before[1]
            before = None
        if not waits or inode is None:
            return
        now_s = trio.current_time()
        if before is None:
            deadline_s = now_s + self.patience_s(inode.size)
            self._waiting[fid] = (inode.gen, inode.size, now_s)
            self._bytes += inode.size
        elif inode.error.startswith(DRAIN_ERROR):
            deadline_s = now_s
        else:
            return
        heapq.heappush(self._due, (deadline_s, fid, inode.gen))
        self._wake.set()

    async def run(self) -> None:
        """Send to the partner what the PFS does not take, until cancelled."""
        for fid, inode in self.node.catalogue.view.inodes():
            self.note(fid, inode)
        while True:
            if not self._due:
                await self._wake.wait()
                self._wake = trio.Event()
            async with trio.open_nursery() as nursery:
                for fid, gen in self._overdue():
                    nursery.start_soon(self._late, fid, gen)
            with trio.move_on_after(POLL_S):
                await self._wake.wait()
                self._wake = trio.Event()

    def _overdue(self) -> list[tuple[int, int]]:
        if not self.node.partners():
            return []  # nowhere to go: what is due stays due
        now_s = trio.current_time()
        found: list[tuple[int, int]] = []
        down = self.node.pfs is None or self.node.pfs.state != "ok"
        while self._due and len(found) < AT_ONCE_MAX and (down or self._due[0][0] <= now_s):
            _, fid, gen = heapq.heappop(self._due)
            if self._waiting.get(fid, (-1,))[0] == gen:
                found.append((fid, gen))
        return list(dict.fromkeys(found))

    async def _late(self, fid: int, gen: int) -> None:
        _, size, since_s = self._waiting.get(fid, (0, 0, trio.current_time()))
        try:
            await self._fall_back(fid, gen, size, trio.current_time() - since_s)
        except CacheXError as error:
            log.debug("%x stays on the direct route for now: %s", fid, error)
            heapq.heappush(self._due, (trio.current_time() + POLL_S, fid, gen))

    async def _fall_back(self, fid: int, gen: int, size: int, waited_s: float) -> None:
        ctx = self.node.ctx()
        await self.node.catalogue.mutate(lambda tx: publication.fall_back(tx, ctx, fid, gen))
        log.warning("%x goes to the partner after all: %.1f s were not enough for the PFS", fid, waited_s)
        self.on_late(size, waited_s)
        for scope in self._scopes.get(fid, ()):
            scope.cancel()

    # ---- those who wait for it
    def is_direct(self, vnode: Vnode) -> bool:
        """Whether a file's newest bytes take the direct route."""
        return route_of(self.node.catalogue.view.inode(vnode.fid), vnode) == DIRECT

    @contextlib.contextmanager
    def measured(self, vnode: Vnode, route: str) -> Iterator[None]:
        """The body is an fsync; a new file's first one tells how long all of its bytes take."""
        new, began_s = vnode.dirty and not vnode.content.size and not vnode.measured, trio.current_time()
        yield
        if new and vnode.dirty and vnode.size:
            vnode.measured = True
            self.on_synced(vnode.fid, route, vnode.size, trio.current_time() - began_s)

    async def directly(self, fid: int, vnode: Vnode | None, reach: Callable[[], Awaitable[None]]) -> bool:
        """Wait for the PFS with ``reach``; False when the content goes to the partner after all.

        ``vnode``: its unpublished bytes count. Raises what ``reach`` raises when there is no partner either.
        """
        inode = self.node.catalogue.view.inode(fid)
        size = vnode.size if vnode is not None else inode.size if inode is not None else 0
        began_s, limit_s = trio.current_time(), self.node.options.fsync_timeout_s / 2
        has_partner = bool(self.node.partners())
        patience_s = min(self.patience_s(size), limit_s) if has_partner else float("inf")
        scopes = self._scopes.setdefault(fid, set())
        with trio.CancelScope(deadline=began_s + patience_s) as scope:
            scopes.add(scope)
            try:
                with contextlib.nullcontext() if vnode is None else self.measured(vnode, DIRECT):
                    await reach()
                return True
            except (CacheXError, OSError, trio.TooSlowError) as error:
                if not has_partner:
                    raise
                log.warning("%x: the PFS does not take it: %s", fid, error or type(error).__name__)
            finally:
                scopes.discard(scope)
                if not scopes:
                    self._scopes.pop(fid, None)
        if vnode is not None and vnode.dirty:
            vnode.route = LATE
        inode = self.node.catalogue.view.inode(fid)
        if inode is not None and inode.route != LATE:
            await self._fall_back(fid, inode.gen, size, trio.current_time() - began_s)
        return False
