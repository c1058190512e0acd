"""What mounts have left in staging on this node: data that is not on the PFS and waits for the next mount.

Role: for ``status``, and for the warning of a mount whose PFS is away. Found by the registry's entries of daemons that
have ended, and in the places where staging lies by default (an entry goes when the user's ``XDG_RUNTIME_DIR`` goes).
Reads staging only; what a living daemon uses is left out. No concurrency.
"""

from __future__ import annotations

import glob
import os
import shlex
import subprocess
from contextlib import suppress
from dataclasses import dataclass

from cachexfs import ended, mountinfo, staged, tmpfs
from cachexfs.cli import client, mounts, recovery_child
from cachexfs.cli.child import run_in_child
from cachexfs.cli.identity import acting_as
from cachexfs.config import mount_id
from cachexfs.core.sizes import format_size
from cachexfs.errors import CacheXError, CannotTellError
from cachexfs.recovery.report import Pending, Request
from cachexfs.registration import Entry

LOCK = "lock"  # of the daemon that uses the directory
LOCKS = "/proc/locks"
PFS_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A staging directory and the mount that it belongs to."""

    directory: str
    owner: staged.Owner


@dataclass(frozen=True, slots=True)
class Left:
    """How much waits in one: ``pending`` is None when only other nodes, or its user, could tell, or its journal is not
    whole. ``has_landed``: other nodes have told that all of it is on the PFS."""

    waits: Waiting
    staged_bytes: int
    pending: Pending | None
    has_landed: bool = False

    @property
    def is_data(self) -> bool:
        """Whether something of it may not be on the PFS."""
        return not self.has_landed and (self.pending is None or self.pending.changes > 0)

    @property
    def amount(self) -> str:
        """``3.0 MiB in 2 changes``, or how much there may be at most."""
        if self.has_landed:
            return "nothing"
        if self.pending is None:
            return f"up to {format_size(self.staged_bytes)}" if self.staged_bytes else "at most changes of names"
        count = self.pending.changes
        return f"{format_size(self.pending.size)} in {count} change{'' if count == 1 else 's'}" if count else "nothing"

    @property
    def ways_on(self) -> list[tuple[str, str]]:
        """(when, command) of each command that brings it to the PFS."""
        owner = self.waits.owner
        if self.has_landed:
            return [("give it back", shlex.join(["cachexfs", "umount", owner.mountpoint]))]
        of_root = any(word.startswith("user=") for word in owner.words) and os.geteuid() != 0
        ways = [("go on, as root" if of_root else "go on", staged.mount_command(owner))]
        if owner.nvme_directory is not None:
            command = ["cachexfs", "recover", os.path.dirname(owner.nvme_directory), "--to", owner.pfs]
            where = self.waits.directory
            when = f"if the job has ended: on each of its nodes (once its files are on the PFS, remove {where})"
            ways.append((when, shlex.join(command)))
        return ways

    @property
    def sentence(self) -> str:
        """``ways_on`` in one line."""
        return "; ".join(f"{when}: {staged.quoted(command)}" for when, command in self.ways_on)

    def as_json(self) -> dict[str, object]:
        """As ``status --json`` has it."""
        owner = self.waits.owner
        return {
            "mountpoint": owner.mountpoint, "pfs": owner.pfs, "node": owner.node, "job": owner.job, "mounted": False,
            "staging": self.waits.directory, "staging_used": self.staged_bytes,
            "pending_bytes": 0 if self.has_landed else self.pending.size if self.pending else None,
            "pending_ops": 0 if self.has_landed else self.pending.changes if self.pending else None,
            "command": self.ways_on[0][1],
        }  # fmt: skip


def look(waits: Waiting) -> Left:
    """How much is in it. The catalogue of another user, who could have put anything there, is not read (by root)."""
    places = [os.path.join(waits.directory, "files"), waits.owner.spill_directory]
    pending = None
    with suppress(CacheXError, OSError):
        if os.stat(waits.directory).st_uid == os.geteuid():
            pending = recovery_child.ask(Request(None, None, pending=waits.directory)).pending
    return Left(waits, sum(_bytes_below(place) for place in places if place is not None), pending, has_landed(waits))


def has_landed(waits: Waiting) -> bool:
    """Whether other nodes have brought to the PFS what this one had left. One that cannot be asked does not say so."""
    return is_marked(waits.directory, waits.owner.pfs)


def is_marked(directory: str, pfs: str) -> bool:
    """The same of any directory that a mount has left, staging or on NVMe."""

    def look() -> bool:
        with acting_as(user):
            return ended.has_landed(directory, pfs)

    try:
        user = _user_of(directory)
        return bool(ended.token_in(directory)) and run_in_child(look, PFS_TIMEOUT_S)
    except (OSError, TimeoutError):
        return False


def give_back_nvme(directory: str) -> None:
    """Remove what ``is_marked`` of a node's NVMe, the etcd member with it. Raises ``CannotTellError``."""
    try:
        with acting_as(_user_of(directory)):
            ended.clear_nvme(directory)
    except OSError as error:
        raise CannotTellError(f"{directory} cannot be given back: {error.strerror}") from None


