"""Which directories are checkpoints, and whether they can be restarted from.

Role: walks the catalogue, asks ``core.formats`` what a checkpoint needs, and compares with what is there: present,
long enough, of one generation, at which boundary. Commit files are parsed once per content: small ones in a thread,
others by the ``FormatReader``, a process of its own.

Concurrency: any number of callers; a result is as old as the catalogue's replica when it was computed. One task reads a
commit file, whoever waits for it and however long; who is less patient is told that it is being read.
"""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import trio

from cachexfs.core import formats
from cachexfs.core.boundary import Boundary
from cachexfs.core.commitfiles import UNFINISHED, step_of
from cachexfs.core.formats import FormatError, Members, outline
from cachexfs.core.records import Inode
from cachexfs.core.routes import DIRECT
from cachexfs.engine import candidates
from cachexfs.engine.candidates import Candidate, Ensure
from cachexfs.engine.content import Reader
from cachexfs.engine.files import Files
from cachexfs.engine.interfaces import FormatReader
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError, FsError

log = logging.getLogger(__name__)

FILES_MAX = 500_000
CACHE_NAMES_MAX = 200_000  # in parsed commit files that are kept, about 30 MB
MEMBERS_MAX = 1024
THREAD_BYTES_MAX = 256 << 10  # 20 ms of parsing; a thread that runs Python longer is felt by every request
PATIENCE_S = 5.0  # of an application that asks for an attribute
#: Reasons of a ``Piece`` that others look for.
BEING_WRITTEN = "is being written"
UNREADABLE = "cannot be read"  # by what it holds
UNREADABLE_NOW = "cannot be read now"  # by who holds it
DATED_BACK_NS = 1_000_000_000  # between the mtime and the publication of a copy that kept it; a clock may step a little
LATER_S = 30.0  # before what could not be read is tried again


Name = bytes  # a path relative to the checkpoint directory


@dataclass(frozen=True, slots=True)
class Piece:
    """A file that holds a checkpoint back."""

    name: bytes
    node: str
    reason: str


@dataclass(slots=True)
class Checkpoint:
    """What a checkpoint directory is worth now. Times in s since the epoch by the reference clock, 0: not yet."""

    fid: int
    path: bytes
    format: str
    commit: bytes
    files: int = 0
    bytes: int = 0
    pending: int = 0
    restartable: Boundary | None = None  # None: no
    missing: list[Piece] = field(default_factory=list)
    t_returned_s: float = 0.0
    t_partner_s: float = 0.0
    t_pfs_s: float = 0.0
    first_s: float = 0.0
    holders: tuple[str, ...] = ()
    error: str = ""
    needs: Mapping[Name, int] = field(default_factory=dict)  # file ids of what it needs, as far as it is there

    @property
    def t_restartable_s(self) -> float:
        """When it became restartable at the boundary that ``restartable`` names."""
        if self.restartable is None:
            return 0.0
        times = {
            Boundary.RETURNED: self.t_returned_s, Boundary.PARTNER: self.t_partner_s, Boundary.PFS: self.t_pfs_s,
        }  # fmt: skip
        return times[self.restartable] or self.t_returned_s


