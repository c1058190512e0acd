"""Copying between staging files: holes stay holes, the event loop stays free.

Role: used where a content gets a file of its own (``writing``), moves to NVMe (``spill``) or is taken from a replica
(``content``). Concurrency: a copy of more than a block runs in a thread; who calls sees to it that nobody cuts the
source meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import trio

from cachexfs.errors import FsError

DIRECT_BYTES = 4 << 20


async def copy_bytes(source: int, target: int, length: int) -> None:
    """Copy the first ``length`` bytes between descriptors, holes as holes; in a thread when it is more than a block.

    ``target`` is empty before. Raises EIO when ``source`` is shorter.
    """

    def work() -> None:
        found = os.fstat(source).st_size
        if found < length:
            raise FsError(errno.EIO, f"the staged file ends at byte {found}, {length} were expected")
        done = 0
        while done < length:
            try:
                done = os.lseek(source, done, os.SEEK_DATA)
                end = min(length, os.lseek(source, done, os.SEEK_HOLE))
            except OSError as error:
                if error.errno != errno.ENXIO:  # no data behind this
                    raise
                break
            done = _copy_data(source, target, done, end)
        if os.fstat(target).st_size < length:
            os.ftruncate(target, length)

    if length <= 1 << 20:
        work()
    else:
        await trio.to_thread.run_sync(work)


def write_all(fd: int, data: bytes, offset: int) -> None:
    """pwrite of all of it: memory or a disk that is nearly full takes a part at first. Raises ``OSError``."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], offset + done)


def _copy_data(source: int, target: int, offset: int, end: int) -> int:
    """Copy bytes that are no hole; returns ``end``."""
    try:
        while offset < end:
            offset += _some(os.copy_file_range(source, target, end - offset, offset, offset), offset, end)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        offset = _copy_direct(source, target, offset, end)
        os.lseek(target, offset, os.SEEK_SET)
        while offset < end:
            offset += _some(os.sendfile(target, source, offset, end - offset), offset, end)
    return offset


def _copy_direct(source: int, target: int, offset: int, end: int) -> int:
    """Copy whole pages around the target's page cache, where it can do that; returns up to where.

    From one filesystem to another is from memory to NVMe, when memory is short: the cache would take as much again.
    """
    whole, flags = end - end % mmap.PAGESIZE, fcntl.fcntl(target, fcntl.F_GETFL)
    if offset % mmap.PAGESIZE or offset >= whole:
        return offset
    try:
        fcntl.fcntl(target, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, DIRECT_BYTES) as pages, memoryview(pages) as view:
            while offset < whole:
                with view[: min(DIRECT_BYTES, whole - offset)] as piece:
                    read = _some(os.preadv(source, [piece], offset), offset, end)
                with view[:read] as piece:
                    offset += os.pwrite(target, piece, offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        fcntl.fcntl(target, fcntl.F_SETFL, flags)
    return offset


def _some(count: int, offset: int, end: int) -> int:
    if count == 0:
        raise FsError(errno.EIO, f"the staged file ends at byte {offset}, {end} were expected")
    return count
