"""Which pending operations may land, which wait for whom, and which are stuck.

Role: pure. Follows the pending operations of all nodes, and keeps of each the one that it waits for. *Stuck* is what
does not land for a reason that more waiting does not take away:

- a withdrawal that is held until the next commit file is ready,
- a file of which no copy is left,
- what the PFS has refused repeatedly (parked),
- what waits for one of these; a file only once it is ready under a hidden name.

Commit operations elsewhere, and removals, pass what is stuck. A commit file passes nothing that it names, and a pointer
nothing at or below its target: so none lands over a lost, parked or unready file. What must keep its order because of
its path never passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from cachexfs.core.commitfiles import is_commit_name, is_pointer_name
from cachexfs.core.order import PendingOrder, Seq, covers, lands_at, lists_members, paths_of, waits_for_others
from cachexfs.core.records import Op, OpKind

#: Names relative to its directory that a commit file, here the operation that lands it, lists; None: not known.
MembersOfOp = Callable[[Op], Collection[bytes] | None]


class Waits:
    """``lost``: whether no copy of a PUT's bytes is left. ``members``: what the commit file of an operation lists."""

    def __init__(self, lost: Callable[[Op], bool], members: MembersOfOp) -> None:
        self.order = PendingOrder()
        self._lost, self._members = lost, members
        self._blockers: dict[bytes, bytes] = {}
        self._waiters: dict[bytes, dict[bytes, None]] = {}
        self._stuck: dict[bytes, None] = {}
        self._hints: dict[bytes, dict[tuple[int, bytes], Seq]] = {}

    # ---- following: each returns the operations of which something has changed
    def put(self, key: bytes, created: int, op: Op) -> Collection[bytes]:
        """Take in an operation, or its changed record."""
        self.order.add(key, created, op)
        return self.look([key])

    def remove(self, key: bytes) -> Collection[bytes]:
        """An operation has landed or was given up."""
        self.order.remove(key)
        self._stuck.pop(key, None)
        self._hints.pop(key, None)
        self._wait(key, None)
        return self.look(self._waiters.pop(key, ()))

    def look(self, keys: Iterable[bytes]) -> Collection[bytes]:
        """Judge operations anew, and those that wait for one that is stuck now and was not, or the other way."""
        todo, changed = deque(keys), dict[bytes, None]()
        while todo:
            key = todo.popleft()
            op = self.order.op(key)
            if op is None:
                continue
            changed[key] = None
            blocker = self.blocker(key)
            self._wait(key, blocker)
            stuck = self._is_stuck(op, blocker)
            if stuck and key not in self._stuck:
                self._stuck[key] = None
                todo.extend(self._waiters.get(key, ()))
            elif not stuck and key in self._stuck:
                del self._stuck[key]
                todo.extend(self._waiters.get(key, ()))
        return changed

    def _wait(self, key: bytes, blocker: bytes | None) -> None:
        old = self._blockers.get(key)
        if old == blocker:
            return
        if old is not None:
            self._waiters.get(old, {}).pop(key, None)
        if blocker is None:
            self._blockers.pop(key, None)
        else:
            self._blockers[key] = blocker
            self._waiters.setdefault(blocker, {})[key] = None

    # ---- answers
    def blocker(self, key: bytes) -> bytes | None:
        """Key of an operation that must land before ``key``; None when it may land now (but see ``stuck``)."""
        op = self.order.op(key)
        if op is None or not waits_for_others(op) or not (self._stuck or key in self._hints):
            return self.order.blocker(key)
        return self.order.blocker(key, _Passing(self, op, self._hints.setdefault(key, {})))

    def stuck(self, key: bytes) -> bool:
        """Whether more waiting alone does not help an operation."""
        return key in self._stuck

    def is_held(self, key: bytes) -> bool:
        """Whether an operation waits, over others perhaps, for a withdrawal that is held."""
        op = self.order.op(key)
        while op is not None and not (op.kind == OpKind.WITHDRAW and op.held):
            if key not in self._stuck or key not in self._blockers:
                return False
            key = self._blockers[key]
            op = self.order.op(key)
        return op is not None

    def would_stick(self, key: bytes, other: bytes) -> bool:
        """Whether an operation would be stuck if ``other`` were held: it waits for that, over others perhaps."""
        op = self.order.op(key)
        while op is not None and (op.kind != OpKind.PUT or op.ready) and key in self._blockers:
            key = self._blockers[key]
            if key == other:
                return True
            op = self.order.op(key)
        return False

    def _is_stuck(self, op: Op, blocker: bytes | None) -> bool:
        if op.kind == OpKind.WITHDRAW and op.held:
            return True
        if op.parked or (op.kind == OpKind.PUT and not op.ready and self._lost(op)):
            return True
        if blocker is None or blocker not in self._stuck:
            return False
        return op.kind != OpKind.PUT or op.ready

    def claims(self, op: Op) -> Callable[[bytes], bool]:
        """Of the path of an operation: whether ``op`` claims that what lies there is whole."""
        if op.kind in (OpKind.UNLINK, OpKind.RMDIR):
            return _nothing
        name = lands_at(op).rpartition(b"/")[2]
        if op.kind == OpKind.SYMLINK or is_pointer_name(name):
            if op.kind in (OpKind.RENAME, OpKind.LINK):
                return _everything  # its content, and so its target, may have any age
            target = op.target
            return _nothing if target is None else lambda path: covers(target, path)
        if op.kind not in (OpKind.PUT, OpKind.RENAME, OpKind.LINK) or not is_commit_name(name):
            return _nothing if op.kind != OpKind.RESTORE else lambda path: covers(op.below, path)
        members = self._members(op) if lists_members(name) else None
        below, start = op.below, len(op.below) + 1 if op.below else 0
        return lambda path: covers(below, path) and (members is None or path[start:] in members)


class _Passing:
    """The stuck operations that a commit operation does not wait for. What it has passed once it does not wait for
    later, either: it may have landed by then."""

    def __init__(self, waits: Waits, op: Op, hints: dict[tuple[int, bytes], Seq]) -> None:
        self._waits, self._claims, self.hints = waits, waits.claims(op), hints

    def __contains__(self, key: bytes) -> bool:
        waits = self._waits
        if not waits.stuck(key):
            return False
        op = waits.order.op(key)
        return op is not None and not any(self._claims(path) for path in paths_of(op))


def _nothing(path: bytes) -> bool:
    return False


def _everything(path: bytes) -> bool:
    return True
