"""What becomes of pending changes when the catalogue has forgotten some of what the PFS has seen."""

from __future__ import annotations

import pytest

from cachexfs.core.mending import Entry, Plan, Tree, doubtful, plan
from cachexfs.core.order import PendingOrder
from cachexfs.core.records import (
    FID_STEP,
    ROOT_FID,
    AnyRecord,
    Dirent,
    Generation,
    Inode,
    Op,
    OpKind,
    PfsCopy,
    dirent_key,
    encode,
    generation_key,
    inode_key,
    op_key,
)
from cachexfs.core.replica import Change, Replica

DIR, FILE, OTHER = 5 * FID_STEP, 6 * FID_STEP, 7 * FID_STEP


def record(kind: str, *, gen: int = 0, landed: bool = False, hidden: str = "") -> Inode:
    pfs = PfsCopy(gen, 0.0, 77, 3, 0, hidden) if landed else None
    return Inode(kind, 0o644, 0, 0, 0, 0, 0, size=3 if gen else 0, gen=gen, origin="n0", pfs=pfs)


class World:
    """A catalogue with a root, and a PFS."""

    def __init__(self) -> None:
        self.view, self.tree = Replica(), Tree()
        self._put(inode_key(ROOT_FID), record("d"))

    def _put(self, key: bytes, value: AnyRecord) -> None:
        revision = self.view.revision + 1
        entry = self.view.entry(key)
        self.view.apply(revision, [Change(key, encode(value), entry.created if entry else revision, revision)])

    def directory(self, path: bytes, fid: int, parent: int = ROOT_FID) -> None:
        self._put(dirent_key(parent, path.rpartition(b"/")[2]), Dirent(fid, "d"))
        self._put(inode_key(fid), record("d"))

    def file(self, path: bytes, fid: int, parent: int = ROOT_FID, *, landed: bool = False, hidden: str = "") -> None:
        self._put(dirent_key(parent, path.rpartition(b"/")[2]), Dirent(fid, "f"))
        self._put(inode_key(fid), record("f", gen=2, landed=landed, hidden=hidden))
        self._put(generation_key(fid), Generation(2, 3, b"d", b"t", f"{fid:x}.2.a", "n0"))

    def pending(self, name: str, op: Op) -> bytes:
        key = op_key(name)
        self._put(key, op)
        return key

    def has(self, *paths: bytes, kind: str = "f", ino: int = 77) -> None:
        for path in paths:
            self.tree.put(path, Entry(kind, ino, 3))

    def planned(self, *, has_bytes: bool = True) -> Plan:
        return plan(self.view, self.tree, lambda inode: has_bytes, lambda op: True)


def test_a_rename_of_what_is_not_there_lands_the_content_under_its_new_name() -> None:
    """ENOENT for ever."""
    world = World()
    world.file(b"b", FILE)
    key = world.pending("1", Op(OpKind.RENAME, b"a", "n0", fid=FILE, path2=b"b", commit=True))
    new = world.planned().changes[key]
    assert new is not None
    assert (new.kind, new.path, new.gen, new.stage) == (OpKind.PUT, b"b", 2, f"{FILE:x}.2.a")


def test_a_rename_that_the_pfs_has_had_stays() -> None:
    world = World()
    world.file(b"b", FILE, landed=True)
    world.pending("1", Op(OpKind.RENAME, b"a", "n0", fid=FILE, path2=b"b", commit=True))
    world.has(b"b")
    assert world.planned() == Plan()


def test_a_rename_whose_bytes_nobody_has_is_given_up_and_told() -> None:
    world = World()
    world.file(b"b", FILE, landed=True)
    key = world.pending("1", Op(OpKind.RENAME, b"a", "n0", fid=FILE, path2=b"b", commit=True))
    found = world.planned(has_bytes=False)
    assert found.changes == {key: None}
    assert found.fallen == {FILE}
    assert [path for path, _ in found.told] == [b"b"]


def test_a_renamed_directory_that_is_not_there_is_made_and_what_is_missing_below_it_lands_again() -> None:
    world = World()
    world.directory(b"e", DIR)
    world.file(b"e/f", FILE, DIR, landed=True)
    key = world.pending("1", Op(OpKind.RENAME, b"d", "n0", fid=DIR, path2=b"e", commit=True))
    found = world.planned()
    new = found.changes[key]
    assert new is not None
    assert (new.kind, new.path) == (OpKind.MKDIR, b"e")
    assert found.again == {b"e/f": FILE}
    assert found.fallen == {FILE}


