"""Queued functions as one etcd transaction.

Role: adaptor without I/O. ``compute`` runs functions on one ``Tx`` and stops before a limit; ``Batch.request`` is the
transaction: the guards as conditions, the changes, and two keys of our own. ``head`` is put by every
transaction of every node, so that its revision is that of the last mutation. ``q/<node>`` holds the id of
the node's last batch and is a condition too: of a batch that was sent twice, one succeeds, and one that
comes late does not. Nor does a refusal meet the success of an earlier attempt. Called by ``catalogue_etcd``,
between two awaits.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import trio

from cachexfs.core.records import encode
from cachexfs.core.replica import Replica
from cachexfs.core.transaction import Guard, Tx, Write
from cachexfs.errors import FsError

T = TypeVar("T")

HEAD_KEY = b"head"
FENCE_PREFIX = b"q/"
#: Functions in one transaction: enough to amortise the exchange, few enough to keep a conflict cheap.
CALLS_MAX = 256
#: etcd refuses requests above 1.5 MiB by default; values grow by a third in the gateway's JSON, not in etcd.
VALUE_BYTES_MAX = 1 << 20
#: Operations of our own in each transaction: ``head`` and ``q/<node>``.
_OWN_OPS = 2


class Call(Generic[T]):
    """A function that waits for its transaction. ``settle`` and ``fail`` count once; later ones do nothing."""

    def __init__(self, function: Callable[[Tx], T]) -> None:
        self.function = function
        self.done = trio.Event()
        self._value: object = None
        self._error: Exception | None = None

    def settle(self, outcome: Outcome) -> None:
        """End the wait with what a batch computed."""
        if not self.done.is_set():
            self._value, self._error = outcome.value, outcome.error
            self.done.set()

    def result(self) -> T:
        """What the function returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a function gave."""

    value: object = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Functions that were run on one transaction, with their outcomes. ``values`` are the encoded changes."""

    id: bytes
    calls: list[Call[object]]
    outcomes: list[Outcome]
    write: Write
    values: dict[bytes, bytes | None]

    @property
    def is_empty(self) -> bool:
        """Nothing was read under a guard and nothing is changed: there is nothing to ask etcd."""
        return not self.values and not self.write.guards

    def settle(self) -> None:
        """Give all callers their outcome."""
        for call, outcome in zip(self.calls, self.outcomes, strict=True):
            call.settle(outcome)

    def request(
        self, prefix: bytes, node: str, fence_revision: int, leases: dict[bytes, int], *, must_fence: bool
    ) -> dict[str, object]:
        """The transaction in the gateway's JSON. ``leases``: key -> lease to attach. With ``must_fence`` (an earlier
        batch may still be on its way) it moves the fence even if it changes nothing: a refusal is then final."""
        head, fence = prefix + HEAD_KEY, prefix + FENCE_PREFIX + node.encode()
        conditions = [_condition(kind, prefix + key, value) for (kind, key), value in self.write.guards.items()]
        look: list[dict[str, object]] = [{"request_range": {"key": fence}}, {"request_range": {"key": head}}]
        if not self.values and not must_fence:
            return {"compare": conditions, "success": look, "failure": look}
        conditions.append(_condition(Guard.MODIFIED, fence, fence_revision))
        changes: list[dict[str, object]] = [
            {"request_put": {"key": head, "value": b"."}},
            {"request_put": {"key": fence, "value": self.id}},
        ]
        for key, value in self.values.items():
            if value is None:
                changes.append({"request_delete_range": {"key": prefix + key}})
            else:
                put: dict[str, object] = {"key": prefix + key, "value": value}
                if key in leases:
                    put["lease"] = leases[key]
                changes.append({"request_put": put})
        return {"compare": conditions, "success": changes, "failure": look}


def compute(view: Replica, queue: Iterable[Call[object]], batch_id: bytes, ops_max: int, calls_max: int) -> Batch:
    """Run functions from the head of the queue on one transaction, in order, as many as fit.

    A function that does not fit alone fails with E2BIG.
    """
    tx = Tx(view)
    batch = Batch(batch_id, [], [], tx.write, {})
    for call in queue:
        if len(batch.calls) >= calls_max:
            break
        mark, guard_count = tx.mark(), len(tx.write.guards)
        outcome = _run(call, tx)
        if outcome.error is not None:
            tx.undo(mark)
        if tx.write.size + _OWN_OPS > ops_max:
            size = tx.write.size
            tx.undo(mark)
            for guard in list(tx.write.guards)[guard_count:]:
                del tx.write.guards[guard]
            if batch.calls:
                break
            outcome = Outcome(
                error=FsError(errno.E2BIG, f"a change of {size} keys; a transaction takes {ops_max - _OWN_OPS}")
            )
        batch.calls.append(call)
        batch.outcomes.append(outcome)
    for key, record in tx.write.puts.items():
        batch.values[key] = None if record is None else encode(record)
    if sum(len(value) for value in batch.values.values() if value) > VALUE_BYTES_MAX and len(batch.calls) > 1:
        return compute(view, batch.calls, batch_id, ops_max, len(batch.calls) // 2)
    return batch


def _run(call: Call[object], tx: Tx) -> Outcome:
    try:
        return Outcome(value=call.function(tx))
    except Exception as error:  # of the function, whatever it is: its caller's, and nobody else's
        return Outcome(error=error)


def _condition(kind: Guard, key: bytes, revision: int) -> dict[str, object]:
    if kind is Guard.MODIFIED:
        return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}
    if kind is Guard.CREATED:
        return {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": revision}
    # every key of the range (a missing one counts as created at 0) is at most as young as that revision
    return {
        "key": key,
        "range_end": range_end(key),
        "target": "CREATE",
        "result": "LESS",
        "create_revision": revision + 1,
    }


def range_end(prefix: bytes) -> bytes:
    """The first key behind all that start with ``prefix``, which does not end in 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
