"""Framing of journal files: what is cut, and what is called damage."""

from __future__ import annotations

import crc32c
import pytest

from cachexfs.core import journal
from cachexfs.core.journal import FRAME_BYTES, HEADER_BYTES, End, Mutation, Rows

PAYLOADS = [b"a", b"two", b"x" * 300, b"\0" * 40, b"the last"]


def file_of(payloads: list[bytes]) -> bytes:
    return journal.header() + b"".join(journal.frame(payload) for payload in payloads)


def test_what_was_written_is_read() -> None:
    data = file_of(PAYLOADS)
    assert journal.scan(data) == journal.Scan(PAYLOADS, len(data))


@pytest.mark.parametrize(
    "item", [Mutation(7, [(b"d/1000/a", b"v"), (b"i/1", None)]), Rows([(b"k", b"v", 3, 9)]), End(9, 1)]
)
def test_catalogue_records_survive_encoding(item: journal.Item) -> None:
    (payload,) = journal.scan(journal.header() + journal.encode(item)).payloads
    assert journal.decode(payload) == item


def test_a_file_cut_at_any_byte_keeps_the_whole_records_before_the_cut() -> None:
    data = file_of(PAYLOADS)
    ends = [HEADER_BYTES]
    for payload in PAYLOADS:
        ends.append(ends[-1] + FRAME_BYTES + len(payload))
    for length in range(len(data) + 1):
        whole = sum(end <= length for end in ends) - 1
        found = journal.scan(data[:length])
        assert found.damage == ""
        assert found.payloads == PAYLOADS[: max(0, whole)]
        assert found.good_length == (ends[whole] if whole >= 0 else 0)


def test_any_changed_byte_is_damage_and_never_a_torn_end() -> None:
    data = file_of(PAYLOADS)
    for at in range(len(data)):
        for mask in (0x01, 0xFF):
            spoilt = bytearray(data)
            spoilt[at] ^= mask
            found = journal.scan(bytes(spoilt))
            assert found.damage, f"byte {at}"
            assert found.good_length <= at
            assert found.payloads == PAYLOADS[: len(found.payloads)]


def test_allocated_space_that_was_never_written_is_no_damage() -> None:
    data = file_of(PAYLOADS)
    assert journal.scan(data + bytes(4096)) == journal.Scan(PAYLOADS, len(data))


def test_zeros_in_the_middle_are_damage() -> None:
    data = file_of(PAYLOADS)
    assert journal.scan(data + bytes(4096) + journal.frame(b"later")).damage


def test_another_version_is_named() -> None:
    data = bytearray(file_of(PAYLOADS))
    data[8:12] = (2).to_bytes(4, "little")
    data[12:16] = journal.header()[12:16]
    assert "journal" in journal.scan(bytes(data)).damage  # its checksum is wrong as well: not even a version
    data[12:16] = crc32c.crc32c(bytes(data[:12])).to_bytes(4, "little")
    assert "version 2" in journal.scan(bytes(data)).damage


@pytest.mark.parametrize("size", [0, journal.PAYLOAD_BYTES_MAX + 1])
def test_a_record_has_a_sensible_size(size: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        journal.frame(bytes(size))
