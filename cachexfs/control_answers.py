"""What control requests and their answers are made of.

Role: part of the control server, shared by its modules. Answers are JSON objects; their fields are typed where they are
read (``cachexfs.cli.protocol``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from cachexfs.errors import EXIT_NO, CacheXError

Answer = dict[str, Any]


@dataclass(slots=True)
class Facts:
    """What ``status`` shows of a mount and only the daemon knows. ``daemons``: how many have served it so far;
    ``unmounted``: umount(8) took the mount away."""

    mountpoint: str
    pfs: str
    supervisor: str
    catalogue: str
    daemons: int = 1
    kernel: str = ""
    kernel_reason: str = ""
    unmounted: bool = False


Send = Callable[[Answer], Awaitable[None]]


class NotFoundError(CacheXError):
    """A path that is not in the mount: certainly so."""

    exit_code = EXIT_NO
