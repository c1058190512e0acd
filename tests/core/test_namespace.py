"""The changes of the namespace: what POSIX says of each, and the pending operations that follow."""

from __future__ import annotations

import errno
from collections.abc import Callable

import msgspec
import pytest
from core_support import ATTRS, DIGEST, Names, on_pfs

from cachexfs.core import attrs, namespace, publication
from cachexfs.core.changes import NewAttrs
from cachexfs.core.namespace import resolve
from cachexfs.core.publication import Content
from cachexfs.core.records import ROOT_FID, Copy, DirTimes, Inode, Life, OpKind, inode_key, life_key, times_key
from cachexfs.errors import FsError


def refused(code: int, function: Callable[[], object]) -> None:
    with pytest.raises(FsError) as found:
        function()
    assert errno.errorcode[found.value.errno] == errno.errorcode[code]


@pytest.fixture
def names() -> Names:
    return Names()


# ---- creations
def test_a_created_file_is_visible_at_once_and_not_drained_while_it_is_open(names: Names) -> None:
    fid = names.create(b"a")
    assert names.listing() == [b"a"]
    assert names.generation(fid).open
    assert names.ops() == []
    assert names.inode(b"a").t_returned_s > 0
    names.mutate(lambda tx: publication.close_created(tx, names.ctx(), fid))
    assert names.ops() == [("put", b"a")]
    names.mutate(lambda tx: publication.close_created(tx, names.ctx(), fid))
    assert names.ops() == [("put", b"a")]


@pytest.mark.parametrize(
    ("name", "code"),
    [(b"", errno.EINVAL), (b".", errno.EINVAL), (b"..", errno.EINVAL), (b"a/b", errno.EINVAL), (b"a\0", errno.EINVAL),
     (b"n" * 256, errno.ENAMETOOLONG), (b".cachexfs", errno.EPERM), (b".cachexfs-tmp-1", errno.EPERM)],
)  # fmt: skip
def test_names_that_cannot_be(names: Names, name: bytes, code: int) -> None:
    """Ours on the PFS among them: the drain was refused them for ever."""
    refused(code, lambda: names.mutate(lambda tx: namespace.create(tx, names.ctx(), ROOT_FID, name, ATTRS)))
    names.create(b"old")
    old, new = (ROOT_FID, b"old"), (ROOT_FID, name)
    refused(code, lambda: names.mutate(lambda tx: namespace.rename(tx, names.ctx(), *old, *new)))


def test_any_byte_but_two_may_be_in_a_name_of_255_bytes(names: Names) -> None:
    name = bytes(b for b in range(1, 256) if b != ord("/")) + b"x"
    names.mutate(lambda tx: namespace.create(tx, names.ctx(), ROOT_FID, name, ATTRS))
    assert names.listing() == [name]


def test_o_excl_decides(names: Names) -> None:
    names.create(b"a")
    refused(errno.EEXIST, lambda: names.create(b"a"))
    refused(errno.EEXIST, lambda: names.mkdir(b"a"))


def test_a_file_is_no_directory(names: Names) -> None:
    names.create(b"a")
    refused(errno.ENOTDIR, lambda: names.create(b"a/b"))
    refused(errno.ENOENT, lambda: names.mutate(lambda tx: namespace.mkdir(tx, names.ctx(), 12288, b"b", ATTRS)))


def test_setgid_is_inherited(names: Names) -> None:
    names.mkdir(b"d")
    names.mutate(lambda tx: attrs.set_attrs(tx, names.ctx(), names.find(b"d"), mode=0o2775, gid=77))
    names.create(b"d/f")
    names.mkdir(b"d/e")
    assert names.inode(b"d/f").gid == 77
    assert names.inode(b"d/f").mode == 0o644
    assert (names.inode(b"d/e").gid, names.inode(b"d/e").mode) == (77, 0o2755)


def test_a_change_of_entries_moves_the_directory_s_times_and_nobody_else_s(names: Names) -> None:
    names.mkdir(b"d")
    names.mkdir(b"d/e")
    root, inner = names.view.dir_times(ROOT_FID), names.view.dir_times(names.find(b"d/e"))
    names.create(b"d/f")
    assert names.view.dir_times(names.find(b"d")) == DirTimes(names.time_ns, names.time_ns)
    assert names.view.dir_times(ROOT_FID) == root
    assert names.view.dir_times(names.find(b"d/e")) == inner


