"""What the kernel waits for: the requests without an answer, in the order in which they came.

Role: the memory that outlives a daemon. Counts what it holds, numbers the requests that must be applied once, and
describes what is left to the next daemon. Concurrency: the supervisor's one thread. Called by ``pump`` and ``blame``.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import wire
from .messages import Replayed
from .replay import PID_MAX, REQUEST_ID_MAX, TABLE, Rule, describe

#: What a request that keeps its buffer holds: one huge page, room for ``wire.MESSAGE_BYTES_MAX``.
BUFFER_BYTES = 2 << 20
#: What unanswered requests may hold. Our daemon works on 256 at a time; beyond, the kernel keeps them. Bytes.
PENDING_BYTES_MAX = 640 << 20

Request = bytes | memoryview


def _held_bytes(request: Request) -> int:
    return len(request) if type(request) is bytes else BUFFER_BYTES


class Pending:
    """Unanswered requests by the kernel's number (``unique``)."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
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
        return self._bytes > PENDING_BYTES_MAX

    @property
    def oldest(self) -> int:
        """The number of the oldest; 0 when there is none."""
        return next(iter(self._requests), 0)

    def add(self, unique: int, request: Request) -> None:
        """The kernel waits for an answer to this."""
        before = self._requests.get(unique)
        self._requests[unique] = request
        self._bytes += _held_bytes(request) - (0 if before is None else _held_bytes(before))

    def take(self, unique: int) -> Request | None:
        """It is answered; None: nobody waits for that."""
        request = self._requests.pop(unique, None)
        if request is not None:
            self._bytes -= _held_bytes(request)
            self._ids.pop(unique, None)
        return request

    def identify(self, unique: int, view: memoryview) -> None:
        """Put a number of its own into a request, the same when it is repeated, in place of the caller's pid."""
        request_id = self._next_id
        self._next_id = request_id + 1 if request_id < REQUEST_ID_MAX else PID_MAX + 1
        self._ids[unique] = request_id
        wire.put_u32(view, wire.IN_PID_OFFSET, request_id)

    def repeatable(self) -> list[Request]:
        """What the next daemon is given again, oldest first."""
        requests = self._requests.values()
        rules = ((TABLE.get(wire.opcode_of(request)), request) for request in requests)
        return [request for row, request in rules if row is None or row.rule in (Rule.AGAIN, Rule.ONCE)]

    def described(self) -> list[Replayed]:
        """The rows of the next daemon's state file."""
        requests = self._requests.items()
        return [describe(request, self._ids.get(u, 0)) for u, request in requests if request[4] != wire.INIT]
