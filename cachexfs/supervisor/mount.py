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


def check_mountpoint(path: str) -> str:
    """The absolute path of a directory to mount on; ``MountError`` when it is none.

    A dead mount of ours (its supervisor was killed) that covers it is taken away first.
    """
    absolute = os.path.join(
        os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path.rstrip("/"))
    )
    try:
        if _is_dead(absolute):
            unmount(absolute, is_lazy=True)
        absolute = os.path.realpath(path)
        info = os.stat(absolute)
    except OSError as error:
        raise MountError(f"mount point {path}: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode):
        raise MountError(f"mount point {path} is not a directory")
    return absolute


def changeable_by_others(path: str) -> str:
    """The directory on the way to ``path`` in which somebody other than root can put something else; "" without one.

    Mounting and unmounting follow a path with root's power: a symlink put in between would lead it elsewhere.
    ``path`` is absolute; its last component may belong to anybody, for it is what gets covered.
    """
    if os.path.realpath(path) != path:
        return path
    child = path
    while (parent := os.path.dirname(child)) != child:
        info = os.lstat(parent)
        is_open = info.st_mode & 0o022
        is_kept = info.st_mode & stat.S_ISVTX and os.lstat(child).st_uid == 0
        if info.st_uid != 0 or (is_open and not is_kept):
            return parent
        child = parent
    return ""


def _is_dead(path: str) -> bool:
    """Whether the last mount on ``path`` is of this program and nobody answers behind it."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            return False
    else:
        return False
    with open("/proc/self/mounts", "rb") as table:
        kinds = [line.split()[2] for line in table if line.split()[1] == _escaped(path)]
    return kinds[-1:] == [_KIND]


def _escaped(path: str) -> bytes:
    """A path as ``/proc/self/mounts`` writes it."""
    raw = os.fsencode(path).replace(b"\\", b"\\134")
    return raw.replace(b" ", b"\\040").replace(b"\t", b"\\011").replace(b"\n", b"\\012")


def mount(mountpoint: str, fsname: str, *, is_shared: bool, uid: int, gid: int, how: str = "auto") -> int:
    """Mount and return the descriptor of ``/dev/fuse``.

    Parameters: ``mountpoint`` an absolute directory; ``fsname`` what mount(8) shows; ``is_shared`` lets other
    users in (``allow_other``); ``uid``, ``gid`` the owner of the mount; ``how`` is ``mount``, ``fusermount`` or
    ``auto`` (mount(2) when root).
    """
    if any(c in fsname for c in ",\\\n"):
        raise MountError(f"fsname {fsname!r} has a comma, backslash or newline")
    if how == "mount" or (how == "auto" and os.geteuid() == 0):
        return _mount_directly(mountpoint, fsname, is_shared, uid, gid)
    return _mount_with_helper(mountpoint, fsname, is_shared)


def _mount_directly(mountpoint: str, fsname: str, is_shared: bool, uid: int, gid: int) -> int:
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        hint = "load the fuse module, or give the container the device"
        raise MountError(f"/dev/fuse: {error.strerror}; {hint}") from error
    root_mode = stat.S_IFMT(os.stat(mountpoint).st_mode)
    options = f"fd={fd},rootmode={root_mode:o},user_id={uid},group_id={gid},default_permissions"
    if is_shared:
        options += ",allow_other"
    result = _libc().mount(
        os.fsencode(fsname),
        os.fsencode(mountpoint),
        _KIND,
        ctypes.c_ulong(_MS_NOSUID | _MS_NODEV),
        options.encode(),
    )
    if result != 0:
        code = ctypes.get_errno()
        os.close(fd)
        raise MountError(f"mount {mountpoint}: {os.strerror(code)}")
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


def unmount(mountpoint: str, *, is_lazy: bool) -> str:
    """Take the name away; an empty string, or why it was refused. Blocks: never from the loop's thread."""
    if has_sys_admin():
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if is_lazy else 0)
        if _libc().umount2(os.fsencode(mountpoint), flags) == 0:
            return ""
        return os.strerror(ctypes.get_errno())
    helper = shutil.which("fusermount3")
    if helper is None:
        return "fusermount3 is not installed"
    try:
        done = subprocess.run(
            [helper, "-u", *(["-z"] if is_lazy else []), "--", mountpoint],
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

    def __init__(self, mountpoint: str, polite_s: float) -> None:
        """Start. ``polite_s``: how long a busy mount is tried before it is detached."""
        #: Why the last attempt failed.
        self.said = ""
        self._mountpoint = mountpoint
        self._polite_s = polite_s
        threading.Thread(target=self._run, name="unmount", daemon=True).start()

    def _run(self) -> None:
        until = time.monotonic() + self._polite_s
        while time.monotonic() < until:
            self.said = unmount(self._mountpoint, is_lazy=False)
            if not self.said:
                return
            time.sleep(_RETRY_S)
        unmount(self._mountpoint, is_lazy=True)
