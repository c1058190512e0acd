"""The report: one page that a person would rather look at than read numbers.

Role: behind ``cachexfs report``. Composes charts and tables from a fitted model, a job and, if given, the
measurements. Pure: returns HTML text.
"""

from __future__ import annotations

import math

import numpy as np

from cachexfs.model import page
from cachexfs.model.advice import SNAPSHOT_RATE, Advice, Job, advise, boundaries_of, route_against_load
from cachexfs.model.arrays import GIB, Floats
from cachexfs.model.delays import Delay
from cachexfs.model.evaluate import HeldOut, hold_out
from cachexfs.model.fitted import FittedModel
from cachexfs.model.observe import Observations, level_groups
from cachexfs.model.risk import exposure, waste
from cachexfs.model.svg import Axis, Chart, Point, padded
from cachexfs.model.units import count_text, size_text, time_text

POINTS_MAX = 1500


def render(model: FittedModel, job: Job, table: Observations | None = None, partner: FittedModel | None = None) -> str:
    """The page. ``table`` are the measurements behind ``model`` (same filters); without it the charts of single
    checkpoints and the held-out check are left out and the page says so."""
    advice = advise(model, job, partner)
    body = [_head(model, job, advice)]
    body.append(_law(model, job, table))
    if table is not None:
        body.append(_distribution(model, table))
        body.append(_held_out(table))
    else:
        body.append(page.paragraph("Give --data to see single checkpoints and the held-out check.", "soft"))
    body.append(_boundaries(job, advice))
    body.append(_exposure(job, advice))
    body.append(_interval(job, advice))
    body.append(_route(model, job, advice, partner))
    body.append(_limits(model))
    return page.frame(f"Durability of checkpoints: {model.system or 'this filesystem'}", "".join(body))


def _head(model: FittedModel, job: Job, advice: Advice) -> str:
    name = model.system or "this filesystem"
    law = model.slowest
    out = f"<h1>Durability of checkpoints on {_escape(name)}</h1>" + page.paragraph(
        f"{model.repeats_total} checkpoints, {law.levels} levels of {law.writers_min:g} to {law.writers_max:g} writers"
        f"{', ' + model.access if model.access else ''}. The job: {job.writers} writers of "
        f"{size_text(job.bytes_per_writer)} on {job.nodes} nodes.",
        "soft",
    )
    out += '<div class="advice">' + "".join(page.paragraph(line) for line in advice.lines) + "</div>"
    if advice.prediction.abstain:
        out += page.warning(
            "The data do not carry this prediction. Numbers below that use it are guesses.", advice.prediction.reasons
        )
    return out


def _escape(text: str) -> str:
    import html

    return html.escape(text)


def _law(model: FittedModel, job: Job, table: Observations | None) -> str:
    law, b = model.slowest, job.bytes_per_writer
    first = min(law.writers_min, job.writers)
    last = max(law.writers_max * 2, job.writers * 1.2)
    grid = np.geomspace(first, last, 60)
    predictions = [model.predict(float(n), b, load=job.load) for n in grid]
    dots = _dots(model, table, b)
    reach = [p.interval95.low_s for p in predictions] + [p.interval95.high_s for p in predictions]
    x = Axis(*padded([first, last], 0.03), "writers", log=True)
    y = Axis(*padded([*reach, *(t for _, t in dots)], 0.04), f"seconds for {size_text(b)} per writer", log=True)
    chart = Chart(x, y, "Time of a checkpoint against writers")
    if last > law.writers_max:
        chart.box(law.writers_max, x.high, y.low, y.high, "shade", "beyond what was measured")

    def edge(which: str, side: str) -> list[Point]:
        return [(float(n), float(getattr(getattr(p, which), side))) for n, p in zip(grid, predictions, strict=True)]

    chart.band(edge("interval95", "high_s"), edge("interval95", "low_s"), "w95", "95% of checkpoints")
    chart.band(edge("interval80", "high_s"), edge("interval80", "low_s"), "w80", "80%")
    chart.points(dots, "pg", "measured" if table is not None else "measured (level medians)")
    chart.line([(float(n), p.median_s) for n, p in zip(grid, predictions, strict=True)], "la", "predicted median")
    chart.vertical(job.writers, "mark", f"the job: {time_text(model.predict(job.writers, b, load=job.load).median_s)}")
    caption = "Measurements with other sizes are drawn as if the time per byte were the same."
    return page.section("Time against writers", page.figure(chart.render(), caption))


