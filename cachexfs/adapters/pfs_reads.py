"""The reading calls of a PFS child process: stats, listings, bytes, extended attributes.

Role: plain functions as in ``pfs_ops``; nothing here changes the PFS. Concurrency: none. A file that is read is
compared, after the last byte, with what the caller knows of it: what somebody has put in its place is not taken for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable

from cachexfs.adapters import pfs_copy
from cachexfs.adapters.pfs_attrs import StatRow, row_of, stat_row, user_xattrs
from cachexfs.adapters.pfs_dir import LOOKS, PfsDir, RootError, names_in
from cachexfs.adapters.pfs_ops import EXAMINE, Context, certain
from cachexfs.core.landed import CHANGED, Landed
from cachexfs.core.reserved import BESIDE_PREFIX, STATE_DIR

PAGE_ENTRIES = 500
READ_BYTES_MAX = 4 << 20

Expected = tuple[int, int, int | None] | list[int | None] | None  # ``Landed`` as it comes over the wire


@certain
def lstat(context: Context, path: bytes) -> StatRow:
    """See ``Pfs.stat``."""
    with context.open(mutating=False) as pfs:
        if not path:
            return row_of(os.fstat(pfs.root))
        parent, last = pfs.parent(path)
        return stat_row(last, parent)


def stats(context: Context, paths: list[bytes]) -> list[StatRow | int | None]:
    """See ``Pfs.stats``: "not there" as ``certain`` says it."""
    with context.open(mutating=False) as pfs:
        rows = [_lstat_or_errno(pfs, path) for path in paths]
        for _ in range(LOOKS - 1):
            if errno.ENOENT in rows:
                pfs.make_sure()
                rows = [_lstat_or_errno(pfs, paths[i]) if row == errno.ENOENT else row for i, row in enumerate(rows)]
                pfs.make_sure()
        return [None if row == errno.ENOENT else row for row in rows]


def _lstat_or_errno(pfs: PfsDir, path: bytes) -> StatRow | int:
    try:
        parent, last = pfs.parent(path)
        return stat_row(last, parent)
    except RootError:
        raise
    except OSError as error:
        return error.errno or errno.EIO


@certain
def check(context: Context, path: bytes, size: int, digest: bytes) -> StatRow | None:
    """See ``Pfs.check``."""
    with context.open(mutating=False) as pfs:
        fd = _open_file(pfs, path)
        before = row_of(os.fstat(fd))
        parent, last = pfs.parent(path)
        is_same = pfs_copy.digest_of(last, parent, context.monitor) == (size, digest)
        after = row_of(os.fstat(fd))
        return after if is_same and (before[4:6], before[9]) == (after[4:6], after[9]) else None


def listing(context: Context, path: bytes) -> None:
    """See ``Pfs.listing``; sent in pages. A name that is gone when it is examined is left out."""
    with context.open(mutating=False) as pfs:
        pfs.make_sure()
        fd = pfs.directory(path)
        rows: list[tuple[bytes, StatRow]] = []
        for entry in os.scandir(pfs.keep(os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd))):
            name = os.fsencode(entry.name)
            if name.startswith(BESIDE_PREFIX) or (not path and name == STATE_DIR):
                continue
            with contextlib.suppress(FileNotFoundError):
                rows.append((name, stat_row(name, fd)))
            if len(rows) >= PAGE_ENTRIES:
                context.monitor.page(rows)
                rows = []
        pfs.make_sure()
        context.monitor.page(rows)


def xattrs(context: Context, path: bytes) -> None:
    """See ``Pfs.xattrs``; sent in pages."""
    with context.open(mutating=False) as pfs:
        fd = pfs.directory(path)
        rows: list[tuple[bytes, list[tuple[bytes, bytes]]]] = []
        for number, name in enumerate(names_in(fd)):
            if number % PAGE_ENTRIES == PAGE_ENTRIES - 1:
                context.monitor.page(rows)  # empty ones, too: a sign of life
                rows = []
            with contextlib.suppress(OSError):
                file = os.open(name, EXAMINE, dir_fd=fd)
                try:
                    kind = stat.S_IFMT(os.fstat(file).st_mode)
                    found = user_xattrs(f"/proc/self/fd/{file}") if kind in (stat.S_IFREG, stat.S_IFDIR) else {}
                finally:
                    os.close(file)
                if found:
                    rows.append((name, list(found.items())))
        context.monitor.page(rows)


@certain
def read(context: Context, path: bytes, offset: int, length: int, expected: Expected = None) -> bytes:
    """See ``Pfs.read``; at most ``READ_BYTES_MAX``. EINVAL for anything but a regular file."""
    with context.open(mutating=False) as pfs:
        fd = _open_file(pfs, path)
        pieces = []
        left = min(length, READ_BYTES_MAX)
        while left and (piece := os.pread(fd, left, offset)):
            pieces.append(piece)
            offset, left = offset + len(piece), left - len(piece)
        _make_sure_of(fd, path, expected)
        return b"".join(pieces)


@certain
def fetch(context: Context, path: bytes, offset: int, length: int, target: str, expected: Expected = None) -> int:
    """See ``Pfs.fetch``. EINVAL for anything but a regular file."""
    with context.open(mutating=False) as pfs:
        source = _open_file(pfs, path)
        copied = pfs.keep(os.open(target, os.O_WRONLY | os.O_CLOEXEC))
        os.lseek(copied, offset, os.SEEK_SET)
        done = 0
        while done < length and (count := os.sendfile(copied, source, offset + done, length - done)):
            done += count
        _make_sure_of(source, path, expected)
        return done


def _make_sure_of(fd: int, path: bytes, expected: Expected = None) -> None:
    """Raise OSError (CHANGED) unless an open file is the expected one, and has not been changed up to now."""
    if expected is not None:
        found = os.fstat(fd)
        if not Landed(*expected).is_same(found.st_ino, found.st_size, found.st_mtime_ns):
            raise OSError(CHANGED, "it is not the file that landed there", os.fsdecode(path))


def _open_file(pfs: PfsDir, path: bytes) -> int:
    parent, last = pfs.to_read(path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = pfs.keep(os.open(last, flags, dir_fd=parent))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fsdecode(path))
    return fd


def statvfs(context: Context) -> tuple[int, int, int, int, int]:
    """(block size, blocks, blocks available to us, files, free files)."""
    with context.open(mutating=False) as pfs:
        found = os.fstatvfs(pfs.root)
        return found.f_frsize, found.f_blocks, found.f_bavail, found.f_files, found.f_favail


OPERATIONS: dict[str, Callable[..., object]] = {
    "stat": lstat,
    "stats": stats,
    "check": check,
    "listing": listing,
    "xattrs": xattrs,
    "read": read,
    "fetch": fetch,
    "statvfs": statvfs,
}
