"""What the tests of the PFS pool share: a running pool, the handle of a filesystem with faults."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from cachexfs.adapters.pfs_dir import TMP_SHARDS
from cachexfs.adapters.pfs_pool import PfsPool
from cachexfs.engine.pfs_interface import PfsAttrs

ATTRS = PfsAttrs(mode=0o640, uid=None, gid=None, atime_ns=1_600_000_000_123_456_789, mtime_ns=1_700_000_000_987_654_321)
LONG_S = 100.0


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
    pid: int

    def die(self) -> None:
        """End the filesystem's server: its mount stays and answers ENOTCONN."""
        os.kill(self.pid, signal.SIGKILL)

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
        await until((self.control / f"seen-{op}").exists)


async def hang_in(mount: FaultMount, op: str, call: Callable[[], Awaitable[object]]) -> None:
    """Have ``op`` hang, make a call, and give it up once it hangs there. ``op`` goes on hanging."""
    handler = op.partition(":")[0]
    (mount.control / f"seen-{handler}").unlink(missing_ok=True)
    mount.hang(op)

    async def give_up() -> None:
        await mount.hanging(handler)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_up)
        await call()
        raise AssertionError(f"the call did not hang in {op}")


def command(*words: str) -> None:
    """Run a system command to its end, which is short: the loop may wait."""
    subprocess.run(words, check=True)


async def until(condition: Callable[[], bool]) -> None:
    """Until something outside of this process, or a private state of the pool, has come about."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.01)


def tmp_file(pfs_dir: Path, hidden: str, rest: str = "") -> Path:
    """Where a file with this hidden name is prepared; ``rest`` follows the name of files that belong to it."""
    return pfs_dir / ".cachexfs/tmp" / f"{zlib.crc32(hidden.encode()) % TMP_SHARDS:x}" / (hidden + rest)


def tmp_names(pfs_dir: Path) -> list[str]:
    """All names of files below ``.cachexfs/tmp``."""
    return sorted(path.name for path in (pfs_dir / ".cachexfs/tmp").glob("*/*"))
