"""What applications do in the simulation: operations that the seed chooses.

Role: ``Worker`` carries them out as steps of its ``Client``; each says what the tree is afterwards.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable

import trio
from sim_check import Violation, commit_file
from sim_client import Client, Killed, Node, Tree
from sim_kernel import OpenFile
from sim_life import Life, SimFilesystem

from cachexfs.core.changes import NewAttrs

FILES = [b"a", b"b", b"c"]
DIRECTORIES = [b"d", b"e"]
STEPS = [b"step-1", b"step-2"]
CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


class Worker(Client):
    """A client with a workload."""

    async def work(self, count: int) -> None:
        """``count`` operations."""
        rng = self.world.random
        ways: list[tuple[Callable[[], Awaitable[object]], int]] = [
            (self.write, 6), (self.append, 3), (self.patch, 3), (self.truncate, 2), (self.rename_file, 3),
            (self.rename_directory, 2), (self.unlink, 3), (self.mkdir, 3), (self.rmdir, 2), (self.symlink, 1),
            (self.chmod, 1), (self.utimens, 1), (self.save, 5), (self.damage, 1), (self.remove_checkpoint, 2),
            (self.verify, 2), (self.refused, 1), (self.unlinked, 1), (self.link, 2), (self.fifo, 1), (self.xattr, 1),
            (self.mixed, 3),
        ]  # fmt: skip
        for _ in range(count):
            way = rng.choices([w for w, _ in ways], [n for _, n in ways])[0]
            self.world.trace(f"{self.base!r} {way.__name__}")
            try:
                await way()
            except Killed:
                await self.settle()
            await trio.sleep(rng.choice([0, 0, 0.01, 0.3]))
            if rng.random() < 0.2:
                self.world.kernel.shrink((await self.world.life()).parts.files)

    # ---- choosing
    def pick(self, kind: str, *, free: bool = False) -> bytes | None:
        """A path that exists; ``free``: not in a checkpoint."""
        found = [p for p, n in self.tree.items() if n.kind == kind and not (free and b"step" in p)]
        return self.world.random.choice(found) if found else None

    def fresh(self, names: list[bytes]) -> bytes:
        """A path in one of the directories, existing or not."""
        rng = self.world.random
        places = [b"", *(p for p, n in self.tree.items() if n.kind == "d" and p.count(b"/") < 2 and b"step" not in p)]
        place, name = rng.choice(places), rng.choice(names)
        return place + b"/" + name if place else name

    def bytes_for(self, path: bytes) -> bytes:
        rng = self.world.random
        size = rng.choice([0, 1, 100, 3000, 4096, 9000, 20000])
        return (b"%s %d " % (path, self.world.next_save())).ljust(size, b".")[:size]

    def without(self, path: bytes) -> Tree:
        return {p: n for p, n in self.tree.items() if p != path}

    # ---- files
    async def write(self) -> None:
        path = self.fresh(FILES)
        if path not in self.tree or self.tree[path].kind == "f":
            await self.write_file(path, self.bytes_for(path))

    def created(self, path: bytes) -> Tree:
        """The tree after open(O_CREAT | O_TRUNC)."""
        if path in self.tree:
            return self.put(path, b"")
        return {**self.tree, path: Node("f", 0o644, b"", self.new_file())}

    async def write_file(self, path: bytes, data: bytes) -> bool:
        """open("wb"), write, perhaps fsync, close. False when there was no room."""
        life = await self.world.life()
        of = await self.open(path, CREATE, self.created(path), life)
        return await self._fill(life, of, path, 0, data)

    async def _fill(self, life: Life, of: OpenFile, path: bytes, offset: int, data: bytes) -> bool:
        """Write at an offset in pieces, perhaps fsync, flush and release."""
        rng, whole = self.world.random, True
        pieces = max(1, rng.choice([1, 1, 2, 3]))
        length = -(-len(data) // pieces)
        for start in range(0, len(data), length or 1):
            if not await self.write_at(life, of, path, offset + start, data[start : start + length]):
                whole = False
                break
            if rng.random() < 0.15:
                await self.fsync(life, of, path)
        if rng.random() < 0.2:
            await self.fsync(life, of, path)
        if rng.random() < 0.1:  # a duplicate is closed
            await self.step(self.tree, lambda fs: fs.flush(of.handle), *self.no_room(), life=life)
            if rng.random() < 0.5:
                await self.fsync(life, of, path)
        await self.close(life, of)
        return whole

    async def fsync(self, life: Life, of: OpenFile, path: bytes) -> None:
        vnode = of.handle.vnode
        fresh = vnode.content.open and not vnode.dirty  # empty, and not drained while it is open
        data = self.tree[path].data
        outcome = await self.step(self.tree, lambda fs: fs.fsync(of.handle), errno.EIO, life=life)
        if outcome.errno and not self.world.trouble:
            raise Violation(f"fsync of {path!r} failed without a reason: {outcome.why}")
        if not outcome.errno and self.world.fsync == "partner" and data and vnode.dirty:
            self.synced[path] = data
        if not outcome.errno and self.world.fsync == "pfs" and (data or not fresh):
            self.world.checkers.fsynced(self.base + b"/" + path, data)

    async def append(self) -> None:
        """O_APPEND: the kernel asks for the size and writes there."""
        path = self.pick("f", free=True)
        if path is None:
            return
        life, piece = await self.world.life(), self.bytes_for(path) or b"+"
        of = await self.open(path, os.O_WRONLY | os.O_APPEND, life=life)
        for _ in range(self.world.random.choice([1, 1, 3])):
            if not await self.write_at(life, of, path, len(self.tree[path].data), piece):
                break
        await self.close(life, of)

    async def patch(self) -> None:
        path = self.pick("f", free=True)
        if path is not None:
            at = self.world.random.randrange(len(self.tree[path].data) + 5000)
            await self.change(path, at, self.bytes_for(path)[:5000])

    async def change(self, path: bytes, offset: int, data: bytes) -> bool:
        life = await self.world.life()
        return await self._fill(life, await self.open(path, os.O_RDWR, life=life), path, offset, data)

    async def mixed(self) -> None:
        """Several have one file open, in different ways, and write, look, sync and close as it comes."""
        rng, path = self.world.random, self.fresh([*FILES, b"shared"])
        if path in self.tree and self.tree[path].kind != "f":
            return
        life = await self.world.life()
        opens = [await self.open(path, CREATE, self.created(path), life)]
        for _ in range(rng.randrange(3, 12)):
            way = rng.choice(["open", "write", "write", "close", "fsync", "look", "truncate", "wait"])
            if way == "open" and len(opens) < 3:
                opens.append(await self.open(path, rng.choice([os.O_RDONLY, os.O_WRONLY, os.O_RDWR]), life=life))
            writers = [of for of in opens if of.flags & (os.O_WRONLY | os.O_RDWR)]
            if way == "write" and writers:
                size = len(self.tree[path].data)
                at = rng.choice([0, size, rng.randrange(size + 1)])
                await self.write_at(life, rng.choice(writers), path, at, self.bytes_for(path)[:6000])
            elif way == "close" and opens:
                await self.close(life, opens.pop(rng.randrange(len(opens))))
            elif way == "fsync" and writers:
                await self.fsync(life, rng.choice(writers), path)
            elif way == "look":
                await self._look(life, opens, path)
            elif way == "truncate" and writers:
                await self._cut_open(life, rng.choice(writers), path)
            elif way == "wait":
                await trio.sleep(rng.choice([0.02, 0.1, 2]))
        for of in opens:
            await self.close(life, of)

    async def _look(self, life: Life, opens: list[OpenFile], path: bytes) -> None:
        """What fstat and read of each open file say."""
        data = self.tree[path].data

        async def look(fs: SimFilesystem) -> None:
            for of in opens:
                if of.flags & os.O_WRONLY:
                    continue
                size = (await fs.getattr(of.ino)).size
                found = await self.read_all(fs, of, size)
                if found != data or size != len(data):
                    raise Violation(f"{path!r}, open, is {size} bytes {found[:24]!r}, not {len(data)} {data[:24]!r}")

        await self.step(self.tree, look, *self.gone(), life=life)

    async def _cut_open(self, life: Life, of: OpenFile, path: bytes) -> None:
        """ftruncate(2)."""
        old = self.tree[path].data
        size = self.world.random.choice([0, len(old) // 2, len(old) + 3000])

        async def cut(fs: SimFilesystem) -> None:
            await fs.setattr(of.ino, of.handle, size=size)

        await self.step(self.put(path, old[:size].ljust(size, b"\0")), cut, *self.no_room(), life=life)

    async def truncate(self) -> None:
        path = self.pick("f", free=True)
        if path is None:
            return
        old = self.tree[path].data
        size = self.world.random.choice([0, 1, len(old) // 2, len(old) + 3000])

        async def cut(fs: SimFilesystem) -> None:
            await fs.setattr((await self.locate(fs, path)).ino, None, size=size)

        await self.step(self.put(path, old[:size].ljust(size, b"\0")), cut, *self.no_room())

    # ---- names
    async def rename_file(self) -> None:
        old, new = self.pick("f", free=True), self.fresh(FILES)
        if old is not None and (new not in self.tree or self.tree[new].kind != "d"):
            await self.rename(old, new)

    async def rename(self, old: bytes, new: bytes) -> None:
        after = {p: n for p, n in self.tree.items() if p not in (old, new)}
        after[new] = self.tree[old]
        for path, node in self.tree.items():
            if path.startswith(old + b"/"):
                del after[path]
                after[new + path[len(old) :]] = node
        if new in self.tree and self.tree[old].kind == "f" and self.tree[new].file == self.tree[old].file:
            after = self.tree  # two names of one file: POSIX does nothing

        async def move(fs: SimFilesystem) -> None:
            (parent, name), (parent2, name2) = await self.parent(fs, old), await self.parent(fs, new)
            await fs.rename(parent, name, parent2, name2, 0)

        await self.step(after, move, done=errno.ENOENT)

    async def rename_directory(self) -> None:
        old = self.pick("d")
        new = self.world.random.choice(STEPS) if old is not None and old in STEPS else self.fresh(DIRECTORIES)
        if old is None or (new + b"/").startswith(old + b"/"):
            return
        there = self.tree.get(new)
        if there is None or (there.kind == "d" and not any(p.startswith(new + b"/") for p in self.tree)):
            await self.rename(old, new)

    async def unlink(self) -> None:
        path = self.pick(self.world.random.choice("fflp"), free=True)
        if path is not None:
            await self.remove(path)

    async def remove(self, path: bytes) -> None:
        async def unlink(fs: SimFilesystem) -> None:
            await fs.unlink(*await self.parent(fs, path))

        await self.step(self.without(path), unlink, done=errno.ENOENT)

    async def link(self) -> None:
        old, new = self.pick("f", free=True), self.fresh([*FILES, b"hard"])
        if old is None or new in self.tree:
            return

        async def link(fs: SimFilesystem) -> None:
            await fs.link((await self.locate(fs, old)).ino, *await self.parent(fs, new))

        await self.step({**self.tree, new: self.tree[old]}, link, done=errno.EEXIST)

    async def fifo(self) -> None:
        path = self.fresh([b"fifo"])
        if path in self.tree:
            return

        async def make(fs: SimFilesystem) -> None:
            await fs.mknod(*await self.parent(fs, path), "p", 0, NewAttrs(0o600, 0, 0))

        await self.step({**self.tree, path: Node("p", 0o600)}, make, done=errno.EEXIST)

    async def mkdir(self, path: bytes | None = None) -> None:
        path = path or self.fresh(DIRECTORIES)
        if path in self.tree:
            return

        async def make(fs: SimFilesystem) -> None:
            await fs.mkdir(*await self.parent(fs, path), NewAttrs(0o755, 0, 0))

        await self.step({**self.tree, path: Node("d", 0o755)}, make, done=errno.EEXIST)

    async def rmdir(self, path: bytes | None = None) -> None:
        path = path or self.pick("d")
        if path is None or any(p.startswith(path + b"/") for p in self.tree):
            return

        async def remove(fs: SimFilesystem) -> None:
            await fs.rmdir(*await self.parent(fs, path))

        await self.step(self.without(path), remove, done=errno.ENOENT)

    async def symlink(self) -> None:
        path = self.fresh([b"link"])
        target = self.world.random.choice([b"a", b"step-1", b"../x", b"/abs"])
        if path in self.tree:
            return

        async def make(fs: SimFilesystem) -> None:
            parent, name = await self.parent(fs, path)
            await fs.symlink(parent, name, target, NewAttrs(0o777, 0, 0))

        await self.step({**self.tree, path: Node("l", 0o777, target)}, make, done=errno.EEXIST)

    # ---- attributes
    async def chmod(self) -> None:
        path = self.pick(self.world.random.choice("fd"))
        if path is None:
            return
        directory = self.tree[path].kind == "d"
        mode = self.world.random.choice([0o700, 0o755, 0o640] if directory else [0o600, 0o444, 0o755])

        async def change(fs: SimFilesystem) -> None:
            await fs.setattr((await self.locate(fs, path)).ino, None, mode=mode)

        await self.step(self.replaced(path, mode=mode), change)

    async def utimens(self) -> None:
        path = self.pick(self.world.random.choice("fd"))
        if path is None:
            return
        time_ns = self.world.random.randrange(10**18)

        async def change(fs: SimFilesystem) -> None:
            found = await fs.setattr((await self.locate(fs, path)).ino, None, atime_ns=time_ns, mtime_ns=time_ns)
            if found.mtime_ns != time_ns:
                raise Violation(f"utimens of {path!r} is not shown")

        await self.step(self.tree, change)

    async def xattr(self) -> None:
        path = self.pick(self.world.random.choice("fd"))
        if path is None:
            return
        name, value = self.world.random.choice([b"user.a", b"user.b"]), b"%d" % self.world.next_save()
        old = dict(self.tree[path].xattrs)
        remove = name in old and self.world.random.random() < 0.5
        new = {k: v for k, v in old.items() if k != name} if remove else {**old, name: value}

        async def change(fs: SimFilesystem) -> None:
            await fs.set_xattr((await self.locate(fs, path)).ino, name, None if remove else value)

        await self.step(self.replaced(path, xattrs=tuple(sorted(new.items()))), change, done=errno.ENODATA)

    # ---- checkpoints
    async def save(self) -> None:
        """As DCP saves: members, then ``.metadata`` under another name, the old one away, rename."""
        await self.save_into(self.world.random.choice(STEPS))

    async def save_again(self, commits: set[bytes]) -> None:
        """Save into each directory of this client that has one of these commit files (paths in the mount)."""
        for path in sorted(commits):
            base, _, below = path.partition(b"/")
            if base == self.base:
                await self.save_into(below.rpartition(b"/")[0])

    async def save_into(self, directory: bytes) -> None:
        rng, number = self.world.random, self.world.next_save()
        await self.mkdir(directory)
        if directory not in self.tree:
            return
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

    # ---- what is odd
    async def refused(self) -> None:
        """What POSIX refuses is refused, and changes nothing."""
        path = self.pick("d")
        if path is None:
            return

        async def bad(fs: SimFilesystem) -> None:
            await fs.mkdir(*await self.parent(fs, path), NewAttrs(0o755, 0, 0))

        async def missing(fs: SimFilesystem) -> None:
            await fs.unlink((await self.locate(fs, path)).ino, b"not there")

        for function, code in ((bad, errno.EEXIST), (missing, errno.ENOENT)):
            outcome = await self.step(self.tree, function, code)
            if outcome.errno != code and not (outcome.errno and self.world.trouble):
                raise Violation(f"{path!r}: {errno.errorcode[code]} was to be refused")

    async def unlinked(self) -> None:
        """An open file goes on without its name."""
        path = self.pick("f", free=True)
        if path is None or sum(n.file == self.tree[path].file for n in self.tree.values()) > 1:
            return
        life, data = await self.world.life(), self.tree[path].data
        of = await self.open(path, os.O_RDWR, life=life)
        await self.remove(path)

        async def use(fs: SimFilesystem) -> None:
            found = await self.read_all(fs, of, len(data) + 1)
            if found != data and found != data + b"more"[: len(found) - len(data)]:
                raise Violation(f"{path!r} without a name is {found[:24]!r}, not {data[:24]!r}")
            if of.passed:
                self.world.kernel.write(of, len(data), b"more")
            else:
                await fs.write(of.handle, len(data), b"more")
            if not of.backed and await fs.read(of.handle, len(data), 10) != b"more" and not self.world.refusals:
                raise Violation(f"{path!r} without a name does not take writes")

        if self.tree.get(path) is None:
            await self.step(self.tree, use, *self.no_room(), *self.gone(), life=life)
        await self.close(life, of)
