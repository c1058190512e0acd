"""What a mount costs, beside the same work without it, in one run.

    python bench/bench_mount.py [--only GROUP,GROUP] [--mib 1024] [--rounds 5] [--json]

Groups: ``handler`` (writes by the daemon's handler), ``supervisor`` (the same with and without one), ``read``,
``read_through`` (files that are on the PFS alone), ``spread`` (many writes), ``small`` (files of 4 KiB), ``passed``
(writes and reads that the kernel passes to staging), ``drain``, ``cpu`` (processor time of two nodes), ``nodes``
(three nodes). Each is a mount of its own. The sides take turns, after a turn that warms them up; before each the
daemon's background work is waited for and free memory is touched (see ``compare.touch``; before a first read the daemon
does it, in a pause). Staging is warm: files were written and removed before. Root: it mounts tmpfs. Exit 1 when a
bound is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from compare import (
    Report,
    alternate,
    copy_synced,
    cpu_s,
    cv,
    in_parallel,
    progress,
    quiet,
    read,
    tmpfs,
    touch,
    write,
    write_over,
)

from cachexfs.demo.cluster import LocalCluster

SMALL_FILES = 600
SPREAD_WRITES = 30
DRAIN_BYTES = 2 << 30
GB = 1e9
TOUCH_MORE_BYTES = 256 << 20
STARTED_S_MAX = 10.0
PAUSE_S = 2.0  # after which the daemon begins to make memory ready (``engine/reserve.py``)


class Place:
    """A mount of one node and a directory for its rounds; ``settle`` waits for its background work."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.directory = cluster.nodes[0].mountpoint

    def settle(self, size: int = 0) -> None:
        """Until nothing of the last round is being removed, digested or drained; ``size`` bytes will be wanted."""
        quiet(lambda: [pid for node in self.cluster.nodes for pid in self.cluster.processes(node.index)])
        if size:
            touch(size + TOUCH_MORE_BYTES)

    def rest(self) -> None:
        """A pause as between a checkpoint and who reads it back: until the daemon has made memory ready."""
        time.sleep(PAUSE_S)
        self.settle()


@contextlib.contextmanager
def alone(root: Path, memory: int, **options: str | None) -> Iterator[Place]:
    """A mounted node of its own."""
    given = {"memory": str(memory), "fsync": "returned", "staging": None, "prefault": None, **options}
    with LocalCluster(root, nodes=1, options=given) as cluster:
        cluster.mount()
        yield Place(cluster)


@contextlib.contextmanager
def discarding(root: Path) -> Iterator[Path]:
    """A mount that throws away what is written."""
    point = root / "discard"
    point.mkdir(parents=True, exist_ok=True)
    program = Path(__file__).with_name("discard_mount.py")
    process = subprocess.Popen([sys.executable, str(program), str(point)], start_new_session=True)
    try:
        until = time.monotonic() + STARTED_S_MAX
        while not os.path.ismount(point):
            if time.monotonic() > until or process.poll() is not None:
                raise TimeoutError("the discarding mount does not come up")
            time.sleep(0.02)
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=False)
        process.wait(STARTED_S_MAX)


def fresh(directory: Path, size: int, ready: Callable[[int], None], writers: int = 1) -> Callable[[int], float]:
    """A side that writes new files, and removes them afterwards."""

    def run(turn: int) -> float:
        ready(size)
        rate = write(directory / "f", size) if writers == 1 else in_parallel(write, directory, size, writers)
        for path in [directory / "f"] if writers == 1 else [directory / f"m{i}" for i in range(writers)]:
            path.unlink()
        return rate

    return run


def over(directory: Path, size: int, ready: Callable[[int], None], writers: int = 1) -> Callable[[int], float]:
    """A side that writes over files whose memory is there."""

    def run(turn: int) -> float:
        ready(size)
        return write_over(directory / "f", size) if writers == 1 else in_parallel(write_over, directory, size, writers)

    return run


def reading(path: Path, ready: Callable[[int], None]) -> Callable[[int], float]:
    """A side that reads a file that it has read before."""

    def run(turn: int) -> float:
        ready(0)
        return read(path)

    return run


def handler(report: Report, root: Path, size: int, rounds: int) -> None:
    """One writer and four, by the daemon's handler."""
    memory = 3 * size + (1 << 30)
    with (
        alone(root / "h", memory, passthrough="off") as place,
        tmpfs(memory) as plain,
        discarding(root) as hole,
    ):
        mount, ready = place.directory, place.settle
        for _ in range(2):
            fresh(mount, size, ready, 4)(0)
        ours, theirs, ceiling = alternate(
            rounds, fresh(mount, size, ready), fresh(plain, size, ready), fresh(hole, size, ready)
        )
        report.ratio("handler write", "GB/s", ours, theirs, "fresh file on tmpfs, 4 KiB pages", 0.9)
        report.ratio("handler write", "GB/s", ours, ceiling, "a pyfuse3 mount that discards", 0.5)
        four, one, other = alternate(
            rounds, fresh(mount, size, ready, 4), fresh(mount, size, ready), fresh(plain, size, ready, 4)
        )
        report.ratio("handler, 4 writers", "GB/s", four, one, "1 writer of the mount", 0.9)
        report.ratio("handler, 4 writers", "GB/s", four, other, "4 writers to that tmpfs")


