"""An application in the simulation: operations from the seed, each compared with a model.

Role: works in a directory of its own. ``tree`` is what the mount must show (path -> kind, mode, bytes or target).
Every step is atomic for the model: when the daemon dies during it, the mount shows the state before or after.
"""

from __future__ import annotations

import errno
import os
import pickle
import random
import struct
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio
from sim_check import Checkers, Violation
from sim_life import Life, Outcome

from cachexfs.core.changes import NewAttrs
from cachexfs.core.records import ROOT_FID
from cachexfs.engine.files import Handle
from cachexfs.engine.filesystem import Attr, Filesystem

Node = tuple[str, int, bytes]
Tree = dict[bytes, Node]
FILES = [b"a", b"b", b"c"]
DIRECTORIES = [b"d", b"e"]
STEPS = [b"step-1", b"step-2"]


class World(Protocol):
    """What a client needs of the run."""

    checkers: Checkers
    random: random.Random
    fsync: str
    tight: bool  # staging is small
    trouble: bool  # the PFS may fail now

    async def life(self) -> Life:
        """The daemon that lives now, or the next one."""
        ...

    def next_save(self) -> int:
        """A fresh number."""
        ...


class Killed(Exception):
    """The daemon died during a step."""


def commit_file(number: int, members: dict[bytes, bytes]) -> bytes:
    """Bytes of a DCP ``.metadata`` that names these members, without torch."""

    def text(value: str) -> bytes:
        raw = value.encode()
        return b"X" + struct.pack("<I", len(raw)) + raw

    def thing(module: str, name: str, **state: bytes) -> bytes:
        items = b"".join(text(key) + value for key, value in state.items())
        return b"c" + f"torch.distributed.checkpoint.{module}\n{name}\n".encode() + b")\x81}(" + items + b"ub"

    def whole(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    infos = b""
    for at, (member, data) in enumerate(members.items()):
        infos += thing("metadata", "MetadataIndex", fqn=text(f"t{at}"), index=whole(0))
        infos += thing(
            "filesystem", "_StorageInfo", relative_path=text(member.decode()), offset=whole(0), length=whole(len(data))
        )
    state = {"state_dict_metadata": b"}", "planner_data": whole(number), "storage_data": b"}(" + infos + b"u"}
    return b"\x80\x02" + thing("metadata", "Metadata", **state) + pickle.STOP


class Client:
    """One application."""

    def __init__(self, world: World, name: bytes) -> None:
        self.world, self.base = world, name
        self.tree: Tree = {}
        self._after: Tree = {}
        self.steps = 0

    # ---- steps
    async def step(
        self, after: Tree, function: Callable[[Filesystem], Awaitable[object]], *accept: int, life: Life | None = None
    ) -> Outcome:
        """One operation that turns the model into ``after``, unless it fails with an errno that is accepted."""
        life = life or await self.world.life()
        self._after = after
        self.steps += 1
        outcome = await life.call(function)
        if outcome.killed:
            raise Killed
        if not outcome.errno:
            self.tree = after
        elif outcome.errno not in accept:
            raise Violation(f"step {self.steps} of {self.base!r}: {errno.errorcode[outcome.errno]}")
        return outcome

    async def locate(self, fs: Filesystem, path: bytes) -> Attr:
        """lookup(2) of each name."""
        found = await fs.lookup(ROOT_FID, self.base)
        for name in path.split(b"/") if path else ():
            found = await fs.lookup(found.ino, name)
        return found

    async def parent(self, fs: Filesystem, path: bytes) -> tuple[int, bytes]:
        above, _, name = path.rpartition(b"/")
        return (await self.locate(fs, above)).ino, name

    async def settle(self) -> None:
        """After a death: the mount shows the state before or after the step that was interrupted."""
        shown = await self.shown()
        if shown == self.tree:
            return
        if shown != self._after:
            raise Violation(
                f"killed in step {self.steps} of {self.base!r}: {difference(shown, self.tree, self._after)}"
            )
        self.tree = self._after

    async def shown(self) -> Tree:
        """Everything below the directory, as the mount shows it."""
        while True:
            life = await self.world.life()
            found: Tree = {}
            outcome = await life.call(lambda fs, found=found: self._walk(fs, b"", found))  # type: ignore[misc]
            if outcome.killed:
                continue
            if outcome.errno == errno.EIO and self.world.trouble:
                await trio.sleep(1)
                continue
            if outcome.errno:
                raise Violation(f"{self.base!r} cannot be read: {errno.errorcode[outcome.errno]}")
            return found

    async def _walk(self, fs: Filesystem, path: bytes, found: Tree) -> None:
        directory = await self.locate(fs, path)
        for name, attr in await fs.names(directory.ino):
            below = path + b"/" + name if path else name
            if attr.kind == "d":
                found[below] = ("d", attr.mode, b"")
                await self._walk(fs, below, found)
            elif attr.kind == "l":
                found[below] = ("l", 0o777, await fs.readlink(attr.ino))
            else:
                found[below] = ("f", attr.mode, await self._read(fs, attr))

    async def _read(self, fs: Filesystem, attr: Attr) -> bytes:
        handle = await fs.open(attr.ino, os.O_RDONLY)
        try:
            pieces = [await fs.read(handle, at, 4096) for at in range(0, attr.size, 4096)]
            return b"".join(pieces)
        finally:
            await fs.release(handle)

    # ---- the workload
    async def start(self) -> None:
        while True:
            life = await self.world.life()
            outcome = await life.call(lambda fs: fs.mkdir(ROOT_FID, self.base, NewAttrs(0o755, 0, 0)))
            if not outcome.killed and outcome.errno in (0, errno.EEXIST):
                return
            await trio.sleep(1)

    async def work(self, count: int) -> None:
        """``count`` operations."""
        rng = self.world.random
        ways = [
            (self.write, 6), (self.append, 3), (self.patch, 3), (self.truncate, 2), (self.rename_file, 3),
            (self.rename_directory, 2), (self.unlink, 3), (self.mkdir, 3), (self.rmdir, 2), (self.symlink, 1),
            (self.chmod, 1), (self.utimens, 1), (self.save, 5), (self.damage, 1), (self.remove_checkpoint, 2),
            (self.verify, 2), (self.refused, 1), (self.unlinked, 1),
        ]  # fmt: skip
        for _ in range(count):
            way = rng.choices([w for w, _ in ways], [n for _, n in ways])[0]
            try:
                await way()
            except Killed:
                await self.settle()
            await trio.sleep(rng.choice([0, 0, 0.01, 0.3]))

    def pick(self, kind: str, *, free: bool = False) -> bytes | None:
        """A path that exists; ``free``: not in a checkpoint."""
        found = [p for p, n in self.tree.items() if n[0] == kind and not (free and b"step" in p)]
        return self.world.random.choice(found) if found else None

    def fresh(self, names: list[bytes]) -> bytes:
        """A path in one of the directories, existing or not."""
        rng = self.world.random
        places = [b"", *(p for p, n in self.tree.items() if n[0] == "d" and p.count(b"/") < 2 and b"step" not in p)]
        place, name = rng.choice(places), rng.choice(names)
        return place + b"/" + name if place else name

    def bytes_for(self, path: bytes) -> bytes:
        rng = self.world.random
        size = rng.choice([0, 1, 100, 3000, 4096, 9000, 20000])
        return (b"%s %d " % (path, self.world.next_save())).ljust(size, b".")[:size]

    async def write(self) -> None:
        path = self.fresh(FILES)
        if self.tree.get(path, ("f",))[0] == "f":
            await self.write_file(path, self.bytes_for(path))

    async def write_file(self, path: bytes, data: bytes) -> bool:
        """open("wb"), write, perhaps fsync, close. False when there was no room."""
        life, mode = await self.world.life(), 0o644
        existed = path in self.tree
        if existed:
            mode = self.tree[path][1]
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        opened = await self.step(
            {**self.tree, path: ("f", mode, b"")}, lambda fs: self._open(fs, path, flags), life=life
        )
        handle = opened.value
        assert isinstance(handle, Handle)
        return await self._fill(life, handle, path, 0, data)

    async def _open(self, fs: Filesystem, path: bytes, flags: int) -> Handle:
        parent, name = await self.parent(fs, path)
        try:
            found = await fs.lookup(parent, name)
        except Exception:
            if not flags & os.O_CREAT:
                raise
            return (await fs.create(parent, name, NewAttrs(0o644, 0, 0), flags))[0]
        return await fs.open(found.ino, flags)

    async def _fill(self, life: Life, handle: Handle, path: bytes, offset: int, data: bytes) -> bool:
        """Write at an offset in pieces, perhaps fsync, flush and release."""
        rng, whole = self.world.random, True
        pieces = max(1, rng.choice([1, 1, 2, 3]))
        length = -(-len(data) // pieces)
        for start in range(0, len(data), length or 1):
            piece, at = data[start : start + length], offset + start
            kind, mode, old = self.tree[path]
            new = old.ljust(at, b"\0")[:at] + piece + old[at + len(piece) :]
            outcome = await self.step(
                {**self.tree, path: (kind, mode, new)}, lambda fs, at=at, piece=piece: fs.write(handle, at, piece),  # type: ignore[misc]
                *self.no_room(), life=life,
            )  # fmt: skip
            if outcome.errno:
                whole = False
                break
            if rng.random() < 0.15:
                await self.fsync(life, handle, path)
        if rng.random() < 0.2:
            await self.fsync(life, handle, path)
        await self.step(self.tree, lambda fs: fs.flush(handle), life=life)
        if rng.random() < 0.1:
            await self.fsync(life, handle, path)
        await self.step(self.tree, lambda fs: fs.release(handle), life=life)
        return whole

    def no_room(self) -> tuple[int, ...]:
        found = (errno.ENOSPC,) if self.world.tight else ()
        return (*found, errno.EIO) if self.world.trouble and self.world.tight else found

    def gone(self) -> tuple[int, ...]:
        """What has no name any more and was evicted before cannot be read."""
        found = (errno.EIO,) if self.world.trouble else ()
        return (*found, errno.ESTALE) if self.world.tight else found

    async def fsync(self, life: Life, handle: Handle, path: bytes) -> None:
        fresh = handle.vnode.content.open and not handle.vnode.dirty  # empty, and not drained while it is open
        outcome = await self.step(self.tree, lambda fs: fs.fsync(handle), errno.EIO, life=life)
        if outcome.errno and not self.world.trouble:
            raise Violation(f"fsync of {path!r} failed without a reason")
        if not outcome.errno and self.world.fsync == "pfs" and (self.tree[path][2] or not fresh):
            self.world.checkers.fsynced(self.base + b"/" + path, self.tree[path][2])

    async def append(self) -> None:
        path = self.pick("f", free=True)
        if path is not None:
            await self.change(path, len(self.tree[path][2]), self.bytes_for(path))

    async def patch(self) -> None:
        path = self.pick("f", free=True)
        if path is not None:
            at = self.world.random.randrange(len(self.tree[path][2]) + 5000)
            await self.change(path, at, self.bytes_for(path)[:5000])

    async def change(self, path: bytes, offset: int, data: bytes) -> bool:
        life = await self.world.life()
        opened = await self.step(self.tree, lambda fs: self._open(fs, path, os.O_RDWR), life=life)
        assert isinstance(opened.value, Handle)
        return await self._fill(life, opened.value, path, offset, data)

    async def truncate(self) -> None:
        path = self.pick("f", free=True)
        if path is None:
            return
        kind, mode, old = self.tree[path]
        size = self.world.random.choice([0, 1, len(old) // 2, len(old) + 3000])
        after = {**self.tree, path: (kind, mode, old[:size].ljust(size, b"\0"))}

        async def cut(fs: Filesystem) -> None:
            await fs.setattr((await self.locate(fs, path)).ino, None, size=size)

        await self.step(after, cut, *self.no_room())

    async def rename_file(self) -> None:
        old, new = self.pick("f", free=True), self.fresh(FILES)
        if old is None or self.tree.get(new, ("f",))[0] == "d":
            return
        await self.rename(old, new)

    async def rename(self, old: bytes, new: bytes) -> None:
        after = {p: n for p, n in self.tree.items() if p not in (old, new)}
        after[new] = self.tree[old]
        for path, node in self.tree.items():
            if path.startswith(old + b"/"):
                del after[path]
                after[new + path[len(old) :]] = node

        async def move(fs: Filesystem) -> None:
            (parent, name), (parent2, name2) = await self.parent(fs, old), await self.parent(fs, new)
            await fs.rename(parent, name, parent2, name2, 0)

        await self.step(after, move)

    async def rename_directory(self) -> None:
        old = self.pick("d")
        new = self.world.random.choice(STEPS) if old is not None and old in STEPS else self.fresh(DIRECTORIES)
        if old is None or (new + b"/").startswith(old + b"/"):
            return
        there = self.tree.get(new)
        if there is None or (there[0] == "d" and not any(p.startswith(new + b"/") for p in self.tree)):
            await self.rename(old, new)

    async def unlink(self) -> None:
        path = self.pick(self.world.random.choice("fl"), free=True)
        if path is not None:
            await self.remove(path)

    async def remove(self, path: bytes) -> None:
        async def unlink(fs: Filesystem) -> None:
            await fs.unlink(*await self.parent(fs, path))

        await self.step({p: n for p, n in self.tree.items() if p != path}, unlink)

    async def mkdir(self, path: bytes | None = None) -> None:
        path = path or self.fresh(DIRECTORIES)
        if path in self.tree:
            return

        async def make(fs: Filesystem) -> None:
            await fs.mkdir(*await self.parent(fs, path), NewAttrs(0o755, 0, 0))

        await self.step({**self.tree, path: ("d", 0o755, b"")}, make)

    async def rmdir(self, path: bytes | None = None) -> None:
        path = path or self.pick("d")
        if path is None or any(p.startswith(path + b"/") for p in self.tree):
            return

        async def remove(fs: Filesystem) -> None:
            await fs.rmdir(*await self.parent(fs, path))

        await self.step({p: n for p, n in self.tree.items() if p != path}, remove)

    async def symlink(self) -> None:
        path = self.fresh([b"link"])
        target = self.world.random.choice([b"a", b"step-1", b"../x", b"/abs"])
        if path in self.tree:
            return

        async def make(fs: Filesystem) -> None:
            parent, name = await self.parent(fs, path)
            await fs.symlink(parent, name, target, NewAttrs(0o777, 0, 0))

        await self.step({**self.tree, path: ("l", 0o777, target)}, make)

    async def chmod(self) -> None:
        path = self.pick(self.world.random.choice("fd"))
        if path is None:
            return
        kind, _, data = self.tree[path]
        mode = self.world.random.choice([0o700, 0o755, 0o640] if kind == "d" else [0o600, 0o444, 0o755])

        async def change(fs: Filesystem) -> None:
            await fs.setattr((await self.locate(fs, path)).ino, None, mode=mode)

        await self.step({**self.tree, path: (kind, mode, data)}, change)

    async def utimens(self) -> None:
        path = self.pick(self.world.random.choice("fd"))
        if path is None:
            return
        time_ns = self.world.random.randrange(10**18)

        async def change(fs: Filesystem) -> None:
            found = await fs.setattr((await self.locate(fs, path)).ino, None, atime_ns=time_ns, mtime_ns=time_ns)
            if found.mtime_ns != time_ns:
                raise Violation(f"utimens of {path!r} is not shown")

        await self.step(self.tree, change)

    # ---- checkpoints
    async def save(self) -> None:
        """As DCP saves: members, then ``.metadata`` under another name, the old one away, rename."""
        rng, directory, number = self.world.random, self.world.random.choice(STEPS), self.world.next_save()
        await self.mkdir(directory)
        members = {}
        for rank in range(rng.choice([1, 2, 3])):
            name = b"__%d_0.distcp" % rank
            members[name] = (b"save %d rank %d " % (number, rank)).ljust(rng.choice([40, 4096, 10000]), b"x")
            if not await self.write_file(directory + b"/" + name, members[name]):
                return
        commit = commit_file(number, members)
        self.world.checkers.saves.made[commit] = members
        if not await self.write_file(directory + b"/.metadata.tmp", commit):
            return
        if directory + b"/.metadata" in self.tree and rng.random() < 0.5:
            await self.remove(directory + b"/.metadata")
        await self.rename(directory + b"/.metadata.tmp", directory + b"/.metadata")

    async def damage(self) -> None:
        """A member alone, or something beside the members, is written again or removed."""
        path = self.pick("f")
        if path is None or b"step" not in path:
            return
        if self.world.random.random() < 0.3:
            await self.remove(path)
        elif not path.endswith(b".metadata"):
            await self.change(path, 0, self.bytes_for(path)[:50])
        else:
            await self.write_file(path.rpartition(b"/")[0] + b"/log", self.bytes_for(path))

    async def remove_checkpoint(self) -> None:
        """rm -r, in whatever order the names come."""
        directory = self.world.random.choice(STEPS)
        if directory not in self.tree:
            return
        names = [p for p in self.tree if p.startswith(directory + b"/")]
        self.world.random.shuffle(names)
        for name in names:
            await self.remove(name)
        await self.rmdir(directory)

    # ---- looking
    async def verify(self) -> None:
        shown = await self.shown()
        if shown != self.tree:
            raise Violation(f"contents of {self.base!r}: {difference(shown, self.tree)}")

    async def refused(self) -> None:
        """What POSIX refuses is refused, and changes nothing."""
        path = self.pick("d")
        if path is None:
            return

        async def bad(fs: Filesystem) -> None:
            await fs.mkdir(*await self.parent(fs, path), NewAttrs(0o755, 0, 0))

        async def missing(fs: Filesystem) -> None:
            await fs.unlink((await self.locate(fs, path)).ino, b"not there")

        for function, code in ((bad, errno.EEXIST), (missing, errno.ENOENT)):
            outcome = await self.step(self.tree, function, code)
            if outcome.errno != code:
                raise Violation(f"{path!r}: {errno.errorcode[code]} was to be refused")

    async def unlinked(self) -> None:
        """An open file goes on without its name."""
        path = self.pick("f", free=True)
        if path is None:
            return
        life = await self.world.life()
        opened = await self.step(self.tree, lambda fs: self._open(fs, path, os.O_RDWR), life=life)
        handle, data = opened.value, self.tree[path][2]
        assert isinstance(handle, Handle)
        await self.remove(path)

        async def use(fs: Filesystem) -> None:
            found = await fs.read(handle, 0, len(data) + 1)
            if found != data:
                raise Violation(f"{path!r} without a name is {found[:24]!r}, not {data[:24]!r}")
            await fs.write(handle, len(data), b"more")
            if await fs.read(handle, len(data), 10) != b"more":
                raise Violation(f"{path!r} without a name does not take writes")

        await self.step(self.tree, use, *self.no_room(), *self.gone(), life=life)
        await self.step(self.tree, lambda fs: fs.flush(handle), life=life)
        await self.step(self.tree, lambda fs: fs.release(handle), life=life)


def difference(shown: Tree, *wanted: Tree) -> str:
    """The first path on which they differ."""
    for path in sorted({*shown, *(p for tree in wanted for p in tree)}):
        if shown.get(path) not in [tree.get(path) for tree in wanted]:
            return f"{path!r} is {_short(shown.get(path))}, not {' or '.join(_short(t.get(path)) for t in wanted)}"
    return "a mixture of the states before and after"


def _short(node: Node | None) -> str:
    return "nothing" if node is None else f"{node[0]} {node[1]:o} {len(node[2])} bytes {node[2][:24]!r}"
