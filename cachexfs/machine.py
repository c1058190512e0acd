"""What this machine has: memory, disks, processors.

Role: base layer; asked when options get their defaults and staging its size.
"""

from __future__ import annotations

import os
import resource
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cachexfs import mountinfo
from cachexfs.errors import UsageError

BACKGROUND_NICE = 5


def take_precedence(nice: int) -> None:
    """Give this process a priority, as in nice(1), to which its threads may come back from the background."""
    with suppress(OSError, ValueError):  # who may not raise the limit needs it only as another user
        resource.setrlimit(resource.RLIMIT_NICE, (20 - nice, 20 - nice))
    with suppress(OSError):  # root of a container may lack CAP_SYS_NICE
        os.setpriority(os.PRIO_PROCESS, 0, nice)


@contextmanager
def in_background() -> Iterator[None]:
    """The calling thread leaves the processors to others, where it may come back from that."""
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    if os.geteuid() != 0 and resource.getrlimit(resource.RLIMIT_NICE)[0] < 20 - before:
        yield
        return
    os.setpriority(os.PRIO_PROCESS, thread, max(before, BACKGROUND_NICE))
    try:
        yield
    finally:
        with suppress(PermissionError):  # root without CAP_SYS_NICE
            os.setpriority(os.PRIO_PROCESS, thread, before)


def memory_limit_bytes(root: str = "/") -> int:
    """What this process may use: the least of its cgroups' limits (v1 and v2) and the machine's memory.

    ``root`` is where ``proc`` and ``sys`` are looked for (tests). Raises ``UsageError`` when nothing can be read.
    """
    limits: list[int] = []
    for line in _text(os.path.join(root, "proc/meminfo")).splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    for line in _text(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            candidates = [("sys/fs/cgroup", "memory.max"), ("sys/fs/cgroup/unified", "memory.max")]
        elif "memory" in controllers.split(","):
            candidates = [("sys/fs/cgroup/memory", "memory.limit_in_bytes")]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base, name in candidates:
            for depth in range(len(parts) + 1):
                text = _text(os.path.join(root, base, *parts[:depth], name)).strip()
                if text.isdigit():
                    limits.append(int(text))
    if not limits:
        raise UsageError("cannot tell how much memory there is: give memory=SIZE, such as memory=64G")
    return min(limits)


def available_memory_bytes(root: str = "/") -> int:
    """What the kernel says could still be used without swapping; 0 when it does not say."""
    for line in _text(os.path.join(root, "proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs")


def is_on_disk(directory: str, root: str = "/") -> bool:
    """Whether a directory lies on a local disk's file system: not in memory, not on a network."""
    try:
        device = os.stat(directory).st_dev
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        found = mountinfo.read(os.path.join(root, "proc/self/mountinfo"))
    except OSError:
        return False
    return next((mount.kind in _DISKS for mount in found if mount.device == number), False)


def is_own(directory: str) -> bool:
    """Whether a directory belongs to this user, or is not there yet."""
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
