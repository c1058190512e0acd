"""Exposure, waste, interval, coverage: closed forms against draws, events and enumeration."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachexfs.errors import UsageError
from cachexfs.model.boundaries import Parts, compose
from cachexfs.model.coverage import pair_loss, uncovered_share
from cachexfs.model.delays import Delay
from cachexfs.model.risk import exposure, optimal_interval, waste
from cachexfs.model.simulation import PfsState, Scenario, simulate


@pytest.mark.parametrize(
    ("tau", "median", "sd", "failed", "mean", "p95"),
    [
        (600, 60, 0.4, 0.0, 365.0, 638),
        (600, 60, 1.0, 0.0, 396.5, 718),
        (120, 100, 0.6, 0.0, 171.4, 292),
        (600, 60, 0.4, 0.05, 396.6, 704),
        (60, 100, 0.5, 0.0, 131.6, 208),
    ],
)
def test_exposure_vectors(tau: float, median: float, sd: float, failed: float, mean: float, p95: float) -> None:
    e = exposure(tau, Delay(median, sd, failed))
    assert e.mean_s == pytest.approx(mean, rel=0.002)
    assert e.p95_s == pytest.approx(p95, rel=0.006)


def ages(tau: float, delay: Delay, count: int = 200_000) -> tuple[float, float]:
    """Mean and 95th percentile of the age at random moments, by sampling."""
    rng = np.random.default_rng(11)
    captures = np.arange(count) * tau
    done = captures + delay.draw(rng, count)
    order = np.argsort(done)
    newest = np.maximum.accumulate(captures[order])
    moments = rng.uniform(200 * tau, (count - 200) * tau, 200_000)
    at = np.searchsorted(done[order], moments, side="right") - 1
    age = moments - newest[at]
    return float(age.mean()), float(np.quantile(age, 0.95))


@pytest.mark.parametrize(
    ("tau", "delay"),
    [
        (100.0, Delay(30.0, 0.5)),
        (100.0, Delay(250.0, 0.7)),
        (100.0, Delay(80.0, 0.3, failed=0.2)),
        (100.0, Delay.of(np.array([5.0, 50.0, 400.0]))),
        (100.0, Delay(0.0)),
        (100.0, Delay(130.0, 0.0)),
    ],
)
def test_exposure_against_sampling(tau: float, delay: Delay) -> None:
    mean, p95 = ages(tau, delay)
    e = exposure(tau, delay)
    assert e.mean_s == pytest.approx(mean, rel=0.01)
    assert e.p95_s == pytest.approx(p95, rel=0.015)


def test_exposure_in_steps_and_gpu_hours() -> None:
    e = exposure(600, Delay(60, 0.4))
    assert e.steps(5.0) == pytest.approx(73.0, abs=0.1)
    assert e.gpu_hours(1000) == pytest.approx(101.4, abs=0.1)
    assert e.stragglers_s == pytest.approx(60 * (math.exp(0.08) - 1))


@given(st.floats(1, 1e4), st.floats(0.1, 1e4), st.floats(0.0, 1.5), st.floats(0.0, 0.5))
@settings(max_examples=40, deadline=None)
def test_exposure_is_never_below_half_an_interval(tau: float, median: float, sd: float, failed: float) -> None:
    if median > 50 * tau:
        median = 50 * tau
    e = exposure(tau, Delay(median, sd, failed))
    assert e.mean_s >= 0.5 * tau - 1e-6
    assert e.mean_s <= e.first_order_s + tau / 4000  # the phase grid
    assert e.median_s <= e.p95_s


@pytest.mark.parametrize(
    ("tau", "stall", "load", "delay", "kappa"),
    [(1000, 10, 0.01, 60, 0.0), (1000, 30, 0.05, 120, 0.1), (600, 5, 0.1, 300, 0.2), (300, 30, 0.2, 200, 0.5)],
)
def test_waste_against_events(tau: float, stall: float, load: float, delay: float, kappa: float) -> None:
    rate = load / tau
    partner, drain = Delay(delay, 0.4), Delay(2 * delay, 0.4)
    rng = np.random.default_rng(2)
    pfs = Delay.of(partner.draw(rng, 4000) + drain.draw(rng, 4000))
    run = simulate(
        Scenario(
            nodes=10_000,
            node_mtbf_s=10_000 / rate,
            duration_s=2000 / rate,
            interval_s=tau,
            direct=Delay(1.0),
            partner=partner,
            drain=drain,
            stall_partner_s=stall,
            recovery_s=120,
            shared_share=kappa,
            system_share=0.0,
            common_cause=0.0,
            reprotect_s=0.0,
        ),
        replicas=4,
    )
    w = waste(tau, stall, rate, partner, pfs, kappa, 120)
    assert w.exact == pytest.approx(run.waste, rel=0.06)
    assert w.first_order >= w.exact


def test_failed_checkpoints_in_waste_against_events() -> None:
    tau, rate = 600.0, 1 / 6000
    delay = Delay(30.0, 0.3, failed=0.2)
    run = simulate(
        Scenario(100, 100 / rate, 4000 / rate, tau, delay, delay, delay, "direct", 10.0, 10.0, 60.0), replicas=4
    )
    assert waste(tau, 10.0, rate, delay, delay, 1.0, 60.0).exact == pytest.approx(run.waste, rel=0.05)


@given(st.floats(0.01, 1e3), st.floats(1e-8, 1e-3))
@settings(max_examples=60, deadline=None)
def test_the_exact_interval_is_the_best(stall: float, rate: float) -> None:
    best = optimal_interval(stall, rate)
    none = Delay(stall)
    at = [waste(best.exact_s * f, stall, rate, none, none, 0.0, 0.0).exact for f in (0.9, 1.0, 1.1)]
    assert at[1] <= at[0] + 1e-12
    assert at[1] <= at[2] + 1e-12
    if rate * stall < 0.01:
        assert best.daly_s == pytest.approx(best.exact_s, rel=0.01)
        assert best.young_s == pytest.approx(best.exact_s, rel=0.15)


def test_the_delay_does_not_move_the_interval_but_failures_do() -> None:
    plain = optimal_interval(10.0, 1e-5)
    slow = optimal_interval(10.0, 1e-5, Delay(500.0, 0.5), one_in_flight=False)
    assert slow.exact_s == plain.exact_s
    lossy = optimal_interval(10.0, 1e-5, Delay(5.0, 0.1, failed=0.1))
    assert lossy.exact_s == pytest.approx(plain.exact_s / math.sqrt(1 + 2 * 0.1 / 0.9), rel=0.01)
    held = optimal_interval(10.0, 1e-5, Delay(5000.0, 0.5))
    assert held.chosen_s == held.floor_s > held.exact_s


def test_waste_with_synchronous_writes_is_dalys_formula() -> None:
    tau, stall, rate, restart = 1000.0, 50.0, 1e-4, 300.0
    daly = math.exp(rate * restart) * (math.exp(rate * (tau + stall)) - 1) / (rate * tau)
    w = waste(tau, stall, rate, Delay(stall), Delay(stall), 0.0, restart)
    assert w.exact == pytest.approx(1 - 1 / daly, rel=1e-9)


def test_no_failures_cost_only_stalls() -> None:
    w = waste(90.0, 10.0, 0.0, Delay(5.0), Delay(5.0), 0.1, 60.0)
    assert (w.exact, w.first_order) == (pytest.approx(0.1), pytest.approx(0.1))


@pytest.mark.parametrize("ring", [False, True])
def test_pair_loss_by_enumeration(ring: bool) -> None:
    nodes = 10
    for lost in range(nodes + 1):
        bad = total = 0
        for chosen in itertools.combinations(range(nodes), lost):
            gone = set(chosen)
            partner = [(i + 1) % nodes if ring else i ^ 1 for i in range(nodes)]
            bad += any(partner[i] in gone for i in chosen)
            total += 1
        assert pair_loss(nodes, lost, ring) == pytest.approx(bad / total, abs=1e-9)


def test_kappa() -> None:
    assert uncovered_share(1.0, 0.0, 0.0, 0.0, 1e-9, 0.0, 1.0) == 0.0
    assert uncovered_share(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0) == 1.0
    assert uncovered_share(0.9, 0.05, 0.05, 0.0, 0.0, 0.0, 0.5) == pytest.approx(0.075)
    assert uncovered_share(1.0, 0.0, 0.0, 0.02, 1e-6, 1e5, 1.0) == pytest.approx(0.02 + 0.98 * (1 - math.exp(-0.1)))


def test_delay_distribution_is_consistent() -> None:
    for d in (Delay(20.0, 0.5, 0.1), Delay.of(np.array([3.0, 9.0, 20.0, 50.0, 80.0]), 0.1)):
        drawn = d.draw(np.random.default_rng(1), 100_000)
        assert np.mean(np.isinf(drawn)) == pytest.approx(0.1, abs=0.005)
        reached = drawn[np.isfinite(drawn)]
        assert d.median_s == pytest.approx(np.median(reached), rel=0.03)
        if not d.samples_s:
            assert d.mean_s() == pytest.approx(reached.mean(), rel=0.02)
            assert d.laplace(0.01) == pytest.approx(np.mean(np.exp(-0.01 * reached)), rel=0.01)
            assert d.survival(np.array(30.0)) == pytest.approx(np.mean(drawn > 30), abs=0.006)
        assert d.quantile_s(0.95) == math.inf


def test_boundaries_keep_their_order() -> None:
    parts = Parts(Delay(2, 0.2), Delay(5, 0.2), Delay(40, 0.3), Delay(60, 0.3, 0.05), Delay(0.5, 0.2), overlap=0.5)
    p, d = compose(parts, "partner"), compose(parts, "direct")
    assert p.partner is not None
    assert p.restartable_partner is not None
    order = [p.returned, p.partner, p.restartable_partner, p.pfs, p.restartable_pfs]
    medians = [x.median_s for x in order]
    assert medians == sorted(medians)
    assert p.partner.failed == 0.0
    assert p.pfs.failed == pytest.approx(0.05, abs=0.015)
    assert d.partner is None
    assert d.pfs.median_s == pytest.approx(42, rel=0.05)
    with pytest.raises(UsageError):
        compose(parts, "sideways")


def scenario(**kind: object) -> Scenario:
    base = {
        "nodes": 10_000,
        "node_mtbf_s": 1.5e8,
        "duration_s": 30 * 86400.0,
        "interval_s": 900.0,
        "direct": Delay(120, 0.3),
        "partner": Delay(15, 0.1),
        "drain": Delay(120, 0.3),
        "stall_direct_s": 5.0,
        "stall_partner_s": 5.0,
    }
    return Scenario(**{**base, **kind})  # type: ignore[arg-type]


def test_simulation_repeats_from_its_seed_and_loses_what_exposure_says() -> None:
    a, b = simulate(scenario(), 4, seed=3), simulate(scenario(), 4, seed=3)
    assert a == b
    assert a != simulate(scenario(), 4, seed=4)
    run = simulate(scenario(duration_s=3e8, policy="direct"), 1)
    assert run.lost_s == pytest.approx(exposure(905.0, Delay(120, 0.3)).mean_s - 5.0, rel=0.06)
    assert run.from_partner == 0


def test_partner_route_loses_less_and_auto_follows_the_state() -> None:
    quiet_and_busy = (PfsState(1.0, 20 * 3600.0), PfsState(6.0, 4 * 3600.0))
    runs = {
        p: simulate(scenario(policy=p, states=quiet_and_busy, duration_s=1e8, system_share=0.0, shared_share=0.0), 1)
        for p in ("direct", "partner", "auto")
    }
    assert runs["partner"].lost_s < runs["direct"].lost_s
    assert runs["auto"].lost_s <= 1.05 * runs["partner"].lost_s
    near = {
        p: simulate(scenario(policy=p, states=quiet_and_busy, partner=Delay(200, 0.1), duration_s=1e8), 1)
        for p in ("direct", "partner", "auto")
    }
    assert 0.3 < near["auto"].direct_share < 1.0
    assert near["auto"].lost_s <= 1.05 * min(near["direct"].lost_s, near["partner"].lost_s)


@pytest.mark.parametrize(
    "kind",
    [
        {"nodes": 0},
        {"interval_s": 0.0},
        {"policy": "sideways"},
        {"shared_share": 0.9, "system_share": 0.2},
        {"duration_s": 1e15},
        {"recovery_s": -1.0},
        {"states": ()},
    ],
)
def test_senseless_scenarios_are_refused(kind: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        simulate(scenario(**kind))


@pytest.mark.parametrize(
    "call",
    [
        lambda: Delay(-1.0),
        lambda: Delay(math.nan),
        lambda: Delay(1.0, failed=1.0),
        lambda: Delay.of(np.array([])),
        lambda: exposure(0.0, Delay(1.0)),
        lambda: exposure(1e-3, Delay(1e6)),
        lambda: waste(-1, 0, 0, Delay(1), Delay(1), 0, 0),
        lambda: waste(1, 0, 0, Delay(1), Delay(1), 2, 0),
        lambda: optimal_interval(0.0, 1e-5),
        lambda: optimal_interval(1.0, 0.0),
        lambda: pair_loss(3, 1),
        lambda: uncovered_share(0, 0, 0, 0, 0, 0, 0),
    ],
)
def test_nonsense_is_refused(call) -> None:
    with pytest.raises(UsageError):
        call()
