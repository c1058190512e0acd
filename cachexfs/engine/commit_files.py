"""What commit files list: read once per content, and kept.

Role: used by ``Completeness``, which compares with what is there, and by whoever asks for a commit file's members.
Small ones are parsed in a thread, others by the ``FormatReader``, a process of its own.

Concurrency: one task reads a commit file, whoever waits for it and however long; who is less patient is told that it is
being read.
"""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import trio

from cachexfs.core import formats
from cachexfs.core.boundary import Boundary
from cachexfs.core.formats import FormatError, Members
from cachexfs.core.records import Inode
from cachexfs.engine.content import Reader
from cachexfs.engine.files import Files
from cachexfs.engine.interfaces import FormatReader
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError, FsError

log = logging.getLogger(__name__)

CACHE_NAMES_MAX = 200_000  # in parsed commit files that are kept, about 30 MB
MEMBERS_MAX = 1024
THREAD_BYTES_MAX = 256 << 10  # 20 ms of parsing; a thread that runs Python longer is felt by every request
LATER_S = 30.0  # before what could not be read is tried again
#: Why it is not known what a commit file lists.
UNREADABLE = "cannot be read"  # by what it holds
UNREADABLE_NOW = "cannot be read now"  # by who holds it

Name = bytes  # a path relative to the checkpoint directory


_Key = tuple[int, tuple[tuple[bytes, int, int], ...], int, int]
"""Directory, commit files with their generations, number and hash of the names below."""


class CommitFiles:
    """The commit files that were read, and those that are being read."""

    def __init__(self, node: Node, files: Files, reader: Reader, apart: FormatReader | None) -> None:
        self.node = node
        self.files = files
        self.reader = reader
        self._apart = apart
        self._nursery: trio.Nursery | None = None
        self._parsed: OrderedDict[_Key, Members | str] = OrderedDict()
        self._names = 0  # in ``_parsed``, all together
        self._reading: dict[_Key, Reading] = {}
        self._members: dict[tuple[int, int], Collection[bytes]] = {}

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Let commit files be read in the background, until cancelled. Without this every caller reads to the end."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def members_of(self, fid: int, gen: int) -> Collection[bytes] | None:
        """Names that a commit file's generation lists, if it has been parsed here."""
        return self._members.get((fid, gen))

    async def describe(
        self, fid: int, tree: dict[bytes, tuple[int, Inode]], commits: Collection[bytes], patience_s: float
    ) -> Members | str:
        """What the commit files of a directory list together; or why that is not known.

        ``tree``: (file id, record) of everything below it. ``patience_s``: how long to wait for what was not read
        before.
        """
        generations = tuple((name, tree[name][0], tree[name][1].gen) for name in commits if name in tree)
        key = (fid, generations, len(tree), hash((frozenset(tree), self._lost(tree))))
        if key in self._parsed:
            self._parsed.move_to_end(key)
            return self._parsed[key]
        reading = self._reading.get(key)
        if reading is not None and reading.is_over(self.node):
            reading = None
        if reading is None:
            self._reading[key] = reading = Reading(self.node.clock.now_s())
            if self._nursery is None:
                await self._read(key, reading, tree)
            else:
                self._nursery.start_soon(self._read, key, reading, tree)
        with trio.move_on_after(patience_s):
            await reading.done.wait()
        if reading.done.is_set():
            return reading.result
        waited_s = self.node.clock.now_s() - reading.began_s
        return f"{UNREADABLE_NOW}: it is large and being read (for {waited_s:.0f} s)"

    async def _read(self, key: _Key, reading: Reading, tree: dict[bytes, tuple[int, Inode]]) -> None:
        """Parse the commit files of a directory; what is found is kept, what may go better later is not."""
        try:
            members = await self._parse(tree)
            reading.result = members if members is not None else "no commit file"
        except FormatError as error:
            reading.result = f"{UNREADABLE}: {error}"
            await self._note_each(tree)
        except (CacheXError, OSError) as error:
            reading.failed(self.node, str(error))
            return
        finally:
            reading.done.set()
        del self._reading[key]
        self._keep(key, reading.result, tree)

    def _lost(self, tree: dict[bytes, tuple[int, Inode]]) -> frozenset[bytes]:
        return frozenset(name for name, (f, inode) in tree.items() if self.node.boundary(f, inode) == Boundary.LOST)

    async def cut(self, fid: int, name: bytes) -> str:
        """Why one file (``*.pt``, ``*.safetensors``, ...) is not whole by its own header or end; empty if it may be."""
        inode = self.node.catalogue.view.inode(fid)
        if inode is None or not inode.size or inode.writing:
            return ""
        bridge = _Bridge(self.reader, self.files, self.node, {name: (fid, inode)}, ())
        bridge.bytes_left = THREAD_BYTES_MAX
        try:
            return (await trio.to_thread.run_sync(formats.describe_file, bridge, name)).incomplete_reason or ""
        except (CacheXError, OSError):
            return ""  # a header that is too long to be judged here, or bytes that nobody has now

    async def _parse(self, tree: dict[bytes, tuple[int, Inode]]) -> Members | None:
        lost = self._lost(tree)
        bridge = _Bridge(self.reader, self.files, self.node, tree, lost)
        if self._apart is None:
            return await trio.to_thread.run_sync(formats.describe, bridge)
        bridge.bytes_left = THREAD_BYTES_MAX
        try:
            return await trio.to_thread.run_sync(formats.describe, bridge)
        except _TooMuchError:
            sizes = {path: inode.size for path, (_, inode) in tree.items() if path not in lost}
            return await self._apart.describe(sizes, bridge.fetch)

    def _keep(self, key: _Key, members: Members | str, tree: dict[bytes, tuple[int, Inode]]) -> None:
        self._names -= _names_in(self._parsed.pop(key, ""))
        self._parsed[key] = members
        if isinstance(members, Members):
            self._note({**members.listed, members.commit: members.needs}, tree)
        self._names += _names_in(members)
        while self._names > CACHE_NAMES_MAX and len(self._parsed) > 1:
            self._names -= _names_in(self._parsed.popitem(last=False)[1])

    def _note(self, listed: Mapping[Name, Collection[bytes]], tree: dict[bytes, tuple[int, Inode]]) -> None:
        """What commit files list, for ``members_of``. What is lost lists nothing that anybody could read now."""
        lost = self._lost(tree)
        for commit, names in listed.items():
            if commit in tree and b"/" not in commit and commit not in lost:
                child, inode = tree[commit]
                self._members[child, inode.gen] = frozenset(names)
        while len(self._members) > MEMBERS_MAX:
            del self._members[next(iter(self._members))]

    async def _note_each(self, tree: dict[bytes, tuple[int, Inode]]) -> None:
        """One commit file cannot be read: what the others list, and whether that one is something else altogether."""
        bridge = _Bridge(self.reader, self.files, self.node, tree, self._lost(tree))
        bridge.bytes_left = THREAD_BYTES_MAX
        try:
            self._note(await trio.to_thread.run_sync(formats.listed, bridge), tree)
        except (CacheXError, OSError) as error:
            log.debug("commit files that are not known: %s", error)


