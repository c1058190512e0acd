"""Evaluation: the protocols by which the model is judged.

Role: extrapolation ("fit small, predict large"), one-step-ahead tracking, paired routes, with baselines. Used
by ``bench/bench_model.py``, ``report`` (the user's own hold-out) and the tests. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cachexfs.model.arrays import Floats
from cachexfs.model.delays import Delay
from cachexfs.model.fitted import FittedModel, fit
from cachexfs.model.location import straight_line
from cachexfs.model.observe import Observations
from cachexfs.model.route import DIRECT, PARTNER, Decision, decide_route
from cachexfs.model.tracker import StateTracker

Predictor = Callable[[float], float]
BASELINES = ("straight line", "unweighted line", "constant bandwidth", "power law", "last value", "mean")


@dataclass(frozen=True)
class HeldOut:
    """Levels beyond the fit: ``writers``, ``bytes_per_writer``, ``observed_s`` median, ``predicted_s``, (K,).

    ``scaled_level`` and ``scaled_rows``: |log residual| of level medians and of single checkpoints over their
    predicted log sd; ``baselines_s`` predictions by name, each (K,).
    """

    model: FittedModel
    writers: Floats
    bytes_per_writer: Floats
    observed_s: Floats
    predicted_s: Floats
    scaled_level: Floats
    scaled_rows: Floats
    baselines_s: Mapping[str, Floats]

    def mape(self, predicted_s: Floats | None = None) -> float:
        """Mean absolute percentage error of the level medians [%]."""
        predicted = self.predicted_s if predicted_s is None else predicted_s
        return float(100.0 * np.mean(np.abs(predicted / self.observed_s - 1.0)))


def baselines(writers: Floats, per_byte_s: Floats) -> dict[str, Predictor]:
    """Predictors of s/B at N from levels (L,) sorted by writers; names as in ``BASELINES``."""
    line = straight_line(writers, per_byte_s) or (float(per_byte_s[-1]), 0.0)
    plain = straight_line_unweighted(writers, per_byte_s)
    slope, offset = np.polyfit(np.log(writers), np.log(per_byte_s), 1)
    last, mean = float(per_byte_s[-1]), float(np.mean(per_byte_s))
    return {
        "straight line": lambda n: line[0] + line[1] * n,
        "unweighted line": lambda n: plain[0] + plain[1] * n,
        "constant bandwidth": lambda n: last * n / float(writers[-1]),
        "power law": lambda n: math.exp(offset + slope * math.log(n)),
        "last value": lambda n: last,
        "mean": lambda n: mean,
    }


def straight_line_unweighted(writers: Floats, per_byte_s: Floats) -> tuple[float, float]:
    """As ``straight_line`` with equal weights: the same problem after scaling each row by sqrt(Nmax / N)."""
    columns = np.stack([1.0 / per_byte_s, writers / per_byte_s], axis=1)
    target = np.ones_like(writers)
    free = np.linalg.lstsq(columns, target, rcond=None)[0]
    if np.all(free >= 0.0):
        return float(free[0]), float(free[1])
    one = columns.T @ target / np.sum(columns**2, axis=0)
    losses = [float(np.sum((columns[:, i] * one[i] - 1.0) ** 2)) for i in (0, 1)]
    return (float(one[0]), 0.0) if losses[0] <= losses[1] else (0.0, float(one[1]))


def level_table(table: Observations, minimum_repeats: int) -> dict[float, Floats]:
    """Rows of each writer count that has at least ``minimum_repeats`` rows, completed ones only."""
    usable = table.censored == 0
    out: dict[float, Floats] = {}
    for n in np.unique(table.writers):
        rows = np.flatnonzero((table.writers == n) & usable)
        if rows.size >= minimum_repeats:
            out[float(n)] = rows
    return out


def hold_out(table: Observations, factor: float, minimum_repeats: int = 3, levels_min: int = 3) -> HeldOut | None:
    """Fit at N <= Nmax / ``factor``, predict the medians at all larger N; None with too few levels.

    Times are compared as s/B at the median bytes of the level.
    """
    levels = level_table(table, minimum_repeats)
    if not levels:
        return None
    limit = max(levels) / factor
    small = [n for n in levels if n <= limit]
    large = [n for n in levels if n > limit]
    if len(small) < levels_min or not large:
        return None
    mask: Floats = np.zeros(len(table), dtype=bool)
    for n in small:
        mask[levels[n]] = True
    model = fit(table.take(mask))
    per_byte = table.seconds / table.bytes_per_writer
    train = baselines(np.array(small), np.array([float(np.median(per_byte[levels[n]])) for n in small]))
    sizes = np.array([float(np.median(table.bytes_per_writer[levels[n]])) for n in large])
    observed = np.array([float(np.median(per_byte[levels[n]])) for n in large]) * sizes
    predictions = [model.predict(n, b) for n, b in zip(large, sizes, strict=True)]
    predicted = np.array([p.median_s for p in predictions])
    level_sd = np.array([math.sqrt(p.log_sd**2 - 0.75 * model.repeat_sd**2) for p in predictions])
    rows: list[float] = []
    for n, b, p in zip(large, sizes, predictions, strict=True):
        residual = np.abs(np.log(per_byte[levels[n]] * b / p.median_s)) / p.log_sd
        rows.extend(float(r) for r in residual)
    return HeldOut(
        model,
        np.array(large),
        sizes,
        observed,
        predicted,
        np.abs(np.log(observed / predicted)) / level_sd,
        np.array(rows),
        {name: np.array([f(n) for n in large]) * sizes for name, f in train.items()},
    )


@dataclass(frozen=True)
class Tracked:
    """One-step-ahead result: MAPE [%], median APE [%], coverage of both intervals, and MAPE of baselines."""

    mape: float
    median_ape: float
    covered80: float
    covered95: float
    steps: int
    baselines_mape: Mapping[str, float]
    ratios: Floats


def track(seconds: Floats) -> Tracked:
    """One step ahead through ``seconds`` (n,), n > BURN_IN, in order of time [s]."""
    tracker = StateTracker()
    ape: list[float] = []
    inside80: list[bool] = []
    inside95: list[bool] = []
    ratios: list[float] = []
    names = ("last value", "running median", "running mean", "median of the first 30")
    base: dict[str, list[float]] = {name: [] for name in names}
    for i, value in enumerate(seconds):
        value = float(value)
        if tracker.ready:
            forecast = tracker.forecast()
            ape.append(abs(forecast.median_s / value - 1.0))
            ratios.append(value / forecast.median_s)
            inside80.append(forecast.interval80.holds(value))
            inside95.append(forecast.interval95.holds(value))
            past = seconds[:i]
            guesses = (past[-1], np.median(past), np.mean(past), np.median(past[:30]))
            for name, guess in zip(names, guesses, strict=True):
                base[name].append(abs(float(guess) / value - 1.0))
        tracker.update(value)
    return Tracked(
        100.0 * float(np.mean(ape)),
        100.0 * float(np.median(ape)),
        float(np.mean(inside80)),
        float(np.mean(inside95)),
        len(ape),
        {name: 100.0 * float(np.mean(v)) for name, v in base.items()},
        np.array(ratios),
    )


@dataclass(frozen=True)
class Paired:
    """Route choice on days when both routes were measured; times [s] are means over the days decided."""

    days: int
    direct_s: float
    fast_s: float
    chosen_s: float
    oracle_s: float
    accuracy: float
    confident: float
    confident_accuracy: float
    brier: float

    @property
    def ratio(self) -> float:
        """Mean time of the choice over that of the best fixed route."""
        return self.chosen_s / min(self.direct_s, self.fast_s)


def paired_routes(direct_s: Sequence[float], fast_s: Sequence[float], alpha: float = 0.2) -> Paired:
    """Decide day by day from the days before, then see both times.

    When the decision abstains, the likelier route is used (this measures the probability, not the default).
    """
    one, two = StateTracker(), StateTracker()
    chosen: list[float] = []
    right: list[bool] = []
    sure: list[bool] = []
    brier: list[float] = []
    pairs: list[tuple[float, float]] = []
    for a, b in zip(direct_s, fast_s, strict=True):
        if one.ready and two.ready:
            decision = decide_pair(one, two, alpha)
            fast_wins = b < a
            chosen.append(b if decision.p_partner > 0.5 else a)
            right.append((decision.p_partner > 0.5) == fast_wins)
            sure.append(decision.route in (DIRECT, PARTNER))
            brier.append((decision.p_partner - float(fast_wins)) ** 2)
            pairs.append((a, b))
        one.update(a)
        two.update(b)
    both, hit, conf = np.array(pairs), np.array(right), np.array(sure)
    return Paired(
        days=len(pairs),
        direct_s=float(both[:, 0].mean()),
        fast_s=float(both[:, 1].mean()),
        chosen_s=float(np.mean(chosen)),
        oracle_s=float(both.min(axis=1).mean()),
        accuracy=float(hit.mean()),
        confident=float(conf.mean()),
        confident_accuracy=float(hit[conf].mean()) if conf.any() else math.nan,
        brier=float(np.mean(brier)),
    )


def decide_pair(direct: StateTracker, fast: StateTracker, alpha: float = 0.2) -> Decision:
    """Decision on times alone (kappa 0, no stall), each route from its tracker."""
    a, b = direct.forecast(), fast.forecast()
    return decide_route(
        Delay(a.median_s, min(a.log_sd, 5.0)),
        Delay(b.median_s, min(b.log_sd, 5.0)),
        None,
        interval_s=3600.0,
        failures_per_s=1e-6,
        kappa=0.0,
        alpha=alpha,
    )
