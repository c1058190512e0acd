"""Transactions computed on a node's copy of the catalogue.

Role: pure. A ``Tx`` is an optimistic transaction: a function reads through it and writes into it, and what it read
becomes the conditions under which the catalogue accepts what it wrote. A function that raises ``FsError`` is undone,
but what it had read is kept, so that a refusal is checked like a success.

Concurrency: a transaction is computed between two awaits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from cachexfs.core.order import lists_members
from cachexfs.core.records import (
    AnyRecord,
    Dirent,
    Generation,
    Inode,
    Op,
    dirent_key,
    generation_key,
    inode_key,
    split_dirent_key,
)
from cachexfs.core.replica import Replica


class Guard(Enum):
    """What a transaction requires of a key: unchanged since read, still the same creation, an empty range."""

    MODIFIED = "modified"
    CREATED = "created"
    EMPTY = "empty"


@dataclass(slots=True)
class Write:
    """What a transaction asks of the catalogue.

    ``guards`` maps (kind, key or prefix) to the revision required (0: must not exist); for EMPTY to the last
    revision at which a key of that range may have been made (0: there is none).
    ``puts`` maps keys to bytes, None deletes. Order of application does not matter: keys are distinct.
    """

    guards: dict[tuple[Guard, bytes], int] = field(default_factory=dict)
    puts: dict[bytes, AnyRecord | None] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The larger of the number of conditions and of changes (an etcd limit applies to each)."""
        return max(len(self.guards), len(self.puts))


class Tx:
    """One optimistic transaction over a replica.

    ``read_*`` methods guard what they return. ``mark``/``undo`` let several functions share a transaction: a
    refused one takes its writes back and leaves its guards.
    """

    def __init__(self, view: Replica) -> None:
        self.view = view
        self.write = Write()
        self._child_overlay: dict[int, dict[bytes, Dirent | None]] = {}

    # ---- reading
    def read(self, key: bytes) -> AnyRecord | None:
        """The record of a key; the transaction holds only while it is unchanged."""
        if key in self.write.puts:
            return self.write.puts[key]
        entry = self.view.entry(key)
        self.write.guards[Guard.MODIFIED, key] = entry.modified if entry else 0
        return entry.record if entry else None

    def removed(self, prefix: bytes) -> list[bytes]:
        """The keys below ``prefix`` that this transaction removes."""
        return [key for key, record in self.write.puts.items() if record is None and key.startswith(prefix)]

    def peek(self, key: bytes) -> AnyRecord | None:
        """The record of a key, without a guard: its value may change before the transaction holds."""
        if key in self.write.puts:
            return self.write.puts[key]
        entry = self.view.entry(key)
        return entry.record if entry else None

    def require_same(self, key: bytes) -> None:
        """The transaction holds only while the key exists and has not been removed and made again."""
        if key in self.write.puts:
            return
        entry = self.view.entry(key)
        self.write.guards[Guard.CREATED, key] = entry.created if entry else 0

    def require_empty(self, prefix: bytes) -> bool:
        """Whether no key starts with ``prefix``; the transaction holds only while that answer does.

        This transaction's own changes count: a directory whose last name it removes is empty.
        """
        if any(record is not None and key.startswith(prefix) for key, record in self.write.puts.items()):
            return False
        known = self.view.below(prefix)
        witness = next((key for key in known if key not in self.write.puts), None)
        if witness is None:
            self.write.guards[Guard.EMPTY, prefix] = self.view.revision if known else 0
            return True
        self.read(witness)
        return False

    def inode(self, fid: int) -> Inode | None:
        """Guarded ``Inode``."""
        record = self.read(inode_key(fid))
        return record if isinstance(record, Inode) else None

    def generation(self, fid: int) -> Generation | None:
        """Guarded ``Generation``."""
        record = self.read(generation_key(fid))
        return record if isinstance(record, Generation) else None

    def dirent(self, parent: int, name: bytes) -> Dirent | None:
        """Guarded ``Dirent``."""
        record = self.read(dirent_key(parent, name))
        return record if isinstance(record, Dirent) else None

    def children(self, parent: int) -> dict[bytes, Dirent]:
        """Entries of a directory including this transaction's own changes, without a guard."""
        found = dict(self.view.children(parent))
        for name, record in self._child_overlay.get(parent, {}).items():
            if record is None:
                found.pop(name, None)
            else:
                found[name] = record
        return found

    def listers(self, parent: int) -> list[bytes]:
        """Names of a directory's commit files that list their members, including this transaction's own changes."""
        changed = self._child_overlay.get(parent, {})
        found = [name for name in self.view.listers(parent) if changed.get(name, _SAME) is not None]
        return found + [n for n, new in changed.items() if new is not None and n not in found and lists_members(n)]

    def names_of(self, fid: int) -> list[tuple[int, bytes]]:
        """(parent, name) pairs of a file, including this transaction's own changes."""
        found = [(p, n) for p, n in self.view.names_of(fid) if self._child_overlay.get(p, {}).get(n, _SAME) is _SAME]
        for parent, names in self._child_overlay.items():
            found += [(parent, n) for n, record in names.items() if record is not None and record.fid == fid]
        return found

    def ops_of(self, fid: int) -> list[tuple[bytes, Op]]:
        """Pending operations of a file id including this transaction's own, oldest first, each guarded."""
        found = [(key, op) for key, _ in self.view.ops_of(fid) if isinstance(op := self.read(key), Op)]
        for key, record in self.write.puts.items():
            if isinstance(record, Op) and record.fid == fid and self.view.op(key) is None:
                found.append((key, record))
        return found

    def latest_ops_of(self, fid: int) -> Iterator[tuple[bytes, Op]]:
        """The same, newest first; only what is asked for is looked at, and guarded."""
        own = [(key, op) for key, op in self.write.puts.items() if isinstance(op, Op) and op.fid == fid]
        yield from reversed([(key, op) for key, op in own if self.view.op(key) is None])
        for key, _ in self.view.latest_ops_of(fid):
            if isinstance(op := self.read(key), Op):
                yield key, op

    def has_ops(self, fid: int) -> bool:
        """Whether anything of a file is pending; a yes holds while the newest of it is."""
        return next(self.latest_ops_of(fid), None) is not None

    # ---- writing
    def put(self, key: bytes, record: AnyRecord) -> None:
        """Set a key."""
        self.write.puts[key] = record
        if isinstance(record, Dirent):
            parent, name = split_dirent_key(key)
            self._child_overlay.setdefault(parent, {})[name] = record

    def delete(self, key: bytes) -> None:
        """Remove a key (nothing happens when it does not exist)."""
        self.write.puts[key] = None
        if key.startswith(b"d/"):
            parent, name = split_dirent_key(key)
            self._child_overlay.setdefault(parent, {})[name] = None

    def mark(self) -> tuple[dict[bytes, AnyRecord | None], dict[int, dict[bytes, Dirent | None]]]:
        """State to return to with ``undo``."""
        return dict(self.write.puts), {k: dict(v) for k, v in self._child_overlay.items()}

    def undo(self, mark: tuple[dict[bytes, AnyRecord | None], dict[int, dict[bytes, Dirent | None]]]) -> None:
        """Take back all writes since ``mark``; guards stay."""
        self.write.puts, self._child_overlay = mark


_SAME = object()
