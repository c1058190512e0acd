"""What the parts of one node's engine share.

Role: holds the adaptors, makes the context of a mutation, knows who is alive and who is the partner. It has no
policy: ``files``, ``replicate``, ``drain``, ``hold``, ``recover`` and ``completeness`` each have one.
"""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import trio

from cachexfs import machine
from cachexfs.config import MountOptions
from cachexfs.core.boundary import Boundary, boundary_of
from cachexfs.core.changes import Ctx
from cachexfs.core.records import FID_STEP, ROOT_FID, Copy, DirTimes, Inode, Op, OpKind
from cachexfs.core.routes import DIRECT, PARTNER
from cachexfs.engine.failed_calls import FailedCalls
from cachexfs.engine.foreground import Foreground
from cachexfs.engine.interfaces import Catalogue, Clock, Peers, ReplicaHolder, StagingArea
from cachexfs.engine.pfs_interface import Pfs, PfsAttrs
from cachexfs.engine.requests import Requests

log = logging.getLogger(__name__)

REFUSAL_S = 300.0  # for which a node whose disk has refused a replica is asked last
DISK_REFUSES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

#: (digest, tree, blocks) of the first bytes of an open file.
DigestFile = Callable[[int, int], tuple[bytes, bytes, list[bytes]]]


def _in_background(digest_file: DigestFile, fd: int, size: int) -> tuple[bytes, bytes, list[bytes]]:
    with machine.in_background():
        return digest_file(fd, size)


