"""Somebody works on the PFS behind the mount's back: removes files, directories, writes others in their place.

Role: a scenario. As ``Run``; what was touched may be refused there from then on, or be shown as it was here. It is
never shown with somebody else's bytes, and holds up nothing that has nothing to do with it.
"""

from __future__ import annotations

import errno
from collections import Counter

import trio
from sim_check import Violation
from sim_client import Client
from sim_life import SimFilesystem
from sim_one import Run
from sim_store import Ino
from sim_work import Worker

from cachexfs.core.order import ancestors, covers, paths_of
from cachexfs.core.records import ROOT_FID
from cachexfs.engine.drain_reasons import why_pending
from cachexfs.engine.pfs_interface import PfsAttrs
from cachexfs.errors import FsError

REST_S = 3000.0
FOREIGN = b"somebody else's"


class Careful(Worker):
    """Does not look in the middle: what has gone with the PFS is an error, and known at the end."""

    async def start(self) -> None:
        """What was there before is known: what nobody has looked at yet, and is removed, was never there."""
        await super().start()
        await self.shown()

    def pick(self, kind: str, *, free: bool = False) -> bytes | None:
        """See ``Worker``: a commit file is not shown while a member is lost."""
        path = super().pick(kind, free=free)
        withheld = path is not None and path.endswith(b"/.metadata") and self._has_lost(path.rpartition(b"/")[0])
        return None if withheld else path

    def _has_lost(self, directory: bytes) -> bool:
        return self.world.is_touched(self.base + b"/" + directory)  # type: ignore[attr-defined,no-any-return]

    async def verify(self) -> None:
        """See ``Client``."""

    async def settle(self) -> None:
        """What a step was comes out: a supervisor repeats it, and what could not be opened is not begun."""


class Behind(Run):
    """As ``Run``, with somebody else on the PFS."""

    worker = Careful
    events = ("kill", "calm", "away", "behind", "behind", "behind")

    def __init__(self, seed: int, directory: str, *, trace: bool = False) -> None:
        super().__init__(seed, directory, trace=trace)
        self.counts: Counter[str] = Counter()
        self.touched: set[bytes] = set()  # paths, and all below them
        self._directories: set[int] = set()  # where that was, whatever their names are now
        self._fids: set[int] = set()  # files of the mount that landed there
        self.checkers.kept.excused = True
        self.checkers.excused = self.is_touched

    def is_touched(self, path: bytes) -> bool:
        """Whether somebody else has touched a path, what is above it, or below."""
        if any(covers(other, path) or covers(path, other) for other in self.touched):
            return True
        if self.log.state.find(ROOT_FID, path) in self._fids:
            return True
        above = [self.store.find(directory) for directory in (path, *ancestors(path))]
        return any(ino is not None and ino.number in self._directories for ino in above)

    def _is_supervised(self) -> bool:
        return True

    async def happen(self, event: str) -> None:
        if event == "behind":
            self.trouble = True  # what was there before the mount, and is not any more, could not be looked at
            if self.random.random() < 0.7:
                await self._evict()
            self._touch()
        else:
            await super().happen(event)

    async def _evict(self) -> None:
        """All that is on the PFS, and that it says it has, leaves memory: it is to be somebody's last copy."""
        life = await self.life()
        eviction = life.parts.keeper.eviction
        await eviction.asked(life.staging.limit_bytes)
        if not life.dead:
            before = life.staging.used_bytes
            eviction.make_room(life.staging.limit_bytes)
            self.planted = True  # as of what was there before, the PFS alone has the bytes
            self.counts["evicted"] += life.staging.used_bytes < before

    def _touch(self) -> None:
        """Somebody removes something or writes over it, and syncs it."""
        rng, store = self.random, self.store
        there = sorted(path for path in store.walk() if path.count(b"/") >= 1)
        if not there:
            return
        path = rng.choice(there)
        (parent, name), ino = store.parent(path), store.find(path)
        assert ino is not None
        how = rng.choice(["removed", "replaced", "written over"]) if ino.kind == "f" else "removed"
        self.counts[how if ino.kind == "f" else "a directory removed" if ino.kind == "d" else "removed"] += 1
        self.touched.add(path)
        numbers = {other.number for found, other in store.walk().items() if covers(path, found)}
        files = self.log.state.inodes()
        self._fids |= {fid for fid, inode in files if inode.pfs is not None and inode.pfs.ino in numbers}
        self._directories |= {parent.number, ino.number} if path.count(b"/") > 1 else {ino.number}
        self.trace(f"BEHIND {how} {path!r}")
        if how == "removed":
            store.change((parent, name, None))
        elif how == "replaced":
            store.change((parent, name, self._foreign()))
        else:
            new = self._foreign()
            ino.data, ino.attrs = new.data, new.attrs
            store.sync_file(ino)
        store.sync_directory(parent)

    def _foreign(self) -> Ino:
        now_ns = self.clock.now_ns()
        made = self.store.make("f", PfsAttrs(0o644, 0, 0, now_ns, now_ns))
        made.data = FOREIGN
        self.store.sync_file(made)
        return made

    async def _end(self, clients: list[Worker]) -> None:
        """What has nothing to do with it lands; what is shown is what was written, or an error."""
        self.calm()
        life = await self.life()
        drainer = life.parts.drainer

        def others() -> list[tuple[str, bytes, str]]:
            return [
                (op.kind, op.path, why_pending(drainer, key))
                for key, op in drainer.in_progress()
                if not any(self.is_touched(path) for path in [*paths_of(op), op.below or op.path])
            ]

        with trio.move_on_after(REST_S) as scope:
            while others() or life.pfs.busy():  # noqa: ASYNC110
                await trio.sleep(1)
        if scope.cancelled_caught:
            raise Violation(f"liveness: not on the PFS after {REST_S:.0f} s, though nobody touched it: {others()[:5]}")
        for client in clients:
            await self._look(client)
        self.checkers.memory(life)

    async def _look(self, client: Client) -> None:
        """Every file of an application, as somebody else reads it."""
        for path, node in sorted(client.tree.items()):
            if node.kind != "f":
                continue

            async def read(fs: SimFilesystem, path: bytes = path) -> bytes:
                attr = await client.locate(fs, path)
                try:
                    return await client._read(fs, attr)
                except FsError as error:
                    if error.errno in (errno.EIO, errno.ESTALE):
                        return b""
                    raise

            outcome = await (await self.life()).call(read)
            if outcome.errno == errno.ENOENT and path.endswith(b".metadata"):
                self.counts["withheld"] += 1
                continue  # a member of it is lost
            if outcome.errno or (outcome.value != node.data and not self.is_touched(client.base + b"/" + path)):
                raise Violation(f"{path!r} is {outcome.why or outcome.value!r:.80}, not {node.data[:24]!r}")
            if outcome.value == FOREIGN:
                raise Violation(f"{path!r} is shown with bytes that somebody else has written to the PFS")
            self.counts["read as written" if outcome.value == node.data else "not readable"] += 1
            if outcome.value != node.data:
                await self._check_stage(client.base + b"/" + path)

    async def _check_stage(self, path: bytes) -> None:
        """What has turned out not to be readable is not called ``pfs``."""
        life = await self.life()
        view = life.catalogue.view
        fid = view.find(ROOT_FID, path)
        stage = (await life.parts.attributes.of(fid)).get("stage") if fid is not None else None
        if fid is not None and stage == "pfs" and not view.has_ops(fid):
            raise Violation(f"claim: {path!r} is called pfs, and cannot be read")
        self.counts["not readable, and said so"] += 1
