"""The process that looks into what crashed daemons left, as a command asks it.

Role: starts ``python -m cachexfs.recovery``, which may hang with the PFS: the command then leaves it behind. Called by
``recover`` and ``waiting``. No concurrency.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec

from cachexfs.cli.protocol import Progress
from cachexfs.errors import CacheXError, CannotTellError
from cachexfs.recovery.report import Line, Request

#: The child tells of every piece that it reads or writes; so long a silence means that the PFS hangs.
SILENCE_S = 120.0


def _no_progress(_: Progress) -> None:
    return None


def ask(request: Request, draw: Callable[[Progress], None] = _no_progress) -> Line:
    """The last line of the child's answer; ``draw`` gets its progress. Raises the ``CacheXError`` that it answers."""
    command = [sys.executable, "-P", "-m", "cachexfs.recovery"]  # -P: nothing is imported from where the user stands
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdin is not None
        child.stdin.write(json.dumps(msgspec.to_builtins(request)).encode())
        child.stdin.close()
        for line in _lines(child, SILENCE_S):
            answer = msgspec.convert(json.loads(line), Line)
            if answer.error:
                raise _failure(answer)
            if answer.done:
                return answer
            draw(Progress(answer.bytes_done, answer.bytes_total, answer.files_done, answer.files_total))
    finally:
        # In state D it does not end; nobody waits for it then.
        child.kill()
        try:
            child.wait(1.0)
        except subprocess.TimeoutExpired:
            child.returncode = -9  # so that nobody warns of it
        if child.stdout is not None:
            child.stdout.close()
    raise CannotTellError("the recovery process ended without an answer; its own words are above")


def _lines(child: subprocess.Popen[bytes], silence_s: float) -> Iterator[bytes]:
    assert child.stdout is not None
    buffer, deadline_s = bytearray(), time.monotonic() + silence_s
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline_s - time.monotonic())):
                raise CannotTellError(f"nothing has moved for {silence_s:.0f} s: does the PFS hang?")
            data = os.read(child.stdout.fileno(), 1 << 20)
            if not data:
                return
            buffer += data
            *lines, rest = bytes(buffer).split(b"\n")
            buffer = bytearray(rest)
            yield from lines
            deadline_s = time.monotonic() + silence_s


def _failure(answer: Line) -> CacheXError:
    error = CacheXError(answer.error)
    error.exit_code = answer.exit
    return error
