"""The fitted model: what ``fit`` makes, ``predict`` asks and ``report`` shows.

Role: ties location, spread, intervals and tails together for one (system, access) and says when the data do
not carry an answer. Frozen, pure; used by commands, bench and callers of the library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cachexfs.errors import UsageError
from cachexfs.model.arrays import Floats
from cachexfs.model.completion import Regime, Spread, fit_regimes, shared_effects, spread_of_ratio
from cachexfs.model.delays import Delay
from cachexfs.model.intervals import Interval, scaled_interval
from cachexfs.model.location import Levels, LocationModel, fit_location
from cachexfs.model.observe import FILE_PER_PROCESS, SHARED_FILE, Observations, level_groups, level_medians
from cachexfs.model.tails import TailCount, count_tail
from cachexfs.model.tracker import StateTracker

ROWS_MIN = 12
LEVELS_MIN = 3
REPEATS_GOOD = 3
LEVELS_GOOD = 4
REACH_MAX = 8.0
"""Largest ratio of asked to measured writers."""
REACH_UNSATURATED_MAX = 2.0
BYTES_REACH_MAX = 4.0
SLOPE_SATURATED = 0.3
MISFIT_MAX = {FILE_PER_PROCESS: 0.16, SHARED_FILE: 0.25, "": 0.20}
"""Log misfit of the levels above which they do not follow one law. Measured on single series: file-per-process
0.03 to 0.10, shared-file 0.1 to 0.25 and more (locks, days)."""
REPEAT_SD_DEFAULT = 0.10
REPEAT_SD_PRIOR_COUNT = 4
MAD_TO_SD = 1.4826
EXTRA_SD = 0.05
"""Log sd of what neither the law nor repeats at one time show (day to day)."""
REACH_SD = 0.06
"""Log sd per octave beyond the measured writers: the law's slope may be wrong in a way that its grid lacks."""
DELAY_POINTS = 400
DELAY_COVERAGE_MAX = 0.995
DELAY_LOG_MAX = 7.0
FAILED_MAX = 0.99
RECENT_ROWS_MIN = 40
RECENT_ROWS_MAX = 500
RECENT_SPAN_S = 86400.0
SPLIT_GAP = 5.0
SPLIT_RATIO_MIN = 1.15
SPLIT_ROWS_MIN = 4


@dataclass(frozen=True)
class Prediction:
    """One checkpoint of ``writers`` x ``bytes_per_writer``.

    ``median_s`` slowest writer (the checkpoint), ``typical_s`` median writer or None if never measured,
    ``log_sd`` of one checkpoint, intervals calibrated on other systems. ``abstain``: the numbers must not be
    relied on, for ``reasons``. ``tail`` counts of rare stragglers in the data.
    """

    writers: float
    bytes_per_writer: float
    median_s: float
    typical_s: float | None
    log_sd: float
    interval80: Interval
    interval95: Interval
    abstain: bool
    reasons: tuple[str, ...]
    tail: tuple[TailCount, ...]

    def delay(self, failed: float = 0.0) -> Delay:
        """The checkpoint's time as a distribution whose quantiles are those of the calibrated intervals.

        |log T - log median| reaches the half width of the 80% and the 95% interval with these probabilities; in between
        and beyond it grows linearly in -log(1 - coverage) (an exponential tail), up to 99.5%. ``failed``: share of
        checkpoints that never complete.
        """
        levels = (2.0 * np.arange(DELAY_POINTS) + 1.0) / DELAY_POINTS - 1.0
        surprise = -np.log1p(-np.minimum(np.abs(levels), DELAY_COVERAGE_MAX))
        at = [0.0, -math.log(0.20), -math.log(0.05)]
        reach = [math.log(i.high_s / self.median_s) for i in (self.interval80, self.interval95)]
        slope = (reach[1] - reach[0]) / (at[2] - at[1])
        offset = np.interp(surprise, at, [0.0, *reach]) + slope * np.maximum(surprise - at[2], 0.0)
        times = self.median_s * np.exp(np.minimum(np.sign(levels) * offset, DELAY_LOG_MAX))
        return Delay.of(times, min(failed, FAILED_MAX))


