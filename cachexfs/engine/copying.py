"""Copying between staging files: holes stay holes, the event loop stays free.

Role: used where a content gets a file of its own (``writing``), moves to NVMe (``spill``) or is taken from a replica
(``content``). Concurrency: a copy of more than a block runs in a thread; who calls sees to it that nobody cuts the
source meanwhile.
"""

from __future__ import annotations

import errno
import os

import trio

from cachexfs.errors import FsError


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
            while done < end:
                done += _copy_piece(source, target, done, end - done)
        if os.fstat(target).st_size < length:
            os.ftruncate(target, length)

    if length <= 1 << 20:
        work()
    else:
        await trio.to_thread.run_sync(work)


def _copy_piece(source: int, target: int, offset: int, length: int) -> int:
    try:
        count = os.copy_file_range(source, target, length, offset, offset)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.lseek(target, offset, os.SEEK_SET)  # between two filesystems, as from memory to NVMe
        count = os.sendfile(target, source, offset, length)
    if count == 0:
        raise FsError(errno.EIO, f"the staged file ends at byte {offset}, {offset + length} were expected")
    return count
