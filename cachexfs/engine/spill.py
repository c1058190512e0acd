"""Spill: staged files move from memory to NVMe when memory is full and the PFS is not fast enough.

Role: what `returned` promised is kept (the bytes survive the application and the daemon), only slower to read. The
newest published files go first, those that the PFS gets last; a file in progress that is alone larger than memory goes
itself and grows there. What is on the PFS already is evicted instead, see ``Keeper``. A device that is failing takes
bytes into the kernel's cache and loses them afterwards: memory is given up only for what it has synced, and what grew
there is synced when it is published.

Concurrency: one move at a time. The bytes are copied in a thread, the exchange is one step without an await.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable

import trio

from cachexfs.core.stages import parse_stage
from cachexfs.engine.copying import copy_bytes
from cachexfs.engine.files import Files
from cachexfs.engine.node import Node
from cachexfs.engine.vnode import Vnode
from cachexfs.errors import FsError

log = logging.getLogger(__name__)

RETRY_S = 10.0  # after NVMe has refused


class Spiller:
    """Moves staged files to NVMe."""

    def __init__(self, node: Node, files: Files) -> None:
        self.node = node
        self.files = files
        self._lock = trio.Lock()
        self._refused_at_s: float | None = None
        self.on_full: Callable[[int], None] = lambda length: None  # evicts what NVMe need not hold any more
        self.on_room: Callable[[], None] = lambda: None  # what was removed while it moved has given its memory back

    def can_take(self, length: int) -> bool:
        """Whether NVMe would take ``length`` bytes."""
        if self._refused_at_s is not None and self.node.clock.now_s() - self._refused_at_s < RETRY_S:
            return False
        try:
            if self.node.staging.spill_limit_bytes and self.node.staging.spill_room_bytes() < length:
                self.on_full(length)
            return self.node.staging.spill_room_bytes() >= max(length, 1)
        except OSError as error:
            self._refuse(error)
            return False

    def room_bytes(self) -> int:
        """What NVMe would take now."""
        try:
            return self.node.staging.spill_room_bytes()
        except OSError:
            return 0

    def _refuse(self, error: OSError) -> None:
        self._refused_at_s = self.node.clock.now_s()
        self.node.errors["spill"] = (
            f"{os.strerror(error.errno or errno.EIO)} on the NVMe directory: staging cannot spill, writers wait for "
            "the PFS when memory is full; make room there, or choose another with -o nvme=DIR"
        )
        log.error("%s", self.node.errors["spill"])

    def refused(self, error: OSError) -> FsError:
        """NVMe has not done what a call needs: the error that the call ends with, told in ``status`` too."""
        self._refuse(error)
        code = errno.ENOSPC if error.errno in (errno.ENOSPC, errno.EDQUOT) else errno.EIO
        return FsError(code, self.node.errors["spill"])

    async def write(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> int:
        """Bytes of a file in progress that has moved. Raises ``FsError`` ENOSPC, EIO."""
        try:
            return await trio.to_thread.run_sync(os.pwrite, fd, data, offset)
        except OSError as error:
            raise self.refused(error) from error

    async def sync(self, fd: int) -> None:
        """Return when NVMe has what was written to a file. Raises ``FsError`` ENOSPC, EIO."""
        try:
            await trio.to_thread.run_sync(os.fdatasync, fd)
        except OSError as error:
            raise self.refused(error) from error

    async def spill(self, length: int) -> bool:
        """Move published contents until ``length`` bytes fit in memory; False when nothing moved."""
        staging, moved = self.node.staging, False
        async with self._lock:
            for stage, vnode in self._candidates():
                if staging.used_bytes + length <= staging.limit_bytes:
                    return True
                if staging.has(stage) and not staging.is_spilled(stage) and self.can_take(staging.size(stage)):
                    moved = await self._move_published(stage, vnode) or moved
        return moved

    def _candidates(self) -> list[tuple[str, Vnode | None]]:
        """Stages in memory whose bytes do not change, the newest first: the PFS gets the oldest first, so that these
        leave memory by themselves, and a copy that is under way would begin anew."""
        view, staging, found = self.node.catalogue.view, self.node.staging, []
        for stage in staging.stages():
            if staging.is_spilled(stage):
                continue
            fid, gen = parse_stage(stage)
            generation, inode, vnode = view.generation(fid), view.inode(fid), self.files.known(fid)
            needed = (generation is not None and generation.stage == stage) or any(
                op.stage == stage for _, op in view.ops_of(fid)
            )
            if gen and inode is not None and needed and self._is_still(stage, vnode):
                found.append((inode.t_returned_s, stage, vnode))
        return [(stage, vnode) for _, stage, vnode in sorted(found, key=lambda item: item[:2], reverse=True)]

    @staticmethod
    def _is_still(stage: str, vnode: Vnode | None) -> bool:
        if vnode is None:
            return True
        if vnode.change_lock.locked():
            return False  # who holds it may be waiting for room himself
        if vnode.stage != stage:
            return True
        return not (vnode.dirty or vnode.passed or vnode.backed or vnode.content.open)

    async def _move_published(self, stage: str, vnode: Vnode | None) -> bool:
        if vnode is None:
            return await self.move(stage, None)
        if not self._is_still(stage, vnode):
            return False
        async with vnode.change_lock:
            moved = await self.move(stage, vnode)
        vnode.rest()  # meanwhile its last handle may have gone, and what was staged with it
        return moved

    async def move(self, stage: str, vnode: Vnode | None) -> bool:
        """Move one staged file; False when NVMe does not take it or it changed meanwhile.

        ``vnode``: the one that has it open, its ``change_lock`` held.
        """
        staging = self.node.staging
        try:
            source = staging.open_file(stage)
        except FileNotFoundError:
            return False
        target, began, kept = -1, False, False
        try:
            before = os.fstat(source)
            if not self.can_take(before.st_blocks * 512):
                return False
            target = staging.spill_begin(stage)
            began = True
            await copy_bytes(source, target, before.st_size)
            await trio.to_thread.run_sync(os.fdatasync, target)
            os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
            os.fchown(target, before.st_uid, before.st_gid)
            os.fchmod(target, stat.S_IMODE(before.st_mode))  # both say something to the next daemon
            after, now = os.fstat(source), self.files.known(parse_stage(stage)[0])
            same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
            holder = now if now is not None and now.stage == stage else None
            if not same or not staging.has(stage) or (holder is not None and holder is not vnode):
                return False
            staging.spill_end(stage, keep=True)
            kept = True
            self.node.errors.pop("spill", None)
            if vnode is not None and vnode.stage == stage and vnode.fd >= 0:
                os.close(vnode.fd)
                vnode.fd, target = target, -1
            return True
        except OSError as error:
            self._refuse(error)
            return False
        except FsError as error:  # somebody has cut it meanwhile: what that means is found out where it is read
            log.warning("%s stays in memory: %s", stage, error)
            return False
        finally:
            if target >= 0:
                os.close(target)
            if began and not kept:
                staging.spill_end(stage, keep=False)
            os.close(source)
            if not staging.has(stage):
                self.on_room()
