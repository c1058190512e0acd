"""A loop-back FUSE filesystem that hangs or fails on command: the PFS of the tests.

``python faultfs.py BACKING MOUNTPOINT CONTROL``. While CONTROL holds a file ``hang-OP``, operation OP waits *before* it
is carried out (so it is late, not lost), and ``seen-OP`` appears when one begins to wait; ``fail-OP`` holds an errno
that OP answers. OP is a handler's name, or one with ``:`` and a file name to mean that name only. The kernel
leaves a caller whose request has been taken in D state: SIGKILL does nothing to it, as with a real shared filesystem.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pyfuse3
import trio

POLL_S = 0.01


class FaultFs(pyfuse3.Operations):
    supports_dot_lookup = True
    enable_writeback_cache = False

    def __init__(self, backing: Path, control: Path) -> None:
        super().__init__()
        self._control = control
        self._fds = {pyfuse3.ROOT_INODE: os.open(backing, os.O_PATH | os.O_DIRECTORY)}
        self._names: dict[int, bytes] = {}

    async def _gate(self, op: str, name: bytes = b"") -> None:
        keys = [op, f"{op}:{os.fsdecode(name).partition('~')[0]}"]
        for key in keys:
            if (self._control / f"fail-{key}").exists():
                raise pyfuse3.FUSEError(int((self._control / f"fail-{key}").read_text()))
        seen = False
        while any((self._control / f"hang-{key}").exists() for key in keys):
            if not seen:
                (self._control / f"seen-{op}").touch()
                seen = True
            await trio.sleep(POLL_S)

    def _path(self, inode: int) -> str:
        return f"/proc/self/fd/{self._fds[inode]}"

    def _entry(self, found: os.stat_result, *, root: bool = False) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        for name in ("mode", "nlink", "uid", "gid", "rdev", "size", "atime_ns", "mtime_ns", "ctime_ns"):
            setattr(entry, f"st_{name}", getattr(found, f"st_{name}"))
        entry.st_ino = pyfuse3.ROOT_INODE if root else found.st_ino
        entry.st_blksize, entry.st_blocks = 4096, found.st_blocks
        entry.entry_timeout = entry.attr_timeout = 0
        return entry

    def _known(self, parent: int, name: bytes) -> pyfuse3.EntryAttributes:
        with _errors():
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._fds[parent])
        found = os.fstat(fd)
        if found.st_ino in self._fds:
            os.close(fd)
        else:
            self._fds[found.st_ino] = fd
        self._names[found.st_ino] = name
        return self._entry(found)

    async def lookup(self, parent, name, ctx):
        await self._gate("lookup", name)
        return self._known(parent, name)

    async def getattr(self, inode, ctx):
        await self._gate("getattr")
        return self._entry(os.fstat(self._fds[inode]), root=inode == pyfuse3.ROOT_INODE)

    async def setattr(self, inode, attr, fields, fh, ctx):
        await self._gate("setattr", self._names.get(inode, b""))
        path = self._path(inode)
        with _errors():
            if fields.update_size:
                os.truncate(path, attr.st_size)
            if fields.update_uid or fields.update_gid:
                uid, gid = attr.st_uid if fields.update_uid else -1, attr.st_gid if fields.update_gid else -1
                os.chown(path, uid, gid)
            if fields.update_mode:
                os.chmod(path, attr.st_mode & 0o7777)
            if fields.update_mtime or fields.update_atime:
                now = os.fstat(self._fds[inode])
                atime_ns = attr.st_atime_ns if fields.update_atime else now.st_atime_ns
                os.utime(path, ns=(atime_ns, attr.st_mtime_ns if fields.update_mtime else now.st_mtime_ns))
        return self._entry(os.fstat(self._fds[inode]), root=inode == pyfuse3.ROOT_INODE)

    async def mkdir(self, parent, name, mode, ctx):
        await self._gate("mkdir", name)
        with _errors():
            os.mkdir(name, mode & 0o7777, dir_fd=self._fds[parent])
        return self._known(parent, name)

    async def unlink(self, parent, name, ctx):
        await self._gate("unlink", name)
        with _errors():
            os.unlink(name, dir_fd=self._fds[parent])

    async def rmdir(self, parent, name, ctx):
        await self._gate("rmdir", name)
        with _errors():
            os.rmdir(name, dir_fd=self._fds[parent])

    async def rename(self, parent_old, name_old, parent_new, name_new, flags, ctx):
        await self._gate("rename", name_old)
        with _errors():
            os.rename(name_old, name_new, src_dir_fd=self._fds[parent_old], dst_dir_fd=self._fds[parent_new])

    async def link(self, inode, new_parent, new_name, ctx):
        raise pyfuse3.FUSEError(errno.EPERM)  # as many shared filesystems

    async def create(self, parent, name, mode, flags, ctx):
        await self._gate("create", name)
        with _errors():
            fd = os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW, mode & 0o7777, dir_fd=self._fds[parent])
        return pyfuse3.FileInfo(fh=fd), self._known(parent, name)

    async def open(self, inode, flags, ctx):
        await self._gate("open", self._names.get(inode, b""))
        with _errors():
            return pyfuse3.FileInfo(fh=os.open(self._path(inode), flags & ~os.O_NOFOLLOW))

    async def read(self, fh, off, size):
        await self._gate("read")
        with _errors():
            return os.pread(fh, size, off)

    async def write(self, fh, off, buf):
        await self._gate("write")
        with _errors():
            return os.pwrite(fh, buf, off)

    async def fsync(self, fh, datasync):
        await self._gate("fsync", Path(os.readlink(f"/proc/self/fd/{fh}")).name.encode())
        with _errors():
            os.fsync(fh)

    async def fsyncdir(self, fh, datasync):
        await self._gate("fsyncdir")

    async def flush(self, fh):
        await self._gate("flush")

    async def release(self, fh):
        os.close(fh)

    async def opendir(self, inode, ctx):
        await self._gate("opendir", self._names.get(inode, b""))
        return inode

    async def readdir(self, fh, start_id, token):
        await self._gate("readdir")
        names = sorted(os.listdir(self._path(fh)))
        for index, name in enumerate(names[start_id:], start_id + 1):
            with contextlib.suppress(pyfuse3.FUSEError):
                if not pyfuse3.readdir_reply(token, os.fsencode(name), self._known(fh, os.fsencode(name)), index):
                    return

    async def statfs(self, ctx):
        await self._gate("statfs")
        found, answer = os.statvfs(self._path(pyfuse3.ROOT_INODE)), pyfuse3.StatvfsData()
        for name in ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail", "namemax"):
            setattr(answer, f"f_{name}", getattr(found, f"f_{name}"))
        return answer


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise pyfuse3.FUSEError(error.errno) from None


def main() -> None:
    backing, mountpoint, control = sys.argv[1:]
    options = {*pyfuse3.default_options, "fsname=faultfs", "allow_other"}
    options.discard("default_permissions")
    pyfuse3.init(FaultFs(Path(backing), Path(control)), mountpoint, options)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
