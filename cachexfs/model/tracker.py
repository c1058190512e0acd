"""State tracker: where the filesystem stands today, relative to the location law.

Role: one-step-ahead forecast of the next checkpoint of one (route, access) from the checkpoints so far.
Single owner, no locks, O(150) memory; the daemon may keep one per route. Pure.

Five forecasters of e = log(T / law) run beside each other: clipped exponential averages of four speeds and
running medians of two lengths. Their combination is weighted by discounted past absolute error, so a noisy
but stationary tier (DataWarp) gets the slow ones and a drifting one (Edison) the fast ones.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from cachexfs.errors import UsageError
from cachexfs.model.arrays import Floats
from cachexfs.model.intervals import Interval, empirical_band, scaled_interval

SPEEDS = (0.05, 0.15, 0.30, 0.50)
MEDIANS = (9, 60)
CLIP = 1.5
"""Steps are clipped at this many scales: one straggler must not move the state."""
DISCOUNT = 0.97
SHARPNESS = 20.0
BURN_IN = 10
WINDOW = 150
WINDOW_MIN = 40
SCALE_MIN = 0.01
CUSUM_SLACK = 0.5
CUSUM_LIMIT = 5.0
CUSUM_STEP_MAX = 1.5
"""With this clip at least five checkpoints in a row must lie off before a change is announced."""
CHANGE_MEMORY = 3


@dataclass(frozen=True)
class Forecast:
    """Next checkpoint: median and intervals [s]; ``log_sd`` its scale; ``observed`` how many fed it."""

    median_s: float
    interval80: Interval
    interval95: Interval
    log_sd: float
    observed: int
    changed: bool


class StateTracker:
    """Feed ``update`` with each completed checkpoint; ask ``forecast`` for the next one."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=max(MEDIANS))
        self._residuals: deque[float] = deque(maxlen=WINDOW)
        self._means = np.zeros(len(SPEEDS))
        self._scales = np.zeros(len(SPEEDS))
        self._losses = np.zeros(len(SPEEDS) + len(MEDIANS))
        self._up = self._down = 0.0
        self._since_change = CHANGE_MEMORY
        self.observed = 0

    @property
    def ready(self) -> bool:
        """True once enough checkpoints were seen for a forecast."""
        return self.observed >= BURN_IN

    @property
    def changed(self) -> bool:
        """True if the level changed within the last three checkpoints: the forecast lags."""
        return self._since_change < CHANGE_MEMORY

    def update(self, seconds: float, expected_s: float = 1.0) -> None:
        """One checkpoint: ``seconds`` observed, ``expected_s`` what the location law says for its size."""
        if not (0.0 < seconds < math.inf and 0.0 < expected_s < math.inf):
            raise UsageError("times must be positive and finite")
        error = math.log(seconds / expected_s)
        if self.ready:
            self._learn(error)
        self._recent.append(error)
        self.observed += 1
        if self.observed == BURN_IN:
            start = np.array(self._recent)
            middle = float(np.median(start))
            self._means[:] = middle
            self._scales[:] = max(1.4826 * float(np.median(np.abs(start - middle))), 2 * SCALE_MIN)

    def _predictions(self) -> Floats:
        recent = np.array(self._recent)
        return np.concatenate([self._means, [np.median(recent[-k:]) for k in MEDIANS]])

    def _centre(self) -> float:
        weight = np.exp(-SHARPNESS * (self._losses - self._losses.min()))
        return float(np.sum(weight * self._predictions()) / np.sum(weight))

    def _learn(self, error: float) -> None:
        predictions, centre = self._predictions(), self._centre()
        self._residuals.append(error - centre)
        unit = max(2 * SCALE_MIN, float(self._scales.min()))
        loss = np.minimum(np.abs(error - predictions), 0.5) / unit
        self._losses = DISCOUNT * self._losses + (1 - DISCOUNT) * loss
        step = error - self._means
        bound = CLIP * self._scales
        self._detect((error - centre) / float(self._scales[1]))
        self._means = self._means + np.array(SPEEDS) * np.clip(step, -bound, bound)
        spread = 0.95 * self._scales + 0.05 * 1.2533 * np.minimum(np.abs(step), 4 * self._scales)
        self._scales = np.maximum(spread, SCALE_MIN)
        if self._since_change == 0:
            last = [*[*self._recent][-4:], error]
            self._means[2:] = float(np.median(last))  # the fast ones jump, the slow ones remember

    def _detect(self, z: float) -> None:
        clipped = min(max(z, -CUSUM_STEP_MAX), CUSUM_STEP_MAX)
        self._up = max(0.0, self._up + clipped - CUSUM_SLACK)
        self._down = max(0.0, self._down - clipped - CUSUM_SLACK)
        self._since_change += 1
        if max(self._up, self._down) >= CUSUM_LIMIT:
            self._up = self._down = 0.0
            self._since_change = 0

    def residuals(self) -> Floats:
        """One-step residuals so far, at most the last 150 [log]."""
        return np.array(self._residuals)

    def forecast(self, expected_s: float = 1.0) -> Forecast:
        """Forecast for a checkpoint whose location law says ``expected_s`` [s]. UsageError before burn-in."""
        if not self.ready:
            raise UsageError(f"{self.observed} checkpoints seen; a forecast needs {BURN_IN}")
        centre = math.log(expected_s) + self._centre()
        residuals = self.residuals()
        scale = float(self._scales[1])
        if residuals.size >= WINDOW_MIN:
            band80, band95 = empirical_band(residuals, 0.80), empirical_band(residuals, 0.95)
            pair = tuple(Interval(math.exp(centre + lo), math.exp(centre + hi)) for lo, hi in (band80, band95))
        else:
            pair = tuple(scaled_interval(centre, scale, q, "tracker") for q in (0.80, 0.95))
        return Forecast(math.exp(centre), pair[0], pair[1], scale, self.observed, self.changed)
