"""A commit file is parsed once, however many there are: what is kept is bounded by the names in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from cachexfs.core.formats import Members
from cachexfs.engine import commit_files
from cachexfs.engine.commit_files import CommitFiles
from cachexfs.engine.content import Reader
from cachexfs.engine.files import Files
from cachexfs.engine.node import Node


def kept(checkpoints: int, files: int) -> int:
    """How many of so many parsed commit files with so many names each are still known."""
    known = CommitFiles(cast(Node, None), cast(Files, None), cast(Reader, None), None)
    members = Members(b".metadata", {b"%d" % number: 1 for number in range(files)})
    for fid in range(checkpoints):
        known._keep((fid, (), 0, 0), members, {})
        known._keep((fid, (), 0, 0), members, {})
    assert known._names == len(known._parsed) * (files + 1)
    return len(known._parsed)


def test_a_thousand_checkpoints_are_known_at_a_time() -> None:
    """Above 256 each question about all of them once read them all again, and ``status`` gave up."""
    assert kept(1000, 64) == 1000


def test_large_ones_take_the_place_of_others() -> None:
    assert kept(20, commit_files.CACHE_NAMES_MAX // 4) == 3
    assert kept(3, 2 * commit_files.CACHE_NAMES_MAX) == 1


def test_what_could_not_be_read_is_tried_again_at_once_when_the_pfs_is_back() -> None:
    """`cannot be read now` stood for half a minute, however soon it could."""
    pfs, clock = SimpleNamespace(state="hung"), SimpleNamespace(now_s=lambda: 100.0)
    node = cast(Node, SimpleNamespace(pfs=pfs, clock=clock))
    reading = commit_files.Reading(90.0)
    reading.failed(node, "no answer")
    reading.done.set()
    assert not reading.is_over(node)
    pfs.state = "ok"
    assert reading.is_over(node)
    reading.failed(node, "a node does not answer")  # while the PFS does
    assert not reading.is_over(node)
    clock.now_s = lambda: 100.0 + commit_files.LATER_S + 1
    assert reading.is_over(node)
