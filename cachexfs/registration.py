"""How a mount is found by the commands: its entry in the runtime directory, and the sockets beside it.

Role: base layer. The daemon writes the entry when its mount answers and removes it at the end;
``cachexfs.cli.mounts`` reads it. No concurrency: one daemon per name.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from cachexfs import config
from cachexfs.config import MountOptions


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a daemon registers. ``device`` is "major:minor" of the mount, "" once umount(8) has taken it away; ``pid``
    is 0 when the daemon has ended and left data in ``staging``."""

    mountpoint: str
    pfs: str
    node: str
    job: str
    pid: int
    device: str
    socket: str
    log: str
    started_s: float = 0.0
    staging: str = ""
    owner: int = 0  # of the directory that it was found in, whatever the file says


class Registration:
    """The files of one mount in the runtime directory."""

    def __init__(self, options: MountOptions) -> None:
        directory = Path(options.runtime_dir or config.default_runtime_dir())
        stem = config.mount_id(options.mountpoint, options.node)
        self._entry = directory / f"{stem}.json"
        self.socket = directory / f"{stem}.sock"
        self.supervisor_socket = directory / f"{stem}.supervisor"
        self.records = directory / f"{stem}.records"  # boundary times, for ``cachexfs fit``

    def write(self, entry: Entry) -> None:
        """Register; what an earlier daemon wrote is replaced as a whole. Raises ``OSError``."""
        self._entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._entry.with_suffix(".tmp")
        temporary.write_text(json.dumps(msgspec.to_builtins(entry)))  # paths need not be UTF-8, which msgspec wants
        temporary.replace(self._entry)

    def exists(self) -> bool:
        """Whether the entry is there: nobody has removed it."""
        return self._entry.exists()

    def remove(self, *, keeps_data: bool = False) -> None:
        """The mount is gone. Its records stay, and what another daemon has registered since.

        ``keeps_data``: what is not on the PFS stays in staging, and the entry says where.
        """
        try:
            entry = json.loads(self._entry.read_bytes())
            is_ours = entry.get("pid") == os.getpid()
        except (OSError, ValueError):
            return  # ``umount --abandon`` has taken it away
        if not is_ours:
            return
        self.socket.unlink(missing_ok=True)
        if keeps_data:
            self.write(msgspec.convert(entry | {"pid": 0, "device": ""}, Entry))
        else:
            self._entry.unlink(missing_ok=True)
