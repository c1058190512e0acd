"""Rare stragglers: counted, never extrapolated from a fitted body.

Role: posterior of the chance that a checkpoint takes more than a multiple of its forecast. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cachexfs.errors import UsageError
from cachexfs.model.arrays import Floats

MULTIPLES = (1.5, 2.0, 5.0)
SAYING = "rare extreme stragglers are not predicted; these are counts"


@dataclass(frozen=True)
class TailCount:
    """``exceeded`` of ``total`` checkpoints took more than ``multiple`` times the forecast.

    ``probability`` is the mean, ``low`` and ``high`` the 95% interval of the Beta(1/2 + k, 1/2 + n - k)
    posterior (Jeffreys prior).
    """

    multiple: float
    exceeded: int
    total: int
    probability: float
    low: float
    high: float


def count_tail(ratios: Floats, multiples: Sequence[float] = MULTIPLES) -> tuple[TailCount, ...]:
    """Counts for ``ratios`` (n,) of observed time to forecast [no unit]; infinite where it never completed."""
    from scipy.special import betaincinv

    values = np.asarray(ratios, dtype=np.float64)
    if np.any(np.isnan(values)):
        raise UsageError("ratios must not be NaN")
    counts: list[TailCount] = []
    for multiple in multiples:
        k, n = int(np.sum(values > multiple)), int(values.size)
        a, b = 0.5 + k, 0.5 + n - k
        low, high = (float(betaincinv(a, b, q)) for q in (0.025, 0.975))
        counts.append(TailCount(float(multiple), k, n, a / (a + b), low, high))
    return tuple(counts)
