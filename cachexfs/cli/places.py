"""The directories on this node that a mount is given: staging, NVMe, spill, the log's. Apart from each other, and ours.

Role: called by ``cachexfs mount`` before anything is made in them. A directory is known again by its identity, through
links and bind mounts; where PFS_DIR does not answer, by its path. No concurrency; what may hang runs in a child.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial

from cachexfs import mountinfo, ours
from cachexfs.cli.child import run_in_child
from cachexfs.cli.mounts import is_below
from cachexfs.config import MountOptions
from cachexfs.errors import UsageError

LOOK_TIMEOUT_S = 3.0
IN_MEMORY = ("tmpfs", "ramfs")


def check_places(options: MountOptions) -> None:
    """Raise ``UsageError`` for a directory that this mount would share with what is not its own."""
    try:
        run_in_child(partial(_check_apart, options), LOOK_TIMEOUT_S)
    except (TimeoutError, OSError):
        _check_apart(options, by_path=True)
    if options.staging is not None:
        _check_staging(options.staging)
    if options.spill not in ("auto", "off"):
        _check_parent("spill", options.spill)
    if options.log_file is not None and os.path.dirname(options.log_file) != options.runtime_dir:
        _check_parent("log_file", options.log_file)


def warning_of(options: MountOptions) -> str:
    """What a mount that begins is told of its staging directory; "" for nothing."""
    if options.staging is None:
        return ""
    place = mountinfo.place_of(os.path.realpath(options.staging))
    if place is None or place.kind in IN_MEMORY:
        return ""
    return (
        f"staging={options.staging} lies on {place.mountpoint} ({place.kind}), not on a tmpfs: it takes the "
        "page cache's memory beside that disk, and goes at the disk's speed"
    )


def _check_parent(key: str, path: str) -> None:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        raise UsageError(f"{key}={path}: the directory '{parent}' does not exist: mkdir -p {parent}")


def _check_staging(path: str) -> None:
    """What is neither empty nor staging is somebody else's, and was to be removed with it at the end."""
    try:
        name = ours.stranger_in(path)
    except OSError:
        return  # no directory, or none of this user's: said elsewhere
    if name:
        raise UsageError(
            f"staging={path} is in use by others: it holds '{name}', and none of what a mount has in its staging "
            f"({', '.join(ours.MARKS)}): give an empty directory of its own, as {os.path.join(path, 'cachexfs')}"
        )


def _check_apart(options: MountOptions, *, by_path: bool = False) -> None:
    lies_in = is_below if by_path else _lies_in
    others = {"the PFS directory": options.pfs, "the mount point": options.mountpoint}
    own = {"staging": options.staging, "nvme": options.nvme}
    if options.spill not in ("auto", "off"):
        own["spill"] = options.spill
    for key, path in own.items():
        for what, other in others.items():
            if path is not None and lies_in(path, other):
                raise UsageError(f"{key}={path} lies in {what} '{other}': give a directory on this node's own storage")
    whole = {"staging": options.staging, "nvme": options.nvme_directory, "spill": options.spill_directory}
    for key, path in whole.items():
        for what, other in others.items():
            if path is not None and lies_in(other, path):
                raise UsageError(f"{key}: {path} holds {what} '{other}': give a directory of its own")
    if options.staging is not None and options.nvme is not None:
        for inner, outer in ((options.staging, options.nvme), (options.nvme, options.staging)):
            if lies_in(inner, outer):
                raise UsageError(
                    f"staging={options.staging} and nvme={options.nvme}: '{inner}' lies in the other: give staging a "
                    "directory on a tmpfs, and nvme one on a disk"
                )


def _lies_in(path: str, other: str) -> bool:
    """Whether ``path``, which need not exist, is ``other`` or lies in it."""
    if is_below(path, other):
        return True
    try:
        wanted = os.stat(other)
    except OSError:
        return False
    current = os.path.realpath(path)
    while True:
        with suppress(OSError):
            if os.path.samestat(os.stat(current), wanted):
                return True
        if current == os.path.dirname(current):
            return False
        current = os.path.dirname(current)
