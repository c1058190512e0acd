"""The slowest of N dependent writers.

Role: from the typical writer to the checkpoint: within-checkpoint spread, what all writers share, regimes,
writers still in flight. Pure; docs/model.md section 3.

    log T_ij = log m + U_j + sigma Z_ij,   U_j ~ sum_k share_k N(mean_k, sd_k^2)   shared by all writers of j
    P(T_(N) <= t | U = v) = Phi((log t - log m - v) / sigma)^(N^theta)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cachexfs.errors import UsageError
from cachexfs.model.arrays import Floats, mad_sd
from cachexfs.model.delays import normal_nodes

THETA_DEFAULT = 0.45
"""Median over 282 public IO500 phases of log N_eff / log N."""
SIGMA_MIN = 0.005
NODES = 20
REGIME_CHECKPOINTS_MIN = 30
REGIME_CHECKPOINTS_MAX = 5000
REGIME_BIC_GAIN = 6.0
SIGMA_PRIOR_MEDIAN, SIGMA_PRIOR_SD = 0.12, 1.0


@dataclass(frozen=True)
class Regime:
    """A state of the filesystem: its ``share`` of checkpoints, ``mean`` and ``sd`` of U [log]."""

    share: float
    mean: float
    sd: float


@dataclass(frozen=True)
class Spread:
    """``sigma`` log sd among writers of a checkpoint, ``theta`` with N_eff = N^theta, ``regimes`` of U."""

    sigma: float
    theta: float = THETA_DEFAULT
    regimes: tuple[Regime, ...] = (Regime(1.0, 0.0, 0.0),)

    def __post_init__(self) -> None:
        shares = sum(r.share for r in self.regimes)
        if not (self.sigma > 0.0 and 0.0 <= self.theta <= 1.0 and abs(shares - 1.0) < 1e-6):
            raise UsageError("a spread needs sigma > 0, theta in [0, 1] and regimes whose shares sum to 1")

    @property
    def correlation(self) -> float:
        """Intra-checkpoint correlation of log T: var U / (var U + sigma^2)."""
        mean = sum(r.share * r.mean for r in self.regimes)
        var = sum(r.share * (r.sd**2 + (r.mean - mean) ** 2) for r in self.regimes)
        return var / (var + self.sigma**2)

    def cdf(self, seconds: Floats, median_s: float, writers: float) -> Floats:
        """P(slowest of ``writers`` <= ``seconds``) (any shape), ``median_s`` the typical writer's median [s]."""
        from scipy.special import log_ndtr

        points, weights = normal_nodes(NODES)
        log_t = np.log(np.maximum(np.asarray(seconds, dtype=np.float64), 1e-300))[..., None]
        power = writers**self.theta
        total = np.zeros(log_t.shape[:-1])
        for regime in self.regimes:
            z = (log_t - math.log(median_s) - regime.mean - regime.sd * points) / self.sigma
            total = total + regime.share * np.sum(weights * np.exp(power * log_ndtr(z)), axis=-1)
        return total

    def quantile_s(self, q: float, median_s: float, writers: float) -> float:
        """Quantile of the slowest writer [s]."""
        if not 0.0 < q < 1.0:
            raise UsageError("a quantile lies between 0 and 1")
        low, high = self._range(median_s, writers)
        for _ in range(60):
            middle = 0.5 * (low + high)
            if float(self.cdf(np.array(math.exp(middle)), median_s, writers)) < q:
                low = middle
            else:
                high = middle
        return math.exp(high)

    def mean_s(self, median_s: float, writers: float, cap_s: float = math.inf) -> tuple[float, float]:
        """(E[min(T_(N), cap)] [s], probability beyond the cap or beyond the grid)."""
        low, high = self._range(median_s, writers)
        grid = np.exp(np.linspace(low, min(high, math.log(cap_s)) if cap_s < math.inf else high, 2000))
        beyond = 1.0 - self.cdf(grid, median_s, writers)
        area = float(grid[0] + np.sum(0.5 * (beyond[1:] + beyond[:-1]) * np.diff(grid)))
        return area, float(beyond[-1])

    def _range(self, median_s: float, writers: float) -> tuple[float, float]:
        reach = self.sigma * (6.0 + math.sqrt(2.0 * math.log(writers + 1.0)))
        low = min(r.mean - 6.0 * r.sd for r in self.regimes) - reach
        high = max(r.mean + 6.0 * r.sd for r in self.regimes) + reach
        return math.log(median_s) + low, math.log(median_s) + high

    def remaining(self, now_s: float, median_s: float, writers: float, q: float) -> float:
        """Quantile of T_(N) given that it has not completed at ``now_s`` [s from the start].

        P(T <= t | T > c) = (G(t) - G(c)) / (1 - G(c)); inf when the model says it should long be over.
        """
        before = float(self.cdf(np.array(now_s), median_s, writers))
        target = before + q * (1.0 - before)
        if target >= 1.0 - 1e-9:
            return math.inf
        return max(now_s, self.quantile_s(target, median_s, writers))


