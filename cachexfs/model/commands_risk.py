"""The model's commands on risk: advise, exposure, simulate, report.

Role: see ``commands``, which registers them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cachexfs.errors import EXIT_CANNOT_TELL, UsageError
from cachexfs.model.units import Duration, Size, time_text

if TYPE_CHECKING:
    from cachexfs.model.advice import Job
    from cachexfs.model.delays import Delay

SHARE = click.FloatRange(0.0, 1.0)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def _option(
    name: str, kind: click.ParamType[Any], text: str, default: object = None, required: bool = False
) -> click.Option:
    return click.Option(
        [name], type=kind, help=text, default=default, required=required, show_default=default is not None
    )


def _job_options(command: click.Command) -> click.Command:
    """Options that describe the job, shared by advise and report."""
    share, span = click.FloatRange(0.0, 1.0), Duration(zero=True)
    options = (
        _option("--writers", click.IntRange(1, 10**8), "Ranks that write a shard.", required=True),
        _option("--size", Size(), "Bytes per writer.", required=True),
        _option("--nodes", click.IntRange(1, 10**7), "Nodes of the job.", required=True),
        _option("--mtbf", Duration(), "Mean time between failures of one node.", default="5y"),
        _option("--partner", click.Path(dir_okay=False), "Model of copies to the partner."),
        _option("--partner-rate", Size(), "Bytes per second and writer to the partner, as 2G."),
        _option("--stall", span, "Training stands still per save, partner route. Default: copying at 2.5 GB/s."),
        _option("--stall-direct", span, "The same on the direct route. Default: the whole write."),
        _option("--kappa", share, "Share of failures that the partner copy does not cover.", default=0.1),
        _option("--recovery", span, "From failure to training again.", default="600s"),
        _option("--interval", Duration(), "Training time between saves. Default: the best."),
        _option("--load", click.FloatRange(0.0, 1.0, max_open=True), "Others' share of the PFS.", default=0.0),
        _option("--gpus", click.IntRange(0), "GPUs of the job, for GPU-hours.", default=0),
        _option("--step-time", span, "Time of a training step.", default="0"),
    )
    command.params[1:1] = list(options)
    return command


def _job(values: dict[str, object]) -> Job:
    from cachexfs.model.advice import Job

    def number(name: str) -> float:
        return float(str(values[name]))

    def maybe(name: str) -> float | None:
        return None if values[name] is None else number(name)

    return Job(
        writers=int(number("writers")),
        bytes_per_writer=number("size"),
        nodes=int(number("nodes")),
        node_mtbf_s=number("mtbf"),
        partner_rate=maybe("partner_rate"),
        stall_partner_s=maybe("stall"),
        stall_direct_s=maybe("stall_direct"),
        kappa=number("kappa"),
        recovery_s=number("recovery"),
        interval_s=maybe("interval"),
        gpus=int(number("gpus")),
        step_s=number("step_time"),
        load=number("load"),
    )


@click.command()
@click.argument("model_file", metavar="MODEL", type=click.Path(dir_okay=False))
@JSON
def advise(model_file: str, as_json: bool, **values: object) -> None:
    """Route, interval and why, in three lines. MODEL is a fit of writes to the PFS.

    Exit 4 when the route cannot be told (the interval still holds for the default route).
    """
    from cachexfs.model import commands

    commands.need_numpy()
    from cachexfs.model.advice import advise as compose
    from cachexfs.model.route import ABSTAIN
    from cachexfs.model.store import load_model

    partner = values["partner"]
    job = _job(values)
    a = compose(load_model(model_file), job, load_model(str(partner)) if partner else None)
    if as_json:
        commands.print_json(
            {
                "route": a.decision.route,
                "use": a.decision.use,
                "p_partner": a.decision.p_partner,
                "cost_direct_s": a.decision.cost_direct_s,
                "cost_partner_s": a.decision.cost_partner_s,
                "reasons": a.decision.reasons,
                "interval_s": a.interval_s,
                "interval": a.interval,
                "waste": a.waste,
                "exposure": a.exposure,
                "rollback_s": a.rollback_s,
                "exposure_steps": a.exposure.steps(job.step_s) if job.step_s else None,
                "exposure_gpu_hours": a.exposure.gpu_hours(job.gpus) if job.gpus else None,
                "failures_per_s": job.failures_per_s,
                "kappa": job.kappa,
                "stall_s": a.stall_s,
                "prediction": commands.prediction_json(a.prediction),
                "lines": a.lines,
            }
        )
    else:
        for line in a.lines:
            click.echo(line)
    if a.decision.route == ABSTAIN:
        commands.leave(EXIT_CANNOT_TELL)


@click.command()
@click.option("--interval", type=Duration(), required=True, help="From capture to capture.")
@click.option("--model", "model_file", type=click.Path(dir_okay=False), help="A fit; then give --writers and --size.")
@click.option("--writers", type=click.IntRange(1, 10**8))
@click.option("--size", type=Size(), help="Bytes per writer.")
@click.option("--durable", type=Duration(zero=True), help="Median from capture to the boundary, instead of a model.")
@click.option("--spread", type=click.FloatRange(0.0, 3.0), default=0.3, show_default=True, help="Its log sd.")
@click.option(
    "--failed", type=click.FloatRange(0.0, 1.0, max_open=True), default=0.0, help="Share of saves that never get there."
)
@click.option("--step-time", type=Duration(zero=True), default="0", help="Seconds per training step.")
@click.option("--gpus", type=click.IntRange(0), default=0)
@JSON
def exposure(
    interval: float,
    model_file: str | None,
    writers: int | None,
    size: float | None,
    durable: float | None,
    spread: float,
    failed: float,
    step_time: float,
    gpus: int,
    as_json: bool,
) -> None:
    """How much training stands at risk: seconds, steps, GPU-hours."""
    from cachexfs.model import commands

    commands.need_numpy()
    from cachexfs.model.delays import Delay
    from cachexfs.model.risk import exposure as compute
    from cachexfs.model.store import load_model

    if (model_file is None) == (durable is None):
        raise UsageError("give either --model with --writers and --size, or --durable")
    if model_file is not None:
        if writers is None or size is None:
            raise UsageError("--model needs --writers and --size")
        model = load_model(model_file)
        p = model.predict(writers, size)
        if p.abstain:
            commands.cannot_tell(p.reasons)
        delay = p.delay(max(failed, model.failed))
    else:
        delay = Delay(float(durable or 0.0), spread, failed)
    e = compute(interval, delay)
    steps, hours = (e.steps(step_time) if step_time else None), (e.gpu_hours(gpus) if gpus else None)
    p95_hours = e.p95_s * gpus / 3600 if gpus else None
    if as_json:
        commands.print_json(
            {
                **{k: getattr(e, k) for k in e.__dataclass_fields__},
                "mean_steps": steps,
                "mean_gpu_hours": hours,
                "p95_gpu_hours": p95_hours,
                "share_of_interval": e.mean_s / interval,
            }
        )
        return
    click.echo(f"at risk on average {time_text(e.mean_s)}, 95% of the time below {time_text(e.p95_s)}")
    if steps is not None:
        click.echo(f"in steps of {time_text(step_time)}: {steps:.0f} on average, {e.p95_s / step_time:.0f}")
    if hours is not None:
        click.echo(f"in GPU-hours on {gpus} GPUs: {hours:.3g} on average, {p95_hours:.3g}")
    click.echo(f"of which stragglers add {time_text(e.stragglers_s)}; first-order formula {time_text(e.first_order_s)}")


def _delay(text: str) -> Delay:
    """MEDIAN[:LOG_SD[:FAILED]] as a delay."""
    from cachexfs.model.delays import Delay

    parts = text.split(":")
    try:
        median = float(Duration(zero=True).convert(parts[0], None, None))
        rest = [float(p) for p in parts[1:]]
    except (ValueError, click.BadParameter) as error:
        raise UsageError(f"{text!r} is no delay; write MEDIAN:LOG_SD:FAILED, as 60s:0.3:0.01") from error
    if len(rest) > 2:
        raise UsageError(f"{text!r} has too many parts; write MEDIAN:LOG_SD:FAILED")
    return Delay(median, rest[0] if rest else 0.0, rest[1] if len(rest) > 1 else 0.0)


@click.command()
@click.option("--nodes", type=click.IntRange(1, 10**7), required=True)
@click.option(
    "--mtbf", type=Duration(), default="5y", show_default=True, help="Mean time between failures of one node."
)
@click.option("--days", type=click.FloatRange(0.0, 36500.0, min_open=True), default=30.0, show_default=True)
@click.option("--interval", type=Duration(), required=True, help="Training time between saves.")
@click.option("--policy", type=click.Choice(["direct", "partner", "auto", "all"]), default="all", show_default=True)
@click.option("--direct", default="60s:0.3", show_default=True, metavar="MEDIAN:LOG_SD:FAILED")
@click.option("--partner", default="10s:0.1", show_default=True, metavar="MEDIAN:LOG_SD:FAILED")
@click.option("--drain", default="60s:0.3", show_default=True, metavar="MEDIAN:LOG_SD:FAILED")
@click.option("--stall", type=Duration(zero=True), default="2s", show_default=True)
@click.option("--stall-direct", type=Duration(zero=True), help="Default: the median of --direct.")
@click.option("--recovery", type=Duration(zero=True), default="600s", show_default=True)
@click.option(
    "--state", "states", multiple=True, metavar="FACTOR:DWELL", help="PFS state, as 3:2h; repeat. Default: one."
)
@click.option(
    "--shared-share",
    type=click.FloatRange(0.0, 1.0),
    default=0.05,
    show_default=True,
    help="Failures of node and partner.",
)
@click.option(
    "--system-share", type=click.FloatRange(0.0, 1.0), default=0.02, show_default=True, help="Failures of all nodes."
)
@click.option("--replicas", type=click.IntRange(1, 10_000), default=10, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@JSON
def simulate(**values: object) -> None:
    """Monte Carlo of a job: nodes, failures, PFS states, route policies."""
    from cachexfs.model import commands

    commands.need_numpy()
    from cachexfs.model.simulation import PfsState, Scenario
    from cachexfs.model.simulation import simulate as run

    number = {k: float(v) for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    states = []
    for text in values["states"] if isinstance(values["states"], tuple) else ():
        factor, _, dwell = str(text).partition(":")
        try:
            states.append(PfsState(float(factor), float(Duration().convert(dwell, None, None))))
        except (ValueError, click.BadParameter) as error:
            raise UsageError(f"--state {text!r}: write FACTOR:DWELL, as 3:2h") from error
    direct = _delay(str(values["direct"]))
    rows = []
    policy = str(values["policy"])
    for name in ("direct", "partner", "auto") if policy == "all" else (policy,):
        scenario = Scenario(
            nodes=int(number["nodes"]),
            node_mtbf_s=number["mtbf"],
            duration_s=number["days"] * 86400.0,
            interval_s=number["interval"],
            direct=direct,
            partner=_delay(str(values["partner"])),
            drain=_delay(str(values["drain"])),
            policy=name,
            stall_direct_s=number.get("stall_direct", direct.median_s),
            stall_partner_s=number["stall"],
            recovery_s=number["recovery"],
            shared_share=number["shared_share"],
            system_share=number["system_share"],
            states=tuple(states) or (PfsState(1.0, 1e30),),
        )
        rows.append((name, run(scenario, int(number["replicas"]), int(number["seed"]))))
    if values["as_json"]:
        commands.print_json({"policies": {name: r for name, r in rows}})
        return
    for name, r in rows:
        margin = f" +- {100 * r.waste_error:.2g}" if r.replicas > 1 else ""
        click.echo(
            f"{name:8} waste {100 * r.waste:.3g}%{margin}; {r.failures} failures, lost {time_text(r.lost_s)} each "
            f"(95%: {time_text(r.lost_p95_s)}); restarts from partner {r.from_partner}, PFS {r.from_pfs}, "
            f"start {r.from_start}; {100 * r.direct_share:.0f}% of saves direct"
        )


@click.command()
@click.argument("model_file", metavar="MODEL", type=click.Path(dir_okay=False))
@click.option(
    "--data", "files", multiple=True, type=click.Path(dir_okay=False), help="Measurements behind MODEL; repeat."
)
@click.option("--where", multiple=True, metavar="COLUMN=VALUE", help="As for fit.")
@click.option("-o", "--output", default="report.html", show_default=True, type=click.Path(dir_okay=False))
@JSON
def report(
    model_file: str, files: tuple[str, ...], where: tuple[str, ...], output: str, as_json: bool, **values: object
) -> None:
    """One self-contained HTML page: law and data, held-out check, boundaries, exposure, decision."""
    from cachexfs.model import commands

    commands.need_numpy()
    from cachexfs.model.readers import read_observations
    from cachexfs.model.report import render
    from cachexfs.model.store import load_model

    model = load_model(model_file)
    table = None
    if files:
        access = model.access or None
        table = read_observations(files, where=commands.where_of(where), access=access)
    partner = values["partner"]
    page = render(model, _job(values), table, load_model(str(partner)) if partner else None)
    try:
        with open(output, "w", encoding="utf-8") as stream:
            stream.write(page)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}; choose another file with --output") from error
    if as_json:
        commands.print_json({"output": output, "bytes": len(page.encode())})
    else:
        click.echo(f"report in {output}")


COMMANDS: tuple[click.Command, ...] = (_job_options(advise), exposure, simulate, _job_options(report))
