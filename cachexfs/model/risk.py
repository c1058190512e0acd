"""Exposure: how much training stands at risk, and what checkpointing costs.

Role: age of the newest durable state, waste, best interval. Pure functions;
derivations in docs/model.md sections 6 and 7. All times in seconds, rates in 1/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cachexfs.errors import UsageError
from cachexfs.model.arrays import Floats
from cachexfs.model.delays import Delay

PHASES = 4000
PRODUCT_MIN = 1e-12
STEPS_MAX = 100_000


@dataclass(frozen=True)
class Exposure:
    """Age of the newest state that reached the boundary, at a random moment.

    ``mean_s`` exact mean, ``first_order_s`` = interval / 2 + E[D] + interval q / (1 - q), ``median_s`` and
    ``p95_s`` quantiles [s]; ``stragglers_s`` is E[D] minus the median of D: what stragglers add.
    """

    interval_s: float
    mean_s: float
    first_order_s: float
    median_s: float
    p95_s: float
    stragglers_s: float

    def steps(self, step_s: float) -> float:
        """Mean exposure in training steps of ``step_s`` [s]."""
        return self.mean_s / step_s

    def gpu_hours(self, gpus: int) -> float:
        """Mean exposure in GPU-hours: what a failure now would cost on ``gpus`` GPUs."""
        return self.mean_s * gpus / 3600.0


def _products(interval_s: float, delay: Delay) -> tuple[Floats, Floats]:
    """Phases (M,) and cumulative survival products (J, M): P(the last j+1 captures are all not yet durable)."""
    phase = (np.arange(PHASES) + 0.5) * (interval_s / PHASES)
    rows: list[Floats] = []
    product = np.ones(PHASES)
    for j in range(STEPS_MAX):
        product = product * delay.survival(phase + j * interval_s)
        rows.append(product)
        if product.max() < PRODUCT_MIN:
            return phase, np.array(rows)
        if j * PHASES > 4_000_000:
            break
    raise UsageError("the delay is so long against the interval that the exposure cannot be computed")


def exposure(interval_s: float, delay: Delay) -> Exposure:
    """Exact exposure for captures every ``interval_s`` whose boundary is reached after independent ``delay``.

    At phase phi after the newest capture the age exceeds x iff no capture of age <= x is durable, so
    P(A > x) = mean over phi of prod_{j: phi + j tau <= x} S(phi + j tau); integrating over x,
    E[A] = tau / 2 + tau mean_phi sum_j prod_{i <= j} S(phi + i tau). Completions may overtake each other.
    """
    if not (0.0 < interval_s < math.inf):
        raise UsageError("the interval must be positive")
    phase, products = _products(interval_s, delay)
    mean = interval_s / 2.0 + interval_s * float(np.sum(np.mean(products, axis=1)))
    failed = delay.failed
    return Exposure(
        interval_s,
        mean,
        interval_s / 2.0 + delay.mean_s() + interval_s * failed / (1.0 - failed),
        _age_quantile(0.50, interval_s, phase, products),
        _age_quantile(0.95, interval_s, phase, products),
        delay.mean_s() - delay.median_s,
    )


def _age_quantile(q: float, interval_s: float, phase: Floats, products: Floats) -> float:
    """Smallest x with P(A > x) <= 1 - q: bisection on the phase-averaged step function."""
    ages = phase[None, :] + interval_s * np.arange(products.shape[0] + 1)[:, None]
    before = np.concatenate([np.ones((1, phase.size)), products])
    mass = before[:-1] - before[1:]  # P(age = phi + j tau | phi)
    flat, weight = ages[:-1].ravel(), mass.ravel()
    order = np.argsort(flat)
    cumulative = np.cumsum(weight[order])
    return float(flat[order[min(int(np.searchsorted(cumulative, q * cumulative[-1])), flat.size - 1)]])


@dataclass(frozen=True)
class Waste:
    """Share of wall time that is not training: ``exact`` (renewal formula) and ``first_order``."""

    exact: float
    first_order: float
    checkpointing: float
    rollback: float


def waste(
    interval_s: float,
    stall_s: float,
    failures_per_s: float,
    partner: Delay,
    pfs: Delay,
    kappa: float,
    recovery_s: float,
) -> Waste:
    """Waste for ``interval_s`` of training between captures that stall training for ``stall_s`` each.

    ``partner`` and ``pfs`` are measured from the start of the stall; ``kappa`` is the share of failures that
    only the PFS copy covers; ``recovery_s`` from failure to training again. Poisson failures. The exact formula is

        1 - lambda tau (1 - q) e^{-lambda (tau + R)} phi / ((1 - r) (1 - q r)),  r = e^{-lambda (tau + stall)}

    with phi = (1 - kappa) E[e^{-lambda D_partner}] + kappa E[e^{-lambda D_pfs}]: exact for kappa 0 or 1 and
    boundaries reached in order, otherwise to first order in lambda D. For D = stall, q = 0 it is Daly's 2006.
    """
    _check_rates(interval_s, stall_s, failures_per_s, kappa, recovery_s)
    period = interval_s + stall_s
    failed = (1 - kappa) * partner.failed + kappa * pfs.failed
    lost = 0.0
    if failures_per_s > 0.0:
        delay_s = (1 - kappa) * partner.mean_s() + kappa * pfs.mean_s()
        lost = failures_per_s * (period / 2 + delay_s + period * failed / (1 - failed) + recovery_s)
    checkpointing = stall_s / period
    first = checkpointing + (1 - checkpointing) * lost
    exact = 1.0 - _efficiency(interval_s, stall_s, failures_per_s, partner, pfs, kappa, recovery_s)
    return Waste(min(exact, 1.0), min(first, 1.0), checkpointing, min((1 - checkpointing) * lost, 1.0))


def _efficiency(
    interval_s: float, stall_s: float, rate: float, partner: Delay, pfs: Delay, kappa: float, recovery_s: float
) -> float:
    period = interval_s + stall_s
    if rate * period < 1e-12:
        return interval_s / period
    total = 0.0
    for share, delay in ((1 - kappa, partner), (kappa, pfs)):
        r = math.exp(-rate * period)
        q = delay.failed
        head = rate * interval_s * (1 - q) * math.exp(-rate * (interval_s + recovery_s))
        total += share * head * delay.laplace(rate) / (-math.expm1(-rate * period) * (1 - q * r))
    return total


def _check_rates(interval_s: float, stall_s: float, rate: float, kappa: float, recovery_s: float) -> None:
    if not (0.0 < interval_s < math.inf and 0.0 <= stall_s < math.inf and 0.0 <= recovery_s < math.inf):
        raise UsageError("interval must be positive, stall and recovery not negative (seconds)")
    if not (0.0 <= rate < math.inf and 0.0 <= kappa <= 1.0):
        raise UsageError("the failure rate must not be negative and kappa must lie in [0, 1]")


@dataclass(frozen=True)
class BestInterval:
    """Best training time between captures [s]: ``young_s``, ``daly_s`` and the exact optimum ``exact_s``.

    ``chosen_s`` respects ``floor_s`` (one checkpoint in flight: no shorter than the 95th percentile of D).
    """

    young_s: float
    daly_s: float
    exact_s: float
    chosen_s: float
    floor_s: float


def optimal_interval(
    stall_s: float, failures_per_s: float, delay: Delay | None = None, one_in_flight: bool = True
) -> BestInterval:
    """Interval that wastes least, for ``stall_s`` > 0 per capture and Poisson failures.

    Without failed checkpoints the exact optimum solves 1 - lambda tau = e^{-lambda (tau + stall)}, that is
    tau = (1 + W0(-e^{-(1 + lambda stall)})) / lambda (Lambert W). It does not depend on the delay: D only adds
    a constant factor to the efficiency. With failed checkpoints (``delay.failed``) it is found numerically.
    """
    if not (0.0 < stall_s < math.inf and 0.0 < failures_per_s < math.inf):
        raise UsageError("the best interval needs a stall above 0 s and a failure rate above 0")
    x = failures_per_s * stall_s
    young = math.sqrt(2.0 * stall_s / failures_per_s)
    mtbf = 1.0 / failures_per_s
    root = math.sqrt(x / 2.0)
    daly = young * (1.0 + root / 3.0 + root * root / 9.0) - stall_s if stall_s < 2.0 * mtbf else mtbf
    failed = delay.failed if delay is not None else 0.0
    exact = _lambert_interval(x) / failures_per_s if failed == 0.0 else _search(stall_s, failures_per_s, failed)
    floor = delay.quantile_s(0.95 * (1 - delay.failed)) if delay is not None and one_in_flight else 0.0
    return BestInterval(young, daly, exact, max(exact, floor), floor)


def _lambert_interval(x: float) -> float:
    """lambda tau of the exact optimum, ``x`` = lambda stall; series below 1e-8, where W0 loses digits."""
    from scipy.special import lambertw

    if x < 1e-8:
        return math.sqrt(2.0 * x)
    return 1.0 + float(lambertw(-math.exp(-(1.0 + x))).real)


def _search(stall_s: float, rate: float, failed: float) -> float:
    from scipy.optimize import minimize_scalar

    none = Delay(0.0, failed=failed)

    def loss(log_interval: float) -> float:
        return -_efficiency(math.exp(log_interval), stall_s, rate, none, none, 0.0, 0.0)

    guess = math.log(math.sqrt(2.0 * stall_s / rate))
    found = minimize_scalar(loss, bounds=(guess - 5.0, guess + 3.0), method="bounded", options={"xatol": 1e-6})
    return math.exp(float(found.x))
