"""One writer of a probe: writes a file from a common start to durable.

Role: the timed part of ``probe``, the same for processes of one machine and for ranks of a job. Standard
library only: it runs in forked children and must not drag numpy along.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Outcome:
    """``seconds`` from the common start to fsync and close; ``error`` is an errno, 0 if none; ``late`` when the
    writer was told after the start."""

    seconds: float
    error: int = 0
    late: bool = False


def write_durably(
    path: str, offset: int, size: int, start: float, clock: Callable[[], float], block: bytearray
) -> Outcome:
    """Wait for ``start`` on ``clock``, then open, write ``size`` bytes at ``offset``, fsync, close.

    ``block`` is random data that neither compresses nor deduplicates; its first bytes change with every block.
    """
    pause = start - clock()
    if pause < 0.0:
        return Outcome(0.0, late=True)
    time.sleep(pause)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _write_all(descriptor, offset, size, block)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        return Outcome(clock() - start, error.errno or 5)
    return Outcome(clock() - start)


def _write_all(descriptor: int, offset: int, size: int, block: bytearray) -> None:
    done = 0
    view = memoryview(block)
    while done < size:
        block[:16] = (offset + done).to_bytes(8, "little") + os.getpid().to_bytes(8, "little")
        done += os.pwrite(descriptor, view[: min(len(block), size - done)], offset + done)


def new_block(size: int) -> bytearray:
    """Random bytes, at most one block."""
    return bytearray(os.urandom(min(BLOCK_BYTES, max(size, 1))))