@dataclass(slots=True)
class Reading:
    """A commit file that is being read, or could not be. ``was_away``: the PFS, when it ended without a result."""

    began_s: float
    done: trio.Event = field(default_factory=trio.Event)
    result: Members | str = UNREADABLE_NOW
    ended_s: float = 0.0
    was_away: bool = False

    def failed(self, node: Node, why: str) -> None:
        """It may go better later."""
        self.result = f"{UNREADABLE_NOW}: {why}"
        self.ended_s = node.clock.now_s()
        self.was_away = node.pfs is not None and node.pfs.state != "ok"

    def is_over(self, node: Node) -> bool:
        """Whether it has failed and is to be tried again: the PFS answers again, or some time has passed."""
        is_back = self.was_away and node.pfs is not None and node.pfs.state == "ok"
        return self.done.is_set() and (is_back or node.clock.now_s() > self.ended_s + LATER_S)


class _TooMuchError(CacheXError):
    """More would have to be read than a thread may."""


class _Bridge:
    """``formats.Files`` over the engine, for a parser that runs in a thread and may read ``bytes_left``.

    What is lost has a name and no size: it is named by who needs it, and nobody asks for its bytes.
    """

    bytes_left: float = float("inf")

    def __init__(
        self, reader: Reader, files: Files, node: Node, tree: dict[bytes, tuple[int, Inode]], lost: Collection[bytes]
    ) -> None:
        self._reader, self._files, self._node, self._tree, self._lost = reader, files, node, tree, lost

    def names(self) -> Collection[bytes]:
        return self._tree.keys()

    def size(self, name: bytes) -> int | None:
        found = self._tree.get(name)
        return found[1].size if found is not None and name not in self._lost else None

    def read(self, name: bytes, offset: int, length: int) -> bytes:
        self.bytes_left -= min(length, self.size(name) or 0)
        if self.bytes_left < 0:
            raise _TooMuchError
        return trio.from_thread.run(self.fetch, name, offset, length)

    async def fetch(self, name: bytes, offset: int, length: int) -> bytes:
        """Bytes of a file as it is published now."""
        fid = self._tree[name][0]
        content = self._node.catalogue.view.generation(fid)
        if content is None:
            raise FsError(errno.ENOENT, f"{shown(name)} was removed")
        vnode = self._files.known(fid)
        if vnode is not None and not vnode.dirty and vnode.content == content:
            return await self._files.read(vnode, offset, length)
        return await self._reader.read(fid, content, offset, length)


def _names_in(members: Members | str) -> int:
    return 0 if not members else 1 if isinstance(members, str) else 1 + len(members.needs)


def shown(name: bytes) -> str:
    """A name in a message."""
    return name.decode(errors="backslashreplace")
