"""What must hold whatever happens: checkers that know the promises and nothing of the engine's ways.

Role: each raises ``Violation``. They look at the store, at the mount's attributes and at a record of what every save
wrote; never at how the engine decides.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable, Collection, Mapping

import xxhash
from sim_kept import Kept
from sim_life import Life
from sim_store import Ino, Store

from cachexfs.core.boundary import Boundary
from cachexfs.core.records import ROOT_FID, Generation, Inode

COMMIT, POINTER = b".metadata", b"latest"
PAGE_SLACK_BYTES = 8192  # a write of some bytes may touch two pages more


class Violation(AssertionError):
    """A promise was broken."""


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


class Saves:
    """What each save wrote: bytes of its commit file -> member -> bytes."""

    def __init__(self) -> None:
        self.made: dict[bytes, Mapping[bytes, bytes]] = {}

    def lacking(self, commit: bytes, found: Mapping[bytes, bytes | None]) -> str:
        """Why a checkpoint with this commit file is not whole; empty when it is."""
        wanted = self.made.get(commit)
        if wanted is None:
            return "its commit file is not one that anybody wrote"
        for name, data in wanted.items():
            there = found.get(name)
            if there is None:
                return f"{name!r} is not there"
            if there != data:
                return f"{name!r} is {there[:24]!r}, not {data[:24]!r}"
        return ""


class Checkers:
    """All checkers of one run."""

    def __init__(self, store: Store, saves: Saves) -> None:
        self.store, self.saves = store, saves
        self.kept = Kept(store, saves.made)
        self.alone = True  # one node: boundaries fall only with an error
        self.hidden_whole: list[bytes] = []  # checkpoints that are whole, with their commit file still withdrawn
        self.excused: Callable[[bytes], bool] = lambda path: False  # somebody has touched it on the PFS
        self.spoilt: set[str] = set()  # stages of which one copy went bad, of which nobody knows before it is read
        self._reached: dict[tuple[int, int], Boundary] = {}

    # ---- commit last
    def commit_last(self, when: str) -> None:
        """Who reads the PFS now sees no checkpoint that claims to be whole and is not; and none that was whole is gone
        before its successor is ready."""
        stack = [(b"", self.store.root)]
        while stack:
            path, directory = stack.pop()
            for name, ino in directory.entries.items():
                if ino.kind == "d" and name != b".cachexfs":
                    stack.append((path + b"/" + name, ino))
            if COMMIT in directory.entries:
                found = {name: ino.data for name, ino in directory.entries.items() if ino.kind == "f"}
                why = self.saves.lacking(found[COMMIT], found)
                if why and not self.excused(path[1:]):
                    raise Violation(f"commit last: after {when}, {path!r} has its commit file, but {why}")
        if gone := self.kept.gone(when):
            raise Violation(f"overwritten: {gone}")

    # ---- claims
    async def claims(self, life: Life) -> None:
        """What is called ``pfs`` is what a power cut of everything would leave."""
        view = life.catalogue.view
        await life.catalogue.barrier()
        for key, entry in list(view.items()):
            if isinstance(entry.record, Generation):
                fid = int(key[2:], 16)
                await self._claim_of_file(life, fid)
        for key, entry in list(view.items()):
            if isinstance(entry.record, Inode) and entry.record.kind == "d" and int(key[2:], 16) != ROOT_FID:
                await self._claim_of_checkpoint(life, int(key[2:], 16))

    async def _claim_of_file(self, life: Life, fid: int) -> None:
        stage = (await life.parts.attributes.of(fid)).get("stage")
        view = life.catalogue.view
        content, inode, path = view.generation(fid), view.inode(fid), view.path(fid)
        if content is None or inode is None or path is None or stage is None or self.excused(path):
            return
        if stage == "pfs":
            kept = self.store.find(path, kept=True)
            data = kept.kept_data if kept is not None else None
            if data is None or (content.digest and xxhash.xxh3_128_digest(data) != content.digest):
                raise Violation(f"claim: {path!r} generation {content.gen} is called pfs, and there is {_brief(kept)}")
        now = life.node.boundary(fid, inode)
        before = self._reached.get((fid, content.gen), now)
        excused = inode.error or view.is_moving(fid)
        if now < before and not excused and self.alone:
            raise Violation(f"monotone: {path!r} generation {content.gen} fell from {before.label} to {now.label}")
        self._reached[fid, content.gen] = now if excused else max(now, before)

    async def _claim_of_checkpoint(self, life: Life, fid: int) -> None:
        await life.catalogue.barrier()
        found = await life.parts.attributes.of(fid)
        revision = life.catalogue.view.revision
        path = life.catalogue.view.path(fid)
        await life.catalogue.barrier()
        if life.catalogue.view.revision != revision:
            return  # not of this moment
        if found.get("restartable") != "pfs" or path is None or self.excused(path):
            return
        directory = self.store.find(path, kept=True)
        pointer = directory.kept.get(POINTER) if directory is not None else None
        if pointer is not None and pointer.kept_data is not None:
            path = path + b"/" + pointer.kept_data
            directory = self.store.find(path, kept=True)
        if directory is None:
            raise Violation(f"claim: {path!r} is called restartable at pfs, and is not there")
        files = {name: ino.kept_data for name, ino in directory.kept.items() if ino.kind == "f"}
        why = self.saves.lacking(files.get(COMMIT) or b"", files)
        if why:
            raise Violation(f"claim: {path!r} is called restartable at pfs, but {why}")

    def partner(self, life: Life, lives: Mapping[str, Life]) -> None:
        """What is called ``partner`` is there without any one node. ``lives``: each node's last daemon."""
        view = life.catalogue.view
        for key, entry in list(view.items()):
            content = entry.record
            if not isinstance(content, Generation) or not content.size:
                continue
            fid = int(key[2:], 16)
            inode = view.inode(fid)
            if inode is None or life.node.boundary(fid, inode) != Boundary.PARTNER:
                continue
            writers = [other.parts.files._current.get(fid) for other in lives.values()]
            if inode.writing or any(vnode is not None and vnode.dirty for vnode in writers):
                continue  # it is called "writing": a passed writer changes the very file that it has published
            holders = [name for name, other in lives.items() if _has(other, content)]
            # A writer that is open beside the one that closed, and that the kernel serves, changes it in place unasked:
            # until that is published, its own node has the newer bytes instead.
            shared = any(other.parts.files.busy(fid) for other in lives.values())
            if len(holders) < (1 if shared or content.stage in self.spoilt else 2):
                raise Violation(f"claim: {view.path(fid)!r} is called partner; only {holders} have it")

    @staticmethod
    def has(life: Life, content: Generation) -> bool:
        """Whether a node has the bytes of a content."""
        return _has(life, content)

    def fsynced(self, path: bytes, data: bytes) -> None:
        """What fsync=pfs has promised lies there, synced, under its name or a hidden one with its record."""
        if self.excused(path) or any(ino.kept_data == data for ino in self.store.walk(kept=True).values()):
            return  # perhaps under an earlier name
        if self.recoverable(data) or any(ino.kept_data == data for ino in self.store.held.kept.values()):
            return
        raise Violation(f"fsync: {path!r} has returned, and its {len(data)} bytes are not on the PFS")

    def recoverable(self, data: bytes) -> bool:
        """Whether ``cachexfs recover`` finds these bytes on the PFS: under a hidden name, with their record."""
        tmp = self.store.tmp.kept
        return any(ino.kept_data == data and (name + b".rec") in tmp for name, ino in tmp.items())

    # ---- memory
    def memory(self, life: Life) -> None:
        """Staging holds what is counted, to the page, and never more than its limit."""
        staging = life.staging
        passing = {vnode.stage for vnode in life.parts.files.passing.vnodes}  # what the kernel writes is counted soon
        passing |= _fills(life)  # and what is being brought
        held = uncounted = 0
        files = os.path.dirname(staging.path("x"))
        for entry in os.scandir(files):
            held += entry.stat().st_blocks * 512
            if entry.name in passing:
                uncounted += entry.stat().st_blocks * 512 - staging._allocated.get(entry.name, 0)
        if self.alone:  # else a partner may be slow in taking what is gone here
            held += _without_name(files, self.store.readers)
        counted = staging.used_bytes - sum(staging.reserved.values())
        if held - uncounted != counted:
            raise Violation(f"memory: {held - uncounted} bytes are held, {counted} counted")
        if staging.peak_bytes > staging.limit_bytes + PAGE_SLACK_BYTES:
            raise Violation(f"memory: {staging.peak_bytes} bytes of {staging.limit_bytes}")

    def nothing_left(self, life: Life, *, cut: bool) -> None:
        """At rest: no staged file without a use, no hidden file without one (``cut``: but those of a power cut)."""
        fills = _fills(life)
        for stage in life.staging.stages():
            if stage not in fills and not life.parts.keeper.referenced(stage):
                raise Violation(f"memory: {stage} is staged for nothing")
        # Parts and lone records that a killed child leaves go with the next attempt at their name, or stay.
        tmp = self.store.tmp.entries
        if left := [name for name in tmp if name + b".rec" in tmp and not cut]:
            raise Violation(f"left over: {left} in .cachexfs/tmp")
        hidden = {
            e.record.pfs.hidden.encode()
            for _, e in life.catalogue.view.items()
            if isinstance(e.record, Inode) and e.record.pfs is not None
        }
        if left := [name for name in self.store.held.entries if name not in hidden and not cut]:
            raise Violation(f"left over: {left} in .cachexfs/held")

    # ---- the end
    def same_tree(self, life: Life, contents: Mapping[bytes, bytes]) -> None:
        """The PFS has the names, bytes, modes and times that the mount shows. ``contents``: files, read there."""
        there = self.store.walk()
        view = life.catalogue.view
        stack = [(b"", ROOT_FID)]
        seen = set()
        files: dict[int, tuple[bytes, Ino]] = {}
        while stack:
            prefix, directory = stack.pop()
            for name, entry in view.children(directory).items():
                path, inode = prefix + name, view.inode(entry.fid)
                assert inode is not None
                if inode.pfs is not None and inode.pfs.hidden:
                    self._withdrawn(path, inode, contents)
                    continue
                seen.add(path)
                ino = there.get(path)
                if ino is None or ino.kind != entry.kind:
                    raise Violation(f"plain files: {path!r} is not on the PFS")
                self._same(path, inode, ino, contents, life)
                other, first = files.setdefault(entry.fid, (path, ino))
                if first is not ino:
                    raise Violation(f"plain files: {path!r} and {other!r} are two files on the PFS")
                if entry.kind == "d":
                    stack.append((path + b"/", entry.fid))
        if extra := sorted(set(there) - seen):
            raise Violation(f"plain files: {extra} are on the PFS and not in the mount")

    def _same(self, path: bytes, inode: Inode, ino: Ino, contents: Mapping[bytes, bytes], life: Life) -> None:
        if ino.kind == "f" and ino.data != contents[path]:
            raise Violation(f"plain files: {path!r} is {_brief(ino)}, not {len(contents[path])} bytes")
        if ino.kind == "l" and ino.target != inode.target:
            raise Violation(f"plain files: {path!r} leads to {ino.target!r}, not {inode.target!r}")
        mtime_ns = inode.mtime_ns
        if ino.kind == "d":
            times = life.catalogue.view.dir_times(life.catalogue.view.lookup(*_place(life, path)).fid)  # type: ignore[union-attr]
            mtime_ns = times.mtime_ns if times is not None else mtime_ns
        if ino.kind != "l" and ino.attrs.mode != inode.mode:
            raise Violation(f"plain files: mode of {path!r} is {ino.attrs.mode:o}, not {inode.mode:o}")
        if ino.attrs.mtime_ns != mtime_ns:
            raise Violation(f"plain files: mtime of {path!r} is {ino.attrs.mtime_ns}, not {mtime_ns}")

    def _withdrawn(self, path: bytes, inode: Inode, contents: Mapping[bytes, bytes]) -> None:
        assert inode.pfs is not None
        held = self.store.held.entries.get(inode.pfs.hidden.encode())
        if held is None or (inode.pfs.gen == inode.gen and held.data != contents[path]):
            raise Violation(f"plain files: {path!r} is withdrawn, and what is held is {_brief(held)}")
        parent = path.rpartition(b"/")[0]
        members = {p.rpartition(b"/")[2]: data for p, data in contents.items() if p.rpartition(b"/")[0] == parent}
        if contents[path] in self.saves.made and not self.saves.lacking(contents[path], members):
            self.hidden_whole.append(parent)


