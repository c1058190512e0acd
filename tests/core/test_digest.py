"""Digests are of 1 MiB blocks, whatever pieces the content arrives in."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cachexfs.adapters.file_digest import digest_file
from cachexfs.core.digest import (
    BLOCK_BYTES,
    FileDigest,
    block_count,
    block_digest,
    block_length,
    split_blocks,
    tree_digest,
)
from cachexfs.errors import CorruptError

CONTENT = bytes(range(256)) * (3 * 4096) + b"tail"  # 3 MiB and 4 bytes


def expected(content: bytes) -> tuple[bytes, bytes, list[bytes]]:
    blocks = [block_digest(content[at : at + BLOCK_BYTES]) for at in range(0, len(content), BLOCK_BYTES)]
    return xxhash.xxh3_128_digest(content), xxhash.xxh3_128_digest(b"".join(blocks)), blocks


def test_known_vector_of_xxh3_128() -> None:
    # From xxHash's own test suite: the digest of nothing.
    assert block_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, len(CONTENT)), max_size=6), size=st.sampled_from([0, 1, BLOCK_BYTES, len(CONTENT)]))
def test_pieces_do_not_matter(cuts: list[int], size: int) -> None:
    content = CONTENT[:size]
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    digest = FileDigest()
    for low, high in itertools.pairwise(edges):
        digest.update(content[low:high])
    found = digest.result()
    assert (found.file, found.tree, list(found.blocks)) == expected(content)
    assert digest.size_bytes == size


def test_result_may_be_asked_for_on_the_way() -> None:
    digest = FileDigest()
    digest.update(CONTENT[:1000])
    assert digest.result().blocks == (block_digest(CONTENT[:1000]),)
    digest.update(CONTENT[1000:])
    assert list(digest.result().blocks) == expected(CONTENT)[2]


def test_tree_names_order_and_number_of_blocks() -> None:
    one, two = block_digest(b"1"), block_digest(b"2")
    assert len({tree_digest([]), tree_digest([one]), tree_digest([one, two]), tree_digest([two, one])}) == 4
    assert list(split_blocks(one + two)) == [one, two]


@pytest.mark.parametrize(
    ("size", "count", "last"),
    [(0, 0, 0), (1, 1, 1), (BLOCK_BYTES, 1, BLOCK_BYTES), (BLOCK_BYTES + 1, 2, 1)],
)
def test_counts_and_lengths(size: int, count: int, last: int) -> None:
    assert block_count(size) == count
    assert block_length(size, max(count - 1, 0)) == last


def test_digest_of_a_file_by_path_and_by_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    assert digest_file(path, len(CONTENT)) == expected(CONTENT)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert digest_file(fd, BLOCK_BYTES + 5) == expected(CONTENT[: BLOCK_BYTES + 5])
        assert os.lseek(fd, 0, os.SEEK_CUR) == 0
    finally:
        os.close(fd)


def test_a_file_that_is_shorter_than_said_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with pytest.raises(CorruptError, match="ends at byte 3145732, 1 bytes early"):
        digest_file(path, len(CONTENT) + 1)