def test_a_symlink_waits_for_its_target(names: Names) -> None:
    names.mkdir(b"ckpt")
    names.mutate(lambda tx: namespace.symlink(tx, names.ctx(), names.find(b"ckpt"), b"latest", b"step-1", ATTRS))
    op = next(op for _, op, _ in names.view.ops() if op.kind == OpKind.SYMLINK)
    assert (op.commit, op.below, op.target, op.path2) == (True, b"ckpt", b"ckpt/step-1", b"step-1")
    inode = names.inode(b"ckpt/latest")
    assert (inode.size, inode.mode, inode.target) == (6, 0o777, b"step-1")


@pytest.mark.parametrize(
    ("base", "target", "found"),
    [(b"", b"a", b"a"), (b"a/b", b"../c", b"a/c"), (b"a", b"../..", None), (b"a", b"/a", None), (b"a", b".", b"a"),
     (b"a", b"..", b""), (b"a", b"b//c/./d", b"a/b/c/d"), (b"", b"..", None)],
)  # fmt: skip
def test_where_links_lead(base: bytes, target: bytes, found: bytes | None) -> None:
    assert resolve(base, target) == found


def test_a_link_to_nothing_or_too_far_is_refused(names: Names) -> None:
    refused(
        errno.ENOENT, lambda: names.mutate(lambda tx: namespace.symlink(tx, names.ctx(), ROOT_FID, b"l", b"", ATTRS))
    )
    long = b"x" * 4096
    refused(
        errno.ENAMETOOLONG,
        lambda: names.mutate(lambda tx: namespace.symlink(tx, names.ctx(), ROOT_FID, b"l", long, ATTRS)),
    )


# ---- removals
def test_unlink_removes_and_cancels_what_need_not_land(names: Names) -> None:
    fid = names.write(b"a")
    assert names.unlink(b"a") == fid
    assert names.listing() == []
    assert names.view.inode(fid) is None
    assert names.view.generation(fid) is None
    puts = [op for _, op, _ in names.view.ops() if op.kind == OpKind.PUT]
    assert [op.cancelled for op in puts] == [True]


def test_what_never_was_to_land_needs_no_removal(names: Names) -> None:
    names.create(b"a")
    names.unlink(b"a")
    assert names.ops() == []


def test_errors_of_removals(names: Names) -> None:
    names.mkdir(b"d")
    names.create(b"d/f")
    refused(errno.ENOENT, lambda: names.unlink(b"x"))
    refused(errno.EISDIR, lambda: names.unlink(b"d"))
    refused(errno.ENOENT, lambda: names.rmdir(b"x"))
    refused(errno.ENOTDIR, lambda: names.rmdir(b"d/f"))
    refused(errno.ENOTEMPTY, lambda: names.rmdir(b"d"))
    names.unlink(b"d/f")
    names.rmdir(b"d")
    assert names.listing() == []


def test_a_removed_directory_leaves_no_record(names: Names) -> None:
    fid = names.mkdir(b"d")
    names.rmdir(b"d")
    assert names.view.entry(inode_key(fid)) is None
    assert names.view.entry(times_key(fid)) is None
    assert [path for kind, path in names.ops(attrs=True) if kind == OpKind.DIRATTR] == [b""]
    refused(errno.ENOENT, lambda: names.mutate(lambda tx: namespace.create(tx, names.ctx(), fid, b"f", ATTRS)))


# ---- renames
def test_errors_of_renames(names: Names) -> None:
    names.mkdir(b"d")
    names.mkdir(b"e")
    names.create(b"e/x")
    names.create(b"f")
    refused(errno.ENOENT, lambda: names.rename(b"x", b"y"))
    refused(errno.EISDIR, lambda: names.rename(b"f", b"d"))
    refused(errno.ENOTDIR, lambda: names.rename(b"d", b"f"))
    refused(errno.ENOTEMPTY, lambda: names.rename(b"d", b"e"))
    refused(errno.EINVAL, lambda: names.rename(b"d", b"d/d"))
    refused(errno.EEXIST, lambda: names.rename(b"f", b"e/x", namespace.RENAME_NOREPLACE))
    refused(errno.EINVAL, lambda: names.rename(b"f", b"g", 2))
    assert names.listing() == [b"d", b"e", b"f"]


