"""Mutations and barriers of the catalogue: rates, latencies, processor time of the client.

    python bench/bench_catalogue.py [--members 3] [--clear] [--dir DIR] [--files 400]

First the built-in catalogue in DIR, then etcd members on loopback ports with their data in DIR. A file is three
mutations, as the engine makes them: create, publish, drained. Two nodes follow; the times are those of one.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import socket
import tempfile
import time
from pathlib import Path

import trio

from cachexfs.adapters.catalogue_builtin import BuiltinCatalogue
from cachexfs.adapters.catalogue_etcd import EtcdCatalogue
from cachexfs.adapters.etcd_client import Endpoint
from cachexfs.adapters.etcd_server import TXN_OPS_MAX, EtcdServer, Member
from cachexfs.adapters.job_tls import JobAuthority
from cachexfs.core.records import (
    FID_STEP,
    ROOT_FID,
    Copy,
    Dirent,
    DirTimes,
    Generation,
    Inode,
    Life,
    Op,
    dirent_key,
    generation_key,
    inode_key,
    op_key,
    times_key,
)
from cachexfs.core.replica import Tx
from cachexfs.engine.interfaces import Catalogue

HOST = "127.0.0.1"


async def one_file(catalogue: Catalogue, number: int, latencies_s: list[float]) -> None:
    """Create, publish, drained."""
    fid, name, op = FID_STEP * (number + 2), b"file%d" % number, op_key(f"{number:016x}")

    def create(tx: Tx) -> None:
        assert tx.dirent(ROOT_FID, name) is None
        tx.put(dirent_key(ROOT_FID, name), Dirent(fid, "f"))
        tx.put(inode_key(fid), Inode("f", 0o644, 0, 0, 1, 2, 3, gen=1, origin="n1"))
        tx.put(generation_key(fid), Generation(1, 0, b"", b"", f"{fid:x}.1", "n1", True))
        tx.put(times_key(ROOT_FID), DirTimes(1, 2))

    def publish(tx: Tx) -> None:
        assert tx.inode(fid) is not None
        copies = (Copy("n1", "store", "memory", 1.5),)
        tx.put(inode_key(fid), Inode("f", 0o644, 0, 0, 1, 2, 3, size=100, gen=2, origin="n1", copies=copies))
        tx.put(generation_key(fid), Generation(2, 100, b"x" * 16, b"y" * 16, f"{fid:x}.2", "n1"))
        tx.put(op, Op("put", b"/checkpoint/%s" % name, "n1", fid, 2))

    for function in (create, publish, lambda tx: tx.delete(op)):
        began_s = time.perf_counter()
        await catalogue.mutate(function)
        latencies_s.append(time.perf_counter() - began_s)


def report(what: str, latencies_s: list[float], took_s: float, cpu_s: float) -> None:
    ordered = sorted(latencies_s)
    p50, p95 = (ordered[int(len(ordered) * share)] * 1e3 for share in (0.5, 0.95))
    each_us = cpu_s / len(ordered) * 1e6
    rate = len(ordered) / took_s
    print(f"{what:<34} {rate:8.0f} /s   p50 {p50:7.3f} ms   p95 {p95:7.3f} ms   processor {each_us:5.0f} us each")


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def measure(writer: Catalogue, reader: Catalogue, files: int) -> None:
    """Three rates of mutations, two of barriers."""
    made = 0
    for workers in (1, 8, 64):
        latencies_s: list[float] = []
        numbers = iter(range(made, made + files))
        made += files

        async def work(numbers: object = numbers, latencies_s: list[float] = latencies_s) -> None:
            for number in numbers:  # type: ignore[attr-defined]
                await one_file(writer, number, latencies_s)

        began_s, cpu_began_s = time.perf_counter(), cpu_s()
        async with trio.open_nursery() as nursery:
            for _ in range(workers):
                nursery.start_soon(work)
        report(f"mutations, {workers} at once", latencies_s, time.perf_counter() - began_s, cpu_s() - cpu_began_s)
    for workers in (1, 8):
        waits_s: list[float] = []

        async def wait(waits_s: list[float] = waits_s) -> None:
            for _ in range(files):
                began_s = time.perf_counter()
                await reader.barrier()
                waits_s.append(time.perf_counter() - began_s)

        began_s, cpu_began_s = time.perf_counter(), cpu_s()
        async with trio.open_nursery() as nursery:
            for _ in range(workers):
                nursery.start_soon(wait)
        report(f"barriers, {workers} at once", waits_s, time.perf_counter() - began_s, cpu_s() - cpu_began_s)


async def builtin(directory: Path, files: int) -> None:
    catalogue = BuiltinCatalogue(directory)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(catalogue.run)
            await measure(catalogue, catalogue, files)
            nursery.cancel_scope.cancel()
    finally:
        catalogue.close()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


async def etcd(directory: Path, count: int, clear: bool, files: int) -> None:
    ports = free_ports(2 * count)
    members = [Member(f"m{i}", HOST, ports[2 * i], ports[2 * i + 1]) for i in range(count)]
    tls, servers = None, []
    for member in members:
        if not clear:
            tls = JobAuthority(b"for measurements only", "bench").issue(directory / member.name / "tls", "m", [HOST])
        servers.append(EtcdServer(members, member.name, directory / member.name, "bench", tls))
    try:
        async with trio.open_nursery() as nursery:
            for server in servers:
                nursery.start_soon(server.start)
        endpoints = [Endpoint(member.host, member.client_port) for member in members]
        context = tls.client_context() if tls else None
        nodes = [
            EtcdCatalogue(
                endpoints[i % count :] + endpoints[: i % count],
                "bench",
                f"n{i}",
                life=Life(f"n{i}", "1"),
                tls=context,
                txn_ops_max=TXN_OPS_MAX,
            )
            for i in range(2)
        ]
        async with trio.open_nursery() as nursery:
            for node in nodes:
                await nursery.start(node.run)
            await measure(nodes[0], nodes[1], files)
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            for server in servers:
                await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--clear", action="store_true", help="without TLS")
    parser.add_argument("--dir", type=Path, default=None, help="where journals and etcd's data go")
    parser.add_argument("--files", type=int, default=400)
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench-catalogue-", dir=arguments.dir))
    try:
        print("built in")
        trio.run(builtin, directory, arguments.files)
        print(f"etcd, {arguments.members} members, {'in the clear' if arguments.clear else 'TLS'}")
        trio.run(etcd, directory, arguments.members, arguments.clear, arguments.files)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
