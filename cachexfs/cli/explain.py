"""``cachexfs explain``: each missing piece of a path, its node, the reason, and what would fix it."""

from __future__ import annotations

import json

import click

from cachexfs.cli import client
from cachexfs.cli.output import shown, write, write_json
from cachexfs.cli.protocol import Explanation, Piece
from cachexfs.errors import EXIT_DONE

PIECES_MAX = 50


@click.command("explain")
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print the explanation as a JSON object.")
def command(path: str, as_json: bool) -> int:
    """Say why PATH is where it is: what is missing, on which node, why, and what would fix it."""
    entry, relative = client.locate(path)
    line = client.ask_raw(entry, {"op": "explain", "path": relative})
    answer = client.decode(entry, line, Explanation)
    if as_json:
        raw = json.loads(line)
        raw.pop("done", None)
        write_json(raw)
    else:
        write("\n".join(_words(path, answer)))
    return EXIT_DONE


def _words(path: str, answer: Explanation) -> list[str]:
    what = answer.kind or "path"
    first = f"{shown(path)} ({what}) is at '{answer.stage or 'unknown'}'"
    if answer.restartable is not None:
        restart = "not restartable" if answer.restartable == "no" else f"restartable at '{answer.restartable}'"
        first += f" and {restart}"
    lines = [first + "."]
    if answer.summary:
        lines[0] = f"{lines[0][:-1]}: {shown(answer.summary)}."
    lines += [_piece(piece) for piece in answer.pieces[:PIECES_MAX]]
    if len(answer.pieces) > PIECES_MAX:
        lines.append(f"... and {len(answer.pieces) - PIECES_MAX} more (--json lists all)")
    return lines


def _piece(piece: Piece) -> str:
    where = f" on {piece.node}" if piece.node else ""
    short_of = f" is not at '{piece.boundary}'" if piece.boundary else ""
    fix = f" To fix it: {piece.fix.rstrip('.')}." if piece.fix else ""
    return "- " + shown(f"{piece.path}{where}{short_of}: {piece.reason.rstrip('.')}.{fix}")
