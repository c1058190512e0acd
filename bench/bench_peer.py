"""Rates of the peer link beside what the machine can do: medians and ratios.

    python bench/bench_peer.py [--dir DIR] [--source DIR] [--mib 1024] [--rounds 5]

Receiver and sender are separate processes on loopback. In turn, each round: digest of the file; push and commit;
reading it back; ``cp`` and fsync into the same directory; a bare sendfile into a TCP sink that throws the bytes away.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import trio

from cachexfs.adapters.file_digest import digest_file
from cachexfs.adapters.peer_client import PeerClients
from cachexfs.adapters.peer_server import PeerServer
from cachexfs.adapters.replica_store import ReplicaStore
from cachexfs.core import manifest as manifests
from cachexfs.core.digest import BLOCK_BYTES, block_length
from cachexfs.core.manifest import Manifest

SECRET = b"a secret for measurements only.."
STAGE = "be0c.1"


def receive(directory: str, pipe: Connection) -> None:
    """The receiving daemon, and a sink beside it in the same process."""

    async def main() -> None:
        server = PeerServer(
            node="n2",
            job="bench",
            secret=SECRET,
            store=await ReplicaStore.open(directory),
            is_member={"n1"}.__contains__,
        )
        async with trio.open_nursery() as nursery:
            pipe.send(await nursery.start(server.serve, "127.0.0.1", 0))
            await trio.to_thread.run_sync(pipe.recv)
            nursery.cancel_scope.cancel()

    trio.run(main)


def sink(pipe: Connection) -> None:
    """Accept connections one after the other, throw away what comes, answer one byte at the end."""
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname())
    buffer = bytearray(BLOCK_BYTES)
    while True:
        peer, _ = listener.accept()
        with peer:
            while peer.recv_into(buffer):
                pass
            peer.sendall(b"x")


def raw_sendfile(address: tuple[str, int], fd: int, size: int) -> None:
    """The same bytes with nothing around them."""
    with socket.create_connection(address) as peer:
        sent = 0
        while sent < size:
            sent += os.sendfile(peer.fileno(), fd, sent, min(BLOCK_BYTES, size - sent))
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)


def copy_synced(source: str, directory: str) -> None:
    """What an administrator would compare with."""
    target = os.path.join(directory, "copy")
    subprocess.run(["cp", "--reflink=never", source, target], check=True)
    fd = os.open(target, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    os.unlink(target)


def manifest_of(stage: str, size: int, digest: bytes, tree: bytes, blocks: list[bytes]) -> bytes:
    """An encoded manifest with attributes that do not matter here."""
    return manifests.encode(
        Manifest(
            fid=8192,
            path=b"bench",
            stage=stage,
            size=size,
            digest=digest,
            tree=tree,
            blocks=b"".join(blocks),
            mode=0o644,
            uid=0,
            gid=0,
            mtime_ns=0,
            atime_ns=0,
            gen=1,
            origin="n1",
            revision=1,
            published=True,
        )
    )


def cpu_s(pid: int) -> float:
    """User and system time of a process, all threads."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    args: argparse.Namespace, source: str, addresses: Sequence[tuple[str, int]], pids: Sequence[int]
) -> None:
    """All rounds; prints the table."""
    size = os.stat(source).st_size
    whole, tree, blocks = digest_file(source, size)
    fd = os.open(source, os.O_RDONLY)
    manifest = manifest_of(STAGE, size, whole, tree, blocks)
    todo = [(i * BLOCK_BYTES, block_length(size, i), digest) for i, digest in enumerate(blocks)]
    peers = PeerClients(node="n1", job="bench", secret=SECRET, resolve=lambda name: addresses[0])
    rates: dict[str, list[float]] = {}
    busy_s: dict[str, list[float]] = {}

    async def timed(name: str, work: Callable[[], object]) -> None:
        start_s = time.perf_counter()
        await trio.to_thread.run_sync(work)
        rates.setdefault(name, []).append(size / (time.perf_counter() - start_s) / 1e9)

    for _ in range(args.rounds):
        await timed("digest", functools.partial(digest_file, fd, size))
        before = [cpu_s(pid) for pid in pids]
        start_s = time.perf_counter()
        await peers.push("n2", STAGE, fd, todo)
        pushed_s = time.perf_counter()
        for name, pid, then_s in zip(("sender", "receiver"), pids, before, strict=True):
            busy_s.setdefault(name, []).append((cpu_s(pid) - then_s) * (1 << 30) / size)
        await peers.commit("n2", STAGE, manifest)
        end_s = time.perf_counter()
        rates.setdefault("push", []).append(size / (pushed_s - start_s) / 1e9)
        rates.setdefault("push + commit", []).append(size / (end_s - start_s) / 1e9)
        start_s = time.perf_counter()
        buffer = memoryview(bytearray(64 * BLOCK_BYTES))
        for offset in range(0, size, len(buffer)):
            await peers.read_into("n2", STAGE, offset, buffer)
        rates.setdefault("read", []).append(size / (time.perf_counter() - start_s) / 1e9)
        await peers.drop("n2", STAGE)
        await timed("cp + fsync", functools.partial(copy_synced, source, args.dir))
        await timed("raw sendfile", functools.partial(raw_sendfile, addresses[1], fd, size))
    await small_calls(peers, args)
    peers.close()
    os.close(fd)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        print(
            f"{name:14} {medians[name]:6.2f} GB/s  (from {min(values):.2f} to {max(values):.2f}, {len(values)} rounds)"
        )
    for name, seconds in busy_s.items():
        print(f"processor time of the {name} while pushing: {statistics.median(seconds):.2f} s per GiB")
    print(f"push + commit / cp + fsync    {medians['push + commit'] / medians['cp + fsync']:.2f}")
    print(f"push          / raw sendfile  {medians['push'] / medians['raw sendfile']:.2f}")


