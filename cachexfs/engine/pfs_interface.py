"""The shared filesystem as the engine sees it: what it asks, and what it is told.

Role: the contract of ``adapters/pfs_pool`` and of the simulation's PFS; see ``interfaces`` for the others. Concurrency:
trio; any number of calls at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cachexfs.core.landed import Landed

Xattrs = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class PfsAttrs:
    """Attributes that a PFS operation sets: mode (permission bits), uid, gid (None: leave), times in ns, the user's
    extended attributes (None: leave; best effort, for the PFS may not take them)."""

    mode: int
    uid: int | None
    gid: int | None
    atime_ns: int
    mtime_ns: int
    xattrs: Xattrs | None = None


@dataclass(frozen=True, slots=True)
class PfsStat:
    """What the PFS says of a path. ``kind`` as in ``Dirent``."""

    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    ino: int
    nlink: int
    rdev: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    target: bytes = b""
    xattrs: Xattrs = ()  # of a listing whose xattrs were asked for


class PreparedFile(Protocol):
    """A recovery record on the PFS: the hidden name of its file, and its bytes."""

    @property
    def hidden(self) -> str:
        """Name below ``.cachexfs/tmp``."""
        ...

    @property
    def record(self) -> bytes:
        """As given to ``Pfs.prepare``."""
        ...


class Pfs(Protocol):
    """The shared filesystem, touched by child processes only. Paths are relative to the PFS directory.

    Each call takes ``deadline_s``; at the deadline the child is abandoned and replaced, and ``trio.TooSlowError``
    is raised. Errors of the PFS are ``OSError``. Nothing here retries. ``state`` is "ok", "unreachable" or "hung".
    """

    @property
    def state(self) -> str:
        """How the PFS answered last."""
        ...

    @property
    def error(self) -> str:
        """Why ``state`` is not "ok"; empty when it is."""
        ...

    @property
    def away_s(self) -> float:
        """For how many seconds ``state`` has not been "ok"; 0 while it is."""
        ...

    @property
    def waiting(self) -> tuple[str, float]:
        """The call that has gone longest without a sign of progress, in words, and for how many seconds; "", 0."""
        ...

    async def look_again(self) -> None:
        """Make sure of ``state`` where it is not "ok", for somebody who asks now: soon given up, never raises."""
        ...

    async def prepare(
        self, source: str, size: int, hidden: str, attrs: PfsAttrs, record: bytes, deadline_s: float,
        *, digest: bytes = b"", on_progress: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Copy the first ``size`` bytes of a file to ``.cachexfs/tmp/<hidden>``, with a recovery record; fsync both.

        ``on_progress`` gets the bytes copied so far, every second or more often.

        A temporary of that name is removed first, so that a late writer of an abandoned child does not touch
        the new one. An error of fsync is final: the temporary is removed before it is raised.
        """
        ...

    async def discard(self, hidden: str, deadline_s: float) -> None:
        """Remove a prepared file and its record: it is not to land any more."""
        ...

    async def prepared(self, deadline_s: float) -> Sequence[PreparedFile]:
        """Every recovery record beside prepared files, of all nodes, also without its file."""
        ...

    async def land(self, hidden: str, path: bytes, attrs: PfsAttrs, deadline_s: float) -> PfsStat:
        """Rename a prepared file into place, or to ``.cachexfs/held/<name>``, set attributes, fsync the directory;
        returns the stat of the result."""
        ...

    async def run(self, kind: str, path: bytes, path2: bytes, attrs: PfsAttrs | None, deadline_s: float) -> None:
        """mkdir, rename, unlink, rmdir, symlink (path2: the target), attr (path2: where an earlier call may still
        set them; refused with EBUSY while it may), hide (path2: a hidden name), unhide."""
        ...

    async def stat(self, path: bytes, deadline_s: float) -> PfsStat:
        """lstat."""
        ...

    async def stats(self, paths: Sequence[bytes], deadline_s: float) -> list[PfsStat | int | None]:
        """lstat of many paths in one call: for each a stat, None where it is certainly not there, an errno."""
        ...

    async def check(self, path: bytes, size: int, digest: bytes, deadline_s: float) -> PfsStat | None:
        """The stat of a file whose ``size`` bytes have this xxh3_128; None where they have not. Reads all of it."""
        ...

    async def listing(self, path: bytes, deadline_s: float) -> list[tuple[bytes, PfsStat]]:
        """Names and stats of a directory, without ``.cachexfs``."""
        ...

    async def xattrs(self, path: bytes, deadline_s: float) -> dict[bytes, Xattrs]:
        """The user's extended attributes (without ours) of the files and directories in a directory that have some."""
        ...

    async def read(
        self, path: bytes, offset: int, length: int, deadline_s: float, expected: Landed | None = None
    ) -> bytes:
        """Bytes of a file on the PFS. OSError with ``core.landed.CHANGED`` when it is not the one that is expected."""
        ...

    async def fetch(
        self, path: bytes, offset: int, length: int, target: str, deadline_s: float, expected: Landed | None = None
    ) -> int:
        """Copy bytes of a file on the PFS to the same place of a local file; returns how many there were.

        ``expected`` as for ``read``.
        """
        ...

    async def statvfs(self, deadline_s: float) -> tuple[int, int, int, int, int]:
        """(block size, blocks, free blocks, files, free files)."""
        ...