@dataclass(frozen=True)
class Recent:
    """The state at the end of dated data: the next checkpoint takes ``ratio`` times the law's median, between
    ``low`` and ``high`` times with 80%; ``changed`` when the level moved within the last three; ``observed`` rows."""

    ratio: float
    low: float
    high: float
    changed: bool
    observed: int


@dataclass(frozen=True)
class FittedModel:
    """``slowest`` and ``typical`` location laws, spread, repeat sd, tails, and why it may abstain. ``recent`` is None
    unless the data are dated and span a day."""

    system: str
    access: str
    slowest: LocationModel
    typical: LocationModel | None
    spread: Spread
    repeat_sd: float
    repeats_total: int
    tail: tuple[TailCount, ...]
    failed: float
    bandwidth_spec: float | None
    fit_reasons: tuple[str, ...]
    notes: tuple[str, ...]
    levels: Levels
    recent: Recent | None = None

    def predict(
        self, writers: float, bytes_per_writer: float, other_bytes: float = 0.0, load: float = 0.0
    ) -> Prediction:
        """Prediction for one checkpoint; units as in ``LocationModel.log_elements``. Never raises for a
        size that the data do not carry: it abstains."""
        log_median, law_sd = self.slowest.log_median_sd(writers, bytes_per_writer, other_bytes, load)
        law = self.slowest
        octaves = max(0.0, math.log2(writers / law.writers_max), math.log2(law.writers_min / writers))
        sd = math.sqrt(law_sd**2 + self.repeat_sd**2 + EXTRA_SD**2 + (REACH_SD * octaves) ** 2)
        typical = None
        if self.typical is not None:
            slow = math.exp(log_median)
            typical = min(self.typical.median(writers, bytes_per_writer, other_bytes, load), slow)
        reasons = (*self.fit_reasons, *self.reach_reasons(writers, bytes_per_writer))
        return Prediction(
            float(writers),
            float(bytes_per_writer),
            math.exp(log_median),
            typical,
            sd,
            scaled_interval(log_median, sd, 0.80, self.access),
            scaled_interval(log_median, sd, 0.95, self.access),
            bool(reasons),
            reasons,
            self.tail,
        )

    def reach_reasons(self, writers: float, bytes_per_writer: float) -> tuple[str, ...]:
        """Why the data do not carry this size; empty if they do."""
        law, reasons = self.slowest, []
        near = np.min(np.abs(np.log(self.levels.writers / writers))) < math.log(1.25)
        reach = max(writers / law.writers_max, law.writers_min / writers)
        if law.levels < LEVELS_MIN and not near:
            reasons.append(
                f"only {law.levels} level{'s' if law.levels > 1 else ''} of writers measured; "
                f"predicting {writers:g} writers needs {LEVELS_MIN}"
            )
        elif reach > REACH_MAX:
            reasons.append(
                f"{writers:g} writers is more than {REACH_MAX:g} times away from what was measured "
                f"({law.writers_min:g} to {law.writers_max:g})"
            )
        elif (
            law.end_slope < SLOPE_SATURATED
            and self.bandwidth_spec is None
            and writers > REACH_UNSATURATED_MAX * law.writers_max
        ):
            reasons.append(
                f"the filesystem was not saturated at {law.writers_max:g} writers, so where it saturates is "
                "unknown; measure more writers or give its bandwidth"
            )
        if not law.bytes_min / BYTES_REACH_MAX <= bytes_per_writer <= law.bytes_max * BYTES_REACH_MAX:
            reasons.append(
                f"{_size(bytes_per_writer)} per writer is more than {BYTES_REACH_MAX:g} times away from what was "
                f"measured ({_size(law.bytes_min)} to {_size(law.bytes_max)})"
            )
        return tuple(reasons)


def _size(value: float) -> str:
    for unit, scale in (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} B"


