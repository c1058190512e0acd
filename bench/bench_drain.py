"""Rate of the drain to a directory, beside ``cp`` and fsync to the same directory, in one run.

    python bench/bench_drain.py PFS_DIR [--bytes 2147483648] [--files 8] [--workers 4] [--rounds 3] [--mount] [--json]

Two cases: one file of the whole size through one child process against one ``cp`` and ``sync``; and the same bytes as
several files through all children against as many ``cp`` and ``sync`` at a time. The drain also writes and syncs a
recovery record, renames into place and syncs both directories, as it does in earnest. The order within a round
alternates. Printed: medians in MB/s and the ratio drain / cp.

With ``--mount`` the drain is that of a real mount of PFS_DIR: from the first write until all are at ``pfs``.
``tests/lab/lab_run.py`` starts a GlusterFS or MooseFS to measure on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from cachexfs.adapters.pfs_pool import PfsPool
from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr
from cachexfs.engine.pfs_interface import PfsAttrs

ATTRS = PfsAttrs(0o644, None, None, 0, 0)
STALL_S = 120.0
PIECE_BYTES = 1 << 20
POLL_S = 0.005


def make_sources(directory: Path, total_bytes: int, files: int) -> list[Path]:
    """``files`` files of random bytes, ``total_bytes`` in all."""
    piece = os.urandom(PIECE_BYTES)
    paths = []
    for number in range(files):
        path = directory / f"{files}-{number}"
        with path.open("wb") as file:
            left = total_bytes // files
            while left:
                left -= file.write(piece[: min(left, PIECE_BYTES)])
        paths.append(path)
    return paths


async def drain(pool: PfsPool, sources: list[Path], workers: int) -> None:
    """Prepare and land every file, ``workers`` at a time."""
    limit = trio.CapacityLimiter(workers)

    async def one(source: Path) -> None:
        async with limit:
            size = (await trio.Path(source).stat()).st_size
            await pool.prepare(str(source), size, source.name, ATTRS, b"record", STALL_S)
            await pool.land(source.name, os.fsencode(source.name), ATTRS, STALL_S)

    async with trio.open_nursery() as nursery:
        for source in sources:
            nursery.start_soon(one, source)


def through_mount(cluster: LocalCluster, sources: list[Path]) -> float:
    """Write every file into a mount; returns the seconds from the first write until all are at ``pfs``."""
    mount = cluster.nodes[0].mountpoint
    start_s = time.perf_counter()
    for source in sources:
        shutil.copyfile(source, mount / source.name)
    while any(xattr(mount / source.name, "stage") != "pfs" for source in sources):
        time.sleep(POLL_S)
    took_s = time.perf_counter() - start_s
    for source in sources:
        (mount / source.name).unlink()
    return took_s


def measure_mount(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """As ``measure``, through a mount."""
    staging = Path(tempfile.mkdtemp(dir=arguments.staging, prefix="bench-drain-"))
    target = Path(tempfile.mkdtemp(dir=arguments.pfs_dir, prefix="bench-drain-"))
    beside = Path(tempfile.mkdtemp(dir=arguments.pfs_dir, prefix="bench-drain-cp-"))
    options = {"fsync": "returned", "memory": str(4 * arguments.bytes), "drain_workers": str(arguments.workers)}
    rows: list[dict[str, object]] = []
    try:
        with LocalCluster(staging / "node", 1, target, options) as cluster:
            cluster.mount()
            for files, workers in ((1, 1), (arguments.files, arguments.workers)):
                sources = make_sources(staging, arguments.bytes, files)
                rates: dict[str, list[float]] = {"drain": [], "cp": []}
                for number in range(arguments.rounds + 1):
                    for name in ("drain", "cp") if number % 2 else ("cp", "drain"):
                        if name == "drain":
                            took_s = through_mount(cluster, sources)
                        else:
                            start_s = time.perf_counter()
                            trio.run(copy, beside, sources, workers)
                            took_s = time.perf_counter() - start_s
                            for source in sources:
                                (beside / source.name).unlink()
                        if number:
                            rates[name].append(arguments.bytes / 1e6 / took_s)
                rows.append(row_of(f"mount, {files} file(s), {workers} at a time", arguments.bytes, rates))
                for source in sources:
                    source.unlink()
            cluster.umount()
    finally:
        for path in (target, beside, staging):
            shutil.rmtree(path)
    return rows


def row_of(case: str, total_bytes: int, rates: dict[str, list[float]]) -> dict[str, object]:
    """Medians and their ratio."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    row: dict[str, object] = {"case": case, "bytes": total_bytes}
    row |= {f"{name}_mb_s": round(value) for name, value in medians.items()}
    return row | {"ratio": round(medians["drain"] / medians["cp"], 2)}


async def copy(target: Path, sources: list[Path], workers: int) -> None:
    """``cp`` and ``sync`` (fsync) of every file, ``workers`` at a time."""
    names = b"".join(os.fsencode(source) + b"\0" for source in sources)
    script = 'cp "$1" "$0/" && sync "$0/${1##*/}"'
    command = ["xargs", "-0", "-n1", f"-P{workers}", "sh", "-c", script, str(target)]
    await trio.run_process(command, stdin=names)


async def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """One row per case: name, bytes, median rates in MB/s, ratio."""
    rows: list[dict[str, object]] = []
    target = Path(tempfile.mkdtemp(dir=arguments.pfs_dir, prefix="bench-drain-"))
    staging = Path(tempfile.mkdtemp(dir=arguments.staging, prefix="bench-drain-"))
    pool = PfsPool(str(target), drain_workers=arguments.workers)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(pool.serve)
            for files, workers in ((1, 1), (arguments.files, arguments.workers)):
                sources = make_sources(staging, arguments.bytes, files)
                rates = await rounds(arguments.rounds, arguments.bytes, target, sources, pool, workers)
                rows.append(row_of(f"{files} file(s), {workers} at a time", arguments.bytes, rates))
                for source in sources:
                    source.unlink()
            nursery.cancel_scope.cancel()
    finally:
        shutil.rmtree(target)
        shutil.rmtree(staging)
    return rows


async def rounds(
    count: int, total_bytes: int, target: Path, sources: list[Path], pool: PfsPool, workers: int
) -> dict[str, list[float]]:
    """Rates in MB/s of each way, one per round."""
    rates: dict[str, list[float]] = {"drain": [], "cp": []}
    ways: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("drain", lambda: drain(pool, sources, workers)),
        ("cp", lambda: copy(target, sources, workers)),
    ]
    for number in range(count + 1):
        for name, way in ways if number % 2 else reversed(ways):
            await trio.run_process(["sync", "-f", str(target)])
            start_s = time.perf_counter()
            await way()
            took_s = time.perf_counter() - start_s
            if number:  # the first round warms up: processes, pages of the staged files
                rates[name].append(total_bytes / 1e6 / took_s)
            for source in sources:
                (target / source.name).unlink()
    assert all(math.isfinite(rate) for values in rates.values() for rate in values)
    return rates


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pfs_dir")
    parser.add_argument("--bytes", type=int, default=2 << 30)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--staging", default="/dev/shm")
    parser.add_argument("--mount", action="store_true", help="through a real mount of PFS_DIR")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # takes the mount down
    rows = measure_mount(arguments) if arguments.mount else trio.run(measure, arguments)
    if arguments.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{row['case']}: drain {row['drain_mb_s']} MB/s, cp + fsync {row['cp_mb_s']}, ratio {row['ratio']}")


if __name__ == "__main__":
    main()
