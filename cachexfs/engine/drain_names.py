"""Names and attributes on their way to the PFS: everything pending that is not a file's bytes.

Role: carries out directories, links, renames, removals, attributes for ``drain``, takes commit files off the PFS and
brings them back (``claims`` says when). Each recognises that it has been done before this daemon's life.

Concurrency: one task per operation, in the order that ``drain`` allows.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import trio

from cachexfs.core import claims, publication
from cachexfs.core import records as rec
from cachexfs.core.changes import covers_another, finish_op
from cachexfs.core.claims import Successor
from cachexfs.core.order import PendingOrder
from cachexfs.core.records import Inode, Op, OpKind, PfsCopy
from cachexfs.core.transaction import Tx
from cachexfs.engine.content import Reader
from cachexfs.engine.drain_errors import Progress
from cachexfs.engine.drain_files import STALL_S
from cachexfs.engine.node import Node
from cachexfs.engine.owners import check_reach
from cachexfs.engine.pfs_interface import Pfs, PfsAttrs, PfsStat

HELD = b".cachexfs/held/"


class DrainNames:
    """Carries out operations that are not PUTs."""

    def __init__(self, node: Node, reader: Reader, progress: Progress) -> None:
        self.node = node
        self.reader = reader
        self.progress = progress
        self._hung_at: dict[int, bytes] = {}  # directory -> where a call that was given up may still set its attributes
        #: whether a checkpoint's commit file (file id) and all that it names are there, but for its own name
        self.whole: Callable[[int], Awaitable[bool]] = _unknown
        #: whether the last checkpoint on the PFS (id and path of its commit file, its withdrawal) stays for the next
        self.stays: Callable[[int, bytes, bytes], bool] = lambda fid, path, key: False
        self.order = PendingOrder()  # that all pending operations stand in

    @property
    def _pfs(self) -> Pfs:
        assert self.node.pfs is not None
        return self.node.pfs

    async def _run(self, kind: str, path: bytes, path2: bytes = b"", attrs: PfsAttrs | None = None) -> None:
        check_reach(self.node)  # the calls before this one may have taken long
        await self._pfs.run(kind, path, path2, attrs, STALL_S)

    async def _stat(self, path: bytes) -> PfsStat | None:
        try:
            return await self._pfs.stat(path, STALL_S)
        except FileNotFoundError:
            return None

    async def _is_listed(self, path: bytes) -> bool:
        """Whether a name is there though the PFS denies it. Raises ``FileNotFoundError`` without its directory."""
        above, _, name = path.rpartition(b"/")
        return any(found == name for found, _ in await self._pfs.listing(above, STALL_S))

    async def carry_out(self, key: bytes, op: Op) -> None:
        """Do it on the PFS, then record that it is done."""
        inode = self.node.catalogue.view.inode(op.fid)
        if op.cancelled and op.kind == OpKind.RENAME and inode is not None:
            await self._withdraw(key, msgspec.structs.replace(op, gen=inode.gen))  # from its old name: never seen
        elif op.cancelled and op.kind != OpKind.RENAME:  # of a file that has been removed since, its names go
            await self.finish(key)
        elif op.kind == OpKind.WITHDRAW:
            await self._withdraw(key, op)
        elif op.kind == OpKind.RESTORE:
            await self._restore(key, op)
        elif op.kind in (OpKind.ATTR, OpKind.DIRATTR):
            await self._set_attrs(key, op)
        elif op.kind in (OpKind.SYMLINK, OpKind.MKNOD):
            if inode is not None:
                special = (
                    (op.kind, op.path2) if op.kind == OpKind.SYMLINK else (f"mknod:{inode.kind}:{inode.rdev}", b"")
                )
                await self._run(special[0], op.path, special[1], self.node.pfs_attrs(inode))
            await self._note_landed(key, op.fid)
        elif op.kind == OpKind.RENAME:
            await self._rename(key, op, inode)
            await self._note_moved(key, op.fid)
        else:
            await self._plain(op, inode)
            await self.finish(key)

    async def _plain(self, op: Op, inode: Inode | None) -> None:
        if op.kind == OpKind.MKDIR:
            await self._run("mkdir", op.path, attrs=self.node.pfs_attrs(inode))
        elif op.kind == OpKind.LINK:
            await self._link(op, inode)
        elif op.kind == OpKind.RMDIR:
            await self._run("rmdir", op.path)
        elif op.kind == OpKind.UNLINK:
            await self._run("unlink", op.path)
            if op.path2:
                await self._run("unlink", HELD + op.path2)

    async def finish(self, key: bytes) -> None:
        """An operation is done, or need not be."""
        ctx = self.node.ctx()
        await self.node.catalogue.mutate(lambda tx: finish_op(tx, ctx, key))
        self.progress.landed_ops += 1

    # ---- renames and links
    async def _rename(self, key: bytes, op: Op, inode: Inode | None) -> None:
        """A rename, recognising that it has been done before this daemon's life.

        Of a file that has been removed since, neither name is to be there: to show it under the new one even for a
        moment could complete a checkpoint whose other files are gone. The PFS may err in saying that there is none.
        Where the rename has been, what comes later takes the new name in its turn: it may be a whole checkpoint's.
        """
        if inode is not None and inode.pfs is not None and inode.pfs.hidden:
            return  # it was withdrawn, and stays where it is held
        found = await self._stat(op.path) if inode is None else None
        if inode is None and (found is None or found.kind != "d"):
            try:
                if found is not None or not self.order.changes_after(key, op.path2):
                    await self._run("unlink", op.path2)
                await self._run("unlink", op.path)
            except IsADirectoryError:
                pass
            else:
                return
        try:
            await self._run("rename", op.path, op.path2)
        except FileNotFoundError:
            there = await self._stat(op.path2)
            if inode is None:
                if there is not None and there.kind != "d":
                    await self._run("unlink", op.path2)
                await self._run("unlink", op.path)  # gone, and perhaps not synced
                return
            if there is None and covers_another(inode):
                return  # of an older version: what the name's former file had there has gone with it
            if there is None or there.kind != inode.kind:
                raise
            landed = inode.pfs if inode.kind == "f" and not self.order.put_after(key, op.path2) else None
            if landed is not None and landed.gen and there.ino != landed.ino:
                raise
            # Done before, and perhaps not synced: these sync both directories.
            times = self.node.catalogue.view.dir_times(op.fid)
            await self._run("attr", op.path2, attrs=self.node.pfs_attrs(inode, times))
            await self._run("unlink", op.path)

    async def _link(self, op: Op, inode: Inode | None) -> None:
        """A further name. Of a file that has been removed since, it is not to be there (see ``_rename``)."""
        if inode is not None and inode.pfs is not None and inode.pfs.hidden:
            return
        if inode is None:
            await self._run("unlink", op.path2)
        else:
            await self._run("link", op.path, op.path2)

    async def _note_moved(self, key: bytes, fid: int) -> None:
        """A file has its name on the PFS only now."""
        now_s = self.node.clock.now_s()

        def note(tx: Tx) -> None:
            if finish_op(tx, ctx, key) is None:
                return
            inode = tx.inode(fid)
            if inode is not None and inode.pfs is not None and inode.pfs.gen == inode.gen and inode.t_pfs_s:
                tx.put(rec.inode_key(fid), msgspec.structs.replace(inode, t_pfs_s=now_s))

        ctx = self.node.ctx()
        await self.node.catalogue.mutate(note)
        self.progress.landed_ops += 1

    async def _note_landed(self, key: bytes, fid: int) -> None:
        """A symlink or special file is on the PFS."""
        now_s = self.node.clock.now_s()

        ctx = self.node.ctx()

        def note(tx: Tx) -> None:
            inode = tx.inode(fid)
            if finish_op(tx, ctx, key) is not None and inode is not None:
                pfs = PfsCopy(inode.gen, now_s, 0, inode.size, inode.mtime_ns)
                tx.put(rec.inode_key(fid), msgspec.structs.replace(inode, pfs=pfs, t_pfs_s=now_s))

        await self.node.catalogue.mutate(note)
        self.progress.landed_ops += 1

    # ---- commit files
    async def _withdraw(self, key: bytes, op: Op) -> None:
        """Take a commit file off the PFS before what it names changes there. The claim falls first."""
        view = self.node.catalogue.view
        if self._is_early(key, op):
            await self.node.catalogue.mutate(lambda tx: claims.hold_again(tx, key))
            return
        hidden = f"{op.fid:x}.{op.gen:x}"
        before = view.inode(op.fid)
        again = before is not None and before.pfs is not None and before.pfs.hidden == hidden

        def fall(tx: Tx) -> bool:
            inode = tx.inode(op.fid)
            if inode is None or inode.pfs is None:
                return False
            why = "taken off the PFS, because a file that it names has changed"
            pfs = msgspec.structs.replace(inode.pfs, hidden=hidden)
            tx.put(rec.inode_key(op.fid), msgspec.structs.replace(inode, pfs=pfs, t_pfs_s=0.0, error=why))
            return True

        held = HELD + hidden.encode()
        if not await self.node.catalogue.mutate(fall):  # it was removed or replaced since
            await self._run("unlink", op.path)
            await self._run("unlink", held)
        else:
            try:
                await self._run("hide", op.path, hidden.encode())
            except FileNotFoundError:
                content = self.node.catalogue.view.generation(op.fid)
                if not again or content is None or self.node.local_path(content.stage, content.size) is None:
                    raise
                if await self._is_listed(op.path):  # or its directory is denied, too
                    raise
                await self._run("unlink", op.path)  # done before: this syncs the directory
            except FileExistsError:
                if not again:
                    raise
                await self._run("unlink", op.path)  # another change has brought this very content there
            await self._hide_others(op, before)
            if self.node.catalogue.view.inode(op.fid) is None:
                await self._run("unlink", held)
        await self.finish(key)

    def _is_early(self, key: bytes, op: Op) -> bool:
        """Whether, while a withdrawal waited for its turn, what was to take the place was removed or replaced; or
        something is to take it that was not to come then."""
        if op.ready:
            return claims.successor(self.node.catalogue.view, self.order, key) is Successor.NONE
        return op.kind == OpKind.WITHDRAW and op.lasting and self.stays(op.fid, op.path, key)

    async def _hide_others(self, op: Op, before: Inode | None) -> None:
        """A hard link of a commit file claims as much as its first name."""
        for path in self.reader.pfs_names(op.fid) if before is not None and before.pfs is not None else ():
            found = await self._stat(path) if path != op.path else None
            if found is not None and before is not None and before.pfs is not None and found.ino == before.pfs.ino:
                await self._run("unlink", path)

    async def _restore(self, key: bytes, op: Op) -> None:
        """Bring a withdrawn commit file back, if all that it names is there now."""
        inode = self.node.catalogue.view.inode(op.fid)
        there = inode.pfs if inode is not None else None
        if (
            inode is None
            or there is None
            or not there.hidden
            or there.gen != inode.gen
            or not await self._confirmed(op)
        ):
            await self.finish(key)
            return
        try:
            await self._run("unhide", op.path, there.hidden.encode())
        except FileNotFoundError:
            found = await self._stat(op.path)
            if found is None or found.ino != there.ino:
                raise
        attrs = replace(self.node.pfs_attrs(inode), xattrs=inode.xattrs)
        await self._run("attr", op.path, attrs=attrs)  # also syncs what was done before
        for path in self.reader.pfs_names(op.fid):
            if path != op.path:
                await self._run("link", op.path, path)
        now_s = self.node.clock.now_s()
        visible = await self._identified(op.path, msgspec.structs.replace(inode, pfs=_shown(there)))

        def back(tx: Tx) -> None:
            now = tx.inode(op.fid)
            if finish_op(tx, ctx, key) is None or now is None or now.pfs is None:
                return
            pfs = visible if visible is not None and now.pfs == there else _shown(now.pfs)
            tx.put(rec.inode_key(op.fid), msgspec.structs.replace(now, pfs=pfs, t_pfs_s=now_s, error=""))

        ctx = self.node.ctx()
        await self.node.catalogue.mutate(back)
        self.progress.landed_ops += 1

    async def _confirmed(self, op: Op) -> bool:
        """Whether all that a commit file names is there, by the catalogue and by the PFS: somebody, or a catalogue that
        has forgotten, may have replaced it."""
        if not await self.whole(op.fid):
            return False
        view, names = self.node.catalogue.view, self.node.catalogue.view.names_of(op.fid)
        listed = self.node.members(op.fid, op.gen) or ()
        members = [fid for name in listed if names and (fid := view.find(names[0][0], name)) not in (None, op.fid)]
        found = await self.reader.copies.there([fid for fid in members if fid is not None])
        if found is None:
            raise OSError(errno.EIO, "the PFS does not say what it has of its members")
        return found.issuperset(members)

    # ---- attributes
    async def _set_attrs(self, key: bytes, op: Op) -> None:
        view = self.node.catalogue.view
        entry, inode = view.entry(key), view.inode(op.fid)
        if entry is None:
            return
        seen = view.entry(rec.inode_key(op.fid))
        path = op.path
        # Of a file of which nothing has landed, because what was to has lost its bytes, the next content brings them.
        awaited = inode is not None and inode.pfs is None and any(o.kind == OpKind.PUT for _, o in view.ops_of(op.fid))
        where = self.reader.pfs_path(op.fid) if op.kind == OpKind.DIRATTR else path  # b"" is the root
        if inode is not None and where is not None and not awaited and (inode.pfs is None or not inode.pfs.hidden):
            times, path = view.dir_times(op.fid) if op.kind == OpKind.DIRATTR else None, where
            await self._set(op.fid, path, replace(self.node.pfs_attrs(inode, times), xattrs=inode.xattrs))
        else:
            self._hung_at.pop(op.fid, None)
        there = await self._identified(path, inode) if op.kind == OpKind.ATTR else None

        def done(tx: Tx) -> None:
            if there is not None and inode is not None and inode.pfs is not None:
                publication.note_pfs_copy(tx, op.fid, inode.pfs, there)
            now, now_inode = tx.view.entry(key), tx.view.entry(rec.inode_key(op.fid))
            unchanged = (now_inode.modified if now_inode else 0) == (seen.modified if seen else 0)
            if now is not None and now.modified == entry.modified and (unchanged or op.kind == OpKind.DIRATTR):
                tx.inode(op.fid)
                finish_op(tx, ctx, key)

        ctx = self.node.ctx()
        await self.node.catalogue.mutate(done)

    async def _set(self, fid: int, path: bytes, attrs: PfsAttrs) -> None:
        """Set attributes. While a call that hangs may set older ones late, under whatever name, it is refused (EBUSY).

        Nothing orders a directory's attributes and its renaming.
        """
        before = self._hung_at.get(fid, path)
        try:
            await self._run("attr", path, b"" if before == path else before, attrs)
        except trio.TooSlowError:
            self._hung_at[fid] = path
            raise
        self._hung_at.pop(fid, None)

    async def _identified(self, path: bytes, inode: Inode | None) -> PfsCopy | None:
        """What identifies a file on the PFS whose attributes were set there just now; None if it was none of ours."""
        there = inode.pfs if inode is not None and inode.kind == "f" else None
        if there is None or there.hidden or there.missing or not there.ino:
            return None
        found = await self._pfs.stat(path, STALL_S)  # it is there: where that is denied, all of it is tried again
        if (found.ino, found.size) != (there.ino, there.size):
            return None
        return msgspec.structs.replace(there, mtime_ns=found.mtime_ns)


def _shown(there: PfsCopy) -> PfsCopy:
    return msgspec.structs.replace(there, hidden="")


async def _unknown(fid: int) -> bool:
    return False
