"""Notifications of the daemon (cache invalidation) on their way to the kernel.

Role: the kernel may make a notification wait for a lock that only the reply to a request frees, so the pump's
thread must not write them. Concurrency: one thread of its own, started with the first notification; the queue
is the only thing shared. Called by ``pump``.
"""

from __future__ import annotations

import os
import queue
import threading

#: Notifications that may wait for the kernel; a daemon that is further ahead is broken.
NOTIFICATIONS_MAX = 65536


class Notifier:
    """Writes notifications to the kernel from a thread of its own, in order."""

    def __init__(self, device_fd: int) -> None:
        self._device = device_fd
        self._queue: queue.Queue[bytes | None] = queue.Queue(NOTIFICATIONS_MAX)
        self._thread: threading.Thread | None = None

    def put(self, message: bytes) -> bool:
        """Queue one; False when too many wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="notifier", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        while True:
            message = self._queue.get()
            if message is None:
                return
            try:
                os.write(self._device, message)
            except OSError:
                pass  # ENOENT: the kernel does not know the inode or name; ENODEV: the mount has ended

    def close(self) -> None:
        """Let the thread end."""
        if self._thread is not None:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                pass