class Completeness:
    """Answers about checkpoints."""

    def __init__(self, node: Node, files: Files, reader: Reader, apart: FormatReader | None = None) -> None:
        self.node = node
        self.files = files
        self.reader = reader
        self._apart = apart
        self._nursery: trio.Nursery | None = None
        self._parsed: OrderedDict[_Key, Members | str] = OrderedDict()
        self._names = 0  # in ``_parsed``, all together
        self._reading: dict[_Key, _Reading] = {}
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

    def walk(self, fid: int) -> Iterator[tuple[bytes, int, Inode]]:
        """(relative path, file id, record) of everything below a directory that is not a directory."""
        view, stack, count = self.node.catalogue.view, [(b"", fid)], 0
        while stack:
            prefix, directory = stack.pop()
            for name, entry in view.children(directory).items():
                count += 1
                if count > FILES_MAX:
                    raise FsError(errno.EFBIG, f"more than {FILES_MAX} names below one directory")
                if entry.kind == "d":
                    stack.append((prefix + name + b"/", entry.fid))
                    continue
                inode = view.inode(entry.fid)
                if inode is not None:
                    yield prefix + name, entry.fid, inode

    def _unfinished(self, fid: int) -> bytes:
        """The marker beside a directory that says it is not finished (NeMo), or nothing."""
        view = self.node.catalogue.view
        for parent, name in view.names_of(fid):
            if view.lookup(parent, name + UNFINISHED) is not None:
                return name + UNFINISHED
        return b""

    async def checkpoint(self, fid: int, patience_s: float = PATIENCE_S) -> Checkpoint | None:
        """What a directory is worth as a checkpoint; None when nothing in it is a recognised commit file.

        ``patience_s``: how long to wait for a commit file that has not been read before.
        """
        found = candidates.commit_files(
            self.node.catalogue.view, fid, (self.reader.path(fid) or b"").rpartition(b"/")[2]
        )
        if not found:
            return None
        result = Checkpoint(fid, self.reader.path(fid) or b"", *found[0])
        if marker := self._unfinished(fid):
            result.missing.append(Piece(marker, "", "marks it as unfinished"))
        tree = {path: (child, inode) for path, child, inode in self.walk(fid)}
        absent = [commit for _, commit in found if commit not in tree]
        if absent:  # its shards are there: it is being saved, or was
            result.missing += [Piece(commit, "", "absent: not saved yet") for commit in absent]
            self._sum(result, tree, set(tree))
            return result
        members = await self._describe(fid, tree, [commit for _, commit in found], patience_s)
        if isinstance(members, str):
            result.missing.append(Piece(found[0][1], self._origin(tree, found[0][1]), members))
            self._sum(result, tree, set(tree))
            return result
        needed = {members.commit, *members.needs, *(commit for _, commit in found)}
        result.needs = {name: tree[name][0] for name in needed if name in tree}
        self._judge(result, tree, members, needed)
        self._sum(result, tree, needed)
        return result

    def _origin(self, tree: dict[bytes, tuple[int, Inode]], name: bytes) -> str:
        return tree[name][1].origin if name in tree else ""

    def _judge(
        self, result: Checkpoint, tree: dict[bytes, tuple[int, Inode]], members: Members, needed: set[bytes]
    ) -> None:
        node = self.node
        if members.incomplete_reason:
            result.missing.append(Piece(members.commit, self._origin(tree, members.commit), members.incomplete_reason))
        sizes = {path: inode.size for path, (_, inode) in tree.items()}
        for lack in formats.evaluate(members.needs, sizes):
            result.missing.append(Piece(lack.name, self._origin(tree, lack.name), lack.reason))
        absent = {piece.name for piece in result.missing}
        commits = {name for name in needed if name.endswith(b".metadata") and name in tree}
        copies: dict[bytes, bool] = {}  # by commit file, where something is newer than it
        worst: Boundary | None = None
        count_pfs = node.pfs is not None and node.pfs.state == "ok" and not node.options.offline
        for name in sorted(needed - absent):
            if name not in tree:
                continue
            fid, inode = tree[name]
            vnode = self.files.known(fid)
            if inode.writing or (vnode is not None and vnode.dirty):
                result.missing.append(Piece(name, inode.writing or node.name, BEING_WRITTEN))
                continue
            after = outline.covering(name, commits)
            if after is not None and self._is_newer(tree, name, after) and not self._is_first(tree, name, after):
                if after not in copies:
                    covered = [m for m in needed if m in tree and outline.covering(m, commits) == after]
                    copies[after] = self._is_copy(tree, covered, after)
                if not copies[after]:
                    result.missing.append(Piece(name, inode.origin, f"is newer than {_shown(after)}"))
                    continue
            boundary = node.boundary(fid, inode, count_pfs=count_pfs)
            if boundary == Boundary.LOST:
                result.missing.append(Piece(name, inode.origin, self._why_lost(fid, inode)))
                continue
            worst = boundary if worst is None else min(worst, boundary)
        result.restartable = worst if not result.missing else None

    def _is_newer(self, tree: dict[bytes, tuple[int, Inode]], name: bytes, commit: bytes) -> bool:
        """Whether a member was published after its commit file, so that it may be of another save."""
        view, fid = self.node.catalogue.view, tree[name][0]
        return self._made_here(fid) and view.published_at(fid) > view.published_at(tree[commit][0])

    def _made_here(self, fid: int) -> bool:
        """Whether the content was written through a mount, and not found on the PFS."""
        generation = self.node.catalogue.view.generation(fid)
        return generation is not None and generation.origin != ""

    def _is_first(self, tree: dict[bytes, tuple[int, Inode]], name: bytes, commit: bytes) -> bool:
        """Whether a newer member is the first under its name since the commit file beside it was written.

        So it is in a copy in any order. It is not of a later save: that replaces what was there.
        """
        fid, inode = tree[commit]
        beside = name.rpartition(b"/")[0] == commit.rpartition(b"/")[0]
        return beside and not inode.stale and self._made_here(fid)

    def _is_copy(self, tree: dict[bytes, tuple[int, Inode]], members: Collection[bytes], commit: bytes) -> bool:
        """Whether a copy over an older checkpoint that kept mtimes has brought the commit file ahead of all members.

        Then each came after it, once, and all, itself too, were dated back: the members to before it. A save does not
        date its commit file back; a copy that was interrupted leaves a member that has been there all the time; what
        has been replaced again since may be of any save, whatever its date.
        """
        latest_ns = tree[commit][1].mtime_ns
        if tree[commit][1].mixed or not _is_dated_back(tree[commit][1]):
            return False
        records = [(name, tree[name][1]) for name in members]
        return all(
            self._is_newer(tree, name, commit) and inode.mtime_ns <= latest_ns and _is_dated_back(inode)
            for name, inode in records
        )

    def _why_lost(self, fid: int, inode: Inode) -> str:
        dead = [c.node for c in inode.copies if not self.node.valid(c)]
        state = self.node.pfs.state if self.node.pfs is not None else "offline"
        there = inode.error if inode.pfs is not None and inode.pfs.missing else ""
        on_pfs = f"its copy on the PFS {UNREADABLE_NOW} ({state})" if self.node.on_pfs(fid, inode) else ""
        on_pfs = on_pfs or there or "not on the PFS"
        direct = " (route 'direct': no partner had it)" if inode.route == DIRECT and self.node.replica_count else ""
        return f"no live copy: held by {', '.join(dead) or 'nobody'}; {on_pfs}{direct}"

    def _sum(self, result: Checkpoint, tree: dict[bytes, tuple[int, Inode]], needed: set[bytes]) -> None:
        records = [tree[name][1] for name in needed if name in tree]
        result.files, result.bytes = len(records), sum(inode.size for inode in records)
        result.pending = sum(inode.size for fid, inode in tree.values() if not self.node.on_pfs(fid, inode))
        result.holders = tuple(sorted({copy.node for inode in records for copy in self.node.live_copies(inode)}))
        result.error = next((inode.error for inode in records if inode.error), "")
        if records:
            times = {
                name: [getattr(inode, name) for inode in records] for name in ("t_returned_s", "t_partner_s", "t_pfs_s")
            }
            result.first_s = min(times["t_returned_s"])
            for name, found in times.items():
                if all(found) and (result.restartable is not None or name == "t_returned_s"):
                    setattr(result, name, max(found))

    async def _describe(
        self, fid: int, tree: dict[bytes, tuple[int, Inode]], commits: Collection[bytes], patience_s: float
    ) -> Members | str:
        generations = tuple((name, tree[name][0], tree[name][1].gen) for name in commits if name in tree)
        key = (fid, generations, len(tree), hash((frozenset(tree), self._lost(tree))))
        if key in self._parsed:
            self._parsed.move_to_end(key)
            return self._parsed[key]
        reading = self._reading.get(key)
        if reading is not None and reading.done.is_set() and self.node.clock.now_s() > reading.ended_s + LATER_S:
            reading = None
        if reading is None:
            self._reading[key] = reading = _Reading(self.node.clock.now_s())
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

    async def _read(self, key: _Key, reading: _Reading, tree: dict[bytes, tuple[int, Inode]]) -> None:
        """Parse the commit files of a directory; what is found is kept, what may go better later is not."""
        try:
            members = await self._parse(tree)
            reading.result = members if members is not None else "no commit file"
        except FormatError as error:
            reading.result = f"{UNREADABLE}: {error}"
            await self._note_each(tree)
        except (CacheXError, OSError) as error:
            reading.result = f"{UNREADABLE_NOW}: {error}"
            reading.ended_s = self.node.clock.now_s()
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
        """What commit files list, for ``members_of``."""
        for commit, names in listed.items():
            if commit in tree and b"/" not in commit:
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

    async def newest_first(self, fid: int, ensure: Ensure | None = None) -> list[Candidate]:
        """What are checkpoints at or below a directory by their names, the newest first.

        Directories of the PFS that nobody has looked into yet are left out, unless ``ensure`` brings their entries
        in; raises ``CacheXError`` when it cannot.
        """
        view = self.node.catalogue.view
        if ensure is not None:
            await candidates.bring_in(view, fid, ensure)
        return candidates.newest_first(view, fid, (self.reader.path(fid) or b"").rpartition(b"/")[2])

    async def below(self, fid: int, patience_s: float = PATIENCE_S) -> list[Checkpoint]:
        """All checkpoints at or below a directory, outermost only, newest step last."""
        found = []
        for candidate in await self.newest_first(fid):
            await trio.lowlevel.checkpoint()  # a hundred checkpoints of a thousand files take a second
            checkpoint = await self.checkpoint(candidate.fid, patience_s)
            if checkpoint is not None:
                found.append(checkpoint)
        return sorted(found, key=lambda c: (c.path.rpartition(b"/")[0], _step(c.path), c.path))


_Key = tuple[int, tuple[tuple[bytes, int, int], ...], int, int]
"""Directory, commit files with their generations, number and hash of the names below."""


@dataclass(slots=True)
class _Reading:
    """A commit file that is being read, or could not be."""

    began_s: float
    done: trio.Event = field(default_factory=trio.Event)
    result: Members | str = UNREADABLE_NOW
    ended_s: float = 0.0


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
            raise FsError(errno.ENOENT, f"{_shown(name)} was removed")
        vnode = self._files.known(fid)
        if vnode is not None and not vnode.dirty and vnode.content == content:
            return await self._files.read(vnode, offset, length)
        return await self._reader.read(fid, content, offset, length)


def _is_dated_back(inode: Inode) -> bool:
    """Whether an mtime is older than the publication, by either clock: a later chmod or rename moves only ctime."""
    return inode.mtime_ns <= min(inode.ctime_ns, int(inode.t_returned_s * 1e9)) - DATED_BACK_NS


def _names_in(members: Members | str) -> int:
    return 0 if not members else 1 if isinstance(members, str) else 1 + len(members.needs)


def _shown(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def _step(path: bytes) -> int:
    found = step_of(path.rpartition(b"/")[2].decode(errors="surrogateescape"))
    return -1 if found is None else found
