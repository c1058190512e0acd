"""Attributes of a name on the PFS: read as a row, set where they differ.

Role: used by the operations inside a PFS child process (``pfs_ops``, ``pfs_names``). No concurrency.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cachexfs.adapters.pfs_dir import kind_of

Xattrs = Sequence[tuple[bytes, bytes]]
#: What could not be done to xattrs, in words: best effort. Who serves calls takes it from here and tells it.
complaints: list[str] = []
_USER, _OURS = b"user.", b"user.cachex."

StatRow = tuple[str, int, int, int, int, int, int, int, int, int, int, bytes]


@dataclass(frozen=True, slots=True)
class Attrs:
    """As ``PfsAttrs``: permission bits, owner (None: leave), times in ns, the user's xattrs (None: leave)."""

    mode: int
    uid: int | None
    gid: int | None
    atime_ns: int
    mtime_ns: int
    xattrs: Xattrs | None = None


def stat_row(name: bytes, dir_fd: int) -> StatRow:
    """lstat as a row in the order of ``PfsStat``."""
    found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    target = os.readlink(name, dir_fd=dir_fd) if stat.S_ISLNK(found.st_mode) else b""
    return row_of(found, target)


def row_of(found: os.stat_result, target: bytes = b"") -> StatRow:
    """The same from a stat that was made already."""
    return (
        kind_of(found.st_mode),
        stat.S_IMODE(found.st_mode),
        found.st_uid,
        found.st_gid,
        found.st_size,
        found.st_ino,
        found.st_nlink,
        found.st_rdev,
        found.st_atime_ns,
        found.st_mtime_ns,
        found.st_ctime_ns,
        target,
    )


def set_attrs(name: bytes, dir_fd: int, attrs: Attrs, *, keep: int = 0) -> bool:
    """Owner, mode, times of ``name`` in ``dir_fd``, where they differ; returns whether anything did.

    Never follows a symlink; of a symlink owner and times only. EPERM is ignored where the file belongs to another, such
    as a project's directory that the group may write to, or for root where it is squashed: as without us, its mode is
    its owner's to set, and its mtime moves. EPERM of chown is ignored.
    ``keep`` are mode bits that stay set.
    """
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        return set_attrs_of(fd, os.fstat(fd), attrs, keep=keep)
    finally:
        os.close(fd)


def set_attrs_of(fd: int, found: os.stat_result, attrs: Attrs, *, keep: int = 0) -> bool:
    """The same for any descriptor, an ``O_PATH`` one too; ``found`` is its stat."""
    this, changed = f"/proc/self/fd/{fd}", False  # the file itself, whatever its name is now
    if attrs.xattrs is not None and not stat.S_ISLNK(found.st_mode):
        _set_xattrs(this, attrs.xattrs)  # before the mode, which may forbid it
    uid = found.st_uid if attrs.uid is None else attrs.uid
    gid = found.st_gid if attrs.gid is None else attrs.gid
    if (uid, gid) != (found.st_uid, found.st_gid):
        changed = _chown(this, uid, gid)
    mode = stat.S_IMODE(attrs.mode) | keep
    # chown clears the set-id bits, so the mode comes after it.
    if not stat.S_ISLNK(found.st_mode) and (changed or mode != stat.S_IMODE(found.st_mode)):
        with _only_of_the_owner(found):
            os.chmod(this, mode)
            changed = True
    times = (found.st_atime_ns, found.st_mtime_ns)
    if (attrs.atime_ns, attrs.mtime_ns) != times:
        with _only_of_the_owner(found):
            os.utime(this, ns=(attrs.atime_ns, attrs.mtime_ns))
        if not changed:
            after = os.fstat(fd)  # a filesystem with whole seconds never gets nearer: that is no change
            changed = (after.st_atime_ns, after.st_mtime_ns) != times
    return changed


@contextlib.contextmanager
def _only_of_the_owner(found: os.stat_result) -> Iterator[None]:
    """EPERM of the body is an error only where the file is ours."""
    try:
        yield
    except PermissionError:
        if found.st_uid == os.geteuid():
            raise


def user_xattrs(path: str) -> dict[bytes, bytes]:
    """The user's extended attributes of a file, without ours; none where the filesystem has none."""
    try:
        names = [os.fsencode(name) for name in os.listxattr(path)]
        found = {}
        for name in names:
            if name.startswith(_USER) and not name.startswith(_OURS):
                with contextlib.suppress(OSError):  # removed meanwhile
                    found[name] = os.getxattr(path, name)
    except OSError:
        return {}
    return found


def _set_xattrs(path: str, wanted: Xattrs) -> None:
    """Make the user's extended attributes what they are to be, as far as the filesystem takes them."""
    there = user_xattrs(path)
    try:
        for name, value in wanted:
            if there.pop(name, None) != value:
                os.setxattr(path, name, value)
        for name in there:
            os.removexattr(path, name)
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, error.errno)
        complaints.append(f"user xattrs stay in the mount: the PFS does not take them ({error.strerror} [{code}])")


def _chown(path: str, uid: int, gid: int) -> bool:
    for owner, group in ((uid, gid), (-1, gid)):  # the group alone: a user may, and so may root where it is squashed
        with contextlib.suppress(PermissionError):
            os.chown(path, owner, group)
            return True
    return False