def test_a_rename_to_itself_changes_nothing(names: Names) -> None:
    names.write(b"f")
    before = names.ops(attrs=True)
    assert names.rename(b"f", b"f") is None
    assert names.ops(attrs=True) == before


def test_a_rename_replaces_a_file_and_says_which(names: Names) -> None:
    old = names.write(b"a")
    new = names.write(b"a.tmp")
    assert names.rename(b"a.tmp", b"a") == old
    assert names.listing() == [b"a"]
    assert names.find(b"a") == new
    assert names.view.inode(old) is None


def test_a_directory_replaces_an_empty_one(names: Names) -> None:
    names.mkdir(b"d")
    names.create(b"d/x")
    gone = names.mkdir(b"e")
    assert names.rename(b"d", b"e") == gone
    assert names.listing(b"e") == [b"x"]
    assert names.view.inode(gone) is None


def test_what_is_unknown_to_the_pfs_is_renamed_without_an_operation(names: Names) -> None:
    fid = names.create(b"a")
    names.rename(b"a", b"b")
    assert names.ops() == []
    names.publish(b"b")
    assert names.ops() == [("put", b"b")]
    assert names.find(b"b") == fid


def test_a_rename_between_directories_waits_for_both(names: Names) -> None:
    names.mkdir(b"a")
    names.mkdir(b"b")
    names.write(b"a/f")
    names.rename(b"a/f", b"b/f")
    op = next(op for _, op, _ in names.view.ops() if op.kind == OpKind.RENAME)
    assert (op.commit, op.below, op.target, op.path, op.path2) == (True, b"b", b"a", b"a/f", b"b/f")


def test_children_keep_the_path_of_their_own_time(names: Names) -> None:
    names.mkdir(b"tmp")
    names.write(b"tmp/a")
    names.rename(b"tmp", b"step")
    names.write(b"step/b")
    assert names.ops() == [("mkdir", b"tmp"), ("put", b"tmp/a"), ("rename", b"tmp"), ("put", b"step/b")]


# ---- publication
def test_the_last_publication_wins_and_a_conflict_is_told(names: Names) -> None:
    fid = names.write(b"a")
    content = Content(5, DIGEST, DIGEST, "s", (), 7)
    made = names.mutate(lambda tx: publication.publish(tx, names.ctx(), fid, 1, content))
    assert made is not None
    assert (made.gen, made.conflict) == (3, "n0")
    assert names.inode(b"a").size == 5
    made = names.mutate(lambda tx: publication.publish(tx, names.ctx(), fid, 3, content))
    assert made is not None
    assert made.conflict == ""


def test_what_was_removed_is_not_published(names: Names) -> None:
    fid = names.create(b"a")
    names.unlink(b"a")
    assert (
        names.mutate(lambda tx: publication.publish(tx, names.ctx(), fid, 1, Content(5, DIGEST, DIGEST, "s", (), 7)))
        is None
    )
    assert names.ops() == []


def test_a_new_generation_has_reached_nothing(names: Names) -> None:
    fid = names.write(b"a")
    names.drained()
    names.mutate(lambda tx: tx.put(inode_key(fid), msgspec.structs.replace(names.inode(b"a"), t_pfs_s=9.0, error="x")))
    names.publish(b"a")
    inode = names.inode(b"a")
    assert (inode.t_pfs_s, inode.t_partner_s, inode.error) == (0.0, 0.0, "")
    assert inode.pfs is not None
    assert inode.pfs.gen < inode.gen


def test_begin_change_is_told_until_published(names: Names) -> None:
    fid = names.write(b"a")
    names.mutate(lambda tx: publication.begin_change(tx, names.ctx(), fid))
    assert names.inode(b"a").writing == "n0"
    names.publish(b"a")
    assert names.inode(b"a").writing == ""


