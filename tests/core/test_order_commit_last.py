"""Namespace and order together: whatever the changes and whenever each may land, the PFS never lies and ends right.

A PFS of plain dictionaries takes the pending operations in any order that ``PendingOrder`` allows, interleaved with
the changes. No engine: what fails here is a rule.
"""

from __future__ import annotations

import random

import pytest
from core_support import Names

from cachexfs.core.order import PendingOrder
from cachexfs.core.records import Op, OpKind
from cachexfs.errors import FsError

Node = tuple[str, object]
MEMBERS = [b"m0", b"m1"]
SEEDS = 800


class PlainPfs:
    """Paths and what lies there: ("d", None), ("f", (fid, gen)), ("l", target)."""

    def __init__(self) -> None:
        self.tree: dict[bytes, Node] = {}

    def below(self, path: bytes) -> list[bytes]:
        return [p for p in self.tree if p.startswith(path + b"/")]

    def land(self, op: Op, *, removed: bool) -> None:
        parent = op.path.rpartition(b"/")[0]
        if op.kind in (OpKind.PUT, OpKind.MKDIR, OpKind.SYMLINK):
            assert not parent or self.tree.get(parent) == ("d", None), f"{op} without its directory"
        if op.kind == OpKind.PUT:
            self.tree[op.path] = ("f", (op.fid, op.gen))
        elif op.kind == OpKind.MKDIR:
            self.tree.setdefault(op.path, ("d", None))
        elif op.kind == OpKind.SYMLINK:
            self.tree[op.path] = ("l", op.path2)
        elif op.kind in (OpKind.UNLINK, OpKind.WITHDRAW):
            self.tree.pop(op.path, None)
        elif op.kind == OpKind.RENAME and removed and self.tree.get(op.path, ("", None))[0] != "d":
            self.tree.pop(op.path2, None)
            self.tree.pop(op.path, None)
        elif op.kind == OpKind.RMDIR:
            assert not self.below(op.path), f"{op}: {self.below(op.path)}"
            self.tree.pop(op.path, None)
        elif op.kind == OpKind.RENAME:
            assert op.path in self.tree, f"{op}: its source is not there"
            self.rename(op.path, op.path2)

    def rename(self, old: bytes, new: bytes) -> None:
        if old in self.tree:
            self.tree[new] = self.tree.pop(old)
        for path in self.below(old):
            self.tree[new + path[len(old) :]] = self.tree.pop(path)


