"""A pyfuse3 mount whose write handler throws the bytes away: the ceiling of any handler.

    python bench/discard_mount.py MOUNTPOINT

Any name exists as soon as it is created; sizes are remembered, bytes are not. Opens are direct_io, as a write-only
open of CacheX FS is. Ends when it is unmounted.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError


class Discard(pyfuse3.Operations):  # type: ignore[misc]
    """Files of one directory: inode numbers by name, sizes by inode number."""

    def __init__(self) -> None:
        super().__init__()
        self.inos: dict[bytes, int] = {}
        self.sizes: dict[int, int] = {}

    def entry(self, ino: int) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = ino
        is_root = ino == pyfuse3.ROOT_INODE
        entry.st_mode = stat.S_IFDIR | 0o755 if is_root else stat.S_IFREG | 0o644
        entry.st_nlink, entry.st_uid, entry.st_gid = 1, os.getuid(), os.getgid()
        entry.st_size = self.sizes.get(ino, 0)
        entry.st_blksize = 1 << 17
        entry.entry_timeout = entry.attr_timeout = 60.0
        return entry

    async def getattr(self, inode, ctx):
        return self.entry(inode)

    async def setattr(self, inode, attr, fields, fh, ctx):
        if fields.update_size:
            self.sizes[inode] = attr.st_size
        return self.entry(inode)

    async def lookup(self, parent_inode, name, ctx):
        if name not in self.inos:
            raise FUSEError(errno.ENOENT)
        return self.entry(self.inos[name])

    async def create(self, parent_inode, name, mode, flags, ctx):
        ino = self.inos[name] = 2 + len(self.sizes)
        self.sizes[ino] = 0
        return FileInfo(fh=ino, direct_io=True), self.entry(ino)

    async def open(self, inode, flags, ctx):
        return FileInfo(fh=inode, direct_io=True)

    async def write(self, fh, off, buf):
        self.sizes[fh] = max(self.sizes[fh], off + len(buf))
        return len(buf)

    async def flush(self, fh):
        pass

    async def release(self, fh):
        pass

    async def unlink(self, parent_inode, name, ctx):
        self.inos.pop(name, None)


def main() -> None:
    pyfuse3.init(Discard(), sys.argv[1], {*pyfuse3.default_options, "fsname=discard"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