def _dots(model: FittedModel, table: Observations | None, size: float) -> list[Point]:
    if table is None:
        n, b, t = model.levels.writers, model.levels.bytes_per_writer, model.levels.seconds
    else:
        index: Floats = np.arange(len(table))
        if index.size > POINTS_MAX:
            index = np.linspace(0, index.size - 1, POINTS_MAX).astype(int)
        n, b, t = table.writers[index], table.bytes_per_writer[index], table.seconds[index]
    return [(float(x), float(s / y * size)) for x, y, s in zip(n, b, t, strict=True)]


def _distribution(model: FittedModel, table: Observations) -> str:
    logs = np.log(table.seconds / table.bytes_per_writer)
    residual = np.concatenate([logs[g] - np.median(logs[g]) for g in level_groups(table) if g.size >= 3] or [logs[:0]])
    if residual.size < 10:
        return page.section("One checkpoint", page.paragraph("Too few repeats to draw their distribution.", "soft"))
    ratio = np.exp(np.clip(residual, math.log(0.2), math.log(6.0)))
    edges = np.geomspace(min(0.5, float(ratio.min())), max(2.5, float(ratio.max()) * 1.01), 41)
    counts, _ = np.histogram(ratio, edges)
    share = counts / residual.size
    sd = max(model.repeat_sd, 0.005)
    middle = np.sqrt(edges[:-1] * edges[1:])
    width = math.log(edges[1] / edges[0])
    fit = width * np.exp(-0.5 * (np.log(middle) / sd) ** 2) / (sd * math.sqrt(2 * math.pi))
    top = 1.1 * max(float(share.max()), float(fit.max()))
    ticks = tuple((v, f"{v:g}x") for v in (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 5) if edges[0] <= v <= edges[-1])
    chart = Chart(
        Axis(float(edges[0]), float(edges[-1]), "time / median of its level", True, ticks),
        Axis(0.0, top, "share of checkpoints"),
        "Distribution of repeats",
    )
    for i, value in enumerate(share):
        if value > 0:
            chart.box(
                float(edges[i]), float(edges[i + 1]), 0.0, float(value), "bg", "measured" if i == _first(share) else ""
            )
    chart.line([(float(m), float(f)) for m, f in zip(middle, fit, strict=True)], "la", f"fitted body, log sd {sd:.2f}")
    for multiple in (1.5, 2.0):
        if multiple < edges[-1]:
            chart.vertical(multiple, "mark2")
    rows = [
        [
            f"more than {t.multiple:g} times the median",
            f"{t.exceeded} of {t.total}",
            f"{100 * t.probability:.2g}%",
            f"{100 * t.low:.2g}% to {100 * t.high:.2g}%",
        ]
        for t in model.tail
    ]
    return page.section(
        "One checkpoint",
        page.figure(
            chart.render(), "Repeats of one level about its median; the curve is the fitted body, not the tail."
        ),
        page.table(["rare stragglers: counted, not predicted", "seen", "chance", "95% interval"], rows),
    )


def _first(share: Floats) -> int:
    return int(np.flatnonzero(share > 0)[0])


def _held_out(table: Observations) -> str:
    held = {f: h for f in (2, 4) if (h := hold_out(table, float(f))) is not None}
    if not held:
        return page.section(
            "Predicted against observed",
            page.paragraph("Too few levels with 3 repeats to hold some out: nothing can be checked.", "soft"),
        )
    every = [float(v) for h in held.values() for v in (*h.observed_s, *h.predicted_s)]
    low, high = padded(every, 0.15)
    chart = Chart(
        Axis(low, high, "observed median [s]", True),
        Axis(low, high, "predicted [s]", True),
        "Predicted against observed",
    )
    chart.line([(low, low), (high, high)], "ld", "equal")
    for (factor, h), css in zip(held.items(), ("pa", "pb"), strict=False):
        pairs = [(float(o), float(p)) for o, p in zip(h.observed_s, h.predicted_s, strict=True)]
        chart.points(pairs, css, f"fitted up to 1/{factor} of the writers", 4.5)
    rows = [_score(f, h) for f, h in held.items()]
    return page.section(
        "Predicted against observed",
        page.figure(chart.render(), "Fitted on the smaller writer counts only; each dot is a larger one."),
        page.table(["fitted on", "levels held out", "off by", "straight line", "constant bandwidth"], rows),
    )


