"""What the benchmarks share: rows with bounds, sides that take turns, and the work that is timed.

A row has our number, the other side's, their ratio and the bound. A side that cannot run here gives a row that says
why; no number is ever made up. Rates are GB/s of 10^9 bytes. Called by the other files of this directory, which are
run as ``python bench/NAME.py``.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PIECE_BYTES = 16 << 20
PIECE = memoryview(os.urandom(1 << 20) * (PIECE_BYTES >> 20))
QUIET_LOOK_S = 0.1
QUIET_SHARE_MAX = 0.05
QUIET_S_MAX = 30.0
MADV_POPULATE_WRITE = 23  # Linux 5.14
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Row:
    """One result. ``at_most`` turns the bound around; without ``bound`` the row is only reported."""

    name: str
    unit: str
    ours: float | None = None
    theirs: float | None = None
    beside: str = ""
    ratio: float | None = None
    bound: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """None: no bound, or not measured."""
        if self.bound is None or self.ratio is None:
            return None
        return self.ratio <= self.bound if self.at_most else self.ratio >= self.bound

    def text(self) -> str:
        """One line."""
        sign = {True: "met ", False: "MISS", None: "    "}[self.is_met]
        ours = "        -" if self.ours is None else f"{self.ours:9.3g}"
        line = f"{sign} {self.name:47} {ours} {self.unit:8}"
        if self.theirs is not None:
            line += f" / {self.theirs:8.3g}"
        if self.ratio is not None and self.theirs is not None:
            line += f" = {self.ratio:5.2f}"
        if self.bound is not None:
            line += f"  (bound {'<=' if self.at_most else '>='} {self.bound:g})"
        return line + "".join(f"  {part}" for part in (self.beside, self.note) if part)


class Report:
    """Rows, printed as they come; with ``as_json`` they are printed at the end and progress goes to stderr."""

    def __init__(self, as_json: bool) -> None:
        self.rows: list[Row] = []
        self._as_json = as_json
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # mounts are taken down

    def add(self, row: Row) -> None:
        """One more row."""
        self.rows.append(row)
        print(row.text(), file=sys.stderr if self._as_json else sys.stdout, flush=True)

    def ratio(
        self, name: str, unit: str, ours: Sequence[float], theirs: Sequence[float], beside: str,
        bound: float | None = None, *, note: str = "",
    ) -> None:  # fmt: skip
        """Medians of both sides and the median of the rounds' ratios (a machine drifts between rounds)."""
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        spread = f"rounds {min(ratios):.2f} to {max(ratios):.2f}"
        self.add(
            Row(
                name, unit, statistics.median(ours), statistics.median(theirs), beside, statistics.median(ratios),
                bound, note=f"{spread}; {note}" if note else spread,
            )
        )  # fmt: skip

    def at_most(
        self, name: str, unit: str, ours: Sequence[float], theirs: Sequence[float], beside: str, bound: float | None
    ) -> None:
        """The same, of rounds whose ratio is to stay below its bound."""
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        note = "rounds " + ", ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(ours, theirs, strict=True))
        self.add(
            Row(
                name, unit, statistics.median(ours), statistics.median(theirs), beside, statistics.median(ratios),
                bound, at_most=True, note=note,
            )
        )  # fmt: skip

    def absolute(
        self, name: str, unit: str, value: float, bound: float | None = None, *, at_most: bool = False, note: str = ""
    ) -> None:
        """A row that is compared with nothing but its bound."""
        ratio = value if bound is not None else None
        self.add(Row(name, unit, value, ratio=ratio, bound=bound, at_most=at_most, note=note))

    def missing(self, name: str, why: str, bound: float | None = None) -> None:
        """A row that could not be measured here."""
        self.add(Row(name, "", bound=bound, note=f"not measured: {why}"))

    def end(self) -> int:
        """Exit code: 1 when a bound is missed."""
        if self._as_json:
            print(json.dumps([asdict(row) | {"is_met": row.is_met} for row in self.rows], indent=1))
        return 1 if any(row.is_met is False for row in self.rows) else 0


def progress(what: str) -> None:
    """A line for whoever waits."""
    print(f"... {what}", file=sys.stderr, flush=True)