def supervisor(report: Report, root: Path, size: int, rounds: int) -> None:
    """The handler behind a supervisor and without one."""
    memory = 3 * size + (1 << 30)
    with (
        alone(root / "s", memory, passthrough="off") as place,
        alone(root / "n", memory, passthrough="off", supervisor="off") as bare,
        tmpfs(memory) as plain,
        discarding(root) as hole,
    ):

        def ready(size: int) -> None:
            place.settle()
            bare.settle(size)

        sides = [fresh(side.directory, size, ready) for side in (place, bare)]
        for side in (*sides, *sides):
            side(0)
        ours, theirs, memory_only, ceiling = alternate(
            rounds, *sides, fresh(plain, size, ready), fresh(hole, size, ready)
        )
        report.ratio("handler write, with supervisor", "GB/s", ours, theirs, "without", 0.75)
        report.ratio("handler write, without supervisor", "GB/s", theirs, memory_only, "fresh file, 4 KiB pages", 0.9)
        report.ratio("handler write, without supervisor", "GB/s", theirs, ceiling, "a mount that discards", 0.5)
        ours, theirs = alternate(rounds, *(small_side(side.directory, ready) for side in (place, bare)))
        report.ratio("create, 4 KiB, close, with supervisor", "files/s", ours, theirs, "without", 0.5, note="aim 0.8")


def reads(report: Report, root: Path, size: int, rounds: int) -> None:
    """First and second read of published files, by the handler and by the kernel; a different file each round."""
    share = size // 2
    memory = (rounds + 2) * share + (1 << 30)
    for mode, first_min, again_min in (("off", 0.15, 0.6), ("auto", None, 0.9)):
        way = "handler" if mode == "off" else "passthrough"
        with alone(root / f"r{mode}", memory, passthrough=mode) as place, tmpfs(memory) as plain:
            write(plain / "r", share)
            for turn in range(rounds + 1):
                write(place.directory / f"r{turn}", share)
            found: dict[int, float] = {}

            def first(turn: int, found: dict[int, float] = found, place: Place = place) -> float:
                place.rest()
                value = read(place.directory / f"r{turn}")
                found[turn] = read(place.directory / f"r{turn}")
                return value

            ours, theirs = alternate(rounds, first, reading(plain / "r", place.settle))
            again = [found[turn] for turn in range(1, rounds + 1)]
            report.ratio(f"{way}, first read", "GB/s", ours, theirs, "tmpfs", first_min, note=f"{rounds} files")
            report.ratio(f"{way}, read again", "GB/s", again, theirs, "tmpfs", again_min, note=f"{rounds} files")


def read_through(report: Report, root: Path, size: int, rounds: int) -> None:
    """First read, by a fresh mount, of files that are on the PFS alone."""
    share = size // 2
    with alone(root / "t", (rounds + 2) * share + (1 << 30)) as place:
        names = [f"t{turn}" for turn in range(rounds + 1)]
        for name in names:
            write(place.directory / name, share)
        place.cluster.umount()
        place.cluster.mount()

        def side(directory: Path) -> Callable[[int], float]:
            def run(turn: int) -> float:
                forget_pages(place.cluster.pfs / names[turn])
                if directory == place.directory:
                    place.rest()
                place.settle(share)
                return read(directory / names[turn])

            return run

        ours, theirs = alternate(rounds, side(place.directory), side(place.cluster.pfs))
        report.ratio("first read of what is on the PFS alone", "GB/s", ours, theirs, "the PFS directory itself")


def spread(report: Report, root: Path, size: int, rounds: int) -> None:
    """How much the time of a write varies: ``rounds`` times 30 writes, of which one pause of the machine decides 30."""
    share = size // 4
    memory = 4 * share + (1 << 30)
    for mode in ("off", "auto"):
        way = "handler" if mode == "off" else "passthrough"
        with alone(root / f"v{mode}", memory, passthrough=mode) as place, tmpfs(memory) as plain:
            sides = [fresh(directory, share, place.settle) for directory in (place.directory, plain)]
            blocks = [alternate(SPREAD_WRITES, *sides) for _ in range(rounds)]
            ours, theirs = ([rate for block in blocks for rate in block[side]] for side in (0, 1))
            report.ratio(
                f"{way}, {rounds} times {SPREAD_WRITES} writes of {share >> 20} MiB", "GB/s", ours, theirs,
                "fresh files on tmpfs",
            )  # fmt: skip
            mine, base = ([cv([1 / rate for rate in block[side]]) for block in blocks] for side in (0, 1))
            report.at_most(f"{way}, CV of {SPREAD_WRITES} writes' times", "", mine, base, "tmpfs", 1.0)


