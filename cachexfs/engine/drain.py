"""The drain: pending operations land on the PFS, in the order that promise 3 allows.

Role: level-triggered. The catalogue holds the pending operations; each node carries out its own, and a survivor
those of a lost node. A file is first made ready (copied and fsynced under a hidden name), whatever it waits for,
and then lands with one rename when nothing smaller blocks it.

Concurrency: one task per operation that can make progress. ``PendingOrder`` says who waits for whom; an operation
that waits has no task. A failure backs off, shows in ``error``, and is tried until it succeeds. Who touches the
PFS is a child process (``Pfs``): a hung PFS holds tasks here, never the loop.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import trio

from cachexfs.core import publication
from cachexfs.core import records as rec
from cachexfs.core.changes import errno_name, finish_op
from cachexfs.core.order import PendingOrder
from cachexfs.core.records import AnyRecord, DirTimes, Generation, Inode, Op, OpKind, PfsCopy
from cachexfs.core.replica import Tx
from cachexfs.engine.content import Reader
from cachexfs.engine.files import Files
from cachexfs.engine.interfaces import PfsAttrs, PfsStat
from cachexfs.engine.node import Node
from cachexfs.engine.recover import check_stage
from cachexfs.engine.vnode import Vnode
from cachexfs.errors import CacheXError, FsError, quoted

log = logging.getLogger(__name__)

META_TASKS_MAX = 16
RETRY_FIRST_S, RETRY_MAX_S = 0.25, 15.0
STALL_S = 20.0  # without progress, a call on the PFS counts as hung


_GEN_MAX = 1 << 62


class _Prepared(msgspec.Struct):
    """What a recovery record says of itself."""

    fid: int
    gen: int
    store: str = ""


@dataclass(slots=True)
class _State:
    """One operation of this node: whether its file is ready under the hidden name, and when to try again."""

    ready: bool = False
    delay_s: float = 0.0
    waiting_for: bytes | None = None
    running: bool = False
    failed: bool = False


@dataclass(slots=True)
class Progress:
    """Numbers for ``status``."""

    landed_bytes: int = 0
    landed_ops: int = 0
    errors: dict[bytes, str] = field(default_factory=dict)


class Drainer:
    """Carries out the pending operations that this node is responsible for."""

    def __init__(self, node: Node, files: Files, reader: Reader) -> None:
        self.node = node
        self.files = files
        self.reader = reader
        self.order = PendingOrder()
        self.progress = Progress()
        self._states: dict[bytes, _State] = {}
        self._waiters: dict[bytes, dict[bytes, None]] = {}
        self._runnable: dict[bytes, None] = {}
        self._prepared: dict[str, bytes] = {}  # hidden name -> tree digest of what an fsync put there
        self._made: dict[int, dict[str, int]] = {}  # file id -> hidden names that may exist -> their generation
        self._cleaned_up = False  # what an earlier life has prepared is known
        self._full: set[bytes] = set()  # PUTs that the PFS has no room for
        self._wake = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._copy_slots = trio.CapacityLimiter(max(1, node.options.drain_workers))
        self._meta_slots = trio.CapacityLimiter(META_TASKS_MAX)
        self._landed = trio.Event()
        self.on_landed: Callable[[], None] = lambda: None

    # ---- following the catalogue
    def load(self) -> None:
        """Take in what is pending when the engine starts."""
        for key, op, created in self.node.catalogue.view.ops():
            self._added(key, created, op)

    def notice(self, changes: list[tuple[bytes, AnyRecord | None, AnyRecord | None]]) -> None:
        """Catalogue listener."""
        for key, old, new in changes:
            if isinstance(new, Op):
                entry = self.node.catalogue.view.entry(key)
                self._added(key, entry.created if entry else 0, new)
            elif isinstance(old, Op):
                self._removed(key, old)
            elif isinstance(old, Inode) and new is None and int(key[2:], 16) in self._made and self._nursery:
                self._nursery.start_soon(self._forget_prepared, int(key[2:], 16))
            elif key.startswith(b"l/"):
                for pending, _, _ in list(self.node.catalogue.view.ops()):
                    self._consider(pending)

    def _added(self, key: bytes, created: int, op: Op) -> None:
        self.order.add(key, created, op)
        self._consider(key)

    def _removed(self, key: bytes, op: Op) -> None:
        self.order.remove(key)
        self._states.pop(key, None)
        self._runnable.pop(key, None)
        self.progress.errors.pop(key, None)
        self._full.discard(key)
        for waiter in self._waiters.pop(key, ()):
            self._consider(waiter)
        self._landed.set()
        self._landed = trio.Event()
        self.on_landed()

    def _responsible(self, op: Op) -> bool:
        """Whether this node carries the operation out: its owner, or the survivor that comes first."""
        node = self.node
        if node.live(op.owner):
            return op.owner == node.name
        inode = node.catalogue.view.inode(op.fid)
        if op.kind == OpKind.PUT and op.size and inode is not None:
            holders = node.holders(inode)
            return bool(holders) and holders[0] == node.name
        return node.name == min((n for n in node.catalogue.view.nodes if node.live(n)), default=node.name)

    def _consider(self, key: bytes) -> None:
        """Decide whether an operation can make progress; if it waits, remember for whom."""
        op = self.node.catalogue.view.op(key)
        if op is None or not self._responsible(op) or self.node.options.offline:
            return
        state = self._states.setdefault(key, _State())
        if state.running or key in self._runnable:
            return
        if op.kind == OpKind.PUT and not op.cancelled and self.files.busy(op.fid):
            return
        blocker = self._blocker(key, op)
        if blocker is not None:
            state.waiting_for = blocker
            self._waiters.setdefault(blocker, {})[key] = None
            if op.kind != OpKind.PUT or state.ready or op.cancelled:
                return
        else:
            state.waiting_for = None
        self._runnable[key] = None
        self._wake.set()

    def _blocker(self, key: bytes, op: Op) -> bytes | None:
        """What must land before an operation. A removal does not wait for data that the PFS has no room for."""
        passing = self._full if op.kind in (OpKind.UNLINK, OpKind.RMDIR) else ()
        return self.order.blocker(key, passing)

    async def run(self) -> None:
        """Carry out what can be carried out, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._clean_up)
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                for key in list(self._runnable):
                    del self._runnable[key]
                    state = self._states.get(key)
                    if state is not None and not state.running:
                        state.running = True
                        nursery.start_soon(self._serve, key, state)

    async def _serve(self, key: bytes, state: _State) -> None:
        op = self.node.catalogue.view.op(key)
        try:
            if op is not None:
                await self._carry_out(key, op, state)
                state.delay_s, state.failed = 0.0, False
                self.progress.errors.pop(key, None)
        except (CacheXError, OSError, trio.TooSlowError, FsError) as error:
            now = self.node.catalogue.view.op(key)
            if op is None or now is None or (now.cancelled and not op.cancelled):
                return  # removed meanwhile, with its bytes: no error
            state.delay_s = min(max(state.delay_s * 2, RETRY_FIRST_S), RETRY_MAX_S)
            state.failed = True
            if op.kind == OpKind.PUT and isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._full.add(key)
                for waiter in self._waiters.pop(key, ()):
                    self._consider(waiter)
            await self._show(key, op, error, state.delay_s)
            await trio.sleep(state.delay_s)
        finally:
            state.running = False
            if op is None or op.kind != OpKind.PUT or not self.files.busy(op.fid):
                self._consider(key)

    async def _show(self, key: bytes, op: Op, error: BaseException, delay_s: float) -> None:
        what = str(error)
        if isinstance(error, OSError) and error.errno:
            said, plain = error.strerror or "", os.strerror(error.errno)
            what = errno_name(error.errno) if said == plain else f"{said} [{errno.errorcode.get(error.errno)}]"
        if isinstance(error, trio.TooSlowError):
            what = "the PFS does not answer"
        text = f"drain: {op.kind}: {what}; next try in {delay_s:.2g} s"
        self.progress.errors[key] = text
        log.warning("%r: %s", op.path, text)
        if op.kind == OpKind.PUT:
            ctx = self.node.ctx()
            try:
                await self.node.catalogue.mutate(lambda tx: publication.note_error(tx, ctx, op.fid, text))
            except CacheXError as unavailable:
                log.warning("the error could not be recorded: %s", unavailable)

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
            record = msgspec.msgpack.decode(data, type=_Prepared)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        inode = view.inode(record.fid)
        if record.store != self.node.staging.store or hidden in self._made.get(record.fid, ()):
            return
        landed = inode.pfs.gen if inode is not None and inode.pfs is not None else 0
        if record.gen <= (_GEN_MAX if inode is None else landed) and hidden not in self._to_land(record.fid):
            await self._discard(record.fid, hidden)  # noted only if it stays: a failure is tried again
        else:
            self._made.setdefault(record.fid, {})[hidden] = record.gen

    # ---- operations
    async def _carry_out(self, key: bytes, op: Op, state: _State) -> None:
        if op.kind == OpKind.PUT:
            await self._put(key, op, state)
        else:
            async with self._meta_slots:
                if self._blocker(key, op) is None:
                    await self._other(key, op)

    async def _put(self, key: bytes, op: Op, state: _State) -> None:
        if self._unneeded(key, op):
            await self._give_up(key, op)
            return
        if self.files.busy(op.fid):
            return  # its last close brings it back: see ``released``
        if not state.ready:
            async with self._copy_slots:
                await self._prepare(op, self.node.catalogue.view.inode(op.fid))
            state.ready = True
            self._full.discard(key)
        if self._blocker(key, op) is not None:
            return
        current = self.node.catalogue.view.op(key)
        if current is None or self._unneeded(key, current):
            await self._give_up(key, op)
            return
        assert self.node.pfs is not None
        used = self._attrs(self.node.catalogue.view.inode(op.fid))
        try:
            async with self._meta_slots:
                found = await self.node.pfs.land(self._hidden(op), op.path, used, STALL_S)
        except FileNotFoundError as error:
            if error.errno == errno.ENODATA:  # the prepared file is gone: make it again and say so
                state.ready = False
                self._prepared.pop(self._hidden(op), None)
            raise
        await self._landed_put(key, op, used, found)

    def _unneeded(self, key: bytes, op: Op) -> bool:
        """Whether a PUT need not land: removed since (and no commit file wants it all the same), or superseded."""
        view = self.node.catalogue.view
        if view.inode(op.fid) is not None:
            return op.cancelled or self._superseded(key, op)
        return op.cancelled or not self.order.claimed_after(key, lambda fid: view.inode(fid) is not None)

    async def _give_up(self, key: bytes, op: Op) -> None:
        """An operation need not land any more: its prepared file goes first."""
        await self._discard(op.fid, self._hidden(op))
        await self._finish(key)

    async def _discard(self, fid: int, *names: str) -> None:
        """Remove prepared files that are not to land."""
        made = self._made.get(fid, {})
        for hidden in [name for name in names if name in made or not self._cleaned_up]:
            assert self.node.pfs is not None
            await self.node.pfs.discard(hidden, STALL_S)
            self._settle(fid, hidden)

    def _settle(self, fid: int, hidden: str) -> None:
        """A hidden name is free again."""
        self._prepared.pop(hidden, None)
        made = self._made.get(fid, {})
        made.pop(hidden, None)
        if not made:
            self._made.pop(fid, None)

    def released(self, fid: int) -> None:
        """A writer has closed a file: what waited for that may go on."""
        for key, op in self.node.catalogue.view.ops_of(fid):
            if op.kind == OpKind.PUT:
                self._consider(key)

    def _superseded(self, key: bytes, op: Op) -> bool:
        """A later content of the same file is pending and nothing in between waits for this one."""
        later = [k for k, o in self.node.catalogue.view.ops_of(op.fid) if o.kind == OpKind.PUT and o.gen > op.gen]
        return bool(later) and not self.order.commit_between(op.path, key, later[0])

    def _hidden(self, op: Op) -> str:
        return f"{op.stage or f'{op.fid:x}.{op.gen:x}'}-{op.size:x}"

    async def _prepare(self, op: Op, inode: Inode | None, tree: bytes = b"") -> None:
        """Copy the bytes of a PUT to a hidden name. ``tree``: their digest, when an fsync asks.

        What an earlier fsync has put there is used if it is the same: a staged file that is still being written keeps
        its name while its bytes change.
        """
        hidden = self._hidden(op)
        content = self.node.catalogue.view.generation(op.fid)
        if not tree and content is not None and content.gen == op.gen:
            tree = content.tree
        if tree and self._prepared.get(hidden) == tree:
            return
        self._prepared.pop(hidden, None)
        source, size = self._source(op, content)
        doubtful = op.stage in self.node.unverified or not self.node.staging.has(op.stage)
        if source is not None and size and doubtful and not await check_stage(self.node, op.stage):
            raise FsError(errno.EIO, f"the bytes on node {self.node.name} are damaged: their digest is wrong")
        if source is None:
            raise FsError(errno.EIO, f"no whole copy of generation {op.gen} on node {self.node.name}")
        assert self.node.pfs is not None
        attrs, base = self._attrs(inode), inode.pfs if inode is not None else None
        record = msgspec.msgpack.encode(
            {"path": op.path, "fid": op.fid, "gen": op.gen, "size": size, "node": self.node.name,
             "job": self.node.options.job, "tree": tree,
             "store": self.node.staging.store,
             "mode": attrs.mode, "uid": attrs.uid, "gid": attrs.gid, "mtime_ns": attrs.mtime_ns,
             "base": None if base is None else [base.ino, base.size, base.mtime_ns]}
        )  # fmt: skip
        self._made.setdefault(op.fid, {})[hidden] = op.gen
        same = content is not None and content.gen == op.gen and content.size == size
        digest = content.digest if same and content is not None and self.node.options.verify else b""
        before = self._file_at(source)
        await self.node.pfs.prepare(source, size, hidden, attrs, record, STALL_S, digest=digest)
        while (now := self._file_at(source)) != before:  # what was published has moved to a file of its own
            before = now
            await self.node.pfs.prepare(source, size, hidden, attrs, record, STALL_S, digest=digest)
        self.progress.landed_bytes += op.size

    def _source(self, op: Op, content: Generation | None) -> tuple[str | None, int]:
        """Where the bytes of a PUT lie on this node, and how many.

        A writer that the kernel served may have cut the very file after that generation was published. Then what is
        left of it lands, or the newest content, for the sake of those that wait for the name.
        """
        node = self.node
        found = "/dev/null" if not op.size else node.local_path(op.stage, op.size)
        if found is not None or content is None or content.gen <= op.gen:
            return found, op.size
        if node.staging.has(op.stage):
            return node.staging.path(op.stage), node.staging.size(op.stage)
        return node.local_path(content.stage, content.size) if content.size else "/dev/null", content.size

    @staticmethod
    def _file_at(path: str) -> int:
        try:
            return os.stat(path).st_ino
        except FileNotFoundError:
            return 0

    async def _landed_put(self, key: bytes, op: Op, used: PfsAttrs, found: PfsStat) -> None:
        """A file is under its name: what is left of earlier states goes, then the claim is made."""
        assert self.node.pfs is not None
        self._settle(op.fid, self._hidden(op))
        inode = self.node.catalogue.view.inode(op.fid)
        if inode is not None and inode.pfs is not None and inode.pfs.hidden:
            await self.node.pfs.run("unlink", b".cachexfs/held/" + inode.pfs.hidden.encode(), b"", None, STALL_S)
        await self._discard(op.fid, *self._stale(op.fid, op.gen))
        now_s = self.node.clock.now_s()
        copy = PfsCopy(op.gen, now_s, found.ino, found.size, found.mtime_ns)

        def land(tx: Tx) -> None:
            if finish_op(tx, ctx, key) is None:
                return
            now = tx.inode(op.fid)
            if now is None:
                return
            current = now.gen == op.gen
            now = msgspec.structs.replace(
                now, pfs=copy, t_pfs_s=now_s if current else now.t_pfs_s, error="" if current else now.error
            )
            tx.put(rec.inode_key(op.fid), now)
            if current and self._attrs(now) != used and not any(o.kind == OpKind.ATTR for _, o in tx.ops_of(op.fid)):
                tx.put(rec.op_key(ctx.next_op()), Op(OpKind.ATTR, op.path, ctx.node, fid=op.fid))

        ctx = self.node.ctx()
        await self.node.catalogue.mutate(land)
        self.progress.landed_ops += 1

    def _stale(self, fid: int, gen: int) -> list[str]:
        """Hidden names that fsyncs made of contents up to a generation, and that no pending operation will land."""
        wanted = self._to_land(fid)
        return [name for name, made in self._made.get(fid, {}).items() if name not in wanted and made <= gen]

    def _to_land(self, fid: int) -> set[str]:
        """Hidden names that pending operations will land."""
        return {self._hidden(op) for _, op in self.node.catalogue.view.ops_of(fid) if op.kind == OpKind.PUT}

    async def _forget_prepared(self, fid: int) -> None:
        """A file is gone that had been fsynced: so is what that prepared, once the PFS agrees."""
        delay_s = RETRY_FIRST_S
        while stale := self._stale(fid, _GEN_MAX):
            try:
                await self._discard(fid, *stale)
            except (CacheXError, OSError, trio.TooSlowError) as error:
                log.debug("prepared files of %x cannot be removed yet: %s", fid, error)
                await trio.sleep(delay_s)
                delay_s = min(2 * delay_s, RETRY_MAX_S)

    def _attrs(self, inode: Inode | None, times: DirTimes | None = None) -> PfsAttrs:
        if inode is None:  # it has been removed since, and is there for a moment
            return PfsAttrs(0o700, None, None, self.node.clock.now_ns(), self.node.clock.now_ns())
        mtime_ns = times.mtime_ns if times is not None else inode.mtime_ns
        return PfsAttrs(inode.mode, inode.uid, inode.gid, inode.atime_ns, mtime_ns)

    async def _other(self, key: bytes, op: Op) -> None:
        assert self.node.pfs is not None
        view, pfs = self.node.catalogue.view, self.node.pfs
        inode = view.inode(op.fid)
        if op.kind == OpKind.WITHDRAW:
            await self._withdraw(key, op)
            return
        if op.kind in (OpKind.ATTR, OpKind.DIRATTR):
            await self._set_attrs(key, op)
            return
        if op.kind == OpKind.MKDIR:
            await pfs.run("mkdir", op.path, b"", self._attrs(inode), STALL_S)
        elif op.kind == OpKind.SYMLINK and inode is not None:
            await pfs.run("symlink", op.path, op.path2, self._attrs(inode), STALL_S)
        elif op.kind == OpKind.MKNOD and inode is not None:
            await pfs.run(f"mknod:{inode.kind}:{inode.rdev}", op.path, b"", self._attrs(inode), STALL_S)
        elif op.kind == OpKind.RENAME:
            await self._rename(op, inode)
        elif op.kind == OpKind.LINK:
            await self._link(op, inode)
        elif op.kind == OpKind.RMDIR:
            await pfs.run("rmdir", op.path, b"", None, STALL_S)
        elif op.kind == OpKind.UNLINK:
            await pfs.run("unlink", op.path, b"", None, STALL_S)
            if op.path2:
                await pfs.run("unlink", b".cachexfs/held/" + op.path2, b"", None, STALL_S)
        if op.kind in (OpKind.SYMLINK, OpKind.MKNOD):
            await self._note_landed(key, op.fid)
        elif op.kind == OpKind.RENAME:
            await self._note_moved(key, op.fid)
        else:
            await self._finish(key)

    async def _rename(self, op: Op, inode: Inode | None) -> None:
        """A rename, recognising that it has been done before this daemon's life.

        Of a file that has been removed since, neither name is to be there: to show it under the new one even for a
        moment could complete a checkpoint whose other files are gone.
        """
        pfs = self.node.pfs
        assert pfs is not None
        if inode is not None and inode.pfs is not None and inode.pfs.hidden:
            return  # it was withdrawn, and stays where it is held
        if inode is None and (found := await self._stat(op.path)) is not None and found.kind != "d":
            await pfs.run("unlink", op.path2, b"", None, STALL_S)
            await pfs.run("unlink", op.path, b"", None, STALL_S)
            return
        try:
            await pfs.run("rename", op.path, op.path2, None, STALL_S)
        except FileNotFoundError:
            there = await self._stat(op.path2)
            if inode is None:
                if there is not None and there.kind != "d":
                    await pfs.run("unlink", op.path2, b"", None, STALL_S)
                await pfs.run("unlink", op.path, b"", None, STALL_S)  # gone, and perhaps not synced
                return
            if there is None or there.kind != inode.kind:
                raise
            if inode.pfs is not None and inode.pfs.gen and inode.kind == "f" and there.ino != inode.pfs.ino:
                raise
            # Done before, and perhaps not synced: these sync both directories.
            times = self.node.catalogue.view.dir_times(op.fid)
            await pfs.run("attr", op.path2, b"", self._attrs(inode, times), STALL_S)
            await pfs.run("unlink", op.path, b"", None, STALL_S)

    async def _link(self, op: Op, inode: Inode | None) -> None:
        """A further name. Of a file that has been removed since, it is not to be there (see ``_rename``)."""
        assert self.node.pfs is not None
        if inode is not None and inode.pfs is not None and inode.pfs.hidden:
            return
        if inode is None:
            await self.node.pfs.run("unlink", op.path2, b"", None, STALL_S)
        else:
            await self.node.pfs.run("link", op.path, op.path2, None, STALL_S)

    async def _stat(self, path: bytes) -> PfsStat | None:
        assert self.node.pfs is not None
        try:
            return await self.node.pfs.stat(path, STALL_S)
        except FileNotFoundError:
            return None

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

    async def _withdraw(self, key: bytes, op: Op) -> None:
        """Take a commit file off the PFS before what it names changes there. The claim falls first."""
        assert self.node.pfs is not None
        hidden = f"{op.fid:x}.{op.gen:x}"
        before = self.node.catalogue.view.inode(op.fid)
        again = before is not None and before.pfs is not None and before.pfs.hidden == hidden

        def fall(tx: Tx) -> bool:
            inode = tx.inode(op.fid)
            if inode is None or inode.pfs is None:
                return False
            why = "taken off the PFS, because a file that it names has changed"
            pfs = msgspec.structs.replace(inode.pfs, hidden=hidden)
            tx.put(rec.inode_key(op.fid), msgspec.structs.replace(inode, pfs=pfs, t_pfs_s=0.0, error=why))
            return True

        held = b".cachexfs/held/" + hidden.encode()
        if not await self.node.catalogue.mutate(fall):  # it was removed or replaced since
            await self.node.pfs.run("unlink", op.path, b"", None, STALL_S)
            await self.node.pfs.run("unlink", held, b"", None, STALL_S)
        else:
            try:
                await self.node.pfs.run("hide", op.path, hidden.encode(), None, STALL_S)
            except FileNotFoundError:
                content = self.node.catalogue.view.generation(op.fid)
                if not again or content is None or self.node.local_path(content.stage, content.size) is None:
                    raise
                await self.node.pfs.run("unlink", op.path, b"", None, STALL_S)  # done before: this syncs the directory
            if self.node.catalogue.view.inode(op.fid) is None:
                await self.node.pfs.run("unlink", held, b"", None, STALL_S)
        await self._finish(key)

    async def _set_attrs(self, key: bytes, op: Op) -> None:
        assert self.node.pfs is not None
        view = self.node.catalogue.view
        entry, inode = view.entry(key), view.inode(op.fid)
        if entry is None:
            return
        seen = view.entry(rec.inode_key(op.fid))
        path = op.path
        if inode is not None and (inode.pfs is None or not inode.pfs.hidden):
            times = view.dir_times(op.fid) if op.kind == OpKind.DIRATTR else None
            if op.kind == OpKind.DIRATTR:
                path = self.reader.pfs_path(op.fid) or b""
            await self.node.pfs.run("attr", path, b"", self._attrs(inode, times), STALL_S)

        def done(tx: Tx) -> None:
            now, now_inode = tx.view.entry(key), tx.view.entry(rec.inode_key(op.fid))
            unchanged = (now_inode.modified if now_inode else 0) == (seen.modified if seen else 0)
            if now is not None and now.modified == entry.modified and (unchanged or op.kind == OpKind.DIRATTR):
                tx.inode(op.fid)
                finish_op(tx, ctx, key)

        ctx = self.node.ctx()
        await self.node.catalogue.mutate(done)

    async def _finish(self, key: bytes) -> None:
        ctx = self.node.ctx()
        await self.node.catalogue.mutate(lambda tx: finish_op(tx, ctx, key))
        self.progress.landed_ops += 1

    # ---- fsync=pfs
    async def sync(self, vnode: Vnode) -> None:
        """Bytes of a file in progress, with a recovery record, fsynced on the PFS under a hidden name."""
        busy = vnode.fd >= 0 and self.files.busy(vnode.fid) and not vnode.content.open
        if vnode.dirty or busy:  # its drain waits for the writer's close
            _, size, digests = await self.files.snapshot(vnode)
            inode = self.node.catalogue.view.inode(vnode.fid)
            if inode is None:
                return
            path = self.reader.path(vnode.fid) or b""
            op = Op(OpKind.PUT, path, self.node.name, vnode.fid, vnode.content.gen + 1, size=size, stage=vnode.stage)
            async with self._copy_slots:
                await self._prepare(op, inode, digests[1])
            again = await self.files.snapshot(vnode)
            if again[1] == size and again[2][1] == digests[1]:
                self._prepared[self._hidden(op)] = digests[1]
            return
        await self.until_ready(vnode.fid)

    async def until_ready(self, fid: int) -> None:
        """Wait until the published content of a file is safe on the PFS, under its name or a hidden one."""
        view = self.node.catalogue.view
        while True:
            inode, content = view.inode(fid), view.generation(fid)
            if inode is None or content is None or content.open:
                return
            if inode.pfs is not None and inode.pfs.gen == inode.gen:
                return  # a withdrawn file, too, is there, under a hidden name
            keys = [k for k, op in view.ops_of(fid) if op.kind == OpKind.PUT and op.gen == inode.gen]
            if any((state := self._states.get(k)) is not None and state.ready for k in keys):
                return
            await self.changed()

    async def changed(self) -> None:
        """Return when an operation has landed, or soon."""
        with trio.move_on_after(0.05):
            await self._landed.wait()

    # ---- what is left
    def own_pending(self) -> list[tuple[bytes, Op]]:
        """Pending operations that this node is responsible for."""
        return [(key, op) for key, op, _ in self.node.catalogue.view.ops() if self._responsible(op)]

    def pending_bytes(self) -> int:
        """Bytes of the job that are not on the PFS yet."""
        return sum(op.size for _, op, _ in self.node.catalogue.view.ops() if op.kind == OpKind.PUT and not op.cancelled)

    def reason(self, key: bytes) -> str:
        """Why an operation has not landed, in words."""
        if key in self.progress.errors:
            return self.progress.errors[key]
        op = self.node.catalogue.view.op(key)
        blocker = self.order.blocker(key)
        waits = self.node.catalogue.view.op(blocker) if blocker is not None else None
        if waits is not None:
            return f"waits for the {waits.kind} of {quoted(waits.path)} (node {waits.owner}), which must land first"
        if op is not None and op.kind == OpKind.PUT and self.files.busy(op.fid):
            return "waits until the writer that has the file open closes it"
        if op is not None and not self.node.live(op.owner):
            return f"its node {op.owner} is lost; a survivor takes over"
        return "is being copied" if op is not None and op.kind == OpKind.PUT else "is under way"
