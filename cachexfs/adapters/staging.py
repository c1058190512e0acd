"""Staging: one file on tmpfs for each content that this node holds in memory.

Role: the directory, its identity, its accounting. Cheap system calls, made in the caller's thread: a write of
1 MiB to tmpfs takes less than a hop to a thread. A lock keeps a second daemon out.

A file may carry several generations, each a prefix of the next (appending).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
from pathlib import Path

from cachexfs.errors import UsageError

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


ORPHANS = "orphans"


class Staging:
    """The staging directory of one mount. Not shared between daemons.

    ``used_bytes`` counts allocated pages of all files as of their last change through this object.
    """

    def __init__(self, directory: str, limit_bytes: int) -> None:
        self.directory = Path(directory)
        self.limit_bytes = limit_bytes
        self._files = self.directory / "files"
        self._allocated: dict[str, int] = {}
        self.used_bytes = 0
        self._lock_fd = -1
        self.store = ""

    def open(self) -> None:
        """Make or adopt the directory. Raises ``UsageError`` when another daemon uses it or it cannot be used."""
        try:
            self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"staging directory {self.directory}: {error.strerror}; choose another with -o staging=DIR"
            ) from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"another daemon uses the staging directory {self.directory}; unmount it first") from None
        self.store = self._identity()
        for name in os.listdir(self._files):
            self.account(name, os.stat(self._files / name).st_blocks * 512)

    def _identity(self) -> str:
        path = self.directory / "store"
        try:
            found = path.read_text().strip()
        except FileNotFoundError:
            found = ""
        if not found:
            found = secrets.token_hex(8)
            path.write_text(found)
        return found

    def close(self) -> None:
        """Give up the lock; files stay for the next daemon."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def path(self, stage: str) -> str:
        """Path of a staged file."""
        return str(self._files / stage)

    def create(self, stage: str) -> int:
        """Descriptor, for reading and writing, of a new empty staged file."""
        fd = os.open(self._files / stage, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._allocated[stage] = 0
        return fd

    def open_file(self, stage: str, *, write: bool = False) -> int:
        """Descriptor of a staged file. Raises ``FileNotFoundError``."""
        return os.open(self._files / stage, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)

    def has(self, stage: str) -> bool:
        """Whether this node holds a staged file of that key."""
        return stage in self._allocated

    def size(self, stage: str) -> int:
        """Length of a staged file in bytes. Raises ``FileNotFoundError``."""
        return os.stat(self._files / stage).st_size

    def account(self, stage: str, allocated_bytes: int) -> None:
        """Note how much memory a staged file takes now."""
        self.used_bytes += allocated_bytes - self._allocated.get(stage, 0)
        self._allocated[stage] = allocated_bytes

    def recount(self, stage: str, fd: int) -> None:
        """Note the memory of an open staged file after it changed."""
        self.account(stage, os.fstat(fd).st_blocks * 512)

    def exchange(self, one: str, two: str) -> None:
        """Let two staged files have each other's key, in one step."""
        old, new = os.fsencode(self._files / one), os.fsencode(self._files / two)
        if _LIBC.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_EXCHANGE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), self.path(one))
        for stage in (one, two):
            self.account(stage, os.stat(self._files / stage).st_blocks * 512)

    def rename(self, old: str, new: str) -> None:
        """Give a staged file another key, in one step."""
        os.rename(self._files / old, self._files / new)
        self._allocated[new] = self._allocated.pop(old)

    def remove(self, stage: str) -> None:
        """Give a staged file's memory back; open descriptors go on reading."""
        try:
            os.unlink(self._files / stage)
        except FileNotFoundError:
            pass
        self.used_bytes -= self._allocated.pop(stage, 0)

    def set_aside(self, stage: str) -> None:
        """Keep a staged file whose name nobody knows any more: under ``orphans``, where nothing removes it."""
        orphans = self.directory / ORPHANS
        orphans.mkdir(mode=0o700, exist_ok=True)
        os.rename(self._files / stage, orphans / stage)
        self.used_bytes -= self._allocated.pop(stage, 0)

    def orphans(self) -> list[str]:
        """What was set aside, by this daemon or an earlier one."""
        try:
            return sorted(os.listdir(self.directory / ORPHANS))
        except FileNotFoundError:
            return []

    def stages(self) -> list[str]:
        """Keys of all staged files."""
        return list(self._allocated)
