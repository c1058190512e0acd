"""The location law: it finds a law that it was given, and knows what it does not know."""

import numpy as np
import pytest
from model_support import GIB, generated, law
from scipy.optimize import nnls

from cachexfs.errors import UsageError
from cachexfs.model.fitted import fit
from cachexfs.model.location import Levels, fit_location, others_bound, pinned_straggler, straight_line
from cachexfs.model.observe import level_medians


def levels(**kind: float) -> Levels:
    table = generated(noise=0.0, **kind)
    return level_medians(table, table.seconds)


@pytest.mark.parametrize("together", [2.0, 10.0, 100.0])
def test_extrapolates_a_known_law_eight_times(together: float) -> None:
    model = fit_location(levels(together=together * GIB))
    truth = law(512, GIB, together=together * GIB)
    assert model.median(512, GIB) == pytest.approx(truth, rel=0.12)


def test_bandwidth_is_found_when_saturated_and_said_unknown_when_not() -> None:
    saturated = fit_location(levels(together=4 * GIB))
    assert saturated.bandwidth() == pytest.approx(4 * GIB, rel=0.25)
    assert saturated.p_unsaturated < 0.05
    loose = fit_location(levels(together=1e6 * GIB))
    assert loose.p_unsaturated > 0.9
    assert loose.end_slope < 0.1


def test_a_stated_bandwidth_replaces_the_guess() -> None:
    data = levels(together=1e6 * GIB)
    truth = law(4096, GIB, together=500 * GIB)
    without, with_spec = fit_location(data), fit_location(data, 500 * GIB)
    assert abs(np.log(with_spec.median(4096, GIB) / truth)) < 0.35
    assert abs(np.log(without.median(4096, GIB) / truth)) > 0.35


def test_latency_is_told_from_bandwidth_when_sizes_differ() -> None:
    n = np.repeat([1.0, 2, 4, 8, 16, 32], 2)
    b = np.tile([GIB / 16, 4 * GIB], 6)
    t = np.array([law(x, y, latency=0.2, together=1e5 * GIB) for x, y in zip(n, b, strict=True)])
    model = fit_location(Levels(n, b, t, np.full(12, 5.0)))
    assert model.median(16, 2 * GIB) == pytest.approx(law(16, 2 * GIB, latency=0.2, together=1e5 * GIB), rel=0.08)


def test_load_and_other_jobs_slow_only_the_share() -> None:
    model = fit_location(levels(together=4 * GIB))
    alone = model.median(64, GIB)
    assert model.median(64, GIB, load=0.5) == pytest.approx(2 * alone, rel=0.15)
    assert model.median(64, GIB, other_bytes=64 * GIB) == pytest.approx(2 * alone, rel=0.15)
    assert model.median(1, GIB, load=0.5) < 1.5 * model.median(1, GIB)
    for n in (1, 16, 256):
        times = [model.median(n, GIB, load=u) for u in (0.0, 0.2, 0.5, 0.9)]
        assert times == sorted(times)


def test_straight_line_is_non_negative_least_squares() -> None:
    rng = np.random.default_rng(5)
    for _ in range(30):
        n = np.sort(rng.choice(np.arange(1, 200), 5, replace=False)).astype(float)
        y = np.exp(rng.normal(0, 1, 5)) * 1e-9
        found = straight_line(n, y)
        weight = np.sqrt(n / n.max())
        design = np.stack([np.ones(5), n / n.max()], 1) * 1e-9 / y[:, None] * weight[:, None]
        expected, _ = nnls(design, weight)
        assert found == pytest.approx((expected[0] * 1e-9, expected[1] * 1e-9 / n.max()), rel=1e-5, abs=1e-16)


def test_other_jobs_bound_and_pinned_straggler() -> None:
    assert others_bound(10.0, 20 * GIB, 100 * GIB, 6 * GIB) == pytest.approx(20.0)
    assert others_bound(30.0, 20 * GIB, 100 * GIB, 6 * GIB) == 30.0
    model = fit_location(levels(together=4 * GIB))
    assert not pinned_straggler(law(64, GIB, together=4 * GIB), model, 64, GIB)
    assert pinned_straggler(3 * law(64, GIB, together=4 * GIB), model, 64, GIB)


@pytest.mark.parametrize(("n", "b", "load"), [(0, GIB, 0.0), (4, 0.0, 0.0), (4, GIB, 1.0), (4, GIB, -0.1)])
def test_senseless_questions_are_refused(n: float, b: float, load: float) -> None:
    with pytest.raises(UsageError):
        fit_location(levels()).median(n, b, load=load)


def test_spread_grows_with_distance() -> None:
    model = fit(generated())
    sds = [model.predict(n, GIB).log_sd for n in (32, 64, 128, 256, 512)]
    assert sds == sorted(sds)


def test_a_single_level_fits_without_warnings() -> None:
    model = fit_location(Levels(np.array([8.0]), np.array([GIB]), np.array([3.0]), np.array([5.0])))
    assert model.median(8, GIB) == pytest.approx(3.0, rel=0.02)
    assert model.line is None
