"""Mounting and unmounting: mount(2) as root, ``fusermount3`` otherwise.

Role: gives the supervisor the descriptor of ``/dev/fuse`` and a name in the tree, and takes the name away.
Concurrency: ``mount`` runs before the loop. ``unmount`` asks the filesystem (statistics, sync), so it runs in
a thread of its own while the loop goes on answering. Called by ``run``.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import shutil
import socket
import stat
import subprocess
import threading
import time

from .privileges import has_sys_admin

_KIND = b"fuse.cachexfs"
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MS_NOSUID = 2
_MS_NODEV = 4
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
#: How long ``fusermount3`` may take, seconds.
FUSERMOUNT_S_MAX = 10.0
_RETRY_S = 0.05


class MountError(Exception):
    """The mount point or the FUSE device cannot be used; the message says which and why."""


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class Place:
    """A directory to mount on, found once and held: where its path leads later does not matter any more.

    ``path`` is what others call it. Mounting uses the directory itself, unmounting its parent and its name.
    """

    def __init__(self, path: str, parent: int) -> None:
        self.path = path
        self._parent = parent

    @classmethod
    def find(cls, path: str, *, only_roots: bool) -> Place:
        """``MountError`` when there is no such directory, or (``only_roots``) when others can change the way to it.

        A dead mount of ours (its supervisor was killed) that covers it is taken away first.
        """
        absolute = os.path.abspath(path)
        if not only_roots:
            absolute = os.path.join(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))
        try:
            parent, where = _walk(absolute)
        except OSError as error:
            raise MountError(f"mount point {path}: {error.strerror}") from error
        if only_roots and where:
            os.close(parent)
            raise MountError(
                f"{path}: others than root can change {where}, and could lead root's mount elsewhere; use a directory "
                "of root's, or mount as that user"
            )
        place = cls(absolute, parent)
        try:
            if _is_dead(place):
                unmount(place, is_lazy=True)
            if not only_roots and os.path.islink(absolute):
                os.close(parent)
                return cls.find(os.path.realpath(absolute), only_roots=False)
            os.close(place.open())
        except OSError as error:
            raise MountError(f"mount point {path}: {error.strerror}") from error
        return place

    @property
    def anchored(self) -> str:
        """A path of it that nobody else can bend, but for its last component, which is not to be followed."""
        return f"/proc/self/fd/{self._parent}/{os.path.basename(self.path)}"

    def open(self) -> int:
        """A descriptor (O_PATH) of the directory itself; ``OSError`` when it is none now."""
        return os.open(os.path.basename(self.path), _DIRECTORY, dir_fd=self._parent)


def changeable_by_others(path: str) -> str:
    """The directory on the way to ``path`` in which somebody other than root can put something else; "" without one.

    Mounting and unmounting follow a path with root's power: a symlink put in between would lead it elsewhere.
    ``path`` is absolute; its last component may belong to anybody, for it is what gets covered. ``OSError``.
    """
    parent, where = _walk(path)
    os.close(parent)
    return where


def _walk(path: str) -> tuple[int, str]:
    """A descriptor of the parent of ``path``, found without following a symlink, and ``changeable_by_others``.

    With a symlink on the way that is the answer, and the descriptor stops there.
    """
    where = ""
    names = path.strip("/").split("/")
    fd = os.open("/", _DIRECTORY)
    try:
        for depth, name in enumerate(names):
            is_last = depth == len(names) - 1
            try:
                child = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except OSError:
                if not is_last:
                    raise
                child = None  # missing, or a dead mount
            if child is not None and stat.S_ISLNK(child.st_mode):
                return fd, path
            info = os.fstat(fd)
            is_kept = info.st_mode & stat.S_ISVTX and child is not None and child.st_uid == 0
            if info.st_uid != 0 or (info.st_mode & 0o022 and not is_kept):
                where = "/" + "/".join(names[:depth])
            if not is_last:
                deeper = os.open(name, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = deeper
    except OSError:
        os.close(fd)
        raise
    return fd, where


def _is_dead(place: Place) -> bool:
    """Whether the last mount on ``place`` is of this program and nobody answers behind it."""
    try:
        os.stat(place.anchored, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            return False
    else:
        return False
    with open("/proc/self/mounts", "rb") as table:
        kinds = [line.split()[2] for line in table if line.split()[1] == _escaped(place.path)]
    return kinds[-1:] == [_KIND]


def _escaped(path: str) -> bytes:
    """A path as ``/proc/self/mounts`` writes it."""
    raw = os.fsencode(path).replace(b"\\", b"\\134")
    return raw.replace(b" ", b"\\040").replace(b"\t", b"\\011").replace(b"\n", b"\\012")


def mount(place: Place, fsname: str, *, is_shared: bool, uid: int, gid: int, how: str = "auto") -> int:
    """Mount and return the descriptor of ``/dev/fuse``.

    Parameters: ``fsname`` what mount(8) shows; ``is_shared`` lets other users in (``allow_other``); ``uid``, ``gid``
    the owner of the mount; ``how`` is ``mount``, ``fusermount`` or ``auto`` (mount(2) when root).
    """
    if any(c in fsname for c in ",\\\n"):
        raise MountError(f"fsname {fsname!r} has a comma, backslash or newline")
    if how == "mount" or (how == "auto" and os.geteuid() == 0):
        return _mount_directly(place, fsname, is_shared, uid, gid)
    return _mount_with_helper(place.path, fsname, is_shared)


def _mount_directly(place: Place, fsname: str, is_shared: bool, uid: int, gid: int) -> int:
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        hint = "load the fuse module, or give the container the device"
        raise MountError(f"/dev/fuse: {error.strerror}; {hint}") from error
    options = f"fd={fd},rootmode={stat.S_IFDIR:o},user_id={uid},group_id={gid},default_permissions"
    if is_shared:
        options += ",allow_other"
    directory = place.open()
    try:
        result = _libc().mount(
            os.fsencode(fsname), f"/proc/self/fd/{directory}".encode(), _KIND,
            ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), options.encode(),
        )  # fmt: skip
        code = ctypes.get_errno()
    finally:
        os.close(directory)
    if result != 0:
        os.close(fd)
        hint = "; a container needs --cap-add SYS_ADMIN" if code == errno.EPERM else ""
        raise MountError(f"mount {place.path}: {os.strerror(code)}{hint}")
    return fd


def _mount_with_helper(mountpoint: str, fsname: str, is_shared: bool) -> int:
    helper = shutil.which("fusermount3")
    if helper is None:
        raise MountError("fusermount3 is not installed (package fuse3), and only root mounts without it")
    options = f"fsname={fsname},subtype=cachexfs,default_permissions,nosuid,nodev"
    if is_shared:
        options += ",allow_other"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        ours.settimeout(FUSERMOUNT_S_MAX)
        process = subprocess.Popen(
            [helper, "-o", options, "--", mountpoint],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        fds = _receive_fd(ours)
        try:
            _, said = process.communicate(timeout=FUSERMOUNT_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise MountError("fusermount3 does not end") from None
    if process.returncode != 0 or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise MountError(f"fusermount3: {said.strip() or 'no descriptor came'}")
    os.set_inheritable(fds[0], False)
    os.set_blocking(fds[0], False)
    return fds[0]


def _receive_fd(sock: socket.socket) -> list[int]:
    fds = array.array("i")
    try:
        _, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(fds.itemsize))
    except OSError:
        return []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def unmount(place: Place, *, is_lazy: bool) -> str:
    """Take the name away; an empty string, or why it was refused. Blocks: never from the loop's thread."""
    if has_sys_admin():
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if is_lazy else 0)
        if _libc().umount2(os.fsencode(place.anchored), flags) == 0:
            return ""
        return os.strerror(ctypes.get_errno())
    helper = shutil.which("fusermount3")
    if helper is None:
        return "fusermount3 is not installed"
    try:
        done = subprocess.run(
            [helper, "-u", *(["-z"] if is_lazy else []), "--", place.path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FUSERMOUNT_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "fusermount3 does not end"
    return "" if done.returncode == 0 else done.stderr.strip() or f"fusermount3 exit {done.returncode}"


class Unmounter:
    """Unmounts in a thread of its own: politely for a while, then lazily."""

    def __init__(self, place: Place, polite_s: float) -> None:
        """Start. ``polite_s``: how long a busy mount is tried before it is detached."""
        #: Why the last attempt failed.
        self.said = ""
        self._place = place
        self._polite_s = polite_s
        threading.Thread(target=self._run, name="unmount", daemon=True).start()

    def _run(self) -> None:
        until = time.monotonic() + self._polite_s
        while time.monotonic() < until:
            self.said = unmount(self._place, is_lazy=False)
            if not self.said:
                return
            time.sleep(_RETRY_S)
        unmount(self._place, is_lazy=True)
