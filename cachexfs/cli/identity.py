"""Mounting as root for another user: who that is, and acting as that user meanwhile.

Role: ``cachexfs mount -o user=NAME`` (a Slurm prolog) does as root only what needs root: the mount, the tmpfs for
staging, directories below root's own. Everything that touches a file where the user could have prepared something else
(log, options, answer, the PFS) is done as the user. No concurrency: commands are single-threaded.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from cachexfs.config import RUNTIME_DIR_ROOT, MountOptions
from cachexfs.errors import UsageError
from cachexfs.supervisor.privileges import PrivilegeError, find_user

#: What a daemon of another user gets of root's environment.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "TZ", "TMPDIR")
_ENVIRONMENT_PREFIXES = ("LC_", "CACHEXFS_", "SLURM")
_ENVIRONMENT_NEVER = ("SLURM_JWT",)  # root's own right to command Slurm


def resolve_user(name: str) -> tuple[int, int] | None:
    """(uid, gid) for which root is to mount; None when this process is that user already. Raises ``UsageError``."""
    if not name:
        return None
    if name in ("root", "0"):
        if os.geteuid() != 0:
            raise UsageError(f"user={name}: only root can mount for another user")
        return None
    try:
        user = find_user(name)
    except PrivilegeError as error:
        raise UsageError(f"user={name}: {error}") from None
    if os.geteuid() == user[0]:
        return None
    if os.geteuid() != 0:
        raise UsageError(f"user={name}: only root can mount for another user")
    return user


def user_of(options: MountOptions) -> tuple[int, int] | None:
    """(uid, gid) of the daemon when it is another user's."""
    return None if options.uid is None or options.gid is None else (options.uid, options.gid)


@contextmanager
def acting_as(user: tuple[int, int] | None) -> Iterator[None]:
    """Touch files as that user. None: as this process is."""
    if user is None:
        yield
        return
    uid, gid = user
    groups = os.getgroups()
    os.setgroups(_groups(uid, gid))
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def _groups(uid: int, gid: int) -> list[int]:
    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        return [gid]


def give_directory(path: str, user: tuple[int, int], what: str, instead: str) -> None:
    """Make ``path`` a directory of that user's alone, or check that it is. Raises ``UsageError``; ``instead``: what to
    do when it is not. Never to remove it: other mounts may be registered there, or have their replicas in it.

    Its parent is made for everybody to pass through when it is missing.
    """
    uid, gid = user
    try:
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        try:
            os.mkdir(path, 0o700)
            os.chown(path, uid, gid, follow_symlinks=False)
        except FileExistsError:
            pass
        status = os.lstat(path)
    except OSError as error:
        raise UsageError(f"cannot make the {what} '{path}': {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid or status.st_mode & 0o022:
        raise UsageError(f"the {what} '{path}' is no directory of user {uid} alone: {instead}")


def default_runtime_dir_for(user: tuple[int, int]) -> str:
    """Where the mounts that root makes for a user are registered."""
    return f"{RUNTIME_DIR_ROOT}/{user[0]}"


def environment_for(user: tuple[int, int]) -> dict[str, str]:
    """The environment of a daemon of that user."""
    kept = {k: v for k, v in os.environ.items() if k in _ENVIRONMENT or k.startswith(_ENVIRONMENT_PREFIXES)}
    for name in _ENVIRONMENT_NEVER:
        kept.pop(name, None)
    try:
        entry = pwd.getpwuid(user[0])
    except KeyError:
        return kept | {"HOME": "/"}
    return kept | {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}
