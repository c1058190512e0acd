"""Which request is at fault when daemons die or hang: it is answered with EIO at last, so that the others go on.

Role: counts, per unanswered request, the daemons that ended with it. Plain state of the supervisor's one thread; time
comes in as calls. Called by ``run``.
"""

from __future__ import annotations

from .lifecycle import Limits
from .plan import log
from .pump import Pump

#: A hang counts as so many deaths: each costs the applications ``request_s``.
HANG_WEIGHT = 2
#: How often per ``request_s`` somebody looks whether the same request is still the oldest.
LOOKS = 4


class Blame:
    """The suspicions of one mount."""

    def __init__(self, pump: Pump, limits: Limits) -> None:
        self._pump = pump
        self._limits = limits
        self._counts: dict[int, int] = {}
        self._oldest = self._looks = 0
        #: Requests that were answered with EIO.
        self.given_up = 0

    def daemon_ended(self, weight: int = 1) -> None:
        """A daemon died of what it was asked, or hung (``HANG_WEIGHT``). Too often: the oldest request gets EIO."""
        self._counts = {u: self._counts.get(u, 0) + weight for u in self._pump.pending_uniques()}
        oldest = self._pump.oldest_unique
        if self._counts.get(oldest, 0) > self._limits.suspicions_max:
            log(f"request {oldest} has been with too many daemons that died: answered with EIO")
            self.given_up += 1
            self._pump.give_up_on(oldest)

    def is_hung(self, is_serving: bool) -> bool:
        """Look at the oldest request; whether it has been the same for ``LOOKS`` looks."""
        oldest = self._pump.oldest_unique
        is_same = bool(oldest) and oldest == self._oldest and is_serving
        self._looks = self._looks + 1 if is_same else 0
        self._oldest = oldest
        if self._looks < LOOKS:
            return False
        self._looks = 0
        return True