def small_side(directory: Path, ready: Callable[[int], None]) -> Callable[[int], float]:
    """A side that creates, writes 4 KiB and closes; files per second."""

    def run(turn: int) -> float:
        where = directory / f"small{turn}"
        where.mkdir()
        ready(0)
        began = time.perf_counter()
        for i in range(SMALL_FILES):
            fd = os.open(where / f"{i}", os.O_CREAT | os.O_WRONLY)
            os.write(fd, b"x" * 4096)
            os.close(fd)
        return SMALL_FILES / (time.perf_counter() - began)

    return run


def small(report: Report, root: Path, size: int, rounds: int) -> None:
    """Small files, journaled and published at close."""
    for mode in ("off", "auto"):
        way = "handler" if mode == "off" else "passthrough"
        with alone(root / f"m{mode}", 1 << 30, passthrough=mode) as place, tmpfs(1 << 30) as plain:
            ours, theirs = alternate(rounds, *(small_side(where, place.settle) for where in (place.directory, plain)))
            bound = 600.0 if mode == "off" else None
            report.absolute(f"create, 4 KiB, close, {way}", "files/s", statistics.median(ours), bound)
            report.ratio(f"create, 4 KiB, close, {way}", "files/s", ours, theirs, "tmpfs")
            name = place.directory / "small0" / "1"
            began = time.perf_counter()
            for _ in range(500):
                os.stat(name)
            report.absolute(f"stat, {way}", "us", (time.perf_counter() - began) / 500 * 1e6)


def forget_pages(path: Path) -> None:
    """Have the kernel read a file from its disk next time."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def until(path: Path, stage: str) -> None:
    """Wait until a file's ``stage`` is reached."""
    while os.getxattr(path, "user.cachex.stage").decode() not in (stage, "pfs"):
        time.sleep(0.002)


def drain(report: Report, root: Path, size: int, rounds: int) -> None:
    """From close to ``pfs``."""
    size = min(2 * size, DRAIN_BYTES)
    with alone(root / "d", 2 * size + (1 << 30)) as place, tmpfs(size + (1 << 26)) as plain:
        write(plain / "d", size)
        beside = place.cluster.pfs.parent / "beside"
        beside.mkdir()

        def ours(turn: int) -> float:
            path = place.directory / "d"
            path.unlink(missing_ok=True)
            place.settle(size)
            os.sync()
            write(path, size)
            began = time.perf_counter()
            until(path, "pfs")
            return size / (time.perf_counter() - began) / GB

        def theirs(turn: int) -> float:
            (beside / "d").unlink(missing_ok=True)
            place.settle(size)
            os.sync()
            return copy_synced(plain / "d", beside / "d")

        mine, base = alternate(rounds, ours, theirs)
        report.ratio(f"drain, {size >> 20} MiB from close to pfs", "GB/s", mine, base, "cp and fsync, same disk", 0.9)


def passed(report: Report, root: Path, size: int, rounds: int) -> None:
    """Passthrough beside native work on the very tmpfs that staging lies on."""
    four, label = 2 * size, f"passthrough, 4 writers of {size >> 21} MiB"
    memory = 5 * size + (1 << 30)
    with tmpfs(2 * memory, "within_size") as shared, tmpfs(memory) as plain:
        staging, native, warm = shared / "staging", shared / "native", shared / "warm"
        for directory in (staging, native, warm):
            directory.mkdir()
        with alone(root / "p", memory, passthrough="auto", staging=str(staging)) as place:
            mount, ready = place.directory, place.settle
            for _ in range(2):
                fresh(mount, four, ready, 4)(0)
                fresh(mount, size, ready)(0)
            in_parallel(write_over, warm, four, 4)
            write_over(warm / "f", size)
            ours, touched, new, small_pages = alternate(
                rounds,
                fresh(mount, size, ready),
                over(warm, size, ready),
                fresh(native, size, ready),
                fresh(plain, size, ready),
            )
            report.ratio("passthrough write", "GB/s", ours, touched, "native, file already touched", 0.9)
            report.ratio("passthrough write", "GB/s", ours, new, "native, new file on the same tmpfs", 0.9)
            report.ratio("passthrough write", "GB/s", ours, small_pages, "new file on tmpfs, 4 KiB pages")
            ours, touched, new = alternate(
                rounds, fresh(mount, four, ready, 4), over(warm, four, ready, 4), fresh(native, four, ready, 4)
            )
            report.ratio(label, "GB/s", ours, touched, "native, files already touched", 0.85)
            report.ratio(label, "GB/s", ours, new, "native, new files", 0.85)
            write(mount / "r", size)
            ours, theirs = alternate(rounds, reading(mount / "r", ready), reading(warm / "f", ready))
            report.ratio("passthrough, read of a staged file", "GB/s", ours, theirs, "native, same tmpfs", 0.9)


