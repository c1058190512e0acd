"""The state tracker: follows what stays, ignores what passes, says when it changed."""

import numpy as np
import pytest

from cachexfs.errors import UsageError
from cachexfs.model.evaluate import track
from cachexfs.model.tracker import BURN_IN, StateTracker


def feed(times: np.ndarray) -> StateTracker:
    tracker = StateTracker()
    for t in times:
        tracker.update(float(t))
    return tracker


def noise(n: int, seed: int = 1, sd: float = 0.1) -> np.ndarray:
    return np.exp(sd * np.random.default_rng(seed).standard_normal(n))


def test_no_forecast_before_burn_in() -> None:
    tracker = feed(noise(BURN_IN - 1))
    assert not tracker.ready
    with pytest.raises(UsageError, match="needs 10"):
        tracker.forecast()


def test_coverage_on_stationary_noise() -> None:
    covered = [track(30 * noise(400, seed)) for seed in range(6)]
    assert np.mean([c.covered80 for c in covered]) == pytest.approx(0.80, abs=0.04)
    assert np.mean([c.covered95 for c in covered]) == pytest.approx(0.95, abs=0.03)


def test_one_straggler_moves_nothing() -> None:
    times = 30 * noise(100)
    before = feed(times).forecast()
    after = feed(np.append(times, 900.0)).forecast()
    assert after.median_s == pytest.approx(before.median_s, rel=0.12)
    assert not after.changed


def test_a_lasting_change_is_announced_and_followed() -> None:
    tracker = feed(30 * noise(100))
    flags = []
    for t in 90 * noise(12, 2):
        tracker.update(float(t))
        flags.append(tracker.changed)
    assert any(flags)
    assert not any(flags[:3])
    assert tracker.forecast().median_s == pytest.approx(90, rel=0.15)


def test_false_alarms_are_rare() -> None:
    alarms = 0
    for seed in range(5):
        tracker = StateTracker()
        for t in 30 * noise(400, seed):
            tracker.update(float(t))
            alarms += tracker.changed
    assert alarms <= 0.03 * 5 * 400


def test_size_is_taken_out_by_the_law() -> None:
    tracker = StateTracker()
    for i, t in enumerate(noise(60)):
        expected = 10.0 if i % 2 else 40.0
        tracker.update(float(1.3 * expected * t), expected)
    assert tracker.forecast(20.0).median_s == pytest.approx(26.0, rel=0.08)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_nonsense_is_refused(value: float) -> None:
    with pytest.raises(UsageError):
        StateTracker().update(value)


def test_identical_times_do_not_divide_by_zero() -> None:
    forecast = feed(np.full(80, 30.0)).forecast()
    assert forecast.median_s == pytest.approx(30.0)
