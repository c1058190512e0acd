"""When a daemon is started, given up, swapped and ended: the decisions, without any I/O.

Role: phases, the count of consecutive failures, back-off, deadlines, exit codes. ``run`` acts on them.
Concurrency: plain state of the supervisor's one thread; time comes in as an argument.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

EXIT_DONE = 0
EXIT_USAGE = 2
#: Gave up while applications relied on the mount, or ended with work undone.
EXIT_NOT_DURABLE = 3
#: Never served: no mount, no daemon.
EXIT_CANNOT_TELL = 4


class Phase(enum.Enum):
    """Where the mount stands."""

    STARTING = "starting"  # a daemon has been started and is not ready
    SERVING = "serving"
    BACKOFF = "backoff"  # no daemon; the next is started at a deadline
    RETIRING = "retiring"  # the daemon is being swapped
    FAILED = "failed"  # gave up: EIO until unmounted or told to restart
    UNMOUNTING = "unmounting"  # the daemon has finished, or nothing is left to wait for
    ENDED = "ended"  # the mount is gone, the daemon is ending


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds and counts; each is an option of the command line."""

    restarts_max: int = 10
    #: As long as none has ever served: a wrong command line should not take long to be told.
    first_starts_max: int = 2
    start_s: float = 60.0
    stop_s: float = 600.0
    grace_s: float = 5.0
    exit_s: float = 10.0
    unmount_s: float = 5.0
    request_s: float = 180.0
    pulse_s: float = 30.0
    suspicions_max: int = 4
    backoff_s_first: float = 0.1
    backoff_s_max: float = 5.0


@dataclass(slots=True)
class Lifecycle:
    """The state machine's memory."""

    limits: Limits
    phase: Phase = Phase.BACKOFF
    life: int = 0
    restarts: int = 0
    failures: int = 0  # in a row
    deaths: int = 0  # in a row: failures, and what others killed before it had answered anything
    last_failure: str = ""
    has_served: bool = False
    is_stop_wanted: bool = False
    exit_code: int = EXIT_DONE
    deadlines: dict[str, float] = field(default_factory=dict)

    def enter(self, phase: Phase, deadline: float | None = None) -> None:
        """Change the phase; ``deadline`` (monotonic) bounds it."""
        self.phase = phase
        self.deadlines.pop("phase", None)
        if deadline is not None:
            self.deadlines["phase"] = deadline

    def failed(self, why: str, *, had_progress: bool, now: float, is_passing: bool = False) -> Phase:
        """A daemon has died unasked. BACKOFF (its deadline set), or FAILED after too many failures in a row.

        A daemon that answered requests before it died does not count as one that cannot run; nor, once one has
        served, does one that others killed (SIGKILL: an administrator, the kernel without memory), or that found
        something away which comes back (``EXIT_TRY_AGAIN``): ``is_passing``.
        """
        self.failures = 0 if had_progress else self.failures
        self.failures += not (is_passing and self.has_served)
        self.deaths = 0 if had_progress else self.deaths + 1
        self.last_failure = why
        limit = self.limits.restarts_max
        if self.failures > (limit if self.has_served else min(limit, self.limits.first_starts_max)):
            self.enter(Phase.FAILED)
            self.exit_code = EXIT_NOT_DURABLE if self.has_served else EXIT_CANNOT_TELL
            return Phase.FAILED
        if had_progress:
            delay = 0.0
        else:
            delay = min(self.limits.backoff_s_first * 2 ** min(self.deaths - 1, 60), self.limits.backoff_s_max)
        self.enter(Phase.BACKOFF, now + delay)
        return Phase.BACKOFF

    def timeout_s(self, now: float) -> float:
        """Until the next deadline; at most an hour."""
        return max(0.0, min((at - now for at in self.deadlines.values()), default=3600.0))

    def due(self, now: float) -> list[str]:
        """The names of the deadlines that have passed; they are removed."""
        names = [name for name, at in self.deadlines.items() if at <= now]
        for name in names:
            del self.deadlines[name]
        return names