def cpu(report: Report, root: Path, size: int, rounds: int) -> None:
    """Processor seconds of all that runs for two nodes, per GB that is written, replicated and drained."""
    total = 2 * size
    for mode in ("off", "auto"):
        way = "handler" if mode == "off" else "passthrough"
        options = {"fsync": "returned", "memory": str(2 * total + (1 << 30)), "passthrough": mode}
        with LocalCluster(root / f"c{mode}", nodes=2, options=options) as cluster:
            cluster.mount()
            place = Place(cluster)
            place.settle()
            before = [cpu_s(cluster.processes(node)) for node in (0, 1)]
            files = [place.directory / f"c{i}" for i in range(4)]
            for path in files:
                write(path, total // 4)
            for path in files:
                until(path, "partner")
                until(path, "pfs")
            place.settle()
            after = [cpu_s(cluster.processes(node)) for node in (0, 1)]
            for node, whose in ((0, "the writer's node"), (1, "its partner")):
                used = sum(seconds - before[node].get(pid, 0.0) for pid, seconds in after[node].items())
                parts = sorted(
                    ((seconds - before[node].get(pid, 0.0), named(pid)) for pid, seconds in after[node].items()),
                    reverse=True,
                )
                shown = ", ".join(f"{name} {seconds / total * GB:.2f}" for seconds, name in parts if seconds > 0.02)
                report.absolute(f"core seconds per GB, {way}, {whose}", "s/GB", used / total * GB, note=shown)


def named(pid: int) -> str:
    """What a process of a node is, for people."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "ended"
    known = (
        ("cachexfs.supervisor", "supervisor"),
        ("pfs_worker", "PFS worker"),
        ("etcd", "etcd"),
        ("daemon", "daemon"),
    )
    return next((name for mark, name in known if mark in words), words.strip()[-24:] or "?")


def nodes(report: Report, root: Path, size: int, rounds: int) -> None:
    """Three nodes on this machine: they share its processors and its disk."""
    size //= 4
    with LocalCluster(
        root / "t", nodes=3, options={"fsync": "returned", "memory": str(4 * size + (1 << 30))}
    ) as cluster:
        cluster.mount()
        place = Place(cluster)
        source = Path("/dev/shm") / f"bench-{os.getpid()}"
        write(source, size)
        beside = cluster.nodes[1].nvme / "beside"

        def ours(turn: int) -> float:
            path = place.directory / "p"
            path.unlink(missing_ok=True)
            place.settle(size)
            write(path, size)
            began = time.perf_counter()
            until(path, "partner")
            return size / (time.perf_counter() - began) / GB

        def theirs(turn: int) -> float:
            beside.unlink(missing_ok=True)
            place.settle(size)
            return copy_synced(source, beside)

        try:
            mine, base = alternate(rounds, ours, theirs)
        finally:
            source.unlink()
        report.ratio(f"{size >> 20} MiB from close to partner", "GB/s", mine, base, "cp and fsync, NVMe directory")
        (place.directory / "x").write_bytes(b"x")
        for label, node in (("its node", 0), ("another node", 1)):
            path = cluster.nodes[node].mountpoint / "x"
            began = time.perf_counter()
            for _ in range(300):
                os.stat(path)
            report.absolute(f"stat, {label} of 3", "us", (time.perf_counter() - began) / 300 * 1e6)
        where = cluster.nodes[2].mountpoint
        began = time.perf_counter()
        for i in range(200):
            (where / f"s{i}").write_bytes(b"x" * 4096)
        report.absolute("create, 4 KiB, close, of 3", "files/s", 200 / (time.perf_counter() - began))


GROUPS: dict[str, Callable[[Report, Path, int, int], None]] = {
    "handler": handler,
    "supervisor": supervisor,
    "read": reads,
    "read_through": read_through,
    "spread": spread,
    "small": small,
    "passed": passed,
    "drain": drain,
    "cpu": cpu,
    "nodes": nodes,
}


def main() -> int:
    """Measure and print; 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, separated by commas")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if unknown := set(wanted) - set(GROUPS):
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    report = Report(arguments.json)
    with tempfile.TemporaryDirectory(prefix="cachex-bench-", dir="/var/tmp") as scratch:
        for name in wanted:
            progress(name)
            began = time.monotonic()
            GROUPS[name](report, Path(scratch), arguments.mib << 20, arguments.rounds)
            progress(f"{name} took {time.monotonic() - began:.0f} s")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
