"""Open files: writing into staging, and publication.

Role: a ``Vnode`` is one content lineage of one file on this node, behind one inode number. Local writes change it
in place; a generation that another node publishes gets a new vnode and a new inode number as soon as this node
has had pages of the old one cached (a page fault through the old handle would poison the new one's cache).

The staging file is the truth. Its first ``sealed`` bytes belong to published generations and never change: a
write below them continues in a private copy, a write beyond them (appending) in place.

Concurrency: handlers of one file run interleaved. Between two awaits nothing changes; ``change_lock`` covers the
exchange of a staging file, ``publish_lock`` makes publications of a file happen one after the other. A write and
a publication of the same file may overlap: the publication covers what was written before it began.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable

import trio

from cachexfs.core import namespace, publication
from cachexfs.core.commitfiles import is_pointer_name, pointer_target
from cachexfs.core.order import parent_of
from cachexfs.core.publication import Content
from cachexfs.core.records import FID_STEP, Copy, Generation, Inode
from cachexfs.engine.interfaces import ContentSource
from cachexfs.engine.node import Node
from cachexfs.engine.passing import Passing, mark
from cachexfs.engine.vnode import UNWRITABLE, Handle, Vnode, copy_bytes
from cachexfs.errors import CacheXError, FsError, quoted

log = logging.getLogger(__name__)

POINTER_BYTES_MAX = 4096
SPARSE_BYTES_MAX = 16 << 30  # some seconds of reading holes
DIGEST_AT_ONCE_BYTES_MAX = 1 << 20  # hashing so little costs less than telling the digest later


class Files:
    """All vnodes of this mount."""

    def __init__(self, node: Node, source: ContentSource) -> None:
        self.node = node
        self.source = source
        self._by_ino: dict[int, Vnode] = {}
        self._current: dict[int, Vnode] = {}
        self.passing = Passing(node, source)
        self.on_released: Callable[[int], None] = lambda fid: None
        self.on_orphan_closed: Callable[[str], None] = node.staging.remove

    # ---- vnodes
    def vnode(self, fid: int) -> Vnode:
        """The vnode of a file's current content. Raises ENOENT."""
        generation = self.node.catalogue.view.generation(fid)
        if generation is None:
            raise FsError(errno.ENOENT)
        vnode = self._current.get(fid)
        if vnode is None:
            return self._bind(fid, self._free_ino(fid), generation)
        if vnode.dirty or vnode.content.gen == generation.gen:
            vnode.content = generation if not vnode.dirty else vnode.content
            return vnode
        if not vnode.paged and not vnode.backed:
            self._rebind(vnode, generation)
            return vnode
        del self._current[fid]
        self._rest(vnode)
        self._drop_if_idle(vnode)
        return self._bind(fid, self._free_ino(fid), generation)

    def _free_ino(self, fid: int) -> int:
        """An inode number of the file that the kernel does not know as an older content."""
        return next(ino for ino in range(fid, fid + FID_STEP) if ino not in self._by_ino)

    def by_ino(self, ino: int) -> Vnode:
        """The vnode behind an inode number that the kernel knows (also after a restart). Raises ENOENT."""
        vnode = self._by_ino.get(ino)
        if vnode is None:
            fid = ino // FID_STEP * FID_STEP
            generation = self.node.catalogue.view.generation(fid)
            if generation is None or fid in self._current:
                raise FsError(errno.ESTALE if fid in self._current else errno.ENOENT)
            vnode = self._bind(fid, ino, generation)
        return vnode

    def known(self, fid: int) -> Vnode | None:
        """The vnode of a file if this node has one, its changes counted."""
        vnode = self._current.get(fid)
        if vnode is not None:
            self.passing.refresh(vnode)
        return vnode

    def open_vnodes(self) -> list[Vnode]:
        """Vnodes with handles or unpublished bytes."""
        return [v for v in self._by_ino.values() if v.handles or v.dirty]

    def _bind(self, fid: int, ino: int, generation: Generation) -> Vnode:
        vnode = Vnode(fid, ino, generation)
        self._by_ino[ino] = vnode
        self._current[fid] = vnode
        return vnode

    def _rebind(self, vnode: Vnode, generation: Generation) -> None:
        self._close_stage(vnode)
        vnode.content = generation
        vnode.synced = None
        vnode.digested = None

    def remember(self, vnode: Vnode) -> None:
        """The kernel has been given the inode number once more."""
        vnode.lookups += 1

    def forget(self, ino: int, count: int) -> None:
        """The kernel has dropped references to an inode number."""
        vnode = self._by_ino.get(ino)
        if vnode is not None:
            vnode.lookups = max(0, vnode.lookups - count)
            if vnode.lookups == 0:
                vnode.paged = False
            self._drop_if_idle(vnode)

    def _drop_if_idle(self, vnode: Vnode) -> None:
        if vnode.lookups or vnode.handles or vnode.dirty:
            return
        self._by_ino.pop(vnode.ino, None)
        if self._current.get(vnode.fid) is vnode:
            del self._current[vnode.fid]
        stage = vnode.stage
        self._close_stage(vnode)
        if vnode.removed and stage:
            self.on_orphan_closed(stage)  # a drain may need it yet, for a commit file that names it

    def evicted(self, fid: int) -> None:
        """The staged file of a file's content was removed: nobody keeps its memory by an open descriptor."""
        vnode = self._current.get(fid)
        if vnode is not None:
            self._rest(vnode)

    def _rest(self, vnode: Vnode) -> None:
        """Nobody has the file open: give its descriptor back. The kernel remembers far more files than we may open.

        What comes next opens the staged file again: ``_open_local``, ``_continue``.
        """
        if vnode.handles or vnode.dirty or vnode.removed or vnode.backed:
            return
        if any(lock is not None and lock.locked() for lock in (vnode._change_lock, vnode._publish_lock)):
            return
        if vnode.stage and vnode.stage == vnode.content.stage:
            self._close_stage(vnode)
            vnode._change_lock = vnode._publish_lock = vnode.closing = vnode.digested = vnode.synced = None

    def _close_stage(self, vnode: Vnode) -> None:
        if vnode.fd >= 0:
            os.close(vnode.fd)
        vnode.fd, vnode.stage, vnode.sealed = -1, "", 0

    # ---- opening
    def open(self, vnode: Vnode, flags: int) -> Handle:
        """A handle on a vnode."""
        vnode.handles += 1
        handle = Handle(vnode, flags)
        if handle.writable:
            vnode.writers += 1
        return handle

    def resume(self, fid: int, ino: int, stage: str, published: Generation | None) -> None:
        """A file that an application has open lived through the death of the daemon with unpublished bytes."""
        vnode = Vnode(fid, ino, published or Generation(0, 0, b"", b"", "", ""))
        vnode.fd = self.node.staging.open_file(stage, write=True)
        vnode.stage, vnode.removed = stage, published is None
        vnode.sealed = published.size if published is not None and published.stage == stage else 0
        vnode.version, vnode.mtime_ns = 1, os.fstat(vnode.fd).st_mtime_ns
        if vnode.removed:
            vnode.published = 1
            found = os.fstat(vnode.fd)
            vnode.content = Generation(0, found.st_size, b"", b"", stage, self.node.name)
            vnode.last = Inode(
                "f", found.st_mode & 0o7777, found.st_uid, found.st_gid,
                found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns,
            )  # fmt: skip
        self._by_ino[ino] = self._current[fid] = vnode

    def without_name(self, ino: int) -> Vnode:
        """An empty vnode for a file of which nothing is left but what applications hold."""
        vnode = Vnode(ino // FID_STEP * FID_STEP, ino, Generation(0, 0, b"", b"", "", ""), removed=True)
        self._by_ino[ino] = vnode
        return vnode

    def reopen(self, ino: int, flags: int, *, passed: bool) -> Handle:
        """A handle that an application has held since before this daemon's life. Raises ``FsError`` ESTALE, EIO."""
        try:
            vnode = self.by_ino(ino)
        except FsError:
            vnode = self.without_name(ino)
        handle = self.open(vnode, flags)
        handle.wrote = handle.writable and vnode.dirty
        if not passed:
            handle.cached = flags & os.O_ACCMODE != os.O_WRONLY
            vnode.cached += handle.cached
        elif vnode.fd >= 0 or self._open_local(vnode):
            self.passing.begin(handle)
        return handle

    def keep_pages(self, handle: Handle) -> bool:
        """The kernel will use pages; whether those that it has from an earlier open are still of this content.

        Not for a write-only handle: it cannot be mapped, and without pages a byte is copied once less.
        """
        vnode = handle.vnode
        if handle.flags & os.O_ACCMODE == os.O_WRONLY:
            return False
        handle.cached = True
        vnode.cached += 1
        token = (vnode.content.gen, vnode.version)
        kept = vnode.paged and vnode.paged_token == token
        vnode.paged, vnode.paged_token = True, token
        return kept

    async def release(self, handle: Handle) -> None:
        """The last reference to a handle is gone: publish what came after the last FLUSH."""
        vnode = handle.vnode
        self.passing.refresh(vnode)
        if handle.writable:
            vnode.writers -= 1
        self.passing.end(handle)
        vnode.cached -= handle.cached
        try:
            if vnode.dirty and (handle.wrote or vnode.writers == 0):
                await self.publish(vnode)
            if handle.passed and not vnode.passed:
                await self._complete(vnode)
        finally:
            self.passing.finish(vnode)
            vnode.handles -= 1
            if not vnode.dirty and not vnode.removed and vnode.stage not in ("", vnode.content.stage):
                self._leave_copy(vnode)
            self._rest(vnode)
            self._drop_if_idle(vnode)
            if handle.writable:
                self.on_released(vnode.fid)

    # ---- passthrough: see ``Passing``
    def backing(self, handle: Handle) -> int | None:
        """Descriptor that may back a handle, None when its I/O must come here.

        A writer's: of a new file that nobody else has open, with room to spare. A reader's: of a whole, clean,
        staged content that nobody writes. The kernel refuses (EIO) an open of one inode number that goes another way
        than those that are open, but for direct I/O beside cached.
        """
        vnode, staging = handle.vnode, self.node.staging
        if vnode.backed:
            return vnode.fd
        if vnode.removed or vnode.cached:
            return None
        if not handle.writable:
            clean = not vnode.dirty and not vnode.writers and vnode.content.size > 0
            staged = clean and (vnode.fd >= 0 or self._open_local(vnode)) and vnode.stage
            return vnode.fd if staged and not staging.is_spilled(vnode.stage) else None
        fresh = vnode.content.open and not vnode.dirty and vnode.fd < 0 and vnode.handles == 1
        if not fresh or not self.passing.has_room():
            return None
        vnode.stage = self.source.new_stage(vnode.fid, vnode.content.gen + 1)
        vnode.fd = staging.create(vnode.stage)
        vnode.seen = mark(vnode.fd)
        return vnode.fd

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
        try:
            await copy_bytes(vnode.fd, fd, size)
            staging.exchange(vnode.stage, part)
            staging.rename(part, stage)
        except BaseException:
            staging.remove(part)
            raise
        finally:
            os.close(fd)
        vnode.stage, vnode.sealed = stage, 0
        vnode.synced, vnode.digested = None, None

    def _leave_copy(self, vnode: Vnode) -> None:
        """A private copy that nobody has changed is not needed any more."""
        if not vnode.backed:
            stage = vnode.stage
            self._close_stage(vnode)
            self.node.staging.remove(stage)

    def busy(self, fid: int) -> bool:
        """Whether a writer may still change the staged bytes of the file's newest generation."""
        vnode = self._current.get(fid)
        return vnode is not None and (vnode.passed > 0 or (vnode.content.open and vnode.writers > 0))

    async def _complete(self, vnode: Vnode) -> None:
        """The last passed writer is gone: the published bytes are final, their digests can be told.

        Where they were told before, one writer may have been in the middle of a write when another one closed: its
        bytes may have come after the look at them, and its stamp before.
        """
        content = vnode.content
        if vnode.dirty or vnode.removed or not content.size or vnode.fd < 0:
            return
        if content.tree and content.size > DIGEST_AT_ONCE_BYTES_MAX:
            return
        digest, tree, _ = await self._digests_of(vnode.fd, content.size)
        if content.tree:
            if tree != content.tree and vnode.content is content:
                vnode.version += 1
                await self.publish(vnode)
            return
        await self.node.catalogue.mutate(lambda tx: publication.complete(tx, vnode.fid, content, digest, tree))
        generation = self.node.catalogue.view.generation(vnode.fid)
        if generation is not None and generation.gen == content.gen:
            vnode.content = generation

    # ---- writing
    async def write(self, handle: Handle, offset: int, data: bytes) -> int:
        """Put bytes into the staging file; returns how many. Raises EFBIG, and ENOSPC at the deadline for room."""
        vnode = handle.vnode
        self._check_size(offset + len(data))
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
        while not await self._room(length):
            async with vnode.change_lock:
                if self.node.staging.is_spilled(vnode.stage):
                    return
                if vnode.backed or vnode.passed:
                    raise self._is_full()  # the kernel writes to this very file
                if await self.source.spill_own(vnode):
                    return

    async def _write_spilled(self, handle: Handle, offset: int, data: bytes) -> int:
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
                    done = await trio.to_thread.run_sync(os.pwrite, vnode.fd, data, offset)
                    self._changed(vnode)
                    handle.wrote = True
                    return done
            await self._begin(vnode, offset)

    def _changed(self, vnode: Vnode) -> None:
        vnode.version += 1
        vnode.mtime_ns = self.node.clock.now_ns()
        self.node.staging.recount(vnode.stage, vnode.fd)
        if vnode.passed:
            vnode.seen = mark(vnode.fd)
        if not vnode.removed:
            self.source.grown(vnode)

    async def truncate(self, vnode: Vnode, size: int) -> None:
        """ftruncate. Growing leaves a hole. Raises EFBIG."""
        self.passing.refresh(vnode)
        if size == vnode.size:
            return
        if size > vnode.size:
            self._check_size(size)
        await self._begin(vnode, size, keep=size)
        os.ftruncate(vnode.fd, size)
        self._changed(vnode)

    def _check_size(self, size: int) -> None:
        """EFBIG for what digests and drains, which read holes as bytes, could not cope with."""
        if size > file_bytes_max(self.node):
            raise FsError(errno.EFBIG, f"a file of {size} bytes is larger than staging")

    async def _begin(self, vnode: Vnode, offset: int, keep: int | None = None) -> None:
        """Make sure that a change at ``offset`` may go into ``vnode.fd`` (``keep``: bytes of the old content needed).

        The first change of published content is told to the catalogue before it happens.
        """
        async with vnode.change_lock:
            first = not vnode.dirty
            if first and vnode.content.size and not vnode.removed:
                ctx = self.node.ctx()
                await self.node.catalogue.mutate(lambda tx: publication.begin_change(tx, ctx, vnode.fid))
            if vnode.backed and not vnode.passed and offset < vnode.sealed:
                await self._move_published(vnode)
                return
            if vnode.fd >= 0 and (vnode.passed or offset >= vnode.sealed):
                return  # passed writers have this very file: drains and replicas wait for their last close
            if vnode.fd < 0 and self._continue(vnode, offset):
                return
            await self._copy_up(vnode, keep)

    def _continue(self, vnode: Vnode, offset: int) -> bool:
        """Append in place to this node's own staged file of the published generation, if that is what happens."""
        content = vnode.content
        if not content.stage or offset < content.size or content.origin != self.node.name:
            return False
        if not self.node.staging.has(content.stage) or self.node.staging.size(content.stage) != content.size:
            return False
        vnode.fd = self.node.staging.open_file(content.stage, write=True)
        vnode.stage, vnode.sealed = content.stage, content.size
        return True

    async def _copy_up(self, vnode: Vnode, keep: int | None) -> None:
        """A private staging file with the old bytes (at most ``keep`` of them)."""
        size = vnode.size
        want = size if keep is None else min(keep, size)
        staging = self.node.staging
        stage, part = self.source.new_stage(vnode.fid, vnode.content.gen + 1), self.source.new_stage(vnode.fid, 0)
        fd = staging.create(part, spilled=want > 0 and not await self._room(want))
        try:
            if want:
                if vnode.fd >= 0:
                    await copy_bytes(vnode.fd, fd, want)
                else:
                    await self.source.fetch_into(vnode.fid, vnode.content, fd, want)
            staging.recount(part, fd)
            staging.rename(part, stage)  # only now it is something that a restart may take for the newest bytes
        except BaseException:
            os.close(fd)
            staging.remove(part)
            raise
        old_fd, old_stage, was_dirty = vnode.fd, vnode.stage, vnode.dirty and vnode.sealed == 0
        vnode.fd, vnode.stage, vnode.sealed = fd, stage, 0
        vnode.synced, vnode.digested = None, None
        if old_fd >= 0:
            os.close(old_fd)
            if was_dirty and old_stage:
                staging.remove(old_stage)

    async def _room(self, length: int) -> bool:
        """Wait until memory has room; False when the bytes must go to NVMe. Raises ENOSPC at ``full_timeout``."""
        if self.source.make_room(length):
            return True
        with trio.move_on_after(self.node.options.full_timeout_s):
            while True:
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

    # ---- publication
    async def publish(self, vnode: Vnode, request: int | None = None) -> None:
        """Make what was written before this call visible everywhere (FLUSH). Raises ``FsError`` (EIO, ENOSPC).

        ``request``: what is published is all that this request asked for (``Requests``).
        """
        async with vnode.publish_lock:
            await self._publish(vnode, request)
        self._rest(vnode)

    async def _publish(self, vnode: Vnode, request: int | None) -> None:
        self.passing.refresh(vnode)
        if not vnode.dirty:
            return
        if vnode.removed or self.node.catalogue.view.inode(vnode.fid) is None:
            self._abandon(vnode)
            return
        if self.node.staging.is_spilled(vnode.stage):
            async with vnode.change_lock:  # a write may be under way
                pass
        version, size = vnode.version, os.fstat(vnode.fd).st_size
        self._check_size(size)  # the kernel may have grown a passed file
        stage = vnode.stage
        vnode.sealed = max(vnode.sealed, size)
        late = vnode.passed and size > DIGEST_AT_ONCE_BYTES_MAX
        if late and (vnode.digested is None or vnode.digested[:2] != (version, size)):
            digest, tree = (
                b"",
                b"",
            )  # told once the last writer is gone: hashing would take half the time of writing
        else:
            digest, tree, _ = await self._digests(vnode, version, size)
        copies = self._copies(vnode, version, stage, size)
        content = Content(
            size, digest, tree, stage if size else "", copies, vnode.mtime_ns, self._target(vnode, size),
            torn=vnode.passed > 0,
        )  # fmt: skip
        ctx, base = self.node.ctx(), vnode.content.gen
        change = self.node.requests.once(
            request, lambda tx: int(publication.publish(tx, ctx, vnode.fid, base, content) is not None)
        )
        if not await self.node.catalogue.mutate(change):
            self._abandon(vnode)
            return
        generation = self.node.catalogue.view.generation(vnode.fid)
        assert generation is not None
        vnode.content = generation
        vnode.published = version
        self.on_released(vnode.fid)  # no longer a created file that is open: its drain may begin
        if generation.conflict:
            self.node.errors[f"conflict:{vnode.fid:x}"] = (
                f"a generation of node {generation.conflict} was replaced without having been seen"
            )
        if not size and vnode.stage == stage and not vnode.dirty and not vnode.backed:
            self._close_stage(vnode)
            self.node.staging.remove(stage)

    async def _digests(self, vnode: Vnode, version: int, size: int) -> tuple[bytes, bytes, list[bytes]]:
        if vnode.digested is not None and vnode.digested[:2] == (version, size):
            return vnode.digested[2]
        found = await self._digests_of(vnode.fd, size)
        vnode.digested = (version, size, found)
        return found

    async def _digests_of(self, fd: int, size: int) -> tuple[bytes, bytes, list[bytes]]:
        """Of a descriptor that may be exchanged meanwhile."""
        own = os.dup(fd)
        try:
            return await self.node.digests(own, size)
        finally:
            os.close(own)

    async def snapshot(self, vnode: Vnode) -> tuple[int, int, tuple[bytes, bytes, list[bytes]]]:
        """(version, size, digests) of the bytes now in the staging file, for an fsync before publication."""
        self.passing.refresh(vnode)
        version, size = vnode.version, os.fstat(vnode.fd).st_size
        return version, size, await self._digests(vnode, version, size)

    def _copies(self, vnode: Vnode, version: int, stage: str, size: int) -> tuple[Copy, ...]:
        now_s = self.node.clock.now_s()
        own = (Copy(self.node.name, self.node.staging.store, "memory", now_s),) if size else ()
        if vnode.synced is not None and (vnode.synced.version, vnode.synced.size) == (version, size):
            return own + vnode.synced.copies
        return own

    def _target(self, vnode: Vnode, size: int) -> bytes | None:
        """Where a tracker file points, relative to the mount."""
        names = self.node.catalogue.view.names_of(vnode.fid)
        if not names or size > POINTER_BYTES_MAX or not is_pointer_name(names[0][1]):
            return None
        target = pointer_target(names[0][1], os.pread(vnode.fd, size, 0))
        path = self.source.path(vnode.fid)
        return None if target is None or path is None else namespace.resolve(parent_of(path), target)

    def _abandon(self, vnode: Vnode) -> None:
        """The file is gone from the namespace: its bytes live only as long as its handles."""
        vnode.removed = True
        vnode.published = vnode.version
        vnode.content = Generation(vnode.content.gen, os.fstat(vnode.fd).st_size, b"", b"", vnode.stage, self.node.name)

    def orphaned(self, fid: int, inode: Inode) -> None:
        """A file lost its last name: what fstat(2) of its handles shows from now on."""
        vnode = self._current.get(fid)
        if vnode is not None:
            vnode.last = inode
            self.keep_last(vnode)

    @staticmethod
    def keep_last(vnode: Vnode) -> None:
        """Put the attributes of a file without a name on its staging file, where the next daemon finds them."""
        if vnode.last is None or vnode.fd < 0 or vnode.sealed == UNWRITABLE:
            return
        with contextlib.suppress(PermissionError):
            os.fchown(vnode.fd, vnode.last.uid, vnode.last.gid)
        os.fchmod(vnode.fd, vnode.last.mode | 0o600)

    def removed(self, fid: int) -> None:
        """A file lost its last name. Its vnode keeps serving open handles from an open staging file."""
        vnode = self._current.get(fid)
        if vnode is None:
            return
        vnode.removed = True
        content = vnode.content
        if vnode.fd >= 0 or not vnode.handles or not content.stage:
            return
        if self._open_local(vnode):
            return
        path = self.node.local_path(content.stage, content.size)
        if path is not None:
            vnode.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            vnode.sealed = UNWRITABLE

    # ---- reading
    async def read(self, vnode: Vnode, offset: int, length: int) -> bytes:
        """Bytes as this node's applications see them. Short at the end of the file."""
        content = vnode.content
        if not vnode.dirty:
            length = min(length, content.size - offset)
            if length <= 0:
                return b""
            if vnode.fd < 0 and not self._open_local(vnode):
                return await self.source.read(vnode.fid, content, offset, length)
        if not self.node.staging.is_spilled(vnode.stage):
            return os.pread(vnode.fd, length, offset)
        own = os.dup(vnode.fd)  # it may be exchanged meanwhile
        try:
            return await trio.to_thread.run_sync(os.pread, own, length, offset)
        finally:
            os.close(own)

    def _open_local(self, vnode: Vnode) -> bool:
        """Serve a clean vnode from an open local copy, if this node has one of exactly this content."""
        content = vnode.content
        if not content.stage or not self.node.staging.has(content.stage):
            return False
        if self.node.staging.size(content.stage) != content.size:
            return False
        vnode.fd = self.node.staging.open_file(content.stage, write=True)
        vnode.stage, vnode.sealed = content.stage, content.size
        return True

    async def flush(self, handle: Handle) -> None:
        """FLUSH: publish this handle's writes, and a created file that stayed empty."""
        vnode = handle.vnode
        self.passing.refresh(vnode)
        if handle.passed:
            vnode.closing = {handle, *(vnode.closing or ())}
        if vnode.dirty and (handle.wrote or handle.passed):
            await self.publish(vnode)
        elif vnode.content.open and (handle.writable or not vnode.writers) and not vnode.dirty and not vnode.removed:
            ctx = self.node.ctx()
            await self.node.catalogue.mutate(lambda tx: publication.close_created(tx, ctx, vnode.fid))
            generation = self.node.catalogue.view.generation(vnode.fid)
            vnode.content = generation if generation is not None else vnode.content
            self.on_released(vnode.fid)

    async def publish_all(self) -> list[str]:
        """Publish every unpublished content (before an unmount); returns what could not be, in words."""
        failed = []
        for vnode in list(self._by_ino.values()):
            self.passing.refresh(vnode)
            if vnode.dirty:
                try:
                    await self.publish(vnode)
                except (CacheXError, OSError) as error:
                    failed.append(f"{quoted(self.source.path(vnode.fid))}: {error}")
        return failed


def file_bytes_max(node: Node) -> int:
    """The longest that a file may be, holes included."""
    return max(node.staging.limit_bytes + node.staging.spill_limit_bytes, SPARSE_BYTES_MAX)
