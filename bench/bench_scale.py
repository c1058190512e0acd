"""What many small files cost one node: memory of the daemon, listings, commands, a restart.

    python bench/bench_scale.py [--files 100000] [--pfs DIR] [--json]

Writes files of 4 KiB into directories of a thousand each, waits until all are on the PFS, then measures: resident
memory of the daemon in MiB (staging is not mapped, so it does not count) before, while files are pending, and when
all have landed; `ls -lR`; `status` and `latest`; kill -9 of the daemon and a mount that adopts all of it. The PFS is a
directory on tmpfs unless ``--pfs`` names one: what is measured is the daemon, not a disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

from cachexfs.demo import control
from cachexfs.demo.cluster import LocalCluster

FILE_BYTES = 4096
DIRECTORY_FILES = 1000
WRITERS = 4

Rows = dict[str, tuple[float, str]]


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


def timed(rows: Rows, what: str, cluster: LocalCluster, *arguments: str) -> None:
    began = time.perf_counter()
    cluster.run(0, *arguments)
    rows[what] = (time.perf_counter() - began, "s")


def measure(rows: Rows, cluster: LocalCluster, files: int) -> None:
    mount = cluster.nodes[0].mountpoint
    rows["memory, empty"] = (resident_mib(daemon_pid(cluster)), "MiB")
    began = time.perf_counter()
    write_files(mount, files)
    rows["create, 4 KiB, close"] = (files / (time.perf_counter() - began), "files/s")
    rows["pending then"] = (float(cluster.status(0).pending_ops), "changes")
    rows["memory, some pending"] = (resident_mib(daemon_pid(cluster)), "MiB")
    while cluster.status(0).pending_ops:
        time.sleep(1.0)
    rows["until all had landed"] = (files / (time.perf_counter() - began), "files/s")
    rows["memory, all landed"] = (resident_mib(daemon_pid(cluster)), "MiB")
    rows["memory at most"] = (resident_mib(daemon_pid(cluster), "VmHWM"), "MiB")
    for what in ("ls -lR", "ls -lR again"):
        began = time.perf_counter()
        assert list_long(mount) == files
        rows[what] = (time.perf_counter() - began, "s")
    timed(rows, "status", cluster, "status", str(mount))
    timed(rows, "latest", cluster, "latest", str(mount))
    rows["memory, listed"] = (resident_mib(daemon_pid(cluster)), "MiB")
    cluster.kill(0)
    cluster.detach(0)
    timed(rows, "mount after kill -9", cluster, *cluster.mount_arguments(0))
    rows["memory, mounted again"] = (resident_mib(daemon_pid(cluster)), "MiB")
    began = time.perf_counter()
    assert list_long(mount) == files
    rows["ls -lR, mounted again"] = (time.perf_counter() - began, "s")
    began = time.perf_counter()
    cluster.umount()
    rows["umount"] = (time.perf_counter() - began, "s")
    cluster.mount()
    began = time.perf_counter()
    assert list_long(mount) == files
    rows["ls -lR, fresh mount of the PFS"] = (time.perf_counter() - began, "s")
    rows["memory, fresh mount"] = (resident_mib(daemon_pid(cluster)), "MiB")
    cluster.umount()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--pfs", type=Path, help="default: on tmpfs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: Rows = {}
    scratch = Path(tempfile.mkdtemp(prefix="cachex-scale-", dir="/dev/shm"))
    try:
        memory = str(4 * arguments.files * FILE_BYTES + (1 << 30))
        options = {"fsync": "returned", "memory": memory, "supervisor": "off"}
        with LocalCluster(scratch / "c", 1, arguments.pfs, options) as cluster:
            cluster.mount()
            measure(rows, cluster, arguments.files)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{arguments.files} files of {FILE_BYTES} bytes")
    for what, (value, unit) in rows.items():
        print(f"{what:32} {value:10.1f} {unit}")


if __name__ == "__main__":
    main()