def _has(life: Life, content: Generation) -> bool:
    """Whether a node, its daemon alive or dead, has the bytes of a content."""
    paths = [life.staging.path(content.stage)]
    if life.store is not None and (held := life.store.committed(content.stage)) is not None:
        paths.append(held.path)
    for path in paths:
        try:
            with open(path, "rb") as file:
                data = file.read(content.size)
        except FileNotFoundError:
            continue
        if len(data) == content.size and content.digest in (b"", xxhash.xxh3_128_digest(data)):
            return True
    return False


def _place(life: Life, path: bytes) -> tuple[int, bytes]:
    fid = ROOT_FID
    *above, name = path.split(b"/")
    for part in above:
        entry = life.catalogue.view.lookup(fid, part)
        assert entry is not None
        fid = entry.fid
    return fid, name


def _without_name(directory: str, others: Collection[int]) -> int:
    """Bytes of files that were removed from a directory and are open in this process, but for some descriptors."""
    found = {}
    for entry in os.scandir("/proc/self/fd"):
        if int(entry.name) in others:
            continue
        try:
            path = os.readlink(entry.path)
            if path.startswith(directory) and path.endswith(" (deleted)"):
                stat = os.stat(entry.path)
                found[stat.st_ino] = stat.st_blocks * 512
        except FileNotFoundError:
            continue  # the descriptor of this very scan
    return sum(found.values())


def _brief(ino: Ino | None) -> str:
    return "nothing" if ino is None else f"{len(ino.data)} bytes {ino.data[:24]!r}"


def _fills(life: Life) -> set[str]:
    """Staged files of those who read large files last."""
    return {fill.stage for fill in life.parts.reader.fills._fills.values()}
