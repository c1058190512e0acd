"""Passthrough: files that the kernel reads and writes without asking.

Role: keeps count of the handles that the kernel serves from a staging file, notices what their writers have changed,
and keeps room ahead of them: the kernel does not wait when memory is full, the application gets ENOSPC. So new files
are passed only while there is room for what the fastest writer does between two looks, spare memory is given up ahead
of the growth, and what can leave memory does.

Concurrency: called by ``Files``; ``watch`` is a task of its own that never waits for storage.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Awaitable, Callable
from itertools import islice

import trio

from cachexfs.core import publication
from cachexfs.core.transaction import Tx
from cachexfs.engine.interfaces import ContentSource
from cachexfs.engine.node import Node
from cachexfs.engine.stamps import look, mark
from cachexfs.engine.vnode import PASSED_MODE, PLAIN_MODE, Handle, Vnode
from cachexfs.errors import CacheXError

log = logging.getLogger(__name__)

MAP_LOOK_FIRST_S, MAP_LOOK_MAX_S = 0.001, 0.5
WATCH_INTERVAL_S = 0.05
WATCH_GROWING_S = 0.01  # while files grow and room is short: what is kept ahead of them is what they do in some looks
WATCH_SHARE = 4  # between two looks lies this many times what one takes: somebody may have 10,000 files open
PROCESSORS = os.cpu_count() or 1
STEPS_MAX = round(WATCH_INTERVAL_S / WATCH_GROWING_S)
SETTLE_S = 0.25
TELL_AGAIN_S = 5.0
ROOM_BYTES_MIN = 256 << 20  # what a passed writer may write between two looks, with something to spare
AMPLE_NEEDS = 2  # with so many times the room that is kept ahead, the looks of idle files are enough
READY_BYTES_MAX = 512 << 20
READY_FILES_MAX = 256  # asked at every open: more than write at a time
READY_FIRST_BYTES = 32 << 20  # before an open is answered; the rest comes in pieces, between requests


def was_passed(file: int | str) -> bool:
    """Whether the kernel could change a staged file without asking when the daemon died."""
    return stat.S_IMODE(os.stat(file).st_mode) == PASSED_MODE


def has_writer(fd: int) -> bool:
    """Whether anybody beside this descriptor has its file open for writing, or mapped so.

    A lease tells: the kernel grants one for reading only where nobody writes. Ours must read, too, while it is asked.
    """
    itself = f"/proc/self/fd/{fd}"
    reading = os.open(itself, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(reading, fd, inheritable=False)
    os.close(reading)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    finally:
        writing = os.open(itself, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(writing, fd, inheritable=False)
        os.close(writing)
    return False


class Passing:
    """The files of this mount that the kernel may be changing."""

    def __init__(self, node: Node, source: ContentSource) -> None:
        self.node = node
        self.source = source
        self.vnodes: set[Vnode] = set()
        self._written = 0  # how many of them have a writer still
        self._mapped: dict[Handle, None] = {}
        self._mapped_more = trio.Event()
        self._begun = trio.Event()
        self._step_bytes = 0  # the most that all have grown by in WATCH_GROWING_S, of late
        self._looked_s = 0.0
        self._usual_bytes = 0  # how long the last one was: checkpoint files come in equal sizes

    def begin(self, handle: Handle) -> None:
        """The kernel will serve this handle."""
        vnode = handle.vnode
        handle.backed, vnode.cached_last = True, False
        vnode.backed += 1
        if handle.writable:
            self._written += not vnode.passed
            if not vnode.passed and not vnode.dirty:
                seen, content = look(vnode.fd), vnode.content
                vnode.seen = seen if seen == (content.size, content.stamp_ns) else mark(vnode.fd)
                vnode.unstamped = False
            handle.passed = True
            vnode.passed += 1
            vnode.mappable = vnode.mappable or handle.mappable
            if not vnode.removed:
                os.fchmod(vnode.fd, PASSED_MODE)  # should this daemon die, its bytes are newer than what was published
            self.vnodes.add(vnode)
            self._begun.set()
            self.node.foreground.busy(2 * WATCH_INTERVAL_S)
            self.node.staging.make_ready(min(self._ready_bytes(), READY_FIRST_BYTES))

    def end(self, handle: Handle) -> None:
        """A handle was released."""
        vnode = handle.vnode
        vnode.passed -= handle.passed
        self._written -= handle.passed and not vnode.passed
        vnode.backed -= handle.backed
        if vnode.closing is not None:
            vnode.closing.discard(handle)

    def finish(self, vnode: Vnode) -> None:
        """What the released handle wrote is published, or could not be."""
        if vnode.passed or vnode not in self.vnodes:
            return
        self.vnodes.discard(vnode)
        vnode.mappable = False
        if vnode.fd >= 0 and not vnode.dirty and not vnode.removed:
            os.fchmod(vnode.fd, PLAIN_MODE)
        self._usual_bytes = vnode.seen[0]
        if not self.source.make_room(0):  # it may have passed the limit, and nobody else may ask for room for long
            self.source.spill_soon(0)
        if not self.vnodes:
            self.node.foreground.rest()
            self.node.staging.forget_ready()

    async def spare_processors(self) -> None:
        """Before work that nobody waits for: where writers need most of the processors, let them finish first."""
        if 2 * self._written > PROCESSORS:
            await self.node.foreground.pause()

    def has_room(self) -> bool:
        """Whether one more file may be written without asking.

        What is on the PFS leaves memory for that only where half of ``memory`` stays to it: a small staging keeps
        what it has, and the file is written by the handler, which asks for what it takes.
        """
        need, staging = self._need_bytes(), self.node.staging
        has = staging.used_bytes + need <= staging.limit_bytes
        has = has or (2 * need <= staging.limit_bytes and self.source.make_room(need))
        return has and staging.free_bytes(need) >= need

    async def ask_room(self) -> None:
        """Before a new file: have the PFS asked about what would leave memory for it, for a moment at most."""
        need, staging = self._need_bytes(), self.node.staging
        if staging.used_bytes + need > staging.limit_bytes >= 2 * need:
            await self.source.ask_room(need)

    def refresh(self, vnode: Vnode, *, stamp: bool = True) -> None:
        """Count changes that the kernel has made to the staging file of a passed handle.

        ``stamp``: every write from now on will count. Without it one that follows at once may count only at the next
        call that stamps; but a stamp waits for the ``write(2)`` that is under way, and our loop with it.
        """
        if not vnode.passed or vnode.fd < 0:
            return
        seen = look(vnode.fd)
        is_new = seen != vnode.seen
        if is_new or (stamp and vnode.unstamped):
            vnode.seen, vnode.unstamped = mark(vnode.fd) if stamp else seen, not stamp
            was_dirty, vnode.version = vnode.dirty, vnode.version + 1
            if is_new:  # else its time has been counted, and another may have been set since
                inode = self.node.catalogue.view.inode(vnode.fid)
                shown_ns = vnode.mtime_ns if was_dirty or inode is None else inode.mtime_ns
                ahead = seen[1] <= shown_ns <= self.node.clock.now_ns()  # the kernel's stamps are coarser than ours
                vnode.mtime_ns = shown_ns if ahead else seen[1]
            self.node.staging.recount(vnode.stage, vnode.fd)

    async def settle(self, vnode: Vnode) -> None:
        """Give the RELEASE of a closed passed writer time to arrive before somebody else changes the file.

        A writer that really is still open shares the file with the newcomer, who writes in place then.
        """
        with trio.move_on_after(SETTLE_S):
            while vnode.closing:  # noqa: ASYNC110
                await trio.sleep(0.001)
        vnode.closing = None  # flushed by a duplicate's close: still open

    # ---- shared maps
    def outlives(self, handle: Handle) -> bool:
        """Whether a released handle may have left a shared map, through which the file goes on changing.

        A map of a passed file is one of the staging file: unlike others it keeps no handle open, and what is written
        through it moves no stamp. If so the handle stays, until ``unmapped`` finds that the map is gone.
        """
        vnode = handle.vnode
        if not handle.passed or not handle.mappable or vnode.removed or not self.held_open(vnode):
            return False
        self._mapped[handle] = None
        self._mapped_more.set()
        return True

    @staticmethod
    def held_open(vnode: Vnode) -> bool:
        """Whether the kernel has a passed file open for writing, or mapped so, whatever has been closed of it."""
        if not vnode.passed or vnode.fd < 0:
            return False
        try:
            return has_writer(vnode.fd)
        except OSError as error:
            log.warning("whether file %x is open cannot be told: %s", vnode.fid, error)
            return False

    async def unmapped(self, release: Callable[[Handle], Awaitable[None]]) -> None:
        """Finish the release of handles once nobody has a map of their file. Until cancelled."""
        while True:
            await self._mapped_more.wait()
            self._mapped_more = trio.Event()
            delay_s = MAP_LOOK_FIRST_S
            while self._mapped:
                with trio.move_on_after(delay_s):
                    await self._mapped_more.wait()
                    self._mapped_more, delay_s = trio.Event(), MAP_LOOK_FIRST_S
                for handle in list(self._mapped):
                    vnode = handle.vnode
                    if not vnode.removed and self.held_open(vnode):
                        continue
                    del self._mapped[handle]
                    try:
                        await release(handle)
                    except (CacheXError, OSError) as error:
                        log.error("closing a file that was mapped: %s", error)
                delay_s = min(delay_s * 2, MAP_LOOK_MAX_S)

    # ---- growing files
    async def watch(self) -> None:
        """Follow files that grow without asking: send ahead, make room, tell what is not what was published any more.
        Until cancelled."""
        async with trio.open_nursery() as nursery:
            await self._watch(nursery)

    async def _watch(self, nursery: trio.Nursery) -> None:
        grown: list[Vnode] = []
        is_ample, took_s = False, 0.0
        while True:
            pause_s = 0.0 if grown and not is_ample else WATCH_INTERVAL_S - WATCH_GROWING_S
            with trio.move_on_after(pause_s):
                await self._begun.wait()
            if self._begun.is_set():
                self._begun = trio.Event()
                await self._get_ready()
            await trio.sleep(max(WATCH_GROWING_S, WATCH_SHARE * took_s))
            began_s = trio.current_time()
            grown = self._look(nursery)
            took_s = trio.current_time() - began_s
            if not grown:
                continue
            self.node.foreground.busy(2 * WATCH_INTERVAL_S)
            need, staging = self._need_bytes(), self.node.staging
            free = min(staging.free_bytes(AMPLE_NEEDS * need), staging.limit_bytes - staging.used_bytes)
            is_ample = free >= AMPLE_NEEDS * need
            if not self.source.make_room(need):
                self.source.spill_soon(need)
            for vnode in grown:
                if not vnode.removed:
                    self.source.grown(vnode)
            await self._get_ready()

    def _look(self, nursery: trio.Nursery) -> list[Vnode]:
        """Which files have grown since the last look, and how fast they do."""
        before_bytes, now_s = self.node.staging.used_bytes, trio.current_time()
        grown = []
        for vnode in self.vnodes:
            version = vnode.version
            self.refresh(vnode, stamp=False)
            if vnode.version != version:
                grown.append(vnode)
            if self._is_untold(vnode):  # whoever has noticed it
                vnode.told = vnode.content.gen
                nursery.start_soon(self._tell, vnode)
        steps = max(1.0, (now_s - self._looked_s) / WATCH_GROWING_S)
        self._looked_s = now_s
        if grown:
            step_bytes = int((self.node.staging.used_bytes - before_bytes) / min(steps, STEPS_MAX))
            self._step_bytes = max(step_bytes, self._step_bytes * 7 // 8)
        return grown

    def _need_bytes(self) -> int:
        """The room that is kept ahead of growing files."""
        return max(ROOM_BYTES_MIN, 3 * self._step_bytes)

    def _is_untold(self, vnode: Vnode) -> bool:
        """Whether bytes of a published content are being changed in place, and it is claimed as if they were not."""
        content = vnode.content
        changed = vnode.dirty and not vnode.removed and content.size > 0 and content.stage == vnode.stage
        return changed and vnode.told != content.gen

    async def _tell(self, vnode: Vnode) -> None:
        ctx, gen = self.node.ctx(), vnode.content.gen

        def note(tx: Tx) -> None:
            now = tx.generation(vnode.fid)
            if now is not None and now.gen == gen:  # else its publication has come before this
                publication.begin_change(tx, ctx, vnode.fid)

        try:
            await self.node.catalogue.mutate(note)
        except CacheXError as error:
            log.warning("%x is being changed, which could not be told: %s", vnode.fid, error)
            await trio.sleep(TELL_AGAIN_S)
            vnode.told = -1

    async def _get_ready(self) -> None:
        """Free the spare memory that writers will take until the next look, in pieces: others are served between."""
        length = self._ready_bytes()
        for ready in range(READY_FIRST_BYTES, length + READY_FIRST_BYTES, READY_FIRST_BYTES):
            self.node.staging.make_ready(min(ready, length))
            await trio.lowlevel.checkpoint()

    def _ready_bytes(self) -> int:
        usual, steps = self._usual_bytes, self._step_bytes * STEPS_MAX
        sizes = [vnode.seen[0] for vnode in islice(self.vnodes, READY_FILES_MAX)]
        return min(sum(usual - size if size < usual else min(steps, size) for size in sizes), READY_BYTES_MAX)
