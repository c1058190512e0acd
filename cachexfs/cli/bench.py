"""``cachexfs bench``: what this mount does here, beside the same work on memory, NVMe and the PFS, in one run."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

from cachexfs.cli import client
from cachexfs.cli.output import table, write, write_json
from cachexfs.cli.progress import bar
from cachexfs.cli.protocol import Status
from cachexfs.errors import EXIT_DONE, UsageError

PIECE_BYTES = 16 << 20
BOUNDARY_TIMEOUT_S = 600.0
POLL_S = 0.005


@click.command("bench")
@click.argument("mountpoint")
@click.option("--mib", type=click.IntRange(1, 1 << 20), default=256, show_default=True, help="Size of each file.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Medians over so many.")
@click.option("--nvme", metavar="DIR", help="A directory on NVMe to compare with.")
@click.option("--json", "as_json", is_flag=True, help="Print the medians as a JSON object.")
def command(mountpoint: str, mib: int, rounds: int, nvme: str | None, as_json: bool) -> int:
    """Rates through the mount beside tmpfs, NVMe and PFS.

    Each round writes one file at each place (fsynced but on tmpfs), waits for the mount's boundaries and removes the
    files; the order alternates. Rates in GB/s (10^9 bytes).
    """
    entry, _ = client.locate(mountpoint)
    status = client.ask(entry, {"op": "status", "path": None}, Status)
    places = {"tmpfs": "/dev/shm", "PFS": status.pfs, **({"NVMe": nvme} if nvme else {})}
    for name, directory in places.items():
        if not os.access(directory, os.W_OK):
            raise UsageError(f"cannot write to {directory} ({name})")
    size = mib << 20
    piece = os.urandom(1 << 20) * min(mib, PIECE_BYTES >> 20)
    wanted = ["partner"] if status.partner else []
    found: dict[str, list[float]] = {}
    with bar("bench", not as_json):
        for turn in range(rounds):
            sides: list[Callable[[], dict[str, float]]] = [
                lambda: _mount(Path(mountpoint), size, piece, [*wanted, "pfs"]),
                *(_native(name, directory, size, piece) for name, directory in places.items()),
            ]
            for side in sides if turn % 2 else reversed(sides):
                for what, seconds in side().items():
                    found.setdefault(what, []).append(size / seconds / 1e9)
    rates = {what: statistics.median(values) for what, values in found.items()}
    if as_json:
        write_json({"bytes": size, "rounds": rounds, "gb_s": rates})
    else:
        rows = [[what, f"{rates[what]:.2f}"] for what in sorted(rates)]
        write("\n".join(table(["from the first byte to", "GB/s"], rows)))
    return EXIT_DONE


def _native(name: str, directory: str, size: int, piece: bytes) -> Callable[[], dict[str, float]]:
    def run() -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix=".cachexfs-bench-", dir=directory) as scratch:
            seconds = _write(Path(scratch) / "file", size, piece, sync=name != "tmpfs")
        return {f"{name}: close" if name == "tmpfs" else f"{name}: fsync and close": seconds}

    return run


def _mount(mountpoint: Path, size: int, piece: bytes, boundaries: list[str]) -> dict[str, float]:
    path = mountpoint / f".cachexfs-bench-{os.getpid()}"
    began_s = time.monotonic()
    try:
        found = {"mount: close (returned)": _write(path, size, piece, sync=False)}
        for boundary in boundaries:
            while os.getxattr(path, "user.cachex.stage").decode() not in (boundary, "pfs"):
                if time.monotonic() - began_s > BOUNDARY_TIMEOUT_S:
                    raise UsageError(f"{boundary} was not reached in {BOUNDARY_TIMEOUT_S:.0f} s: see 'cachexfs status'")
                time.sleep(POLL_S)
            found[f"mount: {boundary}"] = time.monotonic() - began_s
    finally:
        path.unlink(missing_ok=True)
    return found


def _write(path: Path, size: int, piece: bytes, *, sync: bool) -> float:
    began_s = time.monotonic()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        done = 0
        while done < size:
            done += os.write(fd, memoryview(piece)[: size - done])
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
    return time.monotonic() - began_s
