"""``cachexfs metrics``: what ``status`` knows, in Prometheus' text format.

Role: a view of ``status`` for machines that watch many nodes. Nothing listens on a port: node_exporter's textfile
collector reads the file that this replaces. Sizes in bytes, times in seconds (timestamps since the epoch).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime

import click
from prometheus_client import CollectorRegistry, generate_latest, write_to_textfile
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cachexfs.cli.output import shown, write
from cachexfs.cli.protocol import Checkpoint, Status
from cachexfs.cli.status import Report, collect, problems
from cachexfs.errors import EXIT_DONE, CannotTellError

BOUNDARIES = ("returned", "partner", "pfs")
MOUNT = ("mountpoint", "node", "job")
UNREACHABLE = ("unreachable", "hung")

#: One value for each mount that answers: (name, help, value).
GAUGES: tuple[tuple[str, str, Callable[[Status], float]], ...] = (
    ("uptime_seconds", "Since the daemon was started.", lambda s: s.uptime_s),
    ("daemons", "Daemons that this mount has had so far; more than one after a crash, restart or upgrade.",
     lambda s: s.daemons),
    ("problems", "Errors and lost protection, as listed by cachexfs status.", lambda s: len(problems(s))),
    ("protected", "Whether a live partner takes replicas, or the mount is of one node.", lambda s: s.protected),
    ("pfs_reachable", "Whether the parallel filesystem answers.", lambda s: s.pfs_state not in UNREACHABLE),
    ("pfs_away_seconds", "How long it has not answered.", lambda s: s.pfs_away_s),
    ("staging_used_bytes", "Node memory taken by staged files.", lambda s: s.staging_used),
    ("staging_limit_bytes", "The option memory.", lambda s: s.staging_limit),
    ("nvme_used_bytes", "NVMe taken by replicas and spilled files.", lambda s: s.nvme_used),
    ("pending_bytes", "Bytes that are not on the parallel filesystem yet.", lambda s: s.pending_bytes),
    ("pending_changes", "Changes that are not on the parallel filesystem yet.", lambda s: s.pending_ops),
    ("drain_bytes_per_second", "Rate of copying to the parallel filesystem.", lambda s: s.drain_bytes_s),
    ("replication_bytes_per_second", "Rate of copying to the partner.", lambda s: s.replicate_bytes_s),
)  # fmt: skip


class MountMetrics(Collector):
    """The metrics of some mounts, from what each of them said."""

    def __init__(self, reports: list[Report]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        """Each family once, with a sample for each mount."""
        up = GaugeMetricFamily("cachexfs_up", "Whether the mount's daemon answers.", labels=["mountpoint"])
        for report in self._reports:
            up.add_metric([shown(report.mountpoint)], report.status is not None)
        yield up
        known = [report.status for report in self._reports if report.status is not None]
        for name, help_text, value in GAUGES:
            family = GaugeMetricFamily(f"cachexfs_{name}", help_text, labels=MOUNT)
            for status in known:
                family.add_metric(_mount(status), float(value(status)))
            yield family
        yield _info(known)
        yield _nodes(known)
        yield _checkpoints(known)
        yield _restartable(known)


def _mount(status: Status) -> list[str]:
    return [shown(text) for text in (status.mountpoint, status.node, status.job)]


def _info(known: list[Status]) -> Metric:
    labels = ("pfs", "kernel", "supervisor", "catalogue", "fsync", "route")
    family = GaugeMetricFamily("cachexfs_info", "How the mount works; always 1.", labels=(*MOUNT, *labels))
    for status in known:
        family.add_metric([*_mount(status), *(shown(str(getattr(status, label))) for label in labels)], 1)
    return family


def _nodes(known: list[Status]) -> Metric:
    family = GaugeMetricFamily("cachexfs_nodes", "Nodes of the job, as this one sees them.", labels=(*MOUNT, "state"))
    for status in known:
        live = sum(node.live for node in status.nodes)
        family.add_metric([*_mount(status), "live"], live)
        family.add_metric([*_mount(status), "lost"], len(status.nodes) - live)
    return family


def _checkpoints(known: list[Status]) -> Metric:
    family = GaugeMetricFamily(
        "cachexfs_checkpoints", "Checkpoints, by where they can be restarted from.", labels=(*MOUNT, "restartable")
    )
    for status in known:
        counts = Counter(point.restartable for point in status.checkpoints)
        for where in ("no", *BOUNDARIES):
            family.add_metric([*_mount(status), where], counts[where])
    return family


def _restartable(known: list[Status]) -> Metric:
    family = GaugeMetricFamily(
        "cachexfs_last_restartable_timestamp_seconds",
        "When the last checkpoint became restartable at this boundary or better; absent without any.",
        labels=(*MOUNT, "boundary"),
    )
    for status in known:
        for boundary in BOUNDARIES:
            times = [time for point in status.checkpoints if (time := reached_s(point, boundary)) is not None]
            if times:
                family.add_metric([*_mount(status), boundary], max(times))
    return family


def reached_s(point: Checkpoint, boundary: str) -> float | None:
    """When a whole checkpoint was at a boundary or better; None if it is not, or not whole."""
    if point.restartable not in BOUNDARIES or BOUNDARIES.index(point.restartable) < BOUNDARIES.index(boundary):
        return None
    at = {"returned": point.t_returned, "partner": point.t_partner, "pfs": point.t_pfs}
    texts = [at[better] for better in BOUNDARIES[BOUNDARIES.index(boundary) :]]
    times = [datetime.fromisoformat(text).timestamp() for text in (*texts, point.t_restartable) if text]
    return min(times, default=None)


@click.command("metrics")
@click.argument("file", required=False, type=click.Path(dir_okay=False))
def command(file: str | None) -> int:
    """Metrics of every mount of this node, for Prometheus; on stdout, or into FILE, which is replaced in one step.

    A timer that writes FILE into the directory of node_exporter's textfile collector is all that is needed.
    """
    try:
        reports = collect(None)
    except CannotTellError:  # there is no mount: the file must not go on showing one
        reports = []
    registry = CollectorRegistry()
    registry.register(MountMetrics(reports))
    if file is None:
        write(generate_latest(registry).decode().rstrip("\n"))
        return EXIT_DONE
    try:
        write_to_textfile(file, registry)
    except OSError as error:
        raise CannotTellError(f"cannot write {os.path.abspath(file)}: {error.strerror}") from None
    return EXIT_DONE
