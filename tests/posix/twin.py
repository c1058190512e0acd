"""Random operations on two directories at once: whatever one answers, the other must answer too.

Role: ``Twin`` runs a script from a seed on a mount and on a plain directory and compares results, errnos, bytes, sizes,
link counts, modes, listings, and whether a change moved the mtime. Used by the tests, and by hand for longer runs.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

FILE_BYTES_MAX = 3 << 20
WRITE_BYTES_MAX = 300 << 10
BLOCK = 4096
LOG_SHOWN = 200
NAMES = [f"f{i}" for i in range(6)] + ["d0/g0", "d0/g1", "d1/h0"]
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p

Result = tuple[str, object]


@dataclass
class Pair:
    """One open file on both sides."""

    fds: tuple[int, int]
    flags: int
    origin: str

    @property
    def readable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def writable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY


def attempt(function: Callable[[], object]) -> Result:
    """What a call gives: a value, or the name of its errno."""
    try:
        return "ok", function()
    except OSError as error:
        return "error", errno.errorcode.get(error.errno or 0, error.errno)


@dataclass
class Kept:
    """A shared map on both sides whose descriptors are closed (Python's own maps keep a duplicate)."""

    starts: tuple[int, int]
    size: int
    origin: str

    @classmethod
    def of(cls, paths: tuple[Path, Path], origin: str) -> Kept:
        fds = [os.open(path, os.O_RDWR) for path in paths]
        size = os.fstat(fds[1]).st_size
        both = mmap.PROT_READ | mmap.PROT_WRITE
        starts = [LIBC.mmap(None, ctypes.c_size_t(size), both, mmap.MAP_SHARED, fd, 0) for fd in fds]
        for fd in fds:
            os.close(fd)
        return cls((starts[0], starts[1]), size, origin)

    def write(self, offset: int, data: bytes) -> None:
        for start in self.starts:
            ctypes.memmove(start + offset, data, len(data))

    def close(self) -> None:
        for start in self.starts:
            LIBC.munmap(ctypes.c_void_p(start), ctypes.c_size_t(self.size))


@dataclass
class Twin:
    """A run. ``sides``: the mount's directory and the plain one. ``log`` has every step, for the failure's message."""

    sides: tuple[Path, Path]
    seed: int
    allow: frozenset[str] = frozenset()
    pairs: list[Pair] = field(default_factory=list)
    maps: list[Kept] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        for side in self.sides:
            for name in ("d0", "d1"):
                (side / name).mkdir()
        self.operations: list[tuple[int, Callable[[], None]]] = [
            (10, self.open), (6, self.close), (24, self.write), (12, self.read), (5, self.append), (6, self.truncate),
            (4, self.ftruncate), (4, self.rename), (2, self.unlink), (2, self.link), (4, self.map_write),
            (4, self.map_read), (2, self.map_drop), (2, self.fallocate), (3, self.copy_range), (3, self.sendfile),
            (2, self.fsync), (6, self.look), (2, self.times), (2, self.chmod), (2, self.direct), (1, self.compare),
            (2, self.map_keep), (6, self.map_kept_write), (2, self.map_let_go), (3, self.vectors), (3, self.two_append),
            (2, self.rename_over_open), (2, self.attribute), (1, self.directory), (1, self.duplicate),
        ]  # fmt: skip

    # ---- running
    def run(self, steps: int, between: Callable[[int], None] = lambda step: None) -> None:
        """Carry out ``steps`` random operations, then compare everything."""
        self.steps(steps, between)
        self.finish()

    def steps(self, steps: int, between: Callable[[int], None] = lambda step: None) -> None:
        """Carry out ``steps`` more."""
        weights = [weight for weight, _ in self.operations]
        for step in range(steps):
            between(step)
            _, operation = self.random.choices(self.operations, weights)[0]
            operation()

    def finish(self) -> None:
        """Compare everything, close everything, compare again."""
        self.compare()
        self.end()
        self.compare()

    def end(self) -> None:
        while self.maps:
            self.maps.pop().close()
        while self.pairs:
            self._drop(0)

    def both(self, what: str, function: Callable[[int], object]) -> Result:
        """The same on both sides, with the same answer."""
        self.log.append(what)
        ours, theirs = attempt(lambda: function(0)), attempt(lambda: function(1))
        if ours != theirs:
            self.fail(f"{what}: {_short(ours)}, a plain directory gives {_short(theirs)}")
        return ours

    def fail(self, why: str) -> None:
        steps = "\n  ".join(self.log[-LOG_SHOWN:])
        raise AssertionError(f"seed {self.seed}, step {len(self.log)}: {why}\n  {steps}")

    # ---- choices
    def name(self) -> str:
        return self.random.choice(NAMES)

    def path(self, side: int, name: str) -> Path:
        return self.sides[side] / name

    def pair(self, *, readable: bool = False, writable: bool = False) -> Pair | None:
        found = [p for p in self.pairs if (p.readable or not readable) and (p.writable or not writable)]
        return self.random.choice(found) if found else None

    def data(self) -> bytes:
        length = self.random.choice((1, 7, 512, BLOCK, BLOCK + 1, 70_000, self.random.randrange(1, WRITE_BYTES_MAX)))
        return self.random.randbytes(length)

    def offset(self, fd: int) -> int:
        size = os.fstat(fd).st_size
        return self.random.choice(
            (0, size, self.random.randrange(size + 1), size // BLOCK * BLOCK, min(size + 100_000, FILE_BYTES_MAX))
        )

    # ---- operations
    def open(self) -> None:
        name = self.name()
        flags = self.random.choice((os.O_RDONLY, os.O_WRONLY, os.O_RDWR))
        for flag in (os.O_CREAT, os.O_TRUNC, os.O_EXCL, os.O_APPEND):
            if self.random.random() < {os.O_CREAT: 0.7, os.O_TRUNC: 0.15, os.O_EXCL: 0.05, os.O_APPEND: 0.2}[flag]:
                flags |= flag
        if self.maps:
            flags &= ~os.O_TRUNC
        mode = self.random.choice((0o644, 0o600, 0o755))
        fds = [-1, -1]

        def work(side: int) -> None:
            fds[side] = os.open(self.path(side, name), flags, mode)

        if self.both(f"open {name} {flags:o}", work)[0] == "ok":
            self.pairs.append(Pair((fds[0], fds[1]), flags, name))
            if len(self.pairs) > 8:
                self._drop(0)

    def close(self) -> None:
        if self.pairs:
            self._drop(self.random.randrange(len(self.pairs)))

    def _drop(self, index: int) -> None:
        pair = self.pairs.pop(index)
        self.both(f"close {pair.origin}", lambda side: os.close(pair.fds[side]))

    def write(self) -> None:
        pair = self.pair(writable=True)
        if pair is None:
            return
        data, offset = self.data(), self.offset(pair.fds[1])
        if pair.flags & os.O_APPEND and os.fstat(pair.fds[1]).st_size > FILE_BYTES_MAX:
            return
        before = [os.fstat(fd).st_mtime_ns for fd in pair.fds]
        self.both(f"pwrite {pair.origin} {offset}+{len(data)}", lambda side: os.pwrite(pair.fds[side], data, offset))
        if os.fstat(pair.fds[0]).st_mtime_ns < before[0] and "mtime" not in self.allow:
            after = os.fstat(pair.fds[0])
            self.fail(f"a write moved the mtime back by {before[0] - after.st_mtime_ns} ns, {after.st_nlink} names")

    def read(self) -> None:
        pair = self.pair(readable=True)
        if pair is None:
            return
        offset, length = self.offset(pair.fds[1]), self.random.randrange(1, WRITE_BYTES_MAX)
        self.both(f"pread {pair.origin} {offset}+{length}", lambda side: os.pread(pair.fds[side], length, offset))

    def append(self) -> None:
        name, data = self.name(), self.data()

        def work(side: int) -> int:
            fd = os.open(self.path(side, name), os.O_WRONLY | os.O_APPEND)
            try:
                return os.write(fd, data) if os.fstat(fd).st_size < FILE_BYTES_MAX else -1
            finally:
                os.close(fd)

        self.both(f"append {name} +{len(data)}", work)

    def _length(self) -> int:
        return self.random.choice((0, 1, BLOCK, self.random.randrange(FILE_BYTES_MAX), self.random.randrange(200_000)))

    def truncate(self) -> None:
        name, length = self.name(), self._length()
        if not self.maps:
            self.both(f"truncate {name} {length}", lambda side: os.truncate(self.path(side, name), length))

    def ftruncate(self) -> None:
        pair, length = self.pair(writable=True), self._length()
        if pair is not None and not self.maps:  # a mapping cut by a truncation is a SIGBUS on both sides
            self.both(f"ftruncate {pair.origin} {length}", lambda side: os.ftruncate(pair.fds[side], length))

    def rename(self) -> None:
        one, two = self.name(), self.name()
        self.both(f"rename {one} {two}", lambda side: os.rename(self.path(side, one), self.path(side, two)))

    def unlink(self) -> None:
        name = self.name()
        self.both(f"unlink {name}", lambda side: os.unlink(self.path(side, name)))

    def link(self) -> None:
        one, two = self.name(), self.name()
        self.both(f"link {one} {two}", lambda side: os.link(self.path(side, one), self.path(side, two)))

    def map_write(self) -> None:
        pair = self.pair(readable=True, writable=True)
        if pair is None or pair.flags & os.O_APPEND or not (size := os.fstat(pair.fds[1]).st_size):
            return
        start = self.random.randrange(size)
        data = self.random.randbytes(min(self.random.randrange(1, 60_000), size - start))

        def work(side: int) -> None:
            with mmap.mmap(pair.fds[side], size, mmap.MAP_SHARED) as mapped:
                mapped[start : start + len(data)] = data
                mapped.flush()

        self.both(f"map {pair.origin} write {start}+{len(data)}", work)

    def map_read(self) -> None:
        pair = self.pair(readable=True)
        if pair is None or not (size := os.fstat(pair.fds[1]).st_size):
            return
        how = self.random.choice((mmap.MAP_SHARED, mmap.MAP_PRIVATE))

        def work(side: int) -> bytes:
            with mmap.mmap(pair.fds[side], size, how, mmap.PROT_READ) as mapped:
                return bytes(mapped)

        self.both(f"map {pair.origin} read {size}", work)

    def map_drop(self) -> None:
        """A shared map that is written after its descriptor was closed."""
        name = self.name()

        def work(side: int) -> None:
            fd = os.open(self.path(side, name), os.O_RDWR)
            try:
                size = os.fstat(fd).st_size
                mapped = mmap.mmap(fd, size) if size else None
            finally:
                os.close(fd)
            if mapped is not None:
                with mapped:
                    mapped[size // 2 : size // 2 + 1] = b"m"
                    mapped[-1:] = b"e"
                    mapped.flush()

        self.both(f"map {name}, close, write", work)

    def map_keep(self) -> None:
        name = self.name()
        found = self.path(1, name)
        if len(self.maps) < 3 and found.is_file() and found.stat().st_size:
            self.log.append(f"map {name}, close")
            self.maps.append(Kept.of((self.path(0, name), found), name))

    def map_kept_write(self) -> None:
        if not self.maps:
            return
        kept = self.random.choice(self.maps)
        offset = self.random.randrange(kept.size)
        data = self.random.randbytes(min(self.random.randrange(1, 20_000), kept.size - offset))
        self.log.append(f"write {offset}+{len(data)} into the map of what was {kept.origin}")
        kept.write(offset, data)

    def map_let_go(self) -> None:
        if self.maps:
            kept = self.maps.pop(self.random.randrange(len(self.maps)))
            self.log.append(f"unmap what was {kept.origin}")
            kept.close()

    def vectors(self) -> None:
        """pwritev and preadv, at the end too."""
        pair = self.pair(readable=True, writable=True)
        if pair is None or pair.flags & os.O_APPEND:
            return
        offset, pieces = self.offset(pair.fds[1]), [self.data()[:9000] for _ in range(3)]

        def work(side: int) -> tuple[int, list[bytes]]:
            done = os.pwritev(pair.fds[side], pieces, offset)
            back = [bytearray(len(piece)) for piece in pieces]
            os.preadv(pair.fds[side], back, offset)
            return done, [bytes(piece) for piece in back]

        self.both(f"pwritev {pair.origin} {offset}", work)

    def two_append(self) -> None:
        """Two appenders of one file take turns."""
        name, pieces = self.name(), [self.data()[:5000] for _ in range(4)]

        def work(side: int) -> int:
            fds = [os.open(self.path(side, name), os.O_WRONLY | os.O_APPEND) for _ in range(2)]
            try:
                if os.fstat(fds[0]).st_size > FILE_BYTES_MAX:
                    return -1
                return sum(os.write(fds[i % 2], piece) for i, piece in enumerate(pieces))
            finally:
                for fd in fds:
                    os.close(fd)

        self.both(f"append twice {name}", work)

    def rename_over_open(self) -> None:
        """As editors save: a new file takes the name of one that may be open or mapped."""
        name, data = self.name(), self.data()

        def work(side: int) -> None:
            path = self.path(side, name)
            new = path.with_name(path.name + ".new")
            new.write_bytes(data)
            os.replace(new, path)

        self.both(f"save {name} {len(data)}", work)

    def attribute(self) -> None:
        pair, key = self.pair(), f"user.{self.random.randrange(3)}"
        value = self.random.choice((None, self.random.randbytes(9)))
        if pair is None:
            return

        def work(side: int) -> list[tuple[str, bytes]]:
            fd = pair.fds[side]
            if value is None:
                os.removexattr(fd, key)
            else:
                os.setxattr(fd, key, value)
            return [(name, os.getxattr(fd, name)) for name in sorted(os.listxattr(fd)) if "cachex" not in name]

        self.both(f"xattr {pair.origin} {key}", work)

    def directory(self) -> None:
        """Made, opened, filled, moved over an empty one, removed while it is open."""

        def work(side: int) -> tuple[object, ...]:
            one, two = self.sides[side] / "one", self.sides[side] / "two"
            one.mkdir()
            two.mkdir()
            fd = os.open(two, os.O_RDONLY)
            try:
                (one / "f").write_bytes(b"f")
                os.symlink("f", one / "l")
                os.rename(one, two)
                for name in ("f", "l"):
                    os.unlink(two / name)
                two.rmdir()
                found = os.fstat(fd)
                # Its mode is forgotten where a daemon died since (docs/posix.md).
                return found.st_nlink, stat.S_IFMT(found.st_mode), os.listdir(fd)
            finally:
                os.close(fd)

        self.both("directories", work)

    def duplicate(self) -> None:
        """What a child does with its descriptors when it ends."""
        pair = self.pair()
        if pair is not None:
            self.both(f"close a duplicate of {pair.origin}", lambda side: os.close(os.dup(pair.fds[side])))

    def fallocate(self) -> None:
        pair = self.pair(readable=True, writable=True)  # glibc's fallback reads
        if pair is None or pair.flags & os.O_APPEND:
            return
        offset, length = self._length() // 2, self.random.randrange(1, 200_000)
        what = f"fallocate {pair.origin} {offset}+{length}"
        self.both(what, lambda side: os.posix_fallocate(pair.fds[side], offset, length))

    def copy_range(self) -> None:
        one, two = self.pair(readable=True), self.pair(writable=True)
        if one is None or two is None or two.flags & os.O_APPEND:
            return
        if os.path.sameopenfile(one.fds[1], two.fds[1]):
            return
        offset, length = self.offset(two.fds[1]), self.random.randrange(1, 200_000)

        def work(side: int) -> int:
            done = 0
            while done < length:
                count = os.copy_file_range(one.fds[side], two.fds[side], length - done, done, offset + done)
                if not count:
                    break
                done += count
            return done

        self.both(f"copy_file_range {one.origin} -> {two.origin} {offset}+{length}", work)

    def sendfile(self) -> None:
        one, two = self.pair(readable=True), self.pair(writable=True)
        if one is None or two is None or os.path.sameopenfile(one.fds[1], two.fds[1]):
            return
        if two.flags & os.O_APPEND:
            return  # EINVAL on some kernels
        offset, length = self.offset(two.fds[1]), self.random.randrange(1, 200_000)

        def work(side: int) -> int:
            os.lseek(two.fds[side], offset, os.SEEK_SET)
            done = 0
            while done < length and (count := os.sendfile(two.fds[side], one.fds[side], done, length - done)):
                done += count
            return done

        self.both(f"sendfile {one.origin} -> {two.origin} {offset}+{length}", work)

    def fsync(self) -> None:
        pair = self.pair()
        if pair is not None and "fsync" in self.allow:
            self.both(f"fsync {pair.origin}", lambda side: os.fsync(pair.fds[side]))

    def times(self) -> None:
        name, at_ns = self.name(), self.random.randrange(1, 1_700_000_000_000_000_000)

        def work(side: int) -> tuple[int, int]:
            os.utime(self.path(side, name), ns=(at_ns, at_ns + 1))
            found = self.path(side, name).stat()
            return found.st_atime_ns, found.st_mtime_ns

        self.both(f"utime {name}", work)

    def chmod(self) -> None:
        name, mode = self.name(), self.random.choice((0o600, 0o644, 0o755, 0o4755))
        self.both(f"chmod {name} {mode:o}", lambda side: os.chmod(self.path(side, name), mode))

    def direct(self) -> None:
        """O_DIRECT: aligned blocks, in place and beyond the end."""
        name, at = self.name(), self.random.randrange(64) * BLOCK
        data = self.random.randbytes(BLOCK * self.random.randrange(1, 8))

        def work(side: int) -> tuple[int, bytes]:
            with mmap.mmap(-1, len(data)) as buffer:
                buffer[:] = data
                fd = os.open(self.path(side, name), os.O_RDWR | os.O_DIRECT)
                try:
                    done = os.pwritev(fd, [buffer], at)
                    back = os.preadv(fd, [buffer], at)
                finally:
                    os.close(fd)
                return done, bytes(buffer[:back])

        self.both(f"direct {name} {at}+{len(data)}", work)

    # ---- looking
    def look(self) -> None:
        """stat by name and by descriptor."""
        name = self.name()
        self.both(f"stat {name}", lambda side: self._stat(os.stat(self.path(side, name))))
        pair = self.pair()
        if pair is not None:
            self.both(f"fstat {pair.origin}", lambda side: self._stat(os.fstat(pair.fds[side])))

    @staticmethod
    def _stat(found: os.stat_result) -> tuple[int, ...]:
        return stat.S_IFMT(found.st_mode), stat.S_IMODE(found.st_mode), found.st_size, found.st_nlink, found.st_uid

    def compare(self) -> None:
        """All names, attributes and bytes. Looking moves no mtime, but where a map has written."""
        for directory in ("", "d0", "d1"):
            self.both(f"list {directory}", lambda side, d=directory: sorted(os.listdir(self.sides[side] / d)))
        for name in NAMES:
            if not os.path.lexists(self.path(1, name)):
                continue
            self.both(f"stat {name}", lambda side, n=name: self._stat(os.stat(self.path(side, n))))
            before = self.path(0, name).stat()
            self.both(f"bytes of {name}", lambda side, n=name: self.path(side, n).read_bytes())
            after = self.path(0, name).stat()
            if after.st_mtime_ns != before.st_mtime_ns and "mtime" not in self.allow and not self.maps:
                self.fail(f"reading {name} moved its mtime")
            if any(self.path(0, name).read_bytes()) and not after.st_blocks:
                self.fail(f"{name} has bytes and no blocks")


def _short(result: Result) -> str:
    kind, value = result
    return f"{kind} {len(value)} bytes {value[:16]!r}..." if isinstance(value, bytes) else f"{kind} {value!r}"


def same_tree(one: Path, two: Path) -> list[str]:
    """What differs between two trees in names, kinds, modes, bytes and which names are one file."""
    wrong, seen = [], ({}, {})  # type: ignore[var-annotated]
    for directory, _, files in os.walk(two):
        relative = Path(directory).relative_to(two)
        ours = sorted(n for n in os.listdir(one / relative) if n != ".cachexfs")
        if ours != sorted(os.listdir(directory)):
            wrong.append(f"{relative}: {ours}")
            continue
        for name in files:
            paths = one / relative / name, two / relative / name
            for side, path in enumerate(paths):
                seen[side].setdefault(path.lstat().st_ino, set()).add(str(relative / name))
            if paths[0].read_bytes() != paths[1].read_bytes():
                wrong.append(f"{relative / name}: bytes")
            if paths[0].stat().st_mode != paths[1].stat().st_mode:
                wrong.append(f"{relative / name}: mode {paths[0].stat().st_mode:o}")
    groups = [sorted(map(sorted, side.values())) for side in seen]
    if not wrong and groups[0] != groups[1]:
        wrong.append(f"names of one file: {groups[0]}, not {groups[1]}")
    return wrong
