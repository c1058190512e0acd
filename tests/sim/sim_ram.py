"""A node whose tmpfs refuses calls: no memory for a new file or for a page (another has filled it), or an error.

Role: a scenario. As ``Run``, without passthrough. What is refused is an error of that call and changes nothing, a write
perhaps a part of what it was to write; what was there before stays whole.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from sim_life import Life
from sim_one import Run

from cachexfs.engine import content, copying, writing

REFUSALS = (errno.ENOSPC, errno.ENOSPC, errno.EIO)


class Ram(Run):
    """As ``Run``, with a staging that fails."""

    refusals = (errno.ENOSPC, errno.EIO)
    events = ("kill", "cut", "faults", "away", "calm", "memory", "memory", "memory", "memory is there")

    def __init__(self, seed: int, directory: str, *, trace: bool = False) -> None:
        super().__init__(seed, directory, trace=trace)
        self.tight = self.checkers.kept.excused = True  # as of one that is small
        self.kernel.passthrough = False
        self.failing = 0.0
        self.counts: Counter[str] = Counter()

    def calm(self) -> None:
        """See ``Run``."""
        super().calm()
        self.failing = 0.0

    async def happen(self, event: str) -> None:
        """See ``Run``."""
        if event == "memory":
            self.trouble, self.failing = True, self.random.choice([0.05, 0.3, 1.0])
        elif event == "memory is there":
            self.failing = 0.0
        else:
            await super().happen(event)

    def called(self, what: str) -> None:
        """A call on the tmpfs. Raises ``OSError``."""
        if self.random.random() < self.failing:
            self.counts[what] += 1
            code = self.random.choice(REFUSALS)
            raise OSError(code, os.strerror(code), what)

    async def _born(self, after: Life | None = None) -> None:
        await super()._born(after)
        assert self._life is not None
        self._life.staging.on_memory = self.called

    async def main(self) -> None:
        with self._refused():
            await super().main()

    @contextmanager
    def _refused(self) -> Iterator[None]:
        def pwrite(fd: int, data: bytes, offset: int) -> int:
            if len(data) > 1 and self.random.random() < self.failing / 2:
                self.counts["a part"] += 1
                return os.pwrite(fd, data[: len(data) // 2], offset)
            self.called("write")
            return os.pwrite(fd, data, offset)

        modules = (writing, copying, content)
        for module in modules:
            module.os = SimpleNamespace(**{**vars(os), "pwrite": pwrite})  # type: ignore[attr-defined, assignment]
        try:
            yield
        finally:
            for module in modules:
                module.os = os  # type: ignore[attr-defined]
