"""A drill: would a checkpoint come back without one node and without the PFS?

Role: reads every needed file in full from what the survivors have, and compares every block with its digest. Changes
nothing, not even a claim that turns out to be wrong: that is what reads do. Called by the control server.

Concurrency: ``READERS_MAX`` files at once; a copy is read in pieces, so that a drill beside a running job stays small.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from cachexfs.core import manifest as manifests
from cachexfs.core.digest import BLOCK_BYTES, block_count, block_digest, block_length, split_blocks, tree_digest
from cachexfs.core.records import Copy, Generation, Inode
from cachexfs.engine.completeness import Completeness
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError, CorruptError

READERS_MAX = 4
PATIENCE_S = 240.0  # for a large commit file that has not been read before
PIECE_BYTES = 4 << 20
PEER_DEADLINE_S = 20.0
NO_PARTNER = "this mount has no partner to drill with: without this node only the PFS has what it saved"


@dataclass(frozen=True, slots=True)
class Drilled:
    """One needed file. ``source`` is ``tier:node``, or ``catalogue`` for an empty file."""

    name: bytes
    source: str
    size: int
    ok: bool
    reason: str = ""
    certain: bool = True


@dataclass(slots=True)
class Report:
    """The outcome. ``reason``: why the checkpoint as such would not come back; ``certain`` is false if it still may."""

    without: str
    files: list[Drilled] = field(default_factory=list)
    reason: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all of the checkpoint would come back."""
        return not self.reason and bool(self.files) and all(file.ok for file in self.files)

    @property
    def certain(self) -> bool:
        """Whether a "no" is one."""
        return bool(self.reason) or all(file.certain for file in self.files)


