"""The mtime of a staging file, and what it tells.

Role: the kernel changes the staging files of passed handles without asking; their size and mtime say that it did. An
mtime that an application has set is noted beside it. Called by whoever opens, changes or adopts one.
"""

from __future__ import annotations

import contextlib
import os

TIME_XATTR = "user.cachexfs.mtime"  # of a staging file: its stamp when an mtime was set, and that mtime, both in ns


def look(fd: int) -> tuple[int, int]:
    """(size, mtime in ns) of a staging file: what tells that the kernel has changed it."""
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns


def mark(fd: int) -> tuple[int, int]:
    """``look``, and make sure that every later write shows: the kernel's stamps are coarse, two writes within some
    milliseconds get the same one. So the file is given a stamp that no write gives it."""
    size, stamp_ns = look(fd)
    if _noted(fd, stamp_ns) is not None:
        return size, stamp_ns  # it has such a one
    try:
        os.utime(fd, ns=(stamp_ns, stamp_ns - 1))
    except PermissionError:  # a file without a name may have become somebody else's
        return size, stamp_ns
    return size, stamp_ns - 1


def keep_time(fd: int, mtime_ns: int) -> tuple[int, int]:
    """``mark``, and note an mtime that the catalogue does not keep for these bytes: the next daemon finds it there.

    It holds until the next write, which moves the stamp.
    """
    size, stamp_ns = mark(fd)
    with contextlib.suppress(OSError):  # somebody else's, NVMe is read-only, or a tmpfs before Linux 6.6
        os.setxattr(fd, TIME_XATTR, b"%d %d" % (stamp_ns, mtime_ns))
    return size, stamp_ns


def kept_time(fd: int) -> int:
    """The mtime in ns of bytes that a dead daemon has not published: as it was set, or that of the last write."""
    _, stamp_ns = look(fd)
    noted_ns = _noted(fd, stamp_ns)
    return stamp_ns if noted_ns is None else noted_ns


def has_kept(fd: int) -> bool:
    """Whether an mtime was set since the last write."""
    return _noted(fd, look(fd)[1]) is not None


def _noted(fd: int, stamp_ns: int) -> int | None:
    try:
        at_ns, set_ns = map(int, os.getxattr(fd, TIME_XATTR).split())
    except (OSError, ValueError):
        return None
    return set_ns if at_ns == stamp_ns else None
