"""``Pfs`` on the simulated store: the steps of the real adaptor, with faults between them.

Role: each step is one system call of a PFS child process. A step may fail with EIO or ENOSPC, hang until the
deadline (and take effect before, afterwards or never), not find a name that is there, or meet a power cut. What a
retry recognises is what the real adaptor recognises (``pfs_ops``, ``pfs_names``).
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO

import trio
import xxhash
from sim_store import Ino, Store, fail

from cachexfs.core.landed import CHANGED, Landed
from cachexfs.core.order import covers
from cachexfs.engine.pfs_interface import PfsAttrs, PfsStat, Xattrs

HELD = b".cachexfs/held/"


@dataclass
class Faults:
    """What may happen at a step of a call on the PFS: probabilities from 0 to 1."""

    error: float = 0.0
    full: float = 0.0
    hang: float = 0.0
    hide: float = 0.0
    away: bool = False  # nothing answers
    slow_s: float = 0.0  # what writing a piece of a file takes at most; names change as fast as ever
    refused: dict[str, int] = field(default_factory=dict)  # kinds of steps that fail every time, and their errno
    stuck: set[str] = field(default_factory=set)  # kinds of steps that hang every time
    hidden: set[bytes] = field(default_factory=set)  # what is not found for a while, with all below it
    denied: set[bytes] = field(default_factory=set)  # names that were there and were not found, so far

    def calm(self) -> None:
        self.error = self.full = self.hang = self.hide = self.slow_s = 0.0
        self.away = False
        for faults in (self.refused, self.stuck, self.hidden):
            faults.clear()


@dataclass(frozen=True)
class Prepared:
    """See ``pfs_pool.Prepared``."""

    hidden: str
    record: bytes
    stat: PfsStat | None


class NotPreparedError(FileNotFoundError):
    """As in ``pfs_pool``."""


class SimPfs:
    """One daemon's access to the store. ``looked``: called after each step that changed the store."""

    def __init__(
        self, store: Store, faults: Faults, rng: random.Random, looked: Callable[[str], None], late: trio.Nursery
    ) -> None:
        self.store, self.faults, self._rng, self._looked, self._late = store, faults, rng, looked, late
        self._prepared: dict[str, tuple[int, int]] = {}
        self._set_only: set[int] = set()
        self._notes: dict[tuple[str, bytes, bytes], int] = {}
        self._busy: dict[bytes, int] = {}
        self.state, self.error, self._away_s = "ok", "", 0.0
        self.dead = False
        self.trace: Callable[[str], None] = lambda text: None
        self.struck: Callable[[str, str], None] = lambda what, when: None  # around each effect; may kill, and raise

    # ---- steps
    async def _step(self, what: str, action: Callable[[], object], deadline_s: float, *paths: bytes) -> None:
        """One system call: its faults, its effect, its look from outside."""
        rng, faults, epoch = self._rng, self.faults, self.store.epoch
        await trio.sleep(rng.choice([0.0, 0.0005, 0.01]))
        if faults.slow_s and what == "write part":
            await trio.sleep(rng.uniform(0, faults.slow_s))
        if faults.away or what in faults.stuck or rng.random() < faults.hang:
            await self._hang(what, action, deadline_s, paths)
        self.state = "ok"  # it answers, if only with an error
        if self.store.epoch != epoch:
            raise fail(errno.EIO, b"the servers have restarted")
        if rng.random() < faults.error:
            raise fail(errno.EIO, what.encode())
        if "write" in what and rng.random() < faults.full:
            raise fail(errno.ENOSPC, what.encode())
        if what in faults.refused:
            raise fail(faults.refused[what], what.encode())
        self.struck(what, "before")
        self._act(what, action)
        self.struck(what, "after")

    def _act(self, what: str, action: Callable[[], object]) -> None:
        action()
        self._looked(what)

    @property
    def away_s(self) -> float:
        """See ``Pfs``."""
        return 0.0 if self.state == "ok" else trio.current_time() - self._away_s

    @property
    def waiting(self) -> tuple[str, float]:
        """See ``Pfs``: here nobody looks while a call runs."""
        return "", 0.0

    async def look_again(self) -> None:
        """See ``Pfs``: here the next call finds out."""

    async def _hang(self, what: str, action: Callable[[], object], deadline_s: float, paths: tuple[bytes, ...]) -> None:
        if self.state == "ok":
            self.state, self._away_s = "hung", trio.current_time()
        when = self._rng.choice(["never", "before", "after"])
        if when == "before":
            self._try(what, action)
        await trio.sleep(deadline_s)
        if when == "after":
            for path in paths:
                self._busy[path] = self._busy.get(path, 0) + 1
            self._late.start_soon(self._later, what, action, paths, self._rng.uniform(0, 60))
        raise trio.TooSlowError

    async def _later(self, what: str, action: Callable[[], object], paths: tuple[bytes, ...], delay_s: float) -> None:
        await trio.sleep(delay_s)
        for path in paths:
            self._busy[path] -= 1
        if not self.dead:  # a killed daemon's children die with it
            self._try(what, action)

    def _try(self, what: str, action: Callable[[], object]) -> None:
        try:
            self._act(what, action)
        except (OSError, ValueError):  # also of a source that is closed by now
            return

    def _refuse(self, *paths: bytes) -> None:
        for busy, count in self._busy.items():
            for path in paths:
                if count and (path == busy or path.startswith(busy + b"/") or busy.startswith(path + b"/")):
                    raise fail(errno.EBUSY, path)

    def busy(self) -> bool:
        """Whether a call that was given up has still to end."""
        return any(self._busy.values())

    def _hidden(self, path: bytes) -> None:
        """A server is down: names that are there are not found."""
        hidden = any(covers(name, path) for name in self.faults.hidden)
        if self._rng.random() < self.faults.hide or hidden:
            self.faults.denied.add(path)
            raise FileNotFoundError(errno.ENOENT, "hidden", os.fsdecode(path))

    # ---- copies
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
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """See ``Pfs``."""
        name, store = hidden.encode(), self.store
        self.trace(f"prepare {hidden} {record[:60]!r}")
        self._refuse(b"\0" + name)
        nonce = b"%s~%x" % (name, store.nonce())
        part, record_part = store.make("f", attrs), store.make("f", replace(attrs, mode=0o600))
        part.data = record_part.data = b""
        file = _opened(source)
        store.readers.add(file.fileno())
        try:
            for old in [n for n in store.tmp.entries if n.startswith((name + b"~", name + b".rec~"))]:
                store.change((store.tmp, old, None))
            await self._step("create part", lambda: store.change((store.tmp, nonce, part)), deadline_s)
            while len(part.data) < size:
                await self._step("write part", lambda: self._write(part, file, size), deadline_s)
                if on_progress is not None:
                    on_progress(len(part.data))
            await self._step("sync part", lambda: store.sync_file(part), deadline_s)
            _check(part, digest)
            record_part.data = record
            await self._step("write record", lambda: store.sync_file(record_part), deadline_s)
            await self._step("name record", lambda: store.change((store.tmp, name + b".rec", record_part)), deadline_s)
            await self._step("name part", lambda: self._name(nonce, name, part), deadline_s, b"\0" + name)
            await self._step("sync tmp", lambda: store.sync_directory(store.tmp), deadline_s)
        except BaseException:
            if not self.dead:
                store.change((store.tmp, nonce, None))
            raise
        finally:
            store.readers.discard(file.fileno())
            file.close()
        self._prepared[hidden] = (part.number, size)

    def _write(self, part: Ino, file: BinaryIO, size: int) -> None:
        piece = file.read(min(4096, size - len(part.data)))
        if not piece:
            raise fail(errno.EIO, b"the source is too short")
        if self.store.used_bytes() + len(piece) > self.store.capacity_bytes:
            raise fail(errno.ENOSPC, b"full")
        part.data += piece

    def _name(self, nonce: bytes, name: bytes, part: Ino) -> None:
        if self.store.tmp.entries.get(nonce) is not part:
            raise fail(errno.ENOENT, nonce)  # a later attempt has removed the part
        self.store.change((self.store.tmp, name, part), (self.store.tmp, nonce, None))

    async def discard(self, hidden: str, deadline_s: float) -> None:
        """See ``Pfs``."""
        name, tmp = hidden.encode(), self.store.tmp
        self.trace(f"discard {hidden}")
        self._refuse(b"\0" + name)

        def remove() -> None:
            for found in [n for n in tmp.entries if n in (name, name + b".rec") or n.startswith(name + b"~")]:
                self.store.change((tmp, found, None))

        await self._step("discard", remove, deadline_s, b"\0" + name)
        await self._step("sync tmp", lambda: self.store.sync_directory(tmp), deadline_s)
        self._prepared.pop(hidden, None)

    async def prepared(self, deadline_s: float) -> list[Prepared]:
        """See ``PfsPool.prepared``."""
        await self._step("list prepared", lambda: None, deadline_s)
        entries = self.store.tmp.entries
        found = []
        for name, ino in entries.items():
            if name.endswith(b".rec"):
                file = entries.get(name.removesuffix(b".rec"))
                stat = self.store.stat(file) if file is not None else None
                found.append(Prepared(name.removesuffix(b".rec").decode(), ino.data, stat))
        return found

    async def land(self, hidden: str, path: bytes, attrs: PfsAttrs, deadline_s: float) -> PfsStat:
        """See ``Pfs``."""
        store, name = self.store, hidden.encode()
        self.trace(f"land {hidden} at {path!r}")
        self._refuse(path, b"\0" + name)
        known = self._prepared.get(hidden, (-1, -1))
        self._hidden(path)
        parent, last = store.parent(path)
        file = store.tmp.entries.get(name)
        if file is None:
            file = parent.entries.get(last)
            if file is None or (file.number, len(file.data)) != known:
                self._prepared.pop(hidden, None)
                raise NotPreparedError(errno.ENODATA, "not prepared", hidden)
        else:
            if known[1] not in (-1, len(file.data)):
                raise NotPreparedError(errno.ENODATA, "another size", hidden)
            if file.attrs != attrs or file.number in self._set_only:
                self._set_only.add(file.number)  # tried again: the real one syncs a file whenever it lands it
                await self._step("set attributes", lambda: _set(file, attrs), deadline_s)
                await self._step("sync attributes", lambda: store.sync_file(file), deadline_s)
                self._set_only.discard(file.number)
            await self._step("land", lambda: self._land(name, path, file), deadline_s, path, b"\0" + name)
        await self._step("sync directory", lambda: store.sync_directory(parent), deadline_s)
        if name + b".rec" in store.tmp.entries:
            store.change((store.tmp, name + b".rec", None))
        self._prepared.pop(hidden, None)
        return store.stat(file)

    def _land(self, name: bytes, path: bytes, file: Ino) -> None:
        parent, last = self.store.parent(path)
        if self.store.tmp.entries.get(name) is not file:
            raise fail(errno.ENOENT, path)
        there = parent.entries.get(last)
        if there is not None and there.kind == "d":
            raise fail(errno.EISDIR, path)
        self.store.change((parent, last, file), (self.store.tmp, name, None))

    # ---- names
    async def run(self, kind: str, path: bytes, path2: bytes, attrs: PfsAttrs | None, deadline_s: float) -> None:
        """See ``Pfs``."""
        self.trace(f"{kind} {path!r} {path2!r}")
        self._refuse(path, *([path2] if path2 and kind in ("rename", "link", "attr") else []))
        kind, *details = kind.split(":")
        if details:
            path2 = details[0].encode()
        await getattr(self, "_" + kind)(path, path2, attrs, deadline_s)

    def _place(self, path: bytes) -> tuple[Ino, bytes]:
        if path.startswith(HELD):
            return self.store.held, path.removeprefix(HELD)
        return self.store.parent(path)

    async def _sync(self, deadline_s: float, *directories: Ino) -> None:
        for directory in directories:
            await self._step("sync directory", lambda d=directory: self.store.sync_directory(d), deadline_s)  # type: ignore[misc]

    async def _mkdir(self, path: bytes, path2: bytes, attrs: PfsAttrs, deadline_s: float) -> None:
        parent, last = self.store.parent(path)

        def make() -> None:
            found = parent.entries.get(last)
            if found is not None and found.kind != "d":
                raise fail(errno.EEXIST, path)
            if found is None:
                self.store.change((parent, last, self.store.make("d", replace(attrs, mode=attrs.mode | 0o700))))

        await self._step("mkdir", make, deadline_s, path)
        await self._sync(deadline_s, parent)

    async def _symlink(self, path: bytes, path2: bytes, attrs: PfsAttrs, deadline_s: float) -> None:
        parent, last = self.store.parent(path)

        def make() -> None:
            link = self.store.make("l", attrs)
            link.target = path2
            self.store.change((parent, last, link))

        await self._step("symlink", make, deadline_s, path)
        await self._sync(deadline_s, parent)

    async def _mknod(self, path: bytes, path2: bytes, attrs: PfsAttrs, deadline_s: float) -> None:
        parent, last = self.store.parent(path)

        def make() -> None:
            found = parent.entries.get(last)
            if found is not None and found.kind != path2.decode():
                raise fail(errno.EEXIST, path)
            if found is None:
                self.store.change((parent, last, self.store.make(path2.decode(), attrs)))

        await self._step("mknod", make, deadline_s, path)
        await self._sync(deadline_s, parent)

    async def _link(self, path: bytes, path2: bytes, attrs: PfsAttrs | None, deadline_s: float) -> None:
        self._hidden(path)
        parent, last = self.store.parent(path2)

        def make() -> None:
            found = self.store.find(path)
            if found is None:
                raise fail(errno.ENOENT, path)
            if (there := parent.entries.get(last)) is not None and there.kind == "d":
                raise fail(errno.EISDIR, path2)
            if there is not found:
                self.store.change((parent, last, found))

        await self._step("link", make, deadline_s, path, path2)
        await self._sync(deadline_s, parent)

    async def _move(self, kind: str, source: bytes, target: bytes, deadline_s: float, *, over: bool) -> None:
        key = (kind, source, target)
        (old, name), (new, name2) = self._place(source), self._place(target)
        found, there = old.entries.get(name), new.entries.get(name2)
        if found is None and there is not None and self._notes.get(key) == there.number:
            pass
        else:
            self._hidden(source)
            if found is None:
                raise fail(errno.ENOENT, source)
            if there is not None and not over and there is not found:
                raise fail(errno.EEXIST, target)
            self._notes[key] = found.number
            await self._step(kind, lambda: self._moved(source, target, found), deadline_s, source, target)
        await self._sync(deadline_s, new, old)
        self._notes.pop(key, None)

    def _moved(self, source: bytes, target: bytes, found: Ino) -> None:
        (old, name), (new, name2) = self._place(source), self._place(target)
        there = new.entries.get(name2)
        if old.entries.get(name) is not found:
            raise fail(errno.ENOENT, source)
        if there is not None and (there.kind == "d") != (found.kind == "d"):
            raise fail(errno.EISDIR if there.kind == "d" else errno.ENOTDIR, target)
        if there is not None and there.entries:
            raise fail(errno.ENOTEMPTY, target)
        if there is found:  # a power failure has left both names (two names of one file are never renamed)
            self.store.change((old, name, None))
            return
        self.store.change((new, name2, found), (old, name, None))

    async def _rename(self, path: bytes, path2: bytes, attrs: PfsAttrs | None, deadline_s: float) -> None:
        await self._move("rename", path, path2, deadline_s, over=True)

    async def _hide(self, path: bytes, path2: bytes, attrs: PfsAttrs | None, deadline_s: float) -> None:
        parent, last = self._place(path)
        if last not in parent.entries and path2 in self.store.held.entries:
            await self._sync(deadline_s, parent)  # a former process has done it
            return
        await self._move("hide", path, HELD + path2, deadline_s, over=False)

    async def _unhide(self, path: bytes, path2: bytes, attrs: PfsAttrs | None, deadline_s: float) -> None:
        await self._move("unhide", HELD + path2, path, deadline_s, over=True)

    async def _unlink(self, path: bytes, path2: bytes, attrs: PfsAttrs | None, deadline_s: float) -> None:
        try:
            parent, last = self._place(path)
        except FileNotFoundError:
            return

        def remove() -> None:
            found = parent.entries.get(last)
            if found is not None and found.kind == "d":
                raise fail(errno.EISDIR, path)
            if found is not None:
                self.store.change((parent, last, None))

        await self._step("unlink", remove, deadline_s, path)
        await self._sync(deadline_s, parent)

    async def _rmdir(self, path: bytes, path2: bytes, attrs: PfsAttrs | None, deadline_s: float) -> None:
        try:
            parent, last = self.store.parent(path)
        except FileNotFoundError:
            return

        def remove() -> None:
            found = parent.entries.get(last)
            if found is None:
                return
            if found.kind != "d":
                raise fail(errno.ENOTDIR, path)
            if found.entries:
                raise fail(errno.ENOTEMPTY, path)
            self.store.change((parent, last, None))

        await self._step("rmdir", remove, deadline_s, path)
        await self._sync(deadline_s, parent)

    async def _attr(self, path: bytes, path2: bytes, attrs: PfsAttrs, deadline_s: float) -> None:
        self._hidden(path)
        found = self.store.find(path)
        if found is None:
            raise fail(errno.ENOENT, path)
        await self._step("attr", lambda: _set(found, attrs), deadline_s, path)
        await self._step("sync attributes", lambda: self._sync_attrs(found), deadline_s)
        await self._sync(deadline_s, self.store.parent(path)[0] if path else self.store.root)

    def _sync_attrs(self, ino: Ino) -> None:
        ino.kept_attrs = ino.attrs
        if ino.kind == "f":
            self.store.sync_file(ino)

    # ---- looking
    async def stat(self, path: bytes, deadline_s: float) -> PfsStat:
        """See ``Pfs``."""
        await self._step("stat", lambda: None, deadline_s)
        self._hidden(path)
        found = self.store.find(path)
        if found is None:
            raise fail(errno.ENOENT, path)
        return self.store.stat(found)

    async def listing(self, path: bytes, deadline_s: float) -> list[tuple[bytes, PfsStat]]:
        """See ``Pfs``."""
        await self._step("list", lambda: None, deadline_s)
        if path:
            self._hidden(path)
        found = self.store.find(path)
        if found is None:
            raise fail(errno.ENOENT, path)
        return [(n, self.store.stat(i)) for n, i in found.entries.items() if path or n != b".cachexfs"]

    async def stats(self, paths: Sequence[bytes], deadline_s: float) -> list[PfsStat | int | None]:
        """See ``Pfs``."""
        await self._step("stats", lambda: None, deadline_s)
        found = [self.store.find(path) for path in paths]
        for path, ino in zip(paths, found, strict=True):
            if ino is not None:
                self._hidden(path)
        return [None if ino is None else self.store.stat(ino) for ino in found]

    async def check(self, path: bytes, size: int, digest: bytes, deadline_s: float) -> PfsStat | None:
        """See ``Pfs``."""
        await self._step("check", lambda: None, deadline_s)
        self._hidden(path)
        found = self.store.find(path)
        if found is None:
            raise fail(errno.ENOENT, path)
        same = (len(found.data), xxhash.xxh3_128_digest(found.data)) == (size, digest)
        return self.store.stat(found) if same else None

    async def xattrs(self, path: bytes, deadline_s: float) -> dict[bytes, Xattrs]:
        """See ``Pfs``."""
        found = self.store.find(path)
        entries = found.entries.items() if found is not None else ()
        return {name: ino.attrs.xattrs for name, ino in entries if ino.attrs.xattrs}

    async def read(
        self, path: bytes, offset: int, length: int, deadline_s: float, expected: Landed | None = None
    ) -> bytes:
        """See ``Pfs``."""
        await self._step("read", lambda: None, deadline_s)
        self._hidden(path)
        found = self.store.find(path)
        if found is None:
            raise fail(errno.ENOENT, path)
        stat = self.store.stat(found)
        if expected is not None and not expected.is_same(stat.ino, stat.size, stat.mtime_ns):
            raise fail(CHANGED, path)
        return found.data[offset : offset + length]

    async def fetch(
        self, path: bytes, offset: int, length: int, target: str, deadline_s: float, expected: Landed | None = None
    ) -> int:
        """See ``Pfs``."""
        data = await self.read(path, offset, length, deadline_s, expected)
        fd = os.open(target, os.O_WRONLY)
        try:
            return os.pwrite(fd, data, offset)
        finally:
            os.close(fd)

    async def statvfs(self, deadline_s: float) -> tuple[int, int, int, int, int]:
        """See ``Pfs``."""
        await self._step("statvfs", lambda: None, deadline_s)
        return 4096, 1 << 20, 1 << 20, 1 << 20, 1 << 20


def _check(part: Ino, digest: bytes) -> None:
    if digest and xxhash.xxh3_128_digest(part.data) != digest:
        raise OSError(errno.EIO, "read back with another digest")


def _opened(source: str) -> BinaryIO:
    return open(source, "rb")


def _set(ino: Ino, attrs: PfsAttrs) -> None:
    uid = ino.attrs.uid if attrs.uid is None else attrs.uid
    gid = ino.attrs.gid if attrs.gid is None else attrs.gid
    xattrs = ino.attrs.xattrs if attrs.xattrs is None else attrs.xattrs
    ino.attrs = replace(attrs, uid=uid, gid=gid, xattrs=xattrs)
