"""What the kernel waits for: the requests without an answer, in the order in which they came.

Role: the memory that outlives a daemon. Counts what it holds, numbers the requests that must be applied once, and
describes what is left to the next daemon. Concurrency: the supervisor's one thread. Called by ``pump`` and ``blame``.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import wire
from .messages import Replayed
from .payloads import SLOT_BYTES, PayloadMemory
from .replay import PID_MAX, REQUEST_ID_MAX, TABLE, Rule, describe

#: What unanswered requests may hold. Our daemon works on 256 at a time; beyond, the kernel keeps them. Bytes.
PENDING_BYTES_MAX = 640 << 20


def _memory() -> PayloadMemory:
    return PayloadMemory(PENDING_BYTES_MAX // SLOT_BYTES + 2)


class Pending:
    """Unanswered requests by the kernel's number (``unique``)."""

    def __init__(self) -> None:
        #: Where the bytes of large writes lie; one slot is the next request's.
        self.memory = _memory()
        self._requests: dict[int, bytes] = {}
        self._payloads: dict[int, tuple[int, int]] = {}
        self._ids: dict[int, int] = {}
        self._next_id = PID_MAX + 1
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[int]:
        """The kernel's numbers, oldest first."""
        return iter(self._requests)

    @property
    def is_full(self) -> bool:
        """Whether the kernel is to keep further ones."""
        return self._bytes > PENDING_BYTES_MAX or self.memory.is_exhausted

    @property
    def oldest(self) -> int:
        """The number of the oldest; 0 when there is none."""
        return next(iter(self._requests), 0)

    def add(self, unique: int, request: bytes) -> None:
        """The kernel waits for an answer to this."""
        before = self._requests.get(unique)
        self._requests[unique] = request
        self._bytes += len(request) - (0 if before is None else len(before))

    def add_write(self, unique: int, head: bytes, slot: int, length: int) -> None:
        """The kernel waits for the answer to a WRITE of the ``length`` bytes in a slot, which is ours until then."""
        self.add(unique, head)
        self._payloads[unique] = (slot, length)
        self._bytes += SLOT_BYTES

    def take(self, unique: int) -> bytes | None:
        """It is answered (of a large WRITE: its head); None: nobody waits for that."""
        request = self._requests.pop(unique, None)
        if request is not None:
            self._bytes -= len(request)
            if unique in self._payloads:
                self._bytes -= SLOT_BYTES
                self.memory.give(self._payloads.pop(unique)[0])
            else:
                self._ids.pop(unique, None)
        return request

    def write(self, unique: int) -> tuple[bytes, int, int] | None:
        """Head, slot and length of a large WRITE; None: nobody waits for it any more."""
        request = self._requests.get(unique)
        return None if request is None else (request, *self._payloads[unique])

    def identify(self, unique: int, view: bytearray) -> None:
        """Put a number of its own into a request, the same when it is repeated, in place of the caller's pid."""
        request_id = self._next_id
        self._next_id = request_id + 1 if request_id < REQUEST_ID_MAX else PID_MAX + 1
        self._ids[unique] = request_id
        wire.put_u32(view, wire.IN_PID_OFFSET, request_id)

    def renew_memory(self) -> None:
        """The bytes move to other memory: a daemon that does not die may read the old one at any time.

        ``OSError``: there is none, and nothing has changed.
        """
        old, new = self.memory, _memory()
        moved = {}
        for unique, (slot, length) in self._payloads.items():
            place = new.take()
            assert place is not None  # there are as many
            new.view(place)[:length] = old.view(slot)[:length]
            moved[unique] = place, length
        self.memory, self._payloads = new, moved
        old.close()

    def repeatable(self) -> list[bytes | int]:
        """What the next daemon is given again, oldest first: a message, or the number of a large WRITE."""
        rows = ((TABLE.get(wire.opcode_of(request)), unique, request) for unique, request in self._requests.items())
        again = [(u, request) for row, u, request in rows if row is None or row.rule in (Rule.AGAIN, Rule.ONCE)]
        return [unique if unique in self._payloads else request for unique, request in again]

    def described(self) -> list[Replayed]:
        """The rows of the next daemon's state file."""
        requests = self._requests.items()
        return [describe(request, self._ids.get(u, 0)) for u, request in requests if request[4] != wire.INIT]