class Drill:
    """Drills of one node."""

    def __init__(self, node: Node, completeness: Completeness) -> None:
        self.node = node
        self.completeness = completeness

    async def run(self, fid: int, without: str | None, on_piece: Callable[[int], None]) -> Report:
        """Drill the checkpoint in a directory. ``on_piece`` gets bytes as they are read. Raises ``CacheXError``."""
        if not self.node.replica_count:
            return Report(without or self.node.name, reason=NO_PARTNER)
        checkpoint = await self.completeness.checkpoint(fid, PATIENCE_S)
        if checkpoint is None:
            return Report(
                without or self.node.name, reason="no commit file in it: it is not a checkpoint, or not saved yet"
            )
        tree = {name: (child, inode) for name, child, inode in self.completeness.walk(fid)}
        commit = tree.get(checkpoint.commit)
        origin = commit[1].origin if commit is not None else ""
        report = Report(without or origin or self.node.name)
        if checkpoint.missing:
            pieces = [f"{_shown(p.name)}: {p.reason}" for p in checkpoint.missing[:3]]
            report.reason = "it is not restartable now: " + "; ".join(pieces)
        if not checkpoint.needs:
            report.reason = report.reason or f"{_shown(checkpoint.commit)} cannot be read"
        needed = sorted(set(checkpoint.needs) & tree.keys() or {checkpoint.commit} & tree.keys())
        self._note(report)
        found: dict[bytes, Drilled] = {}
        slots = trio.CapacityLimiter(READERS_MAX)
        async with trio.open_nursery() as nursery:
            for name in needed:
                nursery.start_soon(self._one, name, *tree[name], report.without, found, slots, on_piece)
        report.files = [found[name] for name in needed]
        return report

    def _note(self, report: Report) -> None:
        live = [n for n in self.node.catalogue.view.nodes if self.node.live(n)]
        if self.node.options.alone:
            report.notes.append("this node is alone: what survives it is on the PFS ('cachexfs wait --at pfs')")
        elif report.without not in self.node.catalogue.view.nodes:
            report.notes.append(f"{report.without} is no node of this job")
        if len(live) == 2 and report.without in live:
            report.notes.append(
                f"one node would be left, without a majority of the catalogue: 'cachexfs recover --dead "
                f"{report.without}' there lets it go on"
            )

    async def _one(
        self, name: bytes, fid: int, inode: Inode, without: str, found: dict[bytes, Drilled],
        slots: trio.CapacityLimiter, on_piece: Callable[[int], None],
    ) -> None:  # fmt: skip
        async with slots:
            found[name] = await self._file(name, fid, inode, without, on_piece)

    async def _file(
        self, name: bytes, fid: int, inode: Inode, without: str, on_piece: Callable[[int], None]
    ) -> Drilled:
        content = self.node.catalogue.view.generation(fid)
        if content is None:
            return Drilled(name, "", inode.size, False, "was removed meanwhile")
        if not content.size:
            return Drilled(name, "catalogue", 0, True)
        if not content.tree:
            return Drilled(name, "", content.size, False, "only on the PFS, and without digests")
        copies = [c for c in self.node.live_copies(inode) if c.node != without]
        copies.sort(key=lambda c: (c.node != self.node.name, c.tier != "memory", c.node))
        reasons, certain = [], True
        for copy in copies:
            label = f"{copy.tier}:{copy.node}"
            try:
                await self._read(content, copy, on_piece)
            except (CorruptError, FileNotFoundError) as error:
                reasons.append(f"{label}: {error}")
            except (CacheXError, OSError, trio.TooSlowError) as error:
                certain = False
                reasons.append(f"{label}: {error or 'no answer'}")
            else:
                return Drilled(name, label, content.size, True, "; ".join(reasons))
        if not copies:
            others = sorted({c.node for c in inode.copies if self.node.valid(c)})
            where = f"only on {', '.join(others)}" if others else "on no live node"
            reasons.append(where + (" and the PFS" if self.node.on_pfs(fid, inode) else ""))
        return Drilled(name, "", content.size, False, "; ".join(reasons), certain)

    async def _read(self, content: Generation, copy: Copy, on_piece: Callable[[int], None]) -> None:
        """Read one copy in full. Raises ``CorruptError`` naming the block that is not what its digest says."""
        if copy.node == self.node.name:
            await self._read_here(content, copy, on_piece)
            return
        if self.node.peers is None:
            raise FileNotFoundError("no way to other nodes")
        digests = await self._digests(content, copy)
        for offset in range(0, content.size, PIECE_BYTES):
            length = min(PIECE_BYTES, content.size - offset)
            with trio.fail_after(PEER_DEADLINE_S):
                piece = await self.node.peers.read(copy.node, content.stage, offset, length)
            if len(piece) != length:
                raise CorruptError(f"ends at byte {offset + len(piece)} of {content.size}")
            first = offset // BLOCK_BYTES
            for index in range(first, first + block_count(length)):
                start = index * BLOCK_BYTES - offset
                block = memoryview(piece)[start : start + block_length(content.size, index)]
                if block_digest(block) != digests[index]:
                    raise CorruptError(f"block {index} is not what its digest says")
            on_piece(length)

    async def _digests(self, content: Generation, copy: Copy) -> list[bytes]:
        """Block digests as the holder's own manifest has them, checked against the catalogue."""
        if content.size <= BLOCK_BYTES:
            return [content.digest]
        assert self.node.peers is not None
        with trio.fail_after(PEER_DEADLINE_S):
            data = await self.node.peers.manifest(copy.node, content.stage)
        found = list(split_blocks(manifests.decode(data).blocks))
        if tree_digest(found) != content.tree or len(found) != block_count(content.size):
            raise CorruptError("its manifest does not match the catalogue")
        return found

    async def _read_here(self, content: Generation, copy: Copy, on_piece: Callable[[int], None]) -> None:
        path = self._path_here(content, copy)
        if path is None:
            raise FileNotFoundError("not on this node any more")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            digests = await self.node.digests(fd, content.size)
        finally:
            os.close(fd)
        if (digests[0], digests[1]) != (content.digest, content.tree):
            raise CorruptError("its bytes are not what their digest says")
        on_piece(content.size)

    def _path_here(self, content: Generation, copy: Copy) -> str | None:
        staging, replicas = self.node.staging, self.node.replicas
        if copy.tier == "memory":
            return staging.path(content.stage) if staging.has(content.stage) else None
        return replicas.path(content.stage, content.size) if replicas is not None else None


def _shown(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
