"""The replicas that this node keeps for others, on its NVMe.

Role: adaptor over one directory. ``PeerServer`` writes and commits here for peers; the engine reads, lists and drops
when a node is lost; ``cachexfs recover`` opens it with no daemon.

Concurrency: coroutines of one trio thread; file work runs in threads of two bounded sets (fsyncs do not hold up
writes). Calls for one stage take turns under its lock; reads take no lock, since committed bytes never change. A
cancelled call ends after its file operation, which is never left half done. One process at a time (``lock``).
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Callable
from typing import TypeVar

import trio

from cachexfs.adapters import replica_copy
from cachexfs.adapters.file_digest import digest_file
from cachexfs.adapters.replica_copy import MANIFEST_SUFFIX, PARTIAL, Committed, ReplicaCopy
from cachexfs.core import manifest as manifests
from cachexfs.core.digest import Buffer, split_blocks
from cachexfs.core.manifest import Manifest
from cachexfs.errors import CorruptError, UsageError

log = logging.getLogger(__name__)

T = TypeVar("T")

WRITE_THREADS = 8
SYNC_THREADS = 8
IDENTITY = "store"
LOCK = "lock"
_IDENTITY_CHARS = 32


class ReplicaStore:
    """A directory of replicas. Make one with ``open_blocking`` (in a thread where a mount is served) or ``open``."""

    def __init__(self, directory: str, identity: str, lock_fd: int) -> None:
        self.directory = directory
        self.identity = identity
        self._lock_fd = lock_fd
        self._copies: dict[str, ReplicaCopy] = {}
        self._locks: dict[str, trio.Lock] = {}
        self._write_limiter = trio.CapacityLimiter(WRITE_THREADS)
        self._sync_limiter = trio.CapacityLimiter(SYNC_THREADS)
        #: stage -> why a committed replica found at the start cannot be used; its files are kept until dropped
        self.damaged: dict[str, str] = {}

    @classmethod
    async def open(cls, directory: str) -> ReplicaStore:
        """``open_blocking`` in a thread."""
        return await trio.to_thread.run_sync(cls.open_blocking, directory)

    @classmethod
    def open_blocking(cls, directory: str) -> ReplicaStore:
        """Take over a directory (made if need be): committed replicas are kept, unfinished ones removed.

        Raises ``UsageError`` when another process has it open, ``OSError``.
        """
        directory = os.path.abspath(directory)
        partial = os.path.join(directory, PARTIAL)
        os.makedirs(partial, mode=0o700, exist_ok=True)
        lock_fd = os.open(os.path.join(directory, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{directory} is in use by another daemon: stop it, or choose another nvme") from None
            self = cls(directory, _identity(directory), lock_fd)
            self._load()
            for name in os.listdir(partial):
                os.unlink(os.path.join(partial, name))
        except BaseException:
            os.close(lock_fd)
            raise
        return self

    def _load(self) -> None:
        names = os.listdir(self.directory)
        data = [(name, found) for name in names if (found := replica_copy.split_data_name(name))]
        number_max: dict[str, int] = {}
        for _, (stage, number) in data:
            number_max[stage] = max(number, number_max.get(stage, 0))
        keep: set[str] = set()
        for name in names:
            stage = name.removesuffix(MANIFEST_SUFFIX)
            if stage == name:
                continue
            try:
                manifests.check_stage(stage)
                committed = replica_copy.load_committed(self.directory, stage)
            except (ValueError, CorruptError, OSError) as error:
                self.damaged[stage] = str(error)
                log.error("replica %s in %s cannot be used: %s", stage, self.directory, error)  # noqa: TRY400
                continue
            self._copies[stage] = ReplicaCopy(self.directory, stage, committed, number_max.get(stage, 0))
            keep.add(os.path.basename(committed.path))
        for name, (stage, _) in data:
            if name not in keep and stage not in self.damaged:
                os.unlink(os.path.join(self.directory, name))  # never committed, or replaced by a later version

    def close(self) -> None:
        """Give the directory back. Copies in progress stay on disk until the next opening."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # --- what is there -----------------------------------------------------------------------------------------

    def list(self) -> tuple[Manifest, ...]:
        """Manifests of all committed replicas."""
        return tuple(copy.snapshot.manifest for copy in self._copies.values() if copy.snapshot)

    def unfinished(self) -> tuple[str, ...]:
        """Stages with a copy in progress."""
        return tuple(stage for stage, copy in self._copies.items() if copy.in_progress)

    def manifest(self, stage: str) -> bytes | None:
        """The committed manifest, encoded; None when the stage is not held."""
        found = self.find(stage)
        return manifests.encode(found) if found else None

    def find(self, stage: str) -> Manifest | None:
        """The committed manifest; None when the stage is not held."""
        committed = self.committed(stage)
        return committed.manifest if committed else None

    def committed(self, stage: str) -> Committed | None:
        """The committed version with its path; None when the stage is not held."""
        copy = self._copies.get(stage)
        return copy.snapshot if copy else None

    @property
    def used_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(copy.used_bytes for copy in self._copies.values())

    # --- changes -----------------------------------------------------------------------------------------------

    async def write_block(self, stage: str, offset: int, block: Buffer, digest: bytes) -> None:
        """Check a block against its digest and write it to the copy in progress (not synced).

        ``offset`` is a multiple of 1 MiB, the block at most 1 MiB. Raises ``ValueError``, ``CorruptError``, ``OSError``
        (ENOSPC, EIO, ...: the copy in progress is gone, the committed version is untouched).
        """
        view = replica_copy.buffer_view(block)
        await self._locked(stage, self._write_limiter, lambda copy: copy.write_block(offset, view, digest))

    async def commit(self, stage: str, manifest: bytes) -> str:
        """Make the copy in progress durable as the manifest describes it; returns the store's identity.

        Raises ``CorruptError`` naming a block that is missing or wrong (send it and commit again), ``OSError`` as
        ``write_block``.
        """
        await self._locked(stage, self._sync_limiter, lambda copy: copy.commit(manifest))
        self.damaged.pop(stage, None)
        return self.identity

    async def abandon(self, stage: str) -> None:
        """Forget a copy in progress; the committed version stays."""
        if stage in self._copies:
            await self._locked(stage, self._write_limiter, ReplicaCopy.abandon)

    async def drop(self, stage: str) -> None:
        """Remove a replica, committed or not; nothing happens when there is none."""
        if stage in self._copies or stage in self.damaged:
            await self._locked(stage, self._sync_limiter, self._drop_blocking)
            self.damaged.pop(stage, None)

    def _drop_blocking(self, copy: ReplicaCopy) -> None:
        copy.drop()
        if copy.stage in self.damaged:
            for name in os.listdir(self.directory):
                found = replica_copy.split_data_name(name)
                if found and found[0] == copy.stage:
                    os.unlink(os.path.join(self.directory, name))

    async def _locked(self, stage: str, limiter: trio.CapacityLimiter, work: Callable[[ReplicaCopy], T]) -> T:
        lock = self._locks.setdefault(manifests.check_stage(stage), trio.Lock())
        try:
            async with lock:
                copy = self._copies.get(stage) or ReplicaCopy(self.directory, stage, number_max=self._number_max(stage))
                self._copies[stage] = copy
                try:
                    return await trio.to_thread.run_sync(work, copy, limiter=limiter)
                finally:
                    if copy.snapshot is None and not copy.in_progress:
                        self._copies.pop(stage, None)
        finally:
            if not lock.locked():
                self._locks.pop(stage, None)

    def _number_max(self, stage: str) -> int:
        """The highest version on disk: only a damaged replica has one that no ``ReplicaCopy`` knows."""
        if stage not in self.damaged:
            return 0
        numbers = [found[1] for name in os.listdir(self.directory) if (found := replica_copy.split_data_name(name))]
        return max(numbers, default=0)

    # --- reading -----------------------------------------------------------------------------------------------

    async def read_into(self, stage: str, offset: int, view: memoryview) -> int:
        """Fill ``view`` from the committed version; returns the bytes that there are, checked against their digests.

        Raises ``FileNotFoundError``, ``CorruptError`` for a damaged block, ``OSError``.
        """
        while True:
            committed = self.committed(stage)
            if committed is None:
                raise FileNotFoundError(2, "no replica", stage)
            try:
                return await trio.to_thread.run_sync(
                    replica_copy.read_into, committed, offset, view, limiter=self._write_limiter
                )
            except (FileNotFoundError, CorruptError):
                # A commit in the meantime may have replaced the version under this reader.
                if self.committed(stage) is committed:
                    raise

    async def read(self, stage: str, offset: int, length: int) -> bytes:
        """``read_into`` as bytes."""
        buffer = bytearray(length)
        count = await self.read_into(stage, offset, memoryview(buffer))
        return bytes(memoryview(buffer)[:count])

    def open_copy(self, stage: str) -> tuple[int, int] | None:
        """(descriptor, bytes) of a committed version, unchecked; the caller closes the descriptor."""
        committed = self.committed(stage)
        if committed is None:
            return None
        fd = os.open(committed.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return fd, committed.manifest.size

    async def verify(self, stage: str) -> tuple[int, ...]:
        """Read a committed replica in full; returns the blocks that are not the manifest's ((-1,): the whole is not).

        Raises ``FileNotFoundError``, ``OSError``.
        """
        committed = self.committed(stage)
        if committed is None:
            raise FileNotFoundError(2, "no replica", stage)
        return await trio.to_thread.run_sync(_verify, committed, limiter=self._write_limiter)


def _verify(committed: Committed) -> tuple[int, ...]:
    manifest = committed.manifest
    try:
        whole, _, blocks = digest_file(committed.path, manifest.size)
    except CorruptError:
        return (-1,)
    due = split_blocks(manifest.blocks)
    wrong = tuple(index for index, found in enumerate(blocks) if found != due[index])
    return wrong or (() if whole == manifest.digest else (-1,))


def _identity(directory: str) -> str:
    path = os.path.join(directory, IDENTITY)
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read(1000).strip()
    except FileNotFoundError:
        text = secrets.token_hex(_IDENTITY_CHARS // 2)
        temporary = os.path.join(directory, PARTIAL, IDENTITY)
        replica_copy.write_synced(temporary, text.encode())
        os.rename(temporary, path)
        replica_copy.fsync_path(directory)
    if len(text) != _IDENTITY_CHARS or not set(text) <= set("0123456789abcdef"):
        raise CorruptError(f"{path} does not hold a store's identity: remove the directory to give up its replicas")
    return text
