"""What this machine has: memory, addresses.

Role: base layer; asked when options get their defaults and staging its size.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cachexfs.errors import UsageError

if TYPE_CHECKING:
    from cachexfs.config import NodeAddress


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


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def is_local(host: str) -> bool:
    """Whether a numeric address belongs to this machine (a name is not looked up)."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.inet_pton(family, host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def listen_host(own: NodeAddress, addresses: Sequence[NodeAddress]) -> str:
    """The node's own address, or all interfaces ("") where its name leads to the loopback (Debian's 127.0.1.1)."""
    if all(address.host == own.host for address in addresses):
        return own.host
    try:
        found = socket.getaddrinfo(own.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    numeric = [str(entry[4][0]) for entry in found]
    if any(address == own.host for address in numeric):
        return own.host
    return "" if any(address.startswith("127.") or address == "::1" for address in numeric) else numeric[0]


_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs")


def is_on_disk(directory: str, root: str = "/") -> bool:
    """Whether a directory lies on a local disk's file system: not in memory, not on a network."""
    try:
        device = os.stat(directory).st_dev
    except OSError:
        return False
    for line in _text(os.path.join(root, "proc/self/mountinfo")).splitlines():
        fields, _, described = line.partition(" - ")
        major, minor = fields.split()[2].split(":")
        if os.makedev(int(major), int(minor)) == device:
            return described.split()[0] in _DISKS
    return False


def is_own(directory: str) -> bool:
    """Whether a directory belongs to this user, or is not there yet."""
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
