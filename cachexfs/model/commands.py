"""The model's commands: probe, fit, predict; the others are in ``commands_risk``.

Role: ``register`` adds all seven to a click group; ``cachexfs.cli.main`` calls it. numpy and scipy are imported
inside the commands, so that ``cachexfs status`` does not pay for them. Results go to stdout, errors are raised
as CacheXError and printed by the caller as one line.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

import click

from cachexfs.errors import EXIT_CANNOT_TELL, CannotTellError, UsageError
from cachexfs.model.units import Duration, Size, size_text, time_text

if TYPE_CHECKING:
    from cachexfs.model.fitted import FittedModel, Prediction, Recent
    from cachexfs.model.probe import Plan, Result

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def register(group: click.Group) -> None:
    """Add the subcommands probe, fit, predict, advise, exposure, simulate and report to ``group``."""
    from cachexfs.model import commands_risk

    for command in (probe, fit, predict, *commands_risk.COMMANDS):
        group.add_command(command)


def need_numpy() -> None:
    """UsageError with the remedy when numpy or scipy is not installed."""
    missing = [name for name in ("numpy", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} not installed: {sys.executable} -m pip install {' '.join(missing)}")


def print_json(value: object) -> None:
    """One JSON object on one line; what is not finite becomes null."""
    click.echo(json.dumps(finite(value), allow_nan=False))


def finite(value: object) -> object:
    """``value`` with dataclasses as objects and infinities and NaN as None."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [finite(v) for v in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: finite(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def leave(code: int) -> NoReturn:
    """End the command with an exit code."""
    click.get_current_context().exit(code)


def cannot_tell(reasons: tuple[str, ...]) -> NoReturn:
    """The abstention: all reasons on one line, exit code 4."""
    raise CannotTellError("cannot tell: " + "; ".join(reasons))


def counts_of(text: str) -> tuple[int, ...]:
    """Writer counts of ``1,2,4``; UsageError if they are none."""
    try:
        counts = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise UsageError(f"--writers {text!r} is no list of counts; write for example 1,2,4,8")
    return tuple(counts)


