"""Location law: how long a checkpoint takes against writers, bytes and load.

Role: fits and evaluates y(N, b) = T / b [s/B], the law of docs/model.md section 1. Pure functions and a
frozen model; called by ``fitted``, the bench and the tests.

One shape ("element") of the law, with scale A profiled out:

    floor(N, b) = e^{s a(N)} (1 + h / b)                       what one writer needs alone, slowest of N
    share(N)    = (N / K)^gamma (1 + other / own) / (1 - u)    the server's share
    y           = A (floor^p + share^p)^(1/p)

K is the knee [writers], h the half-performance size [B] (Hockney), p the sharpness of the knee, gamma the
contention exponent, s straggler growth. The posterior over a grid of shapes is computed in closed form
(normal-inverse-gamma in the scale and the noise), so nothing iterates and nothing fails to converge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cachexfs.errors import UsageError
from cachexfs.model.arrays import Floats, blom, weighted_median

P_GRID = ((1.0, 1.0), (2.0, 0.5), (4.0, 0.25))
"""(sharpness of the knee, prior weight): a smooth knee is what queues with variable service show."""
GAMMA_GRID = (0.85, 0.90, 0.95, 1.0, 1.05, 1.10, 1.15)
GAMMA_SD = 0.10
STRAGGLE_GRID = (0.0, 0.05, 0.10)
STRAGGLE_SD = 0.07
HALF_BYTES_GRID = (0.0, 16 * 2.0**20, 64 * 2.0**20, 256 * 2.0**20)
"""Half-performance sizes [B]; used only when the data have different bytes per writer."""
KNEE_COUNT = 40
KNEE_OCTAVES_BELOW = 2
KNEE_OCTAVES_ABOVE = 10
OMEGA = 1.0
"""Weight of a level is (N / Nmax)^OMEGA: misfit far from the target must not bend the prediction there."""
NOISE_PRIOR = 0.05
"""Prior log sd of level medians about the law, and its weight in levels."""
NOISE_PRIOR_LEVELS = 4.0
LINE_WEIGHT = 1.0 / 3.0
"""Share of the straight line y = a + c N in the combined forecast, times the chance that the data show any
saturation: before that its slope is an accident (docs/model.md, 'What was tried')."""
SPEC_SD = 0.30
"""Log sd of a bandwidth that the user states."""
ELEMENTS_MAX = 256
BYTES_VARY_RATIO = 1.5


@dataclass(frozen=True)
class Levels:
    """Level medians, sorted by writers: the input of the fit.

    ``writers`` (L,), ``bytes_per_writer`` (L,) [B], ``seconds`` (L,) median completion [s], ``repeats`` (L,).
    """

    writers: Floats
    bytes_per_writer: Floats
    seconds: Floats
    repeats: Floats


@dataclass(frozen=True)
class LocationModel:
    """Posterior over shapes; every array has one entry per element.

    ``log_scale`` is log A [log s/B]; ``line`` is (a, c) of y = a + c N in [s/B] or None.
    ``noise_sd`` is the log sd of level medians about the law.
    """

    sharpness: Floats
    gamma: Floats
    straggle: Floats
    half_bytes: Floats
    log_knee: Floats
    log_scale: Floats
    weight: Floats
    line: tuple[float, float] | None
    noise_sd: float
    writers_min: float
    writers_max: float
    bytes_min: float
    bytes_max: float
    levels: int
    end_slope: float
    p_unsaturated: float

    def log_elements(
        self, writers: float, bytes_per_writer: float, other_bytes: float = 0.0, load: float = 0.0
    ) -> Floats:
        """log T of every element [log s], for one point.

        ``other_bytes`` [B] is what others write to the same servers in that time, ``load`` in [0, 1) their
        share of the bandwidth when it is known as a fraction.
        """
        log_n = np.log(writers)
        floor = self.straggle * blom(writers) + np.log1p(self.half_bytes / bytes_per_writer)
        share = self.gamma * (log_n - self.log_knee)
        if other_bytes > 0.0:
            log_own = self.gamma * log_n + (1.0 - self.gamma) * np.log(self.writers_max)
            share = share + np.log1p(other_bytes / (np.exp(log_own) * bytes_per_writer))
        if load > 0.0:
            share = share - np.log1p(-load)
        mixed = np.logaddexp(self.sharpness * floor, self.sharpness * share) / self.sharpness
        return self.log_scale + mixed + np.log(bytes_per_writer)

    def log_median_sd(
        self, writers: float, bytes_per_writer: float, other_bytes: float = 0.0, load: float = 0.0
    ) -> tuple[float, float]:
        """Log of the predicted median [log s] and the log sd of the law there (noise of levels included).

        Raises UsageError for writers < 1, bytes <= 0 or a load outside [0, 1).
        """
        if not (writers >= 1.0 and bytes_per_writer > 0.0 and other_bytes >= 0.0 and 0.0 <= load < 1.0):
            raise UsageError("writers must be 1 or more, bytes positive, load in [0, 1)")
        logs = self.log_elements(writers, bytes_per_writer, other_bytes, load)
        median = weighted_median(logs, self.weight)
        mean = float(np.sum(self.weight * logs))
        variance = float(np.sum(self.weight * (logs - mean) ** 2))
        if self.line is not None:
            # the line knows nothing of load: shift it by what the law says load costs
            shift = median - weighted_median(self.log_elements(writers, bytes_per_writer), self.weight)
            if other_bytes == 0.0 and load == 0.0:
                shift = 0.0
            line = float(np.log((self.line[0] + self.line[1] * writers) * bytes_per_writer)) + shift
            gap = line - median
            share = LINE_WEIGHT * (1.0 - self.p_unsaturated)
            median += share * gap
            variance = (1 - share) * variance + share * (1 - share) * gap * gap
        return median, float(np.sqrt(variance + self.noise_sd**2))

    def median(self, writers: float, bytes_per_writer: float, other_bytes: float = 0.0, load: float = 0.0) -> float:
        """Predicted median completion [s]."""
        return float(np.exp(self.log_median_sd(writers, bytes_per_writer, other_bytes, load)[0]))

    def bandwidth(self) -> float:
        """Posterior median of the saturated aggregate bandwidth, at the largest N fitted [B/s]."""
        log_n = np.log(self.writers_max)
        return float(np.exp(weighted_median(_log_bandwidth(self, log_n), self.weight)))


def _log_bandwidth(model: LocationModel, log_n: float) -> Floats:
    return log_n - model.log_scale - model.gamma * (log_n - model.log_knee)


@dataclass(frozen=True)
class _Grid:
    sharpness: Floats
    gamma: Floats
    straggle: Floats
    half_bytes: Floats
    log_knee: Floats
    log_prior: Floats


def _grid(writers: Floats, bytes_vary: bool) -> _Grid:
    halves = np.array(HALF_BYTES_GRID if bytes_vary else (0.0,))
    octave = np.log(2.0)
    knees = np.linspace(
        np.log(writers[0]) - KNEE_OCTAVES_BELOW * octave,
        np.log(writers[-1]) + KNEE_OCTAVES_ABOVE * octave,
        KNEE_COUNT,
    )
    sharp = np.array([p for p, _ in P_GRID])
    prior = np.log(np.array([w for _, w in P_GRID]))
    index, gamma, straggle, half, knee = (
        a.ravel()
        for a in np.meshgrid(
            np.arange(sharp.size), np.array(GAMMA_GRID), np.array(STRAGGLE_GRID), halves, knees, indexing="ij"
        )
    )
    log_prior = prior[index] - 0.5 * ((gamma - 1.0) / GAMMA_SD) ** 2 - 0.5 * (straggle / STRAGGLE_SD) ** 2
    return _Grid(sharp[index], gamma, straggle, half, knee, log_prior)


def straight_line(writers: Floats, per_byte_s: Floats) -> tuple[float, float] | None:
    """Non-negative y = a + c N by least squares on the relative error, weight N / Nmax. Needs two levels.

    ``per_byte_s`` (L,) [s/B]; returns (a, c) in [s/B] or None.
    """
    if writers.size < 2:
        return None
    root = np.sqrt(writers / writers.max())
    columns = np.stack([root / per_byte_s, root * writers / per_byte_s], axis=1)
    # two coefficients: the constrained optimum is the free one, or lies on an axis
    candidates = [np.linalg.lstsq(columns, root, rcond=None)[0]]
    if np.any(candidates[0] < 0.0):
        one = columns.T @ root / np.sum(columns**2, axis=0)
        candidates = [np.array([one[0], 0.0]), np.array([0.0, one[1]])]
    losses = [float(np.sum((columns @ c - root) ** 2)) for c in candidates]
    a, c = candidates[int(np.argmin(losses))]
    return float(a), float(c)


def fit_location(levels: Levels, bandwidth_spec: float | None = None) -> LocationModel:
    """Posterior of the location law.

    ``bandwidth_spec`` [B/s]: the site's stated aggregate bandwidth, used as a prior with log sd 0.3.
    Any number of levels >= 1 fits; with few, the spread says so. Source: docs/model.md section 1.
    """
    if levels.writers.size == 0:
        raise UsageError("no level of writers to fit; give at least one row with seconds, writers and bytes")
    n, b = levels.writers, levels.bytes_per_writer
    grid = _grid(n, float(b.max() / b.min()) > BYTES_VARY_RATIO)
    floor = grid.straggle[:, None] * blom(n)[None, :] + np.log1p(grid.half_bytes[:, None] / b[None, :])
    share = grid.gamma[:, None] * (np.log(n)[None, :] - grid.log_knee[:, None])
    p = grid.sharpness[:, None]
    shape = np.logaddexp(p * floor, p * share) / p

    weight = (n / n.max()) ** OMEGA
    weight *= n.size / weight.sum()
    residual = np.log(levels.seconds / b)[None, :] - shape
    log_scale = residual @ weight / weight.sum()
    squares = ((residual - log_scale[:, None]) ** 2) @ weight
    prior_squares = NOISE_PRIOR_LEVELS * NOISE_PRIOR**2
    # scale (flat prior on its log) and noise (scaled inverse chi-squared) integrated out
    freedom = NOISE_PRIOR_LEVELS + n.size - 1.0
    evidence = grid.log_prior - 0.5 * freedom * np.log(prior_squares + squares)
    if bandwidth_spec is not None:
        log_n = float(np.log(n[-1]))
        log_b = log_n - log_scale - grid.gamma * (log_n - grid.log_knee)
        evidence = evidence - 0.5 * ((log_b - np.log(bandwidth_spec)) / SPEC_SD) ** 2
    posterior = np.exp(evidence - evidence.max())
    posterior /= posterior.sum()
    noise = np.sqrt((prior_squares + squares) / freedom)

    # the line cannot know a stated bandwidth
    use_line = bandwidth_spec is None and np.unique(n).size > 1
    keep = np.argsort(posterior)[::-1][:ELEMENTS_MAX]
    kept = posterior[keep] / posterior[keep].sum()
    ratio = p[keep, 0] * (share[keep, -1] - floor[keep, -1])
    share_part = 1.0 / (1.0 + np.exp(-np.clip(ratio, -700.0, 700.0)))
    return LocationModel(
        sharpness=grid.sharpness[keep],
        gamma=grid.gamma[keep],
        straggle=grid.straggle[keep],
        half_bytes=grid.half_bytes[keep],
        log_knee=grid.log_knee[keep],
        log_scale=log_scale[keep],
        weight=kept,
        line=straight_line(n, levels.seconds / b) if use_line else None,
        noise_sd=float(np.sum(kept * noise[keep])),
        writers_min=float(n[0]),
        writers_max=float(n[-1]),
        bytes_min=float(b.min()),
        bytes_max=float(b.max()),
        levels=int(np.unique(n).size),
        end_slope=float(np.sum(kept * grid.gamma[keep] * share_part)),
        p_unsaturated=float(np.sum(kept[ratio < 0.0])),
    )


def others_bound(alone_s: float, own_bytes: float, other_bytes: float, bandwidth: float) -> float:
    """Completion with others writing [s]: the servers must move all bytes, ``max(alone, all / bandwidth)``.

    ``own_bytes`` and ``other_bytes`` [B], ``bandwidth`` [B/s] of the servers, from any neighbour benchmark.
    It holds while the others write for as long as this checkpoint does.
    """
    if not (alone_s > 0.0 and own_bytes > 0.0 and other_bytes >= 0.0 and bandwidth > 0.0):
        raise UsageError("times, bytes and bandwidth must be positive")
    return max(alone_s, (own_bytes + other_bytes) / bandwidth)


def pinned_straggler(slowest_s: float, model: LocationModel, writers: float, bytes_per_writer: float) -> bool:
    """True if ``slowest_s`` exceeds the work-conserving bound N b / B + t0 + b / r by more than a quarter.

    A server that gives freed bandwidth to whoever still writes cannot be that late: something is stuck.
    """
    shared = writers * bytes_per_writer / model.bandwidth()
    alone = model.median(1.0, bytes_per_writer)
    return slowest_s > 1.25 * (shared + alone)
