"""Several names of one file, user attributes, and what an unflushed file replaces on the PFS. Pure."""

from __future__ import annotations

import errno

import pytest
from core_support import Names

from cachexfs.core import attrs, namespace
from cachexfs.core.records import OpKind
from cachexfs.errors import FsError


@pytest.fixture
def names() -> Names:
    return Names()


def link(names: Names, old: bytes, new: bytes) -> None:
    fid = names.find(old)
    names.mutate(lambda tx: namespace.link(tx, names.ctx(), fid, *names.at(new)))


def paths(names: Names) -> list[tuple[str, bytes, bytes]]:
    return [(op.kind, op.path, op.path2) for _, op, _ in names.view.ops() if op.kind != OpKind.DIRATTR]


def test_a_link_counts_and_moves_the_ctime(names: Names) -> None:
    names.write(b"a")
    before = names.inode(b"a")
    link(names, b"a", b"b")
    after = names.inode(b"b")
    assert (after.nlink, after.mtime_ns) == (2, before.mtime_ns)
    assert after.ctime_ns > before.ctime_ns
    names.unlink(b"a")
    assert names.inode(b"b").nlink == 1
    names.unlink(b"b")
    assert names.listing() == []


def test_a_link_is_an_operation_once_the_pfs_may_know_the_file(names: Names) -> None:
    names.create(b"a")
    link(names, b"a", b"b")
    assert paths(names) == []
    names.publish(b"a")
    assert paths(names) == [("put", b"a", b""), ("link", b"a", b"b")]
    link(names, b"a", b"c")
    assert paths(names)[-1] == ("link", b"a", b"c")
    assert names.view.is_moving(names.find(b"a"))


def test_every_publication_puts_all_names_on_the_new_file(names: Names) -> None:
    names.write(b"a")
    link(names, b"a", b"b")
    names.drained()
    names.publish(b"b")
    assert paths(names) == [("put", b"a", b""), ("link", b"a", b"b")]


def test_a_name_that_goes_takes_no_bytes_with_it(names: Names) -> None:
    names.write(b"a")
    link(names, b"a", b"b")
    names.unlink(b"a")
    assert paths(names) == [("put", b"a", b""), ("link", b"a", b"b"), ("unlink", b"a", b"")]
    assert not any(op.cancelled for _, op, _ in names.view.ops())


def test_a_rename_over_another_name_of_itself_does_nothing_and_over_one_of_several_leaves_the_rest(
    names: Names,
) -> None:
    names.write(b"a")
    link(names, b"a", b"b")
    names.drained()
    assert names.rename(b"a", b"b") is None
    assert names.listing() == [b"a", b"b"]
    names.write(b"c")
    names.rename(b"c", b"b")
    assert names.inode(b"a").nlink == 1


@pytest.mark.parametrize(
    ("old", "new", "code"), [(b"d", b"x", errno.EPERM), (b"a", b"d", errno.EEXIST), (b"a", b"a", errno.EEXIST)]
)
def test_errors_of_links(names: Names, old: bytes, new: bytes, code: int) -> None:
    names.write(b"a")
    names.mkdir(b"d")
    with pytest.raises(FsError) as caught:
        link(names, old, new)
    assert caught.value.errno == code


@pytest.mark.parametrize("gone", [lambda names: names.unlink(b"b"), lambda names: names.rename(b"b", b"c")])
def test_what_an_unflushed_file_replaced_does_not_come_back_on_the_pfs(names: Names, gone) -> None:  # type: ignore[no-untyped-def]
    """Renamed over a file that is on the PFS and gone before its own bytes landed: the old bytes must go too."""
    names.write(b"b")
    names.drained()
    names.create(b"a")
    names.rename(b"a", b"b")
    gone(names)
    assert [path for _, path, _ in paths(names)] == [b"b"]


def test_commit_files_are_found_without_a_walk(names: Names) -> None:
    names.write(b"x")
    names.write(b".metadata")
    names.write(b"m.index.json")
    root = names.find(b"")
    assert names.view.listers(root) == [b".metadata", b"m.index.json"]
    names.rename(b".metadata", b"y")
    names.unlink(b"m.index.json")
    assert names.view.listers(root) == []


def test_user_attributes_are_bounded(names: Names) -> None:
    fid = names.write(b"a")
    names.mutate(lambda tx: attrs.set_xattr(tx, names.ctx(), fid, b"user.a", b"1"))
    assert dict(names.inode(b"a").xattrs) == {b"user.a": b"1"}
    with pytest.raises(FsError) as caught:
        names.mutate(lambda tx: attrs.set_xattr(tx, names.ctx(), fid, b"user.b", bytes(64 << 10)))
    assert caught.value.errno == errno.ENOSPC
    names.mutate(lambda tx: attrs.set_xattr(tx, names.ctx(), fid, b"user.a", None))
    assert names.inode(b"a").xattrs == ()
