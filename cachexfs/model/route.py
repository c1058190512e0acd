"""Route: write to the PFS directly, or to the partner and drain.

Role: the decision of ``route=auto`` and of ``cachexfs advise``. Pure; derivation in docs/model.md section 8.
Cost of one checkpoint, in seconds of training that it is expected to lose:

    C_direct  = c_direct  + lambda tau T_direct
    C_partner = c_partner + lambda tau (T_partner + kappa T_drain)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cachexfs.errors import UsageError
from cachexfs.model.arrays import Floats
from cachexfs.model.delays import Delay

DIRECT, PARTNER, ABSTAIN = "direct", "partner", "abstain"
ALPHA = 0.20
DRAWS = 2000
OBSERVED_MIN = 10
HYSTERESIS = 0.05


@dataclass(frozen=True)
class Evidence:
    """What is known about the routes besides their times; the defaults say "enough".

    ``observed_*``: recent checkpoints (or drains) seen per route; ``changed``: a tracker announced a change
    within its last three; ``backlog``: checkpoints still to be drained; ``law_reasons``: why the location
    law abstains for this size, if it does.
    """

    observed_direct: int = OBSERVED_MIN
    observed_partner: int = OBSERVED_MIN
    changed: bool = False
    backlog: int = 0
    law_reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """``route``: direct, partner or abstain; then ``use`` is the configured default.

    ``p_partner``: chance that the partner route costs less for this checkpoint; costs in seconds of training.
    """

    route: str
    use: str
    p_partner: float
    cost_direct_s: float
    cost_partner_s: float
    reasons: tuple[str, ...]


def decide_route(
    direct: Delay,
    partner: Delay,
    drain: Delay | None,
    *,
    interval_s: float,
    failures_per_s: float,
    kappa: float,
    stall_direct_s: float = 0.0,
    stall_partner_s: float = 0.0,
    correlation: float = 0.0,
    alpha: float = ALPHA,
    evidence: Evidence | None = None,
    default: str = PARTNER,
    current: str = "",
) -> Decision:
    """Decide for one checkpoint; ``drain=None`` compares the two times alone (kappa = 0).

    ``correlation`` of the log times of the two routes (a busy day slows both). Decides when one route costs
    less with probability 1 - alpha or more, else abstains and uses ``default``.
    """
    if not (interval_s > 0.0 and failures_per_s > 0.0 and 0.0 <= kappa <= 1.0 and 0.0 < alpha <= 0.5):
        raise UsageError("route needs interval and failure rate above 0, kappa in [0, 1], alpha in (0, 0.5]")
    if not -1.0 < correlation < 1.0 or default not in (DIRECT, PARTNER):
        raise UsageError("correlation lies in (-1, 1); the default route is direct or partner")
    known = evidence if evidence is not None else Evidence()
    weight = failures_per_s * interval_s
    p_partner = _chance(direct, partner, drain, weight, kappa, stall_direct_s, stall_partner_s, correlation)
    drain_s = drain.mean_s() if drain is not None else 0.0
    cost_direct = stall_direct_s + weight * direct.mean_s()
    cost_partner = stall_partner_s + weight * (partner.mean_s() + kappa * drain_s)
    reasons = _doubts(known, drain, interval_s)
    if not reasons and alpha < p_partner < 1 - alpha:
        reasons = [f"too close to call: the partner route is cheaper with probability {p_partner:.2f}"]
    if reasons:
        return Decision(ABSTAIN, default, p_partner, cost_direct, cost_partner, tuple(reasons))
    route = PARTNER if p_partner >= 1 - alpha else DIRECT
    gain = abs(cost_direct - cost_partner) / max(cost_direct, cost_partner)
    if current in (DIRECT, PARTNER) and route != current and gain < HYSTERESIS:
        return Decision(current, current, p_partner, cost_direct, cost_partner, ("gain below 5%: stays as it is",))
    return Decision(route, route, p_partner, cost_direct, cost_partner, ())


def _doubts(known: Evidence, drain: Delay | None, interval_s: float) -> list[str]:
    reasons = list(known.law_reasons)
    for name, count in (("direct", known.observed_direct), ("partner", known.observed_partner)):
        if count < OBSERVED_MIN:
            reasons.append(f"only {count} recent checkpoints seen on the {name} route; needs {OBSERVED_MIN}")
    if known.changed:
        reasons.append("the filesystem's speed changed within the last three checkpoints")
    if known.backlog > 1:
        reasons.append(f"{known.backlog} checkpoints are still to be drained")
    if drain is not None and drain.mean_s() >= interval_s:
        reasons.append("draining takes longer than the interval: the partner's NVMe would fill")
    return reasons


def _chance(
    direct: Delay,
    partner: Delay,
    drain: Delay | None,
    weight: float,
    kappa: float,
    stall_direct_s: float,
    stall_partner_s: float,
    correlation: float,
) -> float:
    """P(C_partner < C_direct) by ``DRAWS`` draws from a fixed seed: same input, same answer."""
    rng = np.random.default_rng(20060101)
    shared = rng.standard_normal(DRAWS)
    a, b = (
        math.sqrt(abs(correlation)) * shared * sign + math.sqrt(1 - abs(correlation)) * rng.standard_normal(DRAWS)
        for sign in (1.0, math.copysign(1.0, correlation))
    )
    cost_direct = stall_direct_s + weight * _finite(direct.from_scores(a, rng.random(DRAWS)))
    total = _finite(partner.from_scores(b, rng.random(DRAWS)))
    if drain is not None:
        # the drain meets the same filesystem as the direct write would
        total = total + kappa * _finite(drain.from_scores(a, rng.random(DRAWS)))
    cost_partner = stall_partner_s + weight * total
    wins = np.mean(cost_partner < cost_direct) + 0.5 * np.mean(cost_partner == cost_direct)
    return float(wins)


def _finite(draws_s: Floats) -> Floats:
    """A boundary that is never reached costs a great deal, but comparably on both routes."""
    return np.where(np.isfinite(draws_s), draws_s, 1e9)
