"""Reserve: memory is made ready for the next checkpoint while nothing is being written.

Role: keeps as much spare memory in staging as the largest burst of writing so far has taken (at first: ``prefault``),
within ``memory``. A first touch costs more than the copy that follows it; here nobody waits for it.

Concurrency: one task. The memory is touched in a thread of the lowest priority, which stops as soon as files grow, or
are read into the page cache.
"""

from __future__ import annotations

import os
import threading

import trio

from cachexfs.engine.node import Node

LOOK_S = 0.5
IDLE_LOOKS = 3  # without growth, before memory is touched
BURST_LOOKS = 10  # of idleness between two bursts
PIECE = bytes(2 << 20)
FILL_BYTES_MAX = 256 << 20
NICE_MAX = 19


class Reserve:
    """Refills the spare memory of staging."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._target_bytes = node.options.prefault
        self._burst_bytes = 0
        self._is_stopped = False

    async def run(self) -> None:
        """Refill whenever nothing grows, until cancelled."""
        if not self._target_bytes:
            return
        staging, idle, last, active = self.node.staging, 0, 0, 0
        try:
            while True:
                await trio.sleep(LOOK_S)
                grown, last = staging.grown_bytes - last, staging.grown_bytes
                idle = 0 if self._activity() != active else idle + 1
                active = self._activity()
                self._burst_bytes = self._burst_bytes + grown if idle < BURST_LOOKS else 0
                self._target_bytes = max(self._target_bytes, self._burst_bytes)
                while idle >= IDLE_LOOKS and self._activity() == active and (lacking := self._lacking_bytes()):
                    if not await self._fill(lacking):
                        break
        finally:
            self._is_stopped = True

    def _activity(self) -> int:
        return self.node.staging.grown_bytes + self.node.staging.cached_bytes

    def _lacking_bytes(self) -> int:
        staging = self.node.staging
        lacking = min(self._target_bytes - staging.spare_bytes, FILL_BYTES_MAX)
        if lacking < len(PIECE):
            return 0
        return min(lacking, staging.spare_room_bytes()) // len(PIECE) * len(PIECE)

    async def _fill(self, length: int) -> bool:
        """Touch memory until that much is ready or files grow; False when none could be had."""
        done, token, filled = trio.Event(), trio.lowlevel.current_trio_token(), [0]
        fd, number = self.node.staging.spare_begin()
        activity = self._activity()

        def touch() -> None:
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE_MAX)
                os.ftruncate(fd, length)  # so that the kernel knows that huge pages fit
                while filled[0] < length and not self._is_stopped and self._activity() == activity:
                    filled[0] += os.pwrite(fd, PIECE, filled[0])
            except OSError:
                pass  # no memory left: what was touched counts
            finally:
                os.close(fd)
                try:
                    trio.from_thread.run_sync(done.set, trio_token=token)
                except trio.RunFinishedError:
                    pass

        threading.Thread(target=touch, name="reserve", daemon=True).start()  # its priority cannot be raised again
        try:
            await done.wait()
        finally:
            self._is_stopped = not done.is_set()
            self.node.staging.spare_end(number, filled[0])
        return filled[0] > 0
