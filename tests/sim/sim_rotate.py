"""Checkpoints as frameworks save and rotate them: by all nodes together, each into its directory, the last few kept.

Role: a scenario. A save's ranks write their members on different nodes; it is made in its directory, or in another that
is renamed then; the next may begin before it is complete. Then a pointer is written, and the oldest go. What an
application is refused ends its save, as it would end a job. Once a whole checkpoint is on the PFS there is one at every
moment, a power cut there included, unless the mount has no other whose bytes are somewhere and that the PFS takes, and
``status`` says that they are removed too fast, or lost.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import trio
import xxhash
from sim_check import COMMIT, POINTER, Violation, commit_file
from sim_life import Life, SimFilesystem
from sim_steps import Steps
from sim_store import Ino
from sim_work import Worker

from cachexfs.core.changes import NewAttrs
from cachexfs.core.order import covers, paths_of
from cachexfs.core.records import ROOT_FID
from cachexfs.errors import FsError

FILE, DIRECTORY = NewAttrs(0o644, 0, 0), NewAttrs(0o755, 0, 0)
CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


class RefusedError(Exception):
    """What an application asked was not done: its save ends."""


class Saver(Worker):
    """Saves and rotates; the steps of saves that overlap come in an order that the seed chooses."""

    cluster: Rotate
    saved: list[bytes]

    async def work(self, count: int) -> None:
        """See ``Worker``. ``count``: steps."""
        self.cluster, self.saved = self.world.cluster, []  # type: ignore[attr-defined]
        rng, going = self.world.random, list[AsyncIterator[None]]()
        for _ in range(2 * count):
            if not going or (len(going) < self.cluster.overlap and rng.random() < 0.3):
                going.append(self._save(self.world.next_save()))
            save = rng.choice(going)
            try:
                await anext(save)
            except (StopAsyncIteration, RefusedError):
                going.remove(save)
            await trio.sleep(rng.choice([0, 0, 0.01, 0.3, self.cluster.pause_s]))
        for save in going:
            await save.aclose()  # type: ignore[attr-defined]

    async def _ask(self, function: Callable[[SimFilesystem], Awaitable[object]]) -> None:
        """A request on some node."""
        seat = self.world.random.choice(self.cluster.seats)
        outcome = await (await seat.life()).call(function)
        if outcome.killed or outcome.errno:
            raise RefusedError

    async def _save(self, number: int) -> AsyncIterator[None]:
        rng, name = self.world.random, b"step-%d" % number
        made_in = rng.choice([name, b"tmp-%d" % number])
        await self._ask(lambda fs: self._mkdir(fs, made_in))
        members = {
            b"__%d_0.distcp" % rank: b"save %d rank %d " % (number, rank) for rank in range(rng.choice([1, 2, 3]))
        }
        members = {name: data.ljust(rng.choice([40, 4096, 10000]), b"x") for name, data in members.items()}
        for member, data in members.items():
            yield
            await self._put(made_in + b"/" + member, data)
        commit = commit_file(number, members)
        self.world.checkers.saves.made[commit] = members
        yield
        await self._put(made_in + b"/.metadata.tmp", commit)
        yield
        await self._move(made_in + b"/.metadata.tmp", made_in + b"/" + COMMIT)
        if made_in != name:
            yield
            await self._move(made_in, name)
        self.saved.append(name)
        yield
        await self._put(POINTER, name)
        while len(self.saved) > self.cluster.keep:
            await self._remove(self.saved.pop(0))
            yield

    async def _mkdir(self, fs: SimFilesystem, path: bytes) -> None:
        await fs.mkdir(*await self.parent(fs, path), DIRECTORY)

    async def _put(self, path: bytes, data: bytes) -> None:
        async def put(fs: SimFilesystem) -> None:
            parent, name = await self.parent(fs, path)
            try:
                handle = await fs.open((await fs.lookup(parent, name)).ino, CREATE)
            except FsError:
                handle, _ = await fs.create(parent, name, FILE, CREATE)
            try:
                await fs.write(handle, 0, data)
                if self.world.random.random() < 0.2:
                    await fs.fsync(handle)
                await fs.flush(handle)
            finally:
                await fs.release(handle)

        await self._ask(put)

    async def _move(self, old: bytes, new: bytes) -> None:
        async def move(fs: SimFilesystem) -> None:
            await fs.rename(*await self.parent(fs, old), *await self.parent(fs, new), 0)

        await self._ask(move)

    async def _remove(self, directory: bytes) -> None:
        """rm -r, in whatever order the names come."""

        async def remove(fs: SimFilesystem) -> None:
            ino = (await self.locate(fs, directory)).ino
            names = [name for name, _ in await fs.names(ino)]
            self.world.random.shuffle(names)
            for name in names:
                await fs.unlink(ino, name)
            await fs.rmdir(*await self.parent(fs, directory))

        await self._ask(remove)

    async def verify(self) -> None:
        """What is shown at the end is what the PFS is to have."""
        self.tree = self._after = await self.shown()

    async def settle(self) -> None:
        """See ``Client``: a lost node has ended its saves."""
        self.world.loss = None

    async def save_again(self, commits: set[bytes]) -> None:
        """See ``Worker``: nothing is overwritten here. What is not whole goes, as whoever starts again removes it."""
        life = await self.world.life()
        for directory in [path for path, node in (await self.shown(lost=True)).items() if node.kind == "d"]:
            fid = (await self.locate(life.filesystem, directory)).ino
            if (await life.parts.attributes.of(fid)).get("restartable", "no") == "no":
                with contextlib.suppress(RefusedError):
                    await self._remove(directory)


class Rotate(Steps):
    """As ``Steps``, with savers that rotate."""

    worker = Saver

    def __init__(self, seed: int, directory: str, *, trace: bool = False, fsync: str = "") -> None:
        super().__init__(seed, directory, trace=trace, fsync=fsync)
        rng = self.random
        self.keep, self.overlap, self.pause_s = rng.choice([1, 1, 2, 3]), rng.choice([1, 2]), rng.choice([0.1, 1, 20])
        self.events = rng.choice(
            [
                (*Steps.events, "slow"),
                ("away", "away", "slow", "calm"),
                ("slow",),
                ("kill", "strike", "away", "stick", "slow", "calm"),
            ]
        )
        self.first_s = rng.choice([0, 30, 30])  # nothing happens before there is one, but for so long at most
        self._has: set[bytes] = set()  # bases that have had a whole checkpoint on the PFS

    def stepped(self, what: str) -> None:
        """See ``Cluster``."""
        super().stepped(what)
        self._one_is_there(what)

    async def happen(self, event: str, seat: object) -> None:
        """See ``Cluster``."""
        with trio.move_on_after(self.first_s):
            while not self._has:  # noqa: ASYNC110
                await trio.sleep(0.1)
        if event == "slow":
            self.faults.slow_s = self.random.choice([1, 5, 15])
            await trio.sleep(self.random.choice([0, 1, 30, 100]))
            return
        await super().happen(event, seat)  # type: ignore[arg-type]
        if event == "cut":
            self._one_is_there("a power cut")

    def _one_is_there(self, when: str) -> None:
        for base, directory in self.store.root.entries.items():
            if base == b".cachexfs":
                continue
            if self._whole(directory):
                landed = any(self._has_landed(base + b"/" + name) for name in self._whole(directory, kept=True))
                self._has |= {base} if landed else set()
            elif base in self._has:
                self._has.discard(base)
                self.counts["none is there"] += 1
                if why := self._why_none(base):
                    raise Violation(f"rotation: after {when}, {base!r} has no whole checkpoint on the PFS: {why}")

    def _has_landed(self, path: bytes) -> bool:
        """Whether the catalogue knows that a commit file has come to its place."""
        state = self.log.state
        fid = state.find(ROOT_FID, path + b"/" + COMMIT)
        inode = state.inode(fid) if fid is not None else None
        there = inode is not None and inode.pfs is not None and inode.pfs.gen == inode.gen
        return there and fid is not None and not state.is_moving(fid)

    # ---- why none is there
    def _why_none(self, base: bytes) -> str:
        """Why that must not be; empty where the mount has no other that could land, and that is told."""
        others = self._whole_in_mount(base)
        coming = [path for path in others if not self._is_parked(path)]
        if coming:
            return f"{coming[0]!r} is whole in the mount, and on its way"
        self.counts["parked" if others else "none is whole in the mount"] += 1
        lives = [seat.current for seat in self.seats if seat.current is not None and not seat.current.dead]
        is_told = others or not lives or any(self._says_why(life, base) for life in lives)
        return "" if is_told else "nothing is to take its place, and nobody says so"

    @staticmethod
    def _says_why(life: Life, base: bytes) -> bool:
        """Whether ``status`` says that they are removed too fast, or that bytes of what the mount has are lost."""
        lost = (path for path, _, _ in life.parts.losses.errors())
        return "outrun" in life.node.errors or any(covers(base, path) for path in lost)

    def _whole_in_mount(self, base: bytes) -> list[bytes]:
        """Checkpoints of an application that are whole in the catalogue, of whose bytes a live node has each.

        One that is made in another directory counts from its renaming on: before, nobody knows that it is the next.
        """
        state, found = self.log.state, []
        commits = {xxhash.xxh3_128_digest(commit): members for commit, members in self.saves.made.items()}
        above = state.find(ROOT_FID, base)
        for name, entry in state.children(above).items() if above is not None else ():
            files = state.children(entry.fid) if entry.kind == "d" and name.startswith(b"step-") else {}
            commit = state.generation(files[COMMIT].fid) if COMMIT in files else None
            members = commits.get(commit.digest) if commit is not None else None
            if members is None or not self._is_somewhere(files[COMMIT].fid):
                continue
            if all(name in files and self._is_as(files[name].fid, data) for name, data in members.items()):
                found.append(base + b"/" + name)
        return found

    def _is_as(self, fid: int, data: bytes) -> bool:
        content = self.log.state.generation(fid)
        return content is not None and content.digest == xxhash.xxh3_128_digest(data) and self._is_somewhere(fid)

    def _is_somewhere(self, fid: int) -> bool:
        """Whether a file's bytes have landed, or a live node has them."""
        state = self.log.state
        inode, content = state.inode(fid), state.generation(fid)
        if inode is None or content is None:
            return False
        if inode.pfs is not None and inode.pfs.gen == inode.gen and not inode.pfs.missing:
            return True
        lives = [seat.current for seat in self.seats if seat.current is not None and state.is_live(seat.name)]
        return any(self.checkers.has(life, content) for life in lives)

    def _is_parked(self, path: bytes) -> bool:
        """Whether the PFS has refused, repeatedly, something that brings a checkpoint there."""
        names = [path, *(op.path for _, op, _ in self.log.state.ops() if op.path2 == path)]
        ops = [op for _, op, _ in self.log.state.ops() if op.parked]
        return any(covers(name, other) or covers(other, name) for op in ops for other in paths_of(op) for name in names)

    def _whole(self, base: Ino, *, kept: bool = False) -> list[bytes]:
        found = []
        for name, directory in (base.kept if kept else base.entries).items():
            files = {
                n: (i.kept_data if kept else i.data) for n, i in (directory.kept if kept else directory.entries).items()
            }
            commit = files.get(COMMIT)
            if commit is not None and not self.saves.lacking(commit, files):
                found.append(name)
        return found
