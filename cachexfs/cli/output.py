"""What commands print: JSON, one line of error, whether a person is watching.

Role: shared by all commands. Results go to stdout, errors and progress to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from cachexfs.errors import CacheXError


def shown(text: str) -> str:
    """``text`` with control characters and lone surrogates escaped, for a terminal or a log of lines."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def write(text: str) -> None:
    """A result on stdout; bytes of names that are not UTF-8 go out as they are."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape") + b"\n")
    sys.stdout.buffer.flush()


def write_json(value: Mapping[str, object]) -> None:
    """One JSON object on one line of stdout (ASCII: lone surrogates as ``\\udcxx``)."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def write_error(message: str) -> None:
    """The one line that a failing command prints."""
    print(f"cachexfs: error: {shown(' '.join(message.split()))}", file=sys.stderr, flush=True)


def write_warning(message: str) -> None:
    """One line on stderr of a command that goes on."""
    print(f"cachexfs: warning: {shown(' '.join(message.split()))}", file=sys.stderr, flush=True)


def fail(error: CacheXError) -> NoReturn:
    """Print the error and end with its exit code."""
    write_error(str(error) or type(error).__name__)
    sys.exit(error.exit_code)


def on_terminal() -> bool:
    """Whether a person watches stderr (progress bars)."""
    return sys.stderr.isatty()


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Lines of left-aligned columns, as wide as their content."""
    cells = [[shown(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    return [
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    ]


def quiet_pipe() -> None:
    """After a broken pipe: keep the interpreter from complaining when it flushes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
