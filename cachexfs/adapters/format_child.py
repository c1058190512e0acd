"""Starts a process that reads the commit files of one checkpoint, and answers its questions.

Role: ``FormatReader`` of the daemon. A hostile or huge ``.metadata`` costs that process its life at the limits of
memory or processor time, never the daemon its event loop (Python in a thread would hold the interpreter for seconds).
Concurrency: trio; one process at a time, later callers wait.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
import trio

from cachexfs.adapters.format_worker import ASK_BYTES_MAX, LENGTH, Answer, Exhausted, Found, Refused, Task
from cachexfs.core.formats import FormatError, Members
from cachexfs.errors import CannotTellError

MEMORY_BYTES_MAX = 4 << 30
PROCESSOR_S_MAX = 180
ANSWER_BYTES_MAX = 512 << 20
RECEIVE_BYTES = 1 << 20
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])

_encode = msgspec.msgpack.encode
_answers = msgspec.msgpack.Decoder(Answer)

ReadBytes = Callable[[bytes, int, int], Awaitable[bytes]]


class FormatChild:
    """``FormatReader`` by a child process. Limits: bytes of address space, seconds of processor time."""

    def __init__(self, memory_bytes_max: int = MEMORY_BYTES_MAX, processor_s_max: int = PROCESSOR_S_MAX) -> None:
        self._memory_bytes_max = memory_bytes_max
        self._processor_s_max = processor_s_max
        self._one = trio.Lock()

    async def describe(self, sizes: Mapping[bytes, int], read: ReadBytes) -> Members | None:
        """See ``FormatReader``."""
        async with self._one:
            process = await trio.to_thread.run_sync(_start)
            try:
                return await self._converse(process, sizes, read)
            finally:
                with trio.CancelScope(shield=True):
                    process.kill()
                    await trio.to_thread.run_sync(process.wait)

    async def _converse(
        self, process: subprocess.Popen[bytes], sizes: Mapping[bytes, int], read: ReadBytes
    ) -> Members | None:
        assert process.stdin is not None
        assert process.stdout is not None
        to, back = (trio.lowlevel.FdStream(os.dup(pipe.fileno())) for pipe in (process.stdin, process.stdout))
        process.stdin.close()
        process.stdout.close()
        async with to, back:
            try:
                await _send(to, _encode(Task(list(sizes.items()), self._memory_bytes_max, self._processor_s_max)))
                while True:
                    answer = await _receive(back)
                    if isinstance(answer, Found):
                        return answer.members
                    if isinstance(answer, Refused):
                        raise FormatError(answer.reason)
                    if isinstance(answer, Exhausted):
                        raise self._exhausted()
                    await _send(to, await read(answer.name, answer.offset, min(answer.length, ASK_BYTES_MAX)))
            except (trio.BrokenResourceError, EOFError):
                with trio.CancelScope(shield=True):
                    status = await trio.to_thread.run_sync(process.wait)
                raise self._ended(status) from None

    def _exhausted(self) -> FormatError:
        return FormatError(f"reading it takes more than {self._memory_bytes_max >> 20} MiB of memory, the limit")

    def _ended(self, status: int) -> FormatError | CannotTellError:
        if status == -signal.SIGXCPU:
            return FormatError(f"reading it takes more than {self._processor_s_max} s of processor time, the limit")
        return CannotTellError(f"the process that read its commit file ended (status {status}): is memory short?")


async def _send(stream: trio.lowlevel.FdStream, payload: bytes) -> None:
    await stream.send_all(LENGTH.pack(len(payload)) + payload)


async def _receive(stream: trio.lowlevel.FdStream) -> Answer:
    (length,) = LENGTH.unpack(await _exactly(stream, LENGTH.size))
    if length > ANSWER_BYTES_MAX:
        raise FormatError(f"it names more files than fit into {ANSWER_BYTES_MAX >> 20} MiB")
    try:
        return _answers.decode(await _exactly(stream, length))
    except msgspec.DecodeError as error:
        raise CannotTellError(f"the process that read its commit file sent nonsense: {error}") from None


async def _exactly(stream: trio.lowlevel.FdStream, count: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < count:
        piece = await stream.receive_some(min(count - len(pieces), RECEIVE_BYTES))
        if not piece:
            raise EOFError
        pieces += piece
    return bytes(pieces)


def _start() -> subprocess.Popen[bytes]:
    """The process; it inherits its two pipes and nothing else, so that it never keeps a mount alive."""
    paths = [_PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cachexfs.adapters.format_worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, close_fds=True, cwd="/",
        start_new_session=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


__all__ = ["FormatChild"]
