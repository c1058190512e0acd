"""A shared filesystem in memory that forgets or garbles what was not synced.

Role: the storage below ``SimPfs``. Every client sees ``entries`` and ``data``; what a power cut leaves are ``kept``
and ``kept_data`` and, of each change that was not synced, what the seed decides: all of it, none, or a part.
Concurrency: none, each call is one step.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from cachexfs.engine.pfs_interface import PfsAttrs, PfsStat

ROOT = 1


@dataclass(eq=False)
class Ino:
    """A file (``f``), directory (``d``), symlink (``l``) or FIFO (``p``) of the store."""

    number: int
    kind: str
    attrs: PfsAttrs
    data: bytes = b""
    kept_data: bytes | None = None
    kept_attrs: PfsAttrs | None = None
    target: bytes = b""
    entries: dict[bytes, Ino] = field(default_factory=dict)
    kept: dict[bytes, Ino] = field(default_factory=dict)


@dataclass
class Change:
    """Directory entries that change together and are not synced: (directory, name, file or None)."""

    parts: list[tuple[Ino, bytes, Ino | None]]


def fail(code: int, path: bytes) -> OSError:
    return OSError(code, os.strerror(code), os.fsdecode(path))


class Store:
    """Paths are relative to its root; ``.cachexfs`` has ``tmp`` and ``held``."""

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self._numbers = ROOT
        self.pending: list[Change] = []
        self.capacity_bytes = capacity_bytes
        self.readers: set[int] = set()  # descriptors of PFS children, which are processes of their own
        self.epoch = 0  # moves at every power cut
        self.root = self.make("d", PfsAttrs(0o755, 0, 0, 0, 0))
        state = self.make("d", self.root.attrs)
        self.tmp, self.held = self.make("d", self.root.attrs), self.make("d", self.root.attrs)
        self.root.entries[b".cachexfs"] = self.root.kept[b".cachexfs"] = state
        for name, directory in ((b"tmp", self.tmp), (b"held", self.held)):
            state.entries[name] = state.kept[name] = directory

    def make(self, kind: str, attrs: PfsAttrs) -> Ino:
        self._numbers += 1
        return Ino(self._numbers, kind, attrs)

    def plant(self, tree: Mapping[bytes, tuple[str, int, bytes]]) -> None:
        """Put what was there before any mount: path -> (kind, mode, bytes or target), all of it synced."""
        for path, (kind, mode, data) in sorted(tree.items()):
            parent, name = self.parent(path)
            ino = self.make(kind, PfsAttrs(mode, 0, 0, 10**18, 10**18))
            if kind == "l":
                ino.target = data
            ino.data = data if kind == "f" else b""
            self.sync_file(ino)
            parent.entries[name] = parent.kept[name] = ino

    def nonce(self) -> int:
        """A number that no other call gets."""
        self._numbers += 1
        return self._numbers

    # ---- looking
    def find(self, path: bytes, *, kept: bool = False) -> Ino | None:
        """What lies at a path, as clients see it, or as a power cut would leave what is synced."""
        ino: Ino | None = self.root
        for name in path.split(b"/") if path else ():
            if ino is None or ino.kind != "d":
                return None
            ino = (ino.kept if kept else ino.entries).get(name)
        return ino

    def parent(self, path: bytes) -> tuple[Ino, bytes]:
        above, _, name = path.rpartition(b"/")
        found = self.find(above)
        if found is None:
            raise fail(errno.ENOENT, path)
        if found.kind != "d":
            raise fail(errno.ENOTDIR, path)
        return found, name

    def stat(self, ino: Ino) -> PfsStat:
        a = ino.attrs
        size = len(ino.data) if ino.kind == "f" else len(ino.target)
        return PfsStat(
            ino.kind, a.mode, a.uid or 0, a.gid or 0, size, ino.number, 1, 0, a.atime_ns, a.mtime_ns, a.mtime_ns,
            ino.target,
        )  # fmt: skip

    def walk(self, *, kept: bool = False) -> dict[bytes, Ino]:
        """Every path but ``.cachexfs``."""
        found: dict[bytes, Ino] = {}
        stack = [(b"", self.root)]
        while stack:
            prefix, directory = stack.pop()
            for name, ino in (directory.kept if kept else directory.entries).items():
                if directory is self.root and name == b".cachexfs":
                    continue
                found[prefix + name] = ino
                if ino.kind == "d":
                    stack.append((prefix + name + b"/", ino))
        return found

    def used_bytes(self) -> int:
        there = {*self.walk().values(), *self.tmp.entries.values(), *self.held.entries.values()}  # links count once
        return sum(len(ino.data) for ino in there)

    # ---- changing
    def change(self, *parts: tuple[Ino, bytes, Ino | None]) -> None:
        for directory, name, ino in parts:
            if ino is None:
                directory.entries.pop(name, None)
            else:
                directory.entries[name] = ino
        self.pending.append(Change(list(parts)))

    def sync_directory(self, directory: Ino) -> None:
        for change in list(self.pending):
            mine = [part for part in change.parts if part[0] is directory]
            if not mine:
                continue
            if any(ino is None for _, _, ino in mine):
                mine = change.parts  # a name never goes before its file has the other one
            for part in mine:
                _keep(part)
            change.parts = [part for part in change.parts if part not in mine]
            if not change.parts:
                self.pending.remove(change)

    def sync_file(self, ino: Ino) -> None:
        ino.kept_data, ino.kept_attrs = ino.data, ino.attrs

    def power_cut(self, rng: random.Random) -> None:
        """Of everything that is not synced, the seed chooses what is left."""
        self.epoch += 1
        for change in self.pending:
            fate = rng.choice(["all", "all", "none", "names"])
            if any(ino is not None and ino.kind == "d" for _, _, ino in change.parts) and fate == "names":
                fate = "none"  # no filesystem leaves a directory with two names
            for part in change.parts:
                if fate == "all" or (fate == "names" and part[2] is not None):
                    _keep(part)
        self.pending.clear()
        stack, seen = [self.root], set()
        while stack:
            ino = stack.pop()
            if ino.number in seen:
                continue
            seen.add(ino.number)
            _settle(ino, rng)
            stack += ino.entries.values()


def _keep(part: tuple[Ino, bytes, Ino | None]) -> None:
    directory, name, ino = part
    if ino is None:
        directory.kept.pop(name, None)
    else:
        directory.kept[name] = ino


def _settle(ino: Ino, rng: random.Random) -> None:
    if ino.kind == "d":
        ino.entries = dict(ino.kept)
    if ino.kind == "f" and ino.data != ino.kept_data:
        old = ino.kept_data or b""
        fate = rng.choice(["new", "old", "zeros", "cut", "garbled"])
        if fate == "old":
            ino.data = old
        elif fate == "zeros":
            ino.data = bytes(len(ino.data))
        elif fate == "cut":
            ino.data = ino.data[: rng.randrange(len(ino.data) + 1)]
        elif fate == "garbled":
            ino.data = rng.randbytes(len(ino.data))
        ino.kept_data = ino.data
    if ino.kept_attrs is not None and rng.random() < 0.5:
        ino.attrs = ino.kept_attrs
    ino.kept_attrs = ino.attrs