def default_counts(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to ``limit``, at least four levels."""
    counts = [1]
    while counts[-1] * 2 <= limit or len(counts) < 4:
        counts.append(counts[-1] * 2)
    return tuple(counts)


@click.command()
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--writers", help="Writer counts, as 1,2,4,8. Default: powers of two to twice the CPUs, or to the ranks.")
@click.option("--size", type=Size(), default="32M", show_default=True, help="Bytes per writer.")
@click.option("--repeats", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option("--time", "seconds", type=Duration(), default="120s", show_default=True, help="Time budget.")
@click.option("--max-bytes", type=Size(), default="8G", show_default=True, help="Budget of bytes written.")
@click.option("--shared", is_flag=True, help="All writers into one file.")
@click.option("--system", default="", help="Name of the filesystem, kept in the result.")
@click.option("-o", "--output", default="probe.json", show_default=True, type=click.Path(dir_okay=False))
@JSON
def probe(
    directory: str,
    writers: str | None,
    size: float,
    repeats: int,
    seconds: float,
    max_bytes: float,
    shared: bool,
    system: str,
    output: str,
    as_json: bool,
) -> None:
    """Measure DIRECTORY: real concurrent fsynced writes with several writer counts, in random order.

    Under srun the ranks write; else processes of this machine. Files are removed.
    """
    from cachexfs.model.probe import Plan
    from cachexfs.model.probe_ranks import Leader, follow, ranks_of

    ranks = ranks_of(os.environ)
    if not os.path.isdir(directory):
        raise UsageError(f"{directory} is not a directory; give one on the filesystem to measure")
    if ranks is not None and ranks.rank > 0:
        follow(directory, ranks)
        return
    limit = ranks.count if ranks is not None else min(2 * (os.cpu_count() or 1), 64)
    counts = counts_of(writers) if writers else default_counts(limit)
    if ranks is not None:
        counts = tuple(c for c in counts if c <= ranks.count) or (ranks.count,)
    plan = Plan(counts, int(size), repeats, seconds, int(max_bytes), shared)
    plan.check(directory)
    signal.signal(signal.SIGTERM, _interrupted)
    if ranks is not None:
        with Leader(directory, ranks) as leader:
            result = _run(directory, plan, leader, as_json)
    else:
        from cachexfs.model.probe import Pool

        with Pool(max(counts), int(size)) as pool:
            result = _run(directory, plan, pool, as_json)
    _finish_probe(result, plan, system, output, as_json)


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _run(directory: str, plan: Plan, writers: object, quiet: bool) -> Result:
    from cachexfs.model.probe import run_probe

    if quiet or not sys.stderr.isatty():
        return run_probe(directory, plan, writers)  # type: ignore[arg-type]
    with click.progressbar(length=1000, label="probing", file=sys.stderr) as bar:
        return run_probe(directory, plan, writers, lambda share: bar.update(int(1000 * share) - bar.pos))  # type: ignore[arg-type]


def _finish_probe(result: Result, plan: Plan, system: str, output: str, as_json: bool) -> None:
    import statistics

    levels = []
    for count in plan.counts:
        runs = [r for r in result.runs if r.writers == count]
        if runs:
            slowest = statistics.median(r.seconds for r in runs)
            typical = statistics.median(r.typical_s for r in runs)
            rate = count * plan.bytes_per_writer / slowest
            levels.append(
                {"writers": count, "runs": len(runs), "slowest_s": slowest, "typical_s": typical, "bytes_per_s": rate}
            )
    if result.runs:
        try:
            with open(output, "w", encoding="utf-8") as stream:
                json.dump(result.to_json(system), stream)
                stream.write("\n")
        except OSError as error:
            raise UsageError(f"cannot write {output}: {error.strerror}; choose another file with --output") from error
    if as_json:
        print_json({"output": output, "levels": levels, "notes": result.notes, "trouble": result.trouble})
    else:
        for row in levels:
            click.echo(
                f"{row['writers']:6} writers: slowest {time_text(float(row['slowest_s'])):>9}, typical "
                f"{time_text(float(row['typical_s'])):>9}, {size_text(float(row['bytes_per_s']))}/s "
                f"({row['runs']} runs)"
            )
        for note in result.notes:
            click.echo(f"note: {note}")
    if result.trouble:
        kept = f"; {len(result.runs)} runs before it are in {output}" if result.runs else ""
        raise CannotTellError(f"the probe stopped early: {result.trouble}{kept}")
    if not as_json:
        click.echo(f"{len(result.runs)} runs in {output}; next: cachexfs fit {output}")


def where_of(pairs: tuple[str, ...]) -> dict[str, str]:
    """COLUMN=VALUE pairs; UsageError if one is not."""
    out: dict[str, str] = {}
    for pair in pairs:
        column, found, value = pair.partition("=")
        if not found or not column:
            raise UsageError(f"--where {pair!r}: write COLUMN=VALUE")
        out[column.strip().lower()] = value
    return out


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False))
@click.option("--where", multiple=True, metavar="COLUMN=VALUE", help="Keep CSV rows with this value (VALUE* : prefix).")
@click.option("--access", type=click.Choice(["file-per-process", "shared-file"]), help="Keep rows of this kind.")
@click.option("--route", type=click.Choice(["partner", "direct"]), help="Of boundary records.")
@click.option("--boundary", default="pfs", type=click.Choice(["returned", "partner", "pfs", "restartable"]))
@click.option("--bandwidth", type=Size(), help="The filesystem's stated aggregate bandwidth per second, as 12G.")
@click.option("-o", "--output", default="model.json", show_default=True, type=click.Path(dir_okay=False))
@JSON
def fit(
    files: tuple[str, ...],
    where: tuple[str, ...],
    access: str | None,
    route: str | None,
    boundary: str,
    bandwidth: float | None,
    output: str,
    as_json: bool,
) -> None:
    """Fit a model to FILES: probe results, boundary records of the mount, CSV, IOR output (gzip too)."""
    need_numpy()
    from cachexfs.model.evaluate import hold_out
    from cachexfs.model.fitted import fit as fit_model
    from cachexfs.model.readers import read_observations
    from cachexfs.model.store import save_model

    table = read_observations(files, where=where_of(where), access=access, route=route, boundary=boundary)
    model = fit_model(table, bandwidth)
    try:
        save_model(model, output)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}; choose another file with --output") from error
    held = hold_out(table, 2.0)
    summary = summary_of(model)
    if held is not None:
        summary["held_out_levels"] = int(held.writers.size)
        summary["held_out_mape_percent"] = held.mape()
        summary["held_out_straight_line_percent"] = held.mape(held.baselines_s["straight line"])
    if as_json:
        print_json({"output": output, **summary})
    else:
        for line in _fit_lines(model, summary):
            click.echo(line)
        click.echo(f"model in {output}")
    if model.fit_reasons:
        cannot_tell(model.fit_reasons)


def summary_of(model: FittedModel) -> dict[str, object]:
    """What the fit found, in SI units."""
    law = model.slowest
    middle = float(law.bytes_min * law.bytes_max) ** 0.5
    return {
        "system": model.system,
        "access": model.access,
        "rows": model.repeats_total,
        "levels": [int(n) for n in model.levels.writers],
        "smallest_level_bytes_per_s_per_writer": middle / law.median(law.writers_min, middle),
        "saturated_bytes_per_s": law.bandwidth() if law.p_unsaturated < 0.5 and law.levels > 2 else None,
        "end_slope": law.end_slope,
        "repeat_log_sd": model.repeat_sd,
        "misfit_log_sd": law.noise_sd,
        "failed_share": model.failed,
        "tail": model.tail,
        "spread": model.spread,
        "recent": model.recent,
        "notes": model.notes,
        "abstains": model.fit_reasons,
    }


def _fit_lines(model: FittedModel, summary: dict[str, object]) -> list[str]:
    law = model.slowest
    saturated = summary["saturated_bytes_per_s"]
    least, most = size_text(law.bytes_min), size_text(law.bytes_max)
    sizes = least if least == most else f"{least} to {most}"
    alone = f"{size_text(float(str(summary['smallest_level_bytes_per_s_per_writer'])))}/s"
    together = f"not saturated at {law.writers_max:g} writers"
    if saturated is not None:
        together = f"together {size_text(float(str(saturated)))}/s"
    elif law.levels < 3:
        together = "too few writer counts to say where it saturates"
    labels = "".join(f", {x}" for x in (model.access, model.system) if x)
    counts = f"{law.levels} levels of {law.writers_min:g} to {law.writers_max:g} writers"
    if law.levels == 1:
        counts = f"1 level of {law.writers_max:g} writers"
    lines = [
        f"{model.repeats_total} checkpoints, {counts}, {sizes} each{labels}",
        f"each of {law.writers_min:g} writers: {alone}; {together}",
        f"repeats differ by {100 * model.repeat_sd:.0f}%, levels from the law by {100 * law.noise_sd:.0f}%",
    ]
    if "held_out_mape_percent" in summary:
        lines.append(
            f"check: fitted on up to half of the writers, {summary['held_out_levels']} larger counts are off by "
            f"{float(str(summary['held_out_mape_percent'])):.1f}% "
            f"(a straight line: {float(str(summary['held_out_straight_line_percent'])):.1f}%)"
        )
    twice = next(t for t in model.tail if t.multiple == 2.0)
    lines.append(
        f"stragglers: {twice.exceeded} of {twice.total} checkpoints took more than twice their level's median "
        f"(95% interval of the chance: {100 * twice.low:.2g}% to {100 * twice.high:.2g}%); not predicted, counted"
    )
    regimes = model.spread.regimes
    if len(regimes) > 1:
        slower = math.exp(regimes[-1].mean - regimes[0].mean)
        lines.append(
            f"two states: {100 * regimes[-1].share:.0f}% of checkpoints belong to one in which they take "
            f"{slower:.2g} times as long"
        )
    if model.recent is not None:
        lines.append(recent_line(model.recent))
    return lines + [f"note: {note}" for note in model.notes]


def recent_line(recent: Recent) -> str:
    """The state at the end of the data, in words."""
    moved = "; the level has just changed, so this lags" if recent.changed else ""
    return (
        f"lately: the next checkpoint takes {recent.ratio:.2f} times the law's median (80%: {recent.low:.2f} to "
        f"{recent.high:.2f}), after {recent.observed} dated checkpoints{moved}"
    )


@click.command()
@click.argument("model_file", metavar="MODEL", type=click.Path(dir_okay=False))
@click.option("--writers", type=click.IntRange(1, 10**8), required=True)
@click.option("--size", type=Size(), required=True, help="Bytes per writer.")
@click.option("--others", type=Size(zero=True), default="0", help="Bytes that other jobs write meanwhile.")
@click.option("--load", type=click.FloatRange(0.0, 1.0, max_open=True), default=0.0, help="Others' share of the PFS.")
@click.option("--partner", type=click.Path(dir_okay=False), help="Model of copies to the partner: adds the boundaries.")
@click.option("--partner-rate", type=Size(), help="Instead: bytes per second and writer to the partner.")
@click.option("--anyway", is_flag=True, help="Print the numbers even when the data do not carry them.")
@JSON
def predict(
    model_file: str,
    writers: int,
    size: float,
    others: float,
    load: float,
    partner: str | None,
    partner_rate: float | None,
    anyway: bool,
    as_json: bool,
) -> None:
    """How long a checkpoint takes: slowest and typical writer, 80% and 95% intervals.

    With --partner or --partner-rate also every boundary on both routes. Exit 4 with the reason when the data do
    not carry an answer.
    """
    need_numpy()
    from cachexfs.model.store import load_model

    model = load_model(model_file)
    p = model.predict(writers, size, others, load)
    show = anyway or not p.abstain
    boundaries: dict[str, dict[str, dict[str, float]]] = {}
    if show and (partner is not None or partner_rate is not None):
        boundaries = _boundary_times(model, p, load_model(partner) if partner else None, partner_rate)
    if as_json:
        print_json({**prediction_json(p, anyway), "boundaries": boundaries, "recent": model.recent})
    elif show:
        for line in prediction_lines(p):
            click.echo(line)
        if model.recent is not None:
            click.echo(recent_line(model.recent))
        for route, times in boundaries.items():
            told = [f"{name} {time_text(t['median_s'])} (95%: {time_text(t['p95_s'])})" for name, t in times.items()]
            click.echo(f"{route} route: {', '.join(told)}")
    if p.abstain:
        if as_json or anyway:
            leave(EXIT_CANNOT_TELL)
        cannot_tell(p.reasons)


def _boundary_times(
    model: FittedModel, p: Prediction, partner: FittedModel | None, rate: float | None
) -> dict[str, dict[str, dict[str, float]]]:
    """Median and 95% of every boundary by route [s]; abstains when the partner's model does not carry the size."""
    from cachexfs.model.advice import Job, boundaries_of, partner_delay

    job = Job(int(p.writers), p.bytes_per_writer, nodes=1, partner_rate=rate)
    copy, reasons = partner_delay(job, partner)
    if reasons:
        cannot_tell(tuple(f"partner: {r}" for r in reasons))
    return {
        route: {
            name: {"median_s": d.quantile_s(0.5 * (1 - d.failed)), "p95_s": d.quantile_s(0.95 * (1 - d.failed))}
            for name, d in b.named()
        }
        for route, b in boundaries_of(job, p.delay(model.failed), copy).items()
    }


def prediction_json(p: Prediction, anyway: bool = False) -> dict[str, object]:
    """The prediction as JSON values; numbers are null when it abstains, unless ``anyway``."""
    show = anyway or not p.abstain
    return {
        "answer": "abstain" if p.abstain else "ok",
        "reasons": p.reasons,
        "writers": p.writers,
        "bytes_per_writer": p.bytes_per_writer,
        "slowest_median_s": p.median_s if show else None,
        "typical_median_s": p.typical_s if show else None,
        "interval80_s": [p.interval80.low_s, p.interval80.high_s] if show else None,
        "interval95_s": [p.interval95.low_s, p.interval95.high_s] if show else None,
        "log_sd": p.log_sd if show else None,
        "tail": p.tail,
        "saying": "rare extreme stragglers are not predicted; tail holds counts",
    }


def prediction_lines(p: Prediction) -> list[str]:
    """The prediction for people."""
    a, b = p.interval80, p.interval95
    lines = [
        f"checkpoint (slowest of {p.writers:g} writers, {size_text(p.bytes_per_writer)} each): {time_text(p.median_s)}",
        f"80% interval {time_text(a.low_s)} to {time_text(a.high_s)}, "
        f"95% {time_text(b.low_s)} to {time_text(b.high_s)}",
    ]
    if p.typical_s is not None:
        lines.append(f"typical writer: {time_text(p.typical_s)}")
    counts = ", ".join(f">{t.multiple:g}x {t.exceeded} of {t.total}" for t in p.tail)
    lines.append(f"rare extreme stragglers are not predicted; counted in the data: {counts}")
    return lines + [f"doubt: {reason}" for reason in p.reasons]
