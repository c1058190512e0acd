"""The order in which pending changes may land on the PFS (promise 3).

Role: pure. ``PendingOrder`` mirrors the catalogue's pending operations and answers one question: which
operation with a smaller revision must land before this one? Every node asks it of its own operations only and
never waits for a larger revision, so waits cannot form a circle. Of several it names the last one: they land about in
order, and if all that wait named the first, each landing would look at all of them. An answer looks at the queues of a
path and the directories above it, however many operations are pending.

- Changes of one path, or of a path and its ancestor, keep their order.
- A rename or rmdir waits for earlier changes below its paths.
- A file's content waits for earlier renames of any of its names (hard links): whether such a rename has been is seen by
  the file that lies there, which that content replaces.
- A commit operation waits for all earlier changes in or below its directory, a pointer also for those at or
  below its target.
- A removal waits for all that was written, renamed or linked before it, wherever that is: what rotates its checkpoints
  removes the last but one once the last one is written, and the PFS is to have one of them at every moment.
- Everything in or below a directory waits for an earlier change of a ``*-unfinished`` name in it, and for an
  earlier removal, renaming or withdrawal of a commit file in it that lists members.

Directory attributes (``DIRATTR``) are not ordered: they come when nothing in or below is pending.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Protocol

from cachexfs.core.commitfiles import is_unfinished_marker
from cachexfs.core.records import Op, OpKind

Seq = tuple[int, bytes]  # (creation revision, key): the order of visibility
GONE_MIN = 64
_REMOVALS = (OpKind.UNLINK, OpKind.WITHDRAW)
_MAKES = (OpKind.PUT, OpKind.RENAME, OpKind.LINK, OpKind.SYMLINK, OpKind.RESTORE)


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


def waits_for_others(op: Op) -> bool:
    """Whether an operation waits for changes of other paths."""
    return op.commit or op.kind in _REMOVALS


class Passing(Protocol):
    """Keys that somebody does not wait for. ``hints``: by queue, up to where it has been looked through."""

    hints: dict[tuple[int, bytes], Seq]

    def __contains__(self, key: bytes) -> bool: ...


class _Queue:
    """Members in increasing order; what is gone is passed over, and forgotten now and then."""

    __slots__ = ("_items", "_live")

    def __init__(self) -> None:
        self._items: list[Seq] = []
        self._live: set[Seq] = set()

    def add(self, seq: Seq) -> None:
        if seq in self._live:
            return
        if self._items and seq < self._items[-1]:
            self._items = sorted({*self._items, seq})
        else:
            self._items.append(seq)
        self._live.add(seq)

    def discard(self, seq: Seq) -> bool:
        """Remove; returns whether the queue is now empty."""
        items, live = self._items, self._live
        live.discard(seq)
        while items and items[-1] not in live:
            items.pop()
        if len(items) > 3 * len(live) + GONE_MIN:
            self._items = [seq for seq in items if seq in live]
        return not live

    def between(self, start: Seq | None, end: Seq | None = None) -> Iterator[Seq]:
        """Those after ``start`` (None: all) and before ``end`` (None: to the last), in order."""
        items, live = self._items, self._live
        low = 0 if start is None else bisect_right(items, start)
        for at in range(low, len(items) if end is None else bisect_left(items, end)):
            if items[at] in live:
                yield items[at]

    def last(self, before: Seq | None, passing: Passing | None = None, since: Seq | None = None) -> Seq | None:
        """The largest before ``before`` (None: of all), but for those in ``passing`` or before ``since``."""
        items, live = self._items, self._live
        low = 0 if since is None else bisect_left(items, since)
        for at in range((len(items) if before is None else bisect_left(items, before)) - 1, low - 1, -1):
            if items[at] in live and (passing is None or items[at][1] not in passing):
                return items[at]
        return None


class PendingOrder:
    """Index of pending operations by path."""

    def __init__(self) -> None:
        self._ops: dict[bytes, tuple[Seq, Op]] = {}
        self._at: dict[bytes, _Queue] = {}
        self._under: dict[bytes, _Queue] = {}
        self._made: dict[bytes, _Queue] = {}  # under the root: what brings files or gives them their names
        self._first: dict[bytes, _Queue] = {}  # of a directory: what comes before anything later in or below it
        self._awaited: dict[bytes, _Queue] = {}  # what a commit operation waits for -> these
        self._listing: dict[bytes, _Queue] = {}  # directory -> what lands a commit file that lists members there
        self._puts: dict[int, _Queue] = {}  # file id -> its contents
        self._moves: dict[int, _Queue] = {}  # file id -> renames of its names

    def __len__(self) -> int:
        return len(self._ops)

    def add(self, key: bytes, created: int, op: Op) -> None:
        """Take in a pending operation, or its changed record (its place stays that of its creation)."""
        if key in self._ops:
            (created, _), before = self._ops[key]
            if (before.kind, *paths_of(before)) == (op.kind, *paths_of(op)):
                self._ops[key] = ((created, key), op)
                return
            self.remove(key)  # it is another change by now: see ``mending``
        seq = (created, key)
        self._ops[key] = (seq, op)
        for table, path in self._places(op):
            table.setdefault(path, _Queue()).add(seq)
        if (files := self._of_files(op)) is not None:
            files.setdefault(op.fid, _Queue()).add(seq)

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
        if (files := self._of_files(op)) is not None and files[op.fid].discard(seq):
            del files[op.fid]

    def _of_files(self, op: Op) -> dict[int, _Queue] | None:
        return self._puts if op.kind == OpKind.PUT else self._moves if op.kind == OpKind.RENAME else None

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
            return self._last_of((self._under, op.path), (self._at, op.path), before=None)
        for path in paths_of(op):
            last = self._last_of((self._at, path), before=seq)
            for directory in ancestors(path) if last is None else ():
                last = self._last_of((self._at, directory), (self._first, directory), before=seq)
                if last is not None:
                    break
            if last is None and op.kind in (OpKind.RENAME, OpKind.RMDIR):
                last = self._last_of((self._under, path), before=seq)
            if last is not None:
                return last
        if op.kind == OpKind.PUT and op.fid in self._moves and (move := self._moves[op.fid].last(seq)) is not None:
            return move[1]
        return self._commit_blocker(seq, op, passing) if waits_for_others(op) else None

    def _commit_blocker(self, seq: Seq, op: Op, passing: Passing | None) -> bytes | None:
        places = [(self._under, op.below)] if op.commit else []
        if op.kind in _REMOVALS:
            places.append((self._made, b""))
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

    def next_put(self, key: bytes) -> bytes | None:
        """The next pending content of the file that the PUT ``key`` is of; None also when it is not pending."""
        if key not in self._ops:
            return None
        seq, op = self._ops[key]
        found = next(self._puts[op.fid].between(seq), None)
        return None if found is None else found[1]

    def puts_before(self, key: bytes) -> list[bytes]:
        """Of the contents before the PUT ``key`` of the same file the first and the last."""
        seq, op = self._ops[key]
        queue = self._puts[op.fid]
        found = (next(queue.between(None, seq), None), queue.last(seq))
        return list(dict.fromkeys(earlier[1] for earlier in found if earlier is not None))

    def after(self, key: bytes, directory: bytes) -> Iterator[tuple[Seq, Op]]:
        """Operations in or below a directory later than ``key``, in order."""
        queue = self._under.get(directory)
        for seq in queue.between(self._ops[key][0]) if queue is not None else ():
            yield seq, self._ops[seq[1]][1]

    def next_at(self, key: bytes) -> Op | None:
        """The next operation after ``key`` on the very same path."""
        seq, op = self._ops[key]
        later = (self._ops[other][1] for _, other in self._at[op.path].between(seq))
        return next((found for found in later if found.path == op.path), None)

    def changes_after(self, key: bytes, path: bytes) -> bool:
        """Whether an operation after ``key`` changes this very path. False when ``key`` is not pending any more."""
        queue = self._at.get(path) if key in self._ops else None
        return queue is not None and next(queue.between(self._ops[key][0]), None) is not None

    def put_after(self, key: bytes, path: bytes) -> bool:
        """Whether a later content of the file that ``key`` is about is going to land at this very path.

        False when ``key`` is not pending any more: another node may have carried it out.
        """
        if key not in self._ops or path not in self._at:
            return False
        seq, op = self._ops[key]
        later = (self._ops[other][1] for _, other in self._at[path].between(seq))
        return any(put.kind == OpKind.PUT and put.fid == op.fid for put in later)

    def at_or_below(self, path: bytes) -> Iterator[tuple[bytes, Op]]:
        """Operations on a path and on what lies below it, in order."""
        found = {seq for queue in self._queues((self._at, path), (self._under, path)) for seq in queue.between(None)}
        return ((key, self._ops[key][1]) for _, key in sorted(found))

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
        places = [(table, above) for above in (path, *ancestors(path)) for table in (self._at, self._awaited)]
        queues = self._queues(*places, (self._under, path))
        return any(next(queue.between(start, end), None) is not None for queue in queues)

    def moved_between(self, path: bytes, low: bytes, high: bytes) -> bool:
        """Whether an operation between two pending ones gives what lies at ``path`` another name."""
        start, end = self._ops[low][0], self._ops[high][0]
        queues = self._queues(*((self._at, above) for above in (path, *ancestors(path))))
        found = (self._ops[key][1] for queue in queues for _, key in queue.between(start, end))
        return any(op.kind in (OpKind.RENAME, OpKind.LINK) and covers(op.path, path) for op in found)

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
        while (found := self._next_about(names, seq)) is not None:
            seq, op = found
            there, named = lands_at(op), frozenset[bytes]()
            if _lands_list(op) and live(op.fid):
                named = frozenset(name for name in names if name != there and covers(op.below, name))
            if named:
                yield seq[1], named
            names = _names_after(op, put.fid, names)

    def _next_about(self, names: Iterable[bytes], after: Seq) -> tuple[Seq, Op] | None:
        """The first operation after ``after`` that changes one of these names, or claims it by a commit file."""
        above = {path for name in names for path in (name, *ancestors(name))}
        queues = self._queues(*((table, path) for path in above for table in (self._at, self._listing)))
        found = min((seq for queue in queues for seq in islice(queue.between(after), 1)), default=None)
        return None if found is None else self._ops[found[1]]

    def _queues(self, *places: tuple[dict[bytes, _Queue], bytes]) -> Iterator[_Queue]:
        return (queue for table, path in places if (queue := table.get(path)) is not None)

    def _last_of(self, *places: tuple[dict[bytes, _Queue], bytes], before: Seq | None) -> bytes | None:
        for queue in self._queues(*places):
            last = queue.last(before)
            if last is not None:
                return last[1]
        return None

    def _places(self, op: Op) -> list[tuple[dict[bytes, _Queue], bytes]]:
        if op.kind == OpKind.DIRATTR:
            return []
        places = [(self._made, b"")] if op.kind in _MAKES else []
        for path in paths_of(op):
            places.append((self._at, path))
            places += [(self._under, directory) for directory in ancestors(path)]
            if is_unfinished_marker(path.rpartition(b"/")[2]) or (path == op.path and _takes_claim(op)):
                places.append((self._first, parent_of(path)))
        if op.commit:
            places.append((self._awaited, op.below))
        if op.target is not None:
            places.append((self._awaited, op.target))
        if _lands_list(op):
            places.append((self._listing, op.below))
        return places


def _lands_list(op: Op) -> bool:
    """Whether an operation lands a commit file that lists members."""
    lands = op.commit and op.kind in (OpKind.PUT, OpKind.RENAME, OpKind.LINK)
    return lands and lists_members(lands_at(op).rpartition(b"/")[2])


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
