"""Since when etcd is away, and when patience ends.

Role: adaptor; shared by the parts of the etcd catalogue. Two things can be amiss: exchanges fail, or they succeed and
the watch does not deliver what they speak of. Concurrency: trio thread, no awaits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from cachexfs.errors import CatalogueUnavailableError


class Outage:
    """``limit_s`` is how old an outage may become before ``on_limit`` is called (again at each later failure)."""

    def __init__(self, limit_s: float, on_limit: Callable[[], None]) -> None:
        self.limit_s = limit_s
        self.why = "no answer yet"
        self._on_limit = on_limit
        self._answered_s = -math.inf
        self._failing_since_s: float | None = None
        self._stalled_since_s: float | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the first failure after the last success; 0 when all is well."""
        since = [at for at in (self._failing_since_s, self._stalled_since_s) if at is not None]
        return trio.current_time() - min(since) if since else 0.0

    @property
    def is_over(self) -> bool:
        """Whether the limit has been reached."""
        return self.age_s >= self.limit_s

    def answered(self) -> None:
        """A majority has answered."""
        self._answered_s = trio.current_time()
        self._failing_since_s = None

    def failed(self, began_s: float, error: Exception) -> None:
        """An exchange that began at ``began_s`` has failed; another one may have been answered meanwhile."""
        self.why = str(error)
        if self._failing_since_s is None:
            self._failing_since_s = max(began_s, self._answered_s)
        self._check()

    def moved(self) -> None:
        """The watch has delivered something."""
        self._stalled_since_s = None

    def stalled(self, began_s: float, why: str) -> None:
        """Since ``began_s`` the watch has not delivered what exists."""
        self.why = why
        if self._stalled_since_s is None:
            self._stalled_since_s = began_s
        self._check()

    def error(self) -> CatalogueUnavailableError:
        """What callers are told."""
        return CatalogueUnavailableError(f"the catalogue (etcd) is unavailable for {self.age_s:.0f} s: {self.why}")

    def timeout_s(self, usual_s: float) -> float:
        """Time for one exchange: it ends with the outage's limit, not after it."""
        left_s = self.limit_s - self.age_s
        return usual_s if left_s <= 0 else min(usual_s, left_s)

    def _check(self) -> None:
        if self.is_over:
            self._on_limit()
