"""What control requests and their answers are made of.

Role: part of the control server, shared by its modules. Answers are JSON objects; their fields are typed where they are
read (``cachexfs.cli.protocol``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import trio

from cachexfs.errors import EXIT_NO, CacheXError

Answer = dict[str, Any]
POLL_S, PAUSE_SHARE = 0.2, 5.0


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


async def pause(began_s: float) -> None:
    """Between two looks: with tens of thousands of files one takes so long that applications would feel it."""
    await trio.sleep(max(POLL_S, PAUSE_SHARE * (trio.current_time() - began_s)))
