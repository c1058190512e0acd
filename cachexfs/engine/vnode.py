"""One file in this node's hands: its vnode, its handles.

Role: data that ``Files``, ``Writing``, ``Publishing`` and ``Passing`` work on.

Concurrency: handlers of one file run interleaved; ``change_lock`` covers the exchange of a staging file,
``publish_lock`` makes publications of a file happen one after the other.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import cast

import msgspec
import trio

from cachexfs.core.records import Generation, Inode, decode, encode
from cachexfs.core.routes import PARTNER
from cachexfs.engine import stamps
from cachexfs.engine.interfaces import Synced

NEVER_SEEN = (0, 0)
WRITABLE = os.O_WRONLY | os.O_RDWR
PLAIN_MODE, PASSED_MODE = 0o600, 0o700  # of a staged file; the second one while the kernel may be changing it
LAST_XATTRS = "user.cachexfs.last"  # of the staged file of one without a name: its user attributes
UNWRITABLE = 1 << 62  # as ``sealed``: every write continues in a private copy


@dataclass(eq=False, slots=True)
class Vnode:
    """One lineage of one file. ``version`` counts changes here, ``published`` is the one that was published."""

    fid: int
    ino: int
    _content: Generation | bytes  # encoded while nobody has it open
    lookups: int = 0
    handles: int = 0
    writers: int = 0
    paged: bool = False  # the kernel may hold pages of it
    paged_token: tuple[int, int] = (-1, -1)
    stage: str = ""
    fd: int = -1
    sealed: int = 0
    version: int = 0
    published: int = 0
    mtime_ns: int = 0
    mtime_version: int = -1
    removed: bool = False
    last: Inode | None = None  # its record when it lost its last name
    passed: int = 0  # open handles whose writes the kernel puts into ``fd`` without asking
    backed: int = 0  # open handles that the kernel serves from ``fd``, of readers too: while there are, ``fd`` stays
    mappable: bool = False  # may be changed through a shared map, unseen by ``seen``
    cached: int = 0  # open handles that use the page cache
    cached_last: bool = False  # the newest of these handles is: what is backed beside it was closed before
    closing: set[Handle] | None = None  # passed ones that were flushed: their RELEASE may be on its way
    awaited: bool = False  # taken over from a dead daemon, for whose passed handles the kernel has changed ``fd``
    told: int = -1  # the generation of which the catalogue knows that ``fd`` is being changed in place
    seen: tuple[int, int] = NEVER_SEEN  # size and mtime of ``fd`` when its changes were last counted
    unstamped: bool = False  # a change since then may not show in them
    synced: Synced | None = None
    measured: bool = False  # an fsync of them has told how long it took
    route: str = ""  # of the bytes that are not published yet; "": that of the published generation
    digested: tuple[int, int, tuple[bytes, bytes, list[bytes]]] | None = None
    _change_lock: trio.Lock | None = None
    _publish_lock: trio.Lock | None = None

    # Most of a hundred thousand vnodes are only known: what writers need is made when it is needed, and the content is
    # a third as large encoded.
    @property
    def content(self) -> Generation:
        """The published generation that this node's applications see, unless it is ``dirty``."""
        return cast(Generation, decode(self._content)) if isinstance(self._content, bytes) else self._content

    @content.setter
    def content(self, content: Generation) -> None:
        self._content = content if self.handles or self.dirty else encode(content)

    @property
    def change_lock(self) -> trio.Lock:
        """Covers the exchange of the staging file."""
        if self._change_lock is None:
            self._change_lock = trio.Lock()
        return self._change_lock

    @property
    def publish_lock(self) -> trio.Lock:
        """Makes publications happen one after the other."""
        if self._publish_lock is None:
            self._publish_lock = trio.Lock()
        return self._publish_lock

    @property
    def dirty(self) -> bool:
        """Whether bytes here are newer than the published generation."""
        return self.version != self.published

    @property
    def size(self) -> int:
        """Length as this node's applications see it, in bytes."""
        return os.fstat(self.fd).st_size if self.dirty else self.content.size

    def close_stage(self) -> None:
        """Let go of the staging file."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.stage, self.sealed = -1, "", 0

    def rest(self) -> None:
        """If nobody has the file open, give its descriptor back: the kernel remembers far more files than we may open.

        What comes next opens the staged file again.
        """
        if self.handles or self.dirty or self.removed or self.backed:
            return
        if any(lock is not None and lock.locked() for lock in (self._change_lock, self._publish_lock)):
            return
        if self.stage and self.stage == self.content.stage:
            self.close_stage()
            self._change_lock = self._publish_lock = self.closing = self.digested = self.synced = None
            self.seen = NEVER_SEEN
            self.content = self.content  # encoded now


@dataclass(eq=False, slots=True)
class Handle:
    """One open file description. ``wrote``: its FLUSH publishes."""

    vnode: Vnode
    flags: int
    wrote: bool = False
    passed: bool = False
    backed: bool = False
    cached: bool = False
    drops_set_id: bool = False  # its writer may not keep the set-id bits of what it changes

    @property
    def writable(self) -> bool:
        """Whether it was opened for writing."""
        return bool(self.flags & WRITABLE)

    @property
    def syncs(self) -> bool:
        """Whether each of its writes is also an fsync."""
        return self.flags & os.O_DSYNC != 0  # a part of O_SYNC

    @property
    def mappable(self) -> bool:
        """Whether a shared map of it may be written."""
        return self.flags & os.O_ACCMODE == os.O_RDWR


def keep_last(vnode: Vnode) -> None:
    """Put the attributes of a file without a name on its staging file, where the next daemon finds them."""
    if vnode.last is None or vnode.fd < 0 or vnode.sealed == UNWRITABLE:
        return
    with contextlib.suppress(OSError):  # not our owner to give, or NVMe is read-only: a later daemon knows less
        os.fchown(vnode.fd, vnode.last.uid, vnode.last.gid)
    with contextlib.suppress(OSError):
        os.fchmod(vnode.fd, vnode.last.mode | 0o600)
    with contextlib.suppress(OSError):  # a tmpfs before Linux 6.6 has none
        os.setxattr(vnode.fd, LAST_XATTRS, msgspec.msgpack.encode(vnode.last.xattrs))
    keep_time(vnode, max(vnode.mtime_ns, vnode.last.mtime_ns) if vnode.version else vnode.last.mtime_ns)


def keep_time(vnode: Vnode, mtime_ns: int) -> None:
    """Put an mtime on its staging file, beside bytes that are not published or have no name (``stamps``)."""
    if vnode.fd < 0 or vnode.sealed == UNWRITABLE:
        return
    counted = stamps.look(vnode.fd) == vnode.seen
    stamp = stamps.keep_time(vnode.fd, mtime_ns)
    if counted:
        vnode.seen, vnode.unstamped = stamp, False


def last_xattrs(fd: int) -> tuple[tuple[bytes, bytes], ...] | None:
    """The user attributes that ``keep_last`` has put there; None: it has not been there, or could not."""
    try:
        return msgspec.msgpack.decode(os.getxattr(fd, LAST_XATTRS), type=tuple[tuple[bytes, bytes], ...])
    except (OSError, msgspec.DecodeError):
        return None


def route_of(inode: Inode | None, vnode: Vnode | None) -> str:
    """The route of a file's newest bytes (``core.routes``)."""
    return (vnode.route if vnode is not None else "") or (inode.route if inode is not None else "") or PARTNER


def attrs_of(inode: Inode, vnode: Vnode | None) -> tuple[int, int]:
    """(size, mtime in ns) that this node's applications see."""
    if vnode is None or not vnode.dirty:
        return inode.size, inode.mtime_ns
    return vnode.size, max(vnode.mtime_ns, 0)
