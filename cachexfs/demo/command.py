"""``cachexfs demo``: the scenario with options, a screen, and a clean end whatever happens.

Role: command. Concurrency: none. SIGINT and SIGTERM end it as Ctrl-C does: everything is taken down first.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

import click
import msgspec
from rich.console import Console

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.report import Report
from cachexfs.demo.scenario import Scenario, Settings
from cachexfs.demo.screen import Screen
from cachexfs.errors import EXIT_DONE, EXIT_NOT_DURABLE, UsageError

NODES_MIN = 3  # the loss of one of two nodes leaves the catalogue without a majority
STAGING_MIB_MIN = 1024  # of which a passed writer wants 256 free


@click.command("demo")
@click.option("--nodes", default=4, show_default=True, type=click.IntRange(NODES_MIN, 16), help="Nodes, each a mount.")
@click.option("--ranks", default=8, show_default=True, type=click.IntRange(1, 256), help="Training processes.")
@click.option("--mib", default=64.0, show_default=True, type=click.FloatRange(0.1), help="Checkpoint size.")
@click.option("--root", type=click.Path(file_okay=False, path_type=Path), help="Where to work: a new directory.")
@click.option("--keep", is_flag=True, help="Leave logs and files behind (no mount, no process).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the screen.")
def command(nodes: int, ranks: int, mib: float, root: Path | None, keep: bool, as_json: bool) -> int:
    """Several nodes on this machine: save a DCP checkpoint, watch its boundaries, lose a node, restore without the PFS.

    Exit 0 only if all of it held; 3 and the name of the step otherwise.
    """
    if ranks < nodes:
        raise UsageError(f"--ranks {ranks} leaves some of the {nodes} nodes without a rank: give at least {nodes}")
    if importlib.util.find_spec("torch") is None:
        raise UsageError("the demo saves real PyTorch checkpoints: install 'cachexfs[torch]', or use 'make demo'")
    settings = Settings(nodes, ranks, mib, _workplace(root))
    screen = Screen(Console(quiet=as_json, highlight=False))
    report = _run(settings, screen, keep)
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    screen.end(report, keep)
    return EXIT_DONE if report.failed is None else EXIT_NOT_DURABLE


def _workplace(root: Path | None) -> Path:
    if root is None:
        return Path(tempfile.mkdtemp(prefix="cachexfs-demo-"))
    if root.exists() and any(root.iterdir()):
        raise UsageError(f"'{root}' is not empty: name a new directory")
    root.mkdir(parents=True, exist_ok=True)
    return root.absolute()


def _run(settings: Settings, screen: Screen, keep: bool) -> Report:
    options = {"memory": f"{max(STAGING_MIB_MIN, int(settings.mib * 4))}M"}
    signal.signal(signal.SIGTERM, _interrupt)
    cluster = LocalCluster(settings.root, settings.nodes, options=options)
    try:
        cluster.create()
        scenario = Scenario(settings, cluster, screen)
        screen.head(scenario.report)
        return scenario.run()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        cluster.teardown(remove=not keep)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
