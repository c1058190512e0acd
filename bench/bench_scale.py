"""What many small files cost one node: memory of the daemon, listings, commands, a restart.

    python bench/bench_scale.py [--files 100000] [--pfs DIR] [--json]

Writes files of 4 KiB into directories of a thousand each, waits until all are on the PFS, then measures: resident
memory of the daemon in MiB (staging is not mapped, so it does not count) before, while files are pending, and when
all have landed; `ls -lR`; `status` and `latest`; the pause of a killed daemon; kill -9 of all and a mount that adopts
all of it; the removal of all. The PFS is a directory on tmpfs unless ``--pfs`` names one: what is measured is the
daemon, not a disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from compare import Report

from cachexfs.demo import control
from cachexfs.demo.cluster import LocalCluster
from cachexfs.supervisor.status import ask

FILE_BYTES = 4096
DIRECTORY_FILES = 1000
WRITERS = 4
MEMORY_MIB_MAX = 300
PAUSE_S_MAX, PAUSE_FILES_MAX = 1.0, 10_000  # the bound, and for how many files it is


def resident_mib(pid: int, field: str = "VmRSS") -> float:
    """Resident memory of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"no {field} of process {pid}")


def daemon_pid(cluster: LocalCluster) -> int:
    entry = control.registered(cluster.nodes[0].runtime)
    assert entry is not None
    return entry.pid


def write_files(mount: Path, files: int) -> None:
    """Create, write, close; several writers, a directory each at a time."""
    numbers = list(range(0, files, DIRECTORY_FILES))

    def writer(index: int) -> None:
        for first in numbers[index::WRITERS]:
            directory = mount / f"step-{first // DIRECTORY_FILES}"
            directory.mkdir()
            for number in range(first, min(first + DIRECTORY_FILES, files)):
                fd = os.open(directory / f"part-{number:06}.bin", os.O_CREAT | os.O_WRONLY)
                os.write(fd, number.to_bytes(8, "little") * (FILE_BYTES // 8))
                os.close(fd)

    threads = [threading.Thread(target=writer, args=(index,)) for index in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def list_long(mount: Path) -> int:
    """As ``ls -lR``: number of files."""
    found = 0
    for directory, _, names in os.walk(mount):
        for name in names:
            found += os.lstat(os.path.join(directory, name)).st_size == FILE_BYTES
    return found


class Measured:
    """One run's cluster and where its numbers go."""

    def __init__(self, report: Report, cluster: LocalCluster, files: int) -> None:
        self.report, self.cluster, self.files = report, cluster, files
        self.mount = cluster.nodes[0].mountpoint

    def memory(self, when: str, field: str = "VmRSS") -> None:
        """A row of the daemon's memory; the bound is that of 100,000 files and counts from there down."""
        self.report.absolute(
            f"memory, {when}", "MiB", resident_mib(daemon_pid(self.cluster), field), MEMORY_MIB_MAX, at_most=True
        )

    def rate(self, what: str, began_s: float) -> None:
        self.report.absolute(what, "files/s", self.files / (time.perf_counter() - began_s))

    def landed(self) -> None:
        """Wait until nothing is pending."""
        while self.cluster.status(0).pending_ops:
            time.sleep(0.2)

    def listing(self, what: str) -> None:
        began = time.perf_counter()
        assert list_long(self.mount) == self.files
        self.report.absolute(what, "s", time.perf_counter() - began)

    def command(self, what: str, *arguments: str) -> None:
        began = time.perf_counter()
        self.cluster.run(0, *arguments)
        self.report.absolute(what, "s", time.perf_counter() - began)

    def pause(self, what: str, *, is_ahead: bool) -> None:
        """How long an application's next call takes when the daemon is killed; with all files known to it."""
        socket = str(next(self.cluster.nodes[0].runtime.glob("*.supervisor")))
        while not (state := ask(socket, "status"))["standby_is_warm"]:
            time.sleep(0.1)
        if not is_ahead:
            os.kill(int(str(state["standby_pid"])), signal.SIGKILL)
        os.kill(int(str(state["daemon_pid"])), signal.SIGKILL)
        bound = PAUSE_S_MAX if self.files <= PAUSE_FILES_MAX else None
        began = time.perf_counter()
        (self.mount / "after").write_bytes(b"x")
        self.report.absolute(what, "s", time.perf_counter() - began, bound, at_most=True)
        (self.mount / "after").unlink()

    def run(self) -> None:
        """All rows, in the order of a life."""
        cluster, mount = self.cluster, self.mount
        self.memory("empty")
        began = time.perf_counter()
        write_files(mount, self.files)
        self.rate("create, 4 KiB, close", began)
        self.landed()
        self.rate("until all had landed", began)
        self.memory("all landed")
        self.memory("at most", "VmHWM")
        self.listing("ls -lR")
        self.command("status", "status", str(mount))
        self.command("latest", "latest", str(mount))
        began = time.perf_counter()
        for _ in range(100):
            os.statvfs(mount)
        self.report.absolute("statfs", "ms", (time.perf_counter() - began) * 10)
        self.pause("pause of a kill -9, the next daemon waits", is_ahead=True)
        self.pause("pause of a kill -9, it does not", is_ahead=False)
        cluster.kill(0)
        cluster.detach(0)
        self.command("mount after kill -9", *cluster.mount_arguments(0))
        self.listing("ls -lR, mounted again")
        self.memory("mounted again")
        self.command("umount", "umount", str(mount))
        cluster.mount()
        self.listing("ls -lR, fresh mount of the PFS")
        self.memory("fresh mount")
        began = time.perf_counter()
        for directory in mount.iterdir():
            shutil.rmtree(directory)
        self.rate("rm -r", began)
        self.landed()
        self.rate("until the PFS had followed", began)
        cluster.umount()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--pfs", type=Path, help="default: on tmpfs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report = Report(arguments.json)
    scratch = Path(tempfile.mkdtemp(prefix="cachex-scale-", dir="/dev/shm"))
    try:
        memory = str(4 * arguments.files * FILE_BYTES + (1 << 30))
        options = {"fsync": "returned", "memory": memory}
        with LocalCluster(scratch / "c", 1, arguments.pfs, options) as cluster:
            cluster.mount()
            Measured(report, cluster, arguments.files).run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
