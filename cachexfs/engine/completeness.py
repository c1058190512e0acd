"""Which directories are checkpoints, and whether they can be restarted from.

Role: walks the catalogue, asks ``core.formats`` what a checkpoint needs, and compares with what is there: present,
long enough, of one generation, at which boundary. ``commit_files`` reads what a commit file lists.

Concurrency: any number of callers; a result is as old as the catalogue's replica when it was computed.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import trio

from cachexfs.core import formats
from cachexfs.core.boundary import Boundary
from cachexfs.core.commitfiles import UNFINISHED, step_of
from cachexfs.core.formats import Members, outline
from cachexfs.core.records import Inode
from cachexfs.core.routes import DIRECT
from cachexfs.engine import candidates
from cachexfs.engine.candidates import Candidate, Ensure
from cachexfs.engine.commit_files import UNREADABLE_NOW, CommitFiles, Name, shown
from cachexfs.engine.content import Reader
from cachexfs.engine.files import Files
from cachexfs.engine.interfaces import FormatReader
from cachexfs.engine.node import Node
from cachexfs.errors import FsError

FILES_MAX = 500_000
PATIENCE_S = 5.0  # of an application that asks for an attribute
#: Reason of a ``Piece`` that others look for; there are more in ``commit_files``.
BEING_WRITTEN = "is being written"
DATED_BACK_NS = 1_000_000_000  # between the mtime and the publication of a copy that kept it; a clock may step a little


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
        self.commit_files = CommitFiles(node, files, reader, apart)

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
        members = await self.commit_files.describe(fid, tree, [commit for _, commit in found], patience_s)
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
                    result.missing.append(Piece(name, inode.origin, f"is newer than {shown(after)}"))
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
        if not records:
            return
        result.first_s = min(inode.t_returned_s for inode in records)
        result.t_returned_s = _last(inode.t_returned_s for inode in records)
        if result.restartable is not None:  # what is claimed no more was not reached
            node, pieces = self.node, [tree[name] for name in needed if name in tree]
            result.t_partner_s = _last(i.t_partner_s if node.is_protected(i) else 0.0 for i in records)
            result.t_pfs_s = _last(i.t_pfs_s if node.on_pfs(f, i) else 0.0 for f, i in pieces)

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


def _is_dated_back(inode: Inode) -> bool:
    """Whether an mtime was set, to before the publication by either clock: a later chmod or rename moves only ctime.

    One that a write has left may be older, too: what comes between it and the close, an fsync say, may take long.
    """
    return inode.dated and inode.mtime_ns <= min(inode.ctime_ns, int(inode.t_returned_s * 1e9)) - DATED_BACK_NS


def _step(path: bytes) -> int:
    found = step_of(path.rpartition(b"/")[2].decode(errors="surrogateescape"))
    return -1 if found is None else found


def _last(times: Iterable[float]) -> float:
    """The latest of them, 0 if one has not come."""
    found = list(times)
    return max(found) if all(found) else 0.0