@pytest.mark.parametrize("kind", [OpKind.PUT, OpKind.MKDIR, OpKind.SYMLINK])
def test_directories_that_the_catalogue_has_forgotten_are_made_for_what_lands_in_them(kind: str) -> None:
    world = World()
    world.pending("1", Op(kind, b"c/d/a", "n0", fid=FILE, gen=2, size=3))
    assert world.planned().parents == [b"c", b"c/d"]


def test_a_directory_that_is_pending_is_made_at_once_with_what_is_forgotten_below_it() -> None:
    """ENOENT for ever, and nothing landed: the one above was to be made later."""
    world = World()
    world.pending("1", Op(OpKind.MKDIR, b"c", "n0", fid=DIR))
    world.pending("2", Op(OpKind.PUT, b"c/d/a", "n0", fid=FILE, gen=2, size=3))
    assert world.planned() == Plan(parents=[b"c", b"c/d"])


def test_a_forgotten_directory_below_one_that_is_still_to_be_moved_is_made_after_that() -> None:
    """ENOTEMPTY for ever: the new name of the one above was there already."""
    world = World()
    world.directory(b"e", DIR)
    world.directory(b"f", OTHER, DIR)
    world.has(b"d", kind="d")
    world.pending("1", Op(OpKind.RENAME, b"d", "n0", fid=DIR, path2=b"e", commit=True))
    world.pending("2", Op(OpKind.PUT, b"e/f/a", "n0", fid=FILE, gen=2, size=3))
    assert world.planned() == Plan(again={b"e/f": OTHER})


@pytest.mark.parametrize(
    ("kind", "there"),
    [(OpKind.RMDIR, "d"), (OpKind.RMDIR, "f"), (OpKind.UNLINK, "d")],
    ids=["full", "file", "directory"],
)
def test_a_removal_that_the_pfs_would_refuse_for_ever_is_given_up_and_told(kind: str, there: str) -> None:
    world = World()
    world.has(b"d", kind=there)
    if there == "d":
        world.has(b"d/unknown")
    key = world.pending("1", Op(kind, b"d", "n0", fid=DIR, commit=True))
    found = world.planned()
    assert found.changes == {key: None}
    assert [path for path, _ in found.told] == [b"d"]


def test_a_directory_that_is_emptied_by_earlier_changes_is_removed() -> None:
    world = World()
    world.has(b"d", kind="d")
    world.has(b"d/a", b"d/b")
    world.pending("1", Op(OpKind.UNLINK, b"d/a", "n0", fid=FILE, commit=True, below=b"d"))
    world.pending("2", Op(OpKind.RENAME, b"d/b", "n0", fid=OTHER, path2=b"b", commit=True))
    world.pending("3", Op(OpKind.RMDIR, b"d", "n0", fid=DIR, commit=True))
    assert world.planned() == Plan()


@pytest.mark.parametrize("there", ["full", "file"])
def test_a_directory_whose_new_name_the_pfs_has_given_away_is_not_moved_and_that_is_told(there: str) -> None:
    """ENOTEMPTY or ENOTDIR for ever: it had been moved, and its old name had come to another."""
    world = World()
    world.directory(b"e", DIR)
    world.file(b"e/f", FILE, DIR, landed=True)
    world.has(b"d", kind="d")
    world.has(b"e", kind="f" if there == "file" else "d")
    if there == "full":
        world.has(b"d/new", ino=78)
        world.has(b"e/f")
    key = world.pending("1", Op(OpKind.RENAME, b"d", "n0", fid=DIR, path2=b"e", commit=True))
    found = world.planned()
    assert found.changes == {key: None}
    assert [(path, "stays at 'd'" in why) for path, why in found.told] == [(b"e", True)]
    assert found.again == ({} if there == "full" else {b"e/f": FILE})


def test_a_directory_is_moved_over_one_that_earlier_changes_empty() -> None:
    world = World()
    world.directory(b"e", DIR)
    world.has(b"d", b"e", kind="d")
    world.has(b"e/a")
    world.pending("1", Op(OpKind.UNLINK, b"e/a", "n0", fid=OTHER, commit=True, below=b"e"))
    world.pending("2", Op(OpKind.RENAME, b"d", "n0", fid=DIR, path2=b"e", commit=True))
    assert world.planned() == Plan()


def test_a_directory_that_was_moved_before_it_was_removed_is_not_removed_with_what_is_forgotten() -> None:
    """ENOTEMPTY for ever."""
    world = World()
    world.has(b"d", kind="d")
    world.has(b"d/unknown")
    world.pending("1", Op(OpKind.RENAME, b"d", "n0", fid=DIR, path2=b"e", commit=True))
    key = world.pending("2", Op(OpKind.RMDIR, b"e", "n0", fid=DIR, commit=True))
    found = world.planned()
    assert found.changes == {key: None}
    assert [path for path, _ in found.told] == [b"e"]


