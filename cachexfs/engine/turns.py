"""Turns: which operations have a task, the oldest of each kind first, and which rest after a failure.

Role: ``Turns`` holds what waits or rests without a task: as many operations may as there are files, and a task takes
ten times the memory. ``OldestFirst`` limits copies to the PFS, also of those who have a task of their own. Used by
``drain``, which decides what can make progress. Concurrency: the trio thread; one task takes turns, any number give
them back.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from cachexfs.core.order import Seq
from cachexfs.engine.drain_errors import Attempts

CHANGES_MAX = 16
OUTAGE_LOOK_S = 0.5  # between two that are tried while the PFS does not answer
RETRIES_PER_S = 50.0  # where thousands are refused, each is tried less often


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


@dataclass(slots=True)
class State:
    """One operation of this node: whether its file is ready under the hidden name, and what it does now."""

    ready: bool = False
    running: bool = False
    resting: bool = False
    lane: Lane | None = None  # where its task counts
    attempts: Attempts = field(default_factory=Attempts)


class Lane:
    """Work of one kind: keys that wait for a task, each once, and how many tasks there are, of at most ``limit``."""

    def __init__(self, limit: int) -> None:
        self.running = 0
        self._limit = limit
        self._heap: list[Seq] = []
        self._waiting: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_free(self) -> bool:
        """Whether something waits, and may begin."""
        return bool(self._waiting) and self.running < self._limit

    def add(self, seq: Seq) -> None:
        """A key waits, if it does not yet."""
        if seq[1] not in self._waiting:
            self._waiting.add(seq[1])
            heapq.heappush(self._heap, seq)

    def discard(self, key: bytes) -> None:
        """A key does not wait here."""
        self._waiting.discard(key)

    def pop(self) -> bytes:
        """The oldest waits no more. Raises ``IndexError``."""
        while (key := heapq.heappop(self._heap)[1]) not in self._waiting:
            pass
        self._waiting.discard(key)
        return key


class Turns:
    """Who begins. ``is_away``: whether the PFS does not answer; then one operation is tried now and then."""

    def __init__(self, copies: int, is_away: Callable[[], bool]) -> None:
        self.drops = Lane(CHANGES_MAX)  # what need not land: most of it asks nothing of the PFS
        self.changes = Lane(CHANGES_MAX)
        self.copies = Lane(copies)
        self._lanes = (self.drops, self.changes, self.copies)
        self._states: dict[bytes, State] = {}
        self._rests: list[tuple[float, bytes]] = []  # heap of (until, by trio's clock; key)
        self._is_away, self._tried_s = is_away, float("-inf")
        self._wake, self._sooner = trio.Event(), trio.Event()

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._lanes))

    def state(self, key: bytes, *, ready: bool) -> State:
        """What is known of an operation; ``ready``: of a new one."""
        return self._states.setdefault(key, State(ready))

    def is_ready(self, key: bytes) -> bool:
        """Whether this node has made the file of an operation ready."""
        return key in self._states and self._states[key].ready

    def wait(self, seq: Seq, wanted: Lane | None) -> None:
        """An operation waits in this lane, and in no other."""
        for lane in self._lanes:
            if lane is not wanted:
                lane.discard(seq[1])
        if wanted is not None:
            wanted.add(seq)
            self._wake.set()

    def forget(self, key: bytes) -> None:
        """An operation is over."""
        self._states.pop(key, None)
        for lane in self._lanes:
            lane.discard(key)

    async def some(self) -> None:
        """Return when something may begin. Nobody says that the PFS answers again: that is looked for."""
        while not any(map(self._may_begin, self._lanes)):
            self._wake = trio.Event()
            looks = self._is_away() and any(lane.is_free for lane in self._lanes)
            with trio.move_on_after(OUTAGE_LOOK_S if looks else float("inf")):
                await self._wake.wait()

    def take(self) -> Iterator[tuple[bytes, State]]:
        """What begins now."""
        for lane in self._lanes:
            while self._may_begin(lane):
                key = lane.pop()
                self._tried_s = trio.current_time() if lane is not self.drops else self._tried_s
                state = self._states[key]
                state.running = True
                self.move(state, lane)
                yield key, state

    def _may_begin(self, lane: Lane) -> bool:
        waited_s = trio.current_time() - self._tried_s
        return lane.is_free and (lane is self.drops or not self._is_away() or waited_s >= OUTAGE_LOOK_S)

    def move(self, state: State, lane: Lane | None) -> None:
        """A task goes on in another lane; None: it ends. Another one may begin."""
        if state.lane is not None:
            state.lane.running -= 1
        if lane is not None:
            lane.running += 1
        state.lane, state.running = lane, lane is not None
        self._wake.set()

    # ---- rest
    def rest(self, key: bytes) -> None:
        """An operation has failed, and is left alone for a while."""
        state = self._states.get(key)
        if state is not None:
            state.resting = True
            rest_s = max(state.attempts.delay_s, len(self._rests) / RETRIES_PER_S)
            heapq.heappush(self._rests, (trio.current_time() + rest_s, key))
            self._sooner.set()

    async def rested(self) -> list[bytes]:
        """Wait until some have rested; which."""
        while not self._rests or self._rests[0][0] > trio.current_time():
            self._sooner = trio.Event()
            with trio.move_on_at(self._rests[0][0] if self._rests else float("inf")):
                await self._sooner.wait()
        found = []
        while self._rests and self._rests[0][0] <= trio.current_time():
            key = heapq.heappop(self._rests)[1]
            if key in self._states:
                self._states[key].resting = False
                found.append(key)
        return found
