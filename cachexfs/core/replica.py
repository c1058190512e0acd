"""A node's copy of the catalogue.

Role: pure. ``Replica`` holds every record of the job with the revisions that the catalogue gave it, and the
indices that the filesystem reads: names by directory, parents, pending operations in order.

Concurrency: one task changes a replica (``apply``), any code of the trio thread reads it between two awaits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from cachexfs.core.order import ancestors, lists_members
from cachexfs.core.records import (
    JOB_KEY,
    ROOT_FID,
    AnyRecord,
    Dirent,
    DirTimes,
    Generation,
    Inode,
    Job,
    Life,
    Node,
    Op,
    OpKind,
    decode,
    encode,
    generation_key,
    inode_key,
    split_dirent_key,
    times_key,
)

Applied = list[tuple[bytes, AnyRecord | None, AnyRecord | None]]
"""(key, old record, new record) of each change of one revision; None: no such key before, or after."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A record with the revisions of its creation and last change.

    ``value``: inodes and generations stay encoded, for there are as many of them as files: decoded they take five times
    the memory, and decoding one takes about a microsecond. No entry takes part in garbage collection (``gc=False``),
    which would stop everything for half a second with a million of them.
    """

    value: bytes | AnyRecord
    created: int
    modified: int

    @property
    def record(self) -> AnyRecord:
        """The record; of an encoded one a new object each time."""
        return decode(self.value) if isinstance(self.value, bytes) else self.value

    @property
    def encoded(self) -> bytes:
        """The record as the catalogue stores it."""
        return self.value if isinstance(self.value, bytes) else encode(self.value)


@dataclass(frozen=True, slots=True)
class Change:
    """One key's new state at a revision; ``value`` None is a deletion."""

    key: bytes
    value: bytes | None
    created: int
    modified: int


_Name = tuple[int, bytes]
"""(parent, name)."""


