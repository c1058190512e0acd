"""Accuracy of the durability model on real measurements, with baselines beside it.

Run: ``python bench/bench_model.py [--data DIR] [--calibrate] [--bundle DIR]``. DIR holds ``archer_writes.csv.gz``,
``nersc_abc_writes.csv.gz`` and ``vast_eval_writes.csv.gz`` (sources and licences: docs/model.md). Default:
``$CACHEXFS_DATA``, else the data that the package carries (NERSC and VAST; ARCHER is GPL-3.0 and is not among
them, so its rows are then missing).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cachexfs.model import evaluate
from cachexfs.model.delays import Delay
from cachexfs.model.evaluate import BASELINES, HeldOut, hold_out, paired_routes, track
from cachexfs.model.fitted import fit
from cachexfs.model.intervals import FACTORS, weighted_conformal_factor
from cachexfs.model.location import others_bound
from cachexfs.model.observe import FILE_PER_PROCESS, SHARED_FILE, Observations, observations
from cachexfs.model.risk import exposure, waste
from cachexfs.model.simulation import Scenario, simulate
from cachexfs.model.tracker import StateTracker

BUNDLED = Path(evaluate.__file__).parent / "data"
FILES = {"archer": "archer_writes.csv.gz", "nersc": "nersc_abc_writes.csv.gz", "vast": "vast_eval_writes.csv.gz"}
REPEATS_MIN, LEVELS_MIN = 3, 5
Rows = list[dict[str, str]]


def load(directory: Path, name: str) -> Rows:
    """Rows of one data file; empty if it is not there."""
    path = directory / FILES[name]
    if not path.exists():
        return []
    with gzip.open(path, "rt", newline="") as stream:
        return list(csv.DictReader(stream))


@dataclass(frozen=True)
class Series:
    """One system in one configuration."""

    group: str
    name: str
    table: Observations


def to_table(rows: Rows, system: str = "") -> Observations:
    return observations(
        [float(r["writers"]) for r in rows],
        [float(r["bytes_per_writer"]) for r in rows],
        [float(r["seconds"]) for r in rows],
        system=system,
    )


def file_per_process(archer: Rows, vast: Rows) -> list[Series]:
    """Series with at least 3 repeats at 5 levels, one job, no HDF5 or NetCDF."""
    parts: dict[tuple[str, str], Rows] = defaultdict(list)
    for row in archer:
        alone = row["concurrent_jobs"] in ("", "1.0")
        if row["access"].startswith("file-per-process") and row["api"] not in ("HDF5", "NetCDF") and alone:
            parts["ARCHER IOR" if row["source"] == "archer-ior" else "ARCHER POSIX", row["series"]].append(row)
    for row in vast:
        parts["VAST", row["series"]].append(row)
    return sorted(_enough(parts), key=lambda s: (s.group, s.name))


def shared_file(archer: Rows) -> list[Series]:
    """Shared-file series, same conditions."""
    parts: dict[tuple[str, str], Rows] = defaultdict(list)
    for row in archer:
        if row["access"].startswith("single-shared-file") and row["concurrent_jobs"] in ("", "1.0"):
            parts["IOR shared" if row["source"] == "archer-ior" else "benchio shared", row["series"]].append(row)
    return sorted(_enough(parts), key=lambda s: (s.group, s.name))


def _enough(parts: dict[tuple[str, str], Rows]) -> Iterable[Series]:
    for (group, name), rows in parts.items():
        table = to_table(rows)
        if len(evaluate.level_table(table, REPEATS_MIN)) >= LEVELS_MIN:
            yield Series(group, name, table)


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def verdict(value: float, bound: float, text: str = "") -> str:
    return f"{'met' if value <= bound else 'NOT MET'} (bound {bound:g}{text})"


def held(series: Sequence[Series], factor: float) -> list[tuple[Series, HeldOut]]:
    found = ((s, hold_out(s.table, factor, REPEATS_MIN)) for s in series)
    return [(s, h) for s, h in found if h is not None]


def extrapolation(title: str, series: Sequence[Series], bounds: dict[int, float]) -> None:
    heading(title)
    names = ("this model", *BASELINES)
    for factor in (2, 4, 8):
        results = held(series, factor)
        if not results:
            continue
        print(f"fit at N <= Nmax/{factor}, median of the slowest at larger N; MAPE % (series)")
        print(f"  {'':28}" + "".join(f"{n:>20}" for n in names) + f"{'bias':>8}")
        groups: dict[str, list[HeldOut]] = defaultdict(list)
        for s, h in results:
            groups[s.group].append(h)
        means = {g: _mapes(h) for g, h in groups.items()}
        pooled = _mapes([h for _, h in results])
        over = np.mean(list(means.values()), axis=0)
        for name, row, members in (
            *((f"{g} ({len(groups[g])})", means[g], groups[g]) for g in sorted(groups)),
            (f"pooled over series ({len(results)})", pooled, [h for _, h in results]),
            ("mean over systems", over, [h for _, h in results]),
        ):
            print(f"  {name:28}" + "".join(f"{v:20.1f}" for v in row) + f"{_bias(members):+8.2f}")
        if factor in bounds and len(groups) > 1:
            print(f"  pooled {pooled[0]:.1f}: {verdict(pooled[0], bounds[factor])}")
            worst = max(means[g][0] - means[g][1] for g in means)
            print(f"  worse than the straight line by at most {worst:+.1f} points on any set: {verdict(worst, 2.0)}")
            _unsaturated(results)


def _mapes(members: Sequence[HeldOut]) -> list[float]:
    own = [np.mean([h.mape() for h in members])]
    return own + [float(np.mean([h.mape(h.baselines_s[b]) for h in members])) for b in BASELINES]


def _bias(members: Sequence[HeldOut]) -> float:
    return float(np.mean([np.mean(np.log(h.predicted_s / h.observed_s)) for h in members]))


def _unsaturated(results: Sequence[tuple[Series, HeldOut]]) -> None:
    """IOR series whose fitted levels show no saturation (end slope below 0.3)."""
    loose = [h for s, h in results if s.group == "ARCHER IOR" and h.model.slowest.end_slope < 0.3]
    if loose:
        own, line = _mapes(loose)[:2]
        print(f"  unsaturated IOR sets ({len(loose)}): {own:.1f} against the straight line's {line:.1f}")


def calibration_sets(archer: Rows, vast: Rows) -> dict[str, list[Series]]:
    """All sets by access, one group per system, filesystem and interface: what the intervals are calibrated on."""
    parts: dict[tuple[str, str], Rows] = defaultdict(list)
    kinds: dict[str, str] = {}
    for row in archer:
        if row["concurrent_jobs"] not in ("", "1.0"):
            continue
        kind = SHARED_FILE if "shared" in row["access"] else FILE_PER_PROCESS
        name = f"IOR {row['fs']}" if row["source"] == "archer-ior" else f"benchio {row['api'].split()[0]}"
        group = f"{name} {'shared' if kind == SHARED_FILE else 'fpp'}"
        kinds[group] = kind
        parts[group, row["series"]].append(row)
    for row in vast:
        kinds["VAST fpp"] = FILE_PER_PROCESS
        parts["VAST fpp", row["series"]].append(row)
    out: dict[str, list[Series]] = defaultdict(list)
    for s in _enough(parts):
        out[kinds[s.group]].append(s)
    return out


KINDS = ("level medians", "single checkpoints")


def coverage(sets: dict[str, list[Series]]) -> None:
    heading("Coverage of 80% and 95% intervals, factors from the other systems only (Nmax/2, /4 and /8 together)")
    for access, series in sets.items():
        results = [r for factor in (2, 4, 8) for r in held(series, factor)]
        groups = sorted({s.group for s, _ in results})
        if len(groups) < 2:
            print(f"{access}: needs two systems or more; give --data")
            continue
        for kind in KINDS:
            rows = []
            for group in groups:
                others = [(s, h) for s, h in results if s.group != group]
                own = np.concatenate([_scaled(h, kind) for s, h in results if s.group == group])
                weight = np.concatenate(
                    [
                        np.full(_scaled(h, kind).size, 1.0 / _scaled(h, kind).size)
                        for s, h in results
                        if s.group == group
                    ]
                )
                rows.append([float(np.average(own <= _factor(others, kind, q), weights=weight)) for q in (0.80, 0.95)])
            a, b = np.mean(rows, axis=0)
            inside = abs(a - 0.80) <= 0.06 and abs(b - 0.95) <= 0.04
            print(
                f"{access}, {kind}: mean over systems {a:.3f} / {b:.3f}: {'met' if inside else 'NOT MET'}"
                " (bounds 0.80 +- 0.06, 0.95 +- 0.04)"
            )
            print("    " + ", ".join(f"{g} {x:.2f}/{y:.2f}" for g, (x, y) in zip(groups, rows, strict=True)))


def _scaled(h: HeldOut, kind: str) -> np.ndarray:
    return h.scaled_level if kind == KINDS[0] else h.scaled_rows


def _factor(results: Sequence[tuple[Series, HeldOut]], kind: str, q: float) -> float:
    """Quantile in which each system counts the same, and each series within it."""
    values, weights = [], []
    count: dict[str, int] = defaultdict(int)
    for s, _ in results:
        count[s.group] += 1
    for s, h in results:
        scaled = _scaled(h, kind)
        values.append(scaled)
        weights.append(np.full(scaled.size, 1.0 / (scaled.size * count[s.group])))
    return weighted_conformal_factor(np.concatenate(values), np.concatenate(weights), q)


def calibrate(sets: dict[str, list[Series]], nersc: Rows) -> None:
    heading("Factors for cachexfs/model/intervals.py")
    everything = [s for series in sets.values() for s in series]
    for access, series in (*sets.items(), ("all sets", everything)):
        results = [r for factor in (2, 4, 8) for r in held(series, factor)]
        for kind in KINDS:
            factors = ", ".join(f"{q}: {_factor(results, kind, q):.2f}" for q in (0.80, 0.95))
            print(f"  {access:18}{kind:20}{factors}")
    scaled, weights = [], []
    for rows in nersc_series(nersc).values():
        tracker = StateTracker()
        early = []
        for row in rows[:60]:
            value = float(row["seconds"])
            if tracker.ready:
                forecast = tracker.forecast()
                early.append(abs(np.log(value / forecast.median_s)) / forecast.log_sd)
            tracker.update(value)
        scaled.append(np.array(early))
        weights.append(np.full(len(early), 1.0 / len(early)))
    joined = np.concatenate(scaled), np.concatenate(weights)
    print(
        "  tracker           first 60 jobs       "
        + ", ".join(f"{q}: {weighted_conformal_factor(*joined, q):.2f}" for q in (0.80, 0.95))
    )
    print(f"  in use: {FACTORS}")


def nersc_series(rows: Rows) -> dict[str, Rows]:
    """File-per-process series of 200 jobs or more, in order of time."""
    parts: dict[str, Rows] = defaultdict(list)
    for row in rows:
        if row["access"] == "file-per-process":
            size = round(float(row["bytes_per_writer"]) / 1e8)
            parts[f"{row['system']} {row['fs']} {row['app']} {row['writers']} {size / 10:g}GB"].append(row)
    return {k: sorted(v, key=lambda r: r["date"]) for k, v in sorted(parts.items()) if len(v) >= 200}


def production(rows: Rows) -> None:
    heading("One year of production, one step ahead (NERSC, ALCF; file-per-process series)")
    series = nersc_series(rows)
    for column, what, bound in (("w_time_ave", "typical writer", 10.5), ("seconds", "slowest writer", 15.5)):
        results = {k: track(np.array([float(r[column]) for r in v])) for k, v in series.items()}
        names = list(next(iter(results.values())).baselines_mape)
        print(f"{what}: MAPE % / median APE %, coverage 80 / 95" + "".join(f"{n:>26}" for n in names))
        systems: dict[str, list[float]] = defaultdict(list)
        for key, r in results.items():
            systems[" ".join(key.split()[:2])].append(r.mape)
            base = "".join(f"{r.baselines_mape[n]:26.1f}" for n in names)
            print(f"  {key:42}{r.mape:6.1f} /{r.median_ape:5.1f}  {r.covered80:.2f} / {r.covered95:.2f} {base}")
        all_r = list(results.values())
        mape = float(np.mean([r.mape for r in all_r]))
        c80, c95 = (float(np.mean([getattr(r, c) for r in all_r])) for c in ("covered80", "covered95"))
        base = ", ".join(f"{n} {np.mean([r.baselines_mape[n] for r in all_r]):.1f}" for n in names)
        print(f"  mean over series {mape:.1f}: {verdict(mape, bound)}; baselines: {base}")
        print(f"  mean over systems {np.mean([np.mean(v) for v in systems.values()]):.1f}")
        print(f"  coverage {c80:.3f} / {c95:.3f} (bounds 0.80 +- 0.06, 0.95 +- 0.04)")
        ratios = np.concatenate([r.ratios for r in all_r])
        tail = ", ".join(f"> {m:g}x {100 * np.mean(ratios > m):.2f}%" for m in (1.5, 2, 5))
        print(f"  rare stragglers are not predicted; counted: {tail}")


def contention(archer: Rows) -> None:
    heading("Other jobs writing (ARCHER dual and quad, 128 MiB per writer, striped, shared file, N <= 3072)")
    suffix = "ARCHER/fs3/striped/MPI-IO/bpw128MiB"
    alone: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    busy: dict[tuple[int, int], list[float]] = defaultdict(list)
    ior: list[float] = []
    for row in archer:
        n, seconds = int(row["writers"]), float(row["seconds"])
        if row["series"].endswith(suffix) and row["concurrent_jobs"] == "1.0":
            alone[row["series"]][n].append(seconds)
        elif row["series"].endswith(suffix):
            busy[int(float(row["concurrent_jobs"])), n].append(seconds)
        shared = row["source"] == "archer-ior" and row["fs"] == "fs3" and "shared" in row["access"]
        if shared and row["stripe"] == "-1" and n >= 64:
            ior.append(float(row["gib_s"]))
    seen = {k: float(np.median(v)) for k, v in sorted(busy.items()) if k[1] <= 3072}
    name, single = _same_benchmark(alone, seen)
    spec = float(np.mean(ior))
    print(f"single-job curve: {name} (of three block sizes the one that agrees at N <= 96, where others do not matter)")
    print(f"B = {spec:.1f} GiB/s, mean over the fs3 IOR shared-file rows on all stripes at 64 clients and more")
    rules = {
        "all bytes / B": lambda n, jobs, b: others_bound(single[n], n * BYTES, (jobs - 1) * n * BYTES, b * 2**30),
        "others ignored": lambda n, jobs, b: single[n],
        "times the jobs": lambda n, jobs, b: single[n] * jobs,
    }
    for rule, guess in rules.items():
        errors = {k: 100 * abs(guess(k[1], k[0], spec) / t - 1) for k, t in seen.items()}
        mean = float(np.mean(list(errors.values())))
        parts = ", ".join(f"{j} jobs {np.mean([e for k, e in errors.items() if k[0] == j]):.1f}" for j in (2, 4))
        middle = np.median(list(errors.values()))
        print(
            f"  {rule:16} MAPE {mean:6.1f}%, median {middle:5.1f}% ({len(seen)} points; {parts})"
            + (f": {verdict(mean, 8.0)}" if rule == "all bytes / B" else "")
        )
    scan = {
        b: np.mean([abs(rules["all bytes / B"](k[1], k[0], b) / t - 1) for k, t in seen.items()])
        for b in (9, 11.5, 12, 13, 13.5, 16, 22)
    }
    print("  it depends on B: " + ", ".join(f"{b:g} GiB/s {100 * e:.1f}%" for b, e in scan.items()))


BYTES = 128 * 2.0**20


def _same_benchmark(
    alone: dict[str, dict[int, list[float]]], seen: dict[tuple[int, int], float]
) -> tuple[str, dict[int, float]]:
    """The single-job series closest to the busy ones at up to 96 writers."""
    small = sorted({n for _, n in seen if n <= 96})
    medians = {
        k: {n: float(np.median(t)) for n, t in v.items()} for k, v in alone.items() if all(n in v for n in small)
    }
    far = {k: sum(abs(np.log(v[n] / seen[j, n])) for j in (2, 4) for n in small) for k, v in medians.items()}
    name = min(far, key=lambda k: far[k])
    return name, medians[name]


def risk_checks() -> None:
    heading("Exposure against Monte Carlo; waste against event simulation")
    rng = np.random.default_rng(3)
    worst = 0.0
    for tau, median, sd, q in (
        (600, 60, 0.4, 0),
        (600, 60, 1.0, 0),
        (120, 100, 0.6, 0),
        (600, 60, 0.4, 0.05),
        (60, 100, 0.5, 0),
    ):
        delay = Delay(median, sd, q)
        exact = exposure(tau, delay)
        monte = monte_carlo_age(tau, delay, rng)
        worst = max(worst, abs(exact.mean_s / monte - 1))
        print(
            f"  interval {tau:4} delay {median:4} sd {sd} failed {q:4}: exact {exact.mean_s:7.1f} "
            f"simulated {monte:7.1f} first order {exact.first_order_s:7.1f}"
        )
    print(f"  largest difference {100 * worst:.2f}%: {verdict(100 * worst, 1.0)}")
    worst = 0.0
    for tau, stall, load, delay_s, kappa in (
        (1000, 10, 0.01, 60, 0),
        (1000, 30, 0.05, 120, 0.1),
        (600, 5, 0.1, 300, 0.2),
        (600, 20, 0.17, 60, 0.1),
        (300, 30, 0.2, 200, 0.5),
    ):
        rate = load / tau
        partner, drain = Delay(delay_s, 0.4), Delay(2.0 * delay_s, 0.4)
        pfs = Delay.of(partner.draw(rng, 4000) + drain.draw(rng, 4000))
        predicted = waste(tau, stall, rate, partner, pfs, kappa, 120)
        run = simulate(
            Scenario(
                10_000,
                10_000 / rate,
                4000 / rate,
                tau,
                Delay(1.0),
                partner,
                drain,
                "partner",
                stall_partner_s=stall,
                recovery_s=120,
                shared_share=kappa,
                system_share=0.0,
                common_cause=0.0,
                reprotect_s=0.0,
            ),
            replicas=5,
        )
        error = predicted.exact / run.waste - 1
        worst = max(worst, abs(error))
        print(
            f"  lambda tau {load:4}: waste exact {predicted.exact:.4f} first order {predicted.first_order:.4f} "
            f"simulated {run.waste:.4f} +- {run.waste_error:.4f} ({100 * error:+.1f}%)"
        )
    print(f"  largest difference {100 * worst:.1f}%: {verdict(100 * worst, 6.0)}")


def monte_carlo_age(tau: float, delay: Delay, rng: np.random.Generator) -> float:
    """Time average of the age, by following 400,000 captures."""
    captures = np.arange(400_000) * tau
    reached = captures + delay.draw(rng, captures.size)
    order = np.argsort(reached)
    newest = np.maximum.accumulate(captures[order])
    at = reached[order]
    ok = np.isfinite(at) & (at > 100 * tau) & (at < captures[-1] - 100 * tau)
    at, newest = at[ok], newest[ok]
    begin, end = at[:-1] - newest[:-1], at[1:] - newest[:-1]
    return float(np.sum((end**2 - begin**2) / 2) / (at[-1] - at[0]))


def routes(rows: Rows) -> None:
    heading("Route on paired days (Cori Lustre and DataWarp, IOR file-per-process)")
    for writers in ("4096", "512"):
        first: dict[tuple[str, str], float] = {}
        for row in sorted(rows, key=lambda r: r["date"]):
            if row["app"] == "ior" and row["system"] == "Cori" and row["access"] == "file-per-process":
                large = float(row["bytes_per_writer"]) > 2 * 2**30
                if row["writers"] == writers and large:
                    first.setdefault((row["fs"], row["date"][:10]), float(row["seconds"]))
        days = sorted({d for fs, d in first if fs == "cscratch"} & {d for fs, d in first if fs == "datawarp-bb"})
        p = paired_routes([first["cscratch", d] for d in days], [first["datawarp-bb", d] for d in days])
        print(
            f"  {writers} writers, {p.days} days decided: always Lustre {p.direct_s:.1f} s, "
            f"always DataWarp {p.fast_s:.1f} s, chosen {p.chosen_s:.1f} s, oracle {p.oracle_s:.1f} s; "
            f"right {p.accuracy:.2f}, Brier {p.brier:.3f}"
        )
        fine = p.confident_accuracy >= 0.85 and p.confident >= 0.25 and p.ratio <= 0.92
        said = f": {'met' if fine else 'NOT MET'} (bounds 25%, 0.85, 0.92)" if writers == "4096" else ""
        share = f"confident on {100 * p.confident:.0f}% of days, then right {p.confident_accuracy:.2f}"
        print(f"    {share}; ratio {p.ratio:.3f}{said}")


def abstentions(series: Sequence[Series]) -> None:
    heading("Abstention")
    base = next(s for s in series if s.group == "VAST").table
    cases: list[tuple[str, Observations, float]] = [
        ("one level of N", base.take(base.writers == 16), 64.0),
        ("ten rows", base.take(np.arange(len(base)) % (len(base) // 10) == 0).take(np.arange(10) < 10), 64.0),
        ("far beyond", base, 4096.0),
    ]
    ior = [s for s in series if s.group == "ARCHER IOR" and s.name.endswith("NW.FPS/s-1")]
    if ior:
        cases.append(("two systems mixed, no labels", join(base, ior[0].table), 128.0))
    for name, table, n in cases:
        p = fit(table).predict(n, float(np.median(table.bytes_per_writer)))
        print(f"  {name:30} {'abstains' if p.abstain else 'ANSWERS'}: {'; '.join(p.reasons)}")


def join(a: Observations, b: Observations) -> Observations:
    pairs = [(getattr(a, f), getattr(b, f)) for f in ("writers", "bytes_per_writer", "seconds")]
    return observations(*(np.concatenate(p) for p in pairs))


def speed(series: Sequence[Series]) -> None:
    heading("Speed (median of 20, warm)")
    table = series[-1].table
    model = fit(table)
    a = Delay(60.0, 0.3)
    decide = evaluate.decide_route
    tasks: list[tuple[str, Callable[[], object], float]] = [
        ("fit", lambda: fit(table), 0.2),
        ("predict", lambda: model.predict(200.0, 2.0**33), 0.001),
        ("decide", lambda: decide(a, a, a, interval_s=600, failures_per_s=1e-5, kappa=0.1), 0.010),
    ]
    for name, task, bound in tasks:
        times = []
        for _ in range(20):
            start = time.perf_counter()
            task()
            times.append(time.perf_counter() - start)
        print(f"  {name:10}{1000 * float(np.median(times)):8.3f} ms: {verdict(float(np.median(times)), bound, ' s')}")


BUNDLE_COLUMNS = {
    "nersc": ("system", "fs", "date", "app", "writers", "bytes_per_writer", "w_time_ave", "seconds", "access"),
    "vast": ("system", "fs", "date", "series", "writers", "bytes_per_writer", "seconds", "access"),
}


def bundle(source: Path, target: Path) -> None:
    """Write the compact copies that the package carries: file-per-process rows, the columns used here."""
    target.mkdir(parents=True, exist_ok=True)
    for name, columns in BUNDLE_COLUMNS.items():
        rows = [r for r in load(source, name) if r["access"] == "file-per-process"]
        lines = [",".join(columns)]
        for row in rows:
            cells = [row[c] for c in columns]
            lines.append(
                ",".join(
                    f"{float(c):.7g}" if k.endswith(("_ave", "seconds")) else c.removesuffix(".0")
                    for k, c in zip(columns, cells, strict=True)
                )
            )
        with open(target / FILES[name], "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as stream:
            stream.write(("\n".join(lines) + "\n").encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("CACHEXFS_DATA", BUNDLED)))
    parser.add_argument("--calibrate", action="store_true", help="print the interval factors only")
    parser.add_argument("--bundle", type=Path, help="write compact copies of NERSC and VAST here, and stop")
    options = parser.parse_args()
    if options.bundle:
        bundle(options.data, options.bundle)
        return 0
    archer, nersc, vast = (load(options.data, n) for n in ("archer", "nersc", "vast"))
    if not vast or not nersc:
        print(f"no data in {options.data}; give --data DIR or set CACHEXFS_DATA", file=sys.stderr)
        return 2
    series = file_per_process(archer, vast)
    if options.calibrate:
        calibrate(calibration_sets(archer, vast), nersc)
        return 0
    if not archer:
        print(f"ARCHER is not in {options.data}: its tables are left out; give --data")
    heading("Series")
    for s in series:
        levels = evaluate.level_table(s.table, REPEATS_MIN)
        print(f"  {s.group:14}{s.name:90}{min(levels):6g} to {max(levels):6g} writers, {len(s.table)} rows")
    extrapolation("File-per-process, slowest writer", series, {2: 6.0, 4: 7.4})
    if archer:
        extrapolation("Shared file, slowest writer (no bound: days differ)", shared_file(archer), {})
    coverage(calibration_sets(archer, vast))
    production(nersc)
    if archer:
        contention(archer)
    risk_checks()
    routes(nersc)
    abstentions(series)
    speed(series)
    return 0


if __name__ == "__main__":
    sys.exit(main())
