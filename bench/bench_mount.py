"""What a mount costs, beside the same work without it, in one run.

    python bench/bench_mount.py [--mib 1024] [--rounds 5] [--json]

One node: writes to ``close`` (one writer, four writers; by passthrough and by the daemon's handler) beside a tmpfs of
its own; first and second read beside tmpfs; a drain to ``pfs`` beside ``cp`` and fsync; small files; the spread of many
writes. Several nodes: close to ``partner`` beside a plain copy with fsync to the same disk;
lookups. The sides alternate within each round; medians and their ratio are printed. Root: it mounts tmpfs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cachexfs.demo.cluster import LocalCluster

PIECE_BYTES = 16 << 20
SMALL_FILES = 600
BUFFER = os.urandom(1 << 20) * (PIECE_BYTES >> 20)

Rows = dict[str, dict[str, float | str]]


def write(path: Path, size: int) -> float:
    """Seconds to create, write in pieces and close."""
    began = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    done = 0
    while done < size:
        done += os.write(fd, memoryview(BUFFER)[: size - done])
    os.close(fd)
    return time.perf_counter() - began


def write_many(directory: Path, size: int, writers: int) -> float:
    """Seconds until ``writers`` threads have each written a share of ``size``."""
    threads = [threading.Thread(target=write, args=(directory / f"m{i}", size // writers)) for i in range(writers)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def read(path: Path) -> float:
    """Seconds to read a file in pieces."""
    piece = bytearray(PIECE_BYTES)
    began = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    while os.readv(fd, [piece]):
        pass
    os.close(fd)
    return time.perf_counter() - began


def copy_synced(source: Path, target: Path) -> float:
    """Seconds of cp and fsync."""
    began = time.perf_counter()
    subprocess.run(["cp", source, target], check=True)
    fd = os.open(target, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - began


def until(path: Path, stage: str) -> float:
    """Seconds until a file's ``stage`` is reached."""
    began = time.perf_counter()
    while os.getxattr(path, "user.cachex.stage").decode() not in (stage, "pfs"):
        time.sleep(0.002)
    return time.perf_counter() - began


@contextmanager
def tmpfs(size: int, huge: str) -> Iterator[Path]:
    """A tmpfs of its own."""
    directory = tempfile.mkdtemp(prefix="cachex-bench-")
    options = f"size={size},mode=0700" + (f",huge={huge}" if huge else "")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "bench", directory], check=True)
    try:
        yield Path(directory)
    finally:
        subprocess.run(["umount", "-l", directory], check=True)
        os.rmdir(directory)


def pair(rows: Rows, what: str, unit: str, ours: list[float], theirs: list[float], other: str) -> None:
    """One row: medians in ``unit`` and ours / theirs."""
    mine, base = statistics.median(ours), statistics.median(theirs)
    rows[what] = {"ours": mine, "other": base, "ratio": mine / base, "unit": unit, "beside": other}


def rates(size: int, seconds: list[float]) -> list[float]:
    return [size / s / 1e9 for s in seconds]


def alternate(rounds: int, *sides: Callable[[int], float]) -> list[list[float]]:
    """Seconds of each side in each round; the order alternates."""
    found: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds):
        order = list(range(len(sides)))
        for side in order if turn % 2 else reversed(order):
            found[side].append(sides[side](turn))
    return found


def one_node(rows: Rows, root: Path, mode: str, size: int, rounds: int) -> None:
    """Rows of a mount alone, with passthrough ``on`` or ``off``."""
    memory = 8 * size + (1 << 30)
    options = {"passthrough": mode, "memory": str(memory), "fsync": "returned", "staging": None}
    with LocalCluster(root, nodes=1, options=options) as cluster, tmpfs(memory, "") as small_pages:
        cluster.mount()
        mount = cluster.nodes[0].mountpoint
        way = "passthrough" if mode == "auto" else "handler"

        def clean(directory: Path) -> None:
            for path in directory.iterdir():
                if path.is_file():
                    path.unlink()

        def one(directory: Path) -> Callable[[int], float]:
            def run(turn: int) -> float:
                clean(directory)
                return write(directory / f"f{turn}", size)

            return run

        def four(directory: Path) -> Callable[[int], float]:
            def run(turn: int) -> float:
                clean(directory)
                return write_many(directory, size, 4)

            return run

        ours, theirs = alternate(rounds + 1, one(mount), one(small_pages))
        pair(rows, f"write, {way}", "GB/s", rates(size, ours[1:]), rates(size, theirs[1:]), "tmpfs, 4 KiB pages")
        ours, theirs = alternate(rounds, four(mount), four(small_pages))
        pair(rows, f"4 writers, {way}", "GB/s", rates(size, ours), rates(size, theirs), "4 writers to tmpfs")
        clean(mount)
        clean(small_pages)
        write(mount / "r", size)
        write(small_pages / "r", size)
        first = read(mount / "r")
        again, native = alternate(rounds, lambda _: read(mount / "r"), lambda _: read(small_pages / "r"))
        pair(rows, f"read first, {way}", "GB/s", rates(size, [first]), rates(size, native), "tmpfs")
        pair(rows, f"read again, {way}", "GB/s", rates(size, again), rates(size, native), "tmpfs")
        few = size // 4
        spread = [write(mount / f"v{i % 4}", few) for i in range(30)]
        base = [write(small_pages / f"v{i % 4}", few) for i in range(30)]
        pair(rows, f"CV of 30 writes, {way}", "", [_cv(spread)], [_cv(base)], "tmpfs")
        if mode == "off":
            _drain(rows, cluster, mount, small_pages, size, rounds)
            _small(rows, mount, small_pages)