def test_a_withdrawal_of_what_is_not_there_only_takes_the_claim() -> None:
    world = World()
    world.file(b".metadata", FILE, landed=True)
    key = world.pending("1", Op(OpKind.WITHDRAW, b".metadata", "n0", fid=FILE, gen=2))
    found = world.planned()
    assert found.changes == {key: None}
    assert found.fallen == {FILE}


def test_attributes_of_what_is_not_there_come_with_its_content() -> None:
    world = World()
    world.file(b"a", FILE, landed=True)
    key = world.pending("1", Op(OpKind.ATTR, b"a", "n0", fid=FILE))
    found = world.planned()
    assert found.changes == {key: None}
    assert found.again == {b"a": FILE}


@pytest.mark.parametrize("kind", [OpKind.PUT, OpKind.RENAME, OpKind.RESTORE])
def test_no_commit_file_gets_its_name_before_the_pfs_has_confirmed_what_it_lists(kind: str) -> None:
    world = World()
    world.file(b".metadata", FILE, landed=kind == OpKind.RESTORE, hidden="x")
    world.has(b".metadata.tmp")
    paths = (b".metadata.tmp", b".metadata") if kind == OpKind.RENAME else (b".metadata", b"")
    key = world.pending("1", Op(kind, paths[0], "n0", fid=FILE, gen=2, size=3, path2=paths[1], commit=True))
    found = world.planned()
    new = found.changes[key]
    assert new is None or new.cancelled
    assert found.again == {}


def test_a_content_that_would_land_where_its_file_is_not_lands_once_and_under_its_name() -> None:
    """Two changes that were to land one content gave way to each other for ever."""
    world = World()
    world.file(b"a", FILE)
    key = world.pending("1", Op(OpKind.PUT, b"old", "n0", fid=FILE, gen=2, size=3))
    found = world.planned()
    assert found.again == {b"a": FILE}
    assert found.changes == {key: None}


@pytest.mark.parametrize(
    ("op", "doubted"),
    [
        (Op(OpKind.UNLINK, b"d/m", "n0", fid=FILE), True),
        (Op(OpKind.PUT, b"d/below/m", "n0", fid=FILE, gen=2), True),
        (Op(OpKind.RENAME, b"d", "n0", fid=DIR, path2=b"e"), True),
        (Op(OpKind.PUT, b"e/m", "n0", fid=FILE, gen=2), False),
        (Op(OpKind.UNLINK, b"d/.metadata", "n0", fid=FILE), False),
        (Op(OpKind.DIRATTR, b"d", "n0", fid=DIR), False),
    ],
    ids=["member", "below", "moved", "elsewhere", "itself", "times"],
)
def test_a_commit_file_is_doubtful_when_something_beside_it_is_to_change(op: Op, *, doubted: bool) -> None:
    world = World()
    world.has(b"d", kind="d")
    world.has(b"d/.metadata", b"d/m")
    world.pending("1", op)
    assert [path for path, _ in doubtful(world.view, world.tree, Plan())] == [b"d/.metadata"] * doubted


def test_what_lands_again_beside_a_commit_file_makes_it_doubtful() -> None:
    world = World()
    world.has(b"d", kind="d")
    world.has(b"d/.metadata")
    assert doubtful(world.view, world.tree, Plan(again={b"d/m": FILE}))


def test_a_change_that_is_another_one_by_now_keeps_its_place_and_leaves_its_paths() -> None:
    world, order = World(), PendingOrder()
    rename = Op(OpKind.RENAME, b"a", "n0", fid=FILE, path2=b"b", commit=True)
    put = Op(OpKind.PUT, b"b", "n0", fid=FILE, gen=2)
    key, later = world.pending("1", rename), world.pending("2", Op(OpKind.UNLINK, b"b", "n0", fid=FILE))
    order.add(key, 1, rename)
    order.add(later, 2, Op(OpKind.UNLINK, b"b", "n0", fid=FILE))
    assert world.view.before_renames(b"b") == [b"b", b"a"]
    world.pending("1", put)
    order.add(key, 3, put)
    assert world.view.before_renames(b"b") == [b"b"]
    assert not order.pending_at(b"a")
    assert order.blocker(later) == key
    assert [found for found, _, _ in world.view.ops()] == [key, later]
    order.remove(key)
    assert order.blocker(later) is None
