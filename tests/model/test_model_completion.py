"""The slowest of N: formulas against draws, censored fits against the truth, regimes found."""

import math

import numpy as np
import pytest

from cachexfs.errors import UsageError
from cachexfs.model.completion import (
    Regime,
    Spread,
    fit_censored,
    fit_regimes,
    fit_spread,
    spread_of_ratio,
)
from cachexfs.model.tails import count_tail


def draw(rng: np.random.Generator, spread: Spread, n: int, size: int, median: float = 10.0) -> np.ndarray:
    """Slowest of n independent writers sharing U; theta = 1."""
    which = rng.choice(len(spread.regimes), size, p=[r.share for r in spread.regimes])
    u = np.array([rng.normal(spread.regimes[i].mean, spread.regimes[i].sd) for i in which])
    return median * np.exp(u + spread.sigma * rng.standard_normal((size, n)).max(axis=1))


@pytest.mark.parametrize("n", [1, 8, 64])
def test_slowest_agrees_with_draws(n: int) -> None:
    spread = Spread(0.2, 1.0, (Regime(0.8, 0.0, 0.1), Regime(0.2, 0.5, 0.2)))
    times = draw(np.random.default_rng(1), spread, n, 40_000)
    for q in (0.1, 0.5, 0.9, 0.99):
        assert spread.quantile_s(q, 10.0, n) == pytest.approx(np.quantile(times, q), rel=0.03)
        assert float(spread.cdf(np.array(spread.quantile_s(q, 10.0, n)), 10.0, n)) == pytest.approx(q, abs=1e-6)
    mean, beyond = spread.mean_s(10.0, n)
    assert mean == pytest.approx(times.mean(), rel=0.01)
    assert beyond < 1e-6


def test_a_cap_is_respected() -> None:
    spread = Spread(0.5, 1.0)
    times = np.minimum(draw(np.random.default_rng(2), spread, 32, 40_000), 25.0)
    mean, beyond = spread.mean_s(10.0, 32, cap_s=25.0)
    assert mean == pytest.approx(times.mean(), rel=0.01)
    assert beyond == pytest.approx(np.mean(times >= 25.0), abs=0.02)


def test_remaining_time_is_conditional() -> None:
    spread = Spread(0.3, 1.0, (Regime(1.0, 0.0, 0.2),))
    times = draw(np.random.default_rng(3), spread, 16, 60_000)
    late = times[times > 18.0]
    assert spread.remaining(18.0, 10.0, 16, 0.5) == pytest.approx(np.median(late), rel=0.03)
    assert spread.remaining(1e6, 10.0, 16, 0.5) == math.inf


def test_spread_is_recovered() -> None:
    rng = np.random.default_rng(4)
    checkpoints = [10 * np.exp(rng.normal(0, 0.15) + 0.1 * rng.standard_normal(256)) for _ in range(80)]
    spread = fit_spread(checkpoints)
    assert spread.sigma == pytest.approx(0.1, rel=0.1)
    assert spread.theta > 0.9
    assert spread.correlation == pytest.approx(0.15**2 / (0.15**2 + 0.1**2), abs=0.1)
    z = Spread(0.2, 0.45)
    ratio = z.quantile_s(0.5, 1.0, 100)
    assert spread_of_ratio(ratio, 100) == pytest.approx(0.2, rel=0.02)


def test_two_regimes_only_when_there_are_two() -> None:
    rng = np.random.default_rng(5)
    assert len(fit_regimes(rng.normal(0, 0.2, 300))) == 1
    found = fit_regimes(np.concatenate([rng.normal(0, 0.05, 240), rng.normal(0.7, 0.1, 60)]))
    assert [round(r.share, 1) for r in found] == [0.8, 0.2]
    assert found[1].mean - found[0].mean == pytest.approx(0.7, abs=0.05)
    assert len(fit_regimes(rng.normal(0, 0.2, 10))) == 1
    assert fit_regimes(np.zeros(0))[0].sd == 0.0


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_writers_in_flight_are_not_forgotten(share: float) -> None:
    errors, naive = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        times = np.sort(20 * np.exp(0.2 * rng.standard_normal(200)))
        done = times[: int(share * 200)]
        fit = fit_censored(done, 200 - done.size, float(done[-1]))
        errors.append(abs(fit.median_s / 20 - 1))
        naive.append(abs(np.median(done) / 20 - 1))
    assert np.mean(errors) < 0.04
    assert np.mean(errors) < 0.6 * np.mean(naive)


def test_censored_fit_refuses_nonsense() -> None:
    for done, flying, now in (
        ([], 5, 1.0),
        ([1.0, -2.0], 5, 9.0),
        ([5.0], 3, 1.0),
        ([1.0], -1, 1.0),
        ([math.nan], 0, 1.0),
    ):
        with pytest.raises(UsageError):
            fit_censored(np.array(done), flying, now)
    one = fit_censored(np.array([5.0]), 0, 5.0)
    assert one.median_s == pytest.approx(5.0, rel=1e-3)


def test_tails_are_counted() -> None:
    ratios = np.concatenate([np.ones(95), [1.6, 2.5, 2.6, 6.0, np.inf]])
    by = {t.multiple: t for t in count_tail(ratios)}
    assert (by[1.5].exceeded, by[2.0].exceeded, by[5.0].exceeded) == (5, 4, 2)
    assert by[2.0].low < 0.04 < by[2.0].high
    assert by[2.0].probability == pytest.approx(4.5 / 101)
    with pytest.raises(UsageError):
        count_tail(np.array([1.0, np.nan]))