def test_a_tracker_waits_for_what_it_points_to(names: Names) -> None:
    names.mkdir(b"ckpt")
    names.create(b"ckpt/latest")
    names.publish(b"ckpt/latest", target=b"ckpt/step-1")
    op = next(op for _, op, _ in names.view.ops() if op.kind == OpKind.PUT)
    assert (op.commit, op.below, op.target) == (True, b"ckpt", b"ckpt/step-1")


# ---- copies
def test_partner_is_reached_with_enough_live_copies(names: Names) -> None:
    names = Names(replicas=1)
    names.mutate(lambda tx: [tx.put(life_key(n), Life(n, "")) for n in ("n0", "n1")])
    fid = names.write(b"a")
    memory, nvme = Copy("n0", "m0", "memory", 1.0), Copy("n1", "v1", "nvme", 2.0)
    names.mutate(lambda tx: publication.add_copy(tx, names.ctx(), fid, 2, memory))
    assert names.inode(b"a").t_partner_s == 0
    names.mutate(lambda tx: publication.add_copy(tx, names.ctx(), fid, 1, nvme))  # of an older generation
    assert names.inode(b"a").copies == (memory,)
    names.mutate(lambda tx: publication.add_copy(tx, names.ctx(), fid, 2, nvme))
    assert names.inode(b"a").t_partner_s > 0
    names.mutate(lambda tx: publication.drop_copies(tx, names.ctx(), fid, 2, [("n1", "v1")], "gone"))
    inode = names.inode(b"a")
    assert (inode.copies, inode.t_partner_s, inode.error) == ((memory,), 0.0, "gone")


def test_an_empty_file_is_as_safe_as_its_name(names: Names) -> None:
    names = Names(replicas=1)
    names.create(b"a")
    assert names.inode(b"a").t_partner_s > 0


# ---- commit files
def checkpoint(names: Names, *, members: frozenset[bytes] | None = frozenset({b"m"})) -> int:
    """``ckpt`` with one member ``m``, all on the PFS; returns the commit file's id."""
    names.mkdir(b"ckpt")
    names.write(b"ckpt/m")
    fid = names.write(b"ckpt/.metadata")
    if members is not None:
        names.members[fid, names.inode(b"ckpt/.metadata").gen] = members
    names.drained()
    return fid