class Run:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = Names()
        self.pfs = PlainPfs()
        self.order = PendingOrder()
        self.known: set[bytes] = set()
        self.claims: dict[tuple[int, int], dict[bytes, tuple[int, int]]] = {}

    # ---- landing
    def follow(self) -> None:
        """What ``Drainer.notice`` does."""
        pending = {}
        for key, op, created in self.names.view.ops():
            pending[key] = op
            self.order.add(key, created, op)
        for key in self.known - pending.keys():
            self.order.remove(key)
        self.known = set(pending)

    def land_some(self, count: int) -> None:
        for _ in range(count):
            self.follow()
            free = [(k, op) for k, op, _ in self.names.view.ops() if self.order.blocker(k) is None]
            if not free:
                assert not self.known
                return
            self.land(*self.random.choice(free))
            self.check_commits()

    def land(self, key: bytes, op: Op) -> None:
        view = self.names.view
        inode = view.inode(op.fid)
        later = [k for k, o in view.ops_of(op.fid) if o.kind == OpKind.PUT and o.gen > op.gen]
        superseded = op.kind == OpKind.PUT and later and not self.order.commit_between(op.path, key, later[0])
        unneeded = inode is None and not self.order.claimed_after(key, lambda fid: view.inode(fid) is not None)
        if not (op.kind == OpKind.PUT and (op.cancelled or superseded or unneeded)):
            self.pfs.land(op, removed=inode is None)
        self.names.mutate(lambda tx: self.finish(tx, key, op))

    def finish(self, tx, key: bytes, op: Op) -> None:  # type: ignore[no-untyped-def]
        import msgspec
        from core_support import on_pfs

        tx.delete(key)
        inode = tx.inode(op.fid)
        if inode is None:
            return
        if op.kind == OpKind.PUT and not op.cancelled:
            pfs = msgspec.structs.replace(on_pfs(inode).pfs, gen=op.gen)
            tx.put(b"i/%x" % op.fid, msgspec.structs.replace(inode, pfs=pfs))
        elif op.kind == OpKind.WITHDRAW and inode.pfs is not None:
            tx.put(b"i/%x" % op.fid, on_pfs(inode, hidden="held"))

    def check_commits(self) -> None:
        """Who reads the PFS now sees no commit file without its members, each of its generation."""
        for path, (kind, what) in self.pfs.tree.items():
            if kind == "f" and path.endswith(b"/.metadata"):
                for name, wanted in self.claims[what].items():  # type: ignore[index]
                    member = path.rpartition(b"/")[0] + b"/" + name
                    assert self.pfs.tree.get(member) == ("f", wanted), f"{path} is there with {member} wrong"

    # ---- changes
    def change(self) -> None:
        step = self.random.choice([self.save, self.save, self.touch, self.remove, self.move, self.drop])
        directory = self.random.choice([b"s1", b"s2"])
        try:
            step(directory)
        except FsError:
            return

    def put(self, path: bytes) -> tuple[int, int]:
        parent, _, name = path.rpartition(b"/")
        if self.names.view.lookup(self.names.find(parent), name) is None:
            self.names.create(path)
        gen = self.names.publish(path, self.random.randrange(1, 50))
        return self.names.find(path), gen

    def save(self, directory: bytes) -> None:
        """As DCP does it: members, then the commit file under another name, the old one away, rename."""
        if directory not in self.names.listing():
            self.names.mkdir(directory)
        claim = {}
        members = MEMBERS[: self.random.randrange(1, 3)]
        for name in members:
            claim[name] = self.put(directory + b"/" + name)
            self.land_some(self.random.randrange(2))
        way = self.random.randrange(3)
        name = b"/.metadata" if way == 0 else b"/.metadata.tmp"
        made = self.put(directory + name)
        self.claims[made] = claim
        if self.random.random() < 0.7:
            self.names.members[made] = set(members)
        if way == 0:
            return
        if way == 1 and b".metadata" in self.names.listing(directory):
            self.names.unlink(directory + b"/.metadata")
        self.land_some(self.random.randrange(2))
        self.names.rename(directory + b"/.metadata.tmp", directory + b"/.metadata")

    def touch(self, directory: bytes) -> None:
        """A member alone is written again: the set is a mixture."""
        if directory in self.names.listing():
            self.put(directory + b"/" + self.random.choice(MEMBERS))

    def drop(self, directory: bytes) -> None:
        if directory in self.names.listing():
            names = self.names.listing(directory)
            if names:
                self.names.unlink(directory + b"/" + self.random.choice(names))

    def remove(self, directory: bytes) -> None:
        if directory in self.names.listing():
            names = self.names.listing(directory)
            self.random.shuffle(names)
            for name in names:
                self.names.unlink(directory + b"/" + name)
                self.land_some(self.random.randrange(2))
            self.names.rmdir(directory)

    def move(self, directory: bytes) -> None:
        new = directory + b"x" if len(directory) < 3 else directory[:2]
        which = self.random.randrange(3)
        if which == 0:
            self.names.rename(directory, self.random.choice([b"s1", b"s2", b"s3"]))
        elif which == 1:
            self.names.rename(directory + b"/m0", directory + b"/m1")
        else:
            self.names.rename(directory + b"/m0", new)

    # ---- the end
    def check_end(self) -> None:
        wanted: dict[bytes, Node] = {}
        stack = [(b"", self.names.find(b""))]
        view = self.names.view
        while stack:
            prefix, fid = stack.pop()
            for name, entry in view.children(fid).items():
                inode = view.inode(entry.fid)
                assert inode is not None
                if entry.kind == "d":
                    stack.append((prefix + name + b"/", entry.fid))
                    wanted[prefix + name] = ("d", None)
                elif inode.pfs is None or not inode.pfs.hidden:
                    wanted[prefix + name] = ("f", (entry.fid, inode.gen))
        assert self.pfs.tree == wanted


@pytest.mark.parametrize("start", range(0, SEEDS, 100))
def test_the_pfs_never_lies_and_ends_right(start: int) -> None:
    for seed in range(start, start + 100):
        run = Run(seed)
        try:
            for _ in range(25):
                run.change()
                run.land_some(run.random.choice([0, 0, 1, 3, 10]))
            run.land_some(10_000)
            run.check_end()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