def _cv(values: list[float]) -> float:
    return statistics.stdev(values) / statistics.mean(values)


def _drain(rows: Rows, cluster: LocalCluster, mount: Path, source: Path, size: int, rounds: int) -> None:
    write(source / "d", size)
    beside = cluster.pfs.parent / "beside"
    beside.mkdir()

    def ours(turn: int) -> float:
        write(mount / f"d{turn}", size)
        return until(mount / f"d{turn}", "pfs")

    def theirs(turn: int) -> float:
        return copy_synced(source / "d", beside / f"d{turn}")

    mine, base = alternate(rounds, ours, theirs)
    pair(rows, "drain, close to pfs", "GB/s", rates(size, mine), rates(size, base), "cp and fsync to the same disk")
    shutil.rmtree(beside)


def _small(rows: Rows, mount: Path, other: Path) -> None:
    def files(directory: Path, turn: int) -> float:
        where = directory / f"small{turn}"
        where.mkdir()
        began = time.perf_counter()
        for i in range(SMALL_FILES):
            fd = os.open(where / f"{i}", os.O_CREAT | os.O_WRONLY)
            os.write(fd, b"x" * 4096)
            os.close(fd)
        return SMALL_FILES / (time.perf_counter() - began)

    mine, base = alternate(3, lambda t: files(mount, t), lambda t: files(other, t))
    pair(rows, "create, 4 KiB, close", "files/s", mine, base, "tmpfs")
    name = mount / "small0" / "1"
    began = time.perf_counter()
    for _ in range(500):
        os.stat(name)
    rows["stat, alone"] = {"ours": (time.perf_counter() - began) / 500 * 1e6, "unit": "us"}


def several_nodes(rows: Rows, root: Path, size: int, rounds: int) -> None:
    """Rows of three nodes on this machine: they share its processors and its disk."""
    with LocalCluster(root, nodes=3, options={"fsync": "returned", "memory": str(4 * size + (1 << 30))}) as cluster:
        cluster.mount()
        mount = cluster.nodes[0].mountpoint
        source = Path("/dev/shm") / f"bench-{os.getpid()}"
        write(source, size)
        beside = cluster.nodes[1].nvme / "beside"

        def ours(turn: int) -> float:
            write(mount / f"p{turn}", size)
            return until(mount / f"p{turn}", "partner")

        mine, base = alternate(rounds, ours, lambda t: copy_synced(source, beside.with_name(f"beside{t}")))
        source.unlink()
        pair(
            rows, "close to partner", "GB/s", rates(size, mine), rates(size, base), "cp and fsync to the NVMe directory"
        )
        (mount / "x").write_bytes(b"x")
        for label, node in (("its node", 0), ("another node", 1)):
            path = cluster.nodes[node].mountpoint / "x"
            began = time.perf_counter()
            for _ in range(300):
                os.stat(path)
            rows[f"stat, {label} of 3"] = {"ours": (time.perf_counter() - began) / 300 * 1e6, "unit": "us"}
        where = cluster.nodes[2].mountpoint
        began = time.perf_counter()
        for i in range(200):
            (where / f"s{i}").write_bytes(b"x" * 4096)
        rows["create, 4 KiB, close, of 3"] = {"ours": 200 / (time.perf_counter() - began), "unit": "files/s"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: Rows = {}
    with tempfile.TemporaryDirectory(prefix="cachex-bench-", dir="/var/tmp") as scratch:
        size = arguments.mib << 20
        one_node(rows, Path(scratch) / "a", "auto", size, arguments.rounds)
        one_node(rows, Path(scratch) / "b", "off", size, arguments.rounds)
        several_nodes(rows, Path(scratch) / "c", size // 4, arguments.rounds)
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    for what, row in rows.items():
        ours = f"{row['ours']:9.2f} {row['unit']}"
        print(
            f"{what:28} {ours:18}"
            + (f" / {row['other']:9.2f} = {row['ratio']:5.2f}   {row['beside']}" if "other" in row else "")
        )


if __name__ == "__main__":
    main()
