"""A progress bar on a terminal, nothing elsewhere.

Role: for ``wait`` and ``umount``. rich is imported only where a bar is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cachexfs.cli.output import on_terminal
from cachexfs.cli.protocol import Progress


@contextmanager
def bar(title: str, show: bool = True) -> Iterator[Callable[[Progress], None]]:
    """A function that takes each ``Progress`` of a request, and draws it on stderr if that is a terminal."""
    if not show or not on_terminal():
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[note]}"),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task(title, total=None, note="")
        bytes_left_max = 0

        def draw(report: Progress) -> None:
            nonlocal bytes_left_max
            if report.bytes_total or report.files_total:
                note = f"{report.files_done}/{report.files_total} files"
                display.update(task, total=report.bytes_total, completed=report.bytes_done, note=note)
                return
            bytes_left_max = max(bytes_left_max, report.bytes_left)
            done = bytes_left_max - report.bytes_left
            display.update(task, total=bytes_left_max, completed=done, note=f"{report.ops_left} changes left")

        yield draw