CHANGES: list[Callable[[Names], object]] = [
    lambda names: names.publish(b"ckpt/m"),
    lambda names: names.unlink(b"ckpt/m"),
    lambda names: names.rename(b"ckpt/m", b"ckpt/other"),
    lambda names: names.rename(b"ckpt/m", b"m"),
    lambda names: (names.write(b"new"), names.rename(b"new", b"ckpt/m")),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("members", [frozenset({b"m"}), None])
def test_a_commit_file_leaves_the_pfs_before_a_member_changes(
    names: Names, change: Callable[[Names], object], members: frozenset[bytes] | None
) -> None:
    checkpoint(names, members=members)
    change(names)
    kinds = [op for op in names.ops() if op[1].startswith(b"ckpt")]
    assert kinds[0] == ("withdraw", b"ckpt/.metadata")
    assert [kind for kind, _ in kinds].count("withdraw") == 1


def test_the_last_withdrawal_is_enough(names: Names) -> None:
    checkpoint(names)
    names.publish(b"ckpt/m")
    names.publish(b"ckpt/m")
    assert [kind for kind, _ in names.ops()] == ["withdraw", "put", "put"]


def test_a_file_that_it_does_not_name_leaves_the_commit_file_alone(names: Names) -> None:
    checkpoint(names)
    names.write(b"ckpt/log")
    names.publish(b"ckpt/log")
    names.unlink(b"ckpt/log")
    assert "withdraw" not in [kind for kind, _ in names.ops()]


def test_a_commit_file_that_is_removed_while_its_withdrawal_waits_is_removed(names: Names) -> None:
    """The withdrawal finds no record any more: the removal must still come before the members' changes."""
    checkpoint(names)
    names.unlink(b"ckpt/.metadata")
    names.publish(b"ckpt/m")
    assert names.ops() == [("unlink", b"ckpt/.metadata"), ("put", b"ckpt/m")]


def test_a_withdrawn_file_is_removed_from_where_it_is_held(names: Names) -> None:
    fid = checkpoint(names)
    inode = names.inode(b"ckpt/.metadata")
    names.mutate(lambda tx: tx.put(inode_key(fid), on_pfs(inode, hidden="h")))
    names.unlink(b"ckpt/.metadata")
    op = next(op for _, op, _ in names.view.ops() if op.kind == OpKind.UNLINK)
    assert (op.path, op.path2) == (b"ckpt/.metadata", b"h")


def test_a_withdrawn_file_that_is_replaced_is_removed_from_where_it_is_held(names: Names) -> None:
    fid = checkpoint(names)
    inode = names.inode(b"ckpt/.metadata")
    names.mutate(lambda tx: tx.put(inode_key(fid), on_pfs(inode, hidden="h")))
    names.write(b"ckpt/tmp")
    names.rename(b"ckpt/tmp", b"ckpt/.metadata")
    assert ("unlink", b".cachexfs/held/h") in names.ops()


# ---- attributes
def test_attributes_of_a_file_follow_what_is_on_the_pfs(names: Names) -> None:
    fid = names.write(b"a")
    names.mutate(lambda tx: attrs.set_attrs(tx, names.ctx(), fid, mode=0o600))
    names.mutate(lambda tx: attrs.set_attrs(tx, names.ctx(), fid, mtime_ns=5))
    assert [kind for kind, _ in names.ops(attrs=True) if kind == OpKind.ATTR] == [OpKind.ATTR]
    assert (names.inode(b"a").mode, names.inode(b"a").mtime_ns) == (0o600, 5)


def test_attributes_of_a_directory(names: Names) -> None:
    fid = names.mkdir(b"d")
    names.mutate(lambda tx: attrs.set_attrs(tx, names.ctx(), fid, mode=0o700, uid=3, gid=4, mtime_ns=5))
    times = names.view.dir_times(fid)
    assert times is not None
    assert times.mtime_ns == 5
    assert names.inode(b"d").mode == 0o700
    refused(errno.ENOENT, lambda: names.mutate(lambda tx: attrs.set_attrs(tx, names.ctx(), 12288, mode=1)))


def test_the_root_is_made_once(names: Names) -> None:
    names.mutate(lambda tx: namespace.join_root(tx, names.ctx(), NewAttrs(0o700, 5, 5), imported=False))
    root = names.view.inode(ROOT_FID)
    assert isinstance(root, Inode)
    assert (root.mode, root.uid, root.imported) == (0o755, 0, True)


# ---- commit files on the PFS
def _saved(names: Names) -> None:
    names.mkdir(b"s")
    names.write(b"s/m")
    names.write(b"s/.metadata")
    names.drained()


def test_an_overwritten_member_holds_the_withdrawal_back_and_a_removed_one_lets_it_go(names: Names) -> None:
    _saved(names)
    names.write(b"s/n")
    names.drained()
    names.publish(b"s/m")
    held = [(op.kind, op.held) for _, op, _ in names.view.ops() if op.kind == OpKind.WITHDRAW]
    assert held == [(OpKind.WITHDRAW, True)]
    names.unlink(b"s/n")
    assert [op.held for _, op, _ in names.view.ops() if op.kind == OpKind.WITHDRAW] == [False]


def test_what_was_written_over_in_place_is_not_claimed_by_a_commit_file_that_has_yet_to_land(names: Names) -> None:
    """The kernel writes into the staged file: the bytes that the commit file was saved with are nowhere."""
    names.mkdir(b"s")
    fid = names.create(b"s/m")
    names.publish(b"s/m", stage="same")
    names.write(b"s/.metadata.tmp")
    names.rename(b"s/.metadata.tmp", b"s/.metadata")
    content = Content(10, b"d" * 16, b"d" * 16, "same", (), names.time_ns, torn=True)
    names.mutate(lambda tx: publication.publish(tx, names.ctx(), fid, 2, content))
    assert [op.cancelled for _, op, _ in names.view.ops() if op.kind == OpKind.RENAME] == [True]
    assert [op.held for _, op, _ in names.view.ops() if op.kind == OpKind.WITHDRAW] == [False]
