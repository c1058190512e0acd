"""The replica's indices against a plain dict, and what transactions guard."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cachexfs.core.records import (
    ROOT_FID,
    AnyRecord,
    Dirent,
    Inode,
    Life,
    Node,
    Op,
    dirent_key,
    dirent_prefix,
    encode,
    inode_key,
    life_key,
    node_key,
    op_key,
)
from cachexfs.core.replica import Change, Replica
from cachexfs.core.transaction import Guard, Tx

DIRS = [ROOT_FID, 2 * ROOT_FID]
FILES = [8 * ROOT_FID, 9 * ROOT_FID]


def inode(size: int = 0) -> Inode:
    return Inode("f", 0o644, 0, 0, 1, 2, 3, size=size)


def put(replica: Replica, *items: tuple[bytes, AnyRecord | None]) -> None:
    revision = replica.revision + 1
    changes = []
    for key, record in items:
        old = replica.entry(key)
        value = None if record is None else encode(record)
        changes.append(Change(key, value, old.created if old else revision, revision))
    replica.apply(revision, changes)


@st.composite
def items(draw: st.DrawFn) -> tuple[bytes, AnyRecord | None]:
    kind = draw(st.sampled_from(["dirent", "op", "node", "life", "inode"]))
    gone = draw(st.booleans())
    number = draw(st.integers(0, 3))
    fid = draw(st.sampled_from(FILES))
    if kind == "dirent":
        key = dirent_key(draw(st.sampled_from(DIRS)), b"name/%d" % number)
        record: AnyRecord = Dirent(fid, draw(st.sampled_from("fd")))
    elif kind == "op":
        key, record = op_key(f"{number}"), Op("put", b"p", "n", fid, number)
    elif kind == "node":
        key, record = node_key(f"n{number}"), Node(f"n{number}", "h", 1, number, "m", "v")
    elif kind == "life":
        key, record = life_key(f"n{number}"), Life(f"n{number}", draw(st.sampled_from("ab")))
    else:
        key, record = inode_key(fid), inode(number)
    return key, None if gone else record


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(items(), min_size=1, max_size=4, unique_by=lambda item: item[0]), max_size=25))
def test_indices_say_what_the_records_say(revisions: list[list[tuple[bytes, AnyRecord | None]]]) -> None:
    replica = Replica()
    model: dict[bytes, AnyRecord] = {}
    created: dict[bytes, int] = {}
    for number, changes in enumerate(revisions, 1):
        put(replica, *changes)
        for key, record in changes:
            if record is None:
                model.pop(key, None)
                created.pop(key, None)
            else:
                model[key] = record
                created.setdefault(key, number)
    assert {key: entry.record for key, entry in replica.items()} == model
    assert {key: entry.created for key, entry in replica.items()} == created
    check_indices(replica, model, created)


def check_indices(replica: Replica, model: dict[bytes, AnyRecord], created: dict[bytes, int]) -> None:
    for parent in DIRS:
        prefix = dirent_prefix(parent)
        names = {key[len(prefix) :]: record for key, record in model.items() if key.startswith(prefix)}
        assert dict(replica.children(parent)) == names
        assert sorted(replica.below(prefix)) == sorted(prefix + name for name in names)
        assert replica.subdirs(parent) == sum(isinstance(r, Dirent) and r.kind == "d" for r in names.values())
    for fid in FILES:
        parents = [key for key, record in model.items() if isinstance(record, Dirent) and record.fid == fid]
        assert sorted(dirent_key(*name) for name in replica.names_of(fid)) == sorted(parents)
        mine = {key: record for key, record in model.items() if isinstance(record, Op) and record.fid == fid}
        assert dict(replica.ops_of(fid)) == mine
    ops = [key for key, _, _ in replica.ops()]
    assert sorted(ops) == sorted(key for key in model if key.startswith(b"p/"))
    assert [created[key] for key in ops] == sorted(created[key] for key in ops)
    assert set(replica.nodes) == {record.name for record in model.values() if isinstance(record, Node)}
    assert dict(replica.lives) == {record.node: record for record in model.values() if isinstance(record, Life)}


def test_a_read_is_guarded_by_what_it_saw() -> None:
    replica = Replica()
    put(replica, (inode_key(FILES[0]), inode()))
    put(replica, (inode_key(FILES[0]), inode(5)))
    tx = Tx(replica)
    assert tx.inode(FILES[0]) == inode(5)
    assert tx.inode(FILES[1]) is None
    tx.require_same(inode_key(FILES[0]))
    assert tx.write.guards == {
        (Guard.MODIFIED, inode_key(FILES[0])): 2,
        (Guard.MODIFIED, inode_key(FILES[1])): 0,
        (Guard.CREATED, inode_key(FILES[0])): 1,
    }


def test_a_peek_is_not_guarded() -> None:
    replica = Replica()
    put(replica, (inode_key(FILES[0]), inode()))
    tx = Tx(replica)
    assert tx.peek(inode_key(FILES[0])) == inode()
    assert not tx.write.guards


def test_a_transaction_sees_its_own_changes_without_a_guard() -> None:
    replica = Replica()
    put(replica, (dirent_key(ROOT_FID, b"old"), Dirent(FILES[0], "f")))
    tx = Tx(replica)
    tx.delete(dirent_key(ROOT_FID, b"old"))
    tx.put(dirent_key(ROOT_FID, b"new"), Dirent(FILES[0], "f"))
    assert tx.dirent(ROOT_FID, b"old") is None
    assert tx.dirent(ROOT_FID, b"new") == Dirent(FILES[0], "f")
    assert tx.children(ROOT_FID) == {b"new": Dirent(FILES[0], "f")}
    assert tx.names_of(FILES[0]) == [(ROOT_FID, b"new")]
    assert not tx.write.guards


def test_undo_takes_writes_back_and_leaves_guards() -> None:
    tx = Tx(Replica())
    tx.put(inode_key(FILES[0]), inode())
    mark = tx.mark()
    assert tx.dirent(ROOT_FID, b"a") is None
    tx.put(dirent_key(ROOT_FID, b"a"), Dirent(FILES[0], "f"))
    tx.put(inode_key(FILES[0]), inode(9))
    tx.undo(mark)
    assert tx.write.puts == {inode_key(FILES[0]): inode()}
    assert tx.children(ROOT_FID) == {}
    assert list(tx.write.guards) == [(Guard.MODIFIED, dirent_key(ROOT_FID, b"a"))]


def test_an_empty_directory_is_guarded_as_empty() -> None:
    tx = Tx(Replica())
    assert tx.require_empty(dirent_prefix(ROOT_FID))
    assert tx.write.guards == {(Guard.EMPTY, dirent_prefix(ROOT_FID)): 0}


def test_that_a_directory_is_not_empty_is_guarded_by_one_of_its_names() -> None:
    replica = Replica()
    put(replica, (dirent_key(ROOT_FID, b"a"), Dirent(FILES[0], "f")))
    tx = Tx(replica)
    assert not tx.require_empty(dirent_prefix(ROOT_FID))
    assert tx.write.guards == {(Guard.MODIFIED, dirent_key(ROOT_FID, b"a")): 1}


def test_a_directory_whose_last_name_this_transaction_removes_is_empty_unless_others_add_one() -> None:
    replica = Replica()
    put(replica, (dirent_key(ROOT_FID, b"a"), Dirent(FILES[0], "f")))
    tx = Tx(replica)
    tx.delete(dirent_key(ROOT_FID, b"a"))
    assert tx.require_empty(dirent_prefix(ROOT_FID))
    assert tx.write.guards == {(Guard.EMPTY, dirent_prefix(ROOT_FID)): 1}


def test_a_directory_to_which_this_transaction_adds_is_not_empty() -> None:
    tx = Tx(Replica())
    tx.put(dirent_key(ROOT_FID, b"a"), Dirent(FILES[0], "f"))
    assert not tx.require_empty(dirent_prefix(ROOT_FID))
    assert not tx.write.guards


def test_pending_operations_of_a_file_are_read_in_order_and_guarded() -> None:
    replica = Replica()
    for name in ("2", "1"):
        put(replica, (op_key(name), Op("put", b"p", "n", FILES[0])))
    tx = Tx(replica)
    tx.put(op_key("3"), Op("unlink", b"p", "n", FILES[0]))
    tx.delete(op_key("2"))
    assert [key for key, _ in tx.ops_of(FILES[0])] == [op_key("1"), op_key("3")]
    assert (Guard.MODIFIED, op_key("1")) in tx.write.guards


PATHS = st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=3).map(b"/".join)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["rename", "link", "put"]), PATHS, PATHS), max_size=8),
    st.sets(st.integers(0, 7)),
    PATHS,
)
def test_where_a_path_was_before_pending_renames(
    ops: list[tuple[str, bytes, bytes]], landed: set[int], path: bytes
) -> None:
    """Against a walk through all of them, the last first."""
    replica = Replica()
    rows = [
        (op_key(f"{number:04}"), Op(kind, old, "n0", fid=9, path2=new)) for number, (kind, old, new) in enumerate(ops)
    ]
    for row in rows:
        put(replica, row)
    left = [row for number, row in enumerate(rows) if number not in landed]
    for number in landed & set(range(len(rows))):
        put(replica, (rows[number][0], None))
    wanted = [path]
    for _, op in reversed(left):
        now = wanted[-1]
        if op.kind != "put" and (now == op.path2 or now.startswith(op.path2 + b"/")):
            wanted.append(op.path + now[len(op.path2) :])
    assert replica.before_renames(path) == wanted
    newest = [key for key, _ in replica.latest_ops_of(9)]
    assert newest == [key for key, _ in reversed(left)]
    assert replica.has_ops(9) == bool(left)
