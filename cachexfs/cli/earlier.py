"""A mount where an earlier one has left data: the new one goes on with that, or is not made.

Role: called by ``cachexfs mount`` before it starts anything. A daemon that still drains a mount which umount(8) took
away is asked to end where it is; what it had not brought to the PFS stays in staging, which the new daemon adopts. No
concurrency.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress

from cachexfs import staged, tmpfs
from cachexfs.cli import client, mounts, waiting
from cachexfs.cli.output import write_warning
from cachexfs.cli.protocol import Unmounted
from cachexfs.config import MountOptions
from cachexfs.errors import CannotTellError, UsageError
from cachexfs.registration import Entry
from cachexfs.tmpfs import is_in_use

END_TIMEOUT_S = 30.0
POLL_S = 0.05


def check_left(options: MountOptions) -> None:
    """Refuse to stage elsewhere than the last mount of this place did, where that has data which is not on the PFS:
    nothing would go on with it, and nothing name it any more. Raises ``UsageError``."""
    directory = tmpfs.staging_directory(options)
    for waits in waiting.find(options.runtime_dir):
        if waits.owner.mountpoint != options.mountpoint or _is_same(waits.directory, directory):
            continue
        left = waiting.look(waits)
        if left.is_data:
            command = staged.quoted(staged.mount_command(waits.owner))
            raise UsageError(
                f"the last mount at {options.mountpoint} has staged {left.amount} in {waits.directory} that is not on "
                f"'{waits.owner.pfs}', and this one would stage in {directory}: go on with it (staging="
                f"{waits.directory}: {command}) and 'cachexfs umount {options.mountpoint}' first, or use another mount "
                "point"
            )


def _is_same(one: str, two: str) -> bool:
    try:
        return os.path.samefile(one, two)
    except OSError:
        return one == two


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
