"""A manifest is believed only when its parts are in bounds and agree."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachexfs.core import manifest as manifests
from cachexfs.core.digest import BLOCK_BYTES, DIGEST_BYTES, block_digest, tree_digest
from cachexfs.core.manifest import FILE_BYTES_MAX, MANIFEST_BYTES_MAX, MEMBER_BYTES_MAX, Base, Manifest, Member
from cachexfs.core.messages import PAYLOAD_BYTES_MAX
from cachexfs.errors import CorruptError

BLOCKS = [block_digest(b"a"), block_digest(b"b")]
GOOD = Manifest(
    fid=8192,
    path=b"run/step-10/__0_0.distcp",
    stage="2000.7.a",
    size=BLOCK_BYTES + 1,
    digest=block_digest(b"ab"),
    tree=tree_digest(BLOCKS),
    blocks=b"".join(BLOCKS),
    mode=0o640,
    uid=1000,
    gid=1000,
    mtime_ns=1_700_000_000_000_000_001,
    atime_ns=-1,
    gen=3,
    origin="n1",
    revision=99,
    published=True,
)


def test_round_trip() -> None:
    assert manifests.decode(manifests.encode(GOOD)) == GOOD
    assert GOOD.block_count == 2
    assert [GOOD.block(0), GOOD.block(1)] == BLOCKS


@given(
    size=st.integers(0, 40 * BLOCK_BYTES),
    path=st.lists(
        st.binary(min_size=1, max_size=20).filter(lambda b: not set(b) & {0, 47} and b not in (b".", b"..")), max_size=5
    ).map(b"/".join),
    published=st.booleans(),
    mtime_ns=st.integers(-(1 << 63), (1 << 63) - 1),
)
def test_round_trip_of_any(size: int, path: bytes, published: bool, mtime_ns: int) -> None:
    blocks = [block_digest(bytes([i])) for i in range(-(-size // BLOCK_BYTES))]
    manifest = msgspec.structs.replace(
        GOOD,
        size=size,
        path=path,
        blocks=b"".join(blocks),
        tree=tree_digest(blocks),
        published=published,
        mtime_ns=mtime_ns,
    )
    assert manifests.decode(manifests.encode(manifest)) == manifest


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"fid": 0},
        {"fid": 8193},
        {"fid": 1 << 62},
        {"fid": -4096},
        {"path": b"/etc/passwd"},
        {"path": b"a/../b"},
        {"path": b"a//b"},
        {"path": b"a/"},
        {"path": b"./a"},
        {"path": b"a\0b"},
        {"path": b"x" * 256},
        {"path": b"x/" * 2049 + b"x"},
        {"stage": "../x"},
        {"stage": ""},
        {"stage": ".."},
        {"stage": "ab\n"},
        {"stage": "a" * 101},
        {"stage": "AB"},
        {"size": BLOCK_BYTES},
        {"size": 2 * BLOCK_BYTES + 1},
        {"size": -1},
        {"size": FILE_BYTES_MAX + 1},
        {"digest": b"short"},
        {"tree": block_digest(b"other")},
        {"blocks": BLOCKS[0]},
        {"blocks": BLOCKS[1] + BLOCKS[0]},
        {"blocks": b"".join(BLOCKS)[:-1]},
        {"mode": 0o10000},
        {"uid": -1},
        {"gid": 1 << 32},
        {"mtime_ns": 1 << 63},
        {"gen": -1},
        {"origin": "x" * 256},
        {"revision": -1},
    ],
)
def test_out_of_bounds_or_contradictory(change: dict[str, object]) -> None:
    bad = msgspec.structs.replace(GOOD, **change)
    with pytest.raises(CorruptError):
        manifests.encode(bad)
    try:
        raw = msgspec.msgpack.encode(bad)
    except OverflowError:
        return  # msgpack itself has no such number
    with pytest.raises(CorruptError):
        manifests.decode(raw)


@given(st.binary(max_size=300))
def test_garbage(data: bytes) -> None:
    with pytest.raises(CorruptError):
        manifests.decode(data)


def test_every_truncation_is_noticed() -> None:
    raw = manifests.encode(GOOD)
    for length in range(len(raw)):
        with pytest.raises(CorruptError):
            manifests.decode(raw[:length])


def test_too_long_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(CorruptError, match="longer than"):
        manifests.decode(bytes(MANIFEST_BYTES_MAX + 1))


def test_the_largest_file_has_a_manifest_that_fits_into_one_payload() -> None:
    assert MANIFEST_BYTES_MAX < PAYLOAD_BYTES_MAX
    blocks = bytes(FILE_BYTES_MAX // BLOCK_BYTES * DIGEST_BYTES)
    large = msgspec.structs.replace(
        GOOD, size=FILE_BYTES_MAX, blocks=blocks, tree=tree_digest([blocks]), path=b"/".join([b"x" * 255] * 16)
    )
    assert len(manifests.encode(large)) <= MANIFEST_BYTES_MAX


def test_a_manifest_of_before_there_were_bases_and_members_is_read() -> None:
    fields = msgspec.msgpack.decode(manifests.encode(GOOD))
    old = manifests.decode(msgspec.msgpack.encode(fields[:-2]))
    assert old == GOOD
    assert (old.base, old.members) == (None, ())
    newer = manifests.decode(msgspec.msgpack.encode([*fields, "of a later version"]))
    assert newer == GOOD


def test_base_and_members_travel_and_are_bounded() -> None:
    members = (Member(b"sub/a", 5, block_digest(b"a")), Member(b"b", 0, b""))
    good = msgspec.structs.replace(GOOD, base=Base((1 << 64) - 1, 2, -3), members=members)
    assert manifests.decode(manifests.encode(good)) == good
    for bad in ((Member(b"../a", 0, b""),), (Member(b"a", 0, b"x" * 17),), (Member(b"", 0, b""),)):
        with pytest.raises(CorruptError):
            manifests.decode(msgspec.msgpack.encode(msgspec.structs.replace(GOOD, members=bad)))
    name = b"/".join([b"n" * 200] * 10)
    many = tuple(Member(name, 0, b"") for _ in range(MEMBER_BYTES_MAX // len(name) + 1))
    with pytest.raises(CorruptError):
        manifests.decode(msgspec.msgpack.encode(msgspec.structs.replace(GOOD, members=many)))


def test_members_that_do_not_fit_are_left_out() -> None:
    blocks = b"\0" * DIGEST_BYTES * (FILE_BYTES_MAX // BLOCK_BYTES)
    members = tuple(Member(b"n" * 200, 0, b"") for _ in range(2000))
    large = msgspec.structs.replace(
        GOOD, size=FILE_BYTES_MAX, blocks=blocks, tree=tree_digest([blocks]), members=members
    )  # fmt: skip
    assert manifests.decode(manifests.encode(large)).members == ()
