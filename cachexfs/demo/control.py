"""What the demo and the tests ask of a node: its daemon's status and sources, and a file's attributes.

Role: typed answers of the control socket, found by runtime directory (a cluster's nodes have one each). Every question
has a deadline. No concurrency.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from cachexfs.cli import client, mounts
from cachexfs.errors import CannotTellError
from cachexfs.registration import Entry

PREFIX = "user.cachex."


class FileSources(msgspec.Struct, frozen=True):
    """Bytes read of one file by where they came from: ``memory:n2``, ``nvme:n3``, ``local``, ``pfs``."""

    path: str
    sources: dict[str, int]


class Sources(msgspec.Struct, frozen=True):
    """The answer to ``sources``: what served reads since the mount."""

    files: list[FileSources] = []


S = TypeVar("S", bound=msgspec.Struct)


def registered(runtime: Path) -> Entry | None:
    """The newest mount that a runtime directory names, or None."""
    return next(iter(mounts.registry(str(runtime))), None)


def ask(runtime: Path, request: Mapping[str, object], kind: type[S]) -> S:
    """One question to the daemon registered in ``runtime``. Raises ``CannotTellError`` (no daemon, no answer)."""
    entry = registered(runtime)
    if entry is None:
        raise CannotTellError(f"no daemon is registered in {runtime}")
    return client.ask(entry, request, kind)


def xattr(path: Path, name: str) -> str | None:
    """The value of ``user.cachex.<name>`` of a path inside a mount, None when absent. Raises other ``OSError``."""
    try:
        return os.getxattr(path, PREFIX + name, follow_symlinks=False).decode()
    except OSError as error:
        if error.errno == errno.ENODATA:
            return None
        raise


def xattrs(path: Path) -> dict[str, str]:
    """All that ``getfattr -d`` shows of a path inside a mount, by name without the prefix."""
    found = {}
    for name in os.listxattr(path, follow_symlinks=False):
        if name.startswith(PREFIX) and (value := xattr(path, name.removeprefix(PREFIX))) is not None:
            found[name.removeprefix(PREFIX)] = value
    return found
