"""The files of one replica: a committed version, and a copy in progress beside it or on top of it.

Role: blocking file work of ``ReplicaStore``, which calls it in threads, one call per stage at a time (``snapshot`` and
``read_into`` excepted: they use the immutable ``Committed`` only).

    <stage>.<n>.data          bytes of version n; committed bytes are never written to
    <stage>.manifest          names n; renaming it into place is the commit
    partial/<stage>.<n>.data  a copy in progress
    partial/<stage>.manifest  a manifest being written

A file that grows after a commit grows in place: what lies beyond the committed size is no part of the committed
version. A block that would change committed bytes moves the copy in progress to a file of its own first.

Whole blocks go around the page cache where the filesystem can do that: the memory of a training node is not for its
partner's replicas, and a copy of each byte is saved.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
from dataclasses import dataclass, field

from cachexfs.adapters.file_digest import read_exactly
from cachexfs.core import manifest as manifests
from cachexfs.core.digest import BLOCK_BYTES, Buffer, block_digest, block_length
from cachexfs.core.manifest import Manifest
from cachexfs.errors import CorruptError

PARTIAL = "partial"
DATA_SUFFIX = ".data"
MANIFEST_SUFFIX = ".manifest"

_ENVELOPE = struct.Struct(">4sIQ16s")  # magic, bytes of the manifest, version of the data file, digest of both
_MAGIC = b"CXR1"
_NO_COPY_FILE_RANGE = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class Committed:
    """A version that a crash cannot take away. ``durable`` is false when the directory's fsync failed."""

    manifest: Manifest
    number: int
    path: str
    durable: bool = True


@dataclass(slots=True)
class _Progress:
    path: str
    number: int
    in_place: bool  # the committed version's own file, beyond its size
    received: dict[int, tuple[bytes, int]] = field(default_factory=dict)  # block -> digest, bytes
    end: int = 0  # first byte after what was received


def data_name(stage: str, number: int) -> str:
    """Name of a version's data file."""
    return f"{stage}.{number}{DATA_SUFFIX}"


def split_data_name(name: str) -> tuple[str, int] | None:
    """Inverse of ``data_name``; None for anything else."""
    stage, dot, number = name.removesuffix(DATA_SUFFIX).rpartition(".")
    if not name.endswith(DATA_SUFFIX) or not dot or not number.isascii() or not number.isdigit() or len(number) > 18:
        return None
    try:
        return manifests.check_stage(stage), int(number)
    except ValueError:
        return None


def fsync_path(path: str) -> None:
    """fsync of a directory or file by name."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory_synced(path: str) -> None:
    """Make a directory and what is missing above it; each new name is fsynced."""
    if not os.path.isdir(path):
        parent = os.path.dirname(path)
        make_directory_synced(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        fsync_path(parent)


def write_synced(path: str, *parts: bytes) -> None:
    """A new file with these bytes, fsynced. Removed again when that fails."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            for part in parts:
                _write_all(fd, memoryview(part), None)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def load_committed(directory: str, stage: str, read_only: bool) -> Committed:
    """The committed version that the directory shows. Raises ``CorruptError`` or ``OSError``.

    Its data file may still lie in ``partial``: then the crash came between the two renames of the commit. That and a
    tail that was never committed are put right, unless ``read_only``.
    """
    with open(os.path.join(directory, stage + MANIFEST_SUFFIX), "rb") as file:
        raw = file.read(_ENVELOPE.size + manifests.MANIFEST_BYTES_MAX + 1)
    if len(raw) < _ENVELOPE.size:
        raise CorruptError(f"manifest file of {stage} has {len(raw)} bytes")
    magic, length, number, digest = _ENVELOPE.unpack_from(raw)
    body = raw[_ENVELOPE.size :]
    if magic != _MAGIC or length != len(body) or _envelope_digest(number, body) != digest:
        raise CorruptError(f"manifest file of {stage} is damaged")
    manifest = manifests.decode(body)
    if manifest.stage != stage:
        raise CorruptError(f"manifest file of {stage} describes {manifest.stage}")
    name = data_name(stage, number)
    path, partial = os.path.join(directory, name), os.path.join(directory, PARTIAL, name)
    if not os.path.exists(path) and os.path.exists(partial):
        if read_only:
            path = partial
        else:
            os.rename(partial, path)
            fsync_path(directory)
    size = os.stat(path).st_size
    if size < manifest.size:
        raise CorruptError(f"{path} has {size} of {manifest.size} bytes")
    if size > manifest.size and not read_only:
        os.truncate(path, manifest.size)
    return Committed(manifest, number, path)


