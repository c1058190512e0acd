"""Files on their way to the PFS: made ready under a hidden name, landed with one rename.

Role: carries out PUT operations for ``drain``, and what an fsync asks of the PFS. A file that is ready lies below
``.cachexfs/tmp``, synced, beside a recovery record that says where it belongs; whatever it waits for, nothing is copied
again. Hidden files that nothing will land are removed.

Concurrency: any number of files at once; one task per operation. Who touches the PFS is a child process (``Pfs``).
"""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress

import msgspec
import trio

from cachexfs.core import records as rec
from cachexfs.core.changes import finish_op
from cachexfs.core.landed import same_time
from cachexfs.core.manifest import still_to_land
from cachexfs.core.records import Generation, Inode, Op, OpKind, PfsCopy
from cachexfs.core.replica import Applied
from cachexfs.core.transaction import Tx
from cachexfs.engine.damaged import check_stage, is_whole
from cachexfs.engine.drain_errors import RETRY_FIRST_S, RETRY_MAX_S, Progress
from cachexfs.engine.drain_progress import Copies
from cachexfs.engine.node import Node
from cachexfs.engine.pfs_interface import Pfs, PfsAttrs, PfsStat
from cachexfs.errors import CacheXError, FsError

log = logging.getLogger(__name__)

STALL_S = 20.0  # without progress, a call on the PFS counts as hung
_GEN_MAX = 1 << 62
BEFORE_MAX = 8
WITHHELD = "kept off the PFS, because a file that it names has changed or is lost"


class _Record(msgspec.Struct):
    """What a recovery record says of itself."""

    fid: int
    gen: int
    store: str = ""
    path: bytes = b""
    tree: bytes = b""
    before: tuple[bytes, ...] = ()