def fit(table: Observations, bandwidth_spec: float | None = None) -> FittedModel:
    """Fit one (system, access).

    ``bandwidth_spec`` [B/s] is the site's stated aggregate bandwidth, if known. Raises UsageError when rows of
    shared-file and file-per-process writes are mixed (they obey different laws). Mixed systems, few rows, one
    level: fits, and every prediction abstains with the reason.
    """
    if bandwidth_spec is not None and not 0.0 < bandwidth_spec < math.inf:
        raise UsageError("the bandwidth must be positive, in bytes per second")
    if len(table.accesses()) > 1:
        raise UsageError(f"rows mix {' and '.join(table.accesses())}: they obey different laws; choose one (--access)")
    levels, left_out = _levels(table, table.seconds)
    if levels.writers.size == 0:
        raise UsageError("no level of writers has a completed checkpoint; measure again with a longer time limit")
    slowest = fit_location(levels, bandwidth_spec)
    typical_levels, _ = _levels(table, table.typical_s)
    typical = None
    if typical_levels.writers.size >= levels.writers.size:
        typical = fit_location(typical_levels, bandwidth_spec)
    residual = _residuals(table, table.seconds)
    ratios = np.where(table.censored == 0, np.exp(residual), np.inf)
    doubts, notes = _doubts(table, levels, slowest)
    return FittedModel(
        system=", ".join(table.systems()),
        access=", ".join(table.accesses()),
        slowest=slowest,
        typical=typical,
        spread=_spread(table),
        repeat_sd=_repeat_sd(table),
        repeats_total=len(table),
        tail=count_tail(ratios),
        failed=float(np.mean(table.censored > 0)),
        bandwidth_spec=bandwidth_spec,
        fit_reasons=doubts,
        notes=(*table.notes, *left_out, *notes),
        levels=levels,
        recent=_recent(table, slowest),
    )


def _recent(table: Observations, law: LocationModel) -> Recent | None:
    """One-step forecast after the last dated rows, relative to the law."""
    dated = np.flatnonzero(np.isfinite(table.time) & (table.censored == 0))
    if dated.size < RECENT_ROWS_MIN or np.ptp(table.time[dated]) < RECENT_SPAN_S:
        return None
    tracker = StateTracker()
    for row in dated[np.argsort(table.time[dated], kind="stable")][-RECENT_ROWS_MAX:]:
        tracker.update(
            float(table.seconds[row]), law.median(float(table.writers[row]), float(table.bytes_per_writer[row]))
        )
    now = tracker.forecast()
    return Recent(now.median_s, now.interval80.low_s, now.interval80.high_s, now.changed, now.observed)


def _levels(table: Observations, seconds: Floats) -> tuple[Levels, tuple[str, ...]]:
    """Levels with 3 repeats or more if there are 4 of them, else all; and a note on what was left out."""
    everything = level_medians(table, seconds)
    good = everything.repeats >= REPEATS_GOOD
    if np.unique(everything.writers[good]).size < LEVELS_GOOD or np.all(good):
        return everything, ()
    lost = ", ".join(f"{n:g}" for n in np.unique(everything.writers[~good])[:8])
    note = f"levels with fewer than {REPEATS_GOOD} repeats left out (writers: {lost})"
    kept = (everything.writers, everything.bytes_per_writer, everything.seconds, everything.repeats)
    return Levels(*(column[good] for column in kept)), (note,)


def _residuals(table: Observations, seconds: Floats) -> Floats:
    """log of s/B about its level's median, (n,)."""
    out = np.zeros(len(table))
    logs = np.log(seconds / table.bytes_per_writer)
    for group in level_groups(table):
        out[group] = logs[group] - np.median(logs[group])
    return out


def _repeat_sd(table: Observations) -> float:
    """Robust log sd of one checkpoint about its level.

    From differences within a level, half a level apart in the order of measurement (so that drift counts): a
    difference has variance 2 sd^2 and needs no estimate of the level's centre. Shrunk towards a default that
    weighs as much as four differences. Stragglers do not enter (median): they are counted in ``tail``.
    """
    logs = np.log(table.seconds / table.bytes_per_writer)
    parts = [np.zeros(0)]
    for group in level_groups(table):
        used = group[table.censored[group] == 0]
        shift = used.size // 2
        if shift:
            parts.append(np.abs(logs[used[shift:]] - logs[used[:-shift]]))
    differences = np.concatenate(parts)
    if differences.size == 0:
        return REPEAT_SD_DEFAULT
    sd = MAD_TO_SD * float(np.median(differences)) / math.sqrt(2.0)
    n, prior = differences.size, REPEAT_SD_PRIOR_COUNT
    return math.sqrt((n * sd * sd + prior * REPEAT_SD_DEFAULT**2) / (n + prior))


