"""Everything dies, and ``cachexfs recover`` brings what the disks still have to the PFS.

Role: a scenario. A cluster works and suffers; then all nodes lose their power in one moment, the PFS perhaps too, and
some nodes do not come back with their disk. What the simulated PFS has then is put into a real directory, where the
real recovery runs, one node after the other. After each of its changes, no checkpoint there claims to be whole and is
not; one that was whole stays so, and what was called restartable at ``partner`` is whole in the end.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, TypeVar
from unittest import mock

import trio
import xxhash
from sim_check import COMMIT, Violation
from sim_cluster import Cluster
from sim_store import Ino
from sim_work import Worker

from cachexfs.adapters.pfs_attrs import StatRow
from cachexfs.adapters.pfs_dir import TMP_SHARDS
from cachexfs.core.boundary import Boundary
from cachexfs.core.order import covers, paths_of
from cachexfs.core.records import Inode, OpKind
from cachexfs.errors import CatalogueUnavailableError
from cachexfs.recovery import publish, run
from cachexfs.recovery.report import LEFT, Request
from cachexfs.recovery.target import Target

T = TypeVar("T")
_STILL = (OpKind.PUT, OpKind.MKDIR, OpKind.ATTR, OpKind.DIRATTR)  # they leave all names as they are


class _Inline(Executor):
    """A pool without threads."""

    def __init__(self, workers: int) -> None:
        super().__init__()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class Recover(Cluster):
    """As ``Cluster``, to the bitter end."""

    def __init__(self, seed: int, directory: str, *, trace: bool = False, fsync: str = "") -> None:
        super().__init__(seed, directory, trace=trace, fsync=fsync)
        self.directory = os.path.join(directory, "pfs")
        self.recovered: dict[str, int] = {}  # outcome -> files
        self.trouble = True  # who is killed when time is up does not come back

    async def main(self) -> None:
        rng = self.random
        async with trio.open_nursery() as self._nursery:
            for seat in self.seats:
                await seat.born(self._nursery)
            clients = [Worker(seat, b"c%d" % number) for number, seat in enumerate(self.seats[:3])]
            for client in clients:
                await client.start()
            with trio.move_on_after(rng.choice([1, 5, 30]) * rng.random()):
                async with trio.open_nursery() as working:
                    working.start_soon(self._leases)
                    working.start_soon(self._suffer)
                    for client in clients:
                        working.start_soon(client.work, 30)
            promised = await self._promised()
            for seat in self.seats:
                if seat.current is not None and not seat.current.dead:
                    seat.kill(supervised=False)
            self._nursery.cancel_scope.cancel()
        if rng.random() < 0.5:
            self.store.power_cut(rng)
        disks = [seat.options.nvme_directory or "" for seat in self.seats if rng.random() < 0.8]
        disks = [disk for disk in disks if os.path.isdir(disk)]
        rng.shuffle(disks)
        self._recover(disks, promised if len(disks) == len(self.seats) else {})

    async def _promised(self) -> dict[bytes, bytes]:
        """Paths of the files that are called safe at the partner, or at pfs, whose names do not move -> digest."""
        life = self.seats[0].current
        if life is None or life.dead:
            return {}
        with suppress(CatalogueUnavailableError):
            await life.catalogue.barrier()
        view, found = life.catalogue.view, {}
        moving = [path for _, op, _ in view.ops() if op.kind not in _STILL for path in paths_of(op)]
        for key, entry in view.items():
            if isinstance(inode := entry.record, Inode) and inode.kind == "f" and inode.size and not inode.writing:
                fid = int(key[2:], 16)
                content, path = view.generation(fid), view.path(fid)
                if content is None or path is None or any(covers(moved, path) for moved in moving):
                    continue
                if life.node.boundary(fid, inode) >= Boundary.PARTNER:
                    found[path] = content.digest
        return found

    # ---- on a real directory
    def _recover(self, disks: list[str], promised: dict[bytes, bytes]) -> None:
        numbers = self._put_down()
        before, told = self._whole(), set[bytes]()
        recover = self

        class Watched(Target):
            """Looks after each change; files have the numbers that they had in the simulation."""

            def lstat(self, path: bytes) -> StatRow | None:
                row = super().lstat(path)
                if row is not None:
                    row = [*row[:5], numbers.get(row[5], row[5]), *row[6:]]  # type: ignore[assignment]
                return row

            def __getattribute__(self, name: str) -> Any:
                found = super().__getattribute__(name)
                if name not in ("land", "hide", "forget_held", "discard", "prepare"):
                    return found

                def changed(*args: Any) -> Any:
                    done = found(*args)
                    recover.look(f"recover: {name}")
                    return done

                return changed

        patches = (
            mock.patch.object(run, "Target", Watched),
            mock.patch.object(publish, "ThreadPoolExecutor", _Inline),
        )
        with patches[0], patches[1]:
            for disk in disks:
                request = Request(disk, self.directory, elsewhere=True)
                answer = run.run(request, lambda line: None)
                for outcome in answer.result.outcomes if answer.result is not None else ():
                    self.trace(f"{disk}: {outcome}")
                    self.recovered[outcome.outcome] = self.recovered.get(outcome.outcome, 0) + 1
                    if outcome.outcome in LEFT:
                        told.add(os.fsencode(outcome.path))
        for file, digest in promised.items():
            data = _bytes(os.path.join(self.directory, os.fsdecode(file))) or b""
            if file not in told and digest and xxhash.xxh3_128_digest(data) != digest:
                raise Violation(f"recover: {file!r} was called safe, is {data[:24]!r} now, and nothing is said of it")
        for path in before:
            if path not in self._whole():
                raise Violation(f"recover: {path!r} was whole on the PFS before, and is not after")

    def look(self, when: str) -> None:
        """No checkpoint claims to be whole and is not."""
        for path, why in self._checkpoints().items():
            if why:
                raise Violation(f"commit last: after {when}, {path!r} has its commit file, but {why}")

    def _whole(self) -> list[str]:
        return [path for path, why in self._checkpoints().items() if not why]

    def _checkpoints(self) -> dict[str, str]:
        """Directory with a commit file -> why it is not whole."""
        found = {}
        for path, _, names in os.walk(self.directory):
            if os.fsdecode(COMMIT) in names and ".cachexfs" not in path:
                data = {os.fsencode(name): _bytes(os.path.join(path, name)) for name in names}
                found[path] = self.saves.lacking(data[COMMIT] or b"", data)
        return found

    def _put_down(self) -> dict[int, int]:
        """The simulated PFS as a real directory; returns real inode number -> simulated one."""
        numbers: dict[int, int] = {}
        os.makedirs(self.directory)
        Target(self.directory, lambda count: None).establish()
        os.makedirs(os.path.join(self.directory, ".cachexfs/held"), exist_ok=True)
        for path, ino in sorted(self.store.walk().items()):
            self._make(os.path.join(os.fsencode(self.directory), path), ino, numbers)
        for name, ino in self.store.tmp.entries.items():
            plain = name.removesuffix(b".rec")
            shard = b"%x" % (zlib.crc32(plain) % TMP_SHARDS)
            directory = os.path.join(os.fsencode(self.directory), b".cachexfs/tmp", shard)
            os.makedirs(directory, exist_ok=True)
            self._make(os.path.join(directory, name), ino, numbers)
        for name, ino in self.store.held.entries.items():
            self._make(os.path.join(os.fsencode(self.directory), b".cachexfs/held", name), ino, numbers)
        return numbers

    def _make(self, path: bytes, ino: Ino, numbers: dict[int, int]) -> None:
        if ino.kind == "d":
            os.makedirs(path, exist_ok=True)
        elif ino.kind == "l":
            os.symlink(ino.target, path)
        elif ino.kind == "f":
            fd = os.open(path, os.O_WRONLY | os.O_CREAT)
            os.write(fd, ino.data)
            os.utime(fd, ns=(ino.attrs.atime_ns, ino.attrs.mtime_ns))
            numbers[os.fstat(fd).st_ino] = ino.number
            os.close(fd)


def _bytes(path: str) -> bytes | None:
    if not os.path.isfile(path) or os.path.islink(path):
        return None
    with open(path, "rb") as file:
        return file.read()
