"""``cachexfs drill``: would this checkpoint come back without one node and without the PFS?"""

from __future__ import annotations

import json

import click

from cachexfs.cli import client
from cachexfs.cli.output import shown, table, write, write_error, write_json
from cachexfs.cli.progress import bar
from cachexfs.cli.protocol import Drilled
from cachexfs.errors import EXIT_CANNOT_TELL, EXIT_DONE, EXIT_NOT_DURABLE

#: The daemon reports every 0.2 s; this much silence means that it hangs.
SILENCE_S = 30.0


@click.command("drill")
@click.argument("directory", metavar="DIR")
@click.option("--without", metavar="NODE", help="The node to leave out (default: that which wrote the commit file).")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as a JSON object.")
def command(directory: str, without: str | None, as_json: bool) -> int:
    """Prove that the checkpoint DIR would come back without one node and without the PFS.

    Reads every needed file in full from the other nodes' memory and NVMe and compares every block with its digest.
    Changes nothing. Exit 0 only if all of it would come back.
    """
    entry, relative = client.locate(directory)
    with bar("drill", not as_json) as draw:
        line = client.ask_raw(entry, {"op": "drill", "path": relative, "without": without}, draw, SILENCE_S)
    answer = client.decode(entry, line, Drilled)
    if as_json:
        raw = json.loads(line)
        raw.pop("done", None)
        write_json(raw)
    else:
        _show(directory, answer)
    if answer.ok:
        return EXIT_DONE
    lost = [file for file in answer.files if not file.ok]
    what = answer.reason or f"{len(lost)} of {len(answer.files)} files would not come back, '{lost[0].file}' first"
    write_error(f"'{directory}' without {answer.without} and the PFS: {what}")
    return EXIT_NOT_DURABLE if answer.certain else EXIT_CANNOT_TELL


def _show(directory: str, answer: Drilled) -> None:
    rows = [[f.file, f.source or "-", f"{f.bytes:,}", "ok" if f.ok else "MISSING", f.reason] for f in answer.files]
    lines = table(["file", "source", "bytes", "", ""], rows) if rows else []
    lines += [f"note: {shown(note)}" for note in answer.notes]
    if answer.ok:
        size = sum(f.bytes for f in answer.files)
        lines.append(
            f"{shown(directory)} would come back without {answer.without} and the PFS: {len(rows)} files, {size:,} "
            "bytes read, every digest right"
        )
    if lines:
        write("\n".join(lines))
