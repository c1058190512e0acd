"""Reads the commit files of one checkpoint in a process of its own: ``python -m cachexfs.adapters.format_worker``.

Role: started by ``format_child`` for commit files that would keep the daemon's interpreter busy, or whose writer nobody
trusts. Asks for bytes on standard output, gets them on standard input, ends with one answer. Its memory and processor
time are limited, and it ends when the daemon does. Concurrency: one thread, and one that watches standard input.

Frames: a 4-byte big-endian length, then the payload. In: ``Task``, then for each ``Ask`` the bytes. Out: ``Ask``s, then
one of ``Found``, ``Refused``, ``Exhausted``, all msgpack.
"""

from __future__ import annotations

import os
import resource
import select
import struct
import sys
import threading

import msgspec

from cachexfs.core import formats
from cachexfs.core.formats import FormatError, Members

LENGTH = struct.Struct(">I")
ASK_BYTES_MAX = 4 << 20
NICE = 10


class Task(msgspec.Struct, frozen=True, array_like=True):
    """What is to be read: names and sizes of all files below the checkpoint directory, and the limits."""

    sizes: list[tuple[bytes, int]]
    memory_bytes_max: int
    processor_s_max: int


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Wants ``length`` bytes of a file."""

    name: bytes
    offset: int
    length: int


class Found(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The checkpoint's members; None: no format is recognised."""

    members: Members | None


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """A commit file is not what its format asks for."""

    reason: str


class Exhausted(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    """It needs more memory than there may be."""


Answer = Ask | Found | Refused | Exhausted


def read_exactly(fd: int, count: int) -> bytes:
    """``count`` bytes. EOFError at the end."""
    pieces = bytearray()
    while len(pieces) < count:
        piece = os.read(fd, min(count - len(pieces), 1 << 20))
        if not piece:
            raise EOFError
        pieces += piece
    return bytes(pieces)


def write_frame(fd: int, payload: bytes) -> None:
    """A payload with its length."""
    left = memoryview(LENGTH.pack(len(payload)) + payload)
    while left:
        left = left[os.write(fd, left) :]


class _Files:
    """``formats.Files`` whose bytes come through the pipe."""

    def __init__(self, sizes: list[tuple[bytes, int]], in_fd: int, out_fd: int) -> None:
        self._sizes = dict(sizes)
        self._in, self._out = in_fd, out_fd

    def names(self) -> list[bytes]:
        return list(self._sizes)

    def size(self, name: bytes) -> int | None:
        return self._sizes.get(name)

    def read(self, name: bytes, offset: int, length: int) -> bytes:
        pieces = []
        end = offset + length
        while offset < end:
            piece = self._ask(Ask(name, offset, min(end - offset, ASK_BYTES_MAX)))
            if not piece:
                break
            pieces.append(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _ask(self, ask: Ask) -> bytes:
        write_frame(self._out, msgspec.msgpack.encode(ask))
        (length,) = LENGTH.unpack(read_exactly(self._in, LENGTH.size))
        return read_exactly(self._in, length)


def _end_with(fd: int) -> None:
    """End the process when the other end of ``fd`` is gone: a long reading would not notice."""
    watch = select.poll()
    watch.register(fd, 0)
    watch.poll()
    os._exit(1)


def main() -> int:
    """One task."""
    (length,) = LENGTH.unpack(read_exactly(0, LENGTH.size))
    task = msgspec.msgpack.decode(read_exactly(0, length), type=Task)
    threading.Thread(target=_end_with, args=(0,), daemon=True).start()
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    resource.setrlimit(resource.RLIMIT_CPU, (task.processor_s_max, task.processor_s_max + 5))  # SIGXCPU, then SIGKILL
    resource.setrlimit(resource.RLIMIT_AS, (task.memory_bytes_max, task.memory_bytes_max))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer: Answer
    try:
        answer = Found(formats.describe(_Files(task.sizes, 0, 1)))
    except FormatError as error:
        answer = Refused(str(error))
    except MemoryError:
        answer = Exhausted()
    write_frame(1, msgspec.msgpack.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
