"""The shared filesystem behind child processes that may hang for ever without hurting the daemon.

Role: the real ``Pfs`` of ``engine.pfs_interface``. The daemon runs ``PfsPool.serve`` in its nursery, the engine
calls the rest; docs/pfs.md tells an administrator the same. Concurrency: all in the trio thread; see ``pfs_calls``
for children and deadlines, ``pfs_ops`` for what a child does and what a late one may do. Two lanes: ``data``
(prepare) and ``meta`` (all else), so that a small call does not wait behind a big copy.

What the pool remembers between calls serves retries: parts of attempts that did not end well, sizes and inodes of what
it prepared, renames whose answer was lost.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import trio

from cachexfs.adapters.pfs_calls import AbandonedCall, PfsCalls, Request
from cachexfs.adapters.pfs_dir import PfsIdentity
from cachexfs.adapters.pfs_ops import NOT_PREPARED, RECORD_BYTES_MAX, RECORD_SUFFIX
from cachexfs.adapters.pfs_reads import READ_BYTES_MAX
from cachexfs.core.landed import Landed
from cachexfs.engine.pfs_interface import PfsAttrs, PfsStat, Xattrs

log = logging.getLogger(__name__)

ABANDONED_MAX = 16
META_WORKERS = 4
META_WORKERS_MIN = 2
PROBE_S = 30.0
WATCH_EVERY_S = 10.0
WATCH_DEADLINE_S_MIN = 0.5
LOOK_AGAIN_S = 0.5  # somebody waits for it
LOOK_PAUSE = 4.0  # between two, of what the first took: thousands of attributes may be asked for
NOTES_MAX = 1000
UNKNOWN_INO = -1


@dataclass(frozen=True, slots=True)
class Prepared:
    """A recovery record in ``.cachexfs/tmp``; ``stat`` is None when its file is not there (landed or unfinished)."""

    hidden: str
    record: bytes
    stat: PfsStat | None


class NotPreparedError(FileNotFoundError):
    """What is to land is not under its hidden name: prepare it again. errno is ENODATA, to tell it from a missing
    directory of the destination."""


class PfsPool:
    """``Pfs`` on a directory.

    Parameters: ``pfs_dir``; ``token`` what ``.cachexfs/id`` must hold, when it is known from an earlier mount (else
    the first call learns or makes it); ``drain_workers`` and ``meta_workers`` (at least 2) the children of the lanes;
    ``bandwidth_bytes_s`` for all copies to the PFS together, 0: no limit; ``abandoned_max`` stuck children at a time;
    ``verify`` whether ``prepare`` reads back what has a digest; ``watch_every_s`` how often ``state`` is made sure of,
    0: by calls only.
    """

    def __init__(
        self,
        pfs_dir: str,
        *,
        token: str | None = None,
        drain_workers: int = 4,
        meta_workers: int = META_WORKERS,
        bandwidth_bytes_s: float = 0.0,
        abandoned_max: int = ABANDONED_MAX,
        verify: bool = False,
        watch_every_s: float = WATCH_EVERY_S,
    ) -> None:
        identity = PfsIdentity(0, 0, token) if token else None
        workers = drain_workers, max(META_WORKERS_MIN, meta_workers)
        self._calls = PfsCalls(pfs_dir, identity, *workers, bandwidth_bytes_s, abandoned_max)
        self._verify = verify
        self._watch_every_s = watch_every_s
        self._identifying = trio.Lock()
        self._confirmed = False
        self._is_looking = False
        self._look_after_s = 0.0
        self._parts: dict[str, list[str]] = {}  # by hidden name
        self._prepared: dict[str, tuple[int, int]] = {}  # hidden name -> inode, size
        self._preparing: dict[str, trio.Lock] = {}
        self._notes: dict[tuple[str, bytes, bytes], int] = {}

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the pool until cancelled: ``await nursery.start(pool.serve)``. Starts with a dead PFS, too."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._calls.run)
            task_status.started()
            if self._watch_every_s:
                nursery.start_soon(self._watch)

    async def _watch(self) -> None:
        """Probe now and then, so that ``state`` is true although nobody calls. One stuck probe is enough."""
        while True:
            await trio.sleep(self._watch_every_s)
            if self._confirmed and not any(call.operation == "probe" for call in self.abandoned):
                with contextlib.suppress(OSError, trio.TooSlowError):
                    await self.probe(max(self._watch_every_s, WATCH_DEADLINE_S_MIN))

    async def look_again(self) -> None:
        """See ``Pfs``. One stuck probe is enough, here too; one that takes long is not made for each who asks."""
        began_s = trio.current_time()
        if self.state == "ok" or self._is_looking or began_s < self._look_after_s:
            return
        if any(call.operation == "probe" for call in self.abandoned):
            return
        self._is_looking = True
        try:
            await self.probe(LOOK_AGAIN_S)
        except (OSError, trio.TooSlowError) as error:
            log.debug("the PFS is away still: %s", error)
        finally:
            self._is_looking = False
            self._look_after_s = trio.current_time() + LOOK_PAUSE * (trio.current_time() - began_s)

    @property
    def state(self) -> str:
        """``ok``, ``unreachable`` or ``hung``, as the latest call that could tell has found."""
        return self._calls.state

    @property
    def error(self) -> str:
        """Why the state is not ``ok``; empty when it is."""
        return self._calls.error

    @property
    def away_s(self) -> float:
        """For how many seconds the state has not been ``ok``; 0 while it is."""
        return self._calls.away_s

    @property
    def waiting(self) -> tuple[str, float]:
        """The running call that has gone longest without a sign of progress, and for how many seconds."""
        return self._calls.waiting()

    @property
    def identity(self) -> PfsIdentity | None:
        """The directory's identity once known. Keep its ``token`` for the next mount."""
        return self._calls.identity if self._confirmed else None

    @property
    def abandoned(self) -> tuple[AbandonedCall, ...]:
        """Calls that were given up and whose child has not ended."""
        return tuple(self._calls.abandoned)

    async def probe(self, deadline_s: float = PROBE_S) -> PfsIdentity:
        """Check that PFS_DIR is what was mounted (OSError ESTALE if not); the first time learn or make its identity.

        A remount gives another device number and is accepted when the token is the same.
        """
        first = not self._confirmed
        answer = await self._calls.call(self._calls.meta, Request("probe", [first], deadline_s))
        dev, ino, token, parts = cast("tuple[int, int, str, list[str]]", answer)
        if not self._confirmed:
            log.info("the PFS directory's identity is %s", token)
            for part in parts:
                hidden = part.partition("~")[0].removesuffix(RECORD_SUFFIX.decode())
                self._parts.setdefault(hidden, []).append(part)
        self._calls.identity, self._confirmed = PfsIdentity(dev, ino, token), True
        return self._calls.identity

    async def _identify(self, deadline_s: float) -> None:
        if not self._confirmed:
            async with self._identifying:
                if not self._confirmed:
                    await self.probe(deadline_s)

    async def _meta(self, request: Request) -> object:
        await self._identify(request.deadline_s)
        return await self._calls.call(self._calls.meta, request)

    async def prepare(
        self,
        source: str,
        size: int,
        hidden: str,
        attrs: PfsAttrs,
        record: bytes,
        deadline_s: float,
        *,
        digest: bytes = b"",
        takeover: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """See ``Pfs``. ``deadline_s`` is for each 256 MiB (or second) of progress, not for the whole.

        ``digest``: xxh3_128 of the file, checked by reading back if the pool has ``verify``. ``takeover``: look for
        parts that another node or an earlier process may have left under this name. ``on_progress`` gets the bytes
        copied so far.
        """
        if len(record) > RECORD_BYTES_MAX:
            raise OSError(errno.EFBIG, "recovery record too long", hidden)

        def on_frame(tag: str, value: object) -> None:
            if on_progress is not None and tag == "progress" and isinstance(value, int) and value >= 0:
                on_progress(value)

        await self._identify(deadline_s)
        request = Request("prepare", [], deadline_s, hidden=hidden, on_frame=on_frame)
        wanted = digest if self._verify else b""
        lock = self._preparing.setdefault(hidden, trio.Lock())  # one attempt at a time: each removes the others' parts
        try:
            async with lock:
                parts = self._parts.setdefault(hidden, [])
                request.arguments = [source, size, hidden, _wire(attrs), record, wanted, list(parts), takeover]
                parts += [f"{hidden}~{request.nonce}", f"{hidden}{RECORD_SUFFIX.decode()}~{request.nonce}"]
                ino = cast(int, await self._calls.call(self._calls.data, request))
                self._parts.pop(hidden, None)
                self._prepared[hidden] = ino, size
        finally:
            if not lock.locked():
                self._preparing.pop(hidden, None)

    async def land(
        self, hidden: str, path: bytes, attrs: PfsAttrs, deadline_s: float, *, size: int | None = None
    ) -> PfsStat:
        """See ``Pfs``. ``size``: of the prepared file, when it was not this pool that prepared it.

        ``NotPreparedError`` (ENODATA): the prepared file is missing or has another size, prepare it again. OSError
        ENOENT: the directory of ``path`` is missing; EBUSY: an abandoned call may still change ``path``.
        """
        ino, known = self._prepared.get(hidden, (UNKNOWN_INO, -1))
        arguments: list[object] = [hidden, path, _wire(attrs), known if size is None else size, ino]
        try:
            row = await self._meta(Request("land", arguments, deadline_s, paths=(path,), hidden=hidden))
        except OSError as error:
            if error.errno == NOT_PREPARED:
                self._prepared.pop(hidden, None)
                raise NotPreparedError(NOT_PREPARED, error.strerror, hidden) from None
            raise
        self._settle(hidden)
        return _stat(row)

    async def discard(self, hidden: str, deadline_s: float) -> None:
        """Remove a prepared file, its record and its parts: it is not to land any more, or a takeover begins."""
        await self._meta(Request("discard", [hidden], deadline_s, hidden=hidden))
        self._settle(hidden)
        self._parts.pop(hidden, None)

    def _settle(self, hidden: str) -> None:
        self._prepared.pop(hidden, None)
        self._calls.settle(hidden)

    async def prepared(self, deadline_s: float) -> list[Prepared]:
        """Every recovery record in ``.cachexfs/tmp``, of all nodes."""
        pages = await self._pages(Request("prepared", [], deadline_s))
        found = []
        for name, row in pages:
            stat = None if row[0] == "-" else _stat([*row[:-1], b""])
            found.append(Prepared(name.decode("utf-8", "surrogateescape"), cast(bytes, row[-1]), stat))
        return found

    async def run(self, kind: str, path: bytes, path2: bytes, attrs: PfsAttrs | None, deadline_s: float) -> None:
        """See ``Pfs``; also mknod, link. An earlier attempt whose answer was lost is recognised: see ``pfs_names``."""
        key = kind, path, path2
        paths = (path, path2) if path2 and kind in ("rename", "link", "attr") else (path,)
        wire = None if attrs is None else _wire(attrs)
        arguments: list[object] = [kind, path, path2, wire, self._notes.get(key, UNKNOWN_INO)]
        request = Request("run", arguments, deadline_s, paths=paths)
        try:
            await self._meta(request)
        except BaseException:
            if request.noted is not None:
                self._notes[key] = request.noted
                while len(self._notes) > NOTES_MAX:
                    del self._notes[next(iter(self._notes))]
            raise
        self._notes.pop(key, None)

    async def stat(self, path: bytes, deadline_s: float) -> PfsStat:
        """See ``Pfs``."""
        return _stat(await self._meta(Request("stat", [path], deadline_s)))

    async def stats(self, paths: Sequence[bytes], deadline_s: float) -> list[PfsStat | int | None]:
        """See ``Pfs``."""
        rows = cast("list[object]", await self._meta(Request("stats", [list(paths)], deadline_s)))
        return [row if row is None or isinstance(row, int) else _stat(row) for row in rows]

    async def check(self, path: bytes, size: int, digest: bytes, deadline_s: float) -> PfsStat | None:
        """See ``Pfs``. ``deadline_s`` is for each second of progress."""
        row = await self._meta(Request("check", [path, size, digest], deadline_s))
        return None if row is None else _stat(row)

    async def listing(self, path: bytes, deadline_s: float) -> list[tuple[bytes, PfsStat]]:
        """See ``Pfs``. ``deadline_s`` is for each page of 500 names."""
        return [(name, _stat(row)) for name, row in await self._pages(Request("listing", [path], deadline_s))]

    async def xattrs(self, path: bytes, deadline_s: float) -> dict[bytes, Xattrs]:
        """See ``Pfs``. ``deadline_s`` is for each 500 names."""
        found: dict[bytes, Xattrs] = {}

        def on_frame(tag: str, value: object) -> None:
            if tag == "page":
                rows = cast("list[tuple[bytes, list[tuple[bytes, bytes]]]]", value)
                found.update((name, tuple((n, v) for n, v in pairs)) for name, pairs in rows)

        request = Request("xattrs", [path], deadline_s)
        request.on_frame = on_frame
        await self._meta(request)
        return found

    async def read(
        self, path: bytes, offset: int, length: int, deadline_s: float, expected: Landed | None = None
    ) -> bytes:
        """See ``Pfs``; short at the end of the file. ``deadline_s`` is for each 4 MiB."""
        pieces: list[bytes] = []
        wire = _expected(expected)
        while length > 0:
            count = min(length, READ_BYTES_MAX)
            piece = cast(bytes, await self._meta(Request("read", [path, offset, count, wire], deadline_s)))
            pieces.append(piece)
            if len(piece) < count:
                break
            offset, length = offset + count, length - count
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def fetch(
        self, path: bytes, offset: int, length: int, target: str, deadline_s: float, expected: Landed | None = None
    ) -> int:
        """See ``Pfs``. The bytes do not pass through this process."""
        arguments: list[object] = [path, offset, length, target, _expected(expected)]
        return cast(int, await self._meta(Request("fetch", arguments, deadline_s)))

    async def statvfs(self, deadline_s: float) -> tuple[int, int, int, int, int]:
        """See ``Pfs``."""
        answer = cast("list[int]", await self._meta(Request("statvfs", [], deadline_s)))
        block, blocks, free, files, files_free = answer
        return block, blocks, free, files, files_free

    async def _pages(self, request: Request) -> list[tuple[bytes, list[object]]]:
        rows: list[tuple[bytes, list[object]]] = []

        def on_frame(tag: str, value: object) -> None:
            if tag == "page":
                rows.extend((name, row) for name, row in cast("list[tuple[bytes, list[object]]]", value))

        request.on_frame = on_frame
        await self._meta(request)
        return rows


def _expected(landed: Landed | None) -> list[object] | None:
    return None if landed is None else [landed.ino, landed.size, landed.mtime_ns]


def _wire(attrs: PfsAttrs) -> dict[str, object]:
    return {"attrs": [attrs.mode, attrs.uid, attrs.gid, attrs.atime_ns, attrs.mtime_ns, attrs.xattrs]}


def _stat(row: object) -> PfsStat:
    kind, mode, uid, gid, size, ino, nlink, rdev, atime_ns, mtime_ns, ctime_ns, target = cast(
        "tuple[str, int, int, int, int, int, int, int, int, int, int, bytes]", row
    )
    return PfsStat(kind, mode, uid, gid, size, ino, nlink, rdev, atime_ns, mtime_ns, ctime_ns, target)
