"""Accuracy on the bundled real data: the bounds that the project promises, with the baselines beside them.

``make bench-model ARGS="--data DIR"`` adds the data whose licence forbids bundling.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from model_support import DATA

from cachexfs.model.evaluate import hold_out, paired_routes, track
from cachexfs.model.fitted import fit
from cachexfs.model.observe import FILE_PER_PROCESS


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    path = Path(__file__).parents[2] / "bench" / "bench_model.py"
    spec = importlib.util.spec_from_file_location("bench_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["bench_model"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_model"]


@pytest.mark.parametrize(("factor", "bound"), [(2, 3.0), (4, 4.0)])
def test_extrapolation_on_vast(bench: ModuleType, factor: int, bound: float) -> None:
    series = bench.file_per_process([], bench.load(DATA, "vast"))
    assert len(series) == 14
    held = [hold_out(s.table, factor) for s in series]
    own = np.mean([h.mape() for h in held if h])
    line = np.mean([h.mape(h.baselines_s["straight line"]) for h in held if h])
    constant = np.mean([h.mape(h.baselines_s["constant bandwidth"]) for h in held if h])
    assert own <= bound
    assert own <= line + 2.0
    assert own < constant


def test_the_intervals_hold_a_system_they_were_partly_made_from(bench: ModuleType) -> None:
    series = bench.file_per_process([], bench.load(DATA, "vast"))
    inside = []
    for s in series:
        held = hold_out(s.table, 4)
        assert held is not None
        for n, b in zip(held.writers, held.bytes_per_writer, strict=True):
            here = s.table.writers == n
            rows = s.table.seconds[here] / s.table.bytes_per_writer[here] * b
            band = held.model.predict(n, b).interval95
            inside += [band.holds(float(t)) for t in rows]
    assert np.mean(inside) >= 0.95


@pytest.mark.parametrize(("column", "bound"), [("w_time_ave", 10.5), ("seconds", 15.5)])
def test_a_year_of_production(bench: ModuleType, column: str, bound: float) -> None:
    series = bench.nersc_series(bench.load(DATA, "nersc"))
    assert len(series) == 17
    results = [track(np.array([float(r[column]) for r in rows])) for rows in series.values()]
    own = np.mean([r.mape for r in results])
    assert own <= bound
    for name in results[0].baselines_mape:
        assert own < np.mean([r.baselines_mape[name] for r in results])
    assert np.mean([r.covered80 for r in results]) == pytest.approx(0.80, abs=0.06)
    assert np.mean([r.covered95 for r in results]) == pytest.approx(0.95, abs=0.04)


def test_route_on_paired_days(bench: ModuleType) -> None:
    first: dict[tuple[str, str], float] = {}
    for row in sorted(bench.load(DATA, "nersc"), key=lambda r: r["date"]):
        large = float(row["bytes_per_writer"]) > 2 * 2**30
        if row["app"] == "ior" and row["system"] == "Cori" and row["writers"] == "4096" and large:
            first.setdefault((row["fs"], row["date"][:10]), float(row["seconds"]))
    days = sorted({d for fs, d in first if fs == "cscratch"} & {d for fs, d in first if fs == "datawarp-bb"})
    p = paired_routes([first["cscratch", d] for d in days], [first["datawarp-bb", d] for d in days])
    assert p.confident >= 0.25
    assert p.confident_accuracy >= 0.85
    assert p.ratio <= 0.92


def test_one_level_of_production_abstains(bench: ModuleType) -> None:
    rows = next(iter(bench.nersc_series(bench.load(DATA, "nersc")).values()))
    table = bench.to_table(rows)
    model = fit(table)
    n = float(table.writers[0])
    assert model.predict(2 * n, float(table.bytes_per_writer[0])).abstain
    assert next(t for t in model.tail if t.multiple == 2.0).exceeded > 0


def test_bundled_data_carry_their_licence() -> None:
    text = (DATA / "LICENSE").read_text()
    assert "Redistribution and use in source and binary forms" in text
    for path in DATA.glob("*.gz"):
        assert path.name in text
    assert sum(p.stat().st_size for p in DATA.iterdir()) < 1.5e6
    assert FILE_PER_PROCESS == "file-per-process"
