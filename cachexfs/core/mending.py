"""What becomes of pending changes when the catalogue has forgotten some of what it knew, and the PFS has seen that.

Role: pure. A journal that lost its end or was mended may lack the directory that a file is to land in, or remember a
rename that the PFS has had. ``plan`` goes through the pending changes in their order, on a picture of what the PFS has
(``Tree``), and finds those that can never be carried out as they are. What a file or directory of the mount needs is
replaced by what brings it there in another way, in the same place of the order; the rest is given up, and told. Commit
files that list their members are held back: they are seen again once the PFS has confirmed all that they list.

Nothing here removes anything: what the PFS has and the catalogue does not know stays there. Of the commit files that
are there already ``doubtful`` names those beside which something is going to change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import msgspec

from cachexfs.core.order import ancestors, lands_at, lists_members, parent_of, paths_of
from cachexfs.core.records import ROOT_FID, Inode, Op, OpKind
from cachexfs.core.replica import Replica
from cachexfs.errors import quoted

_ATTRIBUTES = (OpKind.ATTR, OpKind.DIRATTR)
_LANDS = (OpKind.PUT, OpKind.RENAME, OpKind.LINK)
FULL = "it holds what the catalogue does not know"
_SPECIAL = (OpKind.SYMLINK, OpKind.MKNOD)


@dataclass(slots=True)
class Entry:
    """Something on the PFS, of a kind as in ``Dirent``; ``content``: (file id, generation) that a pending change is
    going to make of it."""

    kind: str
    ino: int = 0
    size: int = 0
    content: tuple[int, int] | None = None
    entries: dict[bytes, Entry] = field(default_factory=dict)


class Tree:
    """What the PFS has, as far as it was asked. Paths are relative to the PFS directory."""

    def __init__(self) -> None:
        self.root = Entry("d")

    def find(self, path: bytes) -> Entry | None:
        found: Entry | None = self.root
        for name in path.split(b"/") if path else ():
            found = found.entries.get(name) if found is not None else None
        return found

    def put(self, path: bytes, entry: Entry) -> None:
        """Its directory must be there."""
        above = self.find(parent_of(path))
        if above is not None:
            above.entries[path.rpartition(b"/")[2]] = entry

    def take(self, path: bytes) -> Entry | None:
        above = self.find(parent_of(path))
        return above.entries.pop(path.rpartition(b"/")[2], None) if above is not None else None

    def files(self) -> Iterator[tuple[bytes, Entry]]:
        todo = [(b"", self.root)]
        while todo:
            above, directory = todo.pop()
            for name, entry in directory.entries.items():
                path = above + b"/" + name if above else name
                if entry.kind == "d":
                    todo.append((path, entry))
                else:
                    yield path, entry


@dataclass(slots=True)
class Plan:
    """What is to be done before anything lands again.

    ``changes``: pending changes that are something else from now on, None: given up. ``parents``: directories to be
    made at once. ``fallen``: files that are not where the catalogue says. ``again``: files and directories of the mount
    that nothing would bring to the PFS, by path. ``told``: (path, what is given up).
    """

    changes: dict[bytes, Op | None] = field(default_factory=dict)
    parents: list[bytes] = field(default_factory=list)
    fallen: set[int] = field(default_factory=set)
    again: dict[bytes, int] = field(default_factory=dict)
    told: list[tuple[bytes, str]] = field(default_factory=list)


def plan(view: Replica, tree: Tree, has_bytes: Callable[[Inode], bool], can_land: Callable[[Op], bool]) -> Plan:
    """Go through all that is pending. ``has_bytes``: whether anybody has a file's bytes outside the PFS. ``can_land``:
    whether anybody has those of a PUT of an earlier content, or others that may land in their place."""
    misplaced = set[bytes]()  # contents that would not land under their file's names: others may rest on them
    while True:
        planner = _Planner(view, tree, has_bytes, can_land, misplaced)
        for key, op, _ in view.ops():
            planner.take(key, op)
        planner.complete()
        if planner.misplaced <= misplaced:
            return planner.plan
        misplaced |= planner.misplaced


def _copy(tree: Tree) -> Tree:
    copied = Tree()
    todo = [(tree.root, copied.root)]
    while todo:
        entry, new = todo.pop()
        for name, below in entry.entries.items():
            new.entries[name] = Entry(below.kind, below.ino, below.size, below.content)
            todo.append((below, new.entries[name]))
    return copied


def doubtful(view: Replica, tree: Tree, found: Plan) -> list[tuple[bytes, Entry]]:
    """Commit files of ``tree``, which is as the PFS is now, whose members a pending change or ``found`` may touch."""
    ops = [op for _, op, _ in view.ops() if op.kind not in _ATTRIBUTES]
    touched = {path for op in ops for path in paths_of(op)} | set(found.again)
    moved = {path for op in ops if op.kind == OpKind.RENAME for path in paths_of(op)}
    below = Counter(directory for path in touched for directory in ancestors(path))

    def is_touched(path: bytes) -> bool:
        above = parent_of(path)
        return below[above] > (path in touched) or above in touched or not moved.isdisjoint(ancestors(path))

    names = ((path, entry) for path, entry in tree.files() if lists_members(path.rpartition(b"/")[2]))
    return [(path, entry) for path, entry in names if is_touched(path)]


class _Planner:
    def __init__(
        self,
        view: Replica,
        tree: Tree,
        has_bytes: Callable[[Inode], bool],
        can_land: Callable[[Op], bool],
        given_up: Collection[bytes],
    ) -> None:
        self._view, self._has_bytes, self._can_land, self._given_up = view, has_bytes, can_land, given_up
        self._now, self._tree = tree, _copy(tree)  # what the PFS has, and what it is going to have
        self.misplaced = set[bytes]()
        self._puts: dict[tuple[int, int], list[bytes]] = {}  # (file id, generation) -> what is going to land it
        self._held: set[int] = set()  # commit files that are taken from an earlier name, to be hidden
        self._brought: set[bytes] = set()  # directories that are moved there
        self._late: set[bytes] = set()  # directories below these that nothing makes
        self._made: set[int] = set()  # symlinks and special files that are
        self.plan = Plan()

    def take(self, key: bytes, op: Op) -> None:
        """One pending change: what it finds, and what it leaves."""
        new = self._judged(op) if key not in self._given_up else None
        if new is not None and not new.cancelled and _lists(new):
            new = msgspec.structs.replace(new, cancelled=True, ready=False)
        if new != op:
            self.plan.changes[key] = new
        if new is not None:
            self._note(key, new)

    def _note(self, key: bytes, op: Op) -> None:
        if op.kind == OpKind.PUT:
            self._puts.setdefault((op.fid, op.gen), []).append(key)
        elif op.kind in _SPECIAL:
            self._made.add(op.fid)

    def _judged(self, op: Op) -> Op | None:
        if op.kind == OpKind.DIRATTR:
            return op
        if op.kind == OpKind.RENAME:
            return self._rename(op)
        if op.cancelled:
            return op
        if op.kind == OpKind.LINK:
            return self._link(op)
        if op.kind == OpKind.PUT and self._is_gone(op):
            self._give_up(op, "its bytes are gone, with what came after them")
            return None
        if op.kind in (OpKind.PUT, OpKind.MKDIR, *_SPECIAL):
            return self._make(op)
        return self._without(op)

    def _is_gone(self, op: Op) -> bool:
        """Whether nobody has what a PUT lands, of a file of which later contents are known: it had been superseded."""
        inode = self._view.inode(op.fid)
        return inode is not None and op.gen < inode.gen and not op.ready and not self._can_land(op)

    def _make(self, op: Op) -> Op:
        self._need(parent_of(op.path))
        there, kind = self._tree.find(op.path), "d" if op.kind == OpKind.MKDIR else "f"
        if (there is None or (there.kind != "d" and kind != "d")) and not _lists(op):
            self._tree.put(op.path, Entry(kind, content=(op.fid, op.gen) if op.kind == OpKind.PUT else None))
        return op

    def _rename(self, op: Op) -> Op | None:
        inode, there = self._view.inode(op.fid), self._tree.find(op.path)
        hidden = inode is not None and inode.pfs is not None and bool(inode.pfs.hidden)
        if there is not None:
            seen = not op.cancelled and not _lists(op)
            if seen and (why := self._in_the_way(op.path2, there)):
                # It has been, and more since: where the mount has it something brings it anew.
                self._give_up(op, f"{why}; what was to be moved stays at {quoted(op.path)}")
                return None
            self._tree.take(op.path)
            if not seen:
                self._held.add(op.fid)
            elif inode is not None or there.kind == "d":  # a file that has been removed since is not moved
                self._need(parent_of(op.path2))
                self._tree.put(op.path2, there)
                self._brought.update([op.path2] if there.kind == "d" else [])
            return op
        if hidden and _lists(op):
            return None  # it was taken off the PFS, and comes back under its name
        if inode is None or hidden or self._has_been(op, inode):
            return op
        if inode.kind == "d":
            return self._make(Op(OpKind.MKDIR, op.path2, op.owner, fid=op.fid))
        return self._instead(op, inode)

    def _in_the_way(self, path: bytes, moved: Entry) -> str:
        """Why the PFS would refuse for ever to give something this name; empty when it would not."""
        there = self._tree.find(path)
        if there is None or there is moved:
            return ""
        if (there.kind == "d") != (moved.kind == "d"):
            return "something else has that name"
        return FULL if there.entries else ""

    def _has_been(self, op: Op, inode: Inode) -> bool:
        """Whether the PFS has what a rename was to bring."""
        there = self._tree.find(op.path2)
        if there is None or there.kind != inode.kind or op.cancelled or _lists(op):
            return False
        return inode.kind != "f" or inode.pfs is None or not inode.pfs.gen or there.ino == inode.pfs.ino

    def _link(self, op: Op) -> Op | None:
        inode, there = self._view.inode(op.fid), self._tree.find(op.path)
        hidden = inode is not None and inode.pfs is not None and bool(inode.pfs.hidden)
        if inode is None or hidden:
            return op
        if there is None or there.kind == "d":
            return self._instead(op, inode)
        self._need(parent_of(op.path2))
        if not _lists(op):
            self._tree.put(op.path2, there)
        return op

    def _instead(self, op: Op, inode: Inode) -> Op | None:
        """A name whose file is not there: the file's content lands at it."""
        content = self._view.generation(op.fid)
        if inode.kind == "l":
            return self._make(Op(OpKind.SYMLINK, op.path2, op.owner, fid=op.fid, path2=inode.target))
        if inode.kind != "f":
            return self._make(Op(OpKind.MKNOD, op.path2, op.owner, fid=op.fid))
        self.plan.fallen.add(op.fid)
        puts = [other.gen for _, other in self._view.ops_of(op.fid) if other.kind == OpKind.PUT]
        if content is not None and (content.gen in puts or (op.fid, content.gen) in self._puts):
            return None  # it lands by that, and ``complete`` sees to its names
        if content is None or content.open or not (self._has_bytes(inode) or not content.size):
            self._give_up(op, "its file is not there")
            return None
        put = Op(
            OpKind.PUT, op.path2, op.owner, fid=op.fid, gen=content.gen, commit=op.commit, below=op.below,
            size=content.size, stage=content.stage, tree=content.tree, cancelled=op.cancelled,
        )  # fmt: skip
        return self._make(put) if not put.cancelled else put

    def _without(self, op: Op) -> Op | None:
        """What takes away, brings back, or changes what is there."""
        there = self._tree.find(op.path)
        if op.kind == OpKind.ATTR:
            return op if there is not None else None
        if op.kind == OpKind.RESTORE:
            return None  # it comes back once it is whole
        if op.kind == OpKind.WITHDRAW:
            inode = self._view.inode(op.fid)
            if there is None and inode is not None:
                self.plan.fallen.update([op.fid] if inode.pfs is not None and not inode.pfs.hidden else [])
                return None
        elif there is not None and (there.kind == "d") != (op.kind == OpKind.RMDIR):
            self._give_up(op, "something else has that name")
            return None
        elif there is not None and there.entries:
            self._give_up(op, FULL)
            return None
        self._tree.take(op.path)
        return op

    def _give_up(self, op: Op, why: str) -> None:
        self.plan.told.append((lands_at(op), f"{op.kind}: {why}"))

    def _need(self, directory: bytes) -> None:
        """Directories on the way to something that is to be made: at once, with what is above them. Below one that a
        pending rename is to bring they come after that: it would be refused."""
        way = [path for path in [*ancestors(directory)[::-1], directory] if path]
        missing = [path for path in way if self._tree.find(path) is None]
        for path in missing:
            self._tree.put(path, Entry("d"))
        if not self._brought.isdisjoint(way):
            self._late.update(missing)
            return
        for path in way if missing else ():
            if self._now.find(path) is None and path not in self.plan.parents:
                self.plan.parents.append(path)

    def complete(self) -> None:
        """What the mount has and nothing brings to the PFS."""
        rows = [(path, fid, inode) for fid, inode in self._view.inodes() if (path := self._view.path(fid))]
        for path, fid, inode in sorted(rows):
            if fid == ROOT_FID:
                continue
            if inode.kind == "f":
                self._complete_file(path, fid, inode)
            elif (self._tree.find(path) is None or path in self._late) and fid not in self._made:
                self._need(parent_of(path))
                self._tree.put(path, Entry(inode.kind))
                self.plan.again[path] = fid

    def _complete_file(self, path: bytes, fid: int, inode: Inode) -> None:
        content, there, found = self._view.generation(fid), inode.pfs, self._tree.find(path)
        if content is None or content.open or inode.writing or fid in self._held:
            return
        if (fid, content.gen) in self._puts:
            if lists_members(path.rpartition(b"/")[2]) or self._has_names(fid, content.gen, found):
                return
            if not (self._has_bytes(inode) or not content.size):
                return
            self.misplaced.update(self._puts[fid, content.gen])  # one content lands once
        elif there is not None and there.gen == inode.gen and fid not in self.plan.fallen:
            if there.hidden or there.missing or (found is not None and found.kind != "d" and found.content is None):
                return  # whether it is that file is asked later
            self.plan.fallen.add(fid)
        if self._has_bytes(inode) or not content.size:
            self._need(parent_of(path))
            self.plan.again[path] = fid

    def _has_names(self, fid: int, gen: int, found: Entry | None) -> bool:
        """Whether a content lands under each name of its file. ``found``: what will be at the first."""
        if found is None or found.content != (fid, gen):
            return False
        names = self._view.names_of(fid)
        return all(
            (entry := self._at(*name)) is found or (entry is not None and entry.content is None) for name in names
        )

    def _at(self, parent: int, name: bytes) -> Entry | None:
        above = self._view.path(parent)
        return None if above is None else self._tree.find(above + b"/" + name if above else name)


def _lists(op: Op) -> bool:
    """Whether it brings a commit file that lists its members to its name."""
    return op.kind in _LANDS and lists_members(lands_at(op).rpartition(b"/")[2])
