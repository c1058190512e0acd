"""Who waits for whom on the PFS: the index against the rules said pair by pair, and no circle ever."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
from core_support import covers, must_wait, paths_of
from hypothesis import given, settings
from hypothesis import strategies as st

from cachexfs.core.order import PendingOrder, ancestors, parent_of
from cachexfs.core.records import Op, OpKind
from cachexfs.core.waits import Waits

NAMES = [b"a", b"b", b".metadata", b"a-unfinished"]
KINDS = [
    OpKind.PUT, OpKind.MKDIR, OpKind.RENAME, OpKind.UNLINK, OpKind.RMDIR, OpKind.SYMLINK, OpKind.ATTR,
    OpKind.WITHDRAW, OpKind.DIRATTR,
]  # fmt: skip


@st.composite
def paths(draw: st.DrawFn) -> bytes:
    return b"/".join(draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)))


@st.composite
def operations(draw: st.DrawFn) -> Op:
    kind = draw(st.sampled_from(KINDS))
    path, path2 = draw(paths()), draw(paths())
    commit = kind in (OpKind.RENAME, OpKind.UNLINK, OpKind.RMDIR, OpKind.SYMLINK) or path.endswith(b".metadata")
    below = parent_of(path2 if kind == OpKind.RENAME else path) if commit else b""
    target = draw(st.none() | paths() | st.just(b"")) if commit else None
    fid = draw(st.integers(1, 3))
    return Op(kind, path, "n0", fid, path2=path2, commit=commit, below=below, target=target)


def keyed(ops: list[Op]) -> list[tuple[bytes, int, Op]]:
    """Several of one revision among them: then the keys decide."""
    return [(b"p/%04d" % number, number // 2 + 1, op) for number, op in enumerate(ops)]


@settings(max_examples=400, deadline=None)
@given(st.lists(operations(), max_size=12), st.permutations(range(12)))
def test_the_index_says_what_the_rules_say(ops: list[Op], arrival: list[int]) -> None:
    order = PendingOrder()
    rows = keyed(ops)
    for at in arrival:
        if at < len(rows):
            order.add(*rows[at])
    for number, (key, _, op) in enumerate(rows):
        blocker = order.blocker(key)
        if op.kind == OpKind.DIRATTR:
            below = [row for row in rows if row[2].kind != OpKind.DIRATTR]
            wanted = any(covers(op.path, path) for row in below for path in paths_of(row[2]))
            assert (blocker is not None) == wanted
            continue
        earlier = {row[0]: row[2] for row in rows[:number]}
        assert (blocker is not None) == any(must_wait(op, other) for other in earlier.values())
        if blocker is not None:
            assert blocker in earlier
            assert must_wait(op, earlier[blocker])


@settings(max_examples=200, deadline=None)
@given(st.lists(operations(), max_size=15), st.randoms(use_true_random=False))
def test_something_can_always_land(ops: list[Op], random) -> None:  # type: ignore[no-untyped-def]
    order = PendingOrder()
    rows = {key: op for key, _, op in keyed(ops)}
    for row in keyed(ops):
        order.add(*row)
    landed: list[Op] = []
    while rows:
        free = [key for key in rows if order.blocker(key) is None]
        assert free, f"a circle among {rows}"
        key = random.choice(free)
        op = rows.pop(key)
        order.remove(key)
        landed.append(op)
    assert len(order) == 0
    assert not order.pending_below(b"")


@settings(max_examples=200, deadline=None)
@given(st.lists(operations(), min_size=2, max_size=10))
def test_a_drain_is_superseded_only_when_nothing_between_waits_for_it(ops: list[Op]) -> None:
    order = PendingOrder()
    rows = keyed(ops)
    for row in rows:
        order.add(*row)
    path = ops[0].path
    needed = any(
        any(covers(path, p) or covers(p, path) for p in paths_of(op))
        or (op.commit and covers(op.below, path))
        or (op.target is not None and covers(op.target, path))
        for op in ops[1:-1]
        if op.kind != OpKind.DIRATTR
    )
    assert order.commit_between(path, rows[0][0], rows[-1][0]) == needed


@settings(max_examples=300, deadline=None)
@given(st.lists(operations(), min_size=1, max_size=10), st.sets(st.integers(0, 9)))
def test_what_claims_a_removed_file_is_found_under_all_its_names(ops: list[Op], gone: set[int]) -> None:
    """The operations that the index visits against all later ones, one by one."""
    order = PendingOrder()
    rows = keyed([msgspec.structs.replace(op, fid=number) for number, op in enumerate(ops)])
    for row in rows:
        order.add(*row)
    names, wanted = {rows[0][2].path}, []
    for key, _, op in rows[1:]:
        if op.kind == OpKind.DIRATTR:
            continue
        there = op.path2 if op.kind == OpKind.RENAME else op.path
        claims = op.commit and op.kind in (OpKind.PUT, OpKind.RENAME) and there.endswith(b".metadata")
        named = {name for name in names if name != there and covers(op.below, name)}
        if claims and named and op.fid not in gone:
            wanted.append((key, frozenset(named)))
        if op.kind == OpKind.RENAME:
            moved = {op.path2 + name[len(op.path) :] for name in names if covers(op.path, name)}
            names = moved | {name for name in names if not covers(op.path, name) and name != op.path2}
        elif op.kind in (OpKind.UNLINK, OpKind.PUT, OpKind.SYMLINK):
            names = names - {op.path}
    if rows[0][2].path.endswith(b".metadata"):
        wanted = []
    assert list(order.claimants(rows[0][0], lambda fid: fid not in gone)) == wanted


def test_an_operation_that_is_gone_counts_as_in_between() -> None:
    order = PendingOrder()
    order.add(b"p/1", 1, Op(OpKind.PUT, b"a", "n0"))
    assert order.commit_between(b"a", b"p/1", b"p/2")


def waits(*ops: Op) -> bool:
    """Whether the last of some operations has to wait."""
    order = PendingOrder()
    for row in keyed(list(ops)):
        order.add(*row)
    return order.blocker(keyed(list(ops))[-1][0]) is not None


def put(path: bytes, *, commit: bool = False, target: bytes | None = None) -> Op:
    return Op(OpKind.PUT, path, "n0", commit=commit, below=parent_of(path) if commit else b"", target=target)


def test_data_files_are_not_ordered() -> None:
    assert not waits(put(b"step/a"), put(b"step/b"))
    assert not waits(put(b"step/sub/a"), put(b"step/b"))


def test_a_commit_file_waits_for_all_in_and_below_its_directory_only() -> None:
    commit = put(b"step-1/.metadata", commit=True)
    assert waits(put(b"step-1/a"), commit)
    assert waits(put(b"step-1/sub/a"), commit)
    assert not waits(put(b"step-2/a"), commit)
    assert not waits(commit, put(b"step-1/a"))


def test_a_removal_waits_for_what_was_written_or_renamed_before_it_wherever_it_is() -> None:
    order = PendingOrder()
    order.add(b"p/0", 1, Op(OpKind.PUT, b"run/step-2/.metadata.tmp", "n0"))
    order.add(b"p/1", 1, Op(OpKind.RENAME, b"run/step-2/.metadata.tmp", "n0", path2=b"run/step-2/.metadata"))
    order.add(b"p/2", 2, Op(OpKind.MKDIR, b"run/step-3", "n0"))
    order.add(b"p/3", 3, Op(OpKind.WITHDRAW, b"run/step-1/.metadata", "n1"))
    order.add(b"p/4", 4, Op(OpKind.UNLINK, b"old/x.pt", "n1", commit=True, below=b"old"))
    order.add(b"p/5", 5, Op(OpKind.PUT, b"run/step-3/__0_0.distcp", "n0"))
    assert [order.blocker(b"p/%d" % number) for number in (3, 4, 5)] == [b"p/1", b"p/1", b"p/2"]
    order.remove(b"p/1")
    assert [order.blocker(b"p/%d" % number) for number in (3, 4)] == [b"p/0", b"p/0"]
    order.remove(b"p/0")
    assert [order.blocker(b"p/%d" % number) for number in (3, 4)] == [None, None]


def test_a_pointer_waits_for_its_target_wherever_it_is() -> None:
    link = Op(OpKind.SYMLINK, b"latest", "n0", commit=True, below=b"links", target=b"ckpt/step-1")
    assert waits(put(b"ckpt/step-1/a"), link)
    assert not waits(put(b"ckpt/step-2/a"), link)
    assert waits(put(b"ckpt/step-1"), link)


def test_children_land_under_the_old_name_before_their_directory_is_renamed() -> None:
    rename = Op(OpKind.RENAME, b"tmp", "n0", path2=b"step-1", commit=True, below=b"")
    assert waits(put(b"tmp/a"), rename)
    assert waits(rename, put(b"step-1/b"))
    assert waits(rename, put(b"tmp/b"))


def test_a_marker_of_something_unfinished_lands_before_anything_later_beside_it() -> None:
    marker = put(b"ckpt/step-1-unfinished")
    assert waits(marker, put(b"ckpt/step-1/a"))
    assert waits(marker, put(b"ckpt/b"))
    assert not waits(marker, put(b"other/b"))


def test_a_withdrawal_lands_before_any_later_change_beside_it() -> None:
    """Else a member of the next save would stand beside the commit file of the one before."""
    withdraw = Op(OpKind.WITHDRAW, b"step-1/.metadata", "n0")
    assert waits(withdraw, put(b"step-1/a"))
    assert waits(withdraw, put(b"step-1/sub/a"))
    assert waits(withdraw, Op(OpKind.UNLINK, b"step-1/a", "n0", commit=True, below=b"step-1"))
    assert not waits(withdraw, put(b"step-2/a"))


def test_directory_times_come_when_nothing_below_is_pending() -> None:
    order = PendingOrder()
    order.add(b"p/~1000", 1, Op(OpKind.DIRATTR, b"", "n0"))
    order.add(b"p/2", 2, put(b"a/b"))
    assert order.blocker(b"p/~1000") == b"p/2"
    order.remove(b"p/2")
    assert order.blocker(b"p/~1000") is None


def test_a_changed_record_keeps_its_place() -> None:
    order = PendingOrder()
    order.add(b"p/1", 1, put(b"a"))
    order.add(b"p/2", 2, put(b"a"))
    order.add(b"p/1", 7, Op(OpKind.PUT, b"a", "n0", cancelled=True))
    assert order.blocker(b"p/1") is None
    assert order.blocker(b"p/2") == b"p/1"


def test_of_an_unknown_operation_nothing_is_known() -> None:
    order = PendingOrder()
    assert order.blocker(b"p/1") is None
    order.remove(b"p/1")
    assert not order.changes_after(b"p/9", b"a")
    assert not order.put_after(b"p/9", b"a")  # carried out by another node, while we asked the PFS


def test_ancestors_end_with_the_root() -> None:
    assert ancestors(b"a/b/c") == [b"a/b", b"a", b""]
    assert ancestors(b"a") == [b""]
    assert ancestors(b"") == []


def test_ten_thousand_operations_are_looked_through_quickly() -> None:
    """Each answer looks at a few queues: with a walk through all operations this would take minutes."""
    order = PendingOrder()
    for number in range(20_000):
        order.add(b"p/%08d" % number, number + 1, put(b"step/%d/file" % (number % 50)))
    commit = put(b"step/.metadata", commit=True)
    order.add(b"p/%08d" % 20_000, 20_001, commit)
    for number in (*range(10_000), *range(19_999, 9_999, -1)):
        assert order.blocker(b"p/%08d" % 20_000) == b"p/%08d" % max(number, 19_999 * (number < 10_000))
        order.remove(b"p/%08d" % number)
    assert order.blocker(b"p/%08d" % 20_000) is None


def test_removals_of_ten_thousand_files_of_a_directory_do_not_all_look_at_each_landing() -> None:
    """It took the daemon 20 s for 3,000 files."""
    waits, looks = Waits(lambda op: False, lambda op: None), 0
    for number in range(10_000):
        waits.put(b"p/%08d" % number, number + 1, Op(OpKind.UNLINK, b"d/%d" % number, "n0", commit=True, below=b"d"))
    waits.put(b"p/%08d" % 10_000, 10_001, Op(OpKind.RMDIR, b"d", "n0", commit=True, below=b""))
    for number in range(10_000):
        freed = waits.remove(b"p/%08d" % number)
        looks += len(freed)
        assert waits.blocker(b"p/%08d" % (number + 1)) is None
        assert b"p/%08d" % (number + 1) in freed
    assert looks < 3 * 10_000


def test_whether_a_content_is_needed_is_found_without_looking_at_what_else_is_pending(
    counted: Callable[[], AbstractContextManager[list[int]]],
) -> None:
    order = PendingOrder()
    order.add(b"p/1", 1, Op(OpKind.PUT, b"s/a", "n0", fid=1, gen=1))
    for number in range(2000):
        op = Op(OpKind.UNLINK, b"t/%d" % number, "n0", fid=number + 9, commit=True, below=b"t")
        order.add(b"p/%d" % (number + 10), number + 10, op)
    order.add(b"p/8000", 8000, Op(OpKind.PUT, b"s/a", "n0", fid=1, gen=2))
    order.add(b"p/9000", 9000, Op(OpKind.PUT, b"s/.metadata", "n0", fid=2, commit=True, below=b"s"))
    with counted() as calls:
        assert order.next_put(b"p/1") == b"p/8000"
        assert not order.commit_between(b"s/a", b"p/1", b"p/8000")
        assert not order.moved_between(b"s/a", b"p/1", b"p/8000")
        assert order.claimed_after(b"p/1", lambda fid: True)
        assert order.claimed_after(b"p/8000", lambda fid: True)
        assert not order.claimed_after(b"p/8000", lambda fid: False)
    assert calls[0] < 1000
