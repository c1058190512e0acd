"""The small interfaces through which the engine touches the world.

Role: contracts. Each has one adaptor that is real and one that a simulation drives from a seed; the comments
here are what both promise and what the contract suites test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from cachexfs.core.formats import Members
from cachexfs.core.landed import Landed
from cachexfs.core.records import Copy, Generation
from cachexfs.core.replica import Applied, Replica
from cachexfs.core.transaction import Tx
from cachexfs.errors import FsError

if TYPE_CHECKING:
    from cachexfs.engine.vnode import Vnode

T = TypeVar("T")

#: Called in the trio thread, synchronously, after each applied revision: [(key, old, new), ...].
Listener = Callable[[Applied], None]


class Catalogue(Protocol):
    """Who holds what, in which order things became visible, who is alive.

    ``view`` is this node's replica: reads never block, and are as old as the last ``barrier``.
    """

    view: Replica

    async def barrier(self) -> None:
        """Afterwards ``view`` includes every mutation, of any node, that had returned when this was called.

        Calls that arrive while an exchange is under way share the next one. Raises
        ``CatalogueUnavailableError`` at the deadline (see ``outage``).
        """
        ...

    async def mutate(self, function: Callable[[Tx], T]) -> T:
        """Run ``function`` on a transaction and commit it; return its result once ``view`` includes the effect.

        The function is synchronous, has no effect but through the ``Tx``, and may run several times. Applied
        exactly once or not at all, also across lost connections. An ``FsError`` out of the function is raised
        here after its reads were confirmed to be current. Functions queued at one node are applied in order;
        they may share one exchange. Raises ``CatalogueUnavailableError``.
        """
        ...

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` after every applied revision, in order."""
        ...

    @property
    def outage_s(self) -> float:
        """Seconds since the catalogue last answered while something waits for it; 0 when all is well."""
        ...


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [offset, offset + length) of a file."""

    offset: int
    length: int


class Peers(Protocol):
    """The other nodes' daemons. Every call raises ``PeerError`` (protocol, authentication), ``OSError`` (network) or
    ``trio.TooSlowError`` (deadline); none leaves a task behind. Nodes are named as in the catalogue."""

    async def push(self, node: str, stage: str, source_fd: int, blocks: Sequence[tuple[int, int, bytes]]) -> None:
        """Send blocks (offset, length, xxh3_128 digest) of an open file to ``node``'s copy in progress of ``stage``.

        Returns when the peer has received and checked them (not synced).
        """
        ...

    async def commit(self, node: str, stage: str, manifest: bytes) -> str:
        """Make the copy of ``stage`` durable as the manifest describes it; returns the store's identity.

        The peer checks size and all block digests against what it received, fsyncs data and manifest and
        their directory, then answers. A missing or wrong block raises ``PeerError`` naming it.
        """
        ...

    async def read(self, node: str, stage: str, offset: int, length: int) -> bytes:
        """Bytes of a copy that ``node`` holds in memory or on NVMe; short at the end of the file.

        Raises ``FileNotFoundError`` when the node does not hold it.
        """
        ...

    async def manifest(self, node: str, stage: str) -> bytes:
        """The manifest of a copy that ``node`` holds. Raises ``FileNotFoundError``."""
        ...

    async def drop(self, node: str, stage: str) -> None:
        """Tell ``node`` that its NVMe copy of ``stage`` is not needed any more."""
        ...

    async def ping(self, node: str) -> float:
        """The peer's clock, seconds since the epoch, corrected by half the round trip."""
        ...


Xattrs = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class PfsAttrs:
    """Attributes that a PFS operation sets: mode (permission bits), uid, gid (None: leave), times in ns, the user's
    extended attributes (None: leave; best effort, for the PFS may not take them)."""

    mode: int
    uid: int | None
    gid: int | None
    atime_ns: int
    mtime_ns: int
    xattrs: Xattrs | None = None


@dataclass(frozen=True, slots=True)
class PfsStat:
    """What the PFS says of a path. ``kind`` as in ``Dirent``."""

    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    ino: int
    nlink: int
    rdev: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    target: bytes = b""
    xattrs: Xattrs = ()  # of a listing whose xattrs were asked for


class PreparedFile(Protocol):
    """A recovery record on the PFS: the hidden name of its file, and its bytes."""

    @property
    def hidden(self) -> str:
        """Name below ``.cachexfs/tmp``."""
        ...

    @property
    def record(self) -> bytes:
        """As given to ``Pfs.prepare``."""
        ...


