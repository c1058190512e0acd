"""The mounts of this node: what the kernel says, what the registry says, and which one a path lies in.

Role: reads /proc/self/mountinfo and the runtime directory, and never the mount itself: a dead or hung daemon would
hang the reader. The daemon writes the registry. No concurrency.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from cachexfs import mountinfo
from cachexfs.config import RUNTIME_DIR_ROOT, default_runtime_dir
from cachexfs.errors import CannotTellError
from cachexfs.registration import Entry

FUSE_TYPE = "fuse.cachex"
MOUNTINFO = mountinfo.PATH
SYMLINKS_MAX = 40
SMALL_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class KernelMount:
    """A mount of ours in this mount namespace."""

    mountpoint: str
    device: str
    source: str
    owner: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """The mount that a path lies in, and the path relative to its root ("" is the root)."""

    mount: KernelMount
    entry: Entry | None
    relative: str


def parse_mountinfo(data: bytes) -> tuple[list[KernelMount], set[str]]:
    """(our mounts that are not covered by a later one, all mount points) of a mountinfo file."""
    ours: dict[str, KernelMount] = {}
    points: set[str] = set()
    for mount in mountinfo.parse(data):
        points.add(mount.mountpoint)
        ours.pop(mount.mountpoint, None)
        if mount.kind.startswith(FUSE_TYPE):
            owner = re.search(r"\buser_id=(\d+)", mount.options)
            ours[mount.mountpoint] = KernelMount(
                mount.mountpoint, mount.device, mount.source, int(owner.group(1)) if owner else 0
            )
    return list(ours.values()), points


def read_mountinfo() -> tuple[list[KernelMount], set[str]]:
    """``parse_mountinfo`` of this process."""
    with open(MOUNTINFO, "rb") as file:
        return parse_mountinfo(file.read())


def runtime_dirs() -> list[str]:
    """Where mounts that this user may ask about are registered, the user's own directory first.

    A mount made by a Slurm prolog, by root or without ``XDG_RUNTIME_DIR``, is registered elsewhere than the shell
    of the user would look. ``CACHEXFS_RUNTIME_DIR`` says that there is only one.
    """
    own = default_runtime_dir()
    if os.environ.get("CACHEXFS_RUNTIME_DIR"):
        return [own]
    uid = os.geteuid()
    places = [own, f"/tmp/cachexfs-{uid}", RUNTIME_DIR_ROOT, f"{RUNTIME_DIR_ROOT}/{uid}"]
    if uid == 0:  # what root has mounted for others
        with suppress(OSError):
            places += [os.path.join(RUNTIME_DIR_ROOT, name) for name in os.listdir(RUNTIME_DIR_ROOT) if name.isdigit()]
    return list(dict.fromkeys(places))


def read_small(path: str) -> bytes:
    """A small regular file, which its writer could have made anything else. Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return os.read(fd, SMALL_BYTES_MAX)
    finally:
        os.close(fd)


def registry(runtime_dir: str | None = None) -> list[Entry]:
    """Entries of ``runtime_dir`` (default: ``runtime_dirs()``), newest first; unreadable ones left out."""
    entries: list[Entry] = []
    for directory in [runtime_dir] if runtime_dir else runtime_dirs():
        try:
            # Anybody can make a directory in /tmp: what others wrote is not believed. Where root looks on purpose it
            # believes them, but of their own mounts only (see ``entry_of``).
            owner = os.stat(directory).st_uid
            is_meant = os.geteuid() == 0 and not directory.startswith("/tmp/cachexfs-")
            if owner not in (0, os.geteuid()) and not is_meant:
                continue
            names = [name for name in os.listdir(directory) if name.endswith(".json")]
        except OSError:
            continue
        for name in names:
            with suppress(OSError, ValueError):
                found = msgspec.convert(json.loads(read_small(os.path.join(directory, name))), Entry)
                if owner in (0, os.geteuid()) or os.path.dirname(found.socket) == directory:
                    entries.append(msgspec.structs.replace(found, owner=owner))
    return sorted(entries, key=lambda entry: entry.started_s, reverse=True)


def is_alive(pid: int) -> bool:
    """Whether a process of that id runs. One that has ended and waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def entry_of(mount: KernelMount, entries: list[Entry]) -> Entry | None:
    """The registered daemon of a mount: the same device, since other namespaces may have the same mount point."""
    return next((e for e in entries if e.device == mount.device and e.owner in (0, os.geteuid(), mount.owner)), None)


def draining(mountpoint: str, entries: list[Entry]) -> Entry | None:
    """The registered daemon that still drains a mount which was taken away from it, or whose supervisor has died."""
    return next((e for e in entries if e.mountpoint == mountpoint and not e.device and is_alive(e.pid)), None)


def is_below(path: str, mountpoint: str) -> bool:
    """Whether a path, absolute and without symlinks, is the mount point or lies in it."""
    return path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/")


def _holding(path: str, mounts: list[KernelMount]) -> KernelMount | None:
    found = [mount for mount in mounts if is_below(path, mount.mountpoint)]
    return max(found, key=lambda mount: len(mount.mountpoint)) if found else None


def resolve(path: str, mounts: list[KernelMount]) -> str:
    """Absolute path with symlinks followed outside our mounts only; nothing inside one is touched."""
    pending = os.path.abspath(path).split("/")[1:]
    current = "/"
    followed = 0
    while pending:
        part = pending.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            current = os.path.dirname(current)
            continue
        following = os.path.join(current, part)
        if _holding(following, mounts):
            return os.path.normpath(os.path.join(following, *pending))
        try:
            target = os.readlink(following)
        except OSError:
            current = following
            continue
        followed += 1
        if followed > SYMLINKS_MAX:
            raise CannotTellError(f"too many symbolic links in '{path}'")
        pending = target.split("/") + pending
        current = "/" if target.startswith("/") else current
    return current


def find(path: str, runtime_dir: str | None = None) -> Found | None:
    """The mount of ours that ``path`` lies in, or None. The path need not exist."""
    mounts, _ = read_mountinfo()
    absolute = resolve(path, mounts)
    mount = _holding(absolute, mounts)
    if mount is None:
        return None
    relative = os.path.relpath(absolute, mount.mountpoint)
    return Found(mount, entry_of(mount, registry(runtime_dir)), "" if relative == "." else relative)
