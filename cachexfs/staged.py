"""Which mount a staging directory belongs to: written into it, so that what a mount left is found without the mount.

Role: base layer. The daemon writes the file; ``cachexfs mount`` compares it with what it is to adopt, ``cachexfs
status`` finds by it what waits for a mount. It goes with the staging directory. No concurrency: one daemon has it.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
from pathlib import Path

import msgspec

from cachexfs.config import MountOptions

NAME = "mount.json"
BYTES_MAX = 1 << 20


class Owner(msgspec.Struct, frozen=True):
    """A mount: ``pfs`` is where the data is to go, ``words`` are the options that were given for it (``key=value``)."""

    pfs: str
    mountpoint: str
    node: str
    job: str
    runtime_dir: str = ""
    nvme_directory: str | None = None  # of this node of this job; None where it is alone
    spill_directory: str | None = None
    words: tuple[str, ...] = ()


def leave(directory: Path, options: MountOptions, *, is_confirmed: bool) -> None:
    """Say whose staging directory this is. What an earlier mount has said stays, unless PFS_DIR ``is_confirmed`` as the
    directory that the data belongs to. Raises ``OSError``."""
    path = directory / NAME
    if path.exists() and not is_confirmed:
        return
    owner = Owner(
        options.pfs, options.mountpoint, options.node, options.job, options.runtime_dir, options.nvme_directory,
        options.spill_directory, options.words,
    )  # fmt: skip
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(msgspec.to_builtins(owner)))
    fresh.replace(path)


def read(directory: str) -> Owner | None:
    """Whose staging directory this is; None when it does not say (there is none, or of a version that did not)."""
    try:
        fd = os.open(os.path.join(directory, NAME), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            data = os.read(fd, BYTES_MAX) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        finally:
            os.close(fd)
        return msgspec.json.decode(data, type=Owner)
    except (OSError, ValueError):
        return None


def mount_command(owner: Owner) -> str:
    """The command that mounts it again with the same options, for a shell."""
    words = ["-o", ",".join(owner.words)] if owner.words else []
    return shlex.join(["cachexfs", "mount", owner.pfs, owner.mountpoint, *words])


def quoted(command: str) -> str:
    """A command within a sentence; one with quotes of its own gets the other kind."""
    return f"'{command}'" if "'" not in command else f'"{command}"'
