"""Fills: contents that are elsewhere, brought into staging while they are read.

Role: a reader that goes through a large file gets it in segments: copied by a PFS child straight into a staging file,
or block by block from the partner that has it, always a few segments ahead. A fill is a cache: the catalogue knows
nothing of it, it takes only room that nobody needs, and it is gone after a restart.

Concurrency: any number of readers; they share the copy of a segment. Bytes are checked as every read is (``Reader``).
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from cachexfs.core.records import Generation
from cachexfs.core.stages import make_stage
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError

log = logging.getLogger(__name__)

SEGMENT_BYTES = 8 << 20
AHEAD = 3  # segments that are copied before they are asked for
FILLS_MAX = 256
SEEN_MAX = 1024

Key = tuple[int, int]  # (file id, generation)
Copy = Callable[[int, Generation, int, str, int, int], Awaitable[None]]


@dataclass(eq=False, slots=True)
class _Fill:
    stage: str
    fd: int
    present: set[int] = field(default_factory=set)
    copying: dict[int, trio.Event] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)  # segments, present or not, and their bytes
    used: int = 0  # readers between two awaits


class Fills:
    """The fills of this mount. ``copy(fid, content, fd, path, offset, length)`` brings verified bytes (``Reader``)."""

    def __init__(self, node: Node, copy: Copy) -> None:
        self.node = node
        self._copy = copy
        self._fills: OrderedDict[Key, _Fill] = OrderedDict()
        self._seen: OrderedDict[Key, int] = OrderedDict()  # the segment that was read last
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Copy what readers are about to ask for, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await trio.sleep_forever()

    async def read(self, fid: int, content: Generation, offset: int, length: int) -> bytes | None:
        """Bytes of a content; None when this read does not go by a fill (the caller knows another way)."""
        first, last = offset // SEGMENT_BYTES, (offset + length - 1) // SEGMENT_BYTES
        key = fid, content.gen
        if content.size <= SEGMENT_BYTES or self._nursery is None or not self._goes_through(key, first, offset):
            return None
        fill = self._fills.get(key) or self._begin(key, fid)
        self._fills.move_to_end(key)
        fill.used += 1
        try:
            for segment in range(first, last + 1 + AHEAD):
                if segment * SEGMENT_BYTES < content.size and not self._start(fill, fid, content, segment):
                    break
            for segment in range(first, last + 1):
                if segment in fill.copying:
                    await fill.copying[segment].wait()
                if segment not in fill.present:
                    return None
            return os.pread(fill.fd, length, offset)
        finally:
            fill.used -= 1

    def _goes_through(self, key: Key, segment: int, offset: int) -> bool:
        """Whether somebody reads the file from one end to the other, or comes back to what is there."""
        fill, before = self._fills.get(key), self._seen.get(key)
        self._seen[key] = segment
        self._seen.move_to_end(key)
        while len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        if fill is not None and (segment in fill.present or segment in fill.copying):
            return True
        return offset % SEGMENT_BYTES == 0 or (before is not None and 0 <= segment - before <= 1)

    def _begin(self, key: Key, fid: int) -> _Fill:
        stage = make_stage(fid, 0, self.node.random.getrandbits(32))
        fill = self._fills[key] = _Fill(stage, self.node.staging.create(stage))
        for old in list(self._fills):
            if old != key and (len(self._fills) > FILLS_MAX or self._is_past(old)):
                self._drop(old)
        return fill

    def _is_past(self, key: Key) -> bool:
        generation = self.node.catalogue.view.generation(key[0])
        return generation is None or generation.gen != key[1]

    def _start(self, fill: _Fill, fid: int, content: Generation, segment: int) -> bool:
        """Have a segment copied; False when there is no room for it."""
        if segment in fill.present or segment in fill.copying:
            return True
        if not self.give_up(SEGMENT_BYTES):
            return False
        assert self._nursery is not None
        fill.copying[segment] = trio.Event()
        fill.begun[segment] = min(SEGMENT_BYTES, content.size - segment * SEGMENT_BYTES)
        self._reserve(fill)
        self._nursery.start_soon(self._bring, fill, fid, content, segment)
        return True

    async def _bring(self, fill: _Fill, fid: int, content: Generation, segment: int) -> None:
        offset = segment * SEGMENT_BYTES
        length = min(SEGMENT_BYTES, content.size - offset)
        fill.used += 1
        try:
            self.node.staging.make_ready(length)
            await self._copy(fid, content, fill.fd, self.node.staging.path(fill.stage), offset, length)
            fill.present.add(segment)
        except (OSError, CacheXError, trio.TooSlowError) as error:
            log.debug("a segment of %x at %d: %s", fid, offset, error)  # the reader finds out by itself, and says so
        finally:
            fill.used -= 1
            fill.copying.pop(segment).set()
            self._reserve(fill)

    def _reserve(self, fill: _Fill) -> None:
        """Nobody else gets the room of what is on its way: of what is not there yet, of several segments at a time."""
        self.node.staging.recount(fill.stage, fill.fd)
        left = sum(fill.begun.values()) - os.fstat(fill.fd).st_blocks * 512
        self.node.staging.reserve(fill.stage, max(0, left) if fill.copying else 0)

    def bytes(self) -> int:
        """Staging that could be had by dropping fills."""
        return sum(os.fstat(fill.fd).st_blocks * 512 for fill in self._fills.values())

    def give_up(self, length: int) -> bool:
        """Drop fills until ``length`` bytes fit in staging, those read longest ago first; False when they do not."""
        staging = self.node.staging
        for key in list(self._fills):
            if staging.used_bytes + length <= staging.limit_bytes:
                break
            self._drop(key)
        return staging.used_bytes + length <= staging.limit_bytes

    def _drop(self, key: Key) -> None:
        fill = self._fills[key]
        if not fill.used and not fill.copying:
            del self._fills[key]
            os.close(fill.fd)
            self.node.staging.remove(fill.stage)
