"""Turns: so many copies to the PFS at a time, those that became visible first before all others.

Role: who waits for a turn goes on in the order of visibility, whenever it came. Used by ``drain``. Concurrency: any
number of tasks; a turn is given back by the task that has taken it.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from cachexfs.core.order import Seq


class OldestFirst:
    """So many at a time; who waits goes on in the order of visibility."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[Seq, int, trio.Event]] = []
        self._number = 0

    @asynccontextmanager
    async def slot(self, seq: Seq) -> AsyncIterator[None]:
        """The body has a turn."""
        await self._take(seq)
        try:
            yield
        finally:
            self._give()

    async def _take(self, seq: Seq) -> None:
        if self._free:
            self._free -= 1
            return
        self._number += 1
        mine = (seq, self._number, trio.Event())
        heapq.heappush(self._waiting, mine)
        try:
            await mine[2].wait()
        except trio.Cancelled:
            if mine[2].is_set():
                self._give()
            else:
                self._waiting.remove(mine)
                heapq.heapify(self._waiting)
            raise

    def _give(self) -> None:
        if self._waiting:
            heapq.heappop(self._waiting)[2].set()
        else:
            self._free += 1
