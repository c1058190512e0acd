"""How long a checkpoint takes, and how much that varies, beside others who use the shared filesystem.

    python bench/bench_contention.py [--checkpoints 30] [--writers 4] [--mib 8] [--others 3] [--rate 400mbit] [--seed 1]
                                     [--json]

The shared filesystem is a GlusterFS on this machine (two bricks) behind one shaped link; others write bursts to it and
sync them, at random. A checkpoint is ``--writers`` files, each written, fsynced and closed by a thread of its own. It
goes in turn to the shared filesystem itself and to a mount of two nodes, where fsync waits for the partner; then its
way to the PFS is waited for. A row each for a quiet and for a contended filesystem. CV: standard deviation over mean of
the times. Root: it mounts, and shapes the link of a network namespace of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from compare import Report, alternate, cv

from cachexfs.demo.cluster import LocalCluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/lab"))
from lab_base import Lab, command
from lab_gluster import Gluster

MIB = 1 << 20
BURST_MIB, BURST_SIGMA, BURST_MIB_MAX = 32, 1.0, 256  # median of what others write at a time, and how it is spread
PAUSE_S = 4.0  # mean of their pauses
DRAINED_S_MAX = 120.0
CONTENDED = "contended"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=30)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--mib", type=int, default=8, help="of each file")
    parser.add_argument("--others", type=int, default=3, help="processes that write besides")
    parser.add_argument("--rate", default="400mbit", help="of the link, as in tc(8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--burst", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.burst is not None:
        bursts(given.burst, random.Random(given.seed))
    report = Report(given.json)
    with shared(given.rate) as (ours, theirs), tempfile.TemporaryDirectory(prefix="cachex-bench-") as root:
        options = {"memory": str(1 << 30), "staging": None, "prefault": None}
        with LocalCluster(Path(root), nodes=2, options=options, pfs=ours / "pfs") as cluster:
            cluster.mount()
            for name, count in (("quiet", 0), (CONTENDED, given.others)):
                with others(theirs, count, given.seed):
                    measured = Measured(given.writers, given.mib * MIB, ours, cluster.nodes[0].mountpoint / name)
                    measured.run(given.checkpoints)
                    measured.tell(report, name)
    return report.end()


@contextlib.contextmanager
def shared(rate: str) -> Iterator[tuple[Path, Path]]:
    """A shared filesystem behind a link of that rate, mounted twice."""
    lab = Lab()
    try:
        gluster = Gluster(lab, "shared", "distribute", 2, 2, ping_s=42, cache_s=1)
        shape = ("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, "burst", "1mb", "latency", "400ms")
        command("ip", "netns", "exec", lab.netns, *shape)
        yield gluster.mounts[0], gluster.mounts[1]
    finally:
        lab.close()


@contextlib.contextmanager
def others(directory: Path, count: int, seed: int) -> Iterator[None]:
    """So many processes that write there."""
    words = [sys.executable, __file__, "--burst", str(directory)]
    processes = [subprocess.Popen([*words, "--seed", str(seed + number)]) for number in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def bursts(directory: Path, dice: random.Random) -> None:
    """Write, sync and remove files of random size with random pauses, until killed."""
    path, piece = directory / f"other{os.getpid()}", os.urandom(MIB)
    while True:
        with path.open("wb") as file:
            for _ in range(min(round(dice.lognormvariate(math.log(BURST_MIB), BURST_SIGMA)), BURST_MIB_MAX)):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        path.unlink()
        time.sleep(dice.expovariate(1 / PAUSE_S))


@dataclass
class Measured:
    """The times of one state of the shared filesystem. ``direct``, ``returned``, ``to_pfs``: seconds."""

    writers: int
    size: int
    shared: Path
    mount: Path
    to_pfs: list[float] = field(default_factory=list)

    def run(self, checkpoints: int) -> None:
        """Alternately to the one and to the other."""
        self.mount.mkdir()
        (self.shared / "direct").mkdir(exist_ok=True)
        self.direct, self.returned = alternate(checkpoints, self._direct, self._through)

    def _direct(self, turn: int) -> float:
        return self._checkpoint(self.shared / "direct")

    def _through(self, turn: int) -> float:
        began = time.perf_counter()
        seconds = self._checkpoint(self.mount)
        paths = [self.mount / f"shard{number}" for number in range(self.writers)]
        while any(os.getxattr(path, "user.cachex.stage") != b"pfs" for path in paths):
            if time.perf_counter() - began > DRAINED_S_MAX:
                raise TimeoutError(f"not on the PFS after {DRAINED_S_MAX:.0f} s")
            time.sleep(0.01)
        if turn:
            self.to_pfs.append(time.perf_counter() - began)
        return seconds

    def _checkpoint(self, directory: Path) -> float:
        for number in range(self.writers):
            (directory / f"shard{number}").unlink(missing_ok=True)
        threads = [threading.Thread(target=self._write, args=(directory / f"shard{n}",)) for n in range(self.writers)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    def _write(self, path: Path) -> None:
        piece = memoryview(bytes(MIB))
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        for _ in range(self.size // MIB):
            os.write(fd, piece)
        os.fsync(fd)
        os.close(fd)

    def tell(self, report: Report, name: str) -> None:
        """Rows: time and its CV, until the job goes on; time until the PFS has it."""
        whole = f"{self.writers} x {self.size // MIB} MiB"
        report.ratio(f"{name}: {whole}, fsync=partner", "s", self.returned, self.direct, "directly, fsync")
        report.ratio(f"{name}: the same until it is on the PFS", "s", self.to_pfs, self.direct, "directly, fsync")
        bound = 1.0 if name == CONTENDED else None  # a quiet filesystem takes the same time each time
        what = f"{name}: CV of the time until the job goes on"
        report.at_most(what, "", [cv(self.returned)], [cv(self.direct)], "directly", bound)
        what = f"{name}: standard deviation of it"
        report.at_most(what, "s", [statistics.stdev(self.returned)], [statistics.stdev(self.direct)], "directly", bound)
        report.at_most(f"{name}: the slowest", "s", [max(self.returned)], [max(self.direct)], "directly", bound)


if __name__ == "__main__":
    sys.exit(main())
