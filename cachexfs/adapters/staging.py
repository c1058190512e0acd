"""Staging: one file on tmpfs for each content that this node holds in memory, or on NVMe when memory was too small.

Role: the directories, their identity, their accounting. Cheap system calls, made in the caller's thread: a write of
1 MiB to tmpfs takes less than a hop to a thread. A lock keeps a second daemon out.

A file may carry several generations, each a prefix of the next (appending).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import secrets
import shutil
from pathlib import Path

from cachexfs import machine
from cachexfs.adapters.spare import PIECE_BYTES, SMALL_PIECE_BYTES, Spare
from cachexfs.errors import UsageError
from cachexfs.ours import SPILLED

log = logging.getLogger(__name__)

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
SPILL_RESERVE_BYTES = 256 << 20  # left free on NVMe for replicas, manifests and the catalogue's log
LOCK = "lock"
ORPHANS = "orphans"
ORPHAN_SUFFIX = ".orphan"


class Staging:
    """The staging directory of one mount. Not shared between daemons.

    ``used_bytes`` counts allocated pages in memory of all files as of their last change through this object, and what
    was reserved for them. Spare memory comes on top, never beyond ``limit_bytes`` in all. ``spill``: a directory on
    NVMe for what does not fit.
    """

    def __init__(self, directory: str, limit_bytes: int, spill: str | None = None) -> None:
        self.directory = Path(directory)
        self.limit_bytes = limit_bytes
        self._files = self.directory / "files"
        self._files_path = str(self._files)
        self._spill_root = Path(spill) if spill is not None else None
        self._spill: Path | None = None
        self._allocated: dict[str, int] = {}
        self._spilled: dict[str, int] = {}
        self._moving: dict[str, int] = {}  # being copied to NVMe -> bytes that it still holds though it was removed
        self._spare = Spare(self.directory / "spare")
        self.reserved: dict[str, int] = {}  # stage -> bytes that it is still to grow by; ``used_bytes`` has them
        self._ahead_bytes = 0  # given up by the spare, not yet taken by a file
        self._cache_ahead_bytes = 0  # the same, by the page cache
        self.used_bytes = 0
        self.grown_bytes = 0  # all growth in memory since the start
        self.cached_bytes = 0  # all that the page cache grew by through reads, as far as is known
        self.spilled_bytes = 0
        self.spill_limit_bytes = 0  # the size of that file system
        self._lock_fd = -1
        self.store = ""

    def open(self) -> None:
        """Make or adopt the directory. Raises ``UsageError`` when another daemon uses it or it cannot be used."""
        try:
            self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"staging directory {self.directory}: {error.strerror}; choose another with -o staging=DIR"
            ) from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"another daemon uses the staging directory {self.directory}; unmount it first") from None
        self.store = self._identity()
        self._spare.open()
        with os.scandir(self._files) as found:
            for entry in found:
                self.account(entry.name, entry.stat(follow_symlinks=False).st_blocks * 512)
        self._spare.give(self.used_bytes + self._spare.bytes - self.limit_bytes)  # it may have been more before
        self._open_spill()

    def _open_spill(self) -> None:
        """Adopt what this staging directory has spilled; what those before it did went with their memory."""
        if self._spill_root is None:
            return
        try:
            root = self._spill_root
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if root.is_symlink() or root.stat().st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it is a symbolic link, or somebody else's")
            self._spill = root / self.store
            self._spill.mkdir(mode=0o700, exist_ok=True)
            found = os.statvfs(self._spill)
            self.spill_limit_bytes = found.f_blocks * found.f_frsize
            for other in root.iterdir():
                if other != self._spill and SPILLED.fullmatch(other.name):
                    shutil.rmtree(other, ignore_errors=True)
            for name in os.listdir(self._spill):
                if name.endswith(ORPHAN_SUFFIX):
                    continue
                if name in self._allocated or name.endswith(".part"):  # died before the move was complete
                    _unlink(self._spill / name)
                else:
                    self._spilled[name] = 0
                    self.account(name, os.stat(self._spill / name).st_blocks * 512)
        except OSError as error:
            raise UsageError(
                f"directory for spilled files {self._spill_root}: {error.strerror}; choose another with -o nvme=DIR"
            ) from error

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

    # ---- files
    def path(self, stage: str) -> str:
        """Path of a staged file."""
        return f"{self._spill if stage in self._spilled else self._files_path}/{stage}"

    def create(self, stage: str, *, spilled: bool = False) -> int:
        """Descriptor, for reading and writing, of a new empty staged file; ``spilled``: on NVMe."""
        directory, table = (self._spill, self._spilled) if spilled else (self._files, self._allocated)
        assert directory is not None
        if not spilled:
            self._spare.look(self.limit_bytes - self.used_bytes - self._spare.bytes)
        # No ``Path``: that keeps the parts of every one in a table of its own.
        fd = os.open(f"{directory}/{stage}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        table[stage] = 0
        return fd

    def open_file(self, stage: str, *, write: bool = False) -> int:
        """Descriptor of a staged file. Raises ``FileNotFoundError``."""
        return os.open(self.path(stage), (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)

    def has(self, stage: str) -> bool:
        """Whether this node holds a staged file of that key."""
        return stage in self._allocated or stage in self._spilled

    def stages(self) -> list[str]:
        """Keys of all staged files."""
        return [*self._allocated, *self._spilled]

    def size(self, stage: str) -> int:
        """Length of a staged file in bytes; 0 when somebody has removed it."""
        try:
            return os.stat(self.path(stage)).st_size
        except FileNotFoundError:
            return 0

    def exchange(self, one: str, two: str) -> None:
        """Let two staged files have each other's key, in one step."""
        old, new = os.fsencode(self.path(one)), os.fsencode(self.path(two))
        if _LIBC.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_EXCHANGE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), self.path(one))
        for stage in (one, two):
            self.account(stage, os.stat(self.path(stage)).st_blocks * 512)

    def rename(self, old: str, new: str) -> None:
        """Give a staged file another key, in one step."""
        path = Path(self.path(old))
        os.rename(path, path.with_name(new))
        self.used_bytes -= self.reserved.pop(old, 0)  # it is whole
        table = self._spilled if old in self._spilled else self._allocated
        table[new] = table.pop(old)

    def remove(self, stage: str) -> None:
        """Give a staged file's memory back, or keep it for the next; open descriptors go on reading."""
        self.used_bytes -= self.reserved.pop(stage, 0)
        path = Path(self.path(stage))
        if stage in self._spilled:
            self.spilled_bytes -= self._spilled.pop(stage)
            _unlink(path)
            return
        allocated_bytes = self._allocated.pop(stage, 0)
        if stage in self._moving:  # who copies it has it open: its memory is free when the move has ended
            self._moving[stage] = allocated_bytes
            path.unlink(missing_ok=True)
            return
        self.used_bytes -= allocated_bytes
        room = self.limit_bytes - self.used_bytes - self._spare.bytes
        if room < PIECE_BYTES or not self._spare.take(path, room):
            path.unlink(missing_ok=True)

    def set_aside(self, stage: str) -> None:
        """Keep a staged file whose name nobody knows any more: under ``orphans``, where nothing removes it."""
        path, orphans = Path(self.path(stage)), self.directory / ORPHANS
        if stage in self._spilled:
            os.rename(path, path.with_name(stage + ORPHAN_SUFFIX))
            self.spilled_bytes -= self._spilled.pop(stage)
            return
        orphans.mkdir(mode=0o700, exist_ok=True)
        os.rename(path, orphans / stage)
        self.used_bytes -= self._allocated.pop(stage, 0)

    def orphans(self) -> list[str]:
        """What was set aside, by this daemon or an earlier one."""
        found: list[Path] = []
        if self._spill is not None and self._spill.is_dir():  # somebody may have removed it
            found = [path for path in self._spill.iterdir() if path.name.endswith(ORPHAN_SUFFIX)]
        orphans = self.directory / ORPHANS
        return sorted(path.name for path in [*found, *(orphans.iterdir() if orphans.is_dir() else ())])

    # ---- accounting
    def account(self, stage: str, allocated_bytes: int) -> None:
        """Note how much a staged file takes now."""
        if stage in self._spilled:
            self.spilled_bytes += allocated_bytes - self._spilled[stage]
            self._spilled[stage] = allocated_bytes
            return
        grown = allocated_bytes - self._allocated.get(stage, 0)
        self.used_bytes += grown
        if grown > 0:
            expected_bytes = min(grown, self.reserved.get(stage, 0))
            if expected_bytes:
                self.reserved[stage] -= expected_bytes
                self.used_bytes -= expected_bytes
            self.grown_bytes += grown
            self._ahead_bytes = max(0, self._ahead_bytes - grown)
        self._allocated[stage] = allocated_bytes

    def reserve(self, stage: str, length: int) -> None:
        """A staged file is to grow by ``length`` bytes from now on, which takes a while: nobody else gets that room.
        Until it gets another key, or is removed."""
        if stage in self._allocated:
            self.used_bytes += length - self.reserved.get(stage, 0)
            self.reserved[stage] = length

    def recount(self, stage: str, fd: int) -> None:
        """Note the room of an open staged file after it changed."""
        self.account(stage, os.fstat(fd).st_blocks * 512)

    @property
    def spare_bytes(self) -> int:
        """Memory of removed files that is kept for the next ones."""
        return self._spare.bytes

    def spare_room_bytes(self) -> int:
        """How much more may be kept: within ``limit_bytes``, and leaving the node as much as it takes."""
        self._spare.look(self.limit_bytes - self.used_bytes - self._spare.bytes)
        room = self.limit_bytes - self.used_bytes - self._spare.bytes
        return max(0, min(room, machine.available_memory_bytes() // 2))

    def spare_begin(self) -> tuple[int, int]:
        """(descriptor, number) of a new spare file, to be filled."""
        return self._spare.begin()

    def spare_end(self, number: int, length: int) -> None:
        """The first ``length`` bytes of it have been touched: they are spare memory now, as far as there is room."""
        self._spare.end(number, max(0, min(length, self.limit_bytes - self.used_bytes - self._spare.bytes)))

    def make_ready(self, length: int) -> None:
        """Files are about to grow by ``length`` bytes: spare memory for it becomes free."""
        over = self.used_bytes + self._spare.bytes + length - self.limit_bytes
        if self._spare.open_bytes and over + self._spare.open_bytes > 0:
            self._spare.forget_open()
        if self._spare.bytes and length > self._ahead_bytes:
            self._ahead_bytes += self._spare.give(max(length - self._ahead_bytes, over, PIECE_BYTES))

    def make_cache_ready(self, length: int) -> None:
        """Who reads ``length`` bytes reads on: spare memory becomes free for as much again in the page cache, which
        takes it before it asks for the bytes."""
        self.cached_bytes += length
        self._cache_ahead_bytes = max(0, self._cache_ahead_bytes - length)
        if self._spare.bytes and self._cache_ahead_bytes < length:
            self._cache_ahead_bytes += self._spare.give(length - self._cache_ahead_bytes, SMALL_PIECE_BYTES)

    def forget_ready(self) -> None:
        """Nobody grows now: what became free and was not used is not warm any more."""
        self._ahead_bytes = 0

    def free_bytes(self, wanted_bytes: int) -> int:
        """What the kernel lets files in memory grow by; spare memory is given up until it is ``wanted_bytes``."""
        found = os.statvfs(self._files)
        free = found.f_bavail * found.f_frsize
        if free >= wanted_bytes:
            return free
        self._spare.forget_open()
        return free + self._spare.give(wanted_bytes - free)

    # ---- spill
    def is_spilled(self, stage: str) -> bool:
        """Whether a staged file lies on NVMe."""
        return stage in self._spilled

    def spill_room_bytes(self) -> int:
        """What may still be spilled; 0 without NVMe. Raises ``OSError``."""
        if self._spill is None:
            return 0
        found = os.statvfs(self._spill)
        return max(0, found.f_bavail * found.f_frsize - SPILL_RESERVE_BYTES)

    def spill_begin(self, stage: str) -> int:
        """Descriptor of an empty file on NVMe that is to take a staged file's bytes. Raises ``OSError``."""
        assert self._spill is not None
        path = self._spill / f"{stage}.part"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._moving[stage] = 0
        return fd

    def spill_end(self, stage: str, *, keep: bool) -> None:
        """The bytes are there: from now on the staged file is the one on NVMe (or not, and it stays where it was)."""
        assert self._spill is not None
        part = self._spill / f"{stage}.part"
        if not keep:
            self.used_bytes -= self._moving.pop(stage, 0)
            _unlink(part)
            return
        allocated_bytes = os.stat(part).st_blocks * 512  # what fails may fail now, not between the two files
        os.rename(part, self._spill / stage)
        self._moving.pop(stage, None)
        self.remove(stage)
        self._spilled[stage] = 0
        self.account(stage, allocated_bytes)


def _unlink(path: Path) -> None:
    """Remove a file from NVMe. One that is read-only or fails keeps it: whoever removes a file is not to suffer for
    that, and the next start on this directory finds that nothing needs it."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("left behind on NVMe: %s: %s", path, error.strerror)
