"""Backing files: what the kernel reads and writes itself for a file handle.

Role: probes whether this machine can, checks each descriptor that the daemon offers, registers it with the
kernel (ioctl FUSE_DEV_IOC_BACKING_OPEN, Linux 6.9, CAP_SYS_ADMIN), and gives it back when no open uses it.
Concurrency: the supervisor's one thread. Called by ``control`` (register) and ``session`` (opens, releases).

The kernel opens the *path* behind a registered descriptor again, with the application's flags and without a
permission check. So ``allows`` compares those flags with how the daemon itself had opened the file: a daemon
that could only read a file never gives anybody the right to write it.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from dataclasses import dataclass, field

from .privileges import has_sys_admin

_BACKING_OPEN = 0x4010E501  # _IOW(229, 1, struct fuse_backing_map)
_BACKING_CLOSE = 0x4004E502  # _IOW(229, 2, uint32_t)
_BACKING_MAP = struct.Struct("<iIQ")
_O_PATH = 0o10000000
#: PROC_USER_INIT_INO: the kernel asks for CAP_SYS_ADMIN of the machine itself.
_INITIAL_USER_NAMESPACE = 0xEFFFFFFD
#: Registrations that may exist at once: each pins an open file in the kernel.
BACKINGS_MAX = 1 << 17


class RefusedError(Exception):
    """A descriptor that the daemon offered is not one that may back a file."""


def probe(mode: str) -> str:
    """Why passthrough cannot be used here; the empty string when it can (the INIT answer may still say no)."""
    if mode == "off":
        return "passthrough=off"
    release = os.uname().release
    major, minor = (int("".join(c for c in part if c.isdigit()) or 0) for part in release.split(".")[:2])
    if (major, minor) < (6, 9):
        return f"kernel {release} is older than 6.9"
    if not has_sys_admin():
        return "no CAP_SYS_ADMIN: mount as root (with user=NAME for a user)"
    if os.stat("/proc/self/ns/user").st_ino != _INITIAL_USER_NAMESPACE:
        return "root of a container (a user namespace) may not: mount outside of it"
    return ""


@dataclass(slots=True)
class _Backing:
    backing_id: int
    fhs: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Registered:
    file: tuple[int, int]
    access: int
    opens: int = 0


class Backings:
    """All registrations of one mount. One backing id for a file, however many handles it has."""

    def __init__(self, device_fd: int, allowed_devices: frozenset[int]) -> None:
        self._device_fd = device_fd
        self._allowed = allowed_devices
        self._files: dict[tuple[int, int], _Backing] = {}
        self._by_fh: dict[int, _Registered] = {}

    def __len__(self) -> int:
        return len(self._by_fh)

    def register(self, fh: int, fd: int) -> int:
        """Back handle ``fh`` with the open file ``fd``; the backing id (positive).

        ``RefusedError`` when the descriptor fails a check, ``OSError`` when the kernel refuses it. Registering
        the same handle again with the same file is allowed, with another file only when no open uses it.
        """
        info, access = self._check(fd)
        file = (info.st_dev, info.st_ino)
        known = self._by_fh.get(fh)
        if known is not None:
            if known.file == file:
                known.access = access
                return self._files[file].backing_id
            if known.opens:
                raise RefusedError("handle is open with another file behind it")
            self._drop(fh)
        if len(self._by_fh) >= BACKINGS_MAX:
            raise RefusedError("too many registrations")
        backing = self._files.get(file)
        if backing is None:
            backing = _Backing(self._backing_open(fd))
            self._files[file] = backing
        backing.fhs.add(fh)
        self._by_fh[fh] = _Registered(file, access)
        return backing.backing_id

    def _backing_open(self, fd: int) -> int:
        """The kernel opens the file anew for each open and takes only its place from what is registered. So that is
        opened for reading: the daemon can then tell whether any writer, or map, has the file."""
        try:
            place = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            place = os.dup(fd)
        try:
            backing_id: int = fcntl.ioctl(self._device_fd, _BACKING_OPEN, bytearray(_BACKING_MAP.pack(place, 0, 0)))
            return backing_id
        finally:
            os.close(place)

    def _check(self, fd: int) -> tuple[os.stat_result, int]:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise RefusedError("not a regular file")
        if info.st_dev not in self._allowed:
            raise RefusedError("not on a filesystem that was given as --backing-dir")
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if flags & _O_PATH or flags & os.O_APPEND:
            raise RefusedError("opened with O_PATH or O_APPEND")
        return info, flags & os.O_ACCMODE

    def allows(self, fh: int, open_flags: int) -> int:
        """The backing id for an open of ``fh`` with these open(2) flags, or 0: not registered, not permitted."""
        known = self._by_fh.get(fh)
        if known is None:
            return 0
        wanted = open_flags & os.O_ACCMODE
        if known.access not in (wanted, os.O_RDWR):
            return 0
        return self._files[known.file].backing_id

    def unused(self, fh: int) -> None:
        """An open of ``fh`` goes another way: what was offered for it must not stay, for it keeps a file's memory."""
        known = self._by_fh.get(fh)
        if known is not None and not known.opens:
            self._drop(fh)

    def file_of(self, fh: int) -> int:
        """The inode number of the file behind ``fh``; 0 when there is none."""
        known = self._by_fh.get(fh)
        return known.file[1] if known is not None else 0

    def opened(self, fh: int) -> None:
        """The kernel was told to pass an open of ``fh`` through."""
        self._by_fh[fh].opens += 1

    def released(self, fh: int) -> None:
        """An open of ``fh`` that was passed through has ended."""
        known = self._by_fh.get(fh)
        if known is not None:
            known.opens = max(0, known.opens - 1)
            if not known.opens:
                self._drop(fh)

    def daemon_gone(self) -> None:
        """Registrations that no open uses belonged to the daemon that died."""
        for fh in [fh for fh, known in self._by_fh.items() if not known.opens]:
            self._drop(fh)

    def _drop(self, fh: int) -> None:
        known = self._by_fh.pop(fh)
        backing = self._files[known.file]
        backing.fhs.discard(fh)
        if not backing.fhs:
            del self._files[known.file]
            try:
                fcntl.ioctl(self._device_fd, _BACKING_CLOSE, struct.pack("<I", backing.backing_id))
            except OSError:
                pass  # the connection has ended: the kernel has closed it already
