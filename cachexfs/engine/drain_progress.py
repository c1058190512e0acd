"""How far the copies to the PFS have got: the bytes of each one that is under way, and the rate of late.

Role: numbers for ``status``, ``wait``, ``umount``, ``explain`` and ``eta.pfs``; nothing is decided by them.
``DrainFiles`` tells of each copy. Concurrency: nothing here waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from cachexfs.core.sizes import format_size

WINDOW_S = 10.0  # a paced or slow copy tells of itself every second
SPAN_S_MIN = 1.0
IS_BEING_COPIED = "is being copied"


class Throughput:
    """Bytes a second, over the last ``WINDOW_S`` seconds or since something began to move in them."""

    def __init__(self) -> None:
        self._moved: deque[tuple[float, int]] = deque()  # (when, bytes), one for each second at most
        self._began_s = 0.0

    def moved(self, count: int) -> None:
        """So many bytes have moved by now."""
        now_s = trio.current_time()
        if not self._forget(now_s):
            self._began_s = now_s
        if self._moved and now_s - self._moved[-1][0] < 1.0:
            self._moved[-1] = (self._moved[-1][0], self._moved[-1][1] + count)
        else:
            self._moved.append((now_s, count))

    def begin(self) -> None:
        """Something begins to move: the time until its first bytes counts."""
        if not self._forget(trio.current_time()):
            self._began_s = trio.current_time()
            self._moved.append((self._began_s, 0))

    def rate(self) -> float:
        """Bytes a second of late; 0 when nothing has moved."""
        now_s = trio.current_time()
        self._forget(now_s)
        span_s = min(max(now_s - self._began_s, SPAN_S_MIN), WINDOW_S)
        return sum(count for _, count in self._moved) / span_s

    def _forget(self, now_s: float) -> bool:
        """Leave out what is too old; whether something is left."""
        while self._moved and now_s - self._moved[0][0] > WINDOW_S:
            self._moved.popleft()
        return bool(self._moved)


@dataclass(slots=True)
class UnderWay:
    """One copy: bytes that are there, of how many, and when it began (trio's clock)."""

    size: int
    began_s: float
    copied: int = 0

    @property
    def left_s(self) -> float | None:
        """What is left at the pace so far; None while that is not known."""
        took_s = trio.current_time() - self.began_s
        if not 0 < self.copied < self.size or took_s <= 0:
            return None
        return (self.size - self.copied) * took_s / self.copied


class Copies:
    """The copies that are under way, by hidden name."""

    def __init__(self) -> None:
        self.throughput = Throughput()
        self._under_way: dict[str, UnderWay] = {}

    @contextmanager
    def copying(self, hidden: str, size: int) -> Iterator[Callable[[int], None]]:
        """While it is copied. Gives what takes the bytes that are there; at its end all of them are."""
        mine = self._under_way[hidden] = UnderWay(size, trio.current_time())
        self.throughput.begin()

        def on_progress(copied: int) -> None:
            if copied > mine.copied:  # a file that is read back counts once
                self.throughput.moved(copied - mine.copied)
                mine.copied = copied

        try:
            yield on_progress
            on_progress(size)
        finally:
            if self._under_way.get(hidden) is mine:
                del self._under_way[hidden]

    def words(self, hidden: str) -> str:
        """``is being copied: 4.2 GiB of 10.0 GiB are there``."""
        mine = self._under_way.get(hidden)
        if mine is None or not mine.copied:
            return IS_BEING_COPIED
        return f"{IS_BEING_COPIED}: {format_size(mine.copied)} of {format_size(mine.size)} are there"

    def get(self, hidden: str) -> UnderWay | None:
        """One of them."""
        return self._under_way.get(hidden)
