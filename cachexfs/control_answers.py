"""What control requests and their answers are made of.

Role: part of the control server, shared by its modules. Answers are JSON objects; their fields are typed where they are
read (``cachexfs.cli.protocol``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from cachexfs.errors import EXIT_NO, CacheXError

Answer = dict[str, Any]
Send = Callable[[Answer], Awaitable[None]]


class NotFoundError(CacheXError):
    """A path that is not in the mount: certainly so."""

    exit_code = EXIT_NO
