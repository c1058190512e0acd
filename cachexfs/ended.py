"""What a mount has left that ended before the others of its job, once nobody needs that any more.

Role: base layer. Such a mount leaves a random token in its staging, or on NVMe where only its etcd member stays, and in
its node's record of the catalogue, if all that is staged is published. Who is unmounted last, and finds everything of
the job on the PFS, leaves a mark with that token there (``mark_of``). Token and mark together say that what is staged
is not needed any more; ``cachexfs status``, ``mount`` and ``umount`` ask for them. A token is good for one end: the
next daemon removes it before it stages anything. No concurrency.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

from cachexfs import etcd_process, ours
from cachexfs.errors import UsageError
from cachexfs.tmpfs import PFS_TOKEN

NAME = "ended"
LOCK = "lock"  # of the daemon that uses the directory
_TOKEN = re.compile(r"[0-9a-f]{32}")


def leave(directory: Path, token: str) -> None:
    """This mount ends, and all that is staged is published. ``directory``: staging, or what it has on NVMe. Raises
    ``OSError``."""
    (directory / NAME).write_text(token)


def forget(directory: Path) -> None:
    """Another mount goes on with what is staged. Raises ``OSError``."""
    (directory / NAME).unlink(missing_ok=True)


def is_token(text: str) -> bool:
    """Whether it can be one: it becomes part of a path."""
    return _TOKEN.fullmatch(text) is not None


def mark_of(token: str) -> bytes:
    """Path of the mark, relative to the PFS directory."""
    return b".cachexfs/held/ended-" + token.encode()


def token_in(directory: str) -> str:
    """What the last mount has left there; "" if it has not ended so."""
    text = _small(os.path.join(directory, NAME))
    return text if is_token(text) else ""


def has_landed(directory: str, pfs: str) -> bool:
    """Whether everything that is staged there is on the PFS. Reads the PFS, which may hang. Raises ``OSError``."""
    token, identity = token_in(directory), _small(os.path.join(directory, PFS_TOKEN))
    if not token or not identity or _small(os.path.join(pfs, ".cachexfs", "id")) != identity:
        return False
    try:
        os.lstat(os.path.join(os.fsencode(pfs), mark_of(token)))
    except FileNotFoundError:
        return False
    return True


def clear(directory: str, nvme_directory: str | None, spill_directory: str | None) -> None:
    """Give back what the mount has left: its etcd member, staging, NVMe. Raises ``UsageError`` when a daemon has it.

    The mark on the PFS stays: it is empty, and whoever removes it first would have others believe that data waits.
    """
    fd = os.open(os.path.join(directory, LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise UsageError(f"another daemon uses the staging directory {directory}") from None
    else:
        if nvme_directory is not None:
            clear_nvme(nvme_directory)
        if spill_directory is not None:
            ours.remove_spill(Path(spill_directory))
        ours.remove_staging(Path(directory))
    finally:
        os.close(fd)


def clear_nvme(directory: str) -> None:
    """Give back what a node has on NVMe, and end its etcd member. Raises ``OSError``."""
    etcd_process.end(Path(directory) / "etcd" / etcd_process.PID_NAME)
    ours.remove_nvme(Path(directory))


def _small(path: str) -> str:
    """The text of a small file, "" without one. Raises ``OSError`` for what cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return ""
    try:
        return os.read(fd, 64).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
