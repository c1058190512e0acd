"""One life of a daemon in the simulation: the real engine on simulated adaptors, and its sudden death.

Role: what ``cachexfs.daemon`` does without a kernel. ``kill`` ends all tasks at the await where they are; the code
that runs then (``finally``) finds adaptors that do nothing any more, as after SIGKILL.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio
from sim_catalogue import Link, Log, SimCatalogue
from sim_pfs import SimPfs

from cachexfs.adapters.file_digest import digest_file
from cachexfs.adapters.replica_store import ReplicaStore
from cachexfs.adapters.staging import Staging
from cachexfs.config import MountOptions
from cachexfs.core import namespace
from cachexfs.core import records as rec
from cachexfs.core.changes import NewAttrs
from cachexfs.core.records import FORMAT_VERSION, ROOT_FID, Job
from cachexfs.core.records import Life as LifeRecord
from cachexfs.core.transaction import Tx
from cachexfs.engine import recover
from cachexfs.engine.files import Files
from cachexfs.engine.filesystem import Filesystem
from cachexfs.engine.interfaces import Peers
from cachexfs.engine.node import Node
from cachexfs.engine.parts import assemble, load
from cachexfs.errors import FsError
from cachexfs.glue import HeldReplicas

if TYPE_CHECKING:
    from sim_kernel import Kernel

T = TypeVar("T")
EPOCH_S = 1_700_000_000.0
_mounts = itertools.count(1)


class SimClock:
    """trio's (mock) time as the time of day; no two calls of ``now_ns`` give the same."""

    def __init__(self) -> None:
        self._calls = 0

    def now_s(self) -> float:
        """See ``Clock``."""
        return EPOCH_S + trio.current_time()

    def now_ns(self) -> int:
        """See ``Clock``."""
        self._calls += 1
        return int(EPOCH_S) * 10**9 + int(trio.current_time() * 1e9) + self._calls


class Disk(Protocol):
    """The NVMe of a node: what it holds at most, and which of its calls fail."""

    capacity_bytes: int

    def called(self, what: str) -> None:
        """Before a call. Raises ``OSError``."""
        ...


class SimStaging(Staging):
    """The real staging directory, until its daemon is dead. ``peak_bytes``: the most it has held."""

    dead = False
    peak_bytes = 0
    disk: Disk | None = None
    on_memory: Callable[[str], None] = staticmethod(lambda what: None)  # before a call on the tmpfs; may raise

    def _on_disk(self, what: str) -> None:
        if self.disk is not None:
            self.disk.called(what)

    def create(self, stage: str, *, spilled: bool = False) -> int:
        if self.dead:
            raise OSError(5, "dead")
        (self._on_disk if spilled else self.on_memory)("create")
        return super().create(stage, spilled=spilled)

    def spill_room_bytes(self) -> int:
        if self.disk is None:
            return super().spill_room_bytes()
        self.spill_limit_bytes = self.disk.capacity_bytes
        self._on_disk("statvfs")
        return max(0, self.disk.capacity_bytes - self.spilled_bytes)

    def spill_begin(self, stage: str) -> int:
        self._on_disk("create")
        return super().spill_begin(stage)

    def spill_end(self, stage: str, *, keep: bool) -> None:
        if keep:
            self._on_disk("rename")
        super().spill_end(stage, keep=keep)

    def account(self, stage: str, allocated_bytes: int) -> None:
        super().account(stage, allocated_bytes)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def remove(self, stage: str) -> None:
        if not self.dead:
            super().remove(stage)


class SimFilesystem(Filesystem):
    """With the kernel that asks it."""

    kernel: Kernel


class SimHeld(HeldReplicas):
    """The replicas of one life: nothing of a dead daemon removes them."""

    def __init__(self, life: Life, store: ReplicaStore) -> None:
        super().__init__(store)
        self._life = life

    async def drop(self, stage: str) -> None:
        if not self._life.dead:
            await super().drop(stage)


def _opened(directory: str) -> ReplicaStore | None:
    """As the daemon opens its replicas, or goes on without (``daemon.Daemon._start_replicas``)."""
    try:
        return ReplicaStore.open_blocking(directory)
    except OSError:
        try:
            return ReplicaStore.inspect_blocking(directory)
        except OSError:
            return None


@dataclass
class Outcome:
    """How an operation ended: a value, an errno, or with the death of its daemon."""

    value: object = None
    errno: int = 0
    why: str = ""
    killed: bool = True
    done: trio.Event = field(default_factory=trio.Event)