def _score(factor: int, h: HeldOut) -> list[str]:
    others = [f"{h.mape(h.baselines_s[name]):.1f}%" for name in ("straight line", "constant bandwidth")]
    return [f"N up to 1/{factor}", str(h.writers.size), f"{h.mape():.1f}%", *others]


def _boundaries(job: Job, a: Advice) -> str:
    rows: list[tuple[str, Delay, str]] = []
    for route, b in boundaries_of(job, a.direct, a.partner).items():
        css = "bc" if route == "partner" else "ba"
        rows += [(f"{route}: {name}", delay, css) for name, delay in b.named()]
    ends = [d.quantile_s(q * (1 - d.failed)) for _, d, _ in rows for q in (0.05, 0.95)]
    labels = tuple((float(len(rows) - i), name) for i, (name, _, _) in enumerate(rows))
    low, high = padded(ends, 0.06)
    chart = Chart(
        Axis(low, high, "seconds from capture", True),
        Axis(0.3, len(rows) + 0.7, "", False, labels),
        "When each boundary is reached",
        height=70 + 26 * len(rows),
        left=200,
    )
    seen: set[str] = set()
    for at, (name, delay, css) in zip((float(v) for v, _ in labels), rows, strict=True):
        ok = 1.0 - delay.failed
        q = [delay.quantile_s(p * ok) for p in (0.05, 0.50, 0.95)]
        chart.box(q[0], q[2], at - 0.12, at + 0.12, "bg")
        route = name.split(":")[0]
        chart.box(low, q[1], at - 0.3, at + 0.3, css, "" if route in seen else f"{route} route, median")
        seen.add(route)
    table = [
        [name, time_text(d.quantile_s(0.5 * (1 - d.failed))), time_text(d.quantile_s(0.95 * (1 - d.failed)))]
        for name, d, _ in rows
    ]
    note = f"Grey: 5% to 95%. Assumed: copy into memory at {SNAPSHOT_RATE / 1e9:g} GB/s per writer, commit file 0.2 s, "
    note += "the drain as long as a direct write."
    return page.section(
        "Boundaries of one checkpoint",
        page.figure(chart.render(), note),
        page.table(["boundary", "median", "95%"], table),
    )


def _exposure(job: Job, a: Advice) -> str:
    period = a.interval_s + a.stall_s
    routes = boundaries_of(job, a.direct, a.partner)
    levels = [
        ("partner copy", routes["partner"].restartable_partner, "lc"),
        ("PFS, partner route", routes["partner"].restartable_pfs, "la"),
        ("PFS, direct route", routes["direct"].restartable_pfs, "lb"),
    ]
    known = [(name, d, css) for name, d, css in levels if d is not None]
    span = 4.0 * period
    top = max(period + d.median_s for _, d, _ in known) * 1.1
    chart = Chart(
        Axis(0.0, span / 60.0, "minutes of the job"),
        Axis(0.0, top / 60.0, "minutes of training at risk"),
        "Exposure over time",
    )
    rows = []
    for name, d, css in known:
        chart.line([(t / 60.0, age / 60.0) for t, age in _sawtooth(period, d.median_s, span)], css, name)
        e = exposure(period, d)
        row = [name, time_text(e.mean_s), time_text(e.p95_s)]
        row.append(f"{e.steps(job.step_s):.0f}" if job.step_s else "")
        row.append(count_text(e.gpu_hours(job.gpus)) if job.gpus else "")
        rows.append(row)
    head = ["lost if a failure needs", "mean", "95%", "steps" if job.step_s else "", "GPU-hours" if job.gpus else ""]
    return page.section(
        "Training at risk",
        page.figure(chart.render(), "Age of the newest restartable checkpoint, with every delay at its median."),
        page.table(head, rows),
        page.paragraph(
            "Mean and 95% use the whole distribution of delays; --gpus and --step-time add columns.", "soft"
        ),
    )