def _envelope_digest(number: int, body: bytes) -> bytes:
    return block_digest(number.to_bytes(8, "big") + body)


def _write_direct(path: str, view: memoryview, offset: int) -> bool:
    """Write a whole block with O_DIRECT; False where that cannot be, and nothing is known to be written then."""
    if len(view) != BLOCK_BYTES or view.readonly or ctypes.addressof(ctypes.c_char.from_buffer(view)) % mmap.PAGESIZE:
        return False
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.pwrite(fd, view, offset) == len(view)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False


def _write_all(fd: int, view: memoryview, offset: int | None) -> None:
    done = 0
    while done < len(view):
        done += os.write(fd, view[done:]) if offset is None else os.pwrite(fd, view[done:], offset + done)


def _copy_bytes(source_fd: int, target_fd: int, length: int) -> None:
    done = 0
    while done < length:
        try:
            count = os.copy_file_range(source_fd, target_fd, length - done, done, done)
        except OSError as error:
            if done or error.errno not in _NO_COPY_FILE_RANGE:
                raise
            os.lseek(target_fd, 0, os.SEEK_SET)
            while done < length:
                count = os.sendfile(target_fd, source_fd, done, length - done)
                if count == 0:
                    break
                done += count
            count = 0
        if count == 0:
            break
        done += count
    if done != length:
        raise OSError(errno.EIO, f"copied {done} of {length} bytes")


