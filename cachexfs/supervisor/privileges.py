"""Giving up root: the supervisor becomes the job's user and keeps CAP_SYS_ADMIN alone.

Role: called once, between mounting and the first daemon, when ``--user`` was given. A daemon started after it
runs as that user with no capability at all (they do not survive exec). Concurrency: before any thread.

The kernel does backing-file I/O with the credentials of the process that registered the file, so they are the
job user's, and registering needs CAP_SYS_ADMIN. The process is not dumpable, so that user cannot trace it.
"""

from __future__ import annotations

import ctypes
import os
import pwd

_CAP_SYS_ADMIN = 21
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAP_VERSION_3 = 0x20080522
_CAP_LAST_MAX = 63


class PrivilegeError(Exception):
    """Root could not be given up completely: better not to start."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def find_user(name: str) -> tuple[int, int]:
    """(uid, gid) of a user name or ``uid[:gid]``; ``PrivilegeError`` when there is none, or it is root."""
    uid_text, _, gid_text = name.partition(":")
    if uid_text.isdigit():
        uid, gid = int(uid_text), int(gid_text) if gid_text.isdigit() else int(uid_text)
    else:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise PrivilegeError(f"no user {name!r}") from None
        uid, gid = entry.pw_uid, entry.pw_gid
    if uid == 0 or gid == 0:
        raise PrivilegeError("--user is for becoming somebody other than root")
    return uid, gid


def become(uid: int, gid: int) -> None:
    """Drop to ``uid``, ``gid`` with CAP_SYS_ADMIN alone, for good; ``PrivilegeError`` when any step fails."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prctl(option: int, value: int) -> int:
        return int(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))

    for cap in range(_CAP_LAST_MAX + 1):
        if cap != _CAP_SYS_ADMIN:
            prctl(_PR_CAPBSET_DROP, cap)  # EINVAL beyond the kernel's last one
    if prctl(_PR_SET_KEEPCAPS, 1) != 0:
        raise PrivilegeError("prctl(PR_SET_KEEPCAPS) failed")
    try:
        groups = os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        groups = [gid]
    os.setgroups([g for g in groups if g])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    header = _Header(_CAP_VERSION_3, 0)
    data = (_Data * 2)(_Data(1 << _CAP_SYS_ADMIN, 1 << _CAP_SYS_ADMIN, 0), _Data(0, 0, 0))
    if libc.capset(ctypes.byref(header), ctypes.byref(data)) != 0:
        raise PrivilegeError(f"capset: {os.strerror(ctypes.get_errno())}")
    if prctl(_PR_SET_DUMPABLE, 0) != 0 or prctl(_PR_SET_NO_NEW_PRIVS, 1) != 0:
        raise PrivilegeError("prctl(PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS) failed")
    if capabilities() != 1 << _CAP_SYS_ADMIN or os.getresuid() != (uid, uid, uid):
        raise PrivilegeError("capabilities other than CAP_SYS_ADMIN are left")


def capabilities() -> int:
    """The effective capabilities of this process, as a bit mask; all permitted ones are effective here."""
    # Bytes: a codec would be imported now, and the interpreter's files may be out of the new user's reach.
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"CapEff:"):
                return int(line.split()[1], 16)
    raise PrivilegeError("/proc/self/status has no CapEff")


def has_sys_admin() -> bool:
    """Whether this process has CAP_SYS_ADMIN now."""
    return bool(capabilities() >> _CAP_SYS_ADMIN & 1)
