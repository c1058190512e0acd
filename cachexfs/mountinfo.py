"""The kernel's table of mounts, /proc/self/mountinfo (proc_pid_mountinfo(5)).

Role: base layer. Reading it touches no mount, so a dead or hung one hangs nobody. No concurrency.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

PATH = "/proc/self/mountinfo"
_ESCAPE = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mounted:
    """One line. ``device`` is "major:minor", ``options`` those of the filesystem (of its superblock)."""

    mountpoint: str
    device: str
    kind: str
    source: str
    options: str


def _text(field: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match.group(1), 8)]), field))


def parse(data: bytes) -> list[Mounted]:
    """The mounts of a table, in the order of mounting: a later one covers an earlier one of the same mount point."""
    found = []
    for line in data.splitlines():
        before, _, after = line.partition(b" - ")
        fields, rest = before.split(b" "), after.split(b" ")
        if len(fields) >= 6 and len(rest) >= 2:
            options = os.fsdecode(rest[2]) if len(rest) > 2 else ""
            found.append(Mounted(_text(fields[4]), fields[2].decode(), os.fsdecode(rest[0]), _text(rest[1]), options))
    return found


def place_of(path: str) -> Mounted | None:
    """The mount that a path without symlinks lies in; None where the kernel does not say."""
    found: Mounted | None = None
    try:
        for mount in read():
            is_above = path == mount.mountpoint or path.startswith(mount.mountpoint.rstrip("/") + "/")
            if is_above and (found is None or len(mount.mountpoint) >= len(found.mountpoint)):  # the last is on top
                found = mount
    except OSError:
        return None
    return found


def read(path: str = PATH) -> list[Mounted]:
    """``parse`` of a file. Raises ``OSError``."""
    with open(path, "rb") as file:
        return parse(file.read())
