"""Help for tests of the core: one catalogue in memory, a namespace by paths, the order's rules said again."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from typing import TypeVar

from cachexfs.core import namespace, publication
from cachexfs.core.changes import Ctx, NewAttrs
from cachexfs.core.commitfiles import is_unfinished_marker
from cachexfs.core.order import lists_members
from cachexfs.core.publication import Content
from cachexfs.core.records import ROOT_FID, AnyRecord, Generation, Inode, Job, Op, OpKind, encode
from cachexfs.core.replica import Change, Replica
from cachexfs.core.transaction import Tx
from cachexfs.errors import FsError

T = TypeVar("T")
ATTRS = NewAttrs(0o644, 1000, 1000)
DIGEST = b"d" * 16


class Names:
    """A namespace with its pending operations: each change is one revision."""

    def __init__(self, replicas: int = 0) -> None:
        self.view = Replica()
        self.members: dict[tuple[int, int], Collection[bytes]] = {}
        self.time_ns = 1000
        self._fids = 1
        self._ops = 0
        self.mutate(lambda tx: namespace.join_root(tx, self.ctx(), NewAttrs(0o755, 0, 0), imported=True))
        self.mutate(lambda tx: tx.put(b"c/job", Job(1, ROOT_FID, "n0", replicas)))

    def ctx(self) -> Ctx:
        self.time_ns += 1000
        return Ctx(
            "n0", self.time_ns, self.time_ns / 1e9, self._next_op, self._new_fid,
            lambda fid, gen: self.members.get((fid, gen)),
        )  # fmt: skip

    def _next_op(self) -> str:
        self._ops += 1
        return f"{self._ops:08x}.n0"

    def _new_fid(self) -> int:
        self._fids += 1
        return self._fids * 4096

    def mutate(self, function: Callable[[Tx], T]) -> T:
        tx = Tx(self.view)
        result = function(tx)
        revision = self.view.revision + 1
        changes = []
        for key, record in tx.write.puts.items():
            old = self.view.entry(key)
            if record is None and old is None:
                continue
            value = None if record is None else encode(record)
            changes.append(Change(key, value, old.created if old else revision, revision))
        self.view.apply(revision, changes)
        return result

    # ---- by path
    def find(self, path: bytes) -> int:
        fid = ROOT_FID
        for name in path.split(b"/") if path else ():
            entry = self.view.lookup(fid, name)
            if entry is None:
                raise FsError(errno.ENOENT)
            fid = entry.fid
        return fid

    def at(self, path: bytes) -> tuple[int, bytes]:
        parent, _, name = path.rpartition(b"/")
        return self.find(parent), name

    def mkdir(self, path: bytes) -> int:
        return self.mutate(lambda tx: namespace.mkdir(tx, self.ctx(), *self.at(path), NewAttrs(0o755, 1, 1)))[0]

    def create(self, path: bytes) -> int:
        return self.mutate(lambda tx: namespace.create(tx, self.ctx(), *self.at(path), ATTRS))[0]

    def publish(self, path: bytes, size: int = 10, stage: str = "", target: bytes | None = None) -> int:
        fid = self.find(path)
        base = self.generation(fid).gen
        content = Content(size, DIGEST, DIGEST, stage or f"{fid:x}.{base + 1:x}.0", (), self.time_ns, target)
        made = self.mutate(lambda tx: publication.publish(tx, self.ctx(), fid, base, content))
        assert made is not None
        return made.gen

    def write(self, path: bytes, size: int = 10) -> int:
        """Create and publish; returns the file id."""
        fid = self.create(path)
        self.publish(path, size)
        return fid

    def unlink(self, path: bytes) -> int:
        return self.mutate(lambda tx: namespace.unlink(tx, self.ctx(), *self.at(path)))

    def rmdir(self, path: bytes) -> int:
        return self.mutate(lambda tx: namespace.rmdir(tx, self.ctx(), *self.at(path)))

    def rename(self, old: bytes, new: bytes, flags: int = 0) -> int | None:
        return self.mutate(lambda tx: namespace.rename(tx, self.ctx(), *self.at(old), *self.at(new), flags))

    def inode(self, path: bytes) -> Inode:
        found = self.view.inode(self.find(path))
        assert found is not None
        return found

    def generation(self, fid: int) -> Generation:
        found = self.view.generation(fid)
        assert found is not None
        return found

    def listing(self, path: bytes = b"") -> list[bytes]:
        return sorted(self.view.children(self.find(path)))

    def ops(self, *, attrs: bool = False) -> list[tuple[str, bytes]]:
        """(kind, path) of what is pending in order, without attribute changes unless asked for."""
        quiet = () if attrs else (OpKind.DIRATTR, OpKind.ATTR)
        return [(op.kind, op.path) for _, op, _ in self.view.ops() if op.kind not in quiet]

    def drained(self) -> None:
        """Everything pending has landed."""

        def land(tx: Tx) -> None:
            for key, op, _ in list(self.view.ops()):
                tx.delete(key)
                inode = tx.inode(op.fid)
                if inode is not None and op.kind in (OpKind.PUT, OpKind.SYMLINK):
                    tx.put(b"i/%x" % op.fid, on_pfs(inode))

        self.mutate(land)


def on_pfs(inode: Inode, hidden: str = "") -> Inode:
    """The same file, its current generation on the PFS."""
    import msgspec

    from cachexfs.core.records import PfsCopy

    return msgspec.structs.replace(inode, pfs=PfsCopy(inode.gen, 1.0, 1, inode.size, inode.mtime_ns, hidden))


# ---- the rules of promise 3, pair by pair
def covers(directory: bytes, path: bytes) -> bool:
    """Whether ``path`` lies at or below ``directory``."""
    return not directory or path == directory or path.startswith(directory + b"/")


def paths_of(op: Op) -> tuple[bytes, ...]:
    return (op.path, op.path2) if op.kind == OpKind.RENAME else (op.path,)


def must_wait(later: Op, earlier: Op) -> bool:
    """Whether ``later`` may land only after ``earlier`` has."""
    if earlier.kind == OpKind.DIRATTR:
        return False
    mine, theirs = paths_of(later), paths_of(earlier)
    for path in mine:
        for other in theirs:
            if covers(other, path):  # the same path, or an ancestor of it
                return True
            if later.kind in (OpKind.RENAME, OpKind.RMDIR) and covers(path, other):
                return True
            above, _, name = other.rpartition(b"/")
            leaves = earlier.kind == OpKind.WITHDRAW or (
                earlier.kind in (OpKind.UNLINK, OpKind.RENAME) and lists_members(name)
            )
            first = is_unfinished_marker(name) or (leaves and other == earlier.path)
            if first and path != above and covers(above, path):
                return True
    if later.kind == OpKind.PUT and earlier.kind == OpKind.RENAME and later.fid == earlier.fid:
        return True
    makes = (OpKind.PUT, OpKind.RENAME, OpKind.LINK, OpKind.SYMLINK, OpKind.RESTORE)
    if later.kind in (OpKind.UNLINK, OpKind.WITHDRAW) and earlier.kind in makes:
        return True
    if later.commit:
        if any(covers(later.below, other) and other != later.below for other in theirs):
            return True
        if later.target is not None and any(covers(later.target, other) for other in theirs):
            return True
    return False


def record_at(view: Replica, key: bytes) -> AnyRecord | None:
    entry = view.entry(key)
    return entry.record if entry is not None else None
