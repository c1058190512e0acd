"""One PFS child process, seen from the daemon: start, frames, kill.

Role: used by ``pfs_pool`` only. Concurrency: trio; one call at a time per child; ``set_rate`` may come from another
task while a call runs.

Children are started by one thread that lives as long as the pool, because PR_SET_PDEATHSIG refers to the *thread*
that started the child, and because starting a program may itself hang (Python may lie on the PFS). The child gets
its two pipes and nothing else: no ``/dev/fuse``, no socket, no terminal.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import trio

from cachexfs.adapters.pfs_worker import FRAME_BYTES_MAX, LENGTH, decode, encode

PIPE_BYTES = 1 << 20
RECEIVE_BYTES = 1 << 20
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


class ChildEndedError(OSError):
    """The child process has ended in the midst of a call (EIO)."""


class Child:
    """A running child. ``sent``: the request has gone out whole, so that a rate may follow it."""

    def __init__(self, process: subprocess.Popen[bytes], to_fd: int, from_fd: int) -> None:
        self.process = process
        self.sent = False
        self._to = trio.lowlevel.FdStream(to_fd)
        self._from = trio.lowlevel.FdStream(from_fd)
        self._buffer = bytearray()

    async def send(self, frame: list[object]) -> None:
        """Send a request. ``ChildEndedError``."""
        self.sent = False
        try:
            await self._to.send_all(encode(frame))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self._ended() from None
        self.sent = True

    async def receive(self) -> tuple[int, str, object]:
        """The next frame: number, tag, value. ``ChildEndedError``."""
        while True:
            if len(self._buffer) >= LENGTH.size:
                (length,) = LENGTH.unpack_from(self._buffer)
                if length > FRAME_BYTES_MAX:
                    raise ChildEndedError(errno.EIO, f"a PFS child sent a frame of {length} bytes")
                end = LENGTH.size + length
                if len(self._buffer) >= end:
                    data = bytes(memoryview(self._buffer)[LENGTH.size : end])
                    del self._buffer[:end]
                    return _checked(data)
            try:
                data = await self._from.receive_some(RECEIVE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise self._ended() from None
            if not data:
                raise self._ended()
            self._buffer += data

    def set_rate(self, rate_bytes_s: float) -> None:
        """Give a running copy a new rate, if the pipe has room; never blocks."""
        if self.sent:
            with contextlib.suppress(OSError):
                os.write(self._to.fileno(), encode([0, "rate", rate_bytes_s]))  # shorter than PIPE_BUF: all or nothing

    def _ended(self) -> ChildEndedError:
        status = self.process.poll()
        return ChildEndedError(errno.EIO, f"a PFS child ended unasked (status {status})")

    def close(self) -> None:
        """Close the pipes: an idle child ends by itself."""
        self._to.close()
        self._from.close()

    def kill(self) -> None:
        """SIGKILL and close the pipes; whether and when the process ends is another matter."""
        if self.process.poll() is None:
            self.process.kill()
        self.close()

    async def wait(self) -> None:
        """Until the process has ended; reaps it."""
        if self.process.poll() is None:
            pidfd = os.pidfd_open(self.process.pid)
            try:
                await trio.lowlevel.wait_readable(pidfd)
            finally:
                trio.lowlevel.notify_closing(pidfd)
                os.close(pidfd)
            self.process.wait()

    def forget(self) -> None:
        """Leave a process that does not end to init: no complaint when the object goes."""
        if self.process.poll() is None:
            self.process.returncode = -9


def _checked(data: bytes) -> tuple[int, str, object]:
    try:
        frame = decode(data)
    except ValueError as error:  # every error of msgpack is one
        raise ChildEndedError(errno.EIO, f"a PFS child sent something unreadable: {error}") from None
    if isinstance(frame, list) and len(frame) == 3:
        number, tag, value = frame
        if isinstance(number, int) and isinstance(tag, str):
            return number, tag, value
    raise ChildEndedError(errno.EIO, "a PFS child sent something that is no frame")


_Started = tuple[subprocess.Popen[bytes], int, int]
_Job = tuple[str, Callable[["_Started | OSError"], None]]


class Spawner:
    """The thread that starts children. ``orphan`` is given a child whose asker has gone meanwhile."""

    def __init__(self, orphan: Callable[[Child], None]) -> None:
        self._orphan = orphan
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        threading.Thread(target=self._work, name="cachexfs-pfs-spawner", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end; the kernel then kills children that are left."""
        self._jobs.put(None)

    async def spawn(self, pfs_dir: str) -> Child:
        """Start a child; it has not said ``ready`` yet. OSError when no process can be made."""
        came, waiting = trio.Event(), True
        results: list[Child | OSError] = []

        def deliver(result: _Started | OSError) -> None:
            child = result if isinstance(result, OSError) else Child(*result)
            if waiting:
                results.append(child)
                came.set()
            elif isinstance(child, Child):
                self._orphan(child)

        self._jobs.put((pfs_dir, deliver))
        try:
            await came.wait()
        finally:
            waiting = False
        result = results[0]
        if isinstance(result, OSError):
            raise result
        return result

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            pfs_dir, deliver = job
            try:
                result: _Started | OSError = _start(pfs_dir)
            except OSError as error:
                result = error
            except Exception as error:  # the thread must live on: without it no child ever starts again
                result = OSError(errno.EIO, f"a PFS worker process cannot be made: {error!r}")
            try:
                self._token.run_sync_soon(deliver, result)
            except trio.RunFinishedError:
                if not isinstance(result, OSError):
                    result[0].kill()
                return


def _start(pfs_dir: str) -> _Started:
    child_in, to_child = os.pipe2(os.O_CLOEXEC)
    from_child, child_out = os.pipe2(os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # beyond the user's share of pipe memory: smaller pipes do, too
            fcntl.fcntl(from_child, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        paths = [_PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cachexfs.adapters.pfs_worker", str(os.getpid()), pfs_dir],
            stdin=child_in,
            stdout=child_out,
            stderr=subprocess.DEVNULL,  # a stuck child must not hold the daemon's stderr open
            close_fds=True,
            cwd="/",
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    except BaseException:
        os.close(to_child)
        os.close(from_child)
        raise
    finally:
        os.close(child_in)
        os.close(child_out)
    return process, to_child, from_child
