"""Delays: the time from capture to a boundary, as a distribution.

Role: what exposure, waste, route and simulation take as input. Frozen values, pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from cachexfs.errors import UsageError
from cachexfs.model.arrays import Floats

QUADRATURE = 64
LOG_SD_MIN = 1e-9
"""Below it a delay is a constant."""


@cache
def normal_nodes(count: int) -> tuple[Floats, Floats]:
    """Gauss-Hermite points and weights for a standard normal variable."""
    points, weights = np.polynomial.hermite_e.hermegauss(count)
    return points, weights / weights.sum()


@dataclass(frozen=True)
class Delay:
    """Lognormal body (``median_s`` [s], ``log_sd``), or the values in ``samples_s`` when there are any.

    ``failed`` is the chance that the boundary is never reached (timed out, abandoned), independent per
    checkpoint. A median of 0 is a boundary reached at once.
    """

    median_s: float
    log_sd: float = 0.0
    failed: float = 0.0
    samples_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        ok = math.isfinite(self.median_s) and self.median_s >= 0.0 and 0.0 <= self.log_sd <= 5.0
        if not (ok and 0.0 <= self.failed < 1.0):
            raise UsageError("a delay needs median_s >= 0, log_sd in [0, 5] and failed in [0, 1)")

    @classmethod
    def of(cls, samples_s: Floats, failed: float = 0.0) -> Delay:
        """The empirical distribution of ``samples_s`` (n,) [s], n >= 1."""
        values = np.sort(np.asarray(samples_s, dtype=np.float64))
        if values.size == 0 or not np.all(np.isfinite(values)) or values[0] < 0.0:
            raise UsageError("a delay needs at least one finite time >= 0")
        positive = values[values > 0.0]
        spread = float(np.std(np.log(positive))) if positive.size > 1 else 0.0
        return cls(float(np.median(values)), min(spread, 5.0), failed, tuple(values.tolist()))

    def _nodes(self) -> tuple[Floats, Floats]:
        """Points [s] and weights of E[g(D) | reached]."""
        if self.samples_s:
            values = np.array(self.samples_s)
            return values, np.full(values.size, 1.0 / values.size)
        points, weights = normal_nodes(QUADRATURE)
        return self.median_s * np.exp(self.log_sd * points), weights

    def mean_s(self) -> float:
        """E[D | reached] [s]."""
        points, weights = self._nodes()
        return float(np.sum(points * weights))

    def laplace(self, rate: float) -> float:
        """E[exp(-rate D) | reached], ``rate`` [1/s]."""
        points, weights = self._nodes()
        return float(np.sum(weights * np.exp(-rate * points)))

    def quantile_s(self, q: float) -> float:
        """Quantile of D [s] over all checkpoints; inf where failures reach it."""
        if not 0.0 < q < 1.0:
            raise UsageError("a quantile lies between 0 and 1")
        if q >= 1.0 - self.failed:
            return math.inf
        within = q / (1.0 - self.failed)
        if self.samples_s:
            return float(np.quantile(np.array(self.samples_s), within, method="inverted_cdf"))
        from scipy.special import ndtri

        return float(self.median_s * math.exp(self.log_sd * float(ndtri(within))))

    def survival(self, x_s: Floats) -> Floats:
        """P(D > x) for ``x_s`` (any shape) [s], failures included."""
        from scipy.special import ndtr

        x = np.asarray(x_s, dtype=np.float64)
        if self.samples_s:
            values = np.array(self.samples_s)
            reached = np.searchsorted(values, x, side="right") / values.size
        elif self.median_s == 0.0 or self.log_sd < LOG_SD_MIN:
            reached = (x >= self.median_s).astype(np.float64)
        else:
            with np.errstate(divide="ignore"):
                reached = ndtr(np.log(np.maximum(x, 0.0) / self.median_s) / self.log_sd)
        return 1.0 - (1.0 - self.failed) * reached

    def draw(self, rng: np.random.Generator, size: int) -> Floats:
        """``size`` draws [s]; inf where the boundary is never reached."""
        return self.from_scores(rng.standard_normal(size), rng.random(size))

    def from_scores(self, normal: Floats, uniform: Floats) -> Floats:
        """Draws [s] from standard normal scores (so that draws of two delays can be correlated)."""
        if self.samples_s:
            from scipy.special import ndtr

            values = np.array(self.samples_s)
            drawn = values[np.minimum((ndtr(normal) * values.size).astype(int), values.size - 1)]
        else:
            drawn = self.median_s * np.exp(self.log_sd * normal)
        return np.where(uniform < self.failed, np.inf, drawn)
