"""Commit files on the PFS: when one leaves so that its successor can land, and when it comes back.

Role: level-triggered. A checkpoint that is whole on the PFS and is being overwritten keeps its commit file and its
members there (``core/claims``: a held withdrawal) until its successor is ready under hidden names: then this releases
the withdrawal, and the drain lands everything, commit file last. A commit file that was withdrawn and whose checkpoint
is whole again comes back. The last one on the PFS, when it is removed, goes once the next has landed (``LastWhole``).
Without room in memory a withdrawal is released early: a save must not fail for the sake of
an older one.

Concurrency: one task looks at the directories in which something has changed. Each withdrawal, and each withdrawn
commit file, is one live node's; that node decides alone, from the catalogue.
"""

from __future__ import annotations

import logging

import trio

from cachexfs.core import claims
from cachexfs.core.changes import Ctx
from cachexfs.core.claims import Successor
from cachexfs.core.order import ancestors, parent_of, paths_of
from cachexfs.core.records import AnyRecord, Inode, Op, OpKind
from cachexfs.core.replica import Applied
from cachexfs.core.transaction import Tx
from cachexfs.engine.commit_files import UNREADABLE_NOW
from cachexfs.engine.completeness import Checkpoint, Completeness
from cachexfs.engine.drain import Drainer
from cachexfs.engine.last_whole import LastWhole
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError, CannotTellError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05  # many changes of one directory are one look
RETRY_S = 5.0
GRACE_S = 1.0