def alternate(rounds: int, *sides: Callable[[int], float]) -> list[list[float]]:
    """What each side returns in each of ``rounds`` rounds, after one that warms up. The order alternates."""
    found: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds + 1):
        order = list(range(len(sides)))
        for side in order if turn % 2 else reversed(order):
            value = sides[side](turn)
            if turn:
                found[side].append(value)
    return found


def cv(values: Sequence[float]) -> float:
    """Standard deviation over mean."""
    return statistics.stdev(values) / statistics.mean(values)


def touch(size: int) -> None:
    """Take ``size`` bytes of free memory and give them back at once: what is timed next finds memory that is there.

    A virtual machine may give memory that was free for some seconds back to its host, and the first touch after that
    costs 50 times what it costs otherwise (0.4 GB/s instead of 24 where this was written). That is not a filesystem's.
    In small pages, then in huge ones: the kernel keeps free ones of each apart, and tmpfs with small pages and the page
    cache take the first, tmpfs with huge pages the others.
    """
    size = min(size, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    for advice in (mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE):
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(advice)
        try:
            memory.madvise(MADV_POPULATE_WRITE)
        except OSError:  # an older kernel
            for offset in range(0, size, mmap.PAGESIZE):
                memory[offset] = 1
        memory.close()


# ---- the work
def write(path: Path, size: int) -> float:
    """GB/s of creating a file, writing it in pieces of 16 MiB and closing it."""
    began = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    done = 0
    while done < size:
        done += os.write(fd, PIECE[: size - done])
    os.close(fd)
    return size / (time.perf_counter() - began) / 1e9


def write_over(path: Path, size: int) -> float:
    """GB/s of writing over a file whose memory is there already."""
    began = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    done = 0
    while done < size:
        done += os.write(fd, PIECE[: size - done])
    os.close(fd)
    return size / (time.perf_counter() - began) / 1e9


def in_parallel(work: Callable[[Path, int], float], directory: Path, size: int, writers: int) -> float:
    """GB/s of ``writers`` threads that write a share of ``size`` each (the system calls release the interpreter)."""
    shares = [(directory / f"m{i}", size // writers) for i in range(writers)]
    threads = [threading.Thread(target=work, args=share) for share in shares]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return size / (time.perf_counter() - began) / 1e9


def read(path: Path) -> float:
    """GB/s of reading a file in pieces of 16 MiB."""
    piece, done = bytearray(PIECE_BYTES), 0
    began = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    while count := os.readv(fd, [piece]):
        done += count
    os.close(fd)
    return done / (time.perf_counter() - began) / 1e9


def copy_synced(source: Path, target: Path) -> float:
    """GB/s of cp and fsync."""
    began = time.perf_counter()
    subprocess.run(["cp", source, target], check=True)
    fd = os.open(target, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return source.stat().st_size / (time.perf_counter() - began) / 1e9


@contextlib.contextmanager
def tmpfs(size: int, huge: str = "") -> Iterator[Path]:
    """A tmpfs of its own; ``huge`` as in mount(8), empty for pages of 4 KiB."""
    directory = tempfile.mkdtemp(prefix="cachex-bench-")
    options = f"size={size},mode=0700,huge={huge or 'never'}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "bench", directory], check=True)
    try:
        yield Path(directory)
    finally:
        subprocess.run(["umount", "-l", directory], check=True)
        os.rmdir(directory)


# ---- processes
def cpu_s(pids: Sequence[int]) -> dict[int, float]:
    """Seconds of processor that each process has used, its ended children included; without those that have ended."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[pid] = sum(int(word) for word in words[11:15]) / TICKS
    return found


def quiet(pids: Callable[[], Sequence[int]]) -> None:
    """Wait until processes that have work left in the background are done with it."""
    until = time.monotonic() + QUIET_S_MAX
    while time.monotonic() < until:
        before = cpu_s(pids())
        time.sleep(QUIET_LOOK_S)
        after = cpu_s(pids())
        used = sum(after[pid] - before.get(pid, 0.0) for pid in after)
        if used <= QUIET_SHARE_MAX * QUIET_LOOK_S * 2:
            return
