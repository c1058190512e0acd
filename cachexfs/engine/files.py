"""Files: what this node knows of each, the handles on them, reading, and what a removed file leaves to its handles.

Role: a ``Vnode`` is one content lineage of one file on this node, behind one inode number. Local writes change it
in place (``Writing``), ``Publishing`` makes them visible; a generation that another node publishes gets a new vnode and
a new inode number as soon as this node has had pages of the old one cached (a page fault through the old handle would
poison the new one's cache).

The staging file is the truth. Its first ``sealed`` bytes belong to published generations and never change.

Concurrency: handlers of one file run interleaved. Between two awaits nothing changes; ``change_lock`` covers the
exchange of a staging file, ``publish_lock`` makes publications of a file happen one after the other.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable

import trio

from cachexfs.core.records import FID_STEP, Generation, Inode, encode
from cachexfs.engine.interfaces import ContentSource
from cachexfs.engine.node import Node
from cachexfs.engine.passing import Passing, was_passed
from cachexfs.engine.publishing import Publishing
from cachexfs.engine.stamps import has_kept, kept_time, look, mark
from cachexfs.engine.unpublished import Unpublished
from cachexfs.engine.vnode import UNWRITABLE, Handle, Vnode, keep_last, last_xattrs
from cachexfs.engine.writing import Writing
from cachexfs.errors import CacheXError, FsError, quoted

log = logging.getLogger(__name__)

REMOVED_DIRS_MAX = 1024  # the kernel forgets almost all of them at once


class Files:
    """All vnodes of this mount."""

    def __init__(self, node: Node, source: ContentSource) -> None:
        self.node = node
        self.source = source
        self._by_ino: dict[int, Vnode] = {}
        self._current: dict[int, Vnode] = {}
        self.removed_dirs: dict[int, Inode] = {}  # which somebody may be in
        self.passing = Passing(node, source)
        self.writing = Writing(node, source, self.passing)
        self.publishing = Publishing(node, source, self.passing)
        self.unpublished = Unpublished(node, source, self.publishing, self._drop_if_idle)
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
        vnode.rest()
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
            self.passing.refresh(vnode, stamp=False)
        return vnode

    def _bind(self, fid: int, ino: int, generation: Generation) -> Vnode:
        vnode = Vnode(fid, ino, encode(generation))
        self._by_ino[ino] = vnode
        self._current[fid] = vnode
        return vnode

    def _rebind(self, vnode: Vnode, generation: Generation) -> None:
        vnode.close_stage()
        vnode.content = generation
        vnode.synced = None
        vnode.digested = None

    def remember(self, vnode: Vnode) -> None:
        """The kernel has been given the inode number once more."""
        vnode.lookups += 1

    def forget(self, ino: int, count: int) -> None:
        """The kernel has dropped references to an inode number."""
        vnode = self._by_ino.get(ino)
        self.removed_dirs.pop(ino, None)
        if vnode is not None:
            vnode.lookups = max(0, vnode.lookups - count)
            if vnode.lookups == 0:
                vnode.paged = False
            self._drop_if_idle(vnode)

    def _drop_if_idle(self, vnode: Vnode) -> None:
        if vnode.lookups or vnode.handles or vnode.dirty:
            return
        if self._by_ino.get(vnode.ino) is vnode:  # else another one has its number by now
            del self._by_ino[vnode.ino]
        if self._current.get(vnode.fid) is vnode:
            del self._current[vnode.fid]
        stage = vnode.stage
        vnode.close_stage()
        if vnode.removed and stage:
            self.on_orphan_closed(stage)  # a drain may need it yet, for a commit file that names it

    def evicted(self, fid: int) -> None:
        """The staged file of a file's content was removed: nobody keeps its memory by an open descriptor."""
        vnode = self._current.get(fid)
        if vnode is not None:
            vnode.rest()

    # ---- opening
    def open(self, vnode: Vnode, flags: int) -> Handle:
        """A handle on a vnode."""
        vnode.handles += 1
        vnode.content = vnode.content  # decoded from now on
        handle = Handle(vnode, flags)
        if handle.writable:
            vnode.writers += 1
        return handle

    def resume(self, fid: int, ino: int, stage: str, published: Generation | None) -> None:
        """A file that an application has open lived through the death of the daemon with unpublished bytes."""
        vnode = Vnode(fid, ino, published or Generation(0, 0, b"", b"", "", ""))
        vnode.fd = self.node.staging.open_file(stage, write=True)
        vnode.stage, vnode.removed = stage, published is None
        vnode.awaited = was_passed(vnode.fd)
        vnode.sealed = published.size if published is not None and published.stage == stage else 0
        vnode.version, vnode.seen, vnode.mtime_ns = 1, look(vnode.fd), kept_time(vnode.fd)
        vnode.unstamped = not has_kept(vnode.fd)
        if (
            published is not None
            and published.stage == stage
            and look(vnode.fd) == (published.size, published.stamp_ns)
        ):
            vnode.published = 1  # it was closed, and the daemon died before all of that was done
        if vnode.removed:
            vnode.published = 1
            found = os.fstat(vnode.fd)
            vnode.content = Generation(0, found.st_size, b"", b"", stage, self.node.name)
            vnode.last = Inode(
                "f", found.st_mode & 0o7777, found.st_uid, found.st_gid,
                found.st_atime_ns, vnode.mtime_ns, found.st_ctime_ns, xattrs=last_xattrs(vnode.fd) or (),
            )  # fmt: skip
        self._by_ino[ino] = self._current[fid] = vnode

    def without_name(self, ino: int) -> Vnode:
        """An empty vnode for a file of which nothing is left but what applications hold."""
        vnode = Vnode(ino // FID_STEP * FID_STEP, ino, Generation(0, 0, b"", b"", "", ""), removed=True)
        self._by_ino[ino] = vnode
        if self.node.catalogue.view.inode(vnode.fid) is None:  # else ``ino`` stands for an earlier content
            self._current.setdefault(vnode.fid, vnode)
        return vnode

    def reopen(self, ino: int, flags: int, *, passed: bool, file: int = 0) -> Handle:
        """A handle that an application has held since before this daemon's life. Raises ``FsError`` ESTALE, EIO.

        ``file``: the inode number of the staged file from which the kernel serves it.
        """
        if file and ino not in self._by_ino and not self._is_current(ino, file):
            vnode = self._earlier(ino, file)
        else:
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

    def _is_current(self, ino: int, file: int) -> bool:
        """Whether the staged file of the newest content is the one with this inode number."""
        generation, staging = self.node.catalogue.view.generation(ino // FID_STEP * FID_STEP), self.node.staging
        if generation is None or not generation.stage or not staging.has(generation.stage):
            return False
        return os.stat(staging.path(generation.stage)).st_ino == file

    def _earlier(self, ino: int, file: int) -> Vnode:
        """The vnode of a content that was replaced while the kernel served it: the newest one has another number."""
        vnode, staging = self.without_name(ino), self.node.staging
        for stage in staging.stages():
            if os.stat(staging.path(stage)).st_ino == file:
                vnode.fd, vnode.stage, vnode.sealed = staging.open_file(stage), stage, UNWRITABLE
                vnode.content = Generation(0, staging.size(stage), b"", b"", stage, self.node.name)
                break
        return vnode

    def keep_pages(self, handle: Handle) -> bool:
        """The kernel will use pages; whether those that it has from an earlier open are still of this content.

        Not for a write-only handle: it cannot be mapped, and without pages a byte is copied once less.
        """
        vnode = handle.vnode
        if handle.flags & os.O_ACCMODE == os.O_WRONLY:
            return False
        handle.cached = vnode.cached_last = True
        vnode.cached += 1
        token = (vnode.content.gen, vnode.version)
        kept = vnode.paged and vnode.paged_token == token
        vnode.paged, vnode.paged_token = True, token
        return kept

    async def release(self, handle: Handle) -> None:
        """The last reference to a handle is gone: publish what came after the last FLUSH."""
        if not self.passing.outlives(handle):
            await self._release(handle)

    async def follow_maps(self) -> None:
        """Release what shared maps have kept open. Until cancelled."""
        await self.passing.unmapped(self._release)

    async def _release(self, handle: Handle) -> None:
        vnode = handle.vnode
        self.passing.refresh(vnode)
        if handle.writable:
            vnode.writers -= 1
        self.passing.end(handle)
        vnode.cached -= handle.cached
        try:
            if vnode.dirty and (handle.wrote or vnode.writers == 0):
                await self.publishing.publish(vnode)
            if handle.passed and not vnode.passed:
                await self.publishing.complete(vnode)
        except (CacheXError, OSError) as error:
            if vnode.dirty and not vnode.writers and not vnode.removed:
                self.unpublished.add(vnode, error)
            raise
        finally:
            self.passing.finish(vnode)
            vnode.handles -= 1
            if not vnode.dirty and not vnode.removed and vnode.stage not in ("", vnode.content.stage):
                self._leave_copy(vnode)
            vnode.rest()
            self._drop_if_idle(vnode)
            if handle.writable:
                self.publishing.on_released(vnode.fid)

    # ---- passthrough: see ``Passing``
    def backing(self, handle: Handle) -> int | None:
        """Descriptor that may back a handle, None when its I/O must come here.

        A writer's: of a new file that nobody else has open, with room to spare, unless each write is to wait for what
        fsync waits for (``O_SYNC``): the kernel would ask staging alone. A reader's: of a whole, clean,
        staged content that nobody writes. The kernel refuses (EIO) an open of one inode number that goes another way
        than those that are open, but for direct I/O beside cached.
        """
        vnode, staging = handle.vnode, self.node.staging
        if vnode.backed and not (vnode.cached and vnode.cached_last):
            return vnode.fd
        if vnode.removed or vnode.cached:  # what is backed beside these was closed, and its RELEASE is on its way
            return None
        if not handle.writable:
            clean = not vnode.dirty and not vnode.writers and vnode.content.size > 0
            staged = clean and (vnode.fd >= 0 or self._open_local(vnode)) and vnode.stage
            return vnode.fd if staged and not staging.is_spilled(vnode.stage) else None
        fresh = vnode.content.open and not vnode.dirty and vnode.fd < 0 and vnode.handles == 1
        if not fresh or handle.syncs or not self.passing.has_room():
            return None
        vnode.stage = self.source.new_stage(vnode.fid, vnode.content.gen + 1)
        vnode.fd = staging.create(vnode.stage)
        vnode.seen, vnode.unstamped = mark(vnode.fd), False
        return vnode.fd

    def _leave_copy(self, vnode: Vnode) -> None:
        """A private copy that nobody has changed is not needed any more."""
        if not vnode.backed:
            stage = vnode.stage
            vnode.close_stage()
            self.node.staging.remove(stage)

    def is_held(self, fid: int) -> bool:
        """Whether applications have the file open."""
        vnode = self._current.get(fid)
        return vnode is not None and vnode.handles > 0

    def being_written(self) -> list[Vnode]:
        """Whose last close by a writer is still to come."""
        return [vnode for vnode in self._current.values() if vnode.writers > 0 and not vnode.removed]

    def busy(self, fid: int) -> bool:
        """Whether a writer may still change the staged bytes of the file's newest generation."""
        vnode = self._current.get(fid)
        if vnode is None:
            return False
        return vnode.passed > 0 or (vnode.awaited and vnode.dirty) or (vnode.content.open and vnode.writers > 0)

    # ---- without a name
    def reopen_directory(self, fid: int) -> None:
        """A directory that an application has held open since before this daemon's life: it may have been removed.

        Then nobody knows its attributes any more, but that it is there and has no links.
        """
        if self.node.catalogue.view.inode(fid) is None:
            now_ns = self.node.clock.now_ns()
            self.orphaned(fid, Inode("d", 0o700, os.geteuid(), os.getegid(), now_ns, now_ns, now_ns))

    def orphaned(self, fid: int, inode: Inode) -> None:
        """A file lost its last name: what fstat(2) of its handles shows from now on. Or a directory was removed."""
        if inode.kind == "d":
            self.removed_dirs[fid] = inode
            while len(self.removed_dirs) > REMOVED_DIRS_MAX:
                del self.removed_dirs[next(iter(self.removed_dirs))]
            return
        vnode = self._current.get(fid)
        if vnode is not None:
            vnode.last = inode
            try:
                if vnode.fd < 0 and vnode.handles and not vnode.content.size and inode.kind == "f":
                    stage = self.source.new_stage(fid, vnode.content.gen + 1)  # for its attributes alone
                    vnode.fd, vnode.stage = self.node.staging.create(stage), stage
                keep_last(vnode)
            except OSError as error:  # others are still to hear of what has happened
                log.warning("%x: what it was would not outlive this daemon: %s", fid, error)

    def was_orphaned(self, fid: int, inode: Inode) -> None:
        """A file lost its last name by a request of the last daemon, which may have died before it could note that."""
        vnode = self._current.get(fid)
        if vnode is None or vnode.fd < 0 or last_xattrs(vnode.fd) is None:
            self.orphaned(fid, inode)

    def removed(self, fid: int) -> None:
        """A file lost its last name. Its vnode keeps serving open handles from an open staging file."""
        vnode = self._current.get(fid)
        if vnode is None:
            return
        vnode.removed = True
        content = vnode.content
        if vnode.fd >= 0 or not vnode.handles or not content.stage:
            return
        try:
            if self._open_local(vnode):
                return
            path = self.node.local_path(content.stage, content.size)
            if path is not None:
                vnode.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                vnode.sealed = UNWRITABLE
        except OSError as error:  # others are still to hear of what has happened
            log.error("%x is open, and cannot be read any more: %s", fid, error)

    # ---- reading
    async def read(self, vnode: Vnode, offset: int, length: int) -> bytes:
        """Bytes as this node's applications see them. Short at the end of the file."""
        content = vnode.content
        if not vnode.dirty:
            length = min(length, content.size - offset)
            if length <= 0:
                return b""
            if (vnode.fd < 0 and not self._open_local(vnode)) or not self._is_as_written(vnode):
                return await self.source.read(vnode.fid, content, offset, length)
        if not self.node.staging.is_spilled(vnode.stage):
            return os.pread(vnode.fd, length, offset)
        own = os.dup(vnode.fd)  # it may be exchanged meanwhile
        try:
            return await trio.to_thread.run_sync(os.pread, own, length, offset)
        finally:
            os.close(own)

    def _is_as_written(self, vnode: Vnode) -> bool:
        """Whether a clean vnode's staged file needs no look at the digests: NVMe may give other bytes, or an error."""
        if vnode.stage != vnode.content.stage or not vnode.content.tree or not self.node.staging.has(vnode.stage):
            return True  # nobody knows what they are to be, or nobody else has them: it has lost its name
        return self.node.in_memory(vnode.stage)

    def _open_local(self, vnode: Vnode) -> bool:
        """Serve a clean vnode from an open local copy, if this node has one of exactly this content."""
        content = vnode.content
        if not content.stage or not self.node.staged(content.stage):
            return False
        if self.node.staging.size(content.stage) != content.size:
            return False
        try:
            vnode.fd, vnode.sealed = self.node.staging.open_file(content.stage, write=True), content.size
        except OSError as error:
            if error.errno != errno.EROFS:  # it lies on NVMe, which was remounted when it failed
                raise
            vnode.fd, vnode.sealed = self.node.staging.open_file(content.stage), UNWRITABLE
        vnode.stage = content.stage
        return True

    async def publish_all(self) -> list[str]:
        """Publish every unpublished content (before an unmount); returns what could not be, in words."""
        failed = []
        for vnode in list(self._by_ino.values()):
            self.passing.refresh(vnode)
            if vnode.dirty:
                try:
                    await self.publishing.publish(vnode)
                except (CacheXError, OSError) as error:
                    failed.append(f"{quoted(self.source.path(vnode.fid))}: {error}")
        return failed
