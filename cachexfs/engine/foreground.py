"""What applications do now: background work begins in their pauses.

Role: the front end and ``Passing`` say when applications are busy with this mount; the drain waits for a pause before
it takes processors from them. It never waits long: after ``WAIT_S_MAX`` without one it has as much time to itself, and
not at all while somebody waits for it.

Concurrency: none of its own; a value and a sleep in the caller's task.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

REQUEST_S = 0.004  # longer than between two requests of an application that does nothing else
WAIT_S_MAX = 1.0


class Foreground:
    """Whether applications are busy with this mount, and who is not to wait for them."""

    def __init__(self) -> None:
        self._busy_until_s = 0.0
        self._free_until_s = 0.0
        self._awaited = 0

    def busy(self, for_s: float = REQUEST_S) -> None:
        """An application is changing something; the next request may come within ``for_s``."""
        self._busy_until_s = max(self._busy_until_s, trio.current_time() + for_s)

    def rest(self) -> None:
        """What ``busy`` announced for longer is over."""
        self._busy_until_s = min(self._busy_until_s, trio.current_time() + REQUEST_S)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """While an application waits for background work, that waits for nobody."""
        self._awaited += 1
        try:
            yield
        finally:
            self._awaited -= 1

    async def pause(self) -> None:
        """Return in the next pause of the applications, or when it was waited for long enough."""
        start_s = now_s = trio.current_time()
        while not self._awaited and self._free_until_s <= now_s < self._busy_until_s:
            if now_s - start_s >= WAIT_S_MAX:
                self._free_until_s = now_s + WAIT_S_MAX
                return
            await trio.sleep(min(self._busy_until_s - now_s, REQUEST_S))
            now_s = trio.current_time()
