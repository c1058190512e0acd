"""Digests of a file on disk.

Role: reads 1 MiB pieces into one buffer and hashes them; read and hash both release the GIL. Blocking: call it
in a thread. Rates: ``bench/bench_peer.py``.
"""

from __future__ import annotations

import os

from cachexfs.core.digest import BLOCK_BYTES, FileDigest
from cachexfs.errors import CorruptError


def digest_file(path_or_fd: str | bytes | os.PathLike[str] | int, size_bytes: int) -> tuple[bytes, bytes, list[bytes]]:
    """(digest, tree digest, block digests) of the first ``size_bytes`` of a file.

    A descriptor's position is neither used nor moved. Raises ``OSError``; ``CorruptError`` when the file is shorter.
    """
    if isinstance(path_or_fd, int):
        return _digest_fd(path_or_fd, size_bytes)
    fd = os.open(path_or_fd, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _digest_fd(fd, size_bytes)
    finally:
        os.close(fd)


def _digest_fd(fd: int, size_bytes: int) -> tuple[bytes, bytes, list[bytes]]:
    digest = FileDigest()
    buffer = memoryview(bytearray(min(BLOCK_BYTES, max(size_bytes, 1))))
    offset = 0
    while offset < size_bytes:
        want = min(BLOCK_BYTES, size_bytes - offset)
        read_exactly(fd, buffer[:want], offset)
        digest.update(buffer[:want])
        offset += want
    found = digest.result()
    return found.file, found.tree, list(found.blocks)


def read_exactly(fd: int, view: memoryview, offset: int) -> None:
    """Fill ``view`` from ``offset`` of a file. Raises ``CorruptError`` when the file ends before."""
    filled = 0
    while filled < len(view):
        count = os.preadv(fd, [view[filled:]], offset + filled)
        if count == 0:
            raise CorruptError(f"file ends at byte {offset + filled}, {len(view) - filled} bytes early")
        filled += count
