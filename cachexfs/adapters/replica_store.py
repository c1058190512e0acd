"""The replicas that this node keeps for others, on its NVMe.

Role: adaptor over one directory. ``PeerServer`` writes and commits here for peers; the engine reads, lists and drops
when a node is lost; ``cachexfs recover`` opens it with no daemon.

Concurrency: coroutines of one trio thread; file work runs in threads of two bounded sets (fsyncs do not hold up
writes). Calls for one stage take turns under its lock; reads take no lock, since committed bytes never change. A
cancelled call ends after its file operation, which is never left half done. One process at a time (``lock``).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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

    def __init__(self, directory: str, identity: str, lock_fd: int, read_only: bool) -> None:
        self.directory = directory
        self.identity = identity
        self._lock_fd = lock_fd
        self._read_only = read_only
        self._copies: dict[str, ReplicaCopy] = {}
        self._locks: dict[str, trio.Lock] = {}
        self._queues: dict[str, deque[_QueuedBlock]] = {}
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
        replica_copy.make_directory_synced(partial)
        lock_fd = os.open(os.path.join(directory, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{directory} is in use by another daemon: stop it, or choose another nvme") from None
            self = cls(directory, _identity(directory), lock_fd, read_only=False)
            self._load()
            for name in os.listdir(partial):
                os.unlink(os.path.join(partial, name))
        except BaseException:
            os.close(lock_fd)
            raise
        return self

    @classmethod
    def inspect_blocking(cls, directory: str) -> ReplicaStore:
        """What a directory holds, without changing or locking it: for a disk that takes no writes any more, or beside
        a running daemon. Writing to it raises EROFS. Raises ``FileNotFoundError`` when there is no store.
        """
        directory = os.path.abspath(directory)
        self = cls(directory, _read_identity(directory), -1, read_only=True)
        self._load()
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
                committed = replica_copy.load_committed(self.directory, stage, self._read_only)
            except (ValueError, CorruptError, OSError) as error:
                self.damaged[stage] = str(error)
                log.error("replica %s in %s cannot be used: %s", stage, self.directory, error)
                continue
            self._copies[stage] = ReplicaCopy(self.directory, stage, committed, number_max.get(stage, 0))
            keep.add(os.path.basename(committed.path))
        if self._read_only:
            return
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
        block_ = _QueuedBlock(offset, replica_copy.buffer_view(block), digest)
        queue = self._queues.setdefault(manifests.check_stage(stage), deque())
        queue.append(block_)
        try:
            async with self._turn(stage) as copy:
                # Whoever has the turn writes all that wait: on a busy machine the way to a thread costs more than a
                # write. Blocks leave the queue in the thread: a turn cancelled before it has taken none.
                if not block_.written.is_set():
                    for done in await trio.to_thread.run_sync(_write_queued, copy, queue, limiter=self._write_limiter):
                        done.written.set()
        finally:
            try:
                queue.remove(block_)
            except ValueError:
                # The caller's buffer is free only when no thread reads it any more.
                with trio.CancelScope(shield=True):
                    await block_.written.wait()
            if not queue and self._queues.get(stage) is queue:
                del self._queues[stage]
        if block_.error is not None:
            raise block_.error

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
        async with self._turn(stage) as copy:
            return await trio.to_thread.run_sync(work, copy, limiter=limiter)

    @asynccontextmanager
    async def _turn(self, stage: str) -> AsyncIterator[ReplicaCopy]:
        """The only call that works on this stage's files, in the order of asking."""
        if self._read_only:
            raise OSError(errno.EROFS, "the store was opened for reading only", self.directory)
        lock = self._locks.setdefault(manifests.check_stage(stage), trio.Lock())
        try:
            async with lock:
                copy = self._copies.get(stage) or ReplicaCopy(self.directory, stage, number_max=self._number_max(stage))
                self._copies[stage] = copy
                try:
                    yield copy
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


class _QueuedBlock:
    """A block on its way to the disk. ``view`` is the caller's until ``written``, which says nothing of success."""

    def __init__(self, offset: int, view: memoryview, digest: bytes) -> None:
        self.offset = offset
        self.view = view
        self.digest = digest
        self.written = trio.Event()
        self.error: Exception | None = None


def _write_queued(copy: ReplicaCopy, queue: deque[_QueuedBlock]) -> list[_QueuedBlock]:
    """Write what waits now; returns the blocks taken. An error of the disk ends all of them: see ``write_block``."""
    taken: list[_QueuedBlock] = []
    disk_error: OSError | None = None
    for _ in range(len(queue)):
        try:
            block = queue.popleft()
        except IndexError:
            break  # its caller was cancelled and has taken it out
        taken.append(block)
        if disk_error is not None:
            block.error = disk_error
            continue
        try:
            copy.write_block(block.offset, block.view, block.digest)
        except OSError as error:
            disk_error = block.error = error
        except Exception as error:
            block.error = error
    return taken


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
    try:
        return _read_identity(directory)
    except FileNotFoundError:
        text = secrets.token_hex(_IDENTITY_CHARS // 2)
        temporary = os.path.join(directory, PARTIAL, IDENTITY)
        replica_copy.write_synced(temporary, text.encode())
        os.rename(temporary, os.path.join(directory, IDENTITY))
        replica_copy.fsync_path(directory)
        return text


def _read_identity(directory: str) -> str:
    path = os.path.join(directory, IDENTITY)
    with open(path, encoding="ascii", errors="replace") as file:
        text = file.read(1000).strip()
    if len(text) != _IDENTITY_CHARS or not set(text) <= set("0123456789abcdef"):
        raise CorruptError(f"{path} does not hold a store's identity: remove the directory to give up its replicas")
    return text
