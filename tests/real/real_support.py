"""Help for the tests on real mounts: waiting, checkpoints written in DCP's order, a watcher of the PFS directory."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr

WAIT_TIMEOUT_S = 150.0  # longer than a survivor waits for what a lost node had begun (``owners.FENCE_S``)
POLL_S = 0.02
COMMIT = ".metadata"


def until(what: str, condition: Callable[[], bool], timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Wait for ``condition``; a generous deadline that says what did not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(POLL_S)


def until_stage(path: Path, *stages: str) -> None:
    """Wait until ``stage`` of a path is one of ``stages``."""
    until(f"{path} {' or '.join(stages)}, now {xattr(path, 'stage')}", lambda: xattr(path, "stage") in stages)


def write_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """As DCP writes: create or truncate, write, fsync, close."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view[: 1 << 20]) :]
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def contents_below(root: Path) -> list[bytes]:
    """Contents of all files below a directory, the hidden ones too, of one moment: looked again while names move."""
    while True:
        paths = [path for path in root.rglob("*") if path.is_file()]
        with contextlib.suppress(FileNotFoundError):
            found = [path.read_bytes() for path in paths]
            if [path for path in root.rglob("*") if path.is_file()] == paths:
                return found


def memory_below(root: Path) -> int:
    """Bytes that the files below a directory take, while they come and go."""
    total = 0
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            total += status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
    return total


@dataclass(frozen=True)
class Template:
    """The files of one checkpoint by name."""

    files: dict[str, bytes]

    @classmethod
    def read(cls, directory: Path) -> Template:
        return cls({path.name: path.read_bytes() for path in directory.iterdir()})

    def sizes(self) -> dict[str, int]:
        """Sizes of the shards by name (the commit file's may differ by a few bytes)."""
        return {name: len(data) for name, data in self.files.items() if name != COMMIT}

    def shards(self) -> list[str]:
        return sorted(self.sizes())

    def save(self, mounts: Sequence[Path], directory: str, *, sync: bool = True) -> None:
        """Write the checkpoint in DCP's order, shard i through the mount whose block it falls into."""
        for mount in mounts:
            with contextlib.suppress(FileExistsError):
                os.makedirs(mount / directory)
        names = self.shards()
        for rank, name in enumerate(names):
            mount = mounts[rank * len(mounts) // len(names)]
            write_file(mount / directory / name, self.files[name], sync=sync)
        self.commit(mounts[0] / directory, sync=sync)

    def commit(self, directory: Path, *, sync: bool = True) -> None:
        """What rank 0 does last: temporary name, unlink of an old commit file, rename."""
        write_file(directory / f"{COMMIT}.tmp", self.files[COMMIT], sync=sync)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(directory / COMMIT)
        os.rename(directory / f"{COMMIT}.tmp", directory / COMMIT)

    def same_as(self, directory: Path) -> list[str]:
        """What differs in a directory from this checkpoint; empty when nothing does."""
        wrong = []
        for name, data in self.files.items():
            try:
                found = (directory / name).read_bytes()
            except OSError as error:
                wrong.append(f"{name}: {error.strerror}")
                continue
            if found != data:
                where = _differ(found, data)
                wrong.append(f"{name}: {len(found)} bytes, {len(data)} expected, first difference at {where}")
        return wrong


def _differ(one: bytes, other: bytes) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass
class Verdict:
    """What the PFS watcher saw: looks at a commit file with its shards, and the looks that were wrong."""

    whole: int = 0
    absent: int = 0
    wrong: list[str] = field(default_factory=list)


class PfsWatcher:
    """Looks at a PFS directory all the time: wherever a ``.metadata`` is, all that it names must be whole.

    A look counts when the commit file was the same one (inode, mtime, ctime) before and after its shards were read.
    """

    def __init__(self, pfs: Path, templates: Sequence[Template]) -> None:
        self.pfs = pfs
        self.verdict = Verdict()
        self._by_commit = {template.files[COMMIT]: template for template in templates}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pfs watcher", daemon=True)

    def __enter__(self) -> PfsWatcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            commits = [
                Path(d) / COMMIT for d, _, files in os.walk(self.pfs) if COMMIT in files and ".cachexfs" not in d
            ]
            if not commits:
                self.verdict.absent += 1
            for commit in commits:
                self._look(commit)

    def _look(self, commit: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            before = _identity(commit)
            data = commit.read_bytes()
            template = self._by_commit.get(data)
            wrong = ["a .metadata that nobody saved"] if template is None else template.same_as(commit.parent)
            if _identity(commit) != before:
                return
            if wrong:
                self.verdict.wrong.append(f"{commit.parent.relative_to(self.pfs)}: {', '.join(wrong)}")
            else:
                self.verdict.whole += 1


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


@contextlib.contextmanager
def pfs_away(cluster: LocalCluster) -> Iterator[None]:
    """The PFS directory is not there. Its root has been looked at before: only then is a miss certain without it."""
    os.listdir(cluster.nodes[0].mountpoint)
    off = cluster.pfs.with_name("pfs.off")
    cluster.pfs.rename(off)
    try:
        yield
    finally:
        off.rename(cluster.pfs)


@contextlib.contextmanager
def raises_errno(*codes: int) -> Iterator[None]:
    """The body fails with one of these errnos, by name in the message when it does not."""
    names = " or ".join(errno.errorcode[code] for code in codes)
    with pytest.raises(OSError) as caught:  # noqa: PT011 (the errno is checked below)
        yield
    assert caught.value.errno in codes, f"{errno.errorcode.get(caught.value.errno or 0)}, {names} expected"
