"""Copies between staging files: from memory to NVMe they go around the page cache, and holes stay holes."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachexfs.engine import copying
from cachexfs.engine.copying import copy_bytes
from cachexfs.errors import FsError

PAGE = 4096
MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory on another filesystem than the tests' own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


def filled(path: Path, size: int, holes: tuple[tuple[int, int], ...] = ()) -> int:
    """A file of random bytes, but for holes (start, end); its descriptor."""
    data = bytearray(random.Random(size).randbytes(size))
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, size)
    at = 0
    for start, end in (*holes, (size, size)):
        os.pwrite(fd, data[at:start], at)
        at = end
    return fd


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize(
    ("size", "length", "holes"),
    [
        (1, 1, ()),
        (PAGE, PAGE, ()),
        (3 * PAGE + 5, 3 * PAGE + 5, ()),
        (9 * MIB + 17, 9 * MIB + 17, ()),
        (9 * MIB + 17, 5 * MIB + 3, ()),
        (9 * MIB, 9 * MIB, ((MIB, 3 * MIB), (8 * MIB, 9 * MIB))),
    ],
)
async def test_a_copy_to_another_filesystem(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, length: int,
    holes: tuple[tuple[int, int], ...], refused: bool,
) -> None:  # fmt: skip
    """``refused``: the target does not do without its cache."""
    source = filled(memory / "source", size, holes)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    direct: list[int] = []
    real_pwrite = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if refused:
            raise OSError(errno.EINVAL, "Invalid argument")
        direct.append(len(data))
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(copying.os, "pwrite", pwrite)
    await copy_bytes(source, target, length)
    monkeypatch.undo()
    assert (tmp_path / "target").read_bytes() == (memory / "source").read_bytes()[:length]
    data_bytes = length - sum(end - start for start, end in holes)
    assert sum(direct) == (0 if refused else data_bytes // PAGE * PAGE)
    assert os.fstat(target).st_blocks * 512 <= data_bytes + PAGE
    assert not fcntl.fcntl(target, fcntl.F_GETFL) & os.O_DIRECT
    os.close(source)
    os.close(target)


async def test_a_source_that_is_too_short(memory: Path, tmp_path: Path) -> None:
    source = filled(memory / "source", PAGE)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    with pytest.raises(FsError, match="ends at byte 4096, 4097 were expected"):
        await copy_bytes(source, target, PAGE + 1)
    os.close(source)
    os.close(target)
