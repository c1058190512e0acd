"""Which content belongs at a path: the newest of a file, the one published last of several files."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachexfs.core.digest import block_digest, tree_digest
from cachexfs.core.manifest import Base, Manifest, Member
from cachexfs.errors import CorruptError
from cachexfs.recovery.choice import Candidate, Record, choose, decode_record, encode_record, of_manifest

RECORD_BYTES = 4 << 20


def manifest(fid: int, gen: int, path: bytes = b"d/f", *, text: bytes = b"x", **changes: object) -> Manifest:
    """A content of file ``fid`` whose bytes are ``text``."""
    digest = block_digest(text)
    found = Manifest(
        fid=fid * 4096, path=path, stage=f"{fid * 4096:x}.{gen:x}.0", size=len(text), digest=digest,
        tree=tree_digest([digest]), blocks=digest, mode=0o644, uid=0, gid=0, mtime_ns=gen, atime_ns=0, gen=gen,
        origin="n0", revision=10 * fid + gen, published=True,
    )  # fmt: skip
    return msgspec.structs.replace(found, **changes)


def held(*manifests: Manifest, job: str = "j") -> list[Candidate]:
    return [of_manifest(m, job, f"/nvme/{m.stage}") for m in manifests]


def test_the_newest_generation_of_a_file_wins() -> None:
    chosen = choose(held(manifest(1, 2), manifest(1, 3, text=b"new"), manifest(1, 1)))
    assert [c.record.gen for c in chosen.wanted.values()] == [3]
    assert [c.record.gen for c in chosen.superseded] == [1, 2]


def test_what_an_fsync_made_safe_after_the_publication_wins() -> None:
    synced = manifest(1, 3, text=b"synced", published=False, revision=0)
    chosen = choose(held(manifest(1, 2), synced))
    assert chosen.wanted[b"d/f"].record.gen == 3
    assert not chosen.wanted[b"d/f"].record.published


@pytest.mark.parametrize("order", [1, -1])
def test_of_several_fsyncs_of_an_open_file_the_last_wins(order: int) -> None:
    """They have one generation and one modification time: that of the file's creation."""
    one = Record(path=b"log", fid=4096, gen=2, size=0, mode=0o644, mtime_ns=1)
    records = [msgspec.structs.replace(one, size=size, made_ns=made) for size, made in ((100, 7), (300, 8), (200, 9))]
    chosen = choose([Candidate(record, f"1000.2.x-{record.size:x}", ready=True) for record in records[::order]])
    assert chosen.wanted[b"log"].record.size == 200


def test_of_several_fsyncs_that_a_partner_has_the_last_wins() -> None:
    """After a daemon's death an open file goes on in another staging file: two replicas of one generation."""
    texts = [(b"first", 7), (b"last", 9), (b"second", 8)]
    found = [
        manifest(1, 3, text=text, stage=f"1000.3.{made}", published=False, revision=0, made_ns=made)
        for text, made in texts
    ]
    assert choose(held(*found)).wanted[b"d/f"].record.size == len(b"last")


def test_a_moved_file_leaves_its_old_path() -> None:
    chosen = choose(held(manifest(1, 2, b"a"), manifest(1, 3, b"b")))
    assert set(chosen.wanted) == {b"b"}


def test_of_two_files_with_one_path_the_one_published_last() -> None:
    chosen = choose(held(manifest(2, 1, text=b"later"), manifest(1, 9)))
    assert chosen.wanted[b"d/f"].record.fid == 2 * 4096
    assert [c.record.fid for c in chosen.superseded] == [4096]


def test_jobs_that_disagree_are_not_decided_between() -> None:
    one, other = held(manifest(1, 1)), held(manifest(2, 1, text=b"y"), job="k")
    chosen = choose([*one, *other])
    assert chosen.wanted == {}
    assert {c.record.job for c, _ in chosen.disputed} == {"j", "k"}
    assert all("--job" in why for _, why in chosen.disputed)
    same = choose([*one, *held(manifest(2, 1), job="k")])
    assert set(same.wanted) == {b"d/f"}
    assert same.disputed == []


def test_a_file_without_a_name_is_not_wanted() -> None:
    chosen = choose(held(manifest(1, 1, b"")))
    assert chosen.wanted == {}
    assert len(chosen.superseded) == 1


def test_a_replica_and_its_copy_under_a_hidden_name_are_one() -> None:
    (replica,) = held(manifest(1, 1, b"renamed"))
    old = decode_record(encode_record(of_manifest(manifest(1, 1, b"before"), "j", "").record, RECORD_BYTES))
    chosen = choose([Candidate(old, replica.hidden, ready=True), replica])
    (found,) = chosen.wanted.values()
    assert (found.path, found.ready, found.source) == (b"renamed", True, replica.source)
    assert chosen.superseded == []


@given(st.permutations([(1, 1), (1, 2), (2, 1), (2, 4), (3, 1)]))
def test_the_order_of_finding_does_not_matter(order: list[tuple[int, int]]) -> None:
    chosen = choose(held(*(manifest(fid, gen, text=b"%d" % fid) for fid, gen in order)))
    assert {path: (c.record.fid // 4096, c.record.gen) for path, c in chosen.wanted.items()} == {b"d/f": (3, 1)}
    assert len(chosen.superseded) == 4


def test_records_travel_whole_and_without_members_when_these_do_not_fit() -> None:
    members = tuple(Member(b"m%d" % i, i, block_digest(b"m")) for i in range(100))
    record = of_manifest(manifest(1, 1, base=Base(7, 8, 9), members=members), "job", "").record
    assert decode_record(encode_record(record, RECORD_BYTES)) == record
    assert record.base == (7, 8, 9)
    cut = decode_record(encode_record(record, 1000))
    assert cut == msgspec.structs.replace(record, members=None)


def test_the_drains_own_record_is_understood() -> None:
    raw = {"path": b"d/f", "fid": 4096, "gen": 2, "size": 5, "node": "n0", "job": "j", "tree": b"", "mode": 0o644,
           "uid": 0, "gid": None, "mtime_ns": 3, "base": [1, 2, 3]}  # fmt: skip
    record = decode_record(msgspec.msgpack.encode(raw))
    assert (record.path, record.base, record.members) == (b"d/f", (1, 2, 3), ())


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"path": "x", "fid": -1}), b"\x93\x01\x02"]
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_record(data)
