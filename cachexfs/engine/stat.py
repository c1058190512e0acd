"""What stat(2) shows of a file or directory: the catalogue's record, and what this node has changed since.

Role: used by ``Names`` and ``Filesystem``. Concurrency: nothing here waits.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from cachexfs.core.changes import NewAttrs
from cachexfs.core.records import Inode
from cachexfs.engine.files import Files
from cachexfs.engine.node import Node
from cachexfs.engine.vnode import Vnode, attrs_of
from cachexfs.errors import FsError

BLKSIZE = 128 << 10  # Python's buffer size: with 1 MiB every 4 KiB tail read of a load would read 1 MiB


@dataclass(frozen=True, slots=True)
class Attr:
    """What stat(2) shows. Times in ns, size in bytes, ``blocks`` of 512 bytes."""

    ino: int
    kind: str
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int


class Stat:
    """Attributes of this mount's files."""

    def __init__(self, node: Node, files: Files) -> None:
        self.node = node
        self.files = files

    def of(self, fid: int, inode: Inode, vnode: Vnode | None = None) -> Attr:
        """Of a file with a name, as ``vnode`` has it where this node has it open or changed."""
        view = self.node.catalogue.view
        if vnode is not None:
            self.files.passing.refresh(vnode, stamp=False)
        if inode.kind == "d":
            times = view.dir_times(fid)
            mtime_ns = times.mtime_ns if times else inode.mtime_ns
            ctime_ns = max(times.ctime_ns, inode.ctime_ns) if times else inode.ctime_ns
            nlink = 2 + view.subdirs(fid)
            return Attr(
                fid, "d", inode.mode, nlink, inode.uid, inode.gid, 0, 4096, 8, inode.atime_ns, mtime_ns, ctime_ns
            )  # fmt: skip
        size, mtime = attrs_of(inode, vnode)
        if vnode is not None and not vnode.dirty and vnode.content.gen != inode.gen:
            size = vnode.content.size
        ino = vnode.ino if vnode is not None else fid
        blocks = -(-size // 512)
        if vnode is not None and vnode.dirty and vnode.fd >= 0:
            blocks = os.fstat(vnode.fd).st_blocks
        return Attr(
            ino, inode.kind, inode.mode, inode.nlink, inode.uid, inode.gid, inode.rdev, size, blocks,
            inode.atime_ns, mtime, max(inode.ctime_ns, mtime if vnode is not None and vnode.dirty else 0),
        )  # fmt: skip

    def entry(self, fid: int, kind: str) -> Attr:
        """Attributes of a current name; raises ENOENT."""
        inode = self.node.catalogue.view.inode(fid)
        if inode is None:
            raise FsError(errno.ENOENT)
        vnode = self.files.vnode(fid) if kind == "f" else None
        return self.of(fid, inode, vnode)

    def removed(self, ino: int) -> Attr:
        """A file that is open and has no name any more, or a directory that somebody is in."""
        gone = self.files.removed_dirs.get(ino)
        if gone is not None:
            return Attr(
                ino, "d", gone.mode, 0, gone.uid, gone.gid, 0, 4096, 8, gone.atime_ns, gone.mtime_ns, gone.ctime_ns
            )
        vnode = self.files.by_ino(ino)
        size, last = vnode.size, vnode.last
        blocks = -(-size // 512)
        if last is None:  # its daemon died since
            at_ns = vnode.mtime_ns
            return Attr(ino, "f", 0o600, 0, 0, 0, 0, size, blocks, at_ns, at_ns, at_ns)
        mtime_ns = max(vnode.mtime_ns, last.mtime_ns) if vnode.version else last.mtime_ns
        return Attr(
            ino, "f", last.mode, 0, last.uid, last.gid, 0, size, blocks, last.atime_ns, mtime_ns,
            max(last.ctime_ns, mtime_ns),
        )  # fmt: skip

    def made(self, fid: int, kind: str, attrs: NewAttrs) -> Attr:
        """Attributes of what was made; another node may have removed it already."""
        inode = self.node.catalogue.view.inode(fid)
        if inode is not None:
            return self.entry(fid, inode.kind)
        now_ns = self.node.clock.now_ns()
        inode = Inode(kind, attrs.mode, attrs.uid, attrs.gid, now_ns, now_ns, now_ns)
        if kind == "f":
            vnode = self.files.known(fid) or self.files.without_name(fid)
            vnode.last = vnode.last or inode
            return self.removed(vnode.ino)
        return Attr(fid, kind, attrs.mode, 0, attrs.uid, attrs.gid, 0, 0, 0, now_ns, now_ns, now_ns)
