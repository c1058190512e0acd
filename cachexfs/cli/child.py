"""Run something that may hang (a PFS that does not answer) in a child process, with a deadline.

Role: for commands, which are single-threaded, so that fork is safe. A child stuck in the kernel is abandoned; it keeps
nothing open but its own pipe, so that who reads the command's output does not wait for it.
"""

from __future__ import annotations

import errno
import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from typing import TypeVar

from cachexfs.errors import CacheXError

T = TypeVar("T")

STANDARD_FDS = 3


def run_in_child(function: Callable[[], T], timeout_s: float) -> T:
    """The result of ``function()`` called in a forked child; it must be picklable.

    An ``OSError`` or ``CacheXError`` of the function is raised here. Raises ``TimeoutError`` at the deadline.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(function, writer)
    os.close(writer)
    try:
        data = _read_all(reader, time.monotonic() + timeout_s)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)
        raise
    finally:
        os.close(reader)
    os.waitpid(pid, 0)
    if not data:
        raise OSError(errno.EIO, "the child process ended without an answer")
    # Written by our own child a moment ago: as safe as our own memory.
    kind, value = pickle.loads(data)
    if kind == "error":
        raise value
    result: T = value
    return result


def _child(function: Callable[[], T], writer: int) -> None:
    status = 1
    try:
        _let_go(writer)
        try:
            data = pickle.dumps(("result", function()))
        except (OSError, CacheXError) as error:
            data = pickle.dumps(("error", error))
        view = memoryview(data)
        while view:
            view = view[os.write(writer, view) :]
        status = 0
    finally:
        os._exit(status)


def _let_go(writer: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(STANDARD_FDS):
        if fd != writer:
            os.dup2(nothing, fd)
    os.closerange(STANDARD_FDS, max(writer, STANDARD_FDS))
    os.closerange(max(writer + 1, STANDARD_FDS), os.sysconf("SC_OPEN_MAX"))


def _read_all(reader: int, deadline_s: float) -> bytes:
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reader], [], [], max(deadline_s - time.monotonic(), 0))
        if not ready:
            raise TimeoutError
        part = os.read(reader, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)