def _spread(table: Observations) -> Spread:
    """Spread from (slowest, typical) pairs; without typical times the default theta and a nominal sigma."""
    known = np.isfinite(table.typical_s) & (table.censored == 0) & (table.writers >= 2)
    regimes: tuple[Regime, ...] = (Regime(1.0, 0.0, 0.0),)
    source = table.typical_s if np.any(known) else table.seconds
    use = known if np.any(known) else table.censored == 0
    effects = shared_effects(np.log(source[use] / table.bytes_per_writer[use]), table.writers[use])
    if effects.size >= 2:
        regimes = fit_regimes(effects)
    if not np.any(known):
        return Spread(0.05, regimes=regimes)
    ratio = table.seconds[known] / table.typical_s[known]
    sigmas = [spread_of_ratio(float(r), float(n)) for r, n in zip(ratio, table.writers[known], strict=True)]
    return Spread(float(np.median(sigmas)), regimes=regimes)


def _doubts(table: Observations, levels: Levels, law: LocationModel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(reasons to abstain from everything, notes)."""
    reasons, notes = [], []
    if len(table.systems()) > 1:
        names = ", ".join(table.systems()[:4])
        reasons.append(f"rows of {len(table.systems())} systems are mixed ({names}); fit one at a time (--where)")
    elif _split_levels(table):
        reasons.append(
            "at most levels the times form two separate groups: two systems, or two states of one, are mixed; "
            "separate them (--where)"
        )
    if len(table) < ROWS_MIN:
        reasons.append(f"only {len(table)} rows; a model needs {ROWS_MIN}")
    if law.noise_sd > MISFIT_MAX["".join(table.accesses())] and levels.writers.size > 2:
        reasons.append(
            f"the levels do not follow one law (log misfit {law.noise_sd:.2f}): they were measured in different "
            "states or on different systems"
        )
    if not table.accesses():
        notes.append("no row says file-per-process or shared-file: taken as file-per-process")
    if np.all(levels.repeats >= 2) and len(table) > 3 and float(np.ptp(_residuals(table, table.seconds))) == 0.0:
        notes.append("repeats are identical to the last digit: are they copies of one measurement?")
    return tuple(reasons), tuple(notes)


def _split_levels(table: Observations) -> bool:
    """True if at most writer counts with 4 rows or more the times form two groups that are far apart for their
    width and that the bytes per writer do not explain."""
    tested = split = 0
    logs = np.log(table.seconds / table.bytes_per_writer)
    for n in np.unique(table.writers):
        rows = np.flatnonzero(table.writers == n)
        if rows.size < SPLIT_ROWS_MIN:
            continue
        tested += 1
        split += _is_split(logs[rows], np.log(table.bytes_per_writer[rows]))
    return tested >= 2 and split > 0.5 * tested


def _is_split(logs: Floats, log_bytes: Floats) -> bool:
    order = np.argsort(logs)
    x = logs[order]
    edge = max(2, math.ceil(0.2 * x.size))
    gaps = np.diff(x)[edge - 1 : x.size - edge]
    if gaps.size == 0:
        return False
    cut = edge + int(np.argmax(gaps))
    low, high = x[:cut], x[cut:]
    width = math.sqrt((np.var(low) * low.size + np.var(high) * high.size) / max(x.size - 2, 1))
    distance = float(np.mean(high) - np.mean(low))
    # (1 + h / b) / r: fewer bytes make s/B larger, at most in proportion
    explained = float(np.mean(log_bytes[order[:cut]]) - np.mean(log_bytes[order[cut:]]))
    far = distance > SPLIT_GAP * max(width, 0.01) and distance > math.log(SPLIT_RATIO_MIN)
    return far and distance > explained + 0.1
