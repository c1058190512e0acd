"""All tests, in two lanes side by side: most of them wait for a disk, a lease or a deadline.

Role: ``make test LANES=2``. A piece is a directory below ``tests``, or a part of a large one, in a pytest of
its own; whichever lane is free takes the next, the long ones first. What a piece prints is shown when it has ended;
what failed is said once more at the end, and the last line is pytest's closing line over all. Exit code 0 when all
passed.
Concurrency: two threads, each with one child at a time; an interrupt ends the children, which clean up.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
#: The longest directory, in so many pieces; then the other long ones, then the rest by name.
PARTS = {"real": 2}
LONG_FIRST = ("real", "catalogue", "supervisor", "sim", "lab", "core", "pfs", "slurm")
CLOSING = re.compile(r"(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s(?: \([\d:]+\))?(?: =+)?")
SUMMARY = re.compile(r"(FAILED|ERROR) ")


@dataclass(frozen=True)
class Piece:
    """What one pytest runs."""

    name: str
    paths: tuple[str, ...]


@dataclass
class Found:
    """What the pieces have said so far."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)


def pieces() -> deque[Piece]:
    """All tests, the long pieces first. A new directory is one of them by itself."""
    names = sorted({path.parent.name for path in TESTS.glob("*/test_*.py")})
    first = [name for name in LONG_FIRST if name in names]
    made: deque[Piece] = deque()
    for name in first + [name for name in names if name not in first]:
        parts = PARTS.get(name, 1)
        files = sorted((TESTS / name).glob("test_*.py"), key=lambda path: path.stat().st_size, reverse=True)
        for part in range(parts):
            mine = files[part::parts] if parts > 1 else [TESTS / name]
            made.append(Piece(f"tests/{name}" + f" {part + 1} of {parts}" * (parts > 1), tuple(map(str, sorted(mine)))))
    return made


class Lanes:
    """Runs the pieces."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.left = pieces()
        self.found = Found()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._is_over = False

    def run(self) -> int:
        began_s = time.monotonic()
        threads = [threading.Thread(target=self._lane) for _ in range(self.count)]
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._stop())
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._close(time.monotonic() - began_s)

    def _lane(self) -> None:
        while True:
            with self.found.lock:
                if self._is_over or not self.left:
                    return
                piece = self.left.popleft()
                print(f"== {piece.name} begins", flush=True)
            with tempfile.TemporaryFile("w+", errors="replace") as output:  # a pipe would wait for whoever else has it
                child = subprocess.Popen(
                    [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *piece.paths],
                    cwd=TESTS.parent, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0,
                )  # fmt: skip
                with self.found.lock:
                    self._children.add(child)
                    if self._is_over:
                        child.send_signal(signal.SIGINT)
                child.wait()
                output.seek(0)
                with self.found.lock:
                    self._children.discard(child)
                    self._ended(piece, child.returncode, output.read())

    def _ended(self, piece: Piece, code: int, said: str) -> None:
        print(f"== {piece.name}", said, sep="\n", flush=True)
        lines = said.splitlines()
        closing = next((found for line in reversed(lines) if (found := CLOSING.fullmatch(line))), None)
        counts: Counter[str] = Counter()
        for part in closing[1].split(", ") if closing else ():
            count, _, what = part.partition(" ")
            counts[{"errors": "error", "warnings": "warning"}.get(what, what)] += int(count)
        if code:
            self.found.failed += [line for line in lines if SUMMARY.match(line)] or [f"{piece.name}: exit code {code}"]
            counts["error"] += not counts["failed"] + counts["error"]
        self.found.counts += counts

    def _stop(self) -> None:
        self._is_over = True
        for child in list(self._children):
            os.killpg(child.pid, signal.SIGINT)

    def _close(self, took_s: float) -> int:
        found = self.found
        if self._is_over:
            found.failed.append("interrupted")
            found.counts["error"] += 1
        for line in found.failed:
            print(line)
        order = sorted(found.counts, key=lambda what: (what != "failed", what != "error", what != "passed"))
        minutes, seconds = divmod(round(took_s), 60)
        plural = {what: "s" * (what in ("error", "warning") and found.counts[what] > 1) for what in order}
        said = ", ".join(f"{found.counts[what]} {what}{plural[what]}" for what in order) or "no tests ran"
        text = f" {said} in {took_s:.2f}s ({minutes // 60}:{minutes % 60:02}:{seconds:02}) "
        print(text.center(100, "="), flush=True)
        return 1 if found.failed or not found.counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(Lanes(int(sys.argv[1])).run())
