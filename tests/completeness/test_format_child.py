"""Commit files that are read in a process of their own: the same answers, and limits that a hostile one meets."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
from collections.abc import Mapping

import pytest
import trio

from cachexfs.adapters.format_child import FormatChild
from cachexfs.core import formats
from cachexfs.core.formats import FormatError, Members
from cachexfs.errors import CacheXError, CannotTellError

INDEX = b'{"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
HEADER = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
SHARD = struct.pack("<Q", len(HEADER)) + HEADER + bytes(8)
INDEXED = {b"model.safetensors.index.json": INDEX, b"model-1.safetensors": SHARD, b"model-2.safetensors": SHARD}


class Memory:
    """Files of a checkpoint in memory; both ways of reading them."""

    def __init__(self, files: Mapping[bytes, bytes]) -> None:
        self.files = files
        self.asked = 0

    def names(self) -> list[bytes]:
        return list(self.files)

    def size(self, name: bytes) -> int | None:
        return len(self.files[name]) if name in self.files else None

    def read(self, name: bytes, offset: int, length: int) -> bytes:
        return self.files[name][offset : offset + length]

    async def fetch(self, name: bytes, offset: int, length: int) -> bytes:
        self.asked += 1
        await trio.lowlevel.checkpoint()
        return self.read(name, offset, length)

    def sizes(self) -> dict[bytes, int]:
        return {name: len(data) for name, data in self.files.items()}


async def described(files: Mapping[bytes, bytes], child: FormatChild | None = None) -> Members | None:
    memory = Memory(files)
    return await (child or FormatChild()).describe(memory.sizes(), memory.fetch)


async def test_it_finds_what_the_formats_find() -> None:
    memory = Memory(INDEXED)
    found = await FormatChild().describe(memory.sizes(), memory.fetch)
    assert found == formats.describe(memory)
    assert found is not None
    assert found.needs == {b"model-1.safetensors": len(SHARD), b"model-2.safetensors": len(SHARD)}
    assert memory.asked >= 3


async def test_names_may_be_any_bytes() -> None:
    odd = b"\xff\n" + b"x" * 250 + b".bin"
    found = await described({**INDEXED, odd: b"", b"dir\n/" + odd: b"1"})
    assert found is not None


async def test_no_format_is_an_answer() -> None:
    assert await described({b"notes.txt": b"x"}) is None


async def test_a_commit_file_that_is_none_is_refused_as_the_formats_refuse_it() -> None:
    with pytest.raises(FormatError, match=r"^\.metadata: not a pickle"):
        await described({b".metadata": b"\x00" * 3_000_000})


async def test_nothing_in_it_is_executed(tmp_path: object) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("touch /tmp/cachexfs-bomb",)

    with pytest.raises(FormatError, match="no checkpoint needs"):
        await described({b".metadata": pickle.dumps(Bomb())})
    assert not os.path.exists("/tmp/cachexfs-bomb")


def slow_pickle(opcodes: int) -> bytes:
    """Takes time in proportion to its length and little memory."""
    return b"\x80\x04" + b"N0" * opcodes + b"N."


def fat_pickle(items: int) -> bytes:
    """Keeps a string of its own for every 14 bytes."""
    thousand = b"(" + b"\x8c\x0aaaaaaaaaaaK\x01" * 1000 + b"u"
    return b"\x80\x04}" + thousand * (items // 1000) + b"."


async def test_the_limit_of_processor_time_ends_it_and_is_named() -> None:
    with pytest.raises(FormatError, match="1 s of processor time"):
        await described({b".metadata": slow_pickle(30_000_000)}, FormatChild(processor_s_max=1))


async def test_the_limit_of_memory_ends_it_and_is_named() -> None:
    with pytest.raises(FormatError, match="512 MiB of memory"):
        await described({b".metadata": fat_pickle(8_000_000)}, FormatChild(memory_bytes_max=512 << 20))


async def test_an_error_of_reading_passes_through_and_the_next_reading_works() -> None:
    child = FormatChild()

    async def failing(name: bytes, offset: int, length: int) -> bytes:
        raise CannotTellError("the PFS does not answer")

    with pytest.raises(CannotTellError, match="the PFS does not answer"):
        await child.describe({b".metadata": 10}, failing)
    assert await described(INDEXED, child) is not None


async def test_whoever_gives_up_leaves_no_process() -> None:
    child = FormatChild()
    before = _children()

    async def hanging(name: bytes, offset: int, length: int) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    with trio.move_on_after(1.0):
        await child.describe({b".metadata": 10}, hanging)
    assert _children() == before
    assert await described(INDEXED, child) is not None


async def test_a_process_that_is_killed_is_no_verdict() -> None:
    child = FormatChild()
    before = _children()

    async def killing(name: bytes, offset: int, length: int) -> bytes:
        for pid in _children() - before:
            os.kill(pid, 9)
        return b"x"

    with pytest.raises(CacheXError, match="ended") as caught:
        await child.describe({b".metadata": 1}, killing)
    assert not isinstance(caught.value, FormatError)


def _children() -> set[int]:
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:  # a thread may have ended
            found |= set(map(int, file.read().split()))
    return found
