"""The small interfaces through which the engine touches the world.

Role: contracts. Each has one adaptor that is real and one that a simulation drives from a seed; the comments
here are what both promise and what the contract suites test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from cachexfs.core.formats import Members
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
    path: bytes  # as the copies' manifests have it


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
    cached_bytes: int
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

    def make_cache_ready(self, length: int) -> None:
        """The page cache is about to grow by ``length`` bytes: spare memory for it becomes free."""
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

    def reserve(self, stage: str, length: int) -> None:
        """A new file in memory is to grow by so much: the room is its own until it gets another key or is removed."""
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
