"""The node's clock, kept to the reference node's by a measured offset.

Role: real ``Clock``. One node's clock is the job's (``Job.clock_node``); the others ask it now and then and add the
difference, so that times of several nodes can be compared.
"""

from __future__ import annotations

import time


class ReferenceClock:
    """Own clock plus ``offset_s``."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def now_s(self) -> float:
        """Seconds since the epoch by the reference node's clock."""
        return time.time() + self.offset_s

    def now_ns(self) -> int:
        """The same in ns, without losing digits when there is no offset."""
        return time.time_ns() + int(self.offset_s * 1e9)
