"""Intervals: scales times factors that were calibrated on other systems.

Role: turns a log sd into an interval that covers what it says. The normal quantile does not (docs/model.md
section 4): level medians of a filesystem have heavy tails. ``FACTORS`` is computed by
``python bench/bench_model.py --calibrate`` and can be computed again there. Pure; standard library only, except
for calibration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachexfs.errors import UsageError

if TYPE_CHECKING:
    from cachexfs.model.arrays import Floats

FACTORS: dict[str, dict[float, float]] = {
    "file-per-process": {0.80: 1.14, 0.95: 3.14},
    "shared-file": {0.80: 2.36, 0.95: 4.26},
    "tracker": {0.80: 1.71, 0.95: 6.62},
}
"""Half width of the interval of one checkpoint in log sd, by access (unknown access counts as file-per-process);
``tracker``: one step ahead, before enough residuals are known."""


@dataclass(frozen=True)
class Interval:
    """Bounds in seconds."""

    low_s: float
    high_s: float

    def holds(self, seconds: float) -> bool:
        """True if ``seconds`` lies inside."""
        return self.low_s <= seconds <= self.high_s


def scaled_interval(log_median: float, log_sd: float, coverage: float, kind: str) -> Interval:
    """exp(log_median -+ factor * log_sd) [s].

    ``coverage`` 0.80 or 0.95, ``kind`` a key of ``FACTORS``, '' for unknown access.
    """
    factors = FACTORS[kind or "file-per-process"]
    if coverage not in factors:
        raise UsageError("intervals are calibrated for 0.80 and 0.95 only")
    reach = factors[coverage] * log_sd
    return Interval(math.exp(log_median - reach), math.exp(min(log_median + reach, 700.0)))


def weighted_conformal_factor(scaled: Floats, weights: Floats, coverage: float) -> float:
    """Quantile of |residual| / scale in which each system counts the same (``weights`` (n,)).

    Leave-one-system-out conformal calibration, in the spirit of Dunn, Wasserman and Ramdas 2022.
    """
    import numpy as np  # only calibration needs it; the tracker must not pay

    order = np.argsort(np.abs(scaled))
    cumulative = np.cumsum(weights[order])
    index = int(np.searchsorted(cumulative, coverage * cumulative[-1]))
    return float(np.abs(scaled)[order[min(index, order.size - 1)]])


def empirical_band(residuals: Iterable[float], coverage: float) -> tuple[float, float]:
    """Lower and upper offsets [log] that leave (1 - coverage) / 2 of past one-step residuals on each side.

    Ranks as for a new draw: k = (n + 1) (1 - coverage) / 2, interpolated between order statistics, n >= 1.
    """
    values = sorted(residuals)
    rank = max((len(values) + 1) * (1.0 - coverage) / 2.0, 1.0)
    return _ranked(values, rank), _ranked(values, len(values) + 1 - rank)


def _ranked(values: Sequence[float], rank: float) -> float:
    """Order statistic of a fractional ``rank`` from 1 to n."""
    below = min(max(math.floor(rank), 1), len(values))
    above = min(below + 1, len(values))
    share = min(max(rank - below, 0.0), 1.0)
    return values[below - 1] * (1.0 - share) + values[above - 1] * share
