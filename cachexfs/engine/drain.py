"""The drain: pending operations land on the PFS, in the order that promise 3 allows.

Role: level-triggered scheduling. The catalogue holds the pending operations; each node carries out its own, and a
survivor those of a lost node. ``core/waits`` says who waits for whom and what is stuck, ``owners`` whose a change is,
``drain_puts`` what need not land; ``drain_files`` carries out the files, made ready before they may land, oldest first;
``drain_names`` the rest; ``drain_errors`` shows what fails; ``claims`` decides about commit files.

Concurrency: one task per operation that makes progress, so many at a time of each kind (``Turns``), the oldest first.
An operation that waits or rests has no task, so that tens of thousands may. A failure backs off,
shows in ``error``, and is tried until it succeeds; what the PFS refuses repeatedly is *parked*: tried slowly, and
others stop waiting for it. A hung PFS holds tasks here, never the loop; while it does not answer few are tried.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

import msgspec
import trio

from cachexfs.core.records import AnyRecord, Inode, Life, Op, OpKind
from cachexfs.core.records import Node as NodeRecord
from cachexfs.core.replica import Applied
from cachexfs.core.transaction import Tx
from cachexfs.engine.content import Reader
from cachexfs.engine.drain_errors import Attempts, DrainErrors, Progress
from cachexfs.engine.drain_files import DrainFiles
from cachexfs.engine.drain_names import DrainNames
from cachexfs.engine.drain_open import StayOpen
from cachexfs.engine.drain_puts import Puts
from cachexfs.engine.files import Files
from cachexfs.engine.health import pfs_health
from cachexfs.engine.node import Node
from cachexfs.engine.owners import FENCE_S, Owners, check_reach
from cachexfs.engine.turns import CHANGES_MAX, Lane, OldestFirst, State, Turns
from cachexfs.engine.vnode import Vnode
from cachexfs.errors import CacheXError, NotDurableError

log = logging.getLogger(__name__)

STOP_BYTES_MIN = 4 << 20  # left to copy; stopping ends a child process, and less is copied in the time of the next one


def _holds(record: AnyRecord) -> object:
    """What decides whether a file's bytes are lost."""
    return (record.gen, record.copies) if isinstance(record, Inode) else None


