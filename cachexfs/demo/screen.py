"""The demo on a terminal: steps as they run, then tables.

Role: presentation only; every number comes from the ``Report``'s records. With more files than ``ROWS_MAX`` a table has
a row per node. Concurrency: none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich import box
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cachexfs.demo.report import FileRow, Report, Restored, Saved, SourceRow

T = TypeVar("T", FileRow, SourceRow)

ROWS_MAX = 17
LISTING_MAX = 11
MIB = 1 << 20
FETCHED = (
    "Each survivor counts what it fetches: a file that ranks on several nodes read is fetched by each of them (more "
    "MiB than it has); what a node reads from its own memory, it does not fetch."
)
NOT_SHOWN = (
    "a real network and a real parallel filesystem (here: loopback and a directory), power failure, a node lost in the "
    "middle of a save, two nodes lost at once, speed (see 'make bench')"
)


class Screen:
    """Writes to ``console``; a quiet console makes it silent (``--json``)."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextlib.contextmanager
    def doing(self, step: str) -> Iterator[None]:
        """One line: the step, then how long it took or that it failed."""
        begin = time.monotonic()
        try:
            with self.console.status(step):
                yield
        except BaseException:
            self.console.print(f"[red]✗[/] {step}")
            raise
        self.console.print(f"[green]✓[/] {step} [dim]{time.monotonic() - begin:.1f} s[/]")

    def head(self, report: Report) -> None:
        """What is about to run."""
        text = f"{report.nodes} nodes on this machine, {report.ranks} ranks, FSDP2 and Adam, {report.mib:g} MiB"
        self.console.rule(f"[bold]CacheX FS[/] · {text}", align="left")

    def saved(self, saved: Saved) -> None:
        """Boundaries per file and for the checkpoint, its attributes, the PFS directory."""
        title = f"{saved.directory}: ms after dcp.save began (it returned after {saved.save_ms:.0f})"
        table = self._table(title)
        table.add_column("file")
        table.add_column("node")
        for name in ("MiB", "returned", "partner", "pfs"):
            table.add_column(name, justify="right")
        for label, node, rows in _grouped(saved.files):
            cells = [_latest([getattr(row, f"{b}_ms") for row in rows]) for b in ("returned", "partner", "pfs")]
            table.add_row(label, node, f"{sum(row.bytes for row in rows) / MIB:.2f}", *cells)
        table.add_section()
        cells = [_latest([saved.restartable_ms.get(b)]) for b in ("returned", "partner", "pfs")]
        total = f"{sum(row.bytes for row in saved.files) / MIB:.2f}"
        table.add_row("restartable at", "", total, *cells, style="bold")
        attributes = "\n".join(f'user.cachex.{key}="{value}"' for key, value in sorted(saved.attributes.items()))
        listing = "\n".join(f"{size:>10} {name}" for name, size in _shortened(saved.pfs_listing))
        self.console.print(table)
        self.console.print()
        self.console.print(
            Columns(
                [
                    Panel(Text(attributes), title=f"getfattr -d {saved.directory}", title_align="left"),
                    Panel(Text(listing), title="on the PFS, plain files", title_align="left"),
                ]
            )
        )
        self._verdict(saved.pfs_load_equal, "dcp.load from the PFS directory equals what was saved, to the bit")

    def restored(self, restored: Restored) -> None:
        """Where every file came from after the loss, and whether it was right."""
        title = (
            f"restore on {', '.join(restored.survivors)} without {restored.lost} ({restored.killed} processes killed, "
            f"memory and NVMe wiped) and without the PFS (survivors: {', '.join(sorted(set(restored.pfs_states)))})"
        )
        table = self._table(title)
        table.add_column("file")
        table.add_column("written on")
        table.add_column("copies left")
        table.add_column("MiB fetched, from where")
        for label, node, rows in _grouped(restored.files):
            style = "yellow" if node == restored.lost else ""
            table.add_row(
                label, f"{node} (lost)" if node == restored.lost else node, _copies(rows), _sources(rows), style=style
            )
        self.console.print(table)
        self.console.print(f"[dim]{FETCHED}[/]")
        same = f"{restored.ranks_equal} of {restored.ranks} ranks have their state back to the bit"
        self._verdict(restored.ranks_equal == restored.ranks, f"{same}, in {restored.restore_ms:.0f} ms")

    def losses(self, first_step: int, unbroken: Sequence[float], resumed: Sequence[float]) -> None:
        """Both runs' losses, all digits."""
        table = self._table("training goes on: loss")
        table.add_column("step", justify="right")
        table.add_column("unbroken run")
        table.add_column("resumed on the survivors")
        table.add_column("")
        for offset, (one, other) in enumerate(zip(unbroken, resumed, strict=True)):
            same = "[green]equal[/]" if one == other else "[red]differs[/]"
            table.add_row(str(first_step + offset + 1), repr(one), repr(other), same)
        self.console.print(table)

    def end(self, report: Report, kept: bool) -> None:
        """The verdict, what was not shown, and where the logs are."""
        if report.failed is None:
            self._verdict(True, f"all of it held, in {report.seconds:.0f} s")
        else:
            self._verdict(False, f"failed at: {report.failed}: {report.error}")
        self.console.print(f"[dim]Not shown: {NOT_SHOWN}.[/]")
        if kept:
            self.console.print(f"Logs: {report.root}/node*/log, {report.root}/ranks.log", soft_wrap=True)

    def _table(self, title: str) -> Table:
        self.console.print(f"\n[bold]{title}[/]")
        return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)

    def _verdict(self, good: bool, text: str) -> None:
        mark = "[bold green]✓[/]" if good else "[bold red]✗[/]"
        self.console.print(f"{mark} [bold]{text}[/]")


def _grouped(files: list[T]) -> list[tuple[str, str, list[T]]]:
    """(label, node, files) for the rows of a table: each file, or each node's shards together when there are many."""
    if len(files) <= ROWS_MAX:
        return [(file.name, file.node, [file]) for file in files]
    groups: dict[str, list[T]] = {}
    for file in files:
        groups.setdefault(file.node if file.name != ".metadata" else ".metadata", []).append(file)
    return [(f"{len(rows)} shards" if key != ".metadata" else key, rows[0].node, rows) for key, rows in groups.items()]


def _latest(times_ms: list[float | None]) -> str:
    if any(time_ms is None for time_ms in times_ms):
        return "-"
    return f"{max(time_ms for time_ms in times_ms if time_ms is not None):.0f}"


def _copies(rows: list[SourceRow]) -> str:
    """The places that hold all of the rows' files between them."""
    places = sorted({copy for row in rows for copy in row.copies})
    return " ".join(places)


def _place(source: str) -> str:
    """``nvme:n1``, as the daemons count, in the order of the attribute ``holders``: ``n1:nvme``."""
    return ":".join(reversed(source.split(":")))


def _sources(rows: list[SourceRow]) -> str:
    total: dict[str, int] = {}
    for row in rows:
        for source, count in row.sources.items():
            total[source] = total.get(source, 0) + count
    return ", ".join(f"{_place(source)} {count / MIB:.2f}" for source, count in sorted(total.items()))


def _shortened(listing: list[tuple[str, int]]) -> list[tuple[str, int]]:
    if len(listing) <= LISTING_MAX:
        return listing
    rest = listing[LISTING_MAX - 1 :]
    return [*listing[: LISTING_MAX - 1], (f"(and {len(rest)} more)", sum(size for _, size in rest))]