class DrainFiles:
    """Makes files ready, lands them, removes what is ready for nothing."""

    def __init__(self, node: Node, progress: Progress) -> None:
        self.node = node
        self.progress = progress
        self.copies = Copies()
        self._fsynced: dict[str, bytes] = {}  # hidden name -> tree digest of what an fsync put there
        #: File id -> hidden names that may exist, in the order in which they were made -> their generation.
        self._made: dict[int, dict[str, int]] = {}
        #: Hidden name -> tree digests that the bytes there may have: its record and they are not exchanged at once.
        self._trees: dict[str, tuple[bytes, ...]] = {}
        self._paths: dict[str, bytes] = {}  # hidden name -> where its record says that it belongs
        self._made_ns = 0  # when the last record was made
        self._damaged: set[tuple[str, int]] = set()  # (hidden name, generation) of contents that are damaged here
        self._overwritten: set[tuple[str, int]] = set()  # of these, those whose bytes no copy has any more
        self._cleaned_up = False  # what an earlier life has prepared is known
        self._nursery: trio.Nursery | None = None

    @property
    def _pfs(self) -> Pfs:
        assert self.node.pfs is not None
        return self.node.pfs

    async def run(self) -> None:
        """Remove what is left of earlier lives and of files that are gone, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            await self._clean_up()
            await trio.sleep_forever()

    def notice(self, changes: Applied) -> None:
        """Catalogue listener: files that are gone, with their last pending content, and contents that have landed."""
        for key, old, new in changes:
            if isinstance(old, Op) and new is None and old.kind == OpKind.PUT:
                fid = old.fid
            elif isinstance(old, Inode):
                fid = int(key[2:], 16)
            else:
                continue
            if self._nursery is None or fid not in self._made:
                continue
            if not self.node.catalogue.view.has_inode(fid):
                self._nursery.start_soon(self._forget_file, fid, _GEN_MAX)
            elif isinstance(old, Inode) and isinstance(new, Inode) and _has_landed(old, new):
                # Perhaps another node has landed it.
                self._nursery.start_soon(self._forget_file, fid, _landed_gen(new))

    # ---- ready
    async def prepare(self, op: Op, inode: Inode | None, tree: bytes = b"") -> None:
        """Copy the bytes of a PUT to its hidden name. ``tree``: their digest, when an fsync asks.

        What an earlier fsync has put there is used if it is the same: a staged file that is still being written keeps
        its name while its bytes change. Raises ``FsError``, ``OSError``, ``trio.TooSlowError``.
        """
        content = self.node.catalogue.view.generation(op.fid)
        moved_away = tree and self._paths.get(op.hidden) != op.path  # it need not be copied again only to land
        if not tree and content is not None and content.gen == op.gen:
            tree = content.tree
        if tree and self._fsynced.get(op.hidden) == tree and not moved_away:
            return
        self._fsynced.pop(op.hidden, None)
        source, size = self._source(op, content)
        if source is not None and size and not await self._is_good(op, content, source, size):
            raise FsError(errno.EIO, f"the bytes on node {self.node.name} are damaged, or their disk cannot read them")
        source, size = self._source(op, content)  # that one, if another copy here was found damaged
        if source is None:
            await check_stage(self.node, op.stage)
            raise FsError(errno.EIO, f"no whole copy of generation {op.gen} on node {self.node.name}")
        attrs = self.node.pfs_attrs(inode)
        before = tuple(known for known in self._trees.get(op.hidden, ()) if known != tree)[-BEFORE_MAX:]
        record = self._record(op, inode, attrs, size, tree, before)
        self._trees[op.hidden] = (*before, tree)
        self._note_made(op.fid, op.hidden, op.gen)
        same = content is not None and content.gen == op.gen and content.size == size
        digest = content.digest if same and content is not None and self.node.options.verify else b""
        done = -1
        while (now := _file_at(source)) != done:  # again where what was published has moved to a file of its own
            done = now
            try:
                with self.copies.copying(op.hidden, size) as told:
                    await self._pfs.prepare(
                        source, size, op.hidden, attrs, record, STALL_S, digest=digest, on_progress=told
                    )
            except FileNotFoundError:
                moved = self._source(op, content)[0]  # to NVMe, before it was opened
                if moved is None or moved == source:
                    raise
                source, done = moved, -1
        self._made.setdefault(op.fid, {})[op.hidden] = op.gen  # also if another node has landed that meanwhile
        self._paths[op.hidden], self._trees[op.hidden] = op.path, (tree,)
        self._forget_if_over(op)

    def _forget_if_over(self, op: Op) -> None:
        """It has landed, or its file has been removed, while an fsync still copied it: nothing will land it again."""
        inode = self.node.catalogue.view.inode(op.fid)
        over = _GEN_MAX if inode is None else _landed_gen(inode)
        if self._nursery is not None and op.gen <= over and op.hidden not in self._to_land(op.fid):
            self._nursery.start_soon(self._forget_file, op.fid, over)

    def _note_made(self, fid: int, hidden: str, gen: int) -> None:
        made = self._made.setdefault(fid, {})
        made.pop(hidden, None)  # the order is that of the last time
        made[hidden] = gen

    async def _is_good(self, op: Op, content: Generation | None, source: str, size: int) -> bool:
        """Whether the bytes of a PUT are what was published; not asked of those in memory that this daemon has written.

        Of an earlier content than the current one no other copy is known: damaged, or on a disk that cannot read it, it
        counts as gone from now on.
        """
        node = self.node
        if op.stage not in node.unverified and node.in_memory(op.stage):
            return True
        if content is not None and content.gen <= op.gen:
            return await check_stage(node, op.stage)
        # Else a writer that the kernel served has changed it since, and its digest never told.
        exact = source == node.local_path(op.stage, op.size)
        if await is_whole(node, source, size, op.tree if exact else b""):
            return True
        log.error("%s: %r, generation %d, is damaged", op.stage, op.path, op.gen)
        self._damaged.add((op.hidden, op.gen))
        if content is not None and content.stage == op.stage and content.tree and await check_stage(node, op.stage):
            self._overwritten.add((op.hidden, op.gen))  # in the same file, by what all copies have now
        if content is None:
            await self._hand_over(op)
        return False

    async def _hand_over(self, op: Op) -> None:
        """What this node has of a file that was removed is bad: who else has it is to land it."""
        name = self.node.name

        def drop(tx: Tx) -> None:
            for key, now in list(tx.ops_of(op.fid)):
                if now.kind == OpKind.PUT and now.gen == op.gen and any(copy.node == name for copy in now.copies):
                    left = tuple(copy for copy in now.copies if copy.node != name)
                    tx.put(key, msgspec.structs.replace(now, copies=left))

        await self.node.catalogue.mutate(drop)

    def overwritten(self, op: Op) -> bool:
        """Whether what a PUT was to land was overwritten, in place, by the content that all copies have now."""
        return (op.hidden, op.gen) in self._overwritten

    async def fsynced(self, op: Op, tree: bytes) -> None:
        """What is ready now are these bytes: no need to copy them again if they are published.

        What earlier fsyncs of the file had put there is not needed any more.
        """
        self._fsynced[op.hidden] = tree
        wanted = self._to_land(op.fid)
        for hidden, gen in list(self._made.get(op.fid, {}).items()):
            if hidden == op.hidden:
                return  # those that follow are newer
            if hidden not in wanted and gen <= op.gen:
                with suppress(CacheXError, OSError, trio.TooSlowError):  # the next time, or when it has landed
                    await self.discard(op.fid, hidden)

    def is_named_otherwise(self, fid: int, path: bytes) -> bool:
        """Whether a record of a file's bytes here says that they belong elsewhere than at ``path``."""
        return any(self._paths.get(hidden, path) != path for hidden in self._made.get(fid, ()))

    def _record(
        self, op: Op, inode: Inode | None, attrs: PfsAttrs, size: int, tree: bytes, before: tuple[bytes, ...]
    ) -> bytes:
        base = inode.pfs if inode is not None else None
        self._made_ns = max(self._made_ns + 1, self.node.clock.now_ns())
        earlier = still_to_land(self.node.catalogue.view, op.fid, op.gen)
        return msgspec.msgpack.encode(
            {"path": op.path, "fid": op.fid, "gen": op.gen, "size": size, "node": self.node.name,
             "job": self.node.options.job, "tree": tree,
             "store": self.node.staging.store, "made_ns": self._made_ns, "earlier": earlier, "before": before,
             "mode": attrs.mode, "uid": attrs.uid, "gid": attrs.gid, "mtime_ns": attrs.mtime_ns,
             "base": None if base is None else [base.ino, base.size, base.mtime_ns]}
        )  # fmt: skip

    def has_source(self, op: Op) -> bool:
        """Whether this node has the bytes of a PUT."""
        return self._source(op, self.node.catalogue.view.generation(op.fid))[0] is not None

    def has_own(self, op: Op) -> bool:
        """Whether this node has the very bytes of a PUT, or what a writer that the kernel served has left of them."""
        if (op.hidden, op.gen) in self._damaged:
            return False
        return not op.size or self.node.staged(op.stage) or self.node.local_path(op.stage, op.size) is not None

    def _source(self, op: Op, content: Generation | None) -> tuple[str | None, int]:
        """Where the bytes of a PUT lie on this node, and how many.

        A writer that the kernel served may have cut the very file after that generation was published. Then what is
        left of it lands, or the newest content, for the sake of those that wait for the name.
        """
        node = self.node
        if (op.hidden, op.gen) in self._damaged:
            return None, op.size
        found = "/dev/null" if not op.size else node.local_path(op.stage, op.size)
        if found is not None or content is None or content.gen <= op.gen:
            return found, op.size
        if node.staged(op.stage):
            return node.staging.path(op.stage), node.staging.size(op.stage)
        return node.local_path(content.stage, content.size) if content.size else "/dev/null", content.size

    # ---- landed
    async def land(self, key: bytes, op: Op, held: str = "") -> bool:
        """Put a ready file under its name, and claim it. False: it is not ready any more, prepare it again.

        ``held``: it must not be seen there, and goes to this name below ``.cachexfs/held``.
        """
        used = self.node.pfs_attrs(self.node.catalogue.view.inode(op.fid))
        try:
            path = b".cachexfs/held/" + held.encode() if held else op.path
            found = await self._pfs.land(op.hidden, path, used, STALL_S)
        except FileNotFoundError as error:
            if error.errno != errno.ENODATA:
                raise
            before = await self._landed_before(op, used)
            if before is None:
                self._fsynced.pop(op.hidden, None)
                return False
            found = before
        await self._landed(key, op, used, found, held)
        return True

    async def _landed_before(self, op: Op, used: PfsAttrs) -> PfsStat | None:
        """A node that is lost since had landed it, when its bytes are nowhere else."""
        if self._source(op, self.node.catalogue.view.generation(op.fid))[0] is not None:
            return None
        try:
            found = await self._pfs.stat(op.path, STALL_S)
        except FileNotFoundError:
            return None
        if not op.ready or (found.kind, found.size) != ("f", op.size) or not same_time(found.mtime_ns, used.mtime_ns):
            return None
        await self._pfs.run("attr", op.path, b"", used, STALL_S)  # it may not have come to sync file and directory
        return found

    async def _landed(self, key: bytes, op: Op, used: PfsAttrs, found: PfsStat, held: str) -> None:
        """A file is under its name: what is left of earlier states goes, then the claim is made."""
        self._settle(op.fid, op.hidden)
        inode = self.node.catalogue.view.inode(op.fid)
        if inode is not None and inode.pfs is not None and inode.pfs.hidden not in ("", held):
            await self._pfs.run("unlink", b".cachexfs/held/" + inode.pfs.hidden.encode(), b"", None, STALL_S)
        await self.discard(op.fid, *self._stale(op.fid, op.gen))
        now_s = self.node.clock.now_s()
        copy = PfsCopy(op.gen, now_s, found.ino, found.size, found.mtime_ns, held)

        def land(tx: Tx) -> None:
            if finish_op(tx, ctx, key) is None:
                return
            now = tx.inode(op.fid)
            if now is None:
                return
            current = now.gen == op.gen
            if held:
                tx.put(rec.inode_key(op.fid), msgspec.structs.replace(now, pfs=copy, t_pfs_s=0.0, error=WITHHELD))
                return
            now = msgspec.structs.replace(
                now, pfs=copy, t_pfs_s=now_s if current else now.t_pfs_s, error="" if current else now.error
            )
            tx.put(rec.inode_key(op.fid), now)
            changed = self.node.pfs_attrs(now) != used
            if current and changed and not any(o.kind == OpKind.ATTR for _, o in tx.ops_of(op.fid)):
                tx.put(rec.op_key(ctx.next_op()), Op(OpKind.ATTR, op.path, ctx.node, fid=op.fid))

        ctx = self.node.ctx()
        await self.node.catalogue.mutate(land)
        self.progress.landed_ops += 1

    # ---- for nothing
    async def discard(self, fid: int, *names: str, foreign: bool = False) -> None:
        """Remove ready files that are not to land. ``foreign``: another node may have made them."""
        made = self._made.get(fid, {})
        for hidden in [name for name in names if name in made or foreign or not self._cleaned_up]:
            await self._pfs.discard(hidden, STALL_S)
            self._settle(fid, hidden)

    def _settle(self, fid: int, hidden: str) -> None:
        """A hidden name is free again."""
        self._fsynced.pop(hidden, None)
        self._paths.pop(hidden, None)
        self._trees.pop(hidden, None)
        made = self._made.get(fid, {})
        made.pop(hidden, None)
        if not made:
            self._made.pop(fid, None)

    def _stale(self, fid: int, gen: int) -> list[str]:
        """Hidden names that fsyncs made of contents up to a generation, and that no pending operation will land."""
        wanted = self._to_land(fid)
        return [name for name, made in self._made.get(fid, {}).items() if name not in wanted and made <= gen]

    def _to_land(self, fid: int) -> set[str]:
        """Hidden names that pending operations will land."""
        return {op.hidden for _, op in self.node.catalogue.view.ops_of(fid) if op.kind == OpKind.PUT}

    async def _forget_file(self, fid: int, gen: int) -> None:
        """A file is gone or a content has landed: so is what fsyncs had prepared of it, once the PFS agrees."""
        delay_s = RETRY_FIRST_S
        while stale := self._stale(fid, gen):
            try:
                await self.discard(fid, *stale)
            except (CacheXError, OSError, trio.TooSlowError) as error:
                log.debug("prepared files of %x cannot be removed yet: %s", fid, error)
                await trio.sleep(delay_s)
                delay_s = min(2 * delay_s, RETRY_MAX_S)

    async def _clean_up(self) -> None:
        """What this daemon's earlier life has prepared and nothing will land goes.

        Records of another staging directory stay: its catalogue is not ours, so that a file which is unknown here is
        not one that was removed. ``cachexfs recover`` reads those.
        """
        while self.node.pfs is not None:
            try:
                for found in await self.node.pfs.prepared(STALL_S):
                    await self._clean_up_one(found.hidden, found.record)
                self._cleaned_up = True
                return
            except (CacheXError, OSError, trio.TooSlowError) as error:
                log.debug("prepared files cannot be looked through yet: %s", error)
            await trio.sleep(RETRY_MAX_S)

    async def _clean_up_one(self, hidden: str, data: bytes) -> None:
        view = self.node.catalogue.view
        try:
            record = msgspec.msgpack.decode(data, type=_Record)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        inode = view.inode(record.fid)
        if record.store != self.node.staging.store or hidden in self._made.get(record.fid, ()):
            return
        if record.gen <= (_GEN_MAX if inode is None else _landed_gen(inode)) and hidden not in self._to_land(
            record.fid
        ):
            await self.discard(record.fid, hidden)  # noted only if it stays: a failure is tried again
        else:
            self._made.setdefault(record.fid, {})[hidden] = record.gen
            self._paths[hidden] = record.path
            self._trees.setdefault(hidden, (*record.before, record.tree))


def _landed_gen(inode: Inode | None) -> int:
    return inode.pfs.gen if inode is not None and inode.pfs is not None else 0


def _has_landed(old: Inode, new: Inode) -> bool:
    return new.pfs is not None and (old.pfs is None or old.pfs.gen < new.pfs.gen)


def _file_at(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0
