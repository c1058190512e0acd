"""What one supervisor is to do, and its voice: the record between the command line and the loop. No I/O but stderr."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .lifecycle import Limits
from .mount import Place

_STDERR = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: all of it from the command line, after mounting."""

    place: Place
    device_fd: int
    argv: tuple[str, ...]
    limits: Limits
    payload_bytes_max: int
    no_passthrough: str
    backing_devices: frozenset[int]
    status_path: str | None
    ready_fd: int | None
    spin_s: float
    #: Start the next daemon ahead so long after one has become ready; None: never.
    standby_after_s: float | None


def log(text: str) -> None:
    """One line on stderr; a full disk, or a reader that has gone, must not end the mount."""
    try:
        os.write(_STDERR, f"cachexfs.supervisor: {text}\n".encode(errors="backslashreplace"))
    except OSError:
        pass
