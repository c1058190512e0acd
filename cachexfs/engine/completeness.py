"""Which directories are checkpoints, and whether they can be restarted from.

Role: walks the catalogue, asks ``core.formats`` what a checkpoint needs, and compares with what is there: present,
long enough, of one generation, at which boundary. Commit files are parsed outside the trio thread, once per
content.

Concurrency: any number of callers; a result is as old as the catalogue's replica when it was computed.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field

import trio

from cachexfs.core import formats
from cachexfs.core.boundary import Boundary
from cachexfs.core.commitfiles import is_pointer_name, step_of
from cachexfs.core.formats import FormatError, Members
from cachexfs.core.records import Inode
from cachexfs.engine.content import Reader
from cachexfs.engine.files import Files
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError, FsError

FILES_MAX = 500_000
CACHE_MAX = 256


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

    def __init__(self, node: Node, files: Files, reader: Reader) -> None:
        self.node = node
        self.files = files
        self.reader = reader
        self._parsed: OrderedDict[tuple[object, ...], Members | str] = OrderedDict()
        self._members: dict[tuple[int, int], Collection[bytes]] = {}

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

    def commits(self, fid: int) -> list[tuple[formats.Format, bytes]]:
        """Formats and commit files of a directory itself (not of what lies below)."""
        names = [name for name, entry in self.node.catalogue.view.children(fid).items() if entry.kind == "f"]
        return list(formats.recognise(names))

    async def checkpoint(self, fid: int) -> Checkpoint | None:
        """What a directory is worth as a checkpoint; None when nothing in it is a recognised commit file."""
        found = self.commits(fid)
        if not found:
            return None
        result = Checkpoint(fid, self.reader.path(fid) or b"", found[0][0].name, found[0][1])
        tree = {path: (child, inode) for path, child, inode in self.walk(fid)}
        members = await self._describe(fid, tree, [commit for _, commit in found])
        if isinstance(members, str):
            result.missing.append(Piece(found[0][1], self._origin(tree, found[0][1]), members))
            self._sum(result, tree, set(tree))
            return result
        needed = {members.commit, *members.needs, *(commit for _, commit in found)}
        self._judge(result, tree, members, needed)
        self._sum(result, tree, needed)
        return result

    def _origin(self, tree: dict[bytes, tuple[int, Inode]], name: bytes) -> str:
        return tree[name][1].origin if name in tree else ""

    def _judge(
        self, result: Checkpoint, tree: dict[bytes, tuple[int, Inode]], members: Members, needed: set[bytes]
    ) -> None:
        node, view = self.node, self.node.catalogue.view
        if members.incomplete_reason:
            result.missing.append(Piece(members.commit, self._origin(tree, members.commit), members.incomplete_reason))
        sizes = {path: inode.size for path, (_, inode) in tree.items()}
        for lack in formats.evaluate(members.needs, sizes):
            result.missing.append(Piece(lack.name, self._origin(tree, lack.name), lack.reason))
        absent = {piece.name for piece in result.missing}
        commit = tree.get(members.commit)
        published = view.published_at(commit[0]) if commit is not None else 0
        worst: Boundary | None = None
        count_pfs = node.pfs is not None and node.pfs.state == "ok" and not node.options.offline
        for name in sorted(needed - absent):
            if name not in tree:
                continue
            fid, inode = tree[name]
            vnode = self.files.known(fid)
            if inode.writing or (vnode is not None and vnode.dirty):
                result.missing.append(Piece(name, inode.writing or node.name, "is being written"))
                continue
            generation = view.generation(fid)
            foreign = generation is not None and generation.origin
            if members.commit.endswith(b".metadata") and foreign and view.published_at(fid) > published:
                result.missing.append(Piece(name, inode.origin, f"is newer than {_shown(members.commit)}"))
                continue
            boundary = node.boundary(fid, inode, count_pfs=count_pfs)
            if boundary == Boundary.LOST:
                result.missing.append(Piece(name, inode.origin, self._why_lost(fid, inode)))
                continue
            worst = boundary if worst is None else min(worst, boundary)
        result.restartable = worst if not result.missing else None

    def _why_lost(self, fid: int, inode: Inode) -> str:
        dead = [c.node for c in inode.copies if not self.node.valid(c)]
        state = self.node.pfs.state if self.node.pfs is not None else "offline"
        on_pfs = (
            f"its copy on the PFS cannot be read now ({state})" if self.node.on_pfs(fid, inode) else "not on the PFS"
        )
        return f"no live copy: held by {', '.join(dead) or 'nobody'}; {on_pfs}"

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
        self, fid: int, tree: dict[bytes, tuple[int, Inode]], commits: Collection[bytes]
    ) -> Members | str:
        key = (fid, *((name, tree[name][0], tree[name][1].gen) for name in commits if name in tree), frozenset(tree))
        if key in self._parsed:
            self._parsed.move_to_end(key)
            return self._parsed[key]
        bridge = _Bridge(self.reader, self.files, self.node, tree)
        try:
            found = await trio.to_thread.run_sync(formats.describe, bridge)
            members: Members | str = found if found is not None else "no commit file"
        except FormatError as error:
            members = f"cannot be read: {error}"
        except CacheXError as error:
            return f"cannot be read now: {error}"
        self._parsed[key] = members
        if isinstance(members, Members) and members.commit in tree:
            child, inode = tree[members.commit]
            self._members[child, inode.gen] = frozenset(members.needs)
        while len(self._parsed) > CACHE_MAX:
            self._parsed.popitem(last=False)
        while len(self._members) > 4 * CACHE_MAX:
            del self._members[next(iter(self._members))]
        return members

    async def below(self, fid: int, ensure: Callable[[int], Awaitable[None]] | None = None) -> list[Checkpoint]:
        """All checkpoints at or below a directory, outermost only, newest step last.

        Directories of the PFS that nobody has looked into yet are left out, unless ``ensure`` brings their entries
        in; it raises when it cannot.
        """
        view, stack, found = self.node.catalogue.view, [fid], []
        while stack:
            directory = stack.pop()
            if ensure is not None:
                await ensure(directory)
            checkpoint = None
            if any(not is_pointer_name(commit) for _, commit in self.commits(directory)):
                checkpoint = await self.checkpoint(directory)
            if checkpoint is not None:
                found.append(checkpoint)
                continue
            stack += [entry.fid for entry in view.children(directory).values() if entry.kind == "d"]
        return sorted(found, key=lambda c: (c.path.rpartition(b"/")[0], _step(c.path), c.path))


class _Bridge:
    """``formats.Files`` over the engine, for a parser that runs in a thread."""

    def __init__(self, reader: Reader, files: Files, node: Node, tree: dict[bytes, tuple[int, Inode]]) -> None:
        self._reader, self._files, self._node, self._tree = reader, files, node, tree

    def names(self) -> Collection[bytes]:
        return self._tree.keys()

    def size(self, name: bytes) -> int | None:
        found = self._tree.get(name)
        return found[1].size if found is not None else None

    def read(self, name: bytes, offset: int, length: int) -> bytes:
        return trio.from_thread.run(self._read, name, offset, length)

    async def _read(self, name: bytes, offset: int, length: int) -> bytes:
        fid = self._tree[name][0]
        content = self._node.catalogue.view.generation(fid)
        if content is None:
            raise FsError(errno.ENOENT, f"{_shown(name)} was removed")
        vnode = self._files.known(fid)
        if vnode is not None and not vnode.dirty and vnode.content == content:
            return await self._files.read(vnode, offset, length)
        return await self._reader.read(fid, content, offset, length)


def _shown(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def _step(path: bytes) -> int:
    found = step_of(path.rpartition(b"/")[2].decode(errors="surrogateescape"))
    return -1 if found is None else found
