"""The PFS directory, as recovery reads and changes it.

Role: blocking calls over ``pfs_ops`` in this process, which is a child of the command: when the PFS hangs, so does it,
and the command leaves it behind. Changes go only into the directory whose identity is known. Concurrency: any number
of threads; each call opens the directory anew.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from cachexfs.adapters import pfs_names, pfs_ops, pfs_reads
from cachexfs.adapters.pfs_attrs import Attrs, StatRow
from cachexfs.adapters.pfs_dir import Memory, PfsDir, PfsIdentity, RootError, plain_name
from cachexfs.adapters.pfs_ops import RECORD_BYTES_MAX, Context
from cachexfs.core.digest import FileDigest
from cachexfs.core.reserved import BESIDE_PREFIX, STATE_DIR
from cachexfs.errors import CannotTellError
from cachexfs.recovery.choice import Candidate, Record, encode_record

PIECE_BYTES = 4 << 20
FILES_MAX = 1_000_000
DEPTH_MAX = 32
DIRECTORY_MODE = 0o755

Tell = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Content:
    """Size in bytes and digests (file, tree) of a file as it lies there."""

    size: int
    digest: bytes
    tree: bytes

    def is_of(self, record: Record) -> bool:
        """Whether this is what a record describes, by all that it knows."""
        known = [(record.digest, self.digest), (record.tree, self.tree)]
        return self.size == record.size and all(due in (b"", found) for due, found in known)


class _Watcher:
    """``pfs_ops.Monitor``: counts the bytes of a copy, collects the pages of a listing."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._copied = 0
        self.rows: list[tuple[bytes, StatRow]] = []

    def progress(self, copied_bytes: int) -> None:
        self._tell(max(0, copied_bytes - self._copied))
        self._copied = copied_bytes

    def rate(self) -> float:
        return 0.0

    def note(self, value: int) -> None:
        return None

    def page(self, rows: Sequence[tuple[bytes, object]]) -> None:
        self.rows += cast("Sequence[tuple[bytes, StatRow]]", rows)


