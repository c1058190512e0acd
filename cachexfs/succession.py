"""A daemon that follows another one under a live mount: it goes on with what that one had, or not at all.

Role: daemon layer. Applications have files of the mount open: to begin anew would look to them as if everything had
been deleted. Called by ``daemon`` before it opens anything. No concurrency.
"""

from __future__ import annotations

import logging
from pathlib import Path

from cachexfs.adapters import journal_file, replica_store, staging
from cachexfs.config import MountOptions
from cachexfs.errors import CannotTellError
from cachexfs.supervisor.client import Supervisor

log = logging.getLogger(__name__)

#: In the staging directory: which mount behind a supervisor uses it.
TOKEN = "mount-id"


def is_one(supervisor: Supervisor | None) -> bool:
    """Whether this daemon follows one that has served."""
    return supervisor is not None and supervisor.state.has_served


def leave_token(directory: Path, supervisor: Supervisor | None) -> None:
    """The first daemon is about to serve: let those after it know its staging directory again."""
    if supervisor is not None and not supervisor.state.has_served:
        (directory / TOKEN).write_text(supervisor.mount_id)


def check(directory: Path, options: MountOptions, supervisor: Supervisor | None) -> None:
    """Make sure that the staging directory is the one of the daemon before. Raises ``CannotTellError``.

    Its locks are taken from it: the supervisor has killed it, but where it hangs in a system call it keeps them, and
    does nothing more.
    """
    if supervisor is None or not supervisor.state.has_served:
        return
    token = directory / TOKEN
    if not token.exists() or token.read_text() != supervisor.mount_id:
        raise CannotTellError(
            f"the staging directory {directory} is not what this mount has used: it was unmounted, emptied or "
            f"replaced; bring it back, then 'cachexfs restart {options.mountpoint}'"
        )
    locks = [directory / staging.LOCK, directory / journal_file.LOCK_NAME]
    if options.nvme_directory is not None:
        locks.append(Path(options.nvme_directory) / "replicas" / replica_store.LOCK)
    for lock in locks:
        try:
            lock.unlink(missing_ok=True)
        except OSError as error:  # NVMe is read-only: the daemon before is almost always dead, its lock free
            log.warning("a lock of the daemon before stays: %s", error)


def catalogue_is_gone(options: MountOptions) -> CannotTellError:
    """The error for a daemon that finds no catalogue where another one has served."""
    return CannotTellError(
        "the catalogue that this mount has used is gone; bring it back, then 'cachexfs restart "
        f"{options.mountpoint}', or umount, and 'cachexfs mount' keeps what is staged without its name"
    )
