"""The fitted model: when it answers, when it abstains and with which reason."""

import math

import numpy as np
import pytest
from model_support import GIB, generated

from cachexfs.errors import UsageError
from cachexfs.model.fitted import fit
from cachexfs.model.observe import Observations, observations
from cachexfs.model.store import load_model, save_model


def joined(*tables: Observations, labels: bool = False) -> Observations:
    columns = [np.concatenate([getattr(t, f) for t in tables]) for f in ("writers", "bytes_per_writer", "seconds")]
    system = [s for t in tables for s in t.system] if labels else ""
    return observations(*columns, system=system)


def test_answers_within_reach() -> None:
    p = fit(generated()).predict(128, GIB)
    assert not p.abstain
    assert p.reasons == ()
    assert p.interval95.low_s < p.interval80.low_s < p.median_s < p.interval80.high_s < p.interval95.high_s
    assert p.typical_s is not None
    assert p.typical_s <= p.median_s


@pytest.mark.parametrize(
    ("table", "n", "b", "reason"),
    [
        (generated(counts=(16,), repeats=40), 64, GIB, "only 1 level of writers"),
        (generated(counts=(8, 16), repeats=20), 64, GIB, "only 2 levels of writers"),
        (generated(counts=(1, 2, 4, 8, 16), repeats=2), 32, GIB, "only 10 rows"),
        (generated(), 1024, GIB, "more than 8 times away"),
        (generated(together=1e6 * GIB), 256, GIB, "not saturated"),
        (generated(), 64, 16 * GIB, "per writer is more than 4 times"),
        (generated(), 64, 1.0, "per writer is more than 4 times"),
    ],
)
def test_abstains_with_the_reason(table: Observations, n: int, b: float, reason: str) -> None:
    p = fit(table).predict(n, b)
    assert p.abstain
    assert any(reason in r for r in p.reasons), p.reasons
    assert math.isfinite(p.median_s)


def test_one_level_answers_at_that_level() -> None:
    assert not fit(generated(counts=(16,), repeats=40)).predict(16, GIB).abstain


def test_a_stated_bandwidth_lifts_the_doubt_about_saturation() -> None:
    table = generated(together=1e6 * GIB)
    assert not fit(table, 100 * GIB).predict(256, GIB).abstain


def test_two_labelled_systems_abstain() -> None:
    table = joined(generated(system="a"), generated(system="b", seed=2), labels=True)
    reasons = fit(table).predict(64, GIB).reasons
    assert any("2 systems are mixed" in r for r in reasons)


def test_two_unlabelled_systems_abstain() -> None:
    table = joined(generated(), generated(alone=0.5 * GIB, together=8 * GIB, seed=2))
    p = fit(table).predict(64, GIB)
    assert p.abstain
    assert any("two separate groups" in r for r in p.reasons), p.reasons


def test_two_systems_at_different_writer_counts_abstain() -> None:
    slow = generated(counts=(3, 6, 12, 24), together=1.0 * GIB, alone=0.1 * GIB)
    p = fit(joined(generated(), slow)).predict(64, GIB)
    assert any("do not follow one law" in r for r in p.reasons), p.reasons


@pytest.mark.parametrize("seed", range(8))
def test_one_noisy_system_is_not_taken_for_two(seed: int) -> None:
    assert fit(generated(noise=0.15, repeats=8, seed=seed)).fit_reasons == ()


def test_sizes_that_differ_within_a_level_are_not_two_systems() -> None:
    small, large = generated(size=GIB / 8, latency=0.4), generated(size=GIB, latency=0.4)
    assert fit(joined(small, large)).fit_reasons == ()


def test_shared_and_separate_files_are_refused() -> None:
    table = observations([1, 2, 4], GIB, [1.0, 1.1, 1.2], access=["shared-file", "file-per-process", "shared-file"])
    with pytest.raises(UsageError, match="--access"):
        fit(table)


def test_zero_variance_is_noted_and_keeps_a_width() -> None:
    model = fit(generated(noise=0.0))
    assert any("copies of one measurement" in n for n in model.notes)
    p = model.predict(64, GIB)
    assert p.interval80.high_s > 1.02 * p.median_s


def test_timed_out_rows_raise_the_level_instead_of_vanishing() -> None:
    n = np.repeat([1.0, 2, 4, 8], 5)
    t = np.tile([1.0, 1.1, 1.2, 50.0, 50.0], 4) * n
    late = np.tile([0, 0, 0, 1, 1], 4)
    kept, dropped = fit(observations(n, GIB, t, censored=late)), fit(observations(n[late == 0], GIB, t[late == 0]))
    assert kept.predict(8, GIB).median_s > dropped.predict(8, GIB).median_s
    assert kept.failed == pytest.approx(0.4)
    assert next(t for t in kept.tail if t.multiple == 2.0).exceeded == 8


def test_only_timed_out_rows_are_refused() -> None:
    with pytest.raises(UsageError, match="longer time limit"):
        fit(observations([1, 2, 4], GIB, [9.0, 9.0, 9.0], censored=[True] * 3))


def test_thin_levels_do_not_bend_the_law() -> None:
    table = generated()
    wild = joined(table, observations([128.0], GIB, [400.0]))
    assert fit(wild).predict(64, GIB).median_s == pytest.approx(fit(table).predict(64, GIB).median_s)
    assert any("fewer than 3 repeats" in n for n in fit(wild).notes)


def test_the_delay_has_the_quantiles_of_the_intervals() -> None:
    p = fit(generated()).predict(128, GIB)
    d = p.delay(failed=0.1)
    assert d.failed == 0.1
    assert d.median_s == pytest.approx(p.median_s, rel=0.01)
    for q, bound in (
        (0.10, p.interval80.low_s),
        (0.90, p.interval80.high_s),
        (0.025, p.interval95.low_s),
        (0.975, p.interval95.high_s),
    ):
        assert d.quantile_s(q * 0.9) == pytest.approx(bound, rel=0.02)
    assert d.mean_s() < 1.2 * p.median_s


def test_dated_rows_tell_the_state_of_today() -> None:
    table = generated(repeats=20)
    order = np.random.default_rng(3).permutation(len(table))
    late = order >= 100
    slow = observations(
        table.writers, table.bytes_per_writer, table.seconds * np.where(late, 1.6, 1.0), time=order * 7200.0
    )
    model = fit(slow)
    assert model.recent is not None
    assert model.recent.ratio == pytest.approx(1.6, rel=0.15)
    assert model.recent.low < model.recent.ratio < model.recent.high
    assert fit(table).recent is None


def test_saved_and_loaded_model_says_the_same(tmp_path) -> None:
    model = fit(generated(system="x"), 30 * GIB)
    save_model(model, tmp_path / "m.json")
    again = load_model(tmp_path / "m.json")
    assert again.recent == model.recent
    assert again.predict(128, GIB) == model.predict(128, GIB)
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"format": "cachexfs-model-1"}', '{"format": "cachexfs-model-1", "slowest": 3}', "\x00\xff"],
)
def test_a_damaged_model_file_is_refused(tmp_path, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(UsageError, match="cachexfs fit"):
        load_model(tmp_path / "m.json")


def test_a_model_with_a_broken_number_is_refused(tmp_path) -> None:
    save_model(fit(generated()), tmp_path / "m.json")
    text = (tmp_path / "m.json").read_text()
    (tmp_path / "m.json").write_text(
        text.replace('"noise_sd": ', '"noise_sd": "', 1).replace(', "writers_min"', '", "writers_min"', 1)
    )
    with pytest.raises(UsageError, match="damaged"):
        load_model(tmp_path / "m.json")
