"""Speed of the supervisor: both sides of each ratio in one run, interleaved, medians.

Run: ``python bench/bench_supervisor.py [--rounds N] [--mib N] [--files N] [--known N] [--json]`` as root, alone on
the machine. Behind the mounts is the directory-backed daemon of the supervisor's tests, so that the rows show the
supervisor and not the engine. Exit 1 when a bound is missed.

Sides: *native* a directory on the same tmpfs; *bare* the daemon mounted by itself, opens direct_io; *handler* the same
behind a supervisor with passthrough off; *passed* behind a supervisor with passthrough.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from compare import Report, alternate, progress

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from cachexfs.supervisor.status import ask  # noqa: E402

DAEMON = REPOSITORY / "tests" / "supervisor" / "plain_daemon.py"
MIB = 1 << 20
#: What one write(2) carries: tensors are written whole. The kernel asks once per write(2) for capabilities.
BLOCK = 32 * MIB
SMALL = b"x" * 4096
READY_S_MAX = 20.0
PAUSE_KILLS = 5


@dataclass(frozen=True)
class Side:
    """One place to work in: ``point`` is where applications write, ``status`` the supervisor's socket."""

    name: str
    point: Path
    status: str | None = None


def _wait(is_true: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + READY_S_MAX
    while not is_true():
        if time.monotonic() > until:
            raise TimeoutError(what)
        time.sleep(0.01)


@contextlib.contextmanager
def mounted(name: str, base: Path, staging: Path, *, passthrough: str | None) -> Iterator[Side]:
    """A mounted plain daemon: behind a supervisor, or (``passthrough`` None) by itself."""
    point, root = base / name, staging / name
    point.mkdir()
    root.mkdir()
    status = str(base / f"{name}.status")
    daemon = [sys.executable, str(DAEMON)]
    if passthrough is None:
        command = [*daemon, str(point)]
    else:
        command = [sys.executable, "-m", "cachexfs.supervisor", "--mountpoint", str(point), "--status-socket", status]
        command += ["--backing-dir", str(root), "--passthrough", passthrough, "--", *daemon]
    env = {**os.environ, "PLAIN_ROOT": str(root), "PLAIN_DIRECT": "1"}
    # A session of its own on both sides: where the scheduler groups by session, they are treated alike.
    process = subprocess.Popen(command, cwd=REPOSITORY, env=env, start_new_session=True)
    try:
        _wait(lambda: os.path.ismount(point), f"{name} mounted")
        os.listdir(point)
        yield Side(name, point, status if passthrough is not None else None)
    finally:
        subprocess.run(["umount", str(point)], check=False)
        try:
            process.wait(READY_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def write(path: Path, data: memoryview, size: int) -> None:
    """Write ``size`` bytes over ``path``, to close."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    for offset in range(0, size, len(data)):
        os.pwrite(fd, data, offset)
    os.close(fd)


def read(path: Path, data: memoryview, size: int) -> None:
    """Read ``size`` bytes of ``path``, with open and close."""
    fd = os.open(path, os.O_RDONLY)
    for offset in range(0, size, len(data)):
        os.preadv(fd, [data], offset)
    os.close(fd)


def rate(work: Callable[[], None], amount: float) -> float:
    """``amount`` per second."""
    begun = time.perf_counter()
    work()
    return amount / (time.perf_counter() - begun)


def in_parallel(work: Callable[[int], None], count: int) -> None:
    """``count`` processes' worth of work in threads (the system calls release the interpreter)."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def small_files(point: Path, count: int) -> None:
    """Create, write 4 KiB, close."""
    for i in range(count):
        fd = os.open(point / f"s{i}", os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(fd, SMALL)
        os.close(fd)


def remove(point: Path) -> None:
    """Empty a directory of files."""
    for name in os.listdir(point):
        os.unlink(point / name)


def compare(
    report: Report, name: str, ours: Side, theirs: Side, measure: Callable[[Side], float], rounds: int, unit: str,
    bound: float, note: str = "",
) -> None:  # fmt: skip
    """One row: both sides in turn."""
    progress(name)
    one, two = alternate(rounds, lambda _: measure(ours), lambda _: measure(theirs))
    for side in (ours, theirs):
        remove(side.point)
    report.ratio(name, unit, one, two, theirs.name, bound, note=note)


def _serves_again(status: str, restarts: int) -> bool:
    now = ask(status, "status")
    return now["restarts"] == restarts and now["phase"] == "serving"


def longest_pause(report: Report, side: Side, known: int) -> None:
    """Seconds an application waits at most while the daemon is killed, with ``known`` files in it."""
    progress(f"pause, {known} files known")
    for i in range(known):
        (side.point / f"k{i}").touch()
    worst, is_over = 0.0, threading.Event()

    def work() -> None:
        nonlocal worst
        i = 0
        while not is_over.is_set():
            begun = time.perf_counter()
            fd = os.open(side.point / f"p{i % 8}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            os.write(fd, SMALL)
            os.close(fd)
            worst = max(worst, time.perf_counter() - begun)
            i += 1

    thread = threading.Thread(target=work)
    thread.start()
    assert side.status is not None
    for kill in range(1, PAUSE_KILLS + 1):
        time.sleep(0.3)
        pid = int(str(ask(side.status, "status")["daemon_pid"]))
        assert pid > 0, "it serves, so it is there"
        os.kill(pid, signal.SIGKILL)
        _wait(lambda kill=kill: _serves_again(str(side.status), kill), "restart")  # type: ignore[misc]
    time.sleep(0.5)
    is_over.set()
    thread.join()
    report.absolute(f"longest pause of {PAUSE_KILLS} kills, {known} files", "s", worst, 1.0, at_most=True)


def run(report: Report, args: argparse.Namespace, base: Path, staging: Path) -> None:
    """All rows."""
    native = Side("native", staging / "native")
    native.point.mkdir()
    data = memoryview(bytearray(os.urandom(MIB) * (BLOCK // MIB)))
    size, rounds = args.mib * MIB, args.rounds

    def writing(side: Side) -> float:
        return rate(lambda: write(side.point / "f", data, size), size / 1e9)

    def reading(side: Side) -> float:
        if not (side.point / "f").exists():
            write(side.point / "f", data, size)
        return rate(lambda: read(side.point / "f", data, size), size / 1e9)

    def four(side: Side) -> float:
        return rate(lambda: in_parallel(lambda i: write(side.point / f"f{i}", data, size // 4), 4), size / 1e9)

    def small(side: Side) -> float:
        result = rate(lambda: small_files(side.point, args.files), args.files)
        remove(side.point)
        return result

    with mounted("passed", base, staging, passthrough="auto") as passed:
        assert passed.status is not None
        if ask(passed.status, "status")["passthrough"]:
            compare(report, "write, passthrough", passed, native, writing, rounds, "GB/s", 0.9)
            compare(report, "4 writers, passthrough", passed, native, four, rounds, "GB/s", 0.85)
            compare(report, "read, passthrough", passed, native, reading, rounds, "GB/s", 0.9)
        with mounted("bare", base, staging, passthrough=None) as bare:
            with mounted("handler", base, staging, passthrough="off") as handler:
                compare(report, "write, handler", handler, bare, writing, rounds, "GB/s", 0.75)
                compare(report, "4 writers, handler", handler, bare, four, rounds, "GB/s", 0.75)
                compare(report, "read, handler", handler, bare, reading, rounds, "GB/s", 0.75)
                compare(report, "small files, handler", handler, bare, small, rounds, "1/s", 0.5, "aim 0.8")
            compare(report, "small files, passthrough", passed, bare, small, rounds, "1/s", 0.5, "aim 0.8")
        longest_pause(report, passed, args.known)


def main() -> int:
    """Measure and print; 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="size of the big file")
    parser.add_argument("--files", type=int, default=1000, help="small files a round")
    parser.add_argument("--known", type=int, default=10000, help="files known while the daemon is killed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = Report(args.json)
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory(dir="/dev/shm") as staging:
        run(report, args, Path(base), Path(staging))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
