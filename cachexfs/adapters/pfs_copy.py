"""Copying a staged file to the PFS: as few copies as the kernel allows, paced, with progress.

Role: used by ``prepare`` and by ``land`` on EXDEV, inside a PFS child process. Concurrency: none.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable
from typing import Protocol

CHUNK_BYTES = 4 << 20
REPORT_BYTES = 256 << 20
REPORT_S = 1.0
#: Writeback of a chunk starts as soon as it is written, and is waited for this much later: the disk works
#: while we copy, and the final fsync has little left to do. See bench/bench_drain.py.
WINDOW_BYTES = 64 << 20
#: A paced copy moves in pieces of about this long, so that progress is seen and a new rate is taken up.
PACED_PIECE_S = 0.25
PACED_PIECE_BYTES_MIN = 64 << 10
DIGEST_BYTES = 16

_SYNC_WAIT_BEFORE, _SYNC_WRITE, _SYNC_WAIT_AFTER = 1, 2, 4
_NOT_HERE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)


class Monitor(Protocol):
    """What a copy tells and asks while it runs."""

    def progress(self, copied_bytes: int) -> None:
        """So many bytes are copied."""
        ...

    def rate(self) -> float:
        """Bytes a second that this copy may use now; 0 is no limit. Cheap."""
        ...


class Pacer:
    """Sleeps so that a copy stays within ``Monitor.rate`` (bytes/s); a change of the rate starts afresh."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._rate = 0.0
        self._start_s = 0.0
        self._bytes = 0

    def piece_bytes(self) -> int:
        """How much to copy next."""
        rate = self._monitor.rate()
        if rate != self._rate:
            self._rate, self._start_s, self._bytes = rate, time.monotonic(), 0
        if not rate:
            return CHUNK_BYTES
        return int(min(CHUNK_BYTES, max(PACED_PIECE_BYTES_MIN, rate * PACED_PIECE_S)))

    def copied(self, count: int) -> None:
        """Sleep as long as ``count`` more bytes demand, at most a second at a time (then the rate is asked again)."""
        self._bytes += count
        while self._rate:
            wait_s = self._start_s + self._bytes / self._rate - time.monotonic()
            if wait_s <= 0:
                return
            time.sleep(min(wait_s, REPORT_S))
            if wait_s > REPORT_S:
                self._monitor.progress(-1)  # alive, only slowed down
                if self._monitor.rate() != self._rate:
                    return


class Writeback:
    """Starts and bounds the writeback of a file that is being written, through sync_file_range(2).

    An error of it is an error of writeback, which the kernel reports once: final, like one of fsync.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waited = 0
        libc = ctypes.CDLL(None, use_errno=True)
        self._call: Callable[..., int] | None = getattr(libc, "sync_file_range", None)

    def wrote(self, start: int, end: int) -> None:
        """Bytes [start, end) have been written."""
        self._sync(start, end - start, _SYNC_WRITE)
        old = end - WINDOW_BYTES
        if old > self._waited:
            self._sync(self._waited, old - self._waited, _SYNC_WAIT_BEFORE | _SYNC_WRITE | _SYNC_WAIT_AFTER)
            self._waited = old

    def _sync(self, offset: int, length: int, flags: int) -> None:
        if self._call is None or self._call(self._fd, ctypes.c_int64(offset), ctypes.c_int64(length), flags) == 0:
            return
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ESPIPE):
            self._call = None
        elif code != errno.EINTR:
            raise OSError(code, f"writeback: {os.strerror(code)}")


def _by_copy_range(source: int, target: int, offset: int, count: int) -> int:
    return os.copy_file_range(source, target, count, offset, offset)


def _by_sendfile(source: int, target: int, offset: int, count: int) -> int:
    return os.sendfile(target, source, offset, count)  # the target's own position is at ``offset``


class _ByBuffer:
    def __init__(self) -> None:
        self._buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))

    def __call__(self, source: int, target: int, offset: int, count: int) -> int:
        got = os.preadv(source, [self._buffer[:count]], offset)
        return os.pwrite(target, self._buffer[:got], offset) if got else 0


def copy(source: int, target: int, size: int, monitor: Monitor) -> None:
    """Copy ``size`` bytes from the start of ``source`` to the empty ``target``.

    Tries copy_file_range, sendfile, read and write, in this order, and goes on with the next where one is not
    supported. Raises OSError; EIO when the source is shorter than ``size``.
    """
    ways: list[Callable[[int, int, int, int], int]] = [_by_copy_range, _by_sendfile, _ByBuffer()]
    pacer, writeback = Pacer(monitor), Writeback(target)
    done, reported, reported_s = 0, 0, time.monotonic()
    while done < size:
        try:
            count = ways[0](source, target, done, min(pacer.piece_bytes(), size - done))
        except OSError as error:
            if len(ways) == 1 or error.errno not in _NOT_HERE:
                raise
            count = 0
        if count == 0:
            if len(ways) == 1:
                raise OSError(errno.EIO, f"the staged file ends at {done} of {size} bytes")
            del ways[0]
            os.lseek(target, done, os.SEEK_SET)
            continue
        writeback.wrote(done, done + count)
        done += count
        now_s = time.monotonic()
        if done - reported >= REPORT_BYTES or now_s - reported_s >= REPORT_S:
            monitor.progress(done)
            reported, reported_s = done, now_s
        pacer.copied(count)


def check_digest(name: bytes, dir_fd: int, size: int, digest: bytes, monitor: Monitor) -> None:
    """Read a file back and compare its xxh3_128 ``digest``. Raises OSError (EIO) when size or digest differ."""
    done, found = digest_of(name, dir_fd, monitor)
    if done != size or found != digest:
        raise OSError(errno.EIO, f"read back from the PFS: {done} of {size} bytes, digest {found.hex()}")


def digest_of(name: bytes, dir_fd: int, monitor: Monitor) -> tuple[int, bytes]:
    """Length and xxh3_128 of a file, read past the page cache as far as the kernel obliges."""
    import xxhash

    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        state, buffer, done = xxhash.xxh3_128(), memoryview(bytearray(CHUNK_BYTES)), 0
        reported_s = time.monotonic()
        while count := os.readv(fd, [buffer]):
            state.update(buffer[:count])
            done += count
            if time.monotonic() - reported_s >= REPORT_S:
                monitor.progress(done)
                reported_s = time.monotonic()
    finally:
        os.close(fd)
    return done, state.digest()
