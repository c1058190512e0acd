"""A mount while the daemon of an earlier one, which umount(8) took away, still drains: the new one goes on with that.

Role: called by ``cachexfs mount`` before it starts anything. The earlier daemon is asked to end where it is; what it
had not brought to the PFS stays in staging, which the new daemon adopts. No concurrency.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress

from cachexfs.cli import client, mounts
from cachexfs.cli.output import write_warning
from cachexfs.cli.protocol import Unmounted
from cachexfs.config import MountOptions
from cachexfs.errors import CannotTellError, UsageError
from cachexfs.registration import Entry
from cachexfs.tmpfs import is_in_use

END_TIMEOUT_S = 30.0
POLL_S = 0.05


def end_earlier(options: MountOptions) -> None:
    """End a daemon that drains an earlier mount of this place, so that this mount goes on with it.

    Nothing of ours is mounted there now. Raises ``UsageError`` when applications still use the earlier one, or it was
    another mount; ``CannotTellError`` when it does not end.
    """
    asked: int | None = None
    looks = 0
    while (entry := _draining(options)) is not None:
        looks += 1
        with suppress(client.EndedError):  # it has ended meanwhile, or its supervisor starts the next: look again
            asked = _take_over(entry, options, asked)
        if looks > END_TIMEOUT_S / POLL_S:  # looks, not time: on a machine that stood still nobody is late
            raise CannotTellError(f"process {entry.pid}, which drains the earlier mount, does not end: kill it")
        time.sleep(POLL_S)


def _draining(options: MountOptions) -> Entry | None:
    """The daemon of an earlier mount of this place which is still there, itself or its supervisor."""
    for entry in mounts.registry(options.runtime_dir):
        if entry.mountpoint == options.mountpoint and (mounts.is_alive(entry.pid) or client.is_supervised(entry)):
            mounted = any(m.device == entry.device for m in mounts.read_mountinfo()[0])
            return None if mounted else entry
    return None


def _take_over(entry: Entry, options: MountOptions, asked: int | None) -> int:
    """Ask the daemon to end where it is, unless it is ``asked`` (a pid) already; returns its pid."""
    if entry.pid == asked:
        return asked
    state = json.loads(client.ask_raw(entry, {"op": "status", "path": None}))
    pending = f"{state.get('pending_ops', 0)} changes that are not on the PFS yet"
    if not state.get("unmounted"):
        raise UsageError(
            f"an earlier mount of {options.mountpoint} was detached (umount -l), and applications still have files of "
            f"it open: end them and mount again (its daemon is process {entry.pid})"
        )
    if (entry.pfs, entry.node, entry.job) != (options.pfs, options.node, options.job) or not is_in_use(options):
        raise UsageError(
            f"process {entry.pid} still drains an earlier mount of {options.mountpoint} (of {entry.pfs}, {pending}): "
            "wait until it ends, or mount with the same directory, staging, node and job to go on with it"
        )
    write_warning(f"an earlier mount of {options.mountpoint} has {pending}: this one goes on with them")
    client.ask(entry, {"op": "umount", "abandon": True}, Unmounted)
    return entry.pid