def fit_spread(checkpoints: Sequence[Floats], levels: Sequence[float] | None = None) -> Spread:
    """Spread from per-writer times [s] of several checkpoints, at least one with 4 writers or more.

    ``levels`` (default: the number of writers) tells which checkpoints share a location. sigma is the mean of
    q84 - q50 of log T (the upper half: early finishers do not matter for the slowest); theta the median of
    log(1 / (1 - Phi(z))) / log N with z = (log max - log median) / sigma_j, within [0, 1]; U the log medians
    about their level's median.
    """
    from scipy.special import log_ndtr

    logs = [np.log(np.asarray(c, dtype=np.float64)) for c in checkpoints]
    wide = [x for x in logs if x.size >= 4]
    if not wide:
        raise UsageError("the spread among writers needs a checkpoint with 4 writers or more")
    sigmas = np.array([max(np.quantile(x, 0.84) - np.median(x), SIGMA_MIN) for x in wide])
    thetas = [
        float(np.clip(-log_ndtr(-(x.max() - np.median(x)) / s) / math.log(x.size), 0.0, 1.0))
        for x, s in zip(wide, sigmas, strict=True)
    ]
    keys = [float(x.size) for x in logs] if levels is None else [float(v) for v in levels]
    shared = shared_effects(np.array([float(np.median(x)) for x in logs]), np.array(keys))
    return Spread(float(np.mean(sigmas)), float(np.median(thetas)), fit_regimes(shared))


def spread_of_ratio(ratio: float, writers: float, theta: float = THETA_DEFAULT) -> float:
    """sigma [log] at which the median of slowest / typical is ``ratio``, for N_eff = writers^theta."""
    from scipy.special import ndtri

    score = float(ndtri(0.5 ** (1.0 / max(writers, 2.0) ** theta)))
    return max(math.log(max(ratio, 1.0)) / max(score, 0.05), SIGMA_MIN)


def shared_effects(log_medians: Floats, levels: Floats) -> Floats:
    """U of each checkpoint: its log median about the median of its level; levels seen once are left out."""
    parts = [log_medians[levels == v] for v in np.unique(levels)]
    kept = [p - np.median(p) for p in parts if p.size > 1]
    return np.concatenate(kept) if kept else np.zeros(0)


