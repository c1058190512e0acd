"""The order in which pending changes may land on the PFS (promise 3).

Role: pure. ``PendingOrder`` mirrors the catalogue's pending operations and answers one question: which
operation with a smaller revision must land before this one? Every node asks it of its own operations only and
never waits for a larger revision, so waits cannot form a circle.

- Changes of one path, or of a path and its ancestor, keep their order.
- A rename or rmdir waits for earlier changes below its paths.
- A commit operation waits for all earlier changes in or below its directory, a pointer also for those at or
  below its target.
- Everything in or below a directory waits for an earlier change of a ``*-unfinished`` name in it, and for an
  earlier removal, renaming or withdrawal of a commit file in it that lists members.

Directory attributes (``DIRATTR``) are not ordered: they come when nothing in or below is pending.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Protocol

from cachexfs.core.commitfiles import is_unfinished_marker
from cachexfs.core.records import Op, OpKind

Seq = tuple[int, bytes]  # (creation revision, key): the order of visibility
GONE_MIN = 64


def parent_of(path: bytes) -> bytes:
    """Directory part of a relative path, empty for the root."""
    return path.rpartition(b"/")[0]


def ancestors(path: bytes) -> list[bytes]:
    """All proper ancestors of a relative path, the root (empty) last."""
    found = []
    while path:
        path = parent_of(path)
        found.append(path)
    return found


def lists_members(name: bytes) -> bool:
    """Whether a commit file of this name (last component) lists the files beside it that it needs."""
    return (
        name == b".metadata"
        or name.endswith(b".index.json")
        or (name.startswith(b"__") and name.endswith(b".metadata"))
    )


def _takes_claim(op: Op) -> bool:
    """Whether a commit file leaves its name by this operation: what it lists may change only afterwards."""
    if op.kind == OpKind.WITHDRAW:
        return True
    return op.kind in (OpKind.UNLINK, OpKind.RENAME) and lists_members(op.path.rpartition(b"/")[2])


class Passing(Protocol):
    """Keys that somebody does not wait for. ``hints``: by queue, up to where it has been looked through."""

    hints: dict[tuple[int, bytes], Seq]

    def __contains__(self, key: bytes) -> bool: ...


class _Queue:
    """Members in increasing order; smallest in amortised constant time."""

    __slots__ = ("_head", "_items", "_live")

    def __init__(self) -> None:
        self._items: list[Seq] = []
        self._live: set[Seq] = set()
        self._head = 0

    def add(self, seq: Seq) -> None:
        if seq in self._live:
            return
        if self._items and seq < self._items[-1]:
            self._items = sorted({*self._items[self._head :], seq})
            self._head = 0
        else:
            self._items.append(seq)
        self._live.add(seq)

    def discard(self, seq: Seq) -> bool:
        """Remove; returns whether the queue is now empty."""
        self._live.discard(seq)
        if len(self._items) - self._head > 2 * len(self._live) + GONE_MIN:  # ``last`` walks over those that are gone
            self._items, self._head = list(self.members()), 0
        return not self._live

    def members(self) -> Iterator[Seq]:
        """All, in order."""
        return (seq for seq in self._items[self._head :] if seq in self._live)

    def first(self) -> Seq | None:
        """The smallest."""
        items, live = self._items, self._live
        while self._head < len(items) and items[self._head] not in live:
            self._head += 1
        return items[self._head] if self._head < len(items) else None

    def last(self, before: Seq, passing: Passing | None = None, since: Seq | None = None) -> Seq | None:
        """The largest before ``before``, but for those in ``passing`` or before ``since``."""
        items, live = self._items, self._live
        low = self._head if since is None else bisect_left(items, since, self._head)
        for at in range(bisect_left(items, before, self._head) - 1, low - 1, -1):
            if items[at] in live and (passing is None or items[at][1] not in passing):
                return items[at]
        return None


class PendingOrder:
    """Index of pending operations by path."""

    def __init__(self) -> None:
        self._ops: dict[bytes, tuple[Seq, Op]] = {}
        self._at: dict[bytes, _Queue] = {}
        self._under: dict[bytes, _Queue] = {}
        self._first: dict[bytes, _Queue] = {}  # of a directory: what comes before anything later in or below it

    def __len__(self) -> int:
        return len(self._ops)

    def add(self, key: bytes, created: int, op: Op) -> None:
        """Take in a pending operation, or its changed record (its place stays that of its creation)."""
        if key in self._ops:
            self._ops[key] = (self._ops[key][0], op)
            return
        seq = (created, key)
        self._ops[key] = (seq, op)
        for table, path in self._places(op):
            table.setdefault(path, _Queue()).add(seq)

    def remove(self, key: bytes) -> None:
        """Forget an operation that landed or was given up."""
        found = self._ops.pop(key, None)
        if found is None:
            return
        seq, op = found
        for table, path in self._places(op):
            queue = table.get(path)
            if queue is not None and queue.discard(seq):
                del table[path]

    def blocker(self, key: bytes, passing: Passing | None = None) -> bytes | None:
        """Key of an operation that must land before ``key``; None when it may land now.

        ``passing``: operations that a commit operation does not wait for though they are in or below its directory (but
        because of their path it does): see ``waits``.
        """
        found = self._ops.get(key)
        if found is None:
            return None
        seq, op = found
        if op.kind == OpKind.DIRATTR:
            return self._first_of((self._under, op.path), (self._at, op.path), before=None)
        for path in paths_of(op):
            first = self._first_of((self._at, path), before=seq)
            for directory in ancestors(path) if first is None else ():
                first = self._first_of((self._at, directory), (self._first, directory), before=seq)
                if first is not None:
                    break
            if first is None and op.kind in (OpKind.RENAME, OpKind.RMDIR):
                first = self._first_of((self._under, path), before=seq)
            if first is not None:
                return first
        return self._commit_blocker(seq, op, passing) if op.commit else None

    def _commit_blocker(self, seq: Seq, op: Op, passing: Passing | None) -> bytes | None:
        """The last of all that a commit operation waits for.

        They land about in order, and each removal in a directory is a commit operation: if all waited for the first,
        each landing would look at all of them.
        """
        places = [(self._under, op.below)]
        if op.target is not None:
            places += [(self._under, op.target), (self._at, op.target)]
        for table, path in places:
            queue, place = table.get(path), (id(table), path)
            if queue is None:
                continue
            last = queue.last(seq, passing, None if passing is None else passing.hints.get(place))
            if last is not None:
                return last[1]
            if passing is not None:
                passing.hints[place] = seq  # what came before it is passed for good
        return None

    def op(self, key: bytes) -> Op | None:
        """A pending operation as it is now."""
        found = self._ops.get(key)
        return found[1] if found is not None else None

    def seq(self, key: bytes) -> Seq:
        """The place of a pending operation. Raises ``KeyError``."""
        return self._ops[key][0]

    def after(self, key: bytes, directory: bytes) -> Iterator[tuple[Seq, Op]]:
        """Operations in or below a directory later than ``key``, in order."""
        start, queue = self._ops[key][0], self._under.get(directory)
        for seq in queue.members() if queue is not None else ():
            if seq > start:
                yield seq, self._ops[seq[1]][1]

    def pending_below(self, path: bytes) -> bool:
        """Whether anything at or below a path is pending."""
        return path in self._under or path in self._at

    def pending_at(self, path: bytes) -> bool:
        """Whether a change of this very name is pending."""
        return path in self._at

    def commit_between(self, path: bytes, low: bytes, high: bytes) -> bool:
        """Whether an operation between two pending ones waits for what ``low`` lands at ``path``."""
        if low not in self._ops or high not in self._ops:
            return True
        start, end = self._ops[low][0], self._ops[high][0]
        for seq, op in self._ops.values():
            if not start < seq < end or op.kind == OpKind.DIRATTR:
                continue
            if any(covers(p, path) or covers(path, p) for p in paths_of(op)):
                return True
            if op.commit and covers(op.below, path):
                return True
            if op.target is not None and covers(op.target, path):
                return True
        return False

    def moved_between(self, path: bytes, low: bytes, high: bytes) -> bool:
        """Whether an operation between two pending ones gives what lies at ``path`` another name."""
        start, end = self._ops[low][0], self._ops[high][0]
        moves = [op for seq, op in self._ops.values() if start < seq < end and op.kind in (OpKind.RENAME, OpKind.LINK)]
        return any(covers(op.path, path) for op in moves)

    def claimed_after(self, key: bytes, live: Callable[[int], bool]) -> bool:
        """Whether a commit file that lists members is going to land later than the PUT ``key``, and waits for it.

        Asked of a file that has been removed meanwhile: only then its bytes must land all the same. ``live`` says
        whether a file id still has a name: a commit file without one is not going to land either.
        """
        return next(self.claimants(key, live), None) is not None

    def claimants(self, key: bytes, live: Callable[[int], bool]) -> Iterator[tuple[bytes, frozenset[bytes]]]:
        """These commit operations, each with the names that the file of ``key`` has at its time."""
        seq, put = self._ops[key]
        if lists_members(put.path.rpartition(b"/")[2]):
            return
        names = {put.path}
        later = [(other, op) for other, op in self._ops.values() if other > seq and op.kind != OpKind.DIRATTR]
        for other, op in sorted(later, key=lambda row: row[0]):
            there, named = lands_at(op), frozenset[bytes]()
            lists = op.commit and lists_members(there.rpartition(b"/")[2])
            if lists and op.kind in (OpKind.PUT, OpKind.RENAME, OpKind.LINK) and live(op.fid):
                named = frozenset(name for name in names if name != there and covers(op.below, name))
            if named:
                yield other[1], named
            names = _names_after(op, put.fid, names)
            if not names:
                return

    def _first_of(self, *places: tuple[dict[bytes, _Queue], bytes], before: Seq | None) -> bytes | None:
        for table, path in places:
            queue = table.get(path)
            first = queue.first() if queue is not None else None
            if first is not None and (before is None or first < before):
                return first[1]
        return None

    def _places(self, op: Op) -> list[tuple[dict[bytes, _Queue], bytes]]:
        if op.kind == OpKind.DIRATTR:
            return []
        places: list[tuple[dict[bytes, _Queue], bytes]] = []
        for path in paths_of(op):
            places.append((self._at, path))
            places += [(self._under, directory) for directory in ancestors(path)]
            if is_unfinished_marker(path.rpartition(b"/")[2]) or (path == op.path and _takes_claim(op)):
                places.append((self._first, parent_of(path)))
        return places


def _names_after(op: Op, fid: int, names: set[bytes]) -> set[bytes]:
    """What an operation leaves of the names of a file."""
    if op.kind == OpKind.RENAME:
        old, new = op.path, op.path2
        names = {
            new + name[len(old) :] if covers(old, name) else name for name in names if op.fid == fid or name != new
        }
    elif op.kind == OpKind.LINK and op.fid == fid:
        return names | {op.path2}
    elif op.kind == OpKind.UNLINK or (
        op.fid != fid and op.kind in (OpKind.PUT, OpKind.SYMLINK, OpKind.MKNOD, OpKind.LINK)
    ):
        return names - {lands_at(op)}
    return names


def paths_of(op: Op) -> tuple[bytes, ...]:
    """The paths that an operation changes."""
    return (op.path, op.path2) if op.kind in (OpKind.RENAME, OpKind.LINK) else (op.path,)


def lands_at(op: Op) -> bytes:
    """The path at which an operation makes something."""
    return op.path2 if op.kind in (OpKind.RENAME, OpKind.LINK) else op.path


def covers(directory: bytes, path: bytes) -> bool:
    """Whether ``path`` is ``directory`` or lies below it."""
    return not directory or path == directory or path.startswith(directory + b"/")