def _sawtooth(period: float, delay: float, span: float) -> list[Point]:
    """(time, age) in steady state: at each completion the age falls to the delay."""
    points: list[Point] = []
    first = math.floor(-delay / period) - 1
    newest = first * period
    for k in range(first + 1, int(span / period) + 2):
        done = k * period + delay
        if done > span:
            break
        if done >= 0.0:
            if not points:
                points.append((0.0, -newest))
            points += [(done, done - newest), (done, done - k * period)]
        newest = k * period
    if not points:
        points.append((0.0, -newest))
    points.append((span, span - newest))
    return points


def _interval(job: Job, a: Advice) -> str:
    rate = job.failures_per_s
    on_partner = a.decision.use == "partner"
    durable = a.partner if on_partner else a.direct
    grid = np.geomspace(a.interval.exact_s / 20.0, a.interval.exact_s * 20.0, 80)
    losses = [waste(float(t), a.stall_s, rate, durable, a.pfs, a.kappa, job.recovery_s) for t in grid]
    top = min(1.0, 3.5 * a.waste.exact + 0.01)
    chart = Chart(
        Axis(float(grid[0]) / 60, float(grid[-1]) / 60, "minutes of training between saves", log=True),
        Axis(0.0, 100 * top, "% of time wasted"),
        "Waste against interval",
    )
    chart.line([(float(t) / 60, 100 * w.exact) for t, w in zip(grid, losses, strict=True)], "la", "all waste")
    chart.line(
        [(float(t) / 60, 100 * w.checkpointing) for t, w in zip(grid, losses, strict=True)], "ld", "stalls alone"
    )
    chart.vertical(a.interval_s / 60, "mark", f"{time_text(a.interval_s)}: {100 * a.waste.exact:.2g}%")
    rows = [
        [n, time_text(v)]
        for n, v in (
            ("Young 1974", a.interval.young_s),
            ("Daly 2006", a.interval.daly_s),
            ("exact optimum", a.interval.exact_s),
            ("not shorter than (durable, drained)", a.interval.floor_s),
            ("chosen", a.interval_s),
        )
    ]
    return page.section(
        "Interval",
        page.figure(
            chart.render(),
            f"{job.nodes} nodes, one failure every {time_text(1 / rate)} "
            f"(node MTBF {time_text(job.node_mtbf_s)}), {time_text(a.stall_s)} of stall per save.",
        ),
        page.table(["interval", "training between saves"], rows),
    )


def _route(model: FittedModel, job: Job, a: Advice, partner: FittedModel | None) -> str:
    decisions = route_against_load(model, job, partner)
    chart = Chart(
        Axis(0.0, 0.9, "load of others on the PFS"),
        Axis(0.0, 1.0, "chance: partner cheaper"),
        "Route against load",
        height=260,
    )
    chart.box(0.0, 0.9, 0.2, 0.8, "shade", "too close to call")
    chart.line([(i / 10, d.p_partner) for i, d in enumerate(decisions)], "lc", "partner route cheaper")
    chart.vertical(job.load, "mark", "now")
    d = a.decision
    rows = [
        ["direct", time_text(a.direct.mean_s()), time_text(d.cost_direct_s)],
        ["partner, then drain", time_text(a.partner.mean_s()), time_text(d.cost_partner_s)],
    ]
    reasons = page.warning("No decision", d.reasons) if d.reasons else ""
    return page.section(
        "Route",
        page.figure(chart.render(), f"kappa = {job.kappa:g}: share of failures that the partner copy does not cover."),
        page.table(["route", "mean time to its boundary", "training lost per checkpoint"], rows),
        reasons,
    )


def _limits(model: FittedModel) -> str:
    law = model.slowest
    lines = [
        "Rare extreme stragglers are not predicted; the table above counts them.",
        f"Levels lie {100 * law.noise_sd:.0f}% off the law, repeats differ by {100 * model.repeat_sd:.0f}%.",
        "Intervals are calibrated on other systems; on a system unlike those they may be too narrow.",
        "The partner copy does not survive every failure: kappa says what share it does not cover.",
    ]
    if law.p_unsaturated < 0.5:
        lines.append(f"The filesystem saturates near {law.bandwidth() / GIB:.3g} GiB/s.")
    else:
        lines.append(f"The filesystem was not saturated at {law.writers_max:g} writers.")
    items = "".join(f"<li>{_escape(t)}</li>" for t in [*lines, *model.notes])
    return page.section("What this does not say", f"<ul>{items}</ul>")
