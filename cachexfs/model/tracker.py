"""State tracker: where the filesystem stands today, relative to the location law.

Role: one-step-ahead forecast of the next checkpoint of one (route, access) from the checkpoints so far. Standard
library only, so that a daemon may keep one per route. Single owner, no locks, memory bounded by 150 numbers.

Six forecasters of e = log(T / law) run beside each other: clipped exponential averages of four speeds and
running medians of two lengths. Their combination is weighted by discounted past absolute error, so a noisy
but stationary tier (DataWarp) gets the slow ones and a drifting one (Edison) the fast ones.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from cachexfs.errors import UsageError
from cachexfs.model.intervals import Interval, empirical_band, scaled_interval

SPEEDS = (0.05, 0.15, 0.30, 0.50)
MEDIANS = (9, 60)
REFERENCE = 1
"""Index of the speed whose scale standardises errors and is reported."""
FIRST_FAST = 2
CLIP = 1.5
"""Steps are clipped at this many scales: one straggler must not move the state."""
DISCOUNT = 0.97
SHARPNESS = 20.0
LOSS_MAX = 0.5
BURN_IN = 10
WINDOW = 150
WINDOW_MIN = 40
SCALE_MIN = 0.01
SCALE_MEMORY = 0.95
MEAN_ABS_TO_SD = 1.2533
CUSUM_SLACK = 0.5
CUSUM_LIMIT = 5.0
CUSUM_STEP_MAX = 1.5
"""With this clip at least five checkpoints in a row must lie off before a change is announced."""
CHANGE_MEMORY = 3
JUMP_COUNT = 5


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
        self._means = [0.0] * len(SPEEDS)
        self._scales = [0.0] * len(SPEEDS)
        self._losses = [0.0] * (len(SPEEDS) + len(MEDIANS))
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
            middle = statistics.median(self._recent)
            spread = 1.4826 * statistics.median(abs(e - middle) for e in self._recent)
            self._means = [middle] * len(SPEEDS)
            self._scales = [max(spread, 2 * SCALE_MIN)] * len(SPEEDS)

    def _predictions(self) -> list[float]:
        recent = list(self._recent)
        return [*self._means, *(statistics.median(recent[-count:]) for count in MEDIANS)]

    def _centre(self, predictions: list[float]) -> float:
        best = min(self._losses)
        weights = [math.exp(-SHARPNESS * (loss - best)) for loss in self._losses]
        return sum(w * p for w, p in zip(weights, predictions, strict=True)) / sum(weights)

    def _learn(self, error: float) -> None:
        predictions = self._predictions()
        centre = self._centre(predictions)
        self._residuals.append(error - centre)
        unit = max(2 * SCALE_MIN, min(self._scales))
        self._losses = [
            DISCOUNT * loss + (1 - DISCOUNT) * min(abs(error - p), LOSS_MAX) / unit
            for loss, p in zip(self._losses, predictions, strict=True)
        ]
        self._detect((error - centre) / self._scales[REFERENCE])
        for i, speed in enumerate(SPEEDS):
            step, scale = error - self._means[i], self._scales[i]
            self._means[i] += speed * min(max(step, -CLIP * scale), CLIP * scale)
            drift = (1 - SCALE_MEMORY) * MEAN_ABS_TO_SD * min(abs(step), 4 * scale)
            self._scales[i] = max(SCALE_MEMORY * scale + drift, SCALE_MIN)
        if self._since_change == 0:  # the fast ones jump, the slow ones remember
            now = statistics.median([*list(self._recent)[-JUMP_COUNT + 1 :], error])
            self._means[FIRST_FAST:] = [now] * (len(SPEEDS) - FIRST_FAST)

    def _detect(self, z: float) -> None:
        clipped = min(max(z, -CUSUM_STEP_MAX), CUSUM_STEP_MAX)
        self._up = max(0.0, self._up + clipped - CUSUM_SLACK)
        self._down = max(0.0, self._down - clipped - CUSUM_SLACK)
        self._since_change += 1
        if max(self._up, self._down) >= CUSUM_LIMIT:
            self._up = self._down = 0.0
            self._since_change = 0

    def residuals(self) -> tuple[float, ...]:
        """One-step residuals so far, at most the last 150 [log]."""
        return tuple(self._residuals)

    def forecast(self, expected_s: float = 1.0) -> Forecast:
        """Forecast for a checkpoint whose location law says ``expected_s`` [s]. UsageError before burn-in."""
        if not self.ready:
            raise UsageError(f"{self.observed} checkpoints seen; a forecast needs {BURN_IN}")
        centre = math.log(expected_s) + self._centre(self._predictions())
        scale = self._scales[REFERENCE]
        intervals = []
        for coverage in (0.80, 0.95):
            if len(self._residuals) >= WINDOW_MIN:
                low, high = empirical_band(self._residuals, coverage)
                intervals.append(Interval(math.exp(centre + low), math.exp(centre + high)))
            else:
                intervals.append(scaled_interval(centre, scale, coverage, "tracker"))
        return Forecast(math.exp(centre), intervals[0], intervals[1], scale, self.observed, self.changed)
