"""Who passes what is stuck, and who does not: the rules of promise 3 for what is held, lost, parked or not ready."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import pytest

from cachexfs.core.records import Op, OpKind
from cachexfs.core.waits import Waits


class Queue:
    """Pending operations in the order in which they are added; what is lost, what commit files list."""

    def __init__(self) -> None:
        self.lost: set[bytes] = set()
        self.members: dict[bytes, Collection[bytes]] = {}
        self.waits = Waits(lambda op: op.path in self.lost, lambda op: self.members.get(op.path))
        self.count = 0

    def add(self, kind: str, path: bytes, **fields: object) -> bytes:
        self.count += 1
        key = b"p/%04d" % self.count
        self.waits.put(key, self.count, Op(kind, path, "n0", fid=self.count, **fields))  # type: ignore[arg-type]
        return key

    def change(self, key: bytes, **fields: object) -> None:
        op = self.waits.order.op(key)
        assert op is not None
        self.waits.put(key, 0, msgspec.structs.replace(op, **fields))

    def commit(self, path: bytes) -> bytes:
        return self.add(OpKind.PUT, path, commit=True, below=path.rpartition(b"/")[0])


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_what_waits_for_a_held_withdrawal_is_stuck_once_it_is_ready(queue: Queue) -> None:
    held = queue.add(OpKind.WITHDRAW, b"s/.metadata", held=True)
    member = queue.add(OpKind.PUT, b"s/m", size=1)
    assert queue.waits.stuck(held)
    assert queue.waits.blocker(member) == held
    assert not queue.waits.stuck(member)  # it may still be copied
    queue.change(member, ready=True)
    assert queue.waits.stuck(member)
    assert queue.waits.is_held(member)
    queue.change(held, held=False)
    assert not queue.waits.stuck(member)
    assert queue.waits.blocker(member) == held
    queue.waits.remove(held)
    assert queue.waits.blocker(member) is None


def test_commit_operations_elsewhere_pass_what_is_stuck(queue: Queue) -> None:
    queue.add(OpKind.WITHDRAW, b"s/.metadata", held=True)
    member = queue.add(OpKind.PUT, b"s/m", size=1)
    removal = queue.add(OpKind.RMDIR, b"old", commit=True, below=b"")
    assert queue.waits.blocker(removal) == member
    queue.change(member, ready=True)
    assert queue.waits.blocker(removal) is None
    directory = queue.add(OpKind.RMDIR, b"s", commit=True, below=b"")
    assert queue.waits.blocker(directory) is not None  # the order of a path and what lies below it stays


def test_a_pointer_waits_for_what_is_stuck_at_its_target_only(queue: Queue) -> None:
    queue.lost.add(b"s/m")
    lost = queue.add(OpKind.PUT, b"s/m", size=1)
    there = queue.add(OpKind.PUT, b"latest", commit=True, below=b"", target=b"s")
    assert queue.waits.blocker(there) == lost
    queue.change(there, ready=True)
    assert queue.waits.stuck(there)
    elsewhere = queue.add(OpKind.SYMLINK, b"best", path2=b"t", commit=True, below=b"", target=b"t")
    assert queue.waits.blocker(elsewhere) is None


def test_a_commit_file_waits_for_a_lost_or_refused_member_and_passes_other_files(queue: Queue) -> None:
    queue.members[b"s/.metadata"] = {b"m"}
    queue.lost |= {b"s/m", b"s/other"}
    other, lost = queue.add(OpKind.PUT, b"s/other", size=1), queue.add(OpKind.PUT, b"s/m", size=1)
    commit = queue.commit(b"s/.metadata")
    assert queue.waits.blocker(commit) == lost
    queue.lost.discard(b"s/m")
    queue.change(lost, parked="EACCES")
    assert queue.waits.blocker(commit) == lost
    queue.waits.remove(lost)
    assert queue.waits.blocker(commit) is None
    assert queue.waits.stuck(other)


def test_a_commit_file_of_unknown_members_passes_nothing_beside_it(queue: Queue) -> None:
    queue.lost.add(b"s/other")
    lost = queue.add(OpKind.PUT, b"s/other", size=1)
    commit = queue.commit(b"s/.metadata")
    assert queue.waits.blocker(commit) == lost
    assert queue.waits.blocker(queue.commit(b"s/trainer_state.json")) == commit
    assert queue.waits.blocker(queue.commit(b"t/.metadata")) is None


def test_what_has_passed_a_stuck_file_does_not_wait_for_it_when_nothing_is_stuck_any_more(queue: Queue) -> None:
    """It was told that it may land, then that it may not: and nobody told it when that file had landed."""
    refused = queue.add(OpKind.PUT, b"d/new", size=1, parked="EACCES")
    removal = queue.add(OpKind.UNLINK, b"d/old", commit=True, below=b"d")
    assert queue.waits.blocker(removal) is None
    queue.change(refused, parked="")
    assert queue.waits.blocker(removal) is None
    assert removal not in queue.waits.remove(refused)


def test_a_removal_passes_a_file_that_the_pfs_has_no_room_for(queue: Queue) -> None:
    full = queue.add(OpKind.PUT, b"d/new", size=1, parked="ENOSPC")
    for directory in (b"d", b"elsewhere"):
        withdrawal = queue.add(OpKind.WITHDRAW, directory + b"/.metadata")
        assert queue.waits.blocker(withdrawal) is None
        queue.waits.remove(withdrawal)
        assert queue.waits.blocker(queue.add(OpKind.UNLINK, directory + b"/old", commit=True, below=directory)) is None
    again = queue.add(OpKind.UNLINK, b"d/new", commit=True, below=b"d")
    assert queue.waits.blocker(again) == full
