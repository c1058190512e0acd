"""An application in the simulation, and the model that each of its steps is compared with.

Role: works in a directory of its own. ``tree`` is what the mount must show: path -> ``Node``.
Every step is atomic for the model: when the daemon dies during it, the mount shows the state before or after; under a
supervisor the step is repeated instead, as the kernel's request is.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import trio
import xxhash
from sim_check import Checkers, Violation
from sim_kernel import Kernel, OpenFile
from sim_life import Life, Outcome, SimFilesystem

from cachexfs.core.changes import NewAttrs
from cachexfs.core.records import FID_STEP, ROOT_FID
from cachexfs.engine.stat import Attr
from cachexfs.errors import FsError

READ_BYTES = 4096
LOST = b"lost with its node"
RELEASE_S_MAX = 0.3
UNREADABLE_S_MAX = 1000.0  # what could not be looked at because of a PFS that was away can be by then


class Node(NamedTuple):
    """A name. ``file`` tells whether two names are the same file; two trees need not use the same numbers."""

    kind: str
    mode: int
    data: bytes = b""
    file: int = 0
    xattrs: tuple[tuple[bytes, bytes], ...] = ()


Tree = dict[bytes, Node]


class World(Protocol):
    """What a client needs of the run."""

    checkers: Checkers
    random: random.Random
    kernel: Kernel
    fsync: str
    tight: bool  # staging is small
    trouble: bool  # the PFS may fail now
    refusals: tuple[int, ...]  # what any call may fail with while there is trouble
    planted: bool  # the PFS was populated before, and some of it may have to be looked at first

    loss: Loss | None  # that the clients have not met yet

    async def life(self) -> Life:
        """The daemon that lives now, or the next one."""
        ...

    def next_save(self) -> int:
        """A fresh number."""
        ...

    def trace(self, text: str) -> None:
        """Say what happens, if somebody listens."""
        ...

    def looked(self, life: Life) -> None:
        """After each step."""
        ...

    async def all_there(self) -> None:
        """Wait until no node is down."""

    async def others(self) -> Life:
        """A daemon through which somebody else looks."""
        ...


@dataclass
class Loss:
    """A node is gone with its memory. ``published``: path -> (digest of the content, whether it was called safe).
    ``denied``: names on the PFS that were not found there though they were."""

    published: dict[bytes, tuple[bytes, bool]]
    denied: set[bytes]


class Killed(Exception):
    """The daemon died during a step, and nobody repeats it."""


class Client:
    """One application: its steps, its model, its looks."""

    def __init__(self, world: World, name: bytes) -> None:
        self.world, self.base = world, name
        self.tree: Tree = {}
        self._after: Tree = {}
        self._files = 0
        self.synced: dict[bytes, bytes] = {}  # bytes of open files for which an fsync has returned
        self.steps = 0
        self._has_unpublished = False  # a close has failed: others see its bytes only when that works again

    # ---- steps
    async def step(
        self,
        after: Tree,
        function: Callable[[SimFilesystem], Awaitable[object]],
        *accept: int,
        life: Life | None = None,
        done: int = 0,
    ) -> Outcome:
        """One operation that turns the model into ``after``, unless it fails with an errno that is accepted.

        ``done``: how a repetition says that it was applied before. ``life``: the step makes sense only there and under
        the same supervisor.
        """
        wanted, self._after = life, after
        self.steps += 1
        number, again = self.steps, False
        while True:
            life = await self.world.life()
            if self.world.loss is not None:
                raise Killed
            if wanted is not None and wanted.mount != life.mount:
                raise Killed
            outcome = await life.call(function)
            self.world.trace(f"{self.base!r} step {number}: {_told(outcome)} {_changes(self.tree, after)}")
            if not outcome.killed:
                break
            if not life.supervised:
                raise Killed
            again = True
        if self.world.trouble:
            accept = (*accept, *self.world.refusals)
        if self.world.planted and self.world.trouble:
            accept = (*accept, errno.EIO)  # what was there before could not be looked at
        if again and outcome.errno == done:
            outcome.errno = 0
        if not outcome.errno:
            self.tree = after
        elif outcome.errno not in accept:
            raise Violation(f"step {number} of {self.base!r}: {errno.errorcode[outcome.errno]}: {outcome.why}")
        self.world.looked(life)
        return outcome

    async def locate(self, fs: SimFilesystem, path: bytes) -> Attr:
        """lookup(2) of each name."""
        found = await fs.lookup(ROOT_FID, self.base)
        for name in path.split(b"/") if path else ():
            found = await fs.lookup(found.ino, name)
            fs.kernel.given(fs.files, found)
        return found

    async def parent(self, fs: SimFilesystem, path: bytes) -> tuple[int, bytes]:
        above, _, name = path.rpartition(b"/")
        return (await self.locate(fs, above)).ino, name

    async def settle(self) -> None:
        """After a death: the mount shows the state before or after the step that was interrupted."""
        while True:
            try:
                await self._settle()
            except Killed:
                continue  # its node was lost meanwhile
            return

    async def _settle(self) -> None:
        if (loss := self.world.loss) is not None:
            await self._settle_loss(loss)
            return
        self.synced.clear()
        shown = await self.shown()
        if same(shown, self.tree):
            return
        if not same(shown, self._after):
            raise Violation(
                f"killed in step {self.steps} of {self.base!r}: {difference(shown, self.tree, self._after)}"
            )
        self.tree = self._after

    async def _settle_loss(self, loss: Loss) -> None:
        """After the loss of the node: names as before or after; what was called safe, or fsynced, is there."""
        await self.world.life()
        await trio.sleep(30)  # others have noticed, and taken over
        await self.world.all_there()  # what only a second node has that is down is not lost
        self.world.loss = None
        shown = await self.shown(lost=True)
        if self.world.loss is not None:
            return
        names = [
            {p: n._replace(data=b"", file=0) for p, n in t.items() if not p.endswith(b"/.metadata")}
            for t in (shown, self.tree, self._after)
        ]  # a commit file is not shown while a member is lost
        if names[0] not in names[1:]:
            raise Violation(f"names of {self.base!r} after the loss of a node: {difference(*names)}")
        for path, node in shown.items():
            if node.kind != "f":
                continue
            digest, safe = loss.published.get(self.base + b"/" + path, (b"", False))
            old = [t[path].data for t in (self.tree, self._after) if path in t]
            if path in self.synced:
                # An open file that goes to the PFS directly is safe there, for ``recover``.
                there = node.data == self.synced[path] or self.world.checkers.recoverable(self.synced[path])
                if not there and node.data not in old:
                    raise Violation(
                        f"{path!r} was fsynced as {self.synced[path][:24]!r}; after the loss {_short(node)}"
                    )
            # A PFS that is whole and says that a name is not there is believed: its only copy is lost then.
            elif node.data == LOST and safe and self.base + b"/" + path not in loss.denied:
                raise Violation(f"{path!r} was called safe, and is lost with its node")
            elif node.data not in (LOST, *old) and xxhash.xxh3_128_digest(node.data) != digest:
                raise Violation(f"{path!r} is {_short(node)} after the loss of a node")
        # Nor is it shown when its own bytes alone are lost: nobody could finish that checkpoint.
        unseen = {p.rpartition(b"/")[0] for p in self.tree if p.endswith(b"/.metadata") and p in self._after} - {
            p.rpartition(b"/")[0] for p in shown if p.endswith(b"/.metadata")
        }
        self.tree = self._after = shown
        self.synced.clear()
        lost = {p.rpartition(b"/")[0] if b"step" in p else p for p, n in shown.items() if n.data == LOST}
        for path in sorted(lost | {p for p in unseen if p in shown}):
            await self._remove_lost(path)

    async def _remove_lost(self, path: bytes) -> None:
        """rm -r of what is of no use any more; a commit file that is not shown goes with its directory."""
        for below in [p for p in self.tree if p.startswith(path + b"/") and self.tree[p].kind != "d"]:
            await self._remove_lost(below)
        directory = self.tree[path].kind == "d"

        async def remove(fs: SimFilesystem) -> None:
            where = await self.parent(fs, path)
            await (fs.rmdir(*where) if directory else fs.unlink(*where))

        await self.step({p: n for p, n in self.tree.items() if p != path}, remove)

    # ---- the model
    def new_file(self) -> int:
        self._files += 1
        return self._files

    def put(self, path: bytes, data: bytes) -> Tree:
        """The tree after a file's bytes have changed, under all its names."""
        return self.replaced(path, data=data)

    def replaced(self, path: bytes, **fields: object) -> Tree:
        node = self.tree.get(path)
        if node is None:
            return self.tree
        alike = [p for p, n in self.tree.items() if n.file == node.file and n.kind == "f"] if node.kind == "f" else []
        return {**self.tree, **{p: self.tree[p]._replace(**fields) for p in {path, *alike}}}  # type: ignore[arg-type]

    # ---- open files
    async def open(self, path: bytes, flags: int, after: Tree | None = None, life: Life | None = None) -> OpenFile:
        """open(2)."""
        outcome = await self.step(
            self.tree if after is None else after, lambda fs: self._open(fs, path, flags), life=life
        )
        if outcome.errno:
            raise Killed  # it could not be looked at: as good as not begun
        assert isinstance(outcome.value, OpenFile)
        return outcome.value

    async def _open(self, fs: SimFilesystem, path: bytes, flags: int) -> OpenFile:
        parent, name = await self.parent(fs, path)
        kernel = fs.kernel
        try:
            found = await fs.lookup(parent, name)
        except FsError as error:
            if error.errno != errno.ENOENT or not flags & os.O_CREAT:
                raise
            handle, found = await fs.create(parent, name, NewAttrs(0o644, 0, 0), flags)
            kernel.given(fs.files, found)
        else:
            kernel.given(fs.files, found)
            with kernel.opening(found.ino):
                handle = await fs.open(found.ino, flags)
        opened = kernel.opened(fs, handle)
        self.world.trace(f"{self.base!r} opened {path!r} ino {opened.ino:x} flags {flags:o} backed {opened.backed}")
        return opened

    async def write_at(self, life: Life, of: OpenFile, path: bytes, at: int, piece: bytes) -> bool:
        """pwrite(2). ``path``: one of the file's names, or one that it had."""
        old = self.tree[path].data if path in self.tree else b""
        after = self.put(path, old.ljust(at, b"\0")[:at] + piece + old[at + len(piece) :])

        async def write(fs: SimFilesystem) -> int:
            if not of.passed:
                return await fs.write(of.handle, at, piece)
            self.world.kernel.write(of, at, piece)
            return len(piece)

        outcome = await self.step(after, write, *self.no_room(), life=life)
        if outcome.errno or outcome.value == len(piece):
            return not outcome.errno
        assert isinstance(outcome.value, int)
        end = at + outcome.value  # a part: the rest is tried again
        self.tree = self._after = self.put(path, (old.ljust(at, b"\0")[:at] + piece)[:end] + old[end:])
        return await self.write_at(life, of, path, end, piece[outcome.value :])

    async def close(self, life: Life, of: OpenFile) -> None:
        """close(2): returns after FLUSH, RELEASE comes some time later."""
        # What NVMe does not sync is an error, and published as soon as it does: here it is shown all the same.
        outcome = await self.step(self.tree, lambda fs: fs.flush(of.handle), *self.no_room(), life=life)
        self._has_unpublished = self._has_unpublished or bool(outcome.errno)
        if of not in self.world.kernel.opens:
            raise Killed
        self.world.kernel.closed(of)
        self.synced.clear()  # what is published now is as safe as it says
        now = await self.world.life()
        delay_s = self.world.random.choice([0, 0, 0.001, RELEASE_S_MAX])
        if now.nursery is not None and now.mount == life.mount:
            now.nursery.start_soon(self._release, now, of, delay_s)
        if not delay_s:
            await trio.testing.wait_all_tasks_blocked()

    async def _release(self, life: Life, of: OpenFile, delay_s: float) -> None:
        await trio.sleep(delay_s)
        await life.call(lambda fs: fs.release(of.handle))

    # ---- what may fail
    def no_room(self) -> tuple[int, ...]:
        found = (errno.ENOSPC,) if self.world.tight else ()
        return (*found, errno.EIO) if self.world.trouble and self.world.tight else found

    def gone(self) -> tuple[int, ...]:
        """What has no name any more and was evicted before cannot be read."""
        found = (errno.EIO,) if self.world.trouble else ()
        return (*found, errno.ESTALE) if self.world.tight or self.world.planted else found

    # ---- looking
    async def shown(self, *, elsewhere: bool = False, lost: bool = False) -> Tree:
        """Everything below the directory, as the mount shows it, ``elsewhere`` perhaps on another node; with ``lost``,
        ``LOST`` instead of bytes that no node has any more."""
        end_s = trio.current_time() + UNREADABLE_S_MAX
        while True:
            life = await (self.world.others() if elsewhere else self.world.life())
            found: Tree = {}
            outcome = await life.call(lambda fs, found=found: self._walk(fs, b"", found, lost))  # type: ignore[misc]
            if outcome.killed:
                continue
            if self.world.loss is not None and not lost:
                raise Killed
            if outcome.errno == errno.EIO and self.world.trouble and trio.current_time() < end_s:
                await trio.sleep(1)
                continue
            if outcome.errno:
                raise Violation(f"{self.base!r} cannot be read: {errno.errorcode[outcome.errno]}: {outcome.why}")
            if self._withheld(found) and not lost and trio.current_time() < end_s:
                await trio.sleep(1)
                continue
            return found

    def _withheld(self, found: Tree) -> bool:
        """Whether a commit file is not shown, because the PFS denied a member at first: reading has found that."""
        commits = [path for path in self.tree if path.endswith(b"/.metadata") and path in self._after]
        return self.world.trouble and any(p not in found and p.rpartition(b"/")[0] in found for p in commits)

    async def _walk(self, fs: SimFilesystem, path: bytes, found: Tree, lost: bool) -> None:
        directory = await self.locate(fs, path)
        for name, attr in await fs.names(directory.ino):
            try:
                fs.kernel.given(fs.files, attr)
            except FsError as error:
                if error.errno != errno.ESTALE:
                    continue  # removed since the listing
                attr = await fs.lookup(directory.ino, name)  # forgotten meanwhile: the kernel looks again
                fs.kernel.given(fs.files, attr)
            below = path + b"/" + name if path else name
            xattrs = tuple(sorted((await fs.user_xattrs(attr.ino)).items()))
            if attr.kind == "d":
                found[below] = Node("d", attr.mode, xattrs=xattrs)
                await self._walk(fs, below, found, lost)
            elif attr.kind == "l":
                found[below] = Node("l", 0o777, await fs.readlink(attr.ino))
            elif attr.kind == "f":
                try:
                    data = await self._read(fs, attr)
                except FsError:
                    if not lost or (await fs.parts.attributes.of(attr.ino // FID_STEP * FID_STEP))["stage"] != "lost":
                        raise
                    data = LOST
                found[below] = Node("f", attr.mode, data, attr.ino, xattrs)
            else:
                found[below] = Node(attr.kind, attr.mode)
        for attr in await fs.names(directory.ino) if not path else ():
            if attr[1].kind == "f" and attr[1].nlink < 1:
                raise Violation(f"{attr[0]!r} is shown with {attr[1].nlink} links")

    async def _read(self, fs: SimFilesystem, attr: Attr) -> bytes:
        with fs.kernel.opening(attr.ino):
            of = fs.kernel.opened(fs, await fs.open(attr.ino, os.O_RDONLY))
        try:
            return await self.read_all(fs, of, attr.size)
        finally:
            if of in fs.kernel.opens:
                fs.kernel.closed(of)
            with suppress(FsError):  # nobody hears of RELEASE: it may try to publish what a writer's close could not
                await fs.release(of.handle)

    async def read_all(self, fs: SimFilesystem, of: OpenFile, size: int) -> bytes:
        """read(2) until ``size`` bytes are there or the end."""
        if of.backed:
            return os.pread(of.fd, size, 0)
        pieces = [await fs.read(of.handle, at, READ_BYTES) for at in range(0, size, READ_BYTES)]
        return b"".join(pieces)

    async def verify(self) -> None:
        """Everybody sees what was closed."""
        shown = await self.shown(elsewhere=not (self._has_unpublished and self.world.trouble))
        if not same(shown, self.tree):
            raise Violation(f"contents of {self.base!r}: {difference(shown, self.tree)}")

    async def start(self) -> None:
        while True:
            life = await self.world.life()
            outcome = await life.call(lambda fs: fs.mkdir(ROOT_FID, self.base, NewAttrs(0o755, 0, 0)))
            if not outcome.killed and outcome.errno in (0, errno.EEXIST):
                return
            await trio.sleep(1)


def _told(outcome: Outcome) -> str:
    return "killed" if outcome.killed else errno.errorcode[outcome.errno] if outcome.errno else "done"


def _changes(before: Tree, after: Tree) -> str:
    changed = [p for p in {**before, **after} if before.get(p) != after.get(p)]
    return ", ".join(f"{p!r}: {_short(after.get(p))}" for p in changed)


def same(one: Tree, two: Tree) -> bool:
    """Whether two trees are alike but for the numbers of their files."""
    return difference(one, two) == ""


def difference(shown: Tree, *wanted: Tree) -> str:
    """The first path on which they differ; empty if they do not (of one wanted tree)."""
    for path in sorted({*shown, *(p for tree in wanted for p in tree)}):
        found = _plain(shown.get(path))
        if found not in [_plain(tree.get(path)) for tree in wanted]:
            return f"{path!r} is {_short(found)}, not {' or '.join(_short(t.get(path)) for t in wanted)}"
    if len(wanted) > 1:
        return "a mixture of the states before and after"
    links = [
        {n.file: {p for p, o in t.items() if o.kind == "f" and o.file == n.file} for n in t.values()}
        for t in (shown, *wanted)
    ]
    for path, node in shown.items():
        if node.kind == "f" and links[0][node.file] != links[1][wanted[0][path].file]:
            return f"{path!r} is the same file as {links[0][node.file]}, not {links[1][wanted[0][path].file]}"
    return ""


def _plain(node: Node | None) -> Node | None:
    return None if node is None else node._replace(file=0)


def _short(node: Node | None) -> str:
    if node is None:
        return "nothing"
    return f"{node.kind} {node.mode:o} {len(node.data)} bytes {node.data[:24]!r} {dict(node.xattrs) or ''}"
