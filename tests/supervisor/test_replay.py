"""A daemon that dies after applying and before answering: answered once, applied once."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cachexfs.supervisor import wire
from cachexfs.supervisor.messages import Replayed
from cachexfs.supervisor.replay import IDENTIFIED, PID_MAX, TABLE, Replays, Rule, describe

from .conftest import Mount


def create(point: Path) -> None:
    os.close(os.open(point / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with pytest.raises(FileExistsError):
        os.open(point / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY)


def mkdir(point: Path) -> None:
    os.mkdir(point / "new")
    with pytest.raises(FileExistsError):
        os.mkdir(point / "new")


def symlink(point: Path) -> None:
    os.symlink("target", point / "new")
    assert os.readlink(point / "new") == "target"
    with pytest.raises(FileExistsError):
        os.symlink("target", point / "new")


def link(point: Path) -> None:
    os.link(point / "old", point / "new")
    assert os.stat(point / "new").st_ino == os.stat(point / "old").st_ino


def mknod(point: Path) -> None:
    os.mkfifo(point / "new")
    with pytest.raises(FileExistsError):
        os.mkfifo(point / "new")


def unlink(point: Path) -> None:
    os.unlink(point / "old")
    with pytest.raises(FileNotFoundError):
        os.unlink(point / "old")


def rmdir(point: Path) -> None:
    os.rmdir(point / "dir")
    with pytest.raises(FileNotFoundError):
        os.rmdir(point / "dir")


def rename(point: Path) -> None:
    os.rename(point / "old", point / "new")
    assert (point / "new").read_bytes() == b"old bytes"
    with pytest.raises(FileNotFoundError):
        os.rename(point / "old", point / "new")


def write(point: Path) -> None:
    with open(point / "old", "ab", buffering=0) as out:
        out.write(b"+more")
    assert (point / "old").read_bytes() == b"old bytes+more"


def truncate(point: Path) -> None:
    os.truncate(point / "old", 3)
    assert (point / "old").read_bytes() == b"old"


def flush(point: Path) -> None:
    os.close(os.open(point / "old", os.O_RDONLY))


def fsync(point: Path) -> None:
    fd = os.open(point / "old", os.O_RDWR)
    os.fsync(fd)
    os.close(fd)


ONCE: list[Callable[[Path], None]] = [create, mkdir, symlink, link, mknod, unlink, rmdir, rename]
AGAIN: list[Callable[[Path], None]] = [write, truncate, flush, fsync]


@pytest.mark.parametrize("work", ONCE + AGAIN, ids=lambda work: work.__name__)
def test_replayed_once_applied_once(mount: Mount, work: Callable[[Path], None]) -> None:
    (mount.root / "old").write_bytes(b"old bytes")
    (mount.root / "dir").mkdir()
    mount.up("--passthrough", "off", die=work.__name__)
    work(mount.point)
    assert mount.status()["restarts"] == 1
    if work in ONCE:
        assert mount.applied(work.__name__) == 1
    else:
        assert mount.applied(work.__name__) >= 2
    assert mount.umount() == 0


def test_a_replay_shows_the_request_id_of_the_first_time(mount: Mount) -> None:
    mount.up(die="mkdir")
    os.mkdir(mount.point / "a")
    os.mkdir(mount.point / "b")
    lines = [line for line in Path(f"{mount.root}.applied").read_text().splitlines() if line.startswith("id ")]
    first, again, other = [line[3:].strip("()").split(", ") for line in lines]
    assert first[0] == again[0] != other[0]
    assert [first[1], again[1], other[1]] == ["False", "True", "False"]
    assert mount.umount() == 0


def test_several_requests_of_one_moment_are_all_replayed(mount: Mount) -> None:
    mount.up(die="create,mkdir,unlink,rename")
    for i in range(3):
        (mount.point / f"f{i}").write_bytes(b"x")
        os.mkdir(mount.point / f"d{i}")
        os.rename(mount.point / f"f{i}", mount.point / f"g{i}")
        os.unlink(mount.point / f"g{i}")
    assert sorted(os.listdir(mount.point)) == ["d0", "d1", "d2"]
    assert mount.status()["restarts"] == 4
    assert mount.umount() == 0


def test_request_ids_are_no_process_ids() -> None:
    row = Replayed(wire.MKDIR, 10, PID_MAX + 5, 1, b"d", 0, b"")
    replays = Replays([row, Replayed(wire.LOOKUP, 12, 0, 1, b"e", 0, b"")])
    assert list(replays) == [PID_MAX + 5]
    assert int(Path("/proc/sys/kernel/pid_max").read_text()) <= PID_MAX


@pytest.mark.parametrize("flags", [0, os.XATTR_CREATE, os.XATTR_REPLACE])
def test_the_flags_of_a_setxattr_are_remembered(flags: int) -> None:
    body = (3).to_bytes(4, "little") + flags.to_bytes(4, "little") + b"user.a\0xyz"
    request = wire.IN_HEADER.pack(40 + len(body), wire.SETXATTR, 12, 3, 0, 0, 0, 0, 0) + body
    replays = Replays([describe(request, PID_MAX + 1)])
    assert replays.creates_xattr(PID_MAX + 1) == (flags == os.XATTR_CREATE)


def test_a_rename_is_described_with_both_names() -> None:
    body = (7).to_bytes(8, "little") + bytes(8) + b"old\0new\0"
    request = wire.IN_HEADER.pack(40 + len(body), wire.RENAME2, 12, 3, 0, 0, 77, 0, 0) + body
    row = describe(request, 77)
    assert (row.node, row.name, row.node2, row.name2) == (3, b"old", 7, b"new")


def test_the_table_covers_every_operation_of_the_protocol() -> None:
    operations = {
        value
        for name, value in vars(wire).items()
        if name.isupper() and isinstance(value, int) and 1 <= value <= 52 and "_" not in name
    }
    assert {wire.RENAME2, wire.CREATE} <= operations
    assert operations - set(TABLE) == set()
    assert {op for op, row in TABLE.items() if row.rule is Rule.ONCE} <= IDENTIFIED
    assert {op for op, row in TABLE.items() if row.rule is Rule.DROP} | {wire.INTERRUPT} == wire.NO_REPLY


def test_the_documentation_shows_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "supervisor.md").read_text()
    missing = [row.name for row in TABLE.values() if f"| {row.name} | {row.rule.value} | {row.why} |" not in text]
    assert missing == []


def test_errors_of_the_first_life_stay_errors(mount: Mount) -> None:
    mount.up(die="mkdir")
    with pytest.raises(OSError, match="File name too long") as caught:
        os.mkdir(mount.point / ("x" * 300))
    assert caught.value.errno == errno.ENAMETOOLONG
    assert mount.umount() == 0