def read_into(committed: Committed, offset: int, view: memoryview) -> int:
    """Fill ``view`` from a committed version; returns the bytes that there are. Each block touched is checked.

    Raises ``CorruptError`` naming the block whose digest is not the manifest's.
    """
    manifest = committed.manifest
    end = min(offset + len(view), manifest.size)
    if offset >= end:
        return 0
    scratch: memoryview | None = None
    fd = os.open(committed.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        for index in range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            start, length = index * BLOCK_BYTES, block_length(manifest.size, index)
            low, high = max(start, offset), min(start + length, end)
            whole = high - low == length
            if whole:
                block = view[low - offset : high - offset]
            else:
                scratch = scratch or memoryview(bytearray(BLOCK_BYTES))
                block = scratch[:length]
            read_exactly(fd, block, start)
            if block_digest(block) != manifest.block(index):
                raise CorruptError(f"block {index} of the replica {manifest.stage} is damaged")
            if not whole:
                view[low - offset : high - offset] = block[low - start : high - start]
    finally:
        os.close(fd)
    return end - offset


class ReplicaCopy:
    """One stage's files. Not for use by two threads at once, except ``snapshot``."""

    def __init__(self, directory: str, stage: str, committed: Committed | None = None, number_max: int = 0) -> None:
        self._directory = directory
        self._partial = os.path.join(directory, PARTIAL)
        self.stage = manifests.check_stage(stage)
        self.snapshot = committed
        self._progress: _Progress | None = None
        self._is_unreadable = False
        self._number_max = max(number_max, committed.number if committed else 0)
        self._garbage: list[str] = []

    @property
    def in_progress(self) -> bool:
        """Blocks have arrived that are not committed."""
        return self._progress is not None

    @property
    def used_bytes(self) -> int:
        """Bytes of the data files, as far as this process knows."""
        committed = self.snapshot.manifest.size if self.snapshot else 0
        if self._progress is None:
            return committed
        return max(committed, self._progress.end) if self._progress.in_place else committed + self._progress.end

    def write_block(self, offset: int, view: memoryview, digest: bytes) -> None:
        """Check and write one block of the copy in progress.

        Raises ``ValueError`` for one that is no block, ``CorruptError`` when the bytes are not the digest's,
        ``OSError`` (the copy in progress is then gone).
        """
        index, rest = divmod(offset, BLOCK_BYTES)
        if rest or not 0 < len(view) <= BLOCK_BYTES or not 0 <= offset < manifests.FILE_BYTES_MAX:
            raise ValueError(f"{len(view)} bytes at {offset} are no block")
        if block_digest(view) != digest:
            raise CorruptError(f"block {index} of {self.stage} arrived with other bytes than its digest says")
        try:
            progress = self._progress or self._begin()
            skip = 0
            if progress.in_place:
                skip = self._unchanged_bytes(index, view)
                if skip < 0:
                    progress = self._make_private(progress)
                    skip = 0
            if skip < len(view) and not (skip == 0 and _write_direct(progress.path, view, offset)):
                fd = os.open(progress.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    _write_all(fd, view[skip:], offset + skip)
                finally:
                    os.close(fd)
        except OSError:
            self.abandon()
            raise
        progress.received[index] = digest, len(view)
        progress.end = max(progress.end, offset + len(view))

    def _unchanged_bytes(self, index: int, view: memoryview) -> int:
        """Leading bytes of the block that the committed version has already; -1 when it has other bytes there.

        It is read: who sends a block again may do so because what lies here was found bad.
        """
        assert self.snapshot is not None
        manifest = self.snapshot.manifest
        known = block_length(manifest.size, index)
        if known <= 0:
            return 0
        if known > len(view) or block_digest(view[:known]) != manifest.block(index):
            return -1
        try:
            return known if self._has(self.snapshot, index) else -1
        except OSError:
            self._is_unreadable = True  # not to be built upon: the next attempt makes all of it anew
            raise

    @staticmethod
    def _has(committed: Committed, index: int) -> bool:
        scratch = memoryview(bytearray(block_length(committed.manifest.size, index)))
        fd = os.open(committed.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            read_exactly(fd, scratch, index * BLOCK_BYTES)
        except CorruptError:
            return False  # it has been cut
        finally:
            os.close(fd)
        return block_digest(scratch) == committed.manifest.block(index)

    def _begin(self) -> _Progress:
        committed = self.snapshot
        if committed is not None and not self._is_unreadable:
            self._progress = _Progress(committed.path, committed.number, in_place=True)
        else:
            self._number_max += 1
            path = os.path.join(self._partial, data_name(self.stage, self._number_max))
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            self._progress = _Progress(path, self._number_max, in_place=False)
        return self._progress

    def _make_private(self, progress: _Progress) -> _Progress:
        assert self.snapshot is not None
        self._number_max += 1
        path = os.path.join(self._partial, data_name(self.stage, self._number_max))
        length = max(self.snapshot.manifest.size, progress.end)
        with contextlib.ExitStack() as stack:
            source_fd = os.open(progress.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            stack.callback(os.close, source_fd)
            target_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, target_fd)
            private = _Progress(path, self._number_max, in_place=False, received=progress.received, end=length)
            # From here on ``abandon`` removes the new file; the tail in the old one goes either way.
            self._progress = private
            length = min(length, os.fstat(source_fd).st_size)
            _copy_bytes(source_fd, target_fd, length)
            os.ftruncate(source_fd, self.snapshot.manifest.size)
        return private

    def abandon(self) -> None:
        """Forget the copy in progress; the committed version stays as it is."""
        progress, self._progress = self._progress, None
        if progress is None:
            return
        with contextlib.suppress(OSError):
            if progress.in_place and self.snapshot is not None:
                os.truncate(progress.path, self.snapshot.manifest.size)
            else:
                os.unlink(progress.path)

    def commit(self, raw: bytes) -> Manifest:
        """Make the copy in progress, as ``raw`` describes it, the committed version. Returns the manifest.

        Repeating a commit that has succeeded does nothing. Raises ``CorruptError`` naming a missing or wrong block (the
        copy in progress stays, the block may be sent again), ``OSError`` (it is gone).
        """
        manifest = manifests.decode(raw)
        if manifest.stage != self.stage:
            raise CorruptError(f"manifest of {manifest.stage} for {self.stage}")
        before = self.snapshot
        if self._progress is None and before is not None and before.durable and before.manifest == manifest:
            return manifest
        if before is not None and manifest.gen < before.manifest.gen:
            # A late commit of what an appended file was before: the newer generation is claimed to be here.
            raise CorruptError(f"generation {before.manifest.gen} of {self.stage} is held, which is newer")
        try:
            if self._progress is None and (before is not None or manifest.size == 0):
                self._begin()
            if self._progress is None:
                raise CorruptError(f"block 0 of {self.stage} is missing")
            self._check_blocks(self._progress, manifest)
            self._sync_data(self._progress, manifest)
            self._publish(self._progress, manifest, raw)
        except OSError:
            self.abandon()
            raise
        return manifest

    def _check_blocks(self, progress: _Progress, manifest: Manifest) -> None:
        base = self.snapshot.manifest if self.snapshot and not self._is_unreadable else None
        fd = os.open(progress.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            scratch = memoryview(bytearray(min(BLOCK_BYTES, manifest.size)))
            for index in range(manifest.block_count):
                length, digest = block_length(manifest.size, index), manifest.block(index)
                received = progress.received.get(index)
                if received == (digest, length):
                    continue
                if received is not None:
                    raise CorruptError(
                        f"block {index} of {self.stage} is not the manifest's: {received[1]} bytes received"
                    )
                known = block_length(base.size, index) if base else 0
                if base is None or known < length:
                    raise CorruptError(f"block {index} of {self.stage} is missing")
                if progress.in_place and known == length and base.block(index) == digest:
                    continue  # the very bytes that the last commit checked
                read_exactly(fd, scratch[:length], index * BLOCK_BYTES)
                if block_digest(scratch[:length]) != digest:
                    raise CorruptError(f"block {index} of {self.stage} was changed and not sent")
        finally:
            os.close(fd)

    def _sync_data(self, progress: _Progress, manifest: Manifest) -> None:
        size = manifest.size
        if progress.in_place and self.snapshot is not None:
            size = max(size, self.snapshot.manifest.size)  # a shorter version is cut after its commit
        fd = os.open(progress.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.ftruncate(fd, size)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _publish(self, progress: _Progress, manifest: Manifest, raw: bytes) -> None:
        temporary = os.path.join(self._partial, self.stage + MANIFEST_SUFFIX)
        envelope = _ENVELOPE.pack(_MAGIC, len(raw), progress.number, _envelope_digest(progress.number, raw))
        write_synced(temporary, envelope, raw)
        path = os.path.join(self._directory, data_name(self.stage, progress.number))
        if not progress.in_place:
            os.rename(progress.path, path)
            progress.path = path
        os.rename(temporary, os.path.join(self._directory, self.stage + MANIFEST_SUFFIX))
        # From here on a crash may show either version: memory follows the names, and claims nothing before the fsync.
        before, self.snapshot, self._progress = self.snapshot, Committed(manifest, progress.number, path, False), None
        self._is_unreadable = False
        if before is not None and before.path != path:
            self._garbage.append(before.path)
        fsync_path(self._directory)
        self.snapshot = Committed(manifest, progress.number, path)
        with contextlib.suppress(OSError):
            if before is not None and before.path == path and before.manifest.size > manifest.size:
                os.truncate(path, manifest.size)
            while self._garbage:
                os.unlink(self._garbage.pop())

    def drop(self) -> None:
        """Remove all files of the stage. The manifest goes first and durably: data without one is nobody's."""
        self.abandon()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._directory, self.stage + MANIFEST_SUFFIX))
            fsync_path(self._directory)
        committed, self.snapshot = self.snapshot, None
        for path in [*([committed.path] if committed else []), *self._garbage]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._garbage.clear()


def buffer_view(data: Buffer) -> memoryview:
    """A flat view of bytes."""
    return memoryview(data).cast("B")
