"""Files of which no copy is left, and the commit files that name them.

Role: follows the catalogue. A lost file keeps its name, so that it can be named, and reading it fails. A commit file
that needs it is *withheld*: lookup and listings do not show it, because frameworks take a checkpoint whose commit file
is there; ``status`` and ``missing`` say why. It comes back with a copy (its node is alive again), and is forgotten when
it is replaced. Where only withheld commit files are left in a directory, removing the directory removes them.

Concurrency: answers as of the replica; reading a commit file that was not parsed yet takes a while.
"""

from __future__ import annotations

import logging

from cachexfs.core.boundary import Boundary
from cachexfs.core.order import lists_members
from cachexfs.core.records import Inode, Life, Op
from cachexfs.core.records import Node as NodeRecord
from cachexfs.core.replica import Applied
from cachexfs.engine.completeness import Completeness
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError

log = logging.getLogger(__name__)


class Losses:
    """What is lost, and what that hides."""

    def __init__(self, node: Node, completeness: Completeness) -> None:
        self.node = node
        self.completeness = completeness
        self._lost: dict[int, None] = {}
        self._withheld: dict[tuple[int, int], str] = {}  # (file id, generation) of commit files -> why
        self._answers: dict[tuple[int, bytes], bool] = {}  # of this revision
        self._revision = 0

    def load(self) -> None:
        """Take in the state when the engine starts."""
        self._look_at_all()

    def notice(self, changes: Applied) -> None:
        """Catalogue listener."""
        for key, old, new in changes:
            if isinstance(old or new, Life | NodeRecord):
                self._look_at_all()
            elif isinstance(new, Inode):
                self._look(int(key[2:], 16), new)
            elif isinstance(old, Inode):
                self._lost.pop(int(key[2:], 16), None)
            for op in (old, new):  # whose file may be all that is left of it
                inode = self.node.catalogue.view.inode(op.fid) if isinstance(op, Op) and op.ready else None
                if isinstance(op, Op) and inode is not None:
                    self._look(op.fid, inode)

    def _look_at_all(self) -> None:
        for key, entry in self.node.catalogue.view.items():
            if key.startswith(b"i/") and isinstance(record := entry.record, Inode):
                self._look(int(key[2:], 16), record)

    def _look(self, fid: int, inode: Inode) -> None:
        if inode.kind != "f" or self.node.boundary(fid, inode) != Boundary.LOST:
            self._lost.pop(fid, None)
        elif fid not in self._lost:
            self._lost[fid] = None
            log.error("lost: %r: no copy of generation %d is left", self.node.catalogue.view.path(fid), inode.gen)

    async def hides(self, parent: int, name: bytes) -> bool:
        """Whether a name of a directory is a commit file that must not be seen: something that it needs is lost."""
        if not lists_members(name) or not (self._lost or self._withheld):
            return False
        view = self.node.catalogue.view
        entry = view.lookup(parent, name)
        inode = view.inode(entry.fid) if entry is not None else None
        if entry is None or inode is None or entry.kind != "f":
            return False
        if self._revision != view.revision:
            self._answers.clear()
            self._revision = view.revision
        known = self._answers.get((parent, name))
        if known is None:
            why = await self._why(parent, name, entry.fid, (entry.fid, inode.gen))
            if why:
                self._withheld[entry.fid, inode.gen] = why
            else:
                self._withheld.pop((entry.fid, inode.gen), None)
            known = bool(why)
            if self._revision == view.revision:
                self._answers[parent, name] = known
        return known

    async def _why(self, parent: int, name: bytes, fid: int, content: tuple[int, int]) -> str:
        if fid in self._lost:
            return "its own bytes are lost"
        try:
            checkpoint = await self.completeness.checkpoint(parent)
        except CacheXError as error:
            log.debug("%r cannot be judged: %s", name, error)
            return self._withheld.get(content, "")
        if checkpoint is None or name not in checkpoint.needs:
            return self._withheld.get(content, "")
        lost = [member for member, child in checkpoint.needs.items() if child in self._lost]
        if lost:
            return f"it needs {lost[0].decode(errors='backslashreplace')!r}, which is lost"
        before = self._withheld.get(content, "")  # the lost file was removed: that does not make it whole
        return before if any(piece.name not in checkpoint.needs for piece in checkpoint.missing) else ""

    async def only_withheld(self, directory: int) -> list[bytes]:
        """The names of a directory, if all are withheld commit files; else none."""
        names = list(self.node.catalogue.view.children(directory))
        hidden = [name for name in names if await self.hides(directory, name)]
        return hidden if hidden == names else []

    def errors(self) -> list[tuple[bytes, str, str]]:
        """(path, node, what is wrong) of each lost file and withheld commit file."""
        view, found = self.node.catalogue.view, []
        for fid in self._lost:
            inode, path = view.inode(fid), view.path(fid)
            if inode is not None and path is not None:
                nodes = ", ".join(sorted({c.node for c in inode.copies})) or "nobody"
                why = inode.error or f"no copy is left: held by {nodes}, not on the PFS"
                found.append((path, inode.origin, f"lost: {why}"))
        for (fid, gen), why in list(self._withheld.items()):
            inode, path = view.inode(fid), view.path(fid)
            if inode is None or path is None or inode.gen != gen:
                del self._withheld[fid, gen]
            else:
                found.append((path, inode.origin, f"hidden in the mount: {why}"))
        return found
