"""The PFS's health in words: whether it answers, since when it does not, and which call waits.

Role: what ``status``, ``explain``, attributes and the drain say of it. ``Pfs.state`` changes only when a call has
ended; one that has been out for some seconds is told here at once. Nothing is decided by it: who goes another way
because the PFS is away asks ``Pfs.state``. Concurrency: nothing here waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from cachexfs.engine.node import Node

SLOW_S = 3.0
HUNG_S = 10.0


@dataclass(frozen=True, slots=True)
class Health:
    """``state``: "ok", "slow", "hung", "unreachable" or "offline"; since when (epoch) and for how long it has been so;
    ``why`` in words, empty when it is "ok"."""

    state: str
    since_s: float = 0.0
    for_s: float = 0.0
    why: str = ""

    @property
    def away(self) -> bool:
        """Whether it does not answer."""
        return self.state in ("hung", "unreachable")

    @property
    def words(self) -> str:
        """``the PFS is hung since 10:12:13 UTC (42 s): no answer to 'land a/b'``."""
        if self.state in ("ok", "offline"):
            return "the PFS answers" if self.state == "ok" else "the PFS is switched off (-o offline)"
        since = datetime.fromtimestamp(self.since_s, UTC).strftime("%H:%M:%S UTC")
        return f"the PFS is {self.state} since {since} ({self.for_s:.0f} s): {self.why}"


def pfs_health(node: Node) -> Health:
    """As of now."""
    pfs = node.pfs
    if pfs is None or node.options.offline:
        return Health("offline")
    now_s, state = node.clock.now_s(), pfs.state
    what, waits_s = pfs.waiting
    if state != "ok":
        return Health(state, now_s - pfs.away_s, pfs.away_s, pfs.error or "it does not answer")
    if waits_s < SLOW_S:
        return Health("ok")
    return Health("hung" if waits_s >= HUNG_S else "slow", now_s - waits_s, waits_s, f"no answer to {what}")
