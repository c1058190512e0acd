"""Advice: route, interval and why, from a fitted model and what the job is.

Role: composes prediction, boundaries, exposure, interval and route; behind ``advise`` and ``report``. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cachexfs.errors import UsageError
from cachexfs.model.boundaries import Boundaries, Parts, compose
from cachexfs.model.delays import Delay
from cachexfs.model.fitted import FittedModel, Prediction
from cachexfs.model.risk import BestInterval, Exposure, Waste, exposure, optimal_interval, waste
from cachexfs.model.route import ABSTAIN, OBSERVED_MIN, PARTNER, Decision, Evidence, decide_route
from cachexfs.model.units import count_text, time_text

SNAPSHOT_RATE = 2.5e9
"""Bytes per second and writer into the mount's memory (measured: ``cachexfs bench``)."""
PARTNER_SD = 0.2
SNAPSHOT_SD = 0.1
MANIFEST = Delay(0.2, 0.3)
"""Gathering and writing the commit file [s]; small beside the rest, assumed."""
RECOVERY_S = 600.0
NODE_MTBF_S = 5 * 365.25 * 86400.0
KAPPA = 0.10
STALL_MIN_S = 1e-3
DRAIN_MARGIN = 1.1


@dataclass(frozen=True)
class Job:
    """The job. ``bytes_per_writer`` [B]; ``node_mtbf_s`` of one node [s]; ``partner_rate`` [B/s] per writer to the
    partner's NVMe, None if unknown; stalls [s] of training per checkpoint, None for the default: the copy into
    memory on the partner route, the whole write on the direct one; ``interval_s`` None for the best."""

    writers: int
    bytes_per_writer: float
    nodes: int
    node_mtbf_s: float = NODE_MTBF_S
    partner_rate: float | None = None
    stall_partner_s: float | None = None
    stall_direct_s: float | None = None
    kappa: float = KAPPA
    recovery_s: float = RECOVERY_S
    interval_s: float | None = None
    gpus: int = 0
    step_s: float = 0.0
    load: float = 0.0

    @property
    def failures_per_s(self) -> float:
        """Failures of the whole job [1/s]."""
        return self.nodes / self.node_mtbf_s


@dataclass(frozen=True)
class Advice:
    """What to do. ``direct``, ``partner``, ``drain`` are the delays used and ``pfs`` that to the PFS on the route used;
    ``exposure`` until the first durable copy, ``rollback_s`` what a failure costs on average, with the share ``kappa``
    of failures that need the PFS; ``lines`` the three plain lines."""

    decision: Decision
    interval: BestInterval
    interval_s: float
    exposure: Exposure
    rollback_s: float
    waste: Waste
    direct: Delay
    partner: Delay
    drain: Delay
    pfs: Delay
    kappa: float
    stall_s: float
    prediction: Prediction
    lines: tuple[str, str, str]


def advise(model: FittedModel, job: Job, partner_model: FittedModel | None = None) -> Advice:
    """Route, interval and why for ``job`` on the filesystem of ``model``.

    ``partner_model`` is a fit of copies to the partner; without it ``job.partner_rate``; without both the route
    abstains. The drain is taken to cost what the direct write does: it meets the same filesystem.
    """
    if job.writers < 1 or job.nodes < 1 or not 0.0 <= job.kappa <= 1.0 or not job.node_mtbf_s > 0.0:
        raise UsageError("a job needs writers and nodes of 1 or more, a node MTBF above 0 and kappa in [0, 1]")
    prediction = model.predict(job.writers, job.bytes_per_writer, load=job.load)
    direct = prediction.delay(model.failed)
    snapshot = job.bytes_per_writer / SNAPSHOT_RATE
    copy, partner_reasons, observed = _partner(job, partner_model)
    stall_partner = snapshot if job.stall_partner_s is None else job.stall_partner_s
    stall_direct = direct.mean_s() if job.stall_direct_s is None else job.stall_direct_s
    rate = job.failures_per_s
    planned = job.interval_s or _interval(stall_partner, rate, copy, direct).chosen_s
    decision = decide_route(
        direct,
        copy,
        direct,
        interval_s=planned,
        failures_per_s=rate,
        kappa=job.kappa,
        stall_direct_s=stall_direct,
        stall_partner_s=stall_partner,
        evidence=Evidence(observed_partner=observed, law_reasons=(*prediction.reasons, *partner_reasons)),
    )
    on_partner = decision.use == PARTNER
    stall = stall_partner if on_partner else stall_direct
    durable = copy if on_partner else direct
    later = on_pfs(copy, direct) if on_partner else direct
    kappa = job.kappa if on_partner else 1.0
    best = _interval(stall, rate, durable, direct if on_partner else None)
    used = job.interval_s or best.chosen_s
    risk, risk_pfs = exposure(used + stall, durable), exposure(used + stall, later)
    loss = waste(used, stall, rate, durable, later, kappa, job.recovery_s)
    rollback = (1 - kappa) * risk.mean_s + kappa * risk_pfs.mean_s
    advice = Advice(
        decision, best, used, risk, rollback, loss, direct, copy, direct, later, kappa, stall, prediction, ("", "", "")
    )
    return replace(advice, lines=_lines(advice, job))


