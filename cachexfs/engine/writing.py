"""Writing: bytes into a file's staging file, and what must happen before they may go there.

Role: used by ``Filesystem`` and ``Publishing``. Bytes that belong to a published generation (``vnode.sealed``) never
change: a write below them continues in a private copy, a write beyond them (appending) in place. The first change of
published content is told to the catalogue before it happens. A write waits for room, in memory or on NVMe.

Concurrency: as ``Files``. Whatever was waited for, a publication may have come in between: writers look again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import trio

from cachexfs.core import publication
from cachexfs.core.digest import Buffer
from cachexfs.engine.copying import copy_bytes
from cachexfs.engine.damaged import check_stage
from cachexfs.engine.interfaces import ContentSource
from cachexfs.engine.node import Node
from cachexfs.engine.passing import Passing
from cachexfs.engine.stamps import mark
from cachexfs.engine.vnode import Handle, Vnode, keep_last
from cachexfs.errors import FsError

SPARSE_BYTES_MAX = 16 << 30  # some seconds of reading holes


class Writing:
    """The writers of this mount."""

    def __init__(self, node: Node, source: ContentSource, passing: Passing) -> None:
        self.node = node
        self.source = source
        self.passing = passing

    async def write(self, handle: Handle, offset: int, data: Buffer) -> int:
        """Put bytes into the staging file; returns how many. Raises EFBIG, and ENOSPC at the deadline for room."""
        vnode = handle.vnode
        check_size(self.node, offset + len(data))
        self.passing.refresh(vnode)
        staging = self.node.staging
        while True:  # what is waited for may take long: a publication in between seals what was open to change
            if vnode.fd < 0 or offset < vnode.sealed or not vnode.dirty or vnode.change_lock.locked():
                await self._begin(vnode, offset)
            if staging.used_bytes + len(data) <= staging.limit_bytes or staging.is_spilled(vnode.stage):
                break
            await self._grow(vnode, len(data))
        if staging.is_spilled(vnode.stage):
            return await self._write_spilled(handle, offset, data)
        staging.make_ready(len(data))
        done = os.pwrite(vnode.fd, data, offset)
        self._changed(vnode)
        handle.wrote = True
        return done

    async def _grow(self, vnode: Vnode, length: int) -> None:
        """Room for a write: in memory, else the file goes on on NVMe. Raises ENOSPC at ``full_timeout``."""
        end_s = trio.current_time() + self.node.options.full_timeout_s
        while not await self._room(length):
            async with vnode.change_lock:
                if self.node.staging.is_spilled(vnode.stage):
                    return
                if vnode.backed or vnode.passed:
                    raise self._is_full()  # the kernel writes to this very file
                if await self.source.spill_own(vnode):
                    keep_last(vnode)
                    return
            if trio.current_time() >= end_s:  # NVMe has room for this write, and not for the whole file
                raise self._is_full()
            await self.source.room_freed()

    async def _write_spilled(self, handle: Handle, offset: int, data: Buffer) -> int:
        """A write to NVMe, which may take its time: in a thread."""
        vnode = handle.vnode
        with trio.move_on_after(self.node.options.full_timeout_s):
            while not self.source.can_spill(len(data)):
                await self.source.room_freed()
        if not self.source.can_spill(len(data)):
            raise self._is_full()
        while True:
            async with vnode.change_lock:
                if offset >= vnode.sealed and vnode.fd >= 0:
                    done = await self.source.write_spilled(vnode.fd, data, offset)
                    self._changed(vnode)
                    handle.wrote = True
                    return done
            await self._begin(vnode, offset)

    def _changed(self, vnode: Vnode) -> None:
        vnode.version += 1
        vnode.mtime_ns = self.node.clock.now_ns()
        self.node.staging.recount(vnode.stage, vnode.fd)
        if vnode.passed:
            vnode.seen, vnode.unstamped = mark(vnode.fd), False
        if not vnode.removed:
            self.source.grown(vnode)

    async def truncate(self, vnode: Vnode, size: int) -> None:
        """ftruncate. Growing leaves a hole. Raises EFBIG."""
        self.passing.refresh(vnode)
        if size == vnode.size:
            return
        if size > vnode.size:
            check_size(self.node, size)
        await self._begin(vnode, size, keep=size)
        with self._telling(vnode.stage):
            os.ftruncate(vnode.fd, size)
        self._changed(vnode)

    def take_back(self, vnode: Vnode, version: int) -> None:
        """Undo a truncation that nobody has heard of, of a file that was as published before, unless it has changed
        since ``version``."""
        if (vnode.version, vnode.passed, vnode.backed, vnode.removed) != (version, 0, 0, False):
            return
        staging, stage = self.node.staging, vnode.stage
        if stage == vnode.content.stage:  # it had grown where it was
            try:
                os.ftruncate(vnode.fd, vnode.content.size)
            except OSError:
                return
            staging.recount(stage, vnode.fd)
        else:
            staging.remove(stage)
        vnode.close_stage()
        vnode.published, vnode.synced, vnode.digested = vnode.version, None, None

    async def end_change(self, vnode: Vnode) -> None:
        """A change has failed before it was made: the catalogue need not go on saying that the file is changing."""
        async with vnode.change_lock:
            inode = self.node.catalogue.view.inode(vnode.fid)
            if inode is None or inode.writing != self.node.name or vnode.dirty or vnode.writers:
                return
            ctx = self.node.ctx()
            await self.node.catalogue.mutate(lambda tx: publication.end_change(tx, ctx, vnode.fid))

    async def _begin(self, vnode: Vnode, offset: int, keep: int | None = None) -> None:
        """Make sure that a change at ``offset`` may go into ``vnode.fd`` (``keep``: bytes of the old content needed).

        The first change of published content is told to the catalogue before it happens.
        """
        async with vnode.change_lock:
            first = not vnode.dirty
            if first and vnode.content.size and not vnode.removed:
                ctx = self.node.ctx()
                begin = self.node.catalogue.mutate
                vnode.route = await begin(lambda tx: publication.begin_change(tx, ctx, vnode.fid))
            if vnode.backed and not vnode.passed and offset < vnode.sealed:
                await self._move_published(vnode)
                return
            if vnode.fd >= 0 and (vnode.passed or offset >= vnode.sealed):
                return  # passed writers have this very file: drains and replicas wait for their last close
            if vnode.fd < 0 and await self._continue(vnode, offset):
                return
            await self._copy_up(vnode, keep)

    async def _continue(self, vnode: Vnode, offset: int) -> bool:
        """Append in place to this node's own staged file of the published generation, if that is what happens."""
        content = vnode.content
        if not content.stage or offset < content.size or content.origin != self.node.name:
            return False
        if not self.node.staged(content.stage) or self.node.staging.size(content.stage) != content.size:
            return False
        if self.node.staging.is_spilled(content.stage) and not await check_stage(self.node, content.stage):
            return False  # the digest of what grows behind them would say that they are right
        if vnode.fd >= 0 or not self.node.staged(content.stage):
            return vnode.fd >= 0
        vnode.fd = self.node.staging.open_file(content.stage, write=True)
        vnode.stage, vnode.sealed = content.stage, content.size
        return True

    async def _copy_up(self, vnode: Vnode, keep: int | None) -> None:
        """A private staging file with the old bytes (at most ``keep`` of them)."""
        size = vnode.size
        want = size if keep is None else min(keep, size)
        staging = self.node.staging
        stage, part = self.source.new_stage(vnode.fid, vnode.content.gen + 1), self.source.new_stage(vnode.fid, 0)
        spilled = want > 0 and not await self._room(want)
        with self._telling(part if spilled else vnode.stage, spilled=spilled):
            fd = await self._copied(vnode, part, stage, want, spilled=spilled)
        old_fd, old_stage, was_dirty = vnode.fd, vnode.stage, vnode.dirty and vnode.sealed == 0
        vnode.fd, vnode.stage, vnode.sealed = fd, stage, 0
        vnode.synced, vnode.digested = None, None
        keep_last(vnode)
        if old_fd >= 0:
            os.close(old_fd)
            if was_dirty and old_stage:
                staging.remove(old_stage)

    async def _copied(self, vnode: Vnode, part: str, stage: str, want: int, *, spilled: bool) -> int:
        """A new staged file with the first bytes of the old content: its descriptor."""
        staging = self.node.staging
        fd = staging.create(part, spilled=spilled)
        staging.reserve(part, want)
        try:
            if want:
                as_written = vnode.dirty or self.node.in_memory(vnode.stage) or not vnode.content.tree
                if vnode.fd >= 0 and (as_written or not staging.has(vnode.stage)):
                    await copy_bytes(vnode.fd, fd, want)
                else:
                    count = partial(staging.recount, part, fd)
                    await self.source.fetch_into(vnode.fid, vnode.content, fd, want, count)
            staging.recount(part, fd)
            staging.rename(part, stage)  # only now it is something that a restart may take for the newest bytes
        except BaseException:
            os.close(fd)
            staging.remove(part)
            raise
        return fd

    @contextmanager
    def _telling(self, stage: str, *, spilled: bool = False) -> Iterator[None]:
        """What NVMe refuses meanwhile is told as that."""
        spilled = spilled or self.node.staging.is_spilled(stage)
        try:
            yield
        except OSError as error:
            raise self.source.spill_refused(error) if spilled else error from None

    async def _room(self, length: int) -> bool:
        """Wait until memory has room; False when the bytes must go to NVMe. Raises ENOSPC at ``full_timeout``."""
        if self.source.make_room(length):
            return True
        with trio.move_on_after(self.node.options.full_timeout_s):
            while True:
                if await self.source.ask_room(length) and self.source.make_room(length):
                    return True
                if not await self.source.spill(length):
                    if self.source.can_spill(length):
                        return False
                    await self.source.room_freed()
                if self.source.make_room(length):
                    return True
        raise self._is_full()

    def _is_full(self) -> FsError:
        staging = self.node.staging
        return FsError(
            errno.ENOSPC,
            f"staging is full ({staging.used_bytes >> 20} of {staging.limit_bytes >> 20} MiB): nothing in it reached "
            f"the PFS for {self.node.options.full_timeout_s:.0f} s, and NVMe takes nothing (-o nvme=DIR)",
        )

    async def keep(self, vnode: Vnode) -> None:
        """Before an open file loses its last name: its bytes come here, if memory has room for them and they are
        nowhere on this node; nobody else keeps them for it. Raises what stands in the way."""
        content = vnode.content
        if vnode.fd >= 0 or not vnode.handles or self.node.local_path(content.stage, content.size) is not None:
            return
        size = content.size
        if not self.source.make_room(size) and not (await self.source.ask_room(size) and self.source.make_room(size)):
            return
        async with vnode.change_lock:
            if vnode.fd < 0 and vnode.content.size:
                await self._copy_up(vnode, None)

    async def unshare(self, vnode: Vnode) -> None:
        """Before a writer joins readers that the kernel serves: what is published moves to a file of its own.

        The kernel holds ``vnode.fd``, so it is the published bytes that move, to a copy under their old stage name.
        """
        async with vnode.change_lock:
            if vnode.backed and not vnode.passed and vnode.sealed:
                await self._move_published(vnode)

    async def _move_published(self, vnode: Vnode) -> None:
        staging, size = self.node.staging, vnode.content.size
        if not await self._room(size):
            raise self._is_full()
        stage, part = self.source.new_stage(vnode.fid, vnode.content.gen + 1), self.source.new_stage(vnode.fid, 0)
        fd = staging.create(part)
        staging.reserve(part, size)
        try:
            await copy_bytes(vnode.fd, fd, size)
            staging.recount(part, fd)
            staging.exchange(vnode.stage, part)
            staging.rename(part, stage)
        except BaseException:
            staging.remove(part)
            raise
        finally:
            os.close(fd)
        vnode.stage, vnode.sealed = stage, 0
        vnode.synced, vnode.digested = None, None


def file_bytes_max(node: Node) -> int:
    """The longest that a file may be, holes included."""
    return max(node.staging.limit_bytes + node.staging.spill_limit_bytes, SPARSE_BYTES_MAX)


def check_size(node: Node, size: int) -> None:
    """EFBIG for what digests and drains, which read holes as bytes, could not cope with."""
    if size > file_bytes_max(node):
        raise FsError(errno.EFBIG, f"a file of {size} bytes is larger than staging")
