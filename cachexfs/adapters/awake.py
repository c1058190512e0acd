"""A clock that stands still while this process cannot run.

Role: trio's clock in the daemon (``daemon.main``). A virtual machine is paused or moved, a job suspended, a machine
swaps: when it goes on, time has passed in which nothing could be done, here or in the daemon's children. By an
ordinary clock all deadlines run out at once, those of what needed one more turn of the loop too, and applications see
EIO. Here a deadline counts what the process had; the supervisor counts its looks for the same reason.

Concurrency: read in the trio thread alone. What depends on others' time must not use it: leases are etcd's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from trio.abc import Clock

#: The loop wakes up this often, so that a pause is told from a long sleep.
LOOK_S = 2.0
#: Being this late is ordinary: a loaded machine, a long turn of the loop.
LATE_S = 1.0


class AwakeClock(Clock):
    """``read`` gives seconds of a clock that only goes forward."""

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._read_s = read()  # when it was read last
        self._asleep_s = 0.0  # for how long the loop meant to sleep then
        self._missed_s = 0.0

    def start_clock(self) -> None:
        """See ``Clock``."""

    def current_time(self) -> float:
        """Seconds in which this process could run, from an arbitrary start."""
        now_s = self._read()
        late_s = now_s - self._read_s - self._asleep_s
        if late_s > LATE_S:
            self._missed_s += late_s
        self._read_s, self._asleep_s = now_s, 0.0
        return now_s - self._missed_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """See ``Clock``: at most ``LOOK_S``, the loop then asks again."""
        self._asleep_s = min(max(0.0, deadline - self.current_time()), LOOK_S)
        return self._asleep_s