def on_pfs(copy: Delay, drain: Delay) -> Delay:
    """Capture to PFS on the partner route: copy, then drain. The drain's spread dominates."""
    failed = max(copy.failed, drain.failed)
    if drain.samples_s:
        return Delay.of(np.array(drain.samples_s) + copy.median_s, failed)
    return Delay(copy.median_s + drain.median_s, drain.log_sd, failed)


def boundaries_of(job: Job, direct: Delay, partner: Delay) -> dict[str, Boundaries]:
    """Boundaries of both routes, from capture. ``partner`` includes the copy into memory; the drain takes what a
    direct write takes; copy into memory and commit file are assumed (``SNAPSHOT_RATE``, ``MANIFEST``)."""
    snapshot = Delay(job.bytes_per_writer / SNAPSHOT_RATE, SNAPSHOT_SD)
    beyond = max(partner.median_s - snapshot.median_s, STALL_MIN_S)
    copy = Delay(beyond, partner.log_sd, partner.failed)
    if partner.samples_s:
        copy = Delay.of(np.maximum(np.array(partner.samples_s) - snapshot.median_s, STALL_MIN_S), partner.failed)
    parts = Parts(snapshot, copy, direct, direct, MANIFEST)
    return {"partner": compose(parts, "partner"), "direct": compose(parts, "direct")}


def partner_delay(job: Job, model: FittedModel | None) -> tuple[Delay, tuple[str, ...]]:
    """(delay from capture to the partner, reasons to doubt it)."""
    delay, reasons, _ = _partner(job, model)
    return delay, reasons


def _interval(stall_s: float, rate: float, durable: Delay, drain: Delay | None) -> BestInterval:
    """The best interval, no shorter than a drain takes on average: else the partners' NVMe fills."""
    best = optimal_interval(max(stall_s, STALL_MIN_S), rate, durable)
    if drain is None:
        return best
    floor = max(best.floor_s, drain.mean_s() * DRAIN_MARGIN)
    return replace(best, floor_s=floor, chosen_s=max(best.exact_s, floor))


def _partner(job: Job, model: FittedModel | None) -> tuple[Delay, tuple[str, ...], int]:
    """(delay to the partner, reasons to doubt it, observations of it)."""
    if model is not None:
        p = model.predict(job.writers, job.bytes_per_writer)
        return p.delay(model.failed), p.reasons, model.repeats_total
    snapshot = job.bytes_per_writer / SNAPSHOT_RATE
    if job.partner_rate is not None:
        return Delay(snapshot + job.bytes_per_writer / job.partner_rate, PARTNER_SD), (), OBSERVED_MIN
    assumed = Delay(snapshot + job.bytes_per_writer / 1e9, PARTNER_SD)
    return assumed, ("the copy to the partner was not measured (give --partner or --partner-rate)",), OBSERVED_MIN


def _lines(a: Advice, job: Job) -> tuple[str, str, str]:
    d = a.decision
    faster = f"direct {time_text(a.direct.median_s)} to the PFS, partner {time_text(a.partner.median_s)}"
    if d.route == ABSTAIN:
        route = f"Route: cannot tell; use {d.use} (the default) because {d.reasons[0]}."
    else:
        chance = d.p_partner if d.route == PARTNER else 1.0 - d.p_partner
        sure = "more than 0.99" if chance > 0.99 else f"{chance:.2f}"
        route = f"Route: {d.route} (cheaper with probability {sure}; {faster})."
    chosen = "as given" if job.interval_s else "wastes least"
    if not job.interval_s and a.interval.floor_s > a.interval.exact_s:
        chosen = "as long as a checkpoint needs to become durable and to drain"
    interval = (
        f"Interval: train {time_text(a.interval_s)} between saves ({chosen}); "
        f"{100 * a.waste.exact:.2g}% of the time goes to saving, rollback and recovery."
    )
    if a.prediction.abstain:
        interval += " This rests on a PFS time that the data do not carry."
    cost = f"{time_text(a.rollback_s)} of training"
    if job.gpus:
        cost += f" ({count_text(a.rollback_s * job.gpus / 3600)} GPU-hours)"
    covers = ""
    if d.use == PARTNER:
        covers = f"the partner copy does not cover {100 * job.kappa:.0f}% of failures (--kappa); "
    why = (
        f"Why: one of {job.nodes} nodes fails every {time_text(1.0 / job.failures_per_s)}, a save stalls training for "
        f"{time_text(a.stall_s)}, a failure costs {cost} on average; {covers}rare extreme stragglers are not predicted."
    )
    return route, interval, why


def route_against_load(model: FittedModel, job: Job, partner_model: FittedModel | None = None) -> list[Decision]:
    """The decision at PFS loads 0, 0.1, ... 0.9: what ``report`` draws. Stalls as in ``advise``."""
    decisions = []
    for tenth in range(10):
        busy = replace(job, load=tenth / 10)
        decisions.append(advise(model, busy, partner_model).decision)
    return decisions