class Pfs(Protocol):
    """The shared filesystem, touched by child processes only. Paths are relative to the PFS directory.

    Each call takes ``deadline_s``; at the deadline the child is abandoned and replaced, and ``trio.TooSlowError``
    is raised. Errors of the PFS are ``OSError``. Nothing here retries. ``state`` is "ok", "unreachable" or "hung".
    """

    @property
    def state(self) -> str:
        """How the PFS answered last."""
        ...

    @property
    def error(self) -> str:
        """Why ``state`` is not "ok"; empty when it is."""
        ...

    @property
    def away_s(self) -> float:
        """For how many seconds ``state`` has not been "ok"; 0 while it is."""
        ...

    @property
    def waiting(self) -> tuple[str, float]:
        """The call that has gone longest without a sign of progress, in words, and for how many seconds; "", 0."""
        ...

    async def prepare(
        self, source: str, size: int, hidden: str, attrs: PfsAttrs, record: bytes, deadline_s: float,
        *, digest: bytes = b"",
    ) -> None:  # fmt: skip
        """Copy the first ``size`` bytes of a file to ``.cachexfs/tmp/<hidden>``, with a recovery record; fsync both.

        A temporary of that name is removed first, so that a late writer of an abandoned child does not touch
        the new one. An error of fsync is final: the temporary is removed before it is raised.
        """
        ...

    async def discard(self, hidden: str, deadline_s: float) -> None:
        """Remove a prepared file and its record: it is not to land any more."""
        ...

    async def prepared(self, deadline_s: float) -> Sequence[PreparedFile]:
        """Every recovery record beside prepared files, of all nodes, also without its file."""
        ...

    async def land(self, hidden: str, path: bytes, attrs: PfsAttrs, deadline_s: float) -> PfsStat:
        """Rename a prepared file into place, or to ``.cachexfs/held/<name>``, set attributes, fsync the directory;
        returns the stat of the result."""
        ...

    async def run(self, kind: str, path: bytes, path2: bytes, attrs: PfsAttrs | None, deadline_s: float) -> None:
        """mkdir, rename, unlink, rmdir, symlink (path2: the target), attr (path2: where an earlier call may still
        set them; refused with EBUSY while it may), hide (path2: a hidden name), unhide."""
        ...

    async def stat(self, path: bytes, deadline_s: float) -> PfsStat:
        """lstat."""
        ...

    async def stats(self, paths: Sequence[bytes], deadline_s: float) -> list[PfsStat | int | None]:
        """lstat of many paths in one call: for each a stat, None where it is certainly not there, an errno."""
        ...

    async def check(self, path: bytes, size: int, digest: bytes, deadline_s: float) -> PfsStat | None:
        """The stat of a file whose ``size`` bytes have this xxh3_128; None where they have not. Reads all of it."""
        ...

    async def listing(self, path: bytes, deadline_s: float) -> list[tuple[bytes, PfsStat]]:
        """Names and stats of a directory, without ``.cachexfs``."""
        ...

    async def xattrs(self, path: bytes, deadline_s: float) -> dict[bytes, Xattrs]:
        """The user's extended attributes (without ours) of the files and directories in a directory that have some."""
        ...

    async def read(
        self, path: bytes, offset: int, length: int, deadline_s: float, expected: Landed | None = None
    ) -> bytes:
        """Bytes of a file on the PFS. OSError with ``core.landed.CHANGED`` when it is not the one that is expected."""
        ...

    async def fetch(
        self, path: bytes, offset: int, length: int, target: str, deadline_s: float, expected: Landed | None = None
    ) -> int:
        """Copy bytes of a file on the PFS to the same place of a local file; returns how many there were.

        ``expected`` as for ``read``.
        """
        ...

    async def statvfs(self, deadline_s: float) -> tuple[int, int, int, int, int]:
        """(block size, blocks, free blocks, files, free files)."""
        ...


class Clock(Protocol):
    """Time, so that a simulation can own it."""

    def now_s(self) -> float:
        """Seconds since the epoch by the reference node's clock (own clock plus the measured offset)."""
        ...

    def now_ns(self) -> int:
        """The same in ns, for mtimes."""
        ...


@dataclass(frozen=True, slots=True)
class Synced:
    """An fsync has made ``version`` of a file in progress, of ``size`` bytes, safe at the holders of ``copies``."""

    version: int
    size: int
    copies: tuple[Copy, ...]