class Replica:
    """All records of the job as of ``revision``, with indices."""

    def __init__(self) -> None:
        self.revision = 0
        self._entries: dict[bytes, Entry] = {}
        self._children: dict[int, dict[bytes, Dirent]] = {}
        self._parents: dict[int, _Name | dict[_Name, None]] = {}  # nearly every file has one name
        self._directories: dict[int, int] = {}  # one object for each id that many names have as their parent
        self._subdirs: dict[int, int] = {}
        self._ops: dict[bytes, Entry] = {}
        self._ops_of: dict[int, dict[bytes, None]] = {}
        self._renames: dict[bytes, dict[bytes, None]] = {}  # new path -> renames and links to it
        self._listers: dict[int, dict[bytes, None]] = {}
        self._failing: dict[bytes, None] = {}
        self._nodes: dict[str, Node] = {}
        self._lives: dict[str, Life] = {}

    # ---- reading
    def entry(self, key: bytes) -> Entry | None:
        """Record and revisions of a key."""
        return self._entries.get(key)

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> Iterable[tuple[bytes, Entry]]:
        """All keys with their entries (for snapshots)."""
        return self._entries.items()

    def below(self, prefix: bytes) -> list[bytes]:
        """Keys that start with ``prefix``. Quick for the names of a directory, else a walk through all keys."""
        if prefix.startswith(b"d/") and prefix.count(b"/") == 2 and prefix.endswith(b"/"):
            return [prefix + name for name in self._children.get(int(prefix[2:-1], 16), ())]
        return [key for key in self._entries if key.startswith(prefix)]

    def inode(self, fid: int) -> Inode | None:
        """Attributes of a file id."""
        found = self._entries.get(inode_key(fid))
        return record if found and isinstance(record := found.record, Inode) else None

    def has_inode(self, fid: int) -> bool:
        """Whether a file id is known."""
        return inode_key(fid) in self._entries

    def generation(self, fid: int) -> Generation | None:
        """Published content of a file id."""
        found = self._entries.get(generation_key(fid))
        return record if found and isinstance(record := found.record, Generation) else None

    def published_at(self, fid: int) -> int:
        """Revision at which the current generation was published, 0 without one."""
        found = self._entries.get(generation_key(fid))
        if found is None:
            return 0
        return (record.published if isinstance(record := found.record, Generation) else 0) or found.modified

    def dir_times(self, fid: int) -> DirTimes | None:
        """Times of a directory."""
        found = self._entries.get(times_key(fid))
        return record if found and isinstance(record := found.record, DirTimes) else None

    def lookup(self, parent: int, name: bytes) -> Dirent | None:
        """The entry ``name`` of directory ``parent``."""
        return self._children.get(parent, {}).get(name)

    def find(self, directory: int, path: bytes) -> int | None:
        """File id of a path relative to a directory."""
        for name in path.split(b"/"):
            entry = self.lookup(directory, name)
            if entry is None:
                return None
            directory = entry.fid
        return directory

    def children(self, parent: int) -> Mapping[bytes, Dirent]:
        """The entries of a directory, in order of creation."""
        return self._children.get(parent, {})

    def listers(self, parent: int) -> list[bytes]:
        """Names in a directory of commit files that list their members."""
        return list(self._listers.get(parent, ()))

    def names_of(self, fid: int) -> list[tuple[int, bytes]]:
        """(parent, name) of each name of a file; empty once it is removed."""
        found = self._parents.get(fid, ())
        return [found] if isinstance(found, tuple) and found else list(found)

    def ops(self) -> Iterator[tuple[bytes, Op, int]]:
        """Pending PFS operations in visibility order: (key, operation, creation revision)."""
        for key, entry in self._ops.items():
            op = entry.record
            assert isinstance(op, Op)
            yield key, op, entry.created

    def op(self, key: bytes) -> Op | None:
        """One pending operation."""
        found = self._ops.get(key)
        return record if found and isinstance(record := found.record, Op) else None

    def ops_of(self, fid: int) -> list[tuple[bytes, Op]]:
        """Pending operations of one file id, oldest first."""
        return [(key, op) for key in self._ops_of.get(fid, ()) if (op := self.op(key)) is not None]

    def has_ops(self, fid: int) -> bool:
        """Whether operations of a file id are pending."""
        return fid in self._ops_of

    def latest_ops_of(self, fid: int) -> Iterator[tuple[bytes, Op]]:
        """The same, newest first; no more of them are looked at than are asked for."""
        for key in reversed(self._ops_of.get(fid, {})):
            if (op := self.op(key)) is not None:
                yield key, op

    def subdirs(self, parent: int) -> int:
        """Number of directories in a directory."""
        return self._subdirs.get(parent, 0)

    def path(self, fid: int) -> bytes | None:
        """Path of a file id relative to the mount; None when it has no name."""
        parts = []
        while fid != ROOT_FID:
            names = self._parents.get(fid)
            if not names:
                return None
            fid, name = names if isinstance(names, tuple) else next(iter(names))
            parts.append(name)
        return b"/".join(reversed(parts))

    def inodes(self) -> Iterator[tuple[int, Inode]]:
        """All files and directories as of this call; a walk through everything."""
        for key, entry in list(self._entries.items()):
            if key.startswith(b"i/") and isinstance(record := entry.record, Inode):
                yield int(key[2:], 16), record

    def failing(self) -> Iterator[tuple[int, Inode]]:
        """Files and directories whose record has an error."""
        for key in self._failing:
            record = self._entries[key].record
            assert isinstance(record, Inode)
            yield int(key[2:], 16), record

    def is_moving(self, fid: int) -> bool:
        """Whether a link or rename of the file, or a rename above it, has not landed on the PFS yet."""
        if not self._renames:
            return False
        if any(op.kind == OpKind.LINK for _, op in self.ops_of(fid)):
            return True
        path = self.path(fid)
        return path is not None and any(above in self._renames for above in (path, *ancestors(path)))

    def pending_renames(self, path: bytes) -> Iterator[bytes]:
        """Keys of pending renames and links that bring a path, or a directory above it, to its name."""
        return (key for above in (path, *ancestors(path)) for key in self._renames.get(above, ()))

    def before_renames(self, path: bytes) -> list[bytes]:
        """A path, then what it was before each pending rename and link, taken back one by one from the last."""
        found, before = [path], None
        while self._renames:
            places = ((self._ops[key].created, key) for key in self.pending_renames(path))
            before = max((place for place in places if before is None or place < before), default=None)
            if before is None:
                break
            op = self._ops[before[1]].record
            assert isinstance(op, Op)
            path = op.path + path[len(op.path2) :]
            found.append(path)
        return found

    @property
    def op_count(self) -> int:
        """Number of pending PFS operations."""
        return len(self._ops)

    @property
    def nodes(self) -> Mapping[str, Node]:
        """The job's members that have registered."""
        return self._nodes

    def is_live(self, node: str) -> bool:
        """Whether the node's lease is alive."""
        return node in self._lives

    @property
    def lives(self) -> Mapping[str, Life]:
        """Nodes whose lease is alive."""
        return self._lives

    @property
    def job(self) -> Job | None:
        """What the nodes agree on; None before the first node wrote it."""
        found = self._entries.get(JOB_KEY)
        return record if found and isinstance(record := found.record, Job) else None

    # ---- changing
    def apply(self, revision: int, changes: Iterable[Change]) -> Applied:
        """Take over the changes of one revision; returns (key, old, new) of each.

        Raises ``ValueError`` for a value that is not a record or a revision that does not grow.
        """
        if revision < self.revision:
            raise ValueError(f"revision {revision} after {self.revision}")
        done = []
        for change in changes:
            old = self._entries.get(change.key)
            new = None if change.value is None else decode(change.value)
            before = old.record if old is not None else None
            if before is not None:
                self._unindex(change.key, before, keep=new)
            if new is None:
                self._entries.pop(change.key, None)
            else:
                # Equal revisions as one object: an integer takes as much as half an entry.
                modified = revision if change.modified == revision else change.modified
                created = modified if change.created == modified else change.created
                packed = change.value if isinstance(new, Inode | Generation) else None
                entry = Entry(packed or new, created, modified)
                self._entries[change.key] = entry
                self._index(change.key, entry, new)
            done.append((change.key, before, new))
        self.revision = revision
        return done

    def _index(self, key: bytes, entry: Entry, record: AnyRecord) -> None:
        if isinstance(record, Inode):
            if record.error:
                self._failing[key] = None
        elif isinstance(record, Dirent):
            parent, name = split_dirent_key(key)
            parent = self._directories.setdefault(parent, parent)
            self._children.setdefault(parent, {})[name] = record
            if lists_members(name):
                self._listers.setdefault(parent, {})[name] = None
            others = self._parents.get(record.fid)
            if others is None or others == (parent, name):
                self._parents[record.fid] = (parent, name)
            else:
                self._parents[record.fid] = {**_names(others), (parent, name): None}
            if record.kind == "d":
                self._subdirs[parent] = self._subdirs.get(parent, 0) + 1
        elif isinstance(record, Op):
            self._ops[key] = entry
            self._ops_of.setdefault(record.fid, {})[key] = None
            if record.kind in (OpKind.RENAME, OpKind.LINK):
                self._renames.setdefault(record.path2, {})[key] = None
        elif isinstance(record, Node):
            self._nodes[record.name] = record
        elif isinstance(record, Life):
            self._lives[record.node] = record

    def _unindex(self, key: bytes, record: AnyRecord, keep: AnyRecord | None) -> None:
        if isinstance(record, Inode):
            self._failing.pop(key, None)
        elif isinstance(record, Dirent):
            parent, name = split_dirent_key(key)
            siblings = self._children.get(parent, {})
            if keep is None:
                siblings.pop(name, None)
                if not siblings:
                    self._children.pop(parent, None)
                    self._directories.pop(parent, None)
                    self._listers.pop(parent, None)
                elif parent in self._listers:
                    self._listers[parent].pop(name, None)
            names = _names(self._parents.get(record.fid, {}))
            names.pop((parent, name), None)
            if len(names) == 1:
                self._parents[record.fid] = next(iter(names))
            elif names:
                self._parents[record.fid] = names
            else:
                self._parents.pop(record.fid, None)
            if record.kind == "d":
                self._subdirs[parent] -= 1
        elif isinstance(record, Op):
            if isinstance(keep, Op) and keep.fid == record.fid:
                # Replaced in place: the order of pending operations is that of their creation.
                if (keep.kind, keep.path2) != (record.kind, record.path2):
                    self._unindex_rename(key, record)
                return
            of_file = self._ops_of.get(record.fid, {})
            of_file.pop(key, None)
            if not of_file:
                self._ops_of.pop(record.fid, None)
            if keep is None:
                self._ops.pop(key, None)
            self._unindex_rename(key, record)
        elif keep is not None:
            return
        elif isinstance(record, Node):
            self._nodes.pop(record.name, None)
        elif isinstance(record, Life):
            self._lives.pop(record.node, None)

    def _unindex_rename(self, key: bytes, op: Op) -> None:
        if op.kind in (OpKind.RENAME, OpKind.LINK):
            keys = self._renames.get(op.path2, {})
            keys.pop(key, None)
            if not keys:
                self._renames.pop(op.path2, None)


def _names(found: _Name | dict[_Name, None]) -> dict[_Name, None]:
    return {found: None} if isinstance(found, tuple) else dict(found)
