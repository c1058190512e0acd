"""The replica stores below an NVMe directory, looked at without a daemon.

Role: finds ``<job>/<node>/replicas`` below the directory, reads manifests, checks blocks, and takes a store's lock so
that no daemon starts over it. Changes nothing. Concurrency: none; ``verify`` may run in threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cachexfs import ours
from cachexfs.adapters import replica_copy
from cachexfs.adapters.replica_copy import Committed
from cachexfs.adapters.replica_store import IDENTITY, LOCK, ReplicaStore
from cachexfs.config import PFS_ID
from cachexfs.errors import CannotTellError, CorruptError, UsageError

REPLICAS = "replicas"
DEPTH_MAX = 4
DRAINED = "drained-"  # of the Slurm epilog: a job that has left nothing here
PIECE_BYTES = 8 << 20

Tell = Callable[[int], None]


@dataclass(slots=True)
class Store:
    """One node's replicas. ``token``: which PFS directory it had mounted, "" when none."""

    job: str
    node: str
    directory: Path
    token: str
    replicas: list[Committed]
    damaged: dict[str, str] = field(default_factory=dict)


def find(nvme: str, job: str | None) -> list[Store]:
    """All stores at or below ``nvme``, of one job if it is given. Raises ``CannotTellError``."""
    root = Path(nvme)
    try:
        found = [_load(path) for path in sorted(set(_stores(root, DEPTH_MAX)))]
    except OSError as error:
        raise CannotTellError(f"cannot read '{nvme}': {error.strerror}; is the disk mounted?") from None
    return [store for store in found if job is None or store.job == job]


def check_is_nvme(nvme: str) -> None:
    """Raise ``UsageError`` for a directory in which no mount has kept anything and others have, ``CannotTellError``."""
    try:
        is_empty = _is_empty(Path(nvme), DEPTH_MAX)
        if is_empty or any(True for _ in _traces(Path(nvme), DEPTH_MAX)):
            return
    except OSError as error:
        raise CannotTellError(f"cannot read '{nvme}': {error.strerror}; is the disk mounted?") from None
    raise UsageError(
        f"no mount has kept replicas in or below '{nvme}': give the directory that was nvme=DIR, or the job's in it"
    )


def _is_empty(directory: Path, depth: int) -> bool:
    with os.scandir(directory) as entries:
        below = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    if not depth or not all(is_directory for _, is_directory in below):
        return not below
    return all(_is_empty(directory / name, depth - 1) for name, _ in below)


def _traces(directory: Path, depth: int) -> Iterator[str]:
    """What a mount, or the Slurm epilog, leaves on NVMe also where it holds no replicas."""
    with os.scandir(directory) as entries:
        below = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    yield from (name for name, _ in below if ours.is_of_nvme(name) or name.startswith(DRAINED))
    for name, is_directory in below if depth else ():
        if is_directory:
            with contextlib.suppress(PermissionError, FileNotFoundError):
                yield from _traces(directory / name, depth - 1)


def _stores(directory: Path, depth: int) -> Iterator[Path]:
    if (directory / REPLICAS / IDENTITY).is_file():
        yield directory
        return
    with os.scandir(directory) as entries:
        below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in below if depth else ():
        with contextlib.suppress(PermissionError, FileNotFoundError):
            yield from _stores(directory / name, depth - 1)


def _load(path: Path) -> Store:
    job, node = path.parent.name, path.name
    try:
        token = (path / PFS_ID).read_text().strip()
    except FileNotFoundError:
        token = ""
    try:
        store = ReplicaStore.inspect_blocking(str(path / REPLICAS))
    except CorruptError as error:
        return Store(job, node, path, token, [], {"": str(error)})
    replicas = [committed for m in store.list() if (committed := store.committed(m.stage)) is not None]
    return Store(job, node, path, token, replicas, dict(store.damaged))


def in_use(store: Store) -> bool:
    """Whether a daemon has the store now."""
    try:
        with locked([store]):
            return False
    except UsageError:
        return True


@contextlib.contextmanager
def locked(stores: list[Store]) -> Iterator[None]:
    """Keep daemons out. Raises ``UsageError`` when one is in."""
    with contextlib.ExitStack() as stack:
        for store in stores:
            try:
                fd = os.open(store.directory / REPLICAS / LOCK, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            stack.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"a daemon of job {store.job} uses {store.directory}: 'cachexfs umount' drains it; "
                    "recover other jobs with --job"
                ) from None
        yield


def verify(committed: Committed, tell: Tell) -> None:
    """Read a replica in full. Raises ``CorruptError`` naming the first bad block, ``OSError``; tells bytes read."""
    view = memoryview(bytearray(min(PIECE_BYTES, max(committed.manifest.size, 1))))
    offset = 0
    while offset < committed.manifest.size:
        count = replica_copy.read_into(committed, offset, view)
        offset += count
        tell(count)
