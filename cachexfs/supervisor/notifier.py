"""Notifications of the daemon (cache invalidation) on their way to the kernel.

Role: the kernel may make a notification wait for a lock that only the reply to a request frees, so the pump's
thread must not write them. Concurrency: one thread of its own, started with the first notification; the queue
and the count of its bytes are all that is shared. Called by ``pump``.
"""

from __future__ import annotations

import os
import queue
import threading

#: Notifications that may wait for the kernel, and their bytes; a daemon that is further ahead is broken.
NOTIFICATIONS_MAX = 65536
NOTIFICATIONS_BYTES_MAX = 64 << 20


class Notifier:
    """Writes notifications to the kernel from a thread of its own, in order."""

    def __init__(self, device_fd: int) -> None:
        self._device = device_fd
        self._queue: queue.Queue[bytes | None] = queue.Queue(NOTIFICATIONS_MAX)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._waiting_bytes = 0

    def put(self, message: bytes) -> bool:
        """Queue one; False when too many wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="notifier", daemon=True)
            self._thread.start()
        with self._lock:
            if self._waiting_bytes + len(message) > NOTIFICATIONS_BYTES_MAX:
                return False
            self._waiting_bytes += len(message)
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self._written(message)
            return False
        return True

    def _written(self, message: bytes) -> None:
        with self._lock:
            self._waiting_bytes -= len(message)

    def _run(self) -> None:
        while True:
            message = self._queue.get()
            if message is None:
                return
            try:
                os.write(self._device, message)
            except OSError:
                pass  # ENOENT: the kernel does not know the inode or name; ENODEV: the mount has ended
            self._written(message)

    def close(self) -> None:
        """Let the thread end."""
        if self._thread is not None:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                pass
