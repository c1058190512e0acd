"""The kernel's side of a mount in the simulation: which opens it serves itself, and what it refuses.

Role: what ``frontend.fuse`` and the supervisor arrange for an open file. A *passed* writer's bytes go into the staging
file without the engine being asked; open files live through a supervised death of the daemon.
Concurrency: none, each call is one step.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sim_check import Violation
from sim_life import SimFilesystem

from cachexfs.core.records import FID_STEP
from cachexfs.engine.files import Files
from cachexfs.engine.interfaces import Clock
from cachexfs.engine.stat import Attr
from cachexfs.engine.vnode import WRITABLE, Handle

TICK_NS = 4_000_000  # the kernel's stamps are as coarse as its timer


@dataclass(eq=False)
class OpenFile:
    """An open file description. ``fd``: the staging file from which the kernel serves it, -1: it asks the daemon."""

    ino: int
    flags: int
    handle: Handle
    fd: int = -1
    cached: bool = False

    @property
    def backed(self) -> bool:
        return self.fd >= 0

    @property
    def passed(self) -> bool:
        return self.backed and bool(self.flags & WRITABLE)


class Kernel:
    """One mount. ``passthrough``: whether the supervisor may have opens served here."""

    def __init__(self, rng: random.Random, clock: Clock, *, passthrough: bool) -> None:
        self._random, self._clock, self.passthrough = rng, clock, passthrough
        self.opens: list[OpenFile] = []
        self._references: dict[int, int] = {}
        self._opening: Counter[int] = Counter()

    # ---- opening and closing
    def opened(self, fs: SimFilesystem, handle: Handle) -> OpenFile:
        """The answer to an open is on its way."""
        files, ino = fs.files, handle.vnode.ino
        of = OpenFile(ino, handle.flags, handle)
        others = [o for o in self.opens if o.ino == ino]
        if self.passthrough:
            fd = files.backing(handle)
            if fd is not None and (any(o.backed for o in others) or self._random.random() < 0.95):
                if any(o.cached for o in others):
                    raise Violation("kernel: an open that it is to serve itself, beside one that has pages")
                of.fd = os.dup(fd)
                if any(o.backed and not _same(o.fd, of.fd) for o in others):
                    raise Violation("kernel: two backing files of one inode")
                files.passing.begin(handle)
        if not of.backed:
            files.keep_pages(handle)
            of.cached = handle.cached
            if of.cached and any(o.backed for o in others):
                raise Violation(f"kernel: an open of {ino:x} with pages, beside one that it serves itself")
        self.opens.append(of)
        return of

    def closed(self, of: OpenFile) -> None:
        """The last close: the kernel's part of it is done before the daemon hears of it."""
        self.opens.remove(of)
        if of.backed:
            os.close(of.fd)
            of.fd = -1

    def died(self, *, supervised: bool) -> None:
        """The daemon is dead; without a supervisor so is the mount."""
        if not supervised:
            for of in list(self.opens):
                self.closed(of)
            self._references.clear()

    def open_files(self) -> dict[int, int]:
        """File id -> inode number of what applications have open."""
        return {of.ino // FID_STEP * FID_STEP: of.ino for of in self.opens}

    def resume(self, files: Files) -> None:
        """The next daemon takes up what is open."""
        for of in self.opens:
            of.handle = files.reopen(of.ino, of.flags, passed=of.backed)

    # ---- bytes that nobody is asked for
    def write(self, of: OpenFile, offset: int, data: bytes) -> None:
        """write(2) of a passed writer."""
        os.pwrite(of.fd, data, offset)
        now_ns = self._clock.now_ns() // TICK_NS * TICK_NS
        os.utime(of.fd, ns=(now_ns, now_ns))

    # ---- references
    def given(self, files: Files, attr: Attr) -> None:
        """A lookup's answer counts as a reference."""
        if attr.kind == "f":
            files.remember(files.by_ino(attr.ino))
            self._references[attr.ino] = self._references.get(attr.ino, 0) + 1

    @contextmanager
    def opening(self, ino: int) -> Iterator[None]:
        """An open is under way: nobody forgets its inode."""
        self._opening[ino] += 1
        try:
            yield
        finally:
            self._opening[ino] -= 1

    def shrink(self, files: Files) -> None:
        """Memory is scarce: inodes that nobody has open are forgotten."""
        busy = {*(of.ino for of in self.opens), *(ino for ino, count in self._opening.items() if count)}
        for ino, count in list(self._references.items()):
            if ino not in busy and self._random.random() < 0.5:
                del self._references[ino]
                files.forget(ino, count)


def _same(one: int, two: int) -> bool:
    return os.path.samestat(os.fstat(one), os.fstat(two))
