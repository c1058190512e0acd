"""A daemon that dies after applying and before answering: answered once, applied once."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cachexfs.supervisor import wire
from cachexfs.supervisor.messages import Replayed
from cachexfs.supervisor.replay import IDENTIFIED, TABLE, Replays, Rule, describe

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


NAMED: list[Callable[[Path], None]] = [create, mkdir, symlink, link, mknod, unlink, rmdir, rename]
AGAIN: list[Callable[[Path], None]] = [write, truncate, flush, fsync]


@pytest.mark.parametrize("work", NAMED + AGAIN, ids=lambda work: work.__name__)
def test_replayed_once_applied_once(mount: Mount, work: Callable[[Path], None]) -> None:
    (mount.root / "old").write_bytes(b"old bytes")
    (mount.root / "dir").mkdir()
    mount.up("--passthrough", "off", die=work.__name__)
    work(mount.point)
    assert mount.status()["restarts"] == 1
    if work in NAMED:
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


def test_the_failure_of_a_new_request_is_not_hidden_by_an_old_replay() -> None:
    row = Replayed(wire.MKDIR, 10, 5, 1, b"d", 0, b"")
    replays = Replays([row])
    assert not replays.take(wire.MKDIR, 1, b"other")
    assert not replays.take(wire.CREATE, 1, b"d")
    assert not replays.take(wire.MKDIR, 2, b"d")
    assert replays.take(wire.MKDIR, 1, b"d")
    assert not replays.take(wire.MKDIR, 1, b"d")
    assert replays.is_replay(5)
    assert not replays.is_replay(10)


def test_rename2_is_asked_for_as_rename() -> None:
    body = (7).to_bytes(8, "little") + bytes(8) + b"old\0new\0"
    request = wire.IN_HEADER.pack(40 + len(body), wire.RENAME2, 12, 3, 0, 0, 77, 0, 0) + body
    row = describe(request, 77)
    assert (row.node, row.name, row.node2, row.name2) == (3, b"old", 7, b"new")
    assert Replays([row]).take(wire.RENAME, 3, b"old")


def test_the_table_covers_every_operation_of_the_protocol() -> None:
    operations = {
        value
        for name, value in vars(wire).items()
        if name.isupper() and isinstance(value, int) and 1 <= value <= 52 and "_" not in name
    }
    assert {wire.RENAME2, wire.CREATE} <= operations
    assert operations - set(TABLE) == set()
    assert {op for op, row in TABLE.items() if row.rule is Rule.NAMED} <= IDENTIFIED
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