class Life:
    """A daemon from its start to its death. ``mount`` is the same for all daemons under one supervisor."""

    def __init__(
        self,
        options: MountOptions,
        log: Log,
        pfs: SimPfs,
        clock: SimClock,
        rng: random.Random,
        after: Life | None = None,
        link: Link | None = None,
        peers: Callable[[str], Peers] | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.mount = after.mount if after is not None else next(_mounts)
        self.supervised = False  # its death is not that of the mount
        self.open_files: Mapping[int, int] = {}
        self.resume: Callable[[Files], None] = lambda files: None
        self.set_aside: Callable[[str], None] | None = None  # the catalogue may have forgotten what it knew
        self.others: Callable[[], Collection[int]] = tuple  # descriptors of staged files that are not the daemon's
        assert options.staging is not None
        self.staging = SimStaging(options.staging, options.memory, options.spill_directory if disk else None)
        self.staging.disk = disk
        self.staging.open()
        self.catalogue = SimCatalogue(log, rng, link, options.fsync_timeout_s)
        self.pfs = pfs
        self.node = Node(options, options.node, self.catalogue, self.staging, clock, digest_file, pfs)
        self.node.random = rng
        self.store: ReplicaStore | None = None
        if options.nvme_directory is not None and peers is not None:
            self.store = _opened(os.path.join(options.nvme_directory, "replicas"))
            self.node.replicas = SimHeld(self, self.store) if self.store is not None else None
            self.node.peers = peers(options.node)
        self.boot = f"{self.mount}.{rng.getrandbits(32):x}"
        self.dead = False
        self.nursery: trio.Nursery | None = None
        self.parts = assemble(self.node)
        if int(self.boot[-1], 16) % 2:  # else all files of a simulation are too small for it
            self.parts.files.publishing.digest_at_once_bytes = 0
        self.filesystem = SimFilesystem(self.parts)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Adopt, then serve until killed."""
        try:
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                await self._register()
                await recover.adopt(self.node, self.parts.keeper, self.parts.files, self.open_files, self.set_aside)
                parts = self.parts
                if self.set_aside is not None:
                    parts.drainer.pause()
                load(parts)
                if self.store is not None:
                    nursery.start_soon(self.catalogue.watch, LifeRecord(self.node.name, self.boot))
                for task in (
                    parts.reader.fills.run,
                    parts.replicator.run,
                    parts.drainer.run,
                    parts.claims.run,
                    parts.keeper.run,
                    parts.takeover.run,
                    parts.denied.run,
                    parts.reclaim.run,
                    parts.files.unpublished.run,
                    parts.files.publishing.late_digests.run,
                ):
                    nursery.start_soon(task)
                if self.filesystem.kernel.passthrough:
                    nursery.start_soon(parts.files.passing.watch)
                    nursery.start_soon(parts.files.follow_maps)
                nursery.start_soon(recover.verify, self.node)
                if self.set_aside is not None:
                    nursery.start_soon(parts.mended.run)
                await trio.sleep(self.node.random.choice([0, 0.001]))
                self.resume(self.parts.files)
                task_status.started()
                await trio.sleep_forever()
        finally:
            for vnode in self.parts.files._by_ino.values():
                if vnode.fd >= 0:
                    os.close(vnode.fd)
            self._close_strays()
            self.staging.close()
            if self.store is not None:
                self.store.close()

    def _close_strays(self) -> None:
        """A dead process holds no file, wherever its tasks were."""
        files = os.path.dirname(self.staging.path("x"))
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            with contextlib.suppress(OSError):
                if fd not in self.others() and os.readlink(f"/proc/self/fd/{fd}").startswith(files):
                    os.close(fd)

    async def _register(self) -> None:
        node, ctx = self.node, self.node.ctx()
        nvme = node.replicas.store if node.replicas is not None else ""
        record = rec.Node(node.name, "", 0, 0, self.staging.store, nvme, node.name)

        def register(tx: Tx) -> None:
            if tx.read(rec.JOB_KEY) is None:
                tx.put(rec.JOB_KEY, Job(FORMAT_VERSION, ROOT_FID, node.name, node.replica_count))
            tx.put(rec.node_key(node.name), record)
            tx.put(rec.life_key(node.name), LifeRecord(node.name, self.boot))
            namespace.join_root(tx, ctx, NewAttrs(0o755, 0, 0), imported=False)

        await self.catalogue.mutate(register)

    def kill(self, *, supervised: bool = False) -> None:
        """SIGKILL: at once, wherever every task is."""
        self.supervised = supervised
        self.dead = self.staging.dead = self.pfs.dead = True
        if self.nursery is not None:
            self.nursery.cancel_scope.cancel()

    # ---- operations
    async def call(self, function: Callable[[SimFilesystem], Awaitable[T]]) -> Outcome:
        """Carry out an operation as a request of the kernel: it dies with the daemon."""
        outcome = Outcome()
        if self.dead or self.nursery is None:
            return outcome
        self.nursery.start_soon(self._request, function, outcome)
        with trio.CancelScope(shield=True):
            await outcome.done.wait()
        return outcome

    async def _request(self, function: Callable[[SimFilesystem], Awaitable[T]], outcome: Outcome) -> None:
        try:
            await trio.lowlevel.checkpoint()
            try:
                outcome.value = await function(self.filesystem)
            except (FsError, OSError) as error:  # as ``frontend.fuse`` answers both
                outcome.errno, outcome.why = error.errno or errno.EIO, str(error)
            outcome.killed = self.dead
        finally:
            outcome.done.set()
