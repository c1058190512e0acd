"""Which daemons hang, and which request is at fault when they hang or die: it gets EIO at last, and the others go on.

Role: counts looks, never time, so that a machine or a supervisor that stood still accuses nobody. Two kinds of hanging:
the same request is the oldest for ``request_s`` (longer than any handler waits), or the daemon's loop does not answer
its pulse for ``pulse_s`` while requests wait (it is stopped, or stuck in a system call).
Concurrency: plain state of the supervisor's one thread. Called by ``daemons``.
"""

from __future__ import annotations

from collections.abc import Callable

from .lifecycle import Limits
from .pending import Pending
from .plan import log

#: A hang counts as so many deaths: each costs the applications a long wait.
HANG_WEIGHT = 2
#: How often somebody looks while ``request_s`` and ``pulse_s`` pass.
REQUEST_LOOKS = 4
PULSE_LOOKS = 6


class Blame:
    """The suspicions of one mount."""

    def __init__(self, pending: Pending, give_up_on: Callable[[int], None], limits: Limits) -> None:
        """``give_up_on`` answers a request with EIO."""
        self._pending = pending
        self._give_up_on = give_up_on
        self._limits = limits
        self._counts: dict[int, int] = {}
        self._oldest = self._looks = 0
        self._pulses_missed = 0
        #: Seconds between two looks.
        self.look_s = min(limits.pulse_s / PULSE_LOOKS, limits.request_s / REQUEST_LOOKS)
        #: Requests that were answered with EIO.
        self.given_up = 0

    def daemon_ended(self, weight: int = 1) -> None:
        """A daemon died of what it was asked, or hung (``HANG_WEIGHT``). Too often: the oldest request gets EIO."""
        self._counts = {u: self._counts.get(u, 0) + weight for u in self._pending}
        oldest = self._pending.oldest
        if self._counts.get(oldest, 0) > self._limits.suspicions_max:
            log(f"request {oldest} has been with too many daemons that died: answered with EIO")
            self.given_up += 1
            self._give_up_on(oldest)

    def alive(self) -> None:
        """The daemon's loop runs, or another daemon serves."""
        self._pulses_missed = 0

    def look(self, is_serving: bool, send_pulse: Callable[[], object]) -> str:
        """Why the daemon counts as hung, or the empty string. Call it every ``look_s``."""
        oldest = self._pending.oldest
        if not oldest or not is_serving:
            self._oldest = self._looks = self._pulses_missed = 0
            return ""
        self._looks = self._looks + 1 if oldest == self._oldest else 0
        self._oldest = oldest
        if self._looks * self.look_s >= self._limits.request_s:
            self._looks = 0
            return f"a request has been without an answer for {self._limits.request_s:g} s"
        if self._pulses_missed * self.look_s >= self._limits.pulse_s:
            self._pulses_missed = 0
            return f"its loop has stood still for {self._limits.pulse_s:g} s"
        self._pulses_missed += 1
        send_pulse()
        return ""
