"""Namespace changes on the PFS: idempotent, durable in their directory, never through a symlink.

Role: ``run`` inside a PFS child process. Concurrency: none. A change may be asked for again because its answer was
lost; each kind says below how it recognises its own earlier success.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable

from cachexfs.adapters.pfs_attrs import Attrs, set_attrs
from cachexfs.adapters.pfs_dir import PfsDir, fsync_dir, names_in, plain_name
from cachexfs.adapters.pfs_ops import Context, certain, sync_renamed
from cachexfs.core.reserved import BESIDE_PREFIX

_TYPES = {b"p": stat.S_IFIFO, b"s": stat.S_IFSOCK, b"c": stat.S_IFCHR, b"b": stat.S_IFBLK}
_OWNER_BITS = 0o700
_Kind = Callable[[Context, PfsDir, bytes, bytes, Attrs | None, int], None]
UNKNOWN = -1


def _sync(name: bytes, dir_fd: int) -> None:
    """Make the new name of a file durable, where its directory's fsync might not."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            sync_renamed(fd)
    finally:
        os.close(fd)


def _ino(name: bytes, dir_fd: int) -> int | None:
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


def _mkdir(context: Context, pfs: PfsDir, path: bytes, path2: bytes, attrs: Attrs | None, ino: int) -> None:
    """A directory that is there is success, and keeps its attributes. Its owner can always write into it."""
    parent, last = pfs.parent(path)
    try:
        os.mkdir(last, 0o755 if attrs is None else stat.S_IMODE(attrs.mode) | _OWNER_BITS, dir_fd=parent)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode):
            raise
    else:
        if attrs is not None:
            set_attrs(last, parent, attrs, keep=_OWNER_BITS)
    fsync_dir(parent)


def _move(context: Context, source: tuple[int, bytes], target: tuple[int, bytes], ino: int, *, over: bool) -> None:
    """rename. An earlier success: the source is gone and the target has the inode ``ino`` (noted before the first
    attempt). ``over``: whether another file at the target may be replaced."""
    found, there = _ino(source[1], source[0]), _ino(target[1], target[0])
    if ino != UNKNOWN and found is None and there == ino:
        _sync(target[1], target[0])
        return
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "the name to rename is not there", os.fsdecode(source[1]))
    if there is not None and not over and there != found:
        raise FileExistsError(errno.EEXIST, "a held file of this name is there", os.fsdecode(target[1]))
    context.monitor.note(found)
    if there == found and not stat.S_ISDIR(os.stat(source[1], dir_fd=source[0], follow_symlinks=False).st_mode):
        os.unlink(source[1], dir_fd=source[0])  # a power failure has left both names; rename(2) would do nothing
        return
    os.rename(source[1], target[1], src_dir_fd=source[0], dst_dir_fd=target[0])
    _sync(target[1], target[0])


def _rename(context: Context, pfs: PfsDir, path: bytes, path2: bytes, attrs: Attrs | None, ino: int) -> None:
    source, target = pfs.parent(path), pfs.parent(path2)
    _move(context, source, target, ino, over=True)
    fsync_dir(target[0])
    fsync_dir(source[0])


def _unlink(context: Context, pfs: PfsDir, path: bytes, path2: bytes, attrs: Attrs | None, ino: int) -> None:
    """Also of a held file: ``.cachexfs/held/<name>``."""
    parent, last = pfs.place(path)
    try:
        os.unlink(last, dir_fd=parent)
    finally:
        fsync_dir(parent)  # also for what an earlier attempt removed and did not sync