class Drainer:
    """Carries out the pending operations that this node is responsible for."""

    def __init__(self, node: Node, files: Files, reader: Reader) -> None:
        self.node = node
        self.files = files
        self.reader = reader
        self.progress = Progress()
        self.ready = DrainFiles(node, self.progress)
        self.names = DrainNames(node, reader, self.progress)
        self.owners = Owners(node)
        self.responsible = self.owners.responsible
        self.stay_open = StayOpen(node, files)
        self.puts = Puts(node, self.owners, self.ready)
        self.waits = self.puts.waits
        self.names.order = self.waits.order
        self.errors = DrainErrors(node, self.owners, self.progress)
        self._turns = Turns(max(1, node.options.drain_workers), self._is_away)
        self._in_use: dict[int, dict[bytes, None]] = {}  # file id -> PUTs that wait for the last close
        self._nursery: trio.Nursery | None = None
        self._copy_slots = OldestFirst(max(1, node.options.drain_workers))
        self._copying: dict[bytes, trio.CancelScope] = {}
        self._meta_slots = trio.CapacityLimiter(CHANGES_MAX)
        self._landed = trio.Event()
        self.is_paused = False  # nothing begins: what the PFS has is not known yet (``mended``)
        self.on_landed: Callable[[], None] = lambda: None

    # ---- following the catalogue
    def load(self) -> None:
        """Take in what is pending when the engine starts."""
        for key, op, created in self.node.catalogue.view.ops():
            self._begin(self.waits.put(key, created, op))

    def notice(self, changes: Applied) -> None:
        """Catalogue listener."""
        view = self.node.catalogue.view
        for name in self.owners.notice(changes):
            if self._nursery is not None:
                self._nursery.start_soon(self._await_fence, name)
        for key, old, new in changes:
            if isinstance(new, Op):
                entry = view.entry(key)
                self._begin(self.waits.put(key, entry.created if entry else 0, new))
                if old is None and new.kind == OpKind.PUT:
                    self._consider(self.waits.order.puts_before(key))  # perhaps they need not land any more
            elif isinstance(old, Op):
                self._removed(key, old)
            elif isinstance(old, Inode) and (new is None or _holds(new) != _holds(old)):
                self._consider(self._concerned(int(key[2:], 16), old, new))
            elif isinstance(old or new, Life | NodeRecord):
                self._consider([k for k, _, _ in view.ops()])
        self.ready.notice(changes)
        for key, scope in self._copying.items():
            if self._is_for_nothing(key):
                scope.cancel()

    def pause(self) -> None:
        """Let nothing begin before ``resume``. Called before ``load``."""
        self.is_paused = True

    def resume(self) -> None:
        """Let begin what can."""
        self.is_paused = False
        self._consider([key for key, _, _ in self.node.catalogue.view.ops()])
        self._tell()

    def _concerned(self, fid: int, old: Inode, new: AnyRecord | None) -> list[bytes]:
        """The operations of a file whose bytes may be lost or found by a change of its record."""
        ops = self.node.catalogue.view.latest_ops_of(fid)
        if isinstance(new, Inode) and self.node.options.alone:  # nobody else has, or lands, earlier contents
            ops = takewhile(lambda row: row[1].kind != OpKind.PUT or row[1].gen >= old.gen, ops)
        return [key for key, _ in ops]

    def _removed(self, key: bytes, op: Op) -> None:
        freed = self.waits.remove(key)
        self._turns.forget(key)
        self._forget_use(key, op.fid)
        self.errors.over(key)
        self._begin(freed)
        self._tell()

    def _tell(self) -> None:
        self._landed.set()
        self._landed = trio.Event()
        self.on_landed()

    def _consider(self, keys: Iterable[bytes]) -> None:
        """Judge operations anew, and let begin what can make progress, also of what was stuck behind them."""
        self._begin(self.waits.look(keys))

    def _begin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            op = self.node.catalogue.view.op(key)
            if op is None or not self.responsible(op) or self.node.options.offline or self.is_paused:
                continue
            state = self._turns.state(key, ready=op.ready)
            self._turns.wait(self.waits.order.seq(key), self._lane_of(key, op, state))

    def _lane_of(self, key: bytes, op: Op, state: State) -> Lane | None:
        """Where an operation waits for its task; None where it can make no progress now."""
        if state.running or state.resting or (op.kind == OpKind.WITHDRAW and op.held):
            return None
        if self.owners.fence_s(op):
            return None
        if op.kind != OpKind.PUT:
            if self.waits.blocker(key) is None:
                return self._turns.changes
            if key in self.progress.errors:
                self.errors.over(key)  # it is not tried now
            return None
        if self.puts.unneeded(key, op):
            return self._turns.drops
        if self.files.busy(op.fid):
            self._in_use.setdefault(op.fid, {})[key] = None
            return None
        if not op.ready and self.puts.lost(op):
            self.errors.over(key)  # ``losses`` tells; a copy that comes back brings us here
            return None
        if not state.ready:
            return self._turns.copies
        blocker = self.waits.blocker(key)
        return self._turns.changes if blocker is None or (not op.ready and self.waits.stuck(blocker)) else None

    async def _await_fence(self, name: str) -> None:
        """A node has gone: what it had begun is taken over when nothing of it can come late any more."""
        await trio.sleep(FENCE_S)
        self._consider([key for key, op, _ in self.node.catalogue.view.ops() if op.begun and op.owner == name])

    async def run(self) -> None:
        """Carry out what can be carried out, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for name in self.owners.fences():
                nursery.start_soon(self._await_fence, name)
            nursery.start_soon(self.ready.run)
            nursery.start_soon(self.stay_open.run)
            nursery.start_soon(self._end_rests)
            while True:
                await self._turns.some()
                await self.node.foreground.pause()
                left = len(self._turns)  # what waits now waits for no other pause
                while left > 0:
                    await self._turns.some()
                    begun = list(self._turns.take())
                    left = min(left - len(begun), len(self._turns))
                    for key, state in begun:
                        nursery.start_soon(self._serve, key, state)

    def _is_away(self) -> bool:
        return self.node.pfs is not None and self.node.pfs.state != "ok"

    async def _end_rests(self) -> None:
        while True:
            self._consider(await self._turns.rested())

    async def _serve(self, key: bytes, state: State) -> None:
        op, ready = self.node.catalogue.view.op(key), state.ready
        try:
            if op is not None:
                await self._carry_out(key, op, state)
                self.errors.over(key)
                if state.ready == ready and self._goes_round(key, op, ready):
                    state.attempts.rest()
                    self._turns.rest(key)
                else:
                    state.attempts = Attempts(late=state.attempts.late)
        except (CacheXError, OSError, trio.TooSlowError) as error:
            now = self.node.catalogue.view.op(key)
            if op is None or now is None or (now.cancelled and not op.cancelled):
                return  # removed meanwhile, with its bytes: no error
            await self.errors.failed(key, op, error, state.attempts)
            self._turns.rest(key)
        finally:
            self._turns.move(state, None)
            self._consider([key])

    def _goes_round(self, key: bytes, op: Op, ready: bool) -> bool:
        """Whether nothing has come of an operation, and it would begin again at once, perhaps without end."""
        return self.node.catalogue.view.op(key) == op and self._lane_of(key, op, State(ready)) is not None

    # ---- operations
    async def _carry_out(self, key: bytes, op: Op, state: State) -> None:
        check_reach(self.node)
        if op.kind == OpKind.PUT:
            await self._put(key, op, state)
            return
        async with self._meta_slots:
            current = await self.owners.own(key, begin=op.kind != OpKind.DIRATTR)
            if current is None or self.waits.blocker(key) is not None:
                return
            if current.parked and self._made_anew(key, current):
                await self.names.finish(key)  # what it was to remove is about to be replaced
            else:
                await self.names.carry_out(key, current)

    def _made_anew(self, key: bytes, op: Op) -> bool:
        """Whether a removal that the PFS refuses has been followed by something new under the name."""
        if op.kind not in (OpKind.RMDIR, OpKind.UNLINK):
            return False
        makes = (OpKind.MKDIR,) if op.kind == OpKind.RMDIR else (OpKind.PUT, OpKind.SYMLINK)
        later = self.waits.order.next_at(key)
        return later is not None and later.kind in makes

    async def _put(self, key: bytes, op: Op, state: State) -> None:
        if self.puts.unneeded(key, op):
            if self._is_withheld(op):
                await self._withhold(key, op, state)
            else:
                await self._give_up(key, op)
            return
        if self.files.busy(op.fid):
            return  # its last close brings it back: see ``released``
        if op.ready and not state.ready and not self.ready.has_source(op):
            state.ready = True  # by the node that had it in between; if it is not there landing finds out, and says so
        if not state.ready and self.puts.is_gone(key, op):
            await self.puts.tear(key, op)
            return
        if not state.ready:
            await self.files.publishing.late_digests.wait(op.fid)  # its recovery record has them
            async with self._copy_slots.slot(self.waits.order.seq(key)):
                current = await self.owners.own(key, begin=False)
                if current is None or self.files.busy(op.fid):
                    return  # others may have carried it out while this one waited
                if current != op:
                    return  # it is to land something else, or nothing any more: looked at anew
                if not await self._copy(key, op):
                    await self._give_up(key, op)
                    return
            state.ready = True
        blocker = self.waits.blocker(key)
        if blocker is not None:
            await self._note_ready(key, ready=self.waits.stuck(blocker) or op.ready or self.puts.is_only_copy(op))
            return
        async with self._meta_slots:
            self._turns.move(state, self._turns.changes)
            current, there = await self.owners.own(key, begin=False), self.node.catalogue.view.op(key)
            if current is not None and not self.puts.unneeded(key, current):
                if not await self.ready.land(key, current):
                    state.ready = False
                    await self._note_ready(key, ready=False)
                    raise OSError(errno.EIO, "the prepared file is gone")
            elif there is None or (current is not None and not self._is_withheld(current)):
                await self._give_up(key, op)

    async def _copy(self, key: bytes, op: Op) -> bool:
        """Make a file ready. False: it has been removed meanwhile, and was not copied any further."""
        with trio.CancelScope() as scope:
            self._copying[key] = scope
            try:
                await self.ready.prepare(op, self.node.catalogue.view.inode(op.fid))
            finally:
                del self._copying[key]
        return not scope.cancelled_caught

    def _is_for_nothing(self, key: bytes) -> bool:
        """Whether a file that is being copied is removed, needed by no commit file, and far from done.

        Not one with a newer content: who writes it again and again would never get it there.
        """
        op = self.node.catalogue.view.op(key)
        if op is None or self.node.catalogue.view.has_inode(op.fid) or not self.puts.unneeded(key, op):
            return False
        under_way = self.ready.copies.get(op.hidden)
        return under_way is not None and under_way.size - under_way.copied > STOP_BYTES_MIN

    def _is_withheld(self, op: Op) -> bool:
        """Whether a commit file that must not be seen is what the mount has: its bytes are to be safe all the same."""
        inode = self.node.catalogue.view.inode(op.fid)
        current = op.cancelled and inode is not None and inode.gen == op.gen and op.size > 0
        return current and self.ready.has_source(op) and not self.files.busy(op.fid)

    async def _withhold(self, key: bytes, op: Op, state: State) -> None:
        """It lands under a hidden name, from where it comes back once it is whole (``claims``)."""
        if not state.ready:
            await self.files.publishing.late_digests.wait(op.fid)
            async with self._copy_slots.slot(self.waits.order.seq(key)):
                if await self.owners.own(key, begin=False) != op:
                    return
                await self.ready.prepare(op, self.node.catalogue.view.inode(op.fid))
            state.ready = True
        async with self._meta_slots:
            current = await self.owners.own(key, begin=False)
            if current is not None and current.cancelled and self._is_withheld(current):
                state.ready = await self.ready.land(key, current, f"{op.fid:x}.{op.gen:x}")

    async def _note_ready(self, key: bytes, *, ready: bool) -> None:
        """Tell the others, where a file may stay ready for long, or is not ready any more."""

        def note(tx: Tx) -> None:
            op = tx.read(key)
            if isinstance(op, Op) and (op.ready != ready or op.parked):
                tx.put(key, msgspec.structs.replace(op, ready=ready, parked=""))

        op = self.node.catalogue.view.op(key)
        if op is not None and (op.ready != ready or op.parked):
            await self.node.catalogue.mutate(note)
        self._tell()

    async def _give_up(self, key: bytes, op: Op) -> None:
        """An operation need not land any more: its prepared file goes first, unless it is a later content's, too."""
        others = [o for k, o in self.node.catalogue.view.ops_of(op.fid) if k != key and o.kind == OpKind.PUT]
        if all(other.hidden != op.hidden for other in others):
            await self.ready.discard(op.fid, op.hidden, foreign=op.ready)
        await self.names.finish(key)

    def released(self, fid: int) -> None:
        """A writer has closed a file: what waited for that may go on."""
        if not self.files.busy(fid):
            self._consider(self._in_use.pop(fid, ()))

    def _forget_use(self, key: bytes, fid: int) -> None:
        waiting = self._in_use.get(fid, {})
        waiting.pop(key, None)
        if not waiting:
            self._in_use.pop(fid, None)

    # ---- fsync=pfs
    async def sync(self, vnode: Vnode) -> None:
        """Bytes of a file in progress, with a recovery record, fsynced on the PFS under a hidden name."""
        busy = vnode.fd >= 0 and self.files.busy(vnode.fid) and not vnode.content.open
        if vnode.dirty or busy:  # its drain waits for the writer's close
            _, size, digests = await self.files.publishing.snapshot(vnode)
            inode = self.node.catalogue.view.inode(vnode.fid)
            if inode is None:
                return
            path = self.reader.path(vnode.fid) or b""
            # As its publication will have it, or has: what is ready under another name would never be landed.
            gen, stage = vnode.content.gen + vnode.dirty, vnode.stage if size else ""
            op = Op(OpKind.PUT, path, self.node.name, vnode.fid, gen, size=size, stage=stage)
            async with self._copy_slots.slot((0, b"")):  # somebody waits for it
                await self.ready.prepare(op, inode, digests[1])
            again = await self.files.publishing.snapshot(vnode)
            if again[1] == size and again[2][1] == digests[1]:
                await self.ready.fsynced(op, digests[1])
            elif again[1] < size or (await self.files.publishing.digests_of(vnode, vnode.stage, size))[1] != digests[1]:
                raise NotDurableError("the file was changed while it was copied: its record is not of these bytes")
            return
        await self.until_ready(vnode.fid)

    async def until_ready(self, fid: int) -> None:
        """Wait until the published content of a file is safe on the PFS, under its name or a hidden one."""
        with self.node.foreground.awaited():
            await self._until_ready(fid)

    async def _until_ready(self, fid: int) -> None:
        while not self.is_safe(fid):
            await self.changed()

    def is_safe(self, fid: int) -> bool:
        """Whether the published content of a file is on the PFS, under its name or a hidden one, or there is none."""
        view = self.node.catalogue.view
        inode, content = view.inode(fid), view.generation(fid)
        if inode is None or content is None or content.open:
            return True
        if self.node.was_landed(inode):
            return True  # a withdrawn file, too, is there, under a hidden name
        puts = [(k, op) for k, op in view.ops_of(fid) if op.kind == OpKind.PUT and op.gen == inode.gen]
        return any(self.is_ready(k, op) for k, op in puts)

    def is_ready(self, key: bytes, op: Op) -> bool:
        """Whether the bytes of a PUT lie under a hidden name, as far as this node knows."""
        return op.ready or self._turns.is_ready(key)

    async def changed(self) -> None:
        """Return when an operation has landed or its file is ready, or soon."""
        with trio.move_on_after(0.05):
            await self._landed.wait()

    # ---- what is left
    def own_pending(self) -> list[tuple[bytes, Op]]:
        """Pending operations that this node is responsible for."""
        return [(key, op) for key, op, _ in self.node.catalogue.view.ops() if self.responsible(op)]

    def left(self) -> int:
        """How many these are; one more while what the PFS has is not known."""
        return len(self.own_pending()) + self.is_paused

    def in_progress(self) -> Iterator[tuple[bytes, Op]]:
        """Of these, what does not wait for a commit file that nobody has written yet, or for bytes that are lost."""
        ops = self.node.catalogue.view.ops()
        return ((k, op) for k, op, _ in ops if not self._rests_on_others(k, op) and self.responsible(op))

    def _rests_on_others(self, key: bytes, op: Op) -> bool:
        """Whether an operation is stuck, and not tried now and then all the same."""
        copies = op.kind == OpKind.PUT and not op.ready
        tried = op.parked and (copies or self.waits.blocker(key) is None)
        return self.waits.stuck(key) and not tried

    def is_idle(self) -> bool:
        """Whether nothing is in progress."""
        return not self.is_paused and next(self.in_progress(), None) is None

    def held_up(self) -> int:
        """How many of these wait because the PFS does not answer."""
        away = bool(self.progress.held_up) or pfs_health(self.node).away
        return sum(1 for _ in self.in_progress()) if away else 0

    def pending_bytes(self) -> int:
        """Bytes of the job that are not on the PFS yet."""
        return sum(op.size for _, op, _ in self.node.catalogue.view.ops() if op.kind == OpKind.PUT and not op.cancelled)
