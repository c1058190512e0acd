"""Simulation: nodes, failures, PFS states and policies, event by event.

Role: checks the formulas of ``risk`` and answers what they cannot (states, backlogs, partner pairs, policies).
Single-threaded, from a seed; ``simulate`` is called by the command, the bench and the tests. 10,000 nodes
cost no more than ten: only failures and checkpoints are events.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from cachexfs.errors import UsageError
from cachexfs.model.delays import Delay

POLICIES = ("direct", "partner", "auto")
EVENTS_MAX = 20_000_000
STATE_SPEED = 0.25


@dataclass(frozen=True)
class PfsState:
    """A state of the PFS: its times are ``factor`` times longer, it lasts ``dwell_s`` [s] on average.

    After a state ends the next is drawn with probability proportional to ``weight`` among the others.
    """

    factor: float
    dwell_s: float
    weight: float = 1.0


@dataclass(frozen=True)
class Scenario:
    """What is simulated. Times [s], ``node_mtbf_s`` mean time between failures of one node.

    ``shared_share`` and ``system_share``: shares of failures that hit node and partner together, or all nodes;
    then the partner copy is lost with certainty, or with chance 1 - ``nvme_survives``. ``common_cause``: chance
    that a single node's failure takes its partner too. ``reprotect_s`` until a second copy exists again.
    """

    nodes: int
    node_mtbf_s: float
    duration_s: float
    interval_s: float
    direct: Delay
    partner: Delay
    drain: Delay
    policy: str = "partner"
    stall_direct_s: float = 0.0
    stall_partner_s: float = 0.0
    recovery_s: float = 300.0
    shared_share: float = 0.05
    system_share: float = 0.02
    common_cause: float = 0.01
    reprotect_s: float = 60.0
    nvme_survives: float = 0.5
    states: tuple[PfsState, ...] = (PfsState(1.0, math.inf),)

    def check(self) -> None:
        """UsageError when a value makes no sense or the run would be endless."""
        times = (self.node_mtbf_s, self.duration_s, self.interval_s)
        if self.nodes < 1 or not all(0.0 < t < math.inf for t in times):
            raise UsageError("nodes, node MTBF, duration and interval must be positive")
        if self.policy not in POLICIES:
            raise UsageError(f"policy must be one of {', '.join(POLICIES)}")
        shares = (self.shared_share, self.system_share, self.common_cause, self.nvme_survives)
        if not all(0.0 <= s <= 1.0 for s in shares) or self.shared_share + self.system_share > 1.0:
            raise UsageError("shares lie in [0, 1] and do not exceed 1 together")
        if min(self.stall_direct_s, self.stall_partner_s, self.recovery_s, self.reprotect_s) < 0.0:
            raise UsageError("stalls, recovery and re-protection must not be negative")
        if not self.states or any(s.factor <= 0 or s.dwell_s <= 0 or s.weight <= 0 for s in self.states):
            raise UsageError("a PFS state needs a positive factor, dwell time and weight")
        events = self.duration_s * (1 / self.interval_s + self.nodes / self.node_mtbf_s)
        if events > EVENTS_MAX:
            raise UsageError(f"{events:.2g} events are too many; shorten the duration")


@dataclass(frozen=True)
class Simulated:
    """Sums over all replicas; ``waste`` and its standard error over replicas (NaN with one).

    ``lost_s`` training lost per failure (mean) [s] and its 95th percentile; ``from_*``: restarts from the
    partner copy, the PFS, or from the beginning; ``direct_share`` of checkpoints that went directly.
    """

    waste: float
    waste_error: float
    checkpoints: int
    failures: int
    lost_s: float
    lost_p95_s: float
    from_partner: int
    from_pfs: int
    from_start: int
    direct_share: float
    replicas: int


def simulate(scenario: Scenario, replicas: int = 20, seed: int = 1) -> Simulated:
    """Run ``replicas`` independent jobs of ``scenario``. Raises UsageError for a senseless scenario."""
    scenario.check()
    if not 1 <= replicas <= 10_000:
        raise UsageError("replicas must lie between 1 and 10000")
    runs = [_Run(scenario, np.random.default_rng((seed, i))) for i in range(replicas)]
    for run in runs:
        run.go()
    wastes = np.array([run.waste for run in runs])
    lost = np.concatenate([np.array(run.lost) for run in runs])
    checkpoints = sum(run.checkpoints for run in runs)
    return Simulated(
        waste=float(wastes.mean()),
        waste_error=float(wastes.std(ddof=1) / math.sqrt(replicas)) if replicas > 1 else math.nan,
        checkpoints=checkpoints,
        failures=int(lost.size),
        lost_s=float(lost.mean()) if lost.size else 0.0,
        lost_p95_s=float(np.quantile(lost, 0.95)) if lost.size else 0.0,
        from_partner=sum(run.from_partner for run in runs),
        from_pfs=sum(run.from_pfs for run in runs),
        from_start=sum(run.from_start for run in runs),
        direct_share=sum(run.direct for run in runs) / max(checkpoints, 1),
        replicas=replicas,
    )


@dataclass(slots=True)
class _Copy:
    """A checkpoint: training done at capture [s], when its copies are durable [s of wall time]."""

    work_s: float
    partner_at: float
    pfs_at: float


class _Run:
    """One job. ``now`` is wall time, ``work`` training done; the loop alternates failures and segments."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        self.s = scenario
        self.rng = rng
        self.rate = scenario.nodes / scenario.node_mtbf_s
        self.work = 0.0
        self.copies: list[_Copy] = []
        self.lost: list[float] = []
        self.checkpoints = self.direct = 0
        self.from_partner = self.from_pfs = self.from_start = 0
        self.failed_at: dict[int, float] = {}
        self.state_log = 0.0  # what the policy believes about the PFS: log of its factor
        self.unseen: list[tuple[float, float]] = []
        self._starts, self._factors = self._pfs_states()
        self._drawn = 0
        self._means = scenario.direct.mean_s(), scenario.partner.mean_s(), scenario.drain.mean_s()
        self._draw()

    def _pfs_states(self) -> tuple[list[float], list[float]]:
        states = self.s.states
        starts, factors, at, index = [0.0], [states[0].factor], 0.0, 0
        while len(states) > 1 and at < self.s.duration_s:
            at += float(self.rng.exponential(states[index].dwell_s))
            weights = np.array([0.0 if i == index else x.weight for i, x in enumerate(states)])
            index = int(self.rng.choice(len(states), p=weights / weights.sum()))
            starts.append(at)
            factors.append(states[index].factor)
        return starts, factors

    def _draw(self) -> None:
        """Delays for the next checkpoints, drawn in blocks."""
        size = 4096
        s = self.s
        self._direct = s.direct.draw(self.rng, size).tolist()
        self._partner = s.partner.draw(self.rng, size).tolist()
        self._drain = s.drain.draw(self.rng, size).tolist()
        self._drawn = 0

    def factor(self, at: float) -> float:
        """PFS slow-down at a moment."""
        return self._factors[bisect_right(self._starts, at) - 1]

    def go(self) -> None:
        """Run to the end of the scenario."""
        now, end = 0.0, self.s.duration_s
        while now < end:
            failure = now + float(self.rng.exponential(1.0 / self.rate))
            self._train(now, min(failure, end))
            if failure >= end:
                break
            now = self._recover(failure)
        self.waste = 1.0 - self.work / end

    def _train(self, now: float, until: float) -> None:
        """Training from ``now`` to ``until`` with its checkpoints; the last interval may be cut off."""
        s = self.s
        while True:
            capture = now + s.interval_s
            if capture >= until:
                self.work += until - now
                return
            self.work += s.interval_s
            stall = self._checkpoint(capture)
            now = capture + stall
            if now >= until:
                return

    def _checkpoint(self, capture: float) -> float:
        """Start the copies of one checkpoint; returns its stall [s]."""
        s = self.s
        if self._drawn == len(self._direct):
            self._draw()
        i, self._drawn = self._drawn, self._drawn + 1
        factor = self.factor(capture)
        self.checkpoints += 1
        if self._goes_direct(capture):
            self.direct += 1
            pfs = capture + self._direct[i] * factor
            self.copies.append(_Copy(self.work, math.inf, pfs))
            stall = s.stall_direct_s
        else:
            partner = capture + self._partner[i]
            pfs = partner + self._drain[i] * factor
            self.copies.append(_Copy(self.work, partner, pfs))
            stall = s.stall_partner_s
        if s.policy == "auto":
            self.unseen.append((pfs, math.log(factor)))
        if len(self.copies) > 64:
            self._forget(capture)
        return stall

    def _goes_direct(self, now: float) -> bool:
        s = self.s
        if s.policy != "auto":
            return s.policy == "direct"
        seen = [log for at, log in self.unseen if at <= now]
        self.unseen = [(at, log) for at, log in self.unseen if at > now and at < math.inf]
        for log in seen:
            self.state_log += STATE_SPEED * (log - self.state_log)
        factor = math.exp(self.state_log)
        weight = self.rate * s.interval_s
        kappa = s.shared_share + s.system_share * (1 - s.nvme_survives) + s.common_cause
        direct_s, partner_s, drain_s = self._means
        direct = s.stall_direct_s + weight * factor * direct_s
        partner = s.stall_partner_s + weight * (partner_s + kappa * factor * drain_s)
        return direct <= partner

    def _forget(self, now: float) -> None:
        """Drop copies that can no longer be the newest durable one at either level."""
        durable = [c.work_s for c in self.copies if c.pfs_at <= now]
        newest = max(durable, default=-1.0)
        self.copies = [c for c in self.copies if c.work_s >= newest]

    def _recover(self, failure: float) -> float:
        """Roll back to the newest copy that survived; returns when training goes on."""
        s = self.s
        partner_ok = self._partner_survives(failure)
        on_pfs = max((c.work_s for c in self.copies if c.pfs_at <= failure), default=0.0)
        best = on_pfs
        if partner_ok:
            best = max((c.work_s for c in self.copies if c.partner_at <= failure), default=0.0)
            best = max(best, on_pfs)
        self.lost.append(self.work - best)
        if best > on_pfs:
            self.from_partner += 1
        elif best > 0.0:
            self.from_pfs += 1
        else:
            self.from_start += 1
        self.work = best
        # copies that were complete go on draining; the rest died with the failure
        alive = failure if partner_ok else -1.0
        self.copies = [c for c in self.copies if c.pfs_at <= failure or c.partner_at <= alive]
        now = failure
        while True:  # a failure during recovery starts it again
            again = float(self.rng.exponential(1.0 / self.rate))
            if again >= s.recovery_s:
                return now + s.recovery_s
            now += again

    def _partner_survives(self, failure: float) -> bool:
        s = self.s
        kind = float(self.rng.random())
        if kind < s.shared_share:
            return False
        if kind < s.shared_share + s.system_share:
            return float(self.rng.random()) < s.nvme_survives
        if s.nodes < 2:
            return False
        node = int(self.rng.integers(s.nodes))
        before = self.failed_at.get(node ^ 1, -math.inf)
        self.failed_at[node] = failure
        return failure - before > s.reprotect_s and float(self.rng.random()) >= s.common_cause