def fit_regimes(effects: Floats) -> tuple[Regime, ...]:
    """One regime, or two when there are 30 checkpoints or more and BIC improves by more than 6.

    EM from the lower and upper half; sd no smaller than a tenth of the overall one (no spikes).
    """
    if effects.size < 2:
        return (Regime(1.0, 0.0, 0.0),)
    one = (Regime(1.0, 0.0, max(mad_sd(effects), 1e-3)),)
    if effects.size < REGIME_CHECKPOINTS_MIN or float(np.std(effects)) < 1e-6:
        return one
    if effects.size > REGIME_CHECKPOINTS_MAX:  # evenly spaced order statistics say as much
        picks = np.linspace(0, effects.size - 1, REGIME_CHECKPOINTS_MAX).astype(int)
        effects = np.sort(effects)[picks]
    floor = 0.1 * float(np.std(effects))
    middle = float(np.median(effects))
    mean = np.array([np.mean(effects[effects <= middle]), np.quantile(effects, 0.95)])
    sd = np.array([np.std(effects), np.std(effects)])
    share = np.array([0.8, 0.2])
    for _ in range(200):
        density = share * np.exp(-0.5 * ((effects[:, None] - mean) / sd) ** 2) / sd
        belongs = density / np.maximum(density.sum(axis=1, keepdims=True), 1e-300)
        count = np.maximum(belongs.sum(axis=0), 1e-9)
        mean = (belongs * effects[:, None]).sum(axis=0) / count
        sd = np.sqrt((belongs * (effects[:, None] - mean) ** 2).sum(axis=0) / count)
        sd = np.maximum(sd, floor)
        share = count / count.sum()
    two_log = float(np.sum(np.log(np.maximum((share * _normal(effects[:, None], mean, sd)).sum(axis=1), 1e-300))))
    one_log = float(np.sum(np.log(_normal(effects, np.mean(effects), max(float(np.std(effects)), 1e-9)))))
    gain = 2 * (two_log - one_log) - 3 * math.log(effects.size)
    if gain <= REGIME_BIC_GAIN:
        return one
    order = np.argsort(mean)
    return tuple(Regime(float(share[i]), float(mean[i]), float(sd[i])) for i in order)


def _normal(x: Floats, mean: Floats | float, sd: Floats | float) -> Floats:
    return np.exp(-0.5 * ((x - mean) / sd) ** 2) / (sd * math.sqrt(2 * math.pi))


@dataclass(frozen=True)
class CensoredFit:
    """Median writer ``exp(mu)`` [s] and log sd ``sigma`` from writers done and writers in flight."""

    mu: float
    sigma: float
    done: int
    in_flight: int

    @property
    def median_s(self) -> float:
        """Median writer [s]."""
        return math.exp(self.mu)


def fit_censored(done_s: Floats, in_flight: int, now_s: float) -> CensoredFit:
    """Maximum likelihood of a lognormal with ``done_s`` (k,) [s] seen and ``in_flight`` writers beyond ``now_s``.

    log L = sum_done [log phi((l - mu) / sigma) - log sigma] + in_flight log Phi((mu - log now) / sigma), with a
    weak lognormal prior on sigma (median 0.12, log sd 1.0) that holds it when few are done.
    """
    from scipy.optimize import minimize
    from scipy.special import log_ndtr

    times = np.asarray(done_s, dtype=np.float64)
    if times.size == 0 or in_flight < 0:
        raise UsageError("no writer has finished: nothing can be said yet")
    if not (np.all(times > 0.0) and np.all(np.isfinite(times)) and (in_flight == 0 or now_s >= times.max())):
        raise UsageError("finished times must be positive and not later than now")
    logs = np.log(times)
    log_now = math.log(now_s) if in_flight else 0.0

    def loss(point: Floats) -> float:
        mu, log_sigma = float(point[0]), float(np.clip(point[1], -7.0, 3.0))
        sigma = math.exp(log_sigma)
        value = 0.5 * float(np.sum(((logs - mu) / sigma) ** 2)) + logs.size * log_sigma
        value += 0.5 * ((log_sigma - math.log(SIGMA_PRIOR_MEDIAN)) / SIGMA_PRIOR_SD) ** 2
        if in_flight:
            value -= in_flight * float(log_ndtr((mu - log_now) / sigma))
        return float(value)

    start = np.array([float(np.max(logs)) if in_flight > logs.size else float(np.median(logs)), math.log(0.15)])
    best = minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-6, "maxiter": 400})
    return CensoredFit(float(best.x[0]), math.exp(float(np.clip(best.x[1], -7.0, 3.0))), int(times.size), in_flight)
