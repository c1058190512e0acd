"""Journal files: framed records that tell a torn end from damage.

Role: pure. A file is a header and frames; a frame is the length of its payload, the payload's crc32c and the
crc32c of these two (little-endian, 4 bytes each), then the payload. A process that is killed while it
appends leaves a prefix of its last frame: ``scan`` reports how far the whole frames go, and the file is cut
there. Anything else that does not check is damage. The length has a checksum of its own so that a damaged one
is not mistaken for a frame that goes on beyond the end.

``Mutation``, ``Rows`` and ``End`` are what the built-in catalogue keeps in such frames: a snapshot is some
``Rows`` and an ``End``, then follow the ``Mutation``s since.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import crc32c
import msgspec

MAGIC = b"CACHEXJN"
VERSION = 1
PAYLOAD_BYTES_MAX = 64 << 20
CHUNK_BYTES = 4096

NEWER = "it was written by a newer CacheX FS (format version {}, " + f"this one reads {VERSION})"

_HEADER = struct.Struct("<8sI")
_HEAD = struct.Struct("<II")
_CRC = struct.Struct("<I")

HEADER_BYTES = _HEADER.size + _CRC.size
FRAME_BYTES = _HEAD.size + _CRC.size


class Mutation(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    """The changes of one revision: (key, encoded record), None for a deletion."""

    revision: int
    changes: list[tuple[bytes, bytes | None]]


class Rows(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Part of a snapshot: (key, encoded record, revision of creation, revision of the last change)."""

    rows: list[tuple[bytes, bytes, int, int]]


class End(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """End of a snapshot: its revision and the number of its rows."""

    revision: int
    count: int


Item = Mutation | Rows | End

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Item)


@dataclass(frozen=True, slots=True)
class Scan:
    """What a journal file holds.

    ``payloads`` are those of the whole frames; the bytes after ``good_length`` are a torn end (to be cut)
    unless ``damage`` says what is wrong at that offset.
    """

    payloads: list[bytes]
    good_length: int
    damage: str = ""


def header() -> bytes:
    """The first bytes of a journal file."""
    head = _HEADER.pack(MAGIC, VERSION)
    return head + _CRC.pack(crc32c.crc32c(head))


def frame(payload: bytes) -> bytes:
    """A payload as it is appended."""
    if not 0 < len(payload) <= PAYLOAD_BYTES_MAX:
        raise ValueError(f"a journal record has 1 to {PAYLOAD_BYTES_MAX} bytes, not {len(payload)}")
    head = _HEAD.pack(len(payload), crc32c.crc32c(payload))
    return head + _CRC.pack(crc32c.crc32c(head)) + payload


class Frames:
    """The payloads of a whole file, one after the other, without a copy of it.

    Once they have been gone through, ``good_length`` and ``damage`` are as in ``Scan``. ``data`` may be a memory map.
    """

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self._data = data
        self.good_length = 0
        self.damage = ""

    def __iter__(self) -> Iterator[bytes]:
        data, size = self._data, len(self._data)
        first, expected = data[:HEADER_BYTES], header()
        if size < HEADER_BYTES:
            self.damage = "" if expected.startswith(first) else "it does not start like a journal"
            return
        if first != expected:
            self.damage = _wrong_header(first)
            return
        at = self.good_length = HEADER_BYTES
        while at + FRAME_BYTES <= size:
            length, payload_crc = _HEAD.unpack_from(data, at)
            (head_crc,) = _CRC.unpack_from(data, at + _HEAD.size)
            if head_crc != crc32c.crc32c(data[at : at + _HEAD.size]) or not 0 < length <= PAYLOAD_BYTES_MAX:
                if data[at:].strip(b"\0"):  # else: space that the filesystem had given but that was never written
                    self.damage = "the frame's own checksum is wrong"
                return
            end = at + FRAME_BYTES + length
            if end > size:
                return
            payload = data[at + FRAME_BYTES : end]
            if crc32c.crc32c(payload) != payload_crc:
                self.damage = "the record's checksum is wrong"
                return
            yield payload
            at = self.good_length = end


def whole_frames(data: bytes | mmap.mmap) -> Iterator[tuple[int, bytes | None]]:
    """Everything of a damaged file that is whole: (offset, payload), and (offset, None) where bytes were skipped."""
    at, size, skipping = HEADER_BYTES, len(data), False
    while at + FRAME_BYTES <= size:
        length, payload_crc = _HEAD.unpack_from(data, at)
        end = at + FRAME_BYTES + length
        (head_crc,) = _CRC.unpack_from(data, at + _HEAD.size)
        whole = head_crc == crc32c.crc32c(data[at : at + _HEAD.size]) and 0 < length <= PAYLOAD_BYTES_MAX
        payload = data[at + FRAME_BYTES : end] if whole and end <= size else b""
        if payload and crc32c.crc32c(payload) == payload_crc:
            yield at, payload
            at, skipping = end, False
            continue
        if not data[at : at + CHUNK_BYTES].strip(b"\0") and not data[at:].strip(b"\0"):
            return
        if not skipping:
            yield at, None
        at, skipping = (end, False) if payload else (at + 1, True)


def scan(data: bytes) -> Scan:
    """Read a whole file. An empty one, or the beginning of a header, is an empty journal."""
    frames = Frames(data)
    payloads = list(frames)
    return Scan(payloads, frames.good_length, frames.damage)


def _wrong_header(data: bytes) -> str:
    magic, version = _HEADER.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _HEADER.size)
    if magic != MAGIC or crc != crc32c.crc32c(data[: _HEADER.size]):
        return "it does not start like a journal"
    return NEWER.format(version) if version > VERSION else f"it has the unknown format version {version}"


def encode(item: Item) -> bytes:
    """A framed catalogue record."""
    return frame(_encoder.encode(item))


def decode(payload: bytes) -> Item:
    """The catalogue record of a payload. Raises ``msgspec.DecodeError`` (a ``ValueError``)."""
    return _decoder.decode(payload)
