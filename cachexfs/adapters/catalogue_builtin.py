"""The catalogue of a single node: a replica and the daemon's own journal.

Role: ``Catalogue`` for a node without partners. ``mutate`` runs its function on the replica, appends the
changes to the journal in the staging directory, applies them, calls the listeners. Staging is memory (tmpfs), so
that a written journal survives whatever ``returned`` promises to survive; ``fsync`` is for a staging directory
on a disk.

Concurrency: everything happens in the trio thread, between two awaits: ``mutate`` and ``barrier`` never wait for
anything (but with ``fsync``: for the disk, in a worker thread, one fdatasync for all that wait). ``run`` is the
compaction: it writes a snapshot in a worker thread while mutations go on, and those are copied behind it before
the new file takes the journal's name. Called by the engine; made and run by the daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import trio

from cachexfs.adapters.journal_file import (
    JOURNAL_NAME,
    LOCK_NAME,
    MENDED_NAME,
    changes_of,
    lock,
    sync_directory,
    write,
    write_snapshot,
)
from cachexfs.core import journal
from cachexfs.core.journal import Mutation, Rows
from cachexfs.core.records import AnyRecord, encode
from cachexfs.core.replica import Change, Replica
from cachexfs.core.transaction import Tx
from cachexfs.engine.interfaces import Listener
from cachexfs.errors import CorruptError, FsError

T = TypeVar("T")

#: Room that is kept allocated beyond the end, so that a full staging directory can still be drained.
RESERVE_BYTES = 1 << 20
#: A snapshot is worth its time when the journal is this large and this many times its last snapshot.
COMPACT_BYTES_MIN = 4 << 20
COMPACT_RATIO = 4

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of linux/falloc.h
_libc = ctypes.CDLL(None, use_errno=True)


class BuiltinCatalogue:
    """The catalogue of one node, in ``directory``.

    Raises ``UsageError`` when another daemon uses the directory, ``CorruptError`` for a damaged journal.
    """

    def __init__(self, directory: Path, *, fsync: bool = False, compact_bytes_min: int = COMPACT_BYTES_MIN) -> None:
        self.view = Replica()
        self._path = directory / JOURNAL_NAME
        self._fsync = fsync
        self._compact_bytes_min = compact_bytes_min
        self._listeners: list[Listener] = []
        self._failed = ""
        self._grown = trio.Event()
        self._sync_lock = trio.Lock()
        self._lock_fd = lock(directory / LOCK_NAME)
        self._fd = -1
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._length = self._replay()
        except BaseException:
            self.close()
            raise
        self._snapshot_bytes = self._length
        self._synced = self._length
        self._reserved = 0
        self._reserve()

    # ---- the interface
    @property
    def outage_s(self) -> float:
        """Always 0: this catalogue cannot be away."""
        return 0.0

    async def barrier(self) -> None:
        """See ``Catalogue``: there is no other node."""
        await trio.lowlevel.checkpoint()

    def listen(self, listener: Listener) -> None:
        """See ``Catalogue``."""
        self._listeners.append(listener)

    async def mutate(self, function: Callable[[Tx], T]) -> T:
        """See ``Catalogue``. Raises ``FsError`` (ENOSPC, EIO) when the journal cannot be written."""
        tx = Tx(self.view)
        result = function(tx)
        if tx.write.puts:
            self._commit(tx.write.puts)
            if self._fsync:
                await self._sync()
        return result

    # ---- changing
    def _commit(self, puts: dict[bytes, AnyRecord | None]) -> None:
        if self._failed:
            raise FsError(errno.EIO, self._failed)
        entry_of = self.view.entry
        changes = [
            (key, None if record is None else encode(record))
            for key, record in puts.items()
            if record is not None or entry_of(key) is not None
        ]
        if not changes:
            return
        revision = self.view.revision + 1
        self._append(journal.encode(Mutation(revision, changes)))
        self._apply(revision, changes)

    def _apply(self, revision: int, changes: list[tuple[bytes, bytes | None]]) -> None:
        done = self.view.apply(revision, changes_of(self.view, revision, changes))
        for listener in self._listeners:
            listener(done)

    def _append(self, data: bytes) -> None:
        """Write a frame whole or not at all."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            if written:
                self._cut(self._length)
            raise FsError(error.errno or errno.EIO, f"cannot write {self._path}: {error.strerror}") from error
        self._length += len(data)
        if self._length + RESERVE_BYTES // 2 > self._reserved:
            self._reserve()
        if self._length >= self._compact_bytes_min and self._length >= COMPACT_RATIO * self._snapshot_bytes:
            self._grown.set()

    def _cut(self, length: int) -> None:
        try:
            os.ftruncate(self._fd, length)
        except OSError as error:
            self._failed = f"{self._path} ends in half a record that cannot be cut off ({error.strerror})"

    def _reserve(self) -> None:
        """Allocate room beyond the end. Without success the half that is left must do until memory drains."""
        wanted = self._length + RESERVE_BYTES
        if _libc.fallocate(self._fd, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(wanted)) == 0:
            self._reserved = wanted

    async def _sync(self) -> None:
        """Return when all that is written now is on the disk."""
        wanted = self._length
        fd = self._fd
        async with self._sync_lock:
            if fd != self._fd or self._synced >= wanted:
                return  # in the second case, and as a compaction syncs what it replaces the journal with
            end = self._length
            try:
                await trio.to_thread.run_sync(os.fdatasync, fd)
            except OSError as error:
                self._failed = f"fsync of {self._path} failed ({error.strerror}): what follows is not safe on this disk"
                raise FsError(errno.EIO, self._failed) from error
            self._synced = end

    # ---- opening and closing
    def _replay(self) -> int:
        """Fill the replica from the file, cut a torn end; returns the length."""
        size = os.fstat(self._fd).st_size
        with mmap.mmap(self._fd, size, prot=mmap.PROT_READ) if size else contextlib.nullcontext(b"") as data:
            frames = journal.Frames(data)
            try:
                self._replay_items(journal.decode(payload) for payload in frames)
            except ValueError as error:
                raise self._corrupt(frames.good_length, frames.damage or str(error)) from error
        if frames.damage:
            raise self._corrupt(frames.good_length, frames.damage)
        if not frames.good_length:
            os.ftruncate(self._fd, 0)
            os.write(self._fd, journal.header())
            return journal.HEADER_BYTES
        if frames.good_length < size:
            (self._path.parent / MENDED_NAME).touch()  # more than one record may be lost with the end
            os.ftruncate(self._fd, frames.good_length)
        return frames.good_length

    def _replay_items(self, items: Iterable[journal.Item]) -> None:
        """Rows and their end, if there is a snapshot, then mutations; nothing is held twice."""
        rows, is_open = 0, True  # rows of a snapshot that has not ended; whether one may come
        for item in items:
            if isinstance(item, Mutation) and not rows:
                if item.revision != self.view.revision + 1:
                    raise ValueError(f"revision {item.revision} follows {self.view.revision}")
                self.view.apply(item.revision, changes_of(self.view, item.revision, item.changes))
                is_open = False
            elif isinstance(item, Mutation) or not is_open:
                raise ValueError("mutations and snapshot are not in order")
            elif isinstance(item, Rows):
                rows += len(item.rows)
                self.view.apply(0, [Change(*row) for row in item.rows])
            else:
                if item.count != rows:
                    raise ValueError(f"a snapshot has {rows} of {item.count} rows")
                self.view.apply(item.revision, [])
                rows, is_open = 0, False
        if rows:
            raise ValueError("a snapshot has no end")

    def _corrupt(self, offset: int, why: str) -> CorruptError:
        if "newer" in why:
            return CorruptError(
                f"{self._path}: {why}. Nothing was changed. Mount with that version, and unmount with it"
            )
        return CorruptError(
            f"{self._path} is damaged at byte {offset}: {why}. Nothing was changed. 'cachexfs recover --journal "
            f"{self._path.parent}' leaves out what is damaged, keeps all else and every staged byte; then mount again"
        )

    def close(self) -> None:
        """Close the journal and free the directory for another daemon."""
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1

    # ---- compaction
    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Compact whenever it is worth it, until cancelled."""
        task_status.started()
        while True:
            await self._grown.wait()
            self._grown = trio.Event()
            await self.compact()

    async def compact(self) -> None:
        """Replace the journal by a snapshot and the mutations since. Without room nothing changes."""
        fresh = self._path.with_suffix(".new")
        entries = list(self.view.items())
        revision, start = self.view.revision, self._length
        try:
            fd = await trio.to_thread.run_sync(write_snapshot, fresh, entries, revision, self._fsync)
        except OSError:
            self._snapshot_bytes = self._length  # tried again when the journal has grown as much once more
            return
        async with self._sync_lock:  # no fdatasync of the old file is under way
            self._replace(fresh, fd, start)

    def _replace(self, fresh: Path, fd: int, start: int) -> None:
        """Append what came after byte ``start`` of the journal to the snapshot ``fd``, make that the journal."""
        try:
            base = os.fstat(fd).st_size
            _copy(self._fd, start, self._length - start, fd)
            if self._fsync:
                os.fdatasync(fd)
            os.rename(fresh, self._path)
        except OSError:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            self._snapshot_bytes = self._length
            return
        os.close(self._fd)
        self._fd = fd
        self._length = self._synced = base + self._length - start
        self._snapshot_bytes, self._reserved = base, 0
        self._reserve()
        if self._fsync:
            sync_directory(self._path.parent)


def _copy(source: int, offset: int, length: int, target: int) -> None:
    while length:
        data = os.pread(source, min(length, 1 << 20), offset)
        if not data:
            raise OSError(errno.EIO, "the journal is shorter than what was written to it")
        write(target, data)
        offset += len(data)
        length -= len(data)
