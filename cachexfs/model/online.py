"""The model inside the mount: estimates and the route from boundary records alone.

Role: what ``route=auto`` and ``eta.*`` can use. Standard library only (a daemon must not load numpy). Single
owner, no locks, memory bounded. Feed ``observe`` with every record; ``warm`` replays a record file at start.

Without a fitted law a time is scaled by bytes: expected = LATENCY_S + bytes / REFERENCE_RATE; the trackers
learn the ratio to that. The decision is that of ``route`` with stall plus time taken as lognormal (Fenton 1960),
so that its probability has a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

from cachexfs.errors import UsageError
from cachexfs.model.records import BoundaryRecord
from cachexfs.model.tracker import Forecast, StateTracker

LATENCY_S = 0.02
REFERENCE_RATE = float(2**30)
ALPHA = 0.20
OBSERVED_MIN = 10
HYSTERESIS = 0.05
LOG_SD_MIN = 0.1
TAIL_SD = 6.0
_NORMAL = NormalDist()
STALE_S = 24 * 3600.0
"""A route not seen for this long counts as unknown."""


@dataclass(frozen=True, slots=True)
class Choice:
    """``route`` partner or direct, ``sure`` False when it is only the default, ``p_partner`` chance that the
    partner route costs less (None if unknown), ``why`` in words."""

    route: str
    sure: bool
    p_partner: float | None
    why: str


class Online:
    """Trackers of three legs: ``direct`` (to the PFS), ``partner`` (copy) and ``drain`` (partner to PFS).

    A mount drains from the writer's memory, beside the copy to the partner: what a content took to the PFS on that
    route, from its capture, says what it would have taken directly. So ``direct`` learns from both routes.
    """

    def __init__(self) -> None:
        self._legs = {name: StateTracker() for name in ("direct", "partner", "drain")}
        self._seen = dict.fromkeys(self._legs, -math.inf)
        self._current = ""

    def warm(self, records: Iterable[BoundaryRecord]) -> None:
        """Replay records, oldest first (``records.merge(records.read(path))``)."""
        for record in records:
            self.observe(record)

    def observe(self, record: BoundaryRecord) -> None:
        """Learn from a record; boundaries not reached are skipped, a failed one counts as what it waited."""
        total = record.writers * record.bytes_per_writer
        partner = record.partner_s[0] if record.partner_s else None
        pfs = record.pfs_s[0] if record.pfs_s else None
        if pfs is None and record.failed:
            pfs = record.waited_s
        if record.route == "direct":
            self._learn("direct", pfs, total, record.time)
            return
        self._learn("direct", pfs, total, record.time)
        self._learn("partner", partner, total, record.time)
        if pfs is not None and partner is not None:
            self._learn("drain", pfs - partner, total, record.time)

    def _learn(self, leg: str, seconds: float | None, total: float, time: float) -> None:
        if seconds is not None and seconds > 0.0:
            self._legs[leg].update(seconds, expected_s(total))
            self._seen[leg] = max(self._seen[leg], time)

    def eta_s(self, leg: str, total_bytes: float, waited_s: float = 0.0) -> tuple[float, float] | None:
        """(median, 95% bound) seconds that ``total_bytes`` on a leg still take; None before ten observations.

        ``waited_s`` have passed without their arrival. Who is late is likely to stay so: see ``remaining_s``.
        """
        forecast = self._forecast(leg, total_bytes)
        if forecast is None or waited_s <= 0.0:
            return None if forecast is None else (forecast.median_s, forecast.interval95.high_s)
        half, most = (remaining_s(forecast.median_s, forecast.log_sd, waited_s, share) for share in (0.5, 0.05))
        return half, max(most, forecast.interval95.high_s - waited_s)

    def _forecast(self, leg: str, total_bytes: float) -> Forecast | None:
        tracker = self._legs[leg]
        return tracker.forecast(expected_s(total_bytes)) if tracker.ready else None

    def choose(
        self,
        total_bytes: float,
        *,
        now: float,
        interval_s: float,
        failures_per_s: float,
        kappa: float,
        stall_direct_s: float = 0.0,
        stall_partner_s: float = 0.0,
        backlog: int = 0,
        default: str = "partner",
    ) -> Choice:
        """The route of the next checkpoint of ``total_bytes``; arguments as in ``route.decide_route``.

        The PFS is observed on both routes, so ``auto`` can leave the partner route without having tried the other and
        return to it; the partner is not observed on the direct route: it is tried again after a day.
        """
        if not (total_bytes > 0.0 and interval_s > 0.0 and failures_per_s > 0.0 and 0.0 <= kappa <= 1.0):
            raise UsageError("choose needs bytes, interval and failure rate above 0 and kappa in [0, 1]")
        legs = {leg: self._fresh(leg, total_bytes, now) for leg in self._legs}
        copy, drain, direct = legs["partner"], legs["drain"], legs["direct"]
        if copy is None or direct is None:
            missing = "partner copies" if copy is None else "writes to the PFS"
            return self._say(Choice(default, False, None, f"fewer than {OBSERVED_MIN} {missing} within a day"))
        drain = drain or direct
        if direct.changed or copy.changed or drain.changed:
            return self._say(Choice(default, False, None, "the speed changed within the last three checkpoints"))
        if backlog > 1 or _mean_sd(drain)[0] >= interval_s:
            return self._say(Choice(default, False, None, "drains are behind"))
        weight = failures_per_s * interval_s
        # drain and direct write meet the same filesystem: what the drain will add is a share of the direct time
        kept = 1.0 - kappa * _mean_sd(drain)[0] / _mean_sd(direct)[0]
        one = _cost(stall_direct_s, weight * kept, direct)
        two = _cost(stall_partner_s, weight, copy)
        p_partner = _less(two, one) if one[0] > 0.0 else 0.0
        saved = stall_direct_s + weight * _mean_sd(direct)[0]
        return self._say(self._decide(p_partner, saved, two[0] + saved - one[0], default))

    def _decide(self, p_partner: float, direct_s: float, partner_s: float, default: str) -> Choice:
        if ALPHA < p_partner < 1.0 - ALPHA:
            return Choice(default, False, p_partner, "too close to call")
        route = "partner" if p_partner >= 0.5 else "direct"
        gain = abs(direct_s - partner_s) / max(direct_s, partner_s)
        if self._current and route != self._current and gain < HYSTERESIS:
            return Choice(self._current, True, p_partner, "the gain is below 5%")
        return Choice(route, True, p_partner, f"costs {100 * gain:.0f}% less")

    def _say(self, choice: Choice) -> Choice:
        self._current = choice.route
        return choice

    def _fresh(self, leg: str, total_bytes: float, now: float) -> Forecast | None:
        return self._forecast(leg, total_bytes) if now - self._seen[leg] <= STALE_S else None


def expected_s(total_bytes: float) -> float:
    """The scale that trackers are relative to [s]."""
    return LATENCY_S + total_bytes / REFERENCE_RATE


def remaining_s(median_s: float, log_sd: float, waited_s: float, share: float) -> float:
    """Seconds after ``waited_s`` within which all but ``share`` of those that are not there yet arrive.

    Times are lognormal: the quantile x of survival with S(x) = share S(waited), less what was waited. Beyond
    ``TAIL_SD`` standard deviations the tail's hazard is taken, S(x) ~ exp(-z^2 / 2). Always above 0.
    """
    sd = max(log_sd, LOG_SD_MIN)
    z = (math.log(waited_s) - math.log(median_s)) / sd
    later = math.sqrt(z * z - 2.0 * math.log(share)) if z > TAIL_SD else -_NORMAL.inv_cdf(share * _NORMAL.cdf(-z))
    return waited_s * math.expm1((later - z) * sd)


def _mean_sd(forecast: Forecast) -> tuple[float, float]:
    """Mean and sd [s] of the lognormal forecast."""
    variance = min(forecast.log_sd, 3.0) ** 2
    mean = forecast.median_s * math.exp(variance / 2.0)
    return mean, mean * math.sqrt(math.expm1(variance))


def _cost(stall_s: float, weight: float, forecast: Forecast) -> tuple[float, float]:
    """Mean and sd of stall + weight x time [s]."""
    mean, sd = _mean_sd(forecast)
    return stall_s + weight * mean, abs(weight) * sd


def _less(a: tuple[float, float], b: tuple[float, float]) -> float:
    """P(a < b) for independent lognormals with these means and sds."""
    logs = []
    for mean, sd in (a, b):
        variance = math.log1p((sd / mean) ** 2)
        logs.append((math.log(mean) - variance / 2.0, variance))
    spread = math.sqrt(logs[0][1] + logs[1][1])
    gap = logs[1][0] - logs[0][0]
    if spread == 0.0:
        return 0.5 if gap == 0.0 else float(gap > 0.0)
    return 0.5 * math.erfc(-gap / spread / math.sqrt(2.0))
