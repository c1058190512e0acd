"""What is ours in the directories that a mount is given. They may hold what is not: that is never removed.

Role: base layer. ``cachexfs mount`` asks whether a directory can be staging; the daemon's end and the commands that
give back what a mount has left remove by these names, and by no others. No concurrency.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path

from cachexfs import staged
from cachexfs.config import PFS_ID

log = logging.getLogger(__name__)

#: What says that a directory is staging: every daemon makes all of them (a replica store has two, too).
MARKS = ("files", "store", "lock")
_FILES = frozenset(
    (
        "store", "lock", PFS_ID, staged.NAME, "mount.new", "mount-id", "ended", "catalogue.journal", "catalogue.new",
        "catalogue.journal.damaged", "catalogue.lock", "catalogue.mended",
    )
)  # fmt: skip
_FLAT = frozenset(("files", "spare", "orphans"))  # directories of files alone
_TLS = frozenset(("tls",))
_NVME_FILES = frozenset((PFS_ID, "ended"))
_NVME_TREES = frozenset(("replicas", "etcd", "tls"))
SPILLED = re.compile(r"[0-9a-f]{16}")  # below a spill directory: the identity of the staging that has spilled there
_SPILL = re.compile(r"spill-[0-9a-f]{16}")  # below a node's NVMe directory


def stranger_in(directory: str) -> str:
    """Why a directory cannot be staging: the name of something in it, where it is neither empty nor ours; else "".

    Raises ``OSError``.
    """
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return ""
    if all(name in names for name in MARKS) or staged.read(directory) is not None:
        return ""
    if PFS_ID in names:  # a node's directory on NVMe has it, too
        return next((name for name in names if name not in _FILES | _FLAT | _TLS), "")
    return next((name for name in names if not _is_of_a_start(directory, name)), "")


def _is_of_a_start(directory: str, name: str) -> bool:
    """Whether a daemon that was killed before it had written its marks may have made it: it has nothing in it."""
    path = os.path.join(directory, name)
    status = os.lstat(path)
    if stat.S_ISDIR(status.st_mode):
        return name in _FLAT and not os.listdir(path)
    return name in _FILES and stat.S_ISREG(status.st_mode) and status.st_size == 0


def remove_staging(directory: Path) -> None:
    """Remove what is ours in a staging directory, and the directory if that was all. What cannot be removed, or is not
    ours, is logged, and left."""
    for path in _below(directory):
        if path.name in _FLAT:
            _remove_flat(path)
        elif path.name in _TLS:
            _remove_tree(path)
        elif path.name in _FILES:
            _remove_file(path)
        else:
            log.warning("left behind: %s is not ours", path)
    _remove_empty(directory)


def remove_spill(directory: Path) -> None:
    """The same of a spill directory: the files of each staging directory that has spilled there."""
    for path in _below(directory):
        if SPILLED.fullmatch(path.name):
            _remove_flat(path)
        else:
            log.warning("left behind: %s is not ours", path)
    _remove_empty(directory)


def remove_replicas(directory: Path) -> None:
    """The same of what a node keeps for others in ``<nvme>/<job>/<node>/replicas``."""
    _remove_tree(directory)


def is_of_nvme(name: str) -> bool:
    """Whether a mount makes something of that name in a node's directory on NVMe."""
    return name in _NVME_TREES or name == PFS_ID or _SPILL.fullmatch(name) is not None


def remove_nvme(directory: Path) -> None:
    """The same of a node's directory on NVMe, ``<nvme>/<job>/<node>``."""
    for path in _below(directory):
        if path.name in _NVME_TREES:
            _remove_tree(path)
        elif _SPILL.fullmatch(path.name):
            remove_spill(path)
        elif path.name in _NVME_FILES:
            _remove_file(path)
        else:
            log.warning("left behind: %s is not ours", path)
    _remove_empty(directory)


def _below(directory: Path) -> list[Path]:
    """What is in a directory; nothing where it cannot be read."""
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("left behind: %s: %s", directory, error)
        return []


def _remove_flat(directory: Path) -> None:
    """A directory in which we make files only."""
    if directory.is_symlink():
        return
    for path in _below(directory):
        _remove_file(path)
    _remove_empty(directory)


def _remove_tree(directory: Path) -> None:
    """A directory that is ours with all that is in it."""
    if directory.is_symlink():
        return
    for path in sorted(directory.rglob("*"), key=lambda p: len(p.parts), reverse=True):
        _remove_empty(path) if path.is_dir() and not path.is_symlink() else _remove_file(path)
    _remove_empty(directory)


def _remove_file(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("left behind: %s: %s", path, error)


def _remove_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError:
        return  # a mount point, or shared with others
