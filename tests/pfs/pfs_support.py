"""What the tests of the PFS pool share: a running pool, the handle of a filesystem with faults."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import trio

from cachexfs.adapters.pfs_pool import PfsPool
from cachexfs.engine.interfaces import PfsAttrs

ATTRS = PfsAttrs(mode=0o640, uid=None, gid=None, atime_ns=1_600_000_000_123_456_789, mtime_ns=1_700_000_000_987_654_321)
LONG_S = 60.0


@contextlib.asynccontextmanager
async def running(pool: PfsPool) -> AsyncIterator[PfsPool]:
    """A pool that serves for the length of the block."""
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.serve)
        yield pool
        nursery.cancel_scope.cancel()


@dataclass(frozen=True)
class FaultMount:
    """A mounted ``faultfs``: ``path`` as seen through it, ``backing`` the truth below."""

    path: Path
    backing: Path
    control: Path

    def hang(self, op: str) -> None:
        """Have ``op`` wait from now on."""
        (self.control / f"hang-{op}").touch()

    def fail(self, op: str, code: int) -> None:
        """Have ``op`` answer with an errno from now on."""
        (self.control / f"fail-{op}").write_text(str(code))

    def clear(self) -> None:
        """No faults any more; what hangs is carried out."""
        for file in self.control.iterdir():
            file.unlink()

    async def hanging(self, op: str) -> None:
        """Until some caller hangs in ``op``."""
        while not (self.control / f"seen-{op}").exists():  # noqa: ASYNC110  (it is another process that sets it)
            await trio.sleep(0.01)