def _rmdir(context: Context, pfs: PfsDir, path: bytes, path2: bytes, attrs: Attrs | None, ino: int) -> None:
    """Temporaries of ours do not keep a directory."""
    parent, last = pfs.parent(path)
    try:
        os.rmdir(last, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        inner = pfs.directory(path)
        names = names_in(inner)
        if not names or not all(name.startswith(BESIDE_PREFIX) for name in names):
            raise
        for name in names:
            os.unlink(name, dir_fd=inner)
        os.rmdir(last, dir_fd=parent)
    finally:
        fsync_dir(parent)


def _replace(
    context: Context, pfs: PfsDir, make: Callable[[bytes, int], None], parent: int, last: bytes, attrs: Attrs | None
) -> None:
    """Put what ``make`` makes over an existing name, atomically."""
    nonce = context.nonce.encode()
    places = [(pfs.tmp(nonce), b"new~" + nonce), (parent, BESIDE_PREFIX + nonce)]
    for fd, name in places:
        try:
            make(name, fd)
            if attrs is not None:
                set_attrs(name, fd, attrs)
            os.rename(name, last, src_dir_fd=fd, dst_dir_fd=parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=fd)
            if error.errno != errno.EXDEV or fd == parent:
                raise
        else:
            return


def _symlink(context: Context, pfs: PfsDir, path: bytes, path2: bytes, attrs: Attrs | None, ino: int) -> None:
    """A link with the same target is success; any other file there is replaced."""
    parent, last = pfs.parent(path)
    try:
        os.symlink(path2, last, dir_fd=parent)
    except FileExistsError:
        found = os.stat(last, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISLNK(found.st_mode) or os.readlink(last, dir_fd=parent) != path2:
            _replace(context, pfs, lambda name, fd: os.symlink(path2, name, dir_fd=fd), parent, last, attrs)
    if attrs is not None:
        set_attrs(last, parent, attrs)
    fsync_dir(parent)


def _mknod(context: Context, pfs: PfsDir, path: bytes, path2: bytes, attrs: Attrs | None, ino: int) -> None:
    """``path2``: the letter of the kind (``p``, ``s``, ``c``, ``b``), then the device number in decimal.
    The same kind and number there is success."""
    parent, last = pfs.parent(path)
    kind, device = _TYPES.get(path2[:1]), int(path2[1:] or b"0")
    if kind is None:
        raise OSError(errno.EINVAL, f"no kind of special file: {path2!r}")
    mode = 0o600 if attrs is None else stat.S_IMODE(attrs.mode)
    try:
        os.mknod(last, kind | mode, device, dir_fd=parent)
    except FileExistsError:
        found = os.stat(last, dir_fd=parent, follow_symlinks=False)
        if stat.S_IFMT(found.st_mode) != kind or found.st_rdev != device:
            raise
    if attrs is not None:
        set_attrs(last, parent, attrs)
    fsync_dir(parent)


def _link(context: Context, pfs: PfsDir, path: bytes, path2: bytes, attrs: Attrs | None, ino: int) -> None:
    """A second name ``path2`` for ``path``. The same inode there is success; any other file is replaced."""
    (source, old), (parent, last) = pfs.parent(path), pfs.parent(path2)

    def make(name: bytes, fd: int) -> None:
        os.link(old, name, src_dir_fd=source, dst_dir_fd=fd, follow_symlinks=False)

    try:
        make(last, parent)
    except FileExistsError:
        if _ino(old, source) != _ino(last, parent):
            _replace(context, pfs, make, parent, last, None)
    fsync_dir(parent)


def _attr(context: Context, pfs: PfsDir, path: bytes, path2: bytes, attrs: Attrs | None, ino: int) -> None:
    """Mode, owner, times; not followed, and of a symlink no mode. Synced where the file can be opened."""
    if attrs is None:
        raise OSError(errno.EINVAL, "attr without attributes")
    parent, last = pfs.parent(path) if path else (pfs.root, b".")
    set_attrs(last, parent, attrs)
    kind = os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
        with contextlib.suppress(PermissionError):
            fd = pfs.keep(os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent))
            if stat.S_ISDIR(kind):
                fsync_dir(fd)
            else:
                os.fsync(fd)
    fsync_dir(parent)


def _held(pfs: PfsDir, name: bytes) -> tuple[int, bytes]:
    return pfs.held(), plain_name(os.fsdecode(name))


def _hide(context: Context, pfs: PfsDir, path: bytes, path2: bytes, attrs: Attrs | None, ino: int) -> None:
    """rename to ``.cachexfs/held/<path2>``, or beside the file where that is another filesystem. Never over another
    held file."""
    source, target = pfs.parent(path), _held(pfs, path2)
    for there in (target, (source[0], BESIDE_PREFIX + target[1])):
        if _ino(source[1], source[0]) is None and _ino(there[1], there[0]) is not None:
            fsync_dir(there[0])  # a former process has done it: the name is of this very generation
            fsync_dir(source[0])
            return
    try:
        _move(context, source, target, ino, over=False)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        target = source[0], BESIDE_PREFIX + target[1]
        _move(context, source, target, ino, over=False)
    fsync_dir(target[0])
    fsync_dir(source[0])


def _unhide(context: Context, pfs: PfsDir, path: bytes, path2: bytes, attrs: Attrs | None, ino: int) -> None:
    """The way back of ``hide``; replaces what is at the path."""
    source, target = _held(pfs, path2), pfs.parent(path)
    if _ino(source[1], source[0]) is None and _ino(BESIDE_PREFIX + source[1], target[0]) is not None:
        source = target[0], BESIDE_PREFIX + source[1]
    _move(context, source, target, ino, over=True)
    fsync_dir(target[0])
    fsync_dir(source[0])


_KINDS: dict[str, _Kind] = {
    "mkdir": _mkdir,
    "rename": _rename,
    "unlink": _unlink,
    "rmdir": _rmdir,
    "symlink": _symlink,
    "mknod": _mknod,
    "link": _link,
    "attr": _attr,
    "hide": _hide,
    "unhide": _unhide,
}
KINDS = frozenset(_KINDS)
#: For these a name that is certainly not there is success.
_REMOVALS = ("unlink", "rmdir")


def run(context: Context, kind: str, path: bytes, path2: bytes, attrs: Attrs | None, ino: int) -> None:
    """See ``Pfs.run``. ``ino``: what an earlier attempt noted (``Monitor.note``), -1 when there was none.

    ``mknod`` is written ``mknod:<letter>:<device number>``.
    """
    kind, *details = kind.split(":")
    if details:
        path2 = "".join(details).encode()
    function = _KINDS.get(kind)
    if function is None:
        raise OSError(errno.EINVAL, f"no kind of change: {kind}")
    try:
        _change(context, function, path, path2, attrs, ino)
    except FileNotFoundError:
        if kind not in _REMOVALS:
            raise


@certain
def _change(context: Context, function: _Kind, path: bytes, path2: bytes, attrs: Attrs | None, ino: int) -> None:
    with context.open(mutating=True) as pfs:
        function(context, pfs, path, path2, attrs, ino)
