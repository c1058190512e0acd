"""Digests of blocks and files: xxh3_128, 16 bytes, big-endian as xxhash's canonical form.

Role: pure. The writer's node computes them when a generation is published; the partner, every recovery and
readers compare. They detect damage; they are not signatures (a header's MAC authenticates them on the wire).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

BLOCK_BYTES = 1 << 20
DIGEST_BYTES = 16

Buffer: TypeAlias = bytes | bytearray | memoryview


def block_digest(buf: Buffer) -> bytes:
    """xxh3_128 of one buffer, 16 bytes. Releases the GIL while it computes."""
    return xxhash.xxh3_128_digest(buf)


def tree_digest(blocks: Iterable[bytes]) -> bytes:
    """xxh3_128 of the blocks' digests one after the other: identifies a content by its blocks."""
    return xxhash.xxh3_128_digest(b"".join(blocks))


def block_count(size_bytes: int) -> int:
    """Blocks of a file of this size; the last one may be short."""
    return -(-size_bytes // BLOCK_BYTES)


def block_length(size_bytes: int, index: int) -> int:
    """Bytes of block ``index`` in a file of this size (0 or less: there is no such block)."""
    return min(BLOCK_BYTES, size_bytes - index * BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of one content: of the whole, of its blocks' digests, of each block."""

    file: bytes
    tree: bytes
    blocks: tuple[bytes, ...]


class FileDigest:
    """Digests of a content that arrives in pieces of any length, in order. Not for use by two threads at once."""

    def __init__(self) -> None:
        self._file = xxhash.xxh3_128()
        self._block = xxhash.xxh3_128()
        self._block_bytes = 0
        self._blocks: list[bytes] = []
        self.size_bytes = 0

    def update(self, piece: Buffer) -> None:
        """Append a piece. Pieces that are whole blocks cost one call of the hash each for block and file."""
        view = memoryview(piece).cast("B")
        self._file.update(view)
        self.size_bytes += len(view)
        while view:
            if self._block_bytes == 0 and len(view) >= BLOCK_BYTES:
                self._blocks.append(block_digest(view[:BLOCK_BYTES]))
                view = view[BLOCK_BYTES:]
                continue
            part = view[: BLOCK_BYTES - self._block_bytes]
            self._block.update(part)
            self._block_bytes += len(part)
            view = view[len(part) :]
            if self._block_bytes == BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._blocks.append(self._block.digest())
        self._block.reset()
        self._block_bytes = 0

    def result(self) -> Digests:
        """Digests of what has arrived so far; more may follow."""
        blocks = list(self._blocks)
        if self._block_bytes:
            blocks.append(self._block.digest())
        return Digests(self._file.digest(), tree_digest(blocks), tuple(blocks))


def split_blocks(blocks: bytes) -> Sequence[bytes]:
    """The digests in a concatenation of them."""
    return [blocks[at : at + DIGEST_BYTES] for at in range(0, len(blocks), DIGEST_BYTES)]