@dataclass
class Node:
    """This node: its adaptors, its identity, and what it knows of the others."""

    options: MountOptions
    name: str
    catalogue: Catalogue
    staging: StagingArea
    clock: Clock
    digest_file: DigestFile
    pfs: Pfs | None = None
    peers: Peers | None = None
    replicas: ReplicaHolder | None = None
    random: random.Random = field(default_factory=random.SystemRandom)
    errors: dict[str, str] = field(default_factory=dict)
    unverified: set[str] = field(default_factory=set)  # staged by a former daemon, digests not checked since
    damaged: set[tuple[str, str]] = field(default_factory=set)  # (stage, store): copies here that were found bad
    refusals: dict[str, float] = field(default_factory=dict)  # node -> when its disk refused a replica of this one
    failed: str = ""
    orphans: Callable[[], str] = field(default=lambda: "")  # in words, what is staged and has lost its name
    members: Callable[[int, int], Collection[bytes] | None] = field(default=lambda fid, gen: None)
    keeps: Callable[[int], bool] = field(default=lambda fid: False)  # see ``Ctx``
    route_why: Callable[[], str] = field(default=lambda: "")  # of what ``choose_route`` said last
    choose_route: Callable[[], str] = field(default=lambda: PARTNER)  # for ``route=auto``; cheap, never waits
    requests: Requests = field(init=False)
    failed_calls: FailedCalls = field(init=False)
    foreground: Foreground = field(default_factory=Foreground)
    _op_base: int = 0
    _op_count: int = 0

    def __post_init__(self) -> None:
        self.requests = Requests(self.name)
        self.failed_calls = FailedCalls(self.clock.now_s)
        self._op_base = self.clock.now_ns() // 1_000_000

    # ---- what went wrong
    def known_errors(self) -> list[str]:
        """What is wrong with this node as a whole, for ``status``."""
        return [*self.errors.values(), *filter(None, [self.orphans(), self.cut_off_words()])]

    def cut_off_words(self) -> str:
        """That the catalogue has no majority, and what helps; "" when it has one."""
        if not self.is_cut_off:
            return ""
        return (
            f"no majority of the catalogue has answered for {self.catalogue.outage_s:.0f} s: who else lives is unknown"
            ", so nothing counts as 'partner'; reads go on with what was last known, changes fail. It ends by itself "
            f"when enough nodes are back; without one that is dead for good: {self.vouch_command}"
        )

    @property
    def vouch_command(self) -> str:
        """What confirms that the other nodes are dead; with the name where there is one other."""
        others = [address.name for address in self.options.nodes if address.name != self.name]
        return f"'cachexfs recover --dead {others[0] if len(others) == 1 else 'NODE'}'"

    # ---- mutations
    def ctx(self) -> Ctx:
        """Context of one change of the namespace, now."""
        return Ctx(
            self.name, self.clock.now_ns(), self.clock.now_s(), self.next_op, self.new_fid, self.members,
            self.route, self.choose_route, self.keeps,
        )  # fmt: skip

    def next_op(self) -> str:
        """Ids of pending operations: those of one node sort in the order of issue, also over restarts."""
        self._op_count += 1
        return f"{self._op_base:012x}.{self._op_count:010x}.{self.name}"

    def new_fid(self) -> int:
        """A fresh file id: random, so that nodes need not agree first (a collision would be refused)."""
        while True:
            fid = self.random.getrandbits(50) * FID_STEP
            if fid > ROOT_FID:
                return fid

    # ---- nodes
    @property
    def view(self):  # type: ignore[no-untyped-def]
        """The catalogue's replica."""
        return self.catalogue.view

    @property
    def replica_count(self) -> int:
        """Partner copies wanted: 0 alone."""
        return 0 if self.options.alone else self.options.replicas

    @property
    def route(self) -> str:
        """``partner``, ``direct`` or ``auto``: the option, where there is a choice."""
        if self.replica_count == 0:
            return DIRECT
        return PARTNER if self.pfs is None or self.options.offline else self.options.route

    def ring(self) -> list[str]:
        """All nodes of the job, this one first, in the order in which they are asked to be its partner."""
        names = [node.name for node in self.options.nodes] or [self.name]
        at = names.index(self.name)
        others = names[at + 1 :] + names[:at]
        domains = self.options.domains
        mine = domains.get(self.name, self.name)
        apart = [name for name in others if domains.get(name, name) != mine]
        return [self.name, *apart, *(name for name in others if name not in apart)]

    def partners(self) -> list[str]:
        """Live nodes that hold this node's replicas now, at most ``replicas`` of them; whose disk refuses them last."""
        live = [name for name in self.ring()[1:] if self.catalogue.view.is_live(name)]
        if self.refusals:
            live.sort(key=self._refuses)
        return live[: self.replica_count]

    def _refuses(self, name: str) -> bool:
        return self.clock.now_s() - self.refusals.get(name, float("-inf")) < REFUSAL_S

    def note_sent(self, name: str, error: OSError | None = None) -> None:
        """A node has taken a replica, or has not: if its disk has refused it, others are asked first from now on."""
        if error is None and self.refusals.pop(name, None) is not None:
            self.errors.pop(f"partner:{name}", None)
        if error is None or error.errno not in DISK_REFUSES:
            return
        self.refusals[name] = self.clock.now_s()
        others = [other for other in self.partners() if other != name and not self._refuses(other)]
        instead = f"; {', '.join(others)} is asked instead" if others else ""
        self.errors[f"partner:{name}"] = f"node {name} takes no replicas: {os.strerror(error.errno)}{instead}"

    def live(self, name: str) -> bool:
        """Whether a node is alive as far as the catalogue knows. This node is."""
        return name == self.name or self.catalogue.view.is_live(name)

    def valid(self, copy: Copy) -> bool:
        """Whether a copy counts: its node lives and still has the store that it was put into."""
        node = self.catalogue.view.nodes.get(copy.node)
        if node is None or not self.live(copy.node):
            return False
        return copy.store in (node.memory_store, node.nvme_store)

    def live_copies(self, inode: Inode) -> list[Copy]:
        """Copies outside the PFS that count now."""
        return [copy for copy in inode.copies if self.valid(copy)]

    @property
    def is_cut_off(self) -> bool:
        """Whether the catalogue has been silent for so long that nobody here can tell which other nodes live."""
        return self.catalogue.outage_s >= self.options.node_timeout_s

    def fast_copies(self, inode: Inode) -> int:
        """On how many nodes the content is known to be, outside the PFS: what claims and fsync may count on.

        Cut off, it is one at most: the others may have been lost since.
        """
        if inode.size == 0:  # the catalogue alone holds all that there is
            return self.replica_count + 1
        copies = len({copy.node for copy in self.live_copies(inode)})
        return min(copies, 1) if self.is_cut_off else copies

    def is_protected(self, inode: Inode) -> bool:
        """Whether as many nodes have the content as are to have it, outside the PFS."""
        return self.fast_copies(inode) > self.replica_count

    def holders(self, inode: Inode) -> list[str]:
        """Distinct live nodes with a copy, the origin first, then in ring order of their names."""
        names = dict.fromkeys(copy.node for copy in self.live_copies(inode))
        return sorted(names, key=lambda name: (name != inode.origin, name))

    def on_pfs(self, fid: int, inode: Inode) -> bool:
        """Whether the current generation lies on the PFS under its current name."""
        there = self.was_landed(inode) and inode.pfs is not None and not inode.pfs.hidden
        return there and not self.catalogue.view.is_moving(fid)

    def was_landed(self, inode: Inode) -> bool:
        """Whether the current generation lies on the PFS, under whatever name."""
        return inode.pfs is not None and inode.pfs.gen == inode.gen and not inode.pfs.missing

    def ready_put(self, fid: int, inode: Inode) -> Op | None:
        """What is going to land the current generation, if that is ready under its hidden name on the PFS."""
        for _, op in self.catalogue.view.latest_ops_of(fid):
            if op.kind == OpKind.PUT and op.gen == inode.gen:
                return op if op.ready else None
        return None

    def boundary(self, fid: int, inode: Inode, *, count_pfs: bool = True) -> Boundary:
        """The boundary of a file's current generation, from the evidence that counts now."""
        on_pfs = self.on_pfs(fid, inode) and count_pfs
        copies = self.fast_copies(inode)
        if not copies and count_pfs and (self.was_landed(inode) or self.ready_put(fid, inode) is not None):
            copies = 1  # on the PFS under another name, withdrawn or not yet renamed: not safe, and not lost
        return boundary_of(published=True, on_pfs=on_pfs, fast_copies=copies, replicas=self.replica_count)

    def staged(self, stage: str, size: int = 0) -> bool:
        """Whether this node has a content staged, as far as it knows whole."""
        return (
            self.staging.has(stage)
            and (stage, self.staging.store) not in self.damaged
            and self.staging.size(stage) >= size
        )

    def in_memory(self, stage: str) -> bool:
        """Whether it is staged in memory, whose bytes are as they were written; NVMe may give others."""
        return self.staged(stage) and not self.staging.is_spilled(stage)

    def held_path(self, stage: str, size: int) -> str | None:
        """Path of a content that this node holds for another, as far as it knows whole."""
        if self.replicas is None or (stage, self.replicas.store) in self.damaged:
            return None
        return self.replicas.path(stage, size)

    def local_path(self, stage: str, size: int) -> str | None:
        """Path of a whole local copy of a content: staged or held for another node; None without one."""
        return self.staging.path(stage) if self.staged(stage, size) else self.held_path(stage, size)

    def own_copies(self, stage: str, size: int) -> tuple[Copy, ...]:
        """The copies of a content that this node has, as records."""
        now_s = self.clock.now_s()
        found = []
        if self.staged(stage, size):
            found.append(Copy(self.name, self.staging.store, "memory", now_s))
        if self.replicas is not None and self.held_path(stage, size) is not None:
            found.append(Copy(self.name, self.replicas.store, "nvme", now_s))
        return tuple(found)

    def pfs_attrs(self, inode: Inode | None, times: DirTimes | None = None) -> PfsAttrs:
        """Attributes that a file (None: removed since, and there for a moment) or directory is to have on the PFS."""
        if inode is None:
            return PfsAttrs(0o700, None, None, self.clock.now_ns(), self.clock.now_ns())
        mtime_ns = times.mtime_ns if times is not None else inode.mtime_ns
        # None without any: what is new has none; the last one's removal is an operation of its own (``drain_names``).
        return PfsAttrs(inode.mode, inode.uid, inode.gid, inode.atime_ns, mtime_ns, inode.xattrs or None)

    async def digests(self, fd: int, size: int, *, late: bool = False) -> tuple[bytes, bytes, list[bytes]]:
        """Digests of an open file's first bytes; in a thread unless it is a block or two. ``late``: nobody waits."""
        if size <= 2 << 20:
            return self.digest_file(fd, size)
        copy = os.dup(fd)
        try:
            work = partial(_in_background, self.digest_file) if late else self.digest_file
            return await trio.to_thread.run_sync(work, copy, size)
        finally:
            os.close(copy)
