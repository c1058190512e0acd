"""``cachexfs wait``: until a file is at a boundary, or a checkpoint restartable there."""

from __future__ import annotations

import json

import click

from cachexfs.cli import client
from cachexfs.cli.output import write_error, write_json
from cachexfs.cli.progress import bar, lines, pace
from cachexfs.cli.protocol import Progress, Reached
from cachexfs.cli.seconds import Seconds
from cachexfs.core.sizes import format_size
from cachexfs.errors import EXIT_DONE, EXIT_TIMEOUT

#: The daemon reports every 0.2 s; this much silence means that it hangs.
SILENCE_S = 15.0


@click.command("wait")
@click.argument("path")
@click.option("--at", "boundary", type=click.Choice(["partner", "pfs"]), required=True, help="The boundary.")
@click.option("--timeout", "timeout_s", type=Seconds(), metavar="SECONDS", help="Give up then (exit 124).")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as a JSON object.")
def command(path: str, boundary: str, timeout_s: float | None, as_json: bool) -> int:
    """Wait until the file PATH is at a boundary, or the checkpoint PATH restartable there."""
    entry, relative = client.locate(path)
    request = {"op": "wait", "path": relative, "at": boundary, "timeout_s": timeout_s}
    with bar(f"waiting for {boundary}", not as_json) as draw, lines(not as_json, at_once=False) as say:

        def on_progress(report: Progress) -> None:
            draw(report)
            say(_words(path, boundary, report))

        line = client.ask_raw(entry, request, on_progress, SILENCE_S)
    answer = client.decode(entry, line, Reached)
    if as_json:
        raw = json.loads(line)
        raw.pop("done", None)
        write_json(raw)
    if answer.reached:
        return EXIT_DONE
    write_error(f"'{path}' is not at '{boundary}': {answer.reason or 'no reason given'}")
    return answer.exit or EXIT_TIMEOUT


def _words(path: str, boundary: str, report: Progress) -> str:
    """What it waits for, for a log."""
    there = f"{format_size(report.bytes_done)} of {format_size(report.bytes_total)}"
    files = f" ({report.files_done} of {report.files_total} files)" if report.files_total > 1 else ""
    return f"waiting for {path} to be at '{boundary}': {there}{files} are there{pace(report)}"
