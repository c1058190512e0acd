"""A journal that lost its end or was mended: the PFS is asked what it has before anything lands again.

Role: once, at the start of a daemon whose catalogue may have forgotten some of what it knew. The drain waits meanwhile,
however long the PFS is away. Then pending changes that can never be carried out are replaced or given up
(``core/mending``), missing directories are made, and commit files beside which something is going to change leave their
names until the PFS has confirmed all that they list. What is given up is told by log and ``status``.

Concurrency: one task. The PFS is this node's alone, and the drain touches nothing before ``run`` has let it.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec
import trio

from cachexfs.core import mending, namespace, publication
from cachexfs.core import records as rec
from cachexfs.core.changes import Ctx, issue, issue_dirattr
from cachexfs.core.mending import Entry, Plan, Tree
from cachexfs.core.order import ancestors, lists_members, parent_of, paths_of
from cachexfs.core.records import ROOT_FID, Inode, Op, OpKind
from cachexfs.core.transaction import Tx
from cachexfs.engine.drain import Drainer
from cachexfs.engine.node import Node
from cachexfs.engine.pfs_copies import LOOK_AGAIN_S
from cachexfs.engine.pfs_interface import Pfs
from cachexfs.errors import CacheXError, quoted

if TYPE_CHECKING:
    from cachexfs.engine.source import Source

log = logging.getLogger(__name__)

DEADLINE_S = 20.0
DOUBTED = "taken off the PFS: the catalogue has lost what it knew, and something beside it is to change"


class Mended:
    """Brings the catalogue and the PFS together again."""

    def __init__(self, node: Node, reader: Source, drainer: Drainer) -> None:
        self.node = node
        self.reader = reader
        self.drainer = drainer
        self._told: list[tuple[bytes, str]] = []

    async def run(self, done: Callable[[], None] = lambda: None) -> None:
        """Look, mend, let the drain begin and call ``done``; then look at all that is claimed on the PFS."""
        if self.node.pfs is None or self.node.options.offline:
            return  # the next daemon that has one does it
        while True:
            try:
                await self._mend(self.node.pfs)
                break
            except (CacheXError, OSError, trio.TooSlowError) as error:
                log.warning("the journal was mended, and the PFS cannot be looked at yet: %s", error or "no answer")
            await trio.sleep(LOOK_AGAIN_S)
        self._tell()
        done()
        self.drainer.resume()
        await self.reader.copies.look_at_all()

    def _tell(self) -> None:
        for path, what in self._told:
            log.error("the journal was mended: %r: %s", path, what)
        if self._told:
            path, what = self._told[0]
            self.node.errors["journal"] = (
                f"the journal had lost what it knew: {len(self._told)} changes of the PFS were given up, "
                f"{quoted(path)} first ({what}); the log has all"
            )

    async def _mend(self, pfs: Pfs) -> None:
        view, self._told = self.node.catalogue.view, []
        tree = await self._tree(pfs)
        found = mending.plan(view, tree, self._has_bytes, self.drainer.ready.has_source)
        for path, entry in mending.doubtful(view, tree, found):
            await self._take_off(pfs, path, entry)
            tree.take(path)
        found = mending.plan(view, tree, self._has_bytes, self.drainer.ready.has_source)
        for path in found.parents:
            await self._make(pfs, path)
        ctx = self.node.ctx()
        await self.node.catalogue.mutate(lambda tx: _apply(tx, ctx, found))
        self._told += found.told

    def _has_bytes(self, inode: Inode) -> bool:
        return bool(self.node.holders(inode))

    # ---- what is there
    async def _tree(self, pfs: Pfs) -> Tree:
        """What the PFS has in directories of the mount and of pending changes, and below what these move or remove."""
        tree, listed = Tree(), {b""}
        await self._list(pfs, tree, b"", whole=False)
        for path in sorted(self._places()):
            for directory in [*ancestors(path)[::-1], path]:
                there = tree.find(directory)
                if directory not in listed and there is not None and there.kind == "d":
                    listed.add(directory)
                    await self._list(pfs, tree, directory, whole=False)
        for path in self._moved():
            await self._list(pfs, tree, path, whole=True)
        return tree

    def _places(self) -> Iterable[bytes]:
        view = self.node.catalogue.view
        found = {parent_of(path) for _, op, _ in view.ops() for path in paths_of(op)}
        directories = (fid for fid, inode in view.inodes() if inode.kind == "d")
        return found.union(*(self._paths(fid) for fid in directories))

    def _paths(self, fid: int) -> list[bytes]:
        path = self.node.catalogue.view.path(fid)
        return [] if path is None else [path, *self.reader.pfs_paths(fid)]

    def _moved(self) -> Iterable[bytes]:
        kinds = (OpKind.RENAME, OpKind.RMDIR)
        return {path for _, op, _ in self.node.catalogue.view.ops() if op.kind in kinds for path in paths_of(op)}

    async def _list(self, pfs: Pfs, tree: Tree, path: bytes, *, whole: bool) -> None:
        """Take in a directory. ``whole``: and all below it."""
        there = tree.find(path)
        if there is None or there.kind != "d":
            return
        try:
            rows = await pfs.listing(path, DEADLINE_S)
        except FileNotFoundError:
            raise OSError(errno.EIO, f"{quoted(path)} is listed, and cannot be") from None
        for name, found in rows:
            if name not in there.entries:
                there.entries[name] = Entry(found.kind, found.ino, found.size)
        for name, entry in list(there.entries.items()) if whole else ():
            if entry.kind == "d":
                await self._list(pfs, tree, path + b"/" + name, whole=True)

    # ---- what is done at once
    async def _make(self, pfs: Pfs, path: bytes) -> None:
        view = self.node.catalogue.view
        fid = view.find(ROOT_FID, path)
        inode = view.inode(fid) if fid is not None else None
        if inode is None or inode.kind != "d":
            inode = view.inode(ROOT_FID)
        try:
            await pfs.run("mkdir", path, b"", self.node.pfs_attrs(inode), DEADLINE_S)
        except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            self._told.append((path, f"mkdir: {error.strerror}"))

    async def _take_off(self, pfs: Pfs, path: bytes, entry: Entry) -> None:
        """A commit file leaves its name: its claim first. One that the catalogue does not know is kept, too."""
        view = self.node.catalogue.view
        fid = self._known(entry)
        if fid is None and any(op.kind == OpKind.UNLINK and op.path == path for _, op, _ in view.ops()):
            await pfs.run("unlink", path, b"", None, DEADLINE_S)  # the user has removed it
            return
        hidden = f"forgotten-{entry.ino:x}"
        if fid is not None:
            of = fid
            hidden = await self.node.catalogue.mutate(lambda tx: _fall(tx, of))
        else:
            self._told.append((path, f"a commit file that is not known: it is in .cachexfs/held/{hidden}"))
        await pfs.run("hide", path, hidden.encode(), None, DEADLINE_S)

    def _known(self, entry: Entry) -> int | None:
        """The file that landed as this."""
        for fid, inode in self.node.catalogue.view.inodes():
            there = inode.pfs
            if there is not None and inode.kind == "f" and (there.ino, there.size) == (entry.ino, entry.size):
                return fid
        return None


def _fall(tx: Tx, fid: int) -> str:
    """The claim of a commit file falls; returns the name that it is to be hidden under."""
    inode = tx.inode(fid)
    if inode is None or inode.pfs is None:
        return f"{fid:x}"
    hidden = inode.pfs.hidden or f"{fid:x}.{inode.pfs.gen:x}"
    there = msgspec.structs.replace(inode.pfs, hidden=hidden)
    tx.put(rec.inode_key(fid), msgspec.structs.replace(inode, pfs=there, t_pfs_s=0.0, error=DOUBTED))
    return hidden


def _apply(tx: Tx, ctx: Ctx, found: Plan) -> None:
    for key, op in found.changes.items():
        if isinstance(tx.read(key), Op):
            if op is None:
                tx.delete(key)
            else:
                tx.put(key, op)
    for fid in found.fallen:
        inode = tx.inode(fid)
        if inode is None or inode.pfs is None:
            continue
        there = (
            None if fid in found.again.values() or _lands(tx, fid) else msgspec.structs.replace(inode.pfs, missing=True)
        )
        tx.put(rec.inode_key(fid), msgspec.structs.replace(inode, pfs=there, t_pfs_s=0.0, error="it is not on the PFS"))
    for path, fid in found.again.items():
        _bring(tx, ctx, path, fid)


def _lands(tx: Tx, fid: int) -> bool:
    return any(op.kind == OpKind.PUT for _, op in tx.ops_of(fid))


def _bring(tx: Tx, ctx: Ctx, path: bytes, fid: int) -> None:
    """Something of the mount comes to the PFS (again)."""
    inode = tx.inode(fid)
    if inode is None:
        return
    if inode.kind == "f":
        publication.put_again(tx, ctx, fid, path, withheld=lists_members(path.rpartition(b"/")[2]))
    elif inode.kind == "d":
        issue(tx, ctx, Op(OpKind.MKDIR, path, ctx.node, fid=fid))
        issue_dirattr(tx, ctx, fid)
    elif inode.kind == "l":
        above = parent_of(path)
        target = namespace.resolve(above, inode.target)
        op = Op(OpKind.SYMLINK, path, ctx.node, fid=fid, path2=inode.target, commit=True, below=above, target=target)
        issue(tx, ctx, op)
    else:
        issue(tx, ctx, Op(OpKind.MKNOD, path, ctx.node, fid=fid))