async def small_calls(peers: PeerClients, args: argparse.Namespace) -> None:
    """Latency of a ping, and small files a second (push and commit of 4 KiB, 16 at a time)."""
    times_s = []
    for _ in range(200):
        start_s = time.perf_counter()
        await peers.ping("n2")
        times_s.append(time.perf_counter() - start_s)
    with tempfile.NamedTemporaryFile(dir=args.source) as file:
        file.write(os.urandom(4096))
        file.flush()
        whole, tree, blocks = digest_file(file.name, 4096)

        async def one(number: int, limit: trio.CapacityLimiter) -> None:
            stage = f"{number:x}.1"
            async with limit:
                await peers.push("n2", stage, file.fileno(), [(0, 4096, blocks[0])])
                await peers.commit("n2", stage, manifest_of(stage, 4096, whole, tree, blocks))

        count = 500
        limit = trio.CapacityLimiter(16)
        start_s = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(one, number, limit)
        rate = count / (time.perf_counter() - start_s)
    print(f"ping           {statistics.median(times_s) * 1e6:6.0f} us (median of {len(times_s)})")
    print(f"small files    {rate:6.0f} a second (4 KiB, push + commit, 16 at a time)")


def main() -> int:
    """Parse, start the processes, measure, stop them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the replicas go (an NVMe)")
    parser.add_argument("--source", default="/dev/shm", help="where the file lies (a tmpfs)")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=args.dir) as args.dir, tempfile.TemporaryDirectory(dir=args.source) as staging:
        source = os.path.join(staging, "source")
        with open(source, "wb") as file:
            for _ in range(args.mib):
                file.write(os.urandom(BLOCK_BYTES))
        pipes, processes = [], []
        for target, extra in ((receive, (os.path.join(args.dir, "replicas"),)), (sink, ())):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(*extra, theirs), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        try:
            trio.run(measure, args, source, [pipe.recv() for pipe in pipes], [os.getpid(), processes[0].pid or 0])
        finally:
            for process in processes:
                process.kill()
                process.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
