"""What NVMe does to real files: a power cut leaves what was synced, and of the rest what the seed chooses; later
bytes change, are cut, or cannot be read; for a while it takes no write, or does not sync.

Role: below the real replica store and the real staging of a simulated node. It follows the calls of ``fsync`` (which
do nothing else here) in the directories that it is told of. Concurrency: none, each call is one step.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import trio

from cachexfs.adapters import file_digest, replica_copy

REFUSALS = (errno.ENOSPC, errno.EIO, errno.EROFS)
PARTIAL = "partial"  # where the replica store's files are made before they get their names
Names = dict[str, int]


class Nvme:
    """The disks of all nodes of a run, below ``root``. ``counts``: what has happened."""

    def __init__(self, root: str, rng: random.Random) -> None:
        self._root, self._random = root, rng
        self._bytes: dict[int, bytes] = {}  # inode -> what was synced of it
        self._names: dict[str, Names] = {}  # directory -> what was synced of it
        self.unreadable: set[int] = set()
        self.changed: set[str] = set()  # stages of which something was changed behind everybody's back
        self.refusing: dict[str, float] = {}  # a node's directory -> the probability that a write or a sync there fails
        self.counts: Counter[str] = Counter()

    # ---- syncs
    def synced(self, fd: int) -> None:
        """fsync(2), fdatasync(2). Of a new file it syncs the name, too, as journalling filesystems do."""
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not path.startswith(self._root):
            return
        self._check(path, "a sync")
        if os.path.isdir(path):
            self._names[path] = _names(path)
            return
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            self._bytes[os.fstat(fd).st_ino] = file.read()

    # ---- a power cut
    def power_cut(self, directory: str) -> None:
        """The node that has this directory has lost its power."""
        for path, _, _ in os.walk(directory):
            self._settle_names(path)
        for path, _, names in os.walk(directory):
            for name in names:
                self._settle_bytes(os.path.join(path, name))
            self._names[path] = _names(path)

    def _settle_names(self, directory: str) -> None:
        there, synced = _names(directory), self._names.get(directory, {})
        for name, ino in there.items():
            path = os.path.join(directory, name)
            if synced.get(name) == ino or os.path.isdir(path) or name in ("lock", "store"):
                continue
            fate = self._random.choice(["there", "there", "not", "back"])
            partial = os.path.join(directory, PARTIAL)
            if fate == "back" and os.path.isdir(partial):
                os.rename(path, os.path.join(partial, name))
            elif fate != "there":
                os.unlink(path)
                self.counts["a name that was not synced is gone"] += 1
        for name, ino in synced.items():
            path = os.path.join(directory, name)
            if not os.path.exists(path) and ino in self._bytes and self._random.random() < 0.5:
                with open(path, "wb") as file:
                    file.write(self._bytes[ino])
                self._bytes[os.stat(path).st_ino] = self._bytes[ino]
                self.counts["a name that had changed and was not synced is back"] += 1

    def _settle_bytes(self, path: str) -> None:
        ino = os.stat(path).st_ino
        with open(path, "rb") as file:
            now = file.read()
        synced = self._bytes.get(ino, b"")
        if now == synced or path.endswith(("/lock", "/store")):
            return
        cut = now[: self._random.randrange(len(now) + 1)]
        left = self._random.choice([now, synced, cut, bytes(len(now)), self._random.randbytes(len(now))])
        with open(path, "wb") as file:
            file.write(left)
        self._bytes[ino] = left
        self.counts["a file that was not synced is torn"] += left not in (now, synced)

    # ---- later
    def spoil(self, path: str, stage: str) -> None:
        """Bytes of a file change, or it is cut, or cannot be read any more."""
        self.changed.add(stage)
        how = self._random.choice(["changed", "cut", "unreadable"])
        self.counts[how] += 1
        size = os.stat(path).st_size
        if how == "unreadable":
            self.unreadable.add(os.stat(path).st_ino)
        elif how == "cut":
            os.truncate(path, self._random.randrange(size))
        else:
            at = self._random.randrange(size)
            fd = os.open(path, os.O_RDWR)
            os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 0xFF]), at)
            os.close(fd)

    def check_readable(self, fd: int) -> None:
        """Before a read. Raises ``OSError``."""
        if self.unreadable and os.fstat(fd).st_ino in self.unreadable:
            self.counts["EIO of a read"] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def check_writable(self, fd: int) -> None:
        """Before a write. Raises ``OSError``."""
        if self.refusing:
            self._check(os.readlink(f"/proc/self/fd/{fd}"), "a write")

    def _check(self, path: str, what: str) -> None:
        for directory, failing in self.refusing.items():
            if path.startswith(directory + "/") and self._random.random() < failing:
                self.counts[f"{what} is refused"] += 1
                code = self._random.choice(REFUSALS)
                raise OSError(code, os.strerror(code), path)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Calls of this process meet these disks."""
        read_exactly, run_sync = file_digest.read_exactly, trio.to_thread.run_sync
        write_all = replica_copy._write_all

        def read(fd: int, view: memoryview, offset: int) -> None:
            self.check_readable(fd)
            read_exactly(fd, view, offset)

        def write(fd: int, view: memoryview, offset: int | None) -> None:
            self.check_writable(fd)
            write_all(fd, view, offset)

        async def thread(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if function is os.pread:
                self.check_readable(args[0])
            return await run_sync(function, *args, **options)

        with (
            mock.patch.object(os, "fsync", self.synced),
            mock.patch.object(os, "fdatasync", self.synced),
            mock.patch.object(file_digest, "read_exactly", read),
            mock.patch.object(replica_copy, "read_exactly", read),
            mock.patch.object(replica_copy, "_write_all", write),
            mock.patch.object(trio.to_thread, "run_sync", thread),
        ):
            yield


def _names(directory: str) -> Names:
    with os.scandir(directory) as found:
        return {entry.name: entry.inode() for entry in found}