def _user_of(directory: str) -> tuple[int, int] | None:
    """As whom to touch what a staging directory names: its user, who could have written anybody's paths there."""
    status = os.stat(directory)
    return None if status.st_uid == os.geteuid() else (status.st_uid, status.st_gid)


def give_back(waits: Waiting) -> None:
    """Remove what ``has_landed``: memory, NVMe, the etcd member. Raises ``UsageError``, ``CannotTellError``."""
    owner = waits.owner
    try:
        with acting_as(_user_of(waits.directory)):
            ended.clear(waits.directory, owner.nvme_directory, owner.spill_directory)
    except OSError as error:
        raise CannotTellError(f"{waits.directory} cannot be given back: {error.strerror}") from None
    if os.geteuid() == 0 and _is_our_tmpfs(waits.directory):
        subprocess.run(["umount", "-l", waits.directory], capture_output=True, check=False)
    with suppress(OSError):
        os.rmdir(waits.directory)


def _is_our_tmpfs(directory: str) -> bool:
    """Whether root has mounted it for staging: a user's registry entry could name any other mount."""
    on_top = next((mount for mount in reversed(mountinfo.read()) if mount.mountpoint == directory), None)
    return on_top is not None and (on_top.kind, on_top.source) == ("tmpfs", tmpfs.SOURCE)


def _bytes_below(directory: str) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue
    return total


def find(runtime_dir: str | None = None) -> list[Waiting]:
    """All that this user may see, by mount point. Other users' are left out, but by root, who mounts for them.

    ``runtime_dir``: a further place where mounts are registered.
    """
    entries = mounts.registry() + (mounts.registry(runtime_dir) if runtime_dir is not None else [])
    directories = {entry.staging: entry.owner for entry in entries if entry.staging}
    uid = os.geteuid()
    if not os.environ.get("CACHEXFS_RUNTIME_DIR"):
        for pattern in [f"/dev/shm/cachexfs-{uid}-*", *(f"{place}/staging/*" for place in mounts.runtime_dirs())]:
            for directory in glob.glob(pattern):
                directories.setdefault(directory, uid)
    alive = {_key(entry.mountpoint, entry.node) for entry in entries if _lives(entry)}
    locked = _locked()
    found = []
    for directory, whose in directories.items():
        try:
            if os.stat(directory).st_uid not in (whose, uid) or _inode(os.path.join(directory, LOCK)) in locked:
                continue
        except OSError:
            continue
        owner = staged.read(directory)
        if owner is not None and _key(owner.mountpoint, owner.node) not in alive:
            found.append(Waiting(directory, owner))
    return sorted(found, key=lambda waits: waits.owner.mountpoint)


def find_at(path: str) -> Waiting | None:
    """What the mount left in which ``path`` lay, if it is not mounted now."""
    absolute = mounts.resolve(path, [])
    held = [waits for waits in find() if mounts.is_below(absolute, waits.owner.mountpoint)]
    return max(held, key=lambda waits: len(waits.owner.mountpoint)) if held else None


def _key(mountpoint: str, node: str) -> str:
    return mount_id(mountpoint, node)


def _lives(entry: Entry) -> bool:
    return mounts.is_alive(entry.pid) or client.is_supervised(entry)


def _inode(path: str) -> tuple[int, int, int]:
    status = os.stat(path)
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino


def _locked() -> set[tuple[int, int, int]]:
    """(major, minor, inode number) of all files that processes on this machine have locked with flock(2)."""
    found = set()
    try:
        with open(LOCKS, encoding="ascii", errors="replace") as file:
            for line in file:
                words = line.split()
                if "FLOCK" in words and (place := next((w for w in words if w.count(":") == 2), "")):
                    major, minor, inode = place.split(":")
                    found.add((int(major, 16), int(minor, 16), int(inode)))
    except (OSError, ValueError):
        return found
    return found
