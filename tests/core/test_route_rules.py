"""Routes: one decision for what begins in a directory, whoever begins it; a late PFS takes it back."""

from collections.abc import Callable

import msgspec
import pytest
from core_support import ATTRS, DIGEST, Names, on_pfs

from cachexfs.core import namespace, publication
from cachexfs.core.changes import Ctx
from cachexfs.core.publication import Content
from cachexfs.core.records import inode_key
from cachexfs.core.routes import AUTO, DIRECT, HOLDS_S, LATE, NEAR_S, PARTNER


class Clocked(Names):
    """Creates with ``route=auto`` at a time of the test's own."""

    def __init__(self) -> None:
        super().__init__(1)
        self.now_s = 1000.0
        self.asked = 0

    def _ctx(self, choice: str, route: str = AUTO) -> Ctx:
        def choose() -> str:
            self.asked += 1
            return choice

        plain = self.ctx()
        return Ctx(
            plain.node, plain.now_ns, self.now_s, plain.next_op, plain.new_fid, plain.members_of, route, choose
        )  # fmt: skip

    def begin(self, path: bytes, choice: str, route: str = AUTO) -> str:
        """Create a file on a node that would choose so; the route that it got."""
        made = self.mutate(lambda tx: namespace.create(tx, self._ctx(choice, route), *self.at(path), ATTRS))
        return self.inode(path).route if made else ""

    def change(self, path: bytes, choice: str) -> str:
        return self.mutate(lambda tx: publication.begin_change(tx, self._ctx(choice), self.find(path)))


@pytest.fixture
def names() -> Clocked:
    made = Clocked()
    for name in (b"a", b"b", b"a/sub"):
        made.mkdir(name)
    return made


@pytest.mark.parametrize(("first", "other"), [(PARTNER, DIRECT), (DIRECT, PARTNER)])
def test_the_first_to_begin_decides_for_a_directory_until_the_decision_is_old(
    names: Clocked, first: str, other: str
) -> None:
    assert names.begin(b"a/0", first) == first
    names.now_s += HOLDS_S - 1
    assert names.begin(b"a/1", other) == first
    assert names.asked == 1
    names.now_s += 2
    assert names.begin(b"a/2", other) == other


def test_directories_that_begin_together_take_one_route(names: Clocked) -> None:
    assert names.begin(b"a/sub/0", DIRECT) == DIRECT
    assert names.begin(b"b/0", PARTNER) == DIRECT
    names.now_s += NEAR_S + 1
    assert names.begin(b"a/0", PARTNER) == PARTNER
    assert names.begin(b"b/1", PARTNER) == DIRECT  # its own decision holds longer


def test_who_names_a_route_gets_it_and_decides_for_nobody(names: Clocked) -> None:
    assert names.begin(b"a/0", PARTNER, DIRECT) == DIRECT
    assert names.begin(b"a/1", PARTNER) == PARTNER
    assert names.begin(b"a/2", PARTNER, DIRECT) == DIRECT


def test_what_is_written_anew_is_decided_anew_and_recorded_with_the_content(names: Clocked) -> None:
    names.begin(b"a/0", DIRECT)
    names.now_s += HOLDS_S + 1
    route = names.change(b"a/0", PARTNER)
    assert (route, names.inode(b"a/0").route) == (PARTNER, DIRECT)  # not before it is published
    content = Content(5, DIGEST, DIGEST, "s", (), 7, route=route)
    names.mutate(lambda tx: publication.publish(tx, names.ctx(), names.find(b"a/0"), 1, content))
    assert names.inode(b"a/0").route == PARTNER


def _publish(names: Clocked, path: bytes) -> None:
    content = Content(5, DIGEST, DIGEST, "s", (), 7, route=DIRECT)
    names.mutate(lambda tx: publication.publish(tx, names.ctx(), names.find(path), 1, content))


def test_a_late_pfs_takes_the_decision_back(names: Clocked) -> None:
    assert names.begin(b"a/0", DIRECT) == DIRECT
    _publish(names, b"a/0")
    fid = names.find(b"a/0")
    names.mutate(lambda tx: publication.fall_back(tx, names._ctx(DIRECT), fid, 2))
    assert names.inode(b"a/0").route == LATE
    assert [names.begin(path, DIRECT) for path in (b"a/1", b"b/0")] == [PARTNER, PARTNER]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda names: names.mutate(lambda tx: tx.put(inode_key(names.find(b"a/0")), on_pfs(names.inode(b"a/0")))),
        lambda names: names.publish(b"a/0"),
        lambda names: names.mutate(
            lambda tx: tx.put(
                inode_key(names.find(b"a/0")), msgspec.structs.replace(names.inode(b"a/0"), route=PARTNER)
            )
        ),
    ],
    ids=["on the PFS", "a later content", "another route"],
)
def test_only_what_waits_for_the_pfs_falls_back(names: Clocked, spoil: Callable[[Clocked], object]) -> None:
    names.begin(b"a/0", DIRECT)
    _publish(names, b"a/0")
    spoil(names)
    before = names.inode(b"a/0").route
    names.mutate(lambda tx: publication.fall_back(tx, names._ctx(DIRECT), names.find(b"a/0"), 2))
    assert names.inode(b"a/0").route == before