class Target:
    """``directory``: PFS_DIR. ``tell`` is called with bytes as they are read or written, 0 for a sign of life."""

    def __init__(self, directory: str, tell: Tell) -> None:
        self.path = os.fsencode(os.path.abspath(directory))
        self._tell = tell
        self._identity: PfsIdentity | None = None
        self._memory: Memory = {}
        self._contents: dict[tuple[bytes, int, int, int, int], Content] = {}

    def _context(self, watcher: _Watcher | None = None) -> Context:
        nonce = secrets.token_hex(8)
        return Context(self.path, self._identity, nonce, watcher or _Watcher(self._tell), self._memory)

    def _open(self, *, mutating: bool = False) -> PfsDir:
        return PfsDir(self.path, self._identity, self._memory, mutating=mutating)

    def token(self) -> str | None:
        """The identity in ``.cachexfs/id``, None without one. Raises ``CannotTellError`` when it cannot be read."""
        try:
            os.listdir(self.path)  # an unreadable directory is no directory without an identity
            os.lstat(os.path.join(self.path, STATE_DIR, b"id"))
        except FileNotFoundError:
            if not os.path.isdir(self.path):
                raise self._unreadable("it does not exist; is the PFS mounted?") from None
            return None
        except OSError as error:
            raise self._unreadable(error.strerror) from None
        return self._establish()

    def establish(self) -> str:
        """Make the identity where there is none: for a directory that no mount has used."""
        return self._establish()

    def _establish(self) -> str:
        try:
            dev, ino, token, _ = pfs_ops.probe(self._context(), False)
        except OSError as error:
            raise self._unreadable(error.strerror) from None
        self._identity = PfsIdentity(dev, ino, token)
        return token

    def _unreadable(self, why: str | None) -> CannotTellError:
        return CannotTellError(f"cannot use '{os.fsdecode(self.path)}': {why}")

    # ---- looking
    def lstat(self, path: bytes) -> StatRow | None:
        """What is at a path, None for nothing. Raises ``OSError`` (ENOTDIR: a directory of it is none, or a link)."""
        try:
            return pfs_reads.lstat(self._context(), path)
        except RootError:
            raise
        except FileNotFoundError:
            return None

    def content(self, path: bytes) -> Content | None:
        """Digests of the regular file at a path, read in full once; None when there is none."""
        row = self.lstat(path)
        if row is None or row[0] != "f":
            return None
        key = path, row[5], row[4], row[9], row[10]
        if key not in self._contents:
            with self._open() as pfs:
                parent, last = pfs.parent(path)
                fd = pfs.keep(os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent))
                self._contents[key] = self._digest(fd)
        return self._contents[key]

    def hidden_content(self, hidden: str) -> Content:
        """The same of a file under its hidden name. Raises ``OSError``."""
        with self._open() as pfs:
            return self._digest(pfs.keep(self._open_hidden(pfs, hidden)))

    def _open_hidden(self, pfs: PfsDir, hidden: str) -> int:
        name = plain_name(hidden)
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=pfs.tmp(name))

    def _digest(self, fd: int) -> Content:
        digest, buffer = FileDigest(), memoryview(bytearray(PIECE_BYTES))
        while count := os.readv(fd, [buffer]):
            digest.update(buffer[:count])
            self._tell(count)
        found = digest.result()
        return Content(digest.size_bytes, found.file, found.tree)

    def read(self, path: bytes, offset: int, length: int) -> bytes:
        """Bytes of the file at a path, short at its end. Raises ``OSError``."""
        pieces = []
        while length > 0:
            piece = pfs_reads.read(self._context(), path, offset, min(length, pfs_reads.READ_BYTES_MAX))
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
            if not piece:
                break
        self._tell(0)
        return b"".join(pieces)

    def read_hidden(self, hidden: str, offset: int, length: int) -> bytes:
        """The same under a hidden name."""
        with self._open() as pfs:
            return os.pread(pfs.keep(self._open_hidden(pfs, hidden)), length, offset)

    def names(self, path: bytes) -> list[bytes]:
        """Names of the regular files in a directory; none when there is no such directory."""
        return [name for name, row in self._listing(path) if row[0] == "f"]

    def tree(self, path: bytes) -> dict[bytes, int]:
        """Relative path -> size of every regular file at any depth. Raises ``CannotTellError`` for too many."""
        found: dict[bytes, int] = {}
        stack = [(b"", 0)]
        while stack:
            below, depth = stack.pop()
            for name, row in self._listing(b"/".join(part for part in (path, below) if part)):
                inner = below + b"/" + name if below else name
                if row[0] == "d" and depth < DEPTH_MAX:
                    stack.append((inner, depth + 1))
                elif row[0] == "f":
                    found[inner] = row[4]
            if len(found) > FILES_MAX:
                raise CannotTellError(f"more than {FILES_MAX} files below '{os.fsdecode(path)}' on the PFS")
        return found

    def _listing(self, path: bytes) -> list[tuple[bytes, StatRow]]:
        watcher = _Watcher(self._tell)
        try:
            pfs_reads.listing(self._context(watcher), path)
        except RootError:
            raise
        except (FileNotFoundError, NotADirectoryError):
            return []
        self._tell(0)
        return watcher.rows

    def records(self) -> list[tuple[str, bytes, bool, int]]:
        """(hidden name, record, whether its file is there, the file's size) of all recovery records."""
        watcher = _Watcher(self._tell)
        try:
            pfs_ops.prepared(self._context(watcher))
        except OSError as error:
            raise self._unreadable(error.strerror) from None
        return [(os.fsdecode(name), row[-1], row[0] == "f", row[4]) for name, row in watcher.rows]

    # ---- changing
    def prepare(self, candidate: Candidate) -> None:
        """Copy a replica to its hidden name with a record, fsync, read back, compare. Raises ``OSError``."""
        record = candidate.record
        data = encode_record(record, RECORD_BYTES_MAX)
        pfs_ops.prepare(
            self._context(), candidate.source, record.size, candidate.hidden, _attrs(record), data, record.digest, [],
            True,
        )  # fmt: skip

    def land(self, candidate: Candidate) -> None:
        """Make the directories that are missing, and rename a prepared file into place. Raises ``OSError``."""
        record = candidate.record
        self._make_directories(record)
        pfs_ops.land(self._context(), candidate.hidden, record.path, _attrs(record), record.size, -1)
        self._tell(0)

    def _make_directories(self, record: Record) -> None:
        parts = record.path.split(b"/")[:-1]
        missing = []
        while parts and self.lstat(b"/".join(parts)) is None:
            missing.append(b"/".join(parts))
            parts.pop()
        now_ns = time.time_ns()
        attrs = Attrs(DIRECTORY_MODE, record.uid, record.gid, now_ns, now_ns)
        for path in reversed(missing):
            pfs_names.run(self._context(), "mkdir", path, b"", attrs, -1)

    def hide(self, path: bytes) -> str:
        """Take a file off its path, to ``.cachexfs/held``; returns its name there, "" when there was none."""
        if self.lstat(path) is None:
            return ""
        name = f"recover-{secrets.token_hex(8)}"
        pfs_names.run(self._context(), "hide", path, name.encode(), None, -1)
        return name

    def forget_held(self, name: str) -> None:
        """Remove what ``hide`` took away."""
        pfs_names.run(self._context(), "unlink", b".cachexfs/held/" + name.encode(), b"", None, -1)

    def discard(self, hidden: str) -> None:
        """Remove a prepared file and its record."""
        pfs_ops.discard(self._context(), hidden)


def _attrs(record: Record) -> Attrs:
    atime_ns = record.mtime_ns if record.atime_ns is None else record.atime_ns
    return Attrs(stat.S_IMODE(record.mode), record.uid, record.gid, atime_ns, record.mtime_ns)


def is_ours(path: bytes) -> bool:
    """Whether a path could not be one of a user's files."""
    parts = path.split(b"/")
    odd = any(part in (b"", b".", b"..") or b"\0" in part for part in parts)
    return odd or parts[0] == STATE_DIR or parts[-1].startswith(BESIDE_PREFIX)


def is_damage(error: OSError) -> bool:
    """Whether a copy failed because its bytes are not what their digest says, or cannot be read."""
    return error.errno == errno.EIO