class Claims:
    """Releases withdrawals, brings commit files back."""

    def __init__(self, node: Node, completeness: Completeness, drainer: Drainer, last_whole: LastWhole) -> None:
        self.node = node
        self.completeness = completeness
        self.drainer = drainer
        self.last_whole = last_whole
        self._held: dict[bytes, None] = {}  # withdrawals that are held, of all nodes
        self._withdrawn: dict[int, None] = {}  # commit files that are not under their name on the PFS
        self._changed: set[bytes] = set()  # directories in or below which something has changed
        self._wake = trio.Event()
        self._pressed = False
        self._graced: dict[bytes, None] = {}  # withdrawals whose commit file was removed a while ago
        self._nursery: trio.Nursery | None = None
        self._lasting: set[bytes] = set()  # paths of commit files that are looked at again after a while
        drainer.names.whole, drainer.names.stays = self.whole, last_whole.stays
        last_whole.on_change = self._look_at_lasting

    # ---- following the catalogue
    def load(self) -> None:
        """Take in the state when the engine starts."""
        self.last_whole.load()
        for key, entry in self.node.catalogue.view.items():
            if key.startswith((b"i/", b"p/")):
                self._notice(key, None, entry.record)

    def notice(self, changes: Applied) -> None:
        """Catalogue listener."""
        for key, old, new in changes:
            self._notice(key, old, new)

    def _notice(self, key: bytes, old: AnyRecord | None, new: AnyRecord | None) -> None:
        record = new if new is not None else old
        if isinstance(record, Op):
            if isinstance(new, Op) and new.held:
                self._held[key] = None
            else:
                self._held.pop(key, None)
                self._graced.pop(key, None)
            if self._held or self._withdrawn:
                self._look_at(*paths_of(record))
        elif isinstance(record, Inode) and record.kind == "f":
            fid = int(key[2:], 16)
            if isinstance(new, Inode) and new.pfs is not None and new.pfs.hidden:
                self._withdrawn[fid] = None
            else:
                self._withdrawn.pop(fid, None)
            path = self.node.catalogue.view.path(fid) if self._held or self._withdrawn else None
            if path is not None:
                self._look_at(path)
            held = [op.path for k in self._held if (op := self.node.catalogue.view.op(k)) is not None and op.fid == fid]
            if held:  # perhaps in a directory that has been renamed since
                self._look_at(*held)

    def _look_at(self, *paths: bytes) -> None:
        for path in paths:
            self._changed.update(ancestors(path))
        self._wake.set()

    def _look_at_lasting(self) -> None:
        ops = (self.node.catalogue.view.op(key) for key in self._held)
        if paths := [op.path for op in ops if op is not None and op.lasting]:
            self._look_at(*paths)

    def pressed(self) -> None:
        """A writer waits for memory."""
        if self._held and not self._pressed:
            self._pressed = True
            self._wake.set()

    # ---- deciding
    async def run(self) -> None:
        """Decide, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._decide_all)

    async def _decide_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            changed, self._changed = self._changed, set()
            pressed, self._pressed = self._pressed, False
            concerned = self._concerned(changed, pressed=pressed)
            failed = [path for path in concerned if not await self._look(path, pressed=pressed)]
            await trio.sleep(RETRY_S if failed else LOOK_EVERY_S)
            if failed:
                self._look_at(*failed)

    def _concerned(self, changed: set[bytes], *, pressed: bool) -> list[bytes]:
        """Paths of commit files to look at: in directories that have changed, under pressure all."""
        view = self.node.catalogue.view
        paths = [op.path for key in self._held if (op := view.op(key)) is not None]
        paths += [path for fid in self._withdrawn if (path := view.path(fid)) is not None]
        return list(dict.fromkeys(path for path in paths if pressed or parent_of(path) in changed))

    async def _look(self, path: bytes, *, pressed: bool = False) -> bool:
        """Decide about the commit file at a path. False: cannot tell now."""
        view = self.node.catalogue.view
        try:
            for key in list(self._held):
                op = view.op(key)
                if op is None or not op.held or op.path != path:
                    continue
                if pressed and self._keeps_memory(key, op):
                    log.warning("no room in memory: the checkpoint of %r leaves the PFS before the next is there", path)
                    await self._release(key, anyway=True)
                elif self.drainer.responsible(op):
                    await self._decide(key, op)
            for fid in list(self._withdrawn):
                if view.path(fid) == path:
                    await self._bring_back(fid, path)
        except (CacheXError, OSError) as error:
            log.debug("the commit file %r: %s", path, error)
            return False
        return True

    def _keeps_memory(self, key: bytes, op: Op) -> bool:
        """Whether this node's memory has a file that is ready and waits for a withdrawal."""
        later = self.drainer.waits.order.after(key, parent_of(op.path))
        return any(o.kind == OpKind.PUT and o.ready and self.node.staging.has(o.stage) for _, o in later)

    async def _decide(self, key: bytes, op: Op) -> None:
        order, view = self.drainer.waits.order, self.node.catalogue.view
        if op.lasting:
            if not self.last_whole.stays(op.fid, op.path):
                await self._release(key)
            elif op.path not in self._lasting and self._nursery is not None:
                self._nursery.start_soon(self._look_again, op.path)
            return
        found = claims.successor(view, order, key)
        if found is Successor.REMOVED and key not in self._graced and self._nursery is not None:
            self._nursery.start_soon(self._wait_for_next, key, op.path)
            return
        if found is not Successor.NONE:
            await self._release(key, ready=found is Successor.REPLACED)
            return
        if not claims.all_ready(order, key):
            return
        checkpoint = await self._checkpoint(op.fid)
        if checkpoint is not None and checkpoint.restartable is not None and claims.all_ready(order, key):
            await self._release(key, restored=op.fid)
        elif self._is_needless(key, op):
            await self.node.catalogue.mutate(lambda tx: claims.take_back(tx, key))

    def _is_needless(self, key: bytes, op: Op) -> bool:
        """Whether by now it is known that the commit file lists nothing of what has changed."""
        inode = self.node.catalogue.view.inode(op.fid)
        gens = {inode.gen, inode.pfs.gen} if inode is not None and inode.pfs is not None else set[int]()
        listed = [self.node.members(op.fid, gen) for gen in gens]
        if not gens or any(names is None for names in listed):
            return False
        own, names = op.path, set[bytes]().union(*(names for names in listed if names is not None))
        later = (path for _, o in self.drainer.waits.order.after(key, parent_of(own)) for path in paths_of(o))
        beside = (path for path in later if parent_of(path) == parent_of(own))
        return not any(path == own or path.rpartition(b"/")[2] in names for path in beside)

    async def _look_again(self, path: bytes) -> None:
        """What it stays for may be lost, or refused, without a change of the catalogue."""
        self._lasting.add(path)
        await trio.sleep(RETRY_S)
        self._lasting.discard(path)
        self._look_at(path)

    async def _wait_for_next(self, key: bytes, path: bytes) -> None:
        """Savers remove the old commit file and then rename the new one into its place: both in one go."""
        await trio.sleep(GRACE_S)
        self._graced[key] = None
        self._look_at(path)

    async def _release(self, key: bytes, restored: int = 0, *, ready: bool = False, anyway: bool = False) -> None:
        ctx: Ctx = self.node.ctx()

        def release(tx: Tx) -> None:
            if claims.release(tx, key, ready=ready, anyway=anyway) and restored:
                claims.restore(tx, ctx, restored)

        await self.node.catalogue.mutate(release)

    async def _bring_back(self, fid: int, path: bytes) -> None:
        """A withdrawn commit file comes back when nothing is pending in its directory and it is whole there."""
        view, node = self.node.catalogue.view, self.node
        inode = view.inode(fid)
        live = sorted(name for name in view.nodes if node.live(name))
        owner = inode.origin if inode is not None and inode.origin in live else next(iter(live), node.name)
        if owner != node.name or self.drainer.waits.order.pending_below(parent_of(path)):
            return
        if inode is not None and not self._has_members(fid, inode):
            return  # as while a checkpoint is removed: its commit file is not read after each member
        if await self.whole(fid):
            ctx = node.ctx()
            await node.catalogue.mutate(lambda tx: claims.restore(tx, ctx, fid))

    def _has_members(self, fid: int, inode: Inode) -> bool:
        """Whether the mount has every name that a commit file lists, as far as those are known."""
        view, names = self.node.catalogue.view, self.node.catalogue.view.names_of(fid)
        members = self.completeness.commit_files.members_of(fid, inode.gen)
        return not names or members is None or all(view.find(names[0][0], name) is not None for name in members)

    async def _checkpoint(self, fid: int) -> Checkpoint | None:
        """The checkpoint that a commit file claims, if it is one. Raises ``CannotTellError``."""
        names, pfs = self.node.catalogue.view.names_of(fid), self.node.pfs
        if not names:
            return None
        if pfs is None or pfs.state != "ok":
            raise CannotTellError("the PFS does not answer")
        found = await self.completeness.checkpoint(names[0][0])
        if found is not None and any(UNREADABLE_NOW in piece.reason for piece in found.missing):
            raise CannotTellError("the commit file cannot be read now")
        return found if found is not None and names[0][1] in found.needs else None

    async def whole(self, fid: int) -> bool:
        """Whether all that a commit file names lies on the PFS under its name, as it is in the mount."""
        checkpoint = await self._checkpoint(fid)
        if checkpoint is None or checkpoint.missing:
            return False
        view = self.node.catalogue.view
        found = [(member, view.inode(member)) for member in checkpoint.needs.values()]
        return all((inode is not None and self.node.on_pfs(member, inode)) or member == fid for member, inode in found)
