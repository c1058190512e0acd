"""A child process that touches the PFS, and may hang for ever: ``python -m cachexfs.adapters.pfs_worker``.

Role: started by ``pfs_child``; reads one request frame at a time from standard input, answers on standard output.
Imports the standard library and msgpack only. Ends when its input ends or the daemon dies (PR_SET_PDEATHSIG).
Concurrency: one thread, one call at a time.

Frames: a 4-byte big-endian length, then msgpack.
To the worker: ``[number, operation, nonce, identity or nil, rate, arguments]`` and, at any time, ``[0, "rate", x]``.
From it: ``[number, tag, value]`` with the tags ``ready``, ``progress``, ``note``, ``page``, ``complaint``, then one of
``done`` and ``error`` (errno, message, file name, whether the PFS directory itself is concerned).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Sequence

import msgpack

from cachexfs import machine
from cachexfs.adapters import pfs_names, pfs_ops, pfs_reads
from cachexfs.adapters.pfs_attrs import Attrs, complaints
from cachexfs.adapters.pfs_dir import Memory, PfsIdentity, RootError

FRAME_BYTES_MAX = 16 << 20
NICE = machine.BACKGROUND_NICE
LENGTH = struct.Struct(">I")
_PR_SET_PDEATHSIG = 1
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_BEST_EFFORT_LOWEST = (2 << 13) | 7
_IOPRIO_WHO_PROCESS = 1


def read_exactly(fd: int, count: int) -> bytes:
    """``count`` bytes; EOFError at the end."""
    pieces = bytearray()
    while len(pieces) < count:
        piece = os.read(fd, count - len(pieces))
        if not piece:
            raise EOFError
        pieces += piece
    return bytes(pieces)


def encode(frame: list[object]) -> bytes:
    """A frame with its length. ValueError when it is too long. File names may hold any bytes."""
    data: bytes = msgpack.packb(frame, unicode_errors="surrogateescape")
    if len(data) > FRAME_BYTES_MAX:
        raise ValueError(f"frame of {len(data)} bytes")
    return LENGTH.pack(len(data)) + data


def decode(data: bytes) -> object:
    """The content of a frame."""
    return msgpack.unpackb(data, raw=False, unicode_errors="surrogateescape")


OPERATIONS: dict[str, Callable[..., object]] = {**pfs_ops.OPERATIONS, **pfs_reads.OPERATIONS, "run": pfs_names.run}


class Channel:
    """The two pipes to the pool."""

    def __init__(self, in_fd: int, out_fd: int) -> None:
        self._in, self._out = in_fd, out_fd
        self.number = 0
        self.rate_bytes_s = 0.0

    def receive(self) -> list[object]:
        """The next frame. EOFError when the pool is gone."""
        (length,) = LENGTH.unpack(read_exactly(self._in, LENGTH.size))
        if length > FRAME_BYTES_MAX:
            raise ValueError(f"frame of {length} bytes")
        frame = decode(read_exactly(self._in, length))
        if not isinstance(frame, list) or len(frame) < 3:
            raise ValueError("not a frame")
        return frame

    def request(self) -> list[object]:
        """The next frame that is a request."""
        while True:
            frame = self.receive()
            if frame[1] != "rate":
                return frame

    def send(self, tag: str, value: object) -> None:
        """Send one frame. BrokenPipeError when the pool is gone."""
        view = memoryview(encode([self.number, tag, value]))
        while view:
            view = view[os.write(self._out, view) :]

    def progress(self, copied_bytes: int) -> None:
        """See ``pfs_copy.Monitor``."""
        self.send("progress", copied_bytes)

    def note(self, value: int) -> None:
        """See ``pfs_ops.Monitor``."""
        self.send("note", value)

    def page(self, rows: Sequence[tuple[bytes, object]]) -> None:
        """See ``pfs_ops.Monitor``."""
        self.send("page", rows)

    def rate(self) -> float:
        """The rate given last; takes in what the pool has sent meanwhile."""
        while select.select([self._in], [], [], 0)[0]:
            frame = self.receive()
            if frame[1] == "rate" and isinstance(frame[2], int | float):
                self.rate_bytes_s = float(frame[2])
        return self.rate_bytes_s


def prepare_process(parent_pid: int) -> None:
    """End with the daemon, yield to it, and take no signal from a terminal."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        sys.exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    number = _SYS_IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        libc.syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_BEST_EFFORT_LOWEST)


def serve_one(channel: Channel, pfs_path: bytes, memory: Memory) -> None:
    """Take one request and answer it."""
    number, operation, nonce, identity, rate, arguments = channel.request()
    assert isinstance(number, int)
    assert isinstance(operation, str)
    assert isinstance(nonce, str)
    assert isinstance(rate, float)
    assert isinstance(arguments, list)
    channel.number, channel.rate_bytes_s = number, rate
    known = PfsIdentity(*identity) if isinstance(identity, list) else None
    context = pfs_ops.Context(pfs_path, known, nonce, channel, memory)
    values = [Attrs(*value["attrs"]) if isinstance(value, dict) else value for value in arguments]
    try:
        function = OPERATIONS[operation]
        result = function(context, *values)
        while complaints:
            channel.send("complaint", complaints.pop())
    except BrokenPipeError:
        raise
    except OSError as error:
        text = error.strerror or str(error)
        name = error.filename if isinstance(error.filename, str) else ""
        channel.send("error", [error.errno or errno.EIO, text, name, isinstance(error, RootError)])
    except Exception:
        channel.send("error", [errno.EIO, traceback.format_exc(limit=-4), "", False])
    else:
        channel.send("done", result)


def main() -> None:
    """Serve until the input ends. Arguments: the daemon's pid, PFS_DIR."""
    prepare_process(int(sys.argv[1]))
    channel = Channel(0, 1)
    channel.send("ready", os.getpid())
    memory: Memory = {}
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            serve_one(channel, os.fsencode(sys.argv[2]), memory)


if __name__ == "__main__":
    main()
