"""What several kinds of options have in common: paths, files of lines, the word that was perhaps meant.

Role: pure but for reading the file that it is given. Called by ``cachexfs.cli.options`` and what it is made of.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence

from cachexfs.errors import UsageError


def parse_path(text: str) -> str:
    """An absolute path. Raises ``UsageError``."""
    if not text:
        raise UsageError("an empty path")
    return os.path.abspath(os.path.expanduser(text))


def read_lines(path: str, what: str) -> Iterator[str]:
    """The lines of a file without comments and empty ones; ``what`` it is, for messages. Raises ``UsageError``."""
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                content = line.partition("#")[0].strip()
                if content:
                    yield content
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the {what} file '{path}': {getattr(error, 'strerror', None) or error}") from None


def nearest(word: str, known: Sequence[str]) -> str:
    """``: did you mean 'x'?`` for the known word that is nearest, or nothing."""
    close = difflib.get_close_matches(word.lower(), known, 1, 0.5) if len(word) > 2 else []
    return f": did you mean '{close[0]}'?" if close else ""