class ContentSource(Protocol):
    """What open files need of the other parts of the engine."""

    def new_stage(self, fid: int, gen: int) -> str:
        """A fresh stage key."""
        ...

    def path(self, fid: int) -> bytes | None:
        """Path of a file relative to the mount; None without a name."""
        ...

    async def read(self, fid: int, content: Generation, offset: int, length: int) -> bytes:
        """Verified bytes of a published content from wherever they are. Raises ``FsError`` (EIO, ESTALE)."""
        ...

    async def fetch_into(
        self, fid: int, content: Generation, fd: int, length: int, grown: Callable[[], None] = ...
    ) -> None:
        """Copy the first bytes of a published content into a file. ``grown`` is called after each piece."""
        ...

    def grown(self, vnode: Vnode) -> None:
        """A file in progress has changed: its complete blocks may be sent ahead."""
        ...

    def make_room(self, length: int) -> bool:
        """Evict what is on the PFS until ``length`` bytes fit; False when they do not."""
        ...

    async def room_freed(self) -> None:
        """Return when staging may have more room than before."""
        ...

    async def ask_room(self, length: int) -> bool:
        """Wait a moment for the PFS's word on what could be evicted; whether ``make_room`` may do better now."""
        ...

    async def spill(self, length: int) -> bool:
        """Move published contents from memory to NVMe until ``length`` bytes fit; False when nothing moved."""
        ...

    def spill_soon(self, length: int) -> None:
        """Start that, without waiting for it."""
        ...

    async def spill_own(self, vnode: Vnode) -> bool:
        """Move a file in progress to NVMe; its ``change_lock`` is held. False when NVMe does not take it."""
        ...

    def can_spill(self, length: int) -> bool:
        """Whether NVMe would take ``length`` bytes."""
        ...

    def spill_refused(self, error: OSError) -> FsError:
        """What a call ends with for which NVMe has not done what it needs."""
        ...

    async def write_spilled(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> int:
        """Write to a file that lies on NVMe. Raises ``FsError`` (ENOSPC, EIO)."""
        ...

    async def sync_spilled(self, fd: int) -> None:
        """Return when NVMe has the bytes of a file. Raises ``FsError`` (ENOSPC, EIO)."""
        ...


class StagingArea(Protocol):
    """Files in this node's memory, one per content. Calls are cheap and synchronous; errors are ``OSError``."""

    store: str
    used_bytes: int
    limit_bytes: int
    grown_bytes: int
    spilled_bytes: int
    spill_limit_bytes: int

    @property
    def spare_bytes(self) -> int:
        """Memory that is kept for the next files."""
        ...

    def spare_room_bytes(self) -> int:
        """How much more may be kept: within the limit, and leaving the node as much as it takes."""
        ...

    def spare_begin(self) -> tuple[int, int]:
        """(descriptor, number) of a new spare file, to be filled."""
        ...

    def spare_end(self, number: int, length: int) -> None:
        """The first ``length`` bytes of it have been touched."""
        ...

    def path(self, stage: str) -> str:
        """Path of a staged file."""
        ...

    def create(self, stage: str, *, spilled: bool = False) -> int:
        """Descriptor of a new empty file; ``spilled``: on NVMe."""
        ...

    def open_file(self, stage: str, *, write: bool = False) -> int:
        """Descriptor of a staged file. Raises ``FileNotFoundError``."""
        ...

    def has(self, stage: str) -> bool:
        """Whether there is such a file."""
        ...

    def size(self, stage: str) -> int:
        """Its length; 0 when somebody has removed it."""
        ...

    def exchange(self, one: str, two: str) -> None:
        """Let two staged files have each other's key, in one step."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Give a staged file another key, in one step."""
        ...

    def make_ready(self, length: int) -> None:
        """Files are about to grow by ``length`` bytes: spare memory for it becomes free."""
        ...

    def forget_ready(self) -> None:
        """Nobody grows now."""
        ...

    def free_bytes(self, wanted_bytes: int) -> int:
        """What files in memory can grow by before the kernel refuses; spare memory is given up for ``wanted_bytes``."""
        ...

    def is_spilled(self, stage: str) -> bool:
        """Whether a staged file lies on NVMe."""
        ...

    def spill_room_bytes(self) -> int:
        """What may still be spilled; 0 without NVMe. Raises ``OSError``."""
        ...

    def spill_begin(self, stage: str) -> int:
        """Descriptor of an empty file on NVMe that is to take a staged file's bytes. Raises ``OSError``."""
        ...

    def spill_end(self, stage: str, *, keep: bool) -> None:
        """From now on the staged file is the one on NVMe (or not: it stays where it was). What was removed since
        ``spill_begin`` counts until then."""
        ...

    def recount(self, stage: str, fd: int) -> None:
        """Account for an open file after it changed."""
        ...

    def remove(self, stage: str) -> None:
        """Give its memory back."""
        ...

    def stages(self) -> list[str]:
        """All keys."""
        ...


class ReplicaHolder(Protocol):
    """Copies that this node's NVMe holds for others."""

    store: str

    def path(self, stage: str, size: int) -> str | None:
        """Path of a committed copy of at least ``size`` bytes; None without one."""
        ...

    def manifest(self, stage: str) -> bytes | None:
        """The encoded manifest of a committed copy; None without one."""
        ...

    def stages(self) -> list[str]:
        """Keys of all committed copies."""
        ...

    async def drop(self, stage: str) -> None:
        """Remove a copy."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of NVMe in use."""
        ...


class FormatReader(Protocol):
    """Finds out what a checkpoint consists of where that takes long, or where nobody knows who wrote it."""

    async def describe(
        self, sizes: Mapping[bytes, int], read: Callable[[bytes, int, int], Awaitable[bytes]]
    ) -> Members | None:
        """``formats.describe`` of the files ``sizes`` (paths relative to the checkpoint directory -> bytes), whose
        bytes come from ``read(name, offset, length)``, at most so many, fewer only at the end.

        The event loop stays free. Raises ``FormatError``, also where a limit of memory or processor time is met,
        ``CannotTellError`` when it may succeed later, and what ``read`` raises.
        """
        ...
