"""A progress bar on a terminal; elsewhere nothing, or a line now and then for who reads a log.

Role: for ``wait``, ``umount`` and the like. rich is imported only where a bar is drawn. Concurrency: ``Lines`` has a
thread of its own, so that a daemon which says nothing does not silence the command.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cachexfs.cli.output import on_terminal, shown
from cachexfs.cli.protocol import Progress
from cachexfs.core.sizes import format_duration, format_rate

LINE_EVERY_S = 10.0


class Lines:
    """What a command waits for, on stderr: every ``every_s`` until it ends, and ``at_once`` when it begins to wait."""

    def __init__(self, every_s: float = LINE_EVERY_S, at_once: bool = True) -> None:
        self._every_s, self._at_once = every_s, at_once
        self._text = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)

    def says(self, text: str) -> None:
        """What is waited for now."""
        is_first, self._text = not self._text, text
        if is_first:
            if self._at_once:
                self._write()
            self._thread.start()

    def end(self) -> None:
        """It waits no more."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._write()

    def _write(self) -> None:
        print(f"cachexfs: {shown(self._text)}", file=sys.stderr, flush=True)


@contextmanager
def lines(show: bool = True, *, at_once: bool = True) -> Iterator[Callable[[str], None]]:
    """A function that takes what the command waits for; nothing is shown on a terminal, which has a bar."""
    if not show or on_terminal():
        yield lambda _: None
        return
    said = Lines(LINE_EVERY_S, at_once)
    try:
        yield said.says
    finally:
        said.end()


def pace(report: Progress) -> str:
    """`` at 50.0 MiB/s, about 1 m 58 s left``; empty when nothing moves, or only names are left to be changed."""
    left_bytes = report.bytes_total - report.bytes_done if report.bytes_total else report.bytes_left
    if not report.rate_bytes_s or left_bytes <= 0:
        return ""
    left = f", about {format_duration(report.left_s)} left" if report.left_s is not None else ""
    return f" at {format_rate(report.rate_bytes_s)}{left}"


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
            left = f", about {format_duration(report.left_s)} left" if report.left_s is not None else ""
            if report.bytes_total or report.files_total:
                note = f"{report.files_done}/{report.files_total} files{left}"
                display.update(task, total=report.bytes_total, completed=report.bytes_done, note=note)
                return
            bytes_left_max = max(bytes_left_max, report.bytes_left)
            done = bytes_left_max - report.bytes_left
            display.update(task, total=bytes_left_max, completed=done, note=f"{report.ops_left} changes left{left}")

        yield draw
