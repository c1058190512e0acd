"""A request that was applied and not answered when its daemon died is answered once and applied once.

The daemon dies between the catalogue's commit and the answer (``dying/sitecustomize.py``). Until the next one takes the
mount up, another node undoes or redoes what the request did: a second application would show.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from real_support import raises_errno, until

from cachexfs.demo.cluster import LocalCluster

HERE = Path(__file__).parent
AT_FDCWD, RENAME_NOREPLACE, RENAME_EXCHANGE = -100, 1, 2


class Dying:
    """Orders to the daemons of the clusters made since."""

    def __init__(self, orders: Path) -> None:
        self.orders = orders

    def during(self, work: Callable[[], object], meanwhile: Callable[[], object], order: str = "die") -> object:
        """Run ``work`` so that its daemon dies once it is applied; ``meanwhile`` runs before the next daemon serves."""
        (self.orders / "died").unlink(missing_ok=True)
        (self.orders / "hold").touch()
        (self.orders / order).touch()
        result: list[object] = []

        def run() -> None:
            try:
                result.append(work())
            except OSError as error:
                result.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            until("the daemon has died", lambda: (self.orders / "died").exists() or bool(result))
            assert result == [], "answered before it died"
            meanwhile()
        finally:
            (self.orders / order).unlink(missing_ok=True)
            (self.orders / "hold").unlink()
            thread.join()
        assert not isinstance(result[0], OSError), result[0]
        return result[0]


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dying]:
    orders = tmp_path_factory.mktemp("orders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DYING", str(orders))
        patch.setenv("PYTHONPATH", f"{HERE / 'dying'}:{os.environ.get('PYTHONPATH', HERE.parents[1])}")
        yield Dying(orders)


@pytest.fixture(scope="module", params=["off", "auto"], ids=["handler", "kernel"])
def alone(
    dying: Dying, make_module_cluster: Callable[..., LocalCluster], request: pytest.FixtureRequest
) -> LocalCluster:
    return make_module_cluster(1, {"supervisor": "on", "passthrough": request.param})


@pytest.fixture(scope="module")
def two(dying: Dying, make_module_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    """Only node 0 has a supervisor: only its daemon dies."""
    cluster = make_module_cluster(2, {"supervisor": "on"}, mounted=False)
    cluster.node_options[1] = {"supervisor": "off"}
    cluster.mount()
    return cluster


def test_alone_every_change_is_applied_once(alone: LocalCluster, dying: Dying) -> None:
    at = alone.nodes[0].mountpoint / "once"
    at.mkdir()
    (at / "old").write_bytes(b"old bytes")

    def once(work: Callable[[], object]) -> object:
        return dying.during(work, lambda: None)

    fd = once(lambda: os.open(at / "new", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o640))
    os.write(fd, b"new bytes")
    os.close(fd)
    assert (at / "new").read_bytes() == b"new bytes"
    assert stat.S_IMODE((at / "new").stat().st_mode) == 0o640
    once(lambda: (at / "dir").mkdir())
    once(lambda: os.mkfifo(at / "fifo"))
    once(lambda: os.mknod(at / "node", 0o600))
    once(lambda: os.symlink("old", at / "pointer"))
    once(lambda: os.link(at / "old", at / "further"))
    assert (at / "old").stat().st_nlink == 2
    once(lambda: os.unlink(at / "further"))
    assert (at / "old").stat().st_nlink == 1
    once(lambda: os.rename(at / "old", at / "new"))
    assert (at / "new").read_bytes() == b"old bytes"
    once(lambda: (at / "dir").rmdir())
    once(lambda: os.truncate(at / "new", 3))
    assert (at / "new").read_bytes() == b"old"
    once(lambda: (at / "new").chmod(0o604))
    once(lambda: os.setxattr(at / "new", "user.a", b"1" * 40_000, os.XATTR_CREATE))
    once(lambda: os.setxattr(at / "new", "user.a", b"2", os.XATTR_REPLACE))
    assert os.getxattr(at / "new", "user.a") == b"2"
    once(lambda: os.removexattr(at / "new", "user.a"))
    once(lambda: renameat2(at / "node", at / "moved", RENAME_NOREPLACE))
    with raises_errno(errno.EEXIST):
        renameat2(at / "moved", at / "new", RENAME_NOREPLACE)
    with raises_errno(errno.EINVAL):  # refused by name, not half done
        renameat2(at / "moved", at / "new", RENAME_EXCHANGE)
    assert sorted(os.listdir(at)) == ["fifo", "moved", "new", "pointer"]
    assert stat.S_IMODE((at / "new").stat().st_mode) == 0o604
    with pytest.raises(FileExistsError):
        (at / "fifo").mkdir()


def renameat2(old: Path, new: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags) != 0:
        raise OSError(ctypes.get_errno(), f"rename {old} to {new}")


def test_alone_no_write_or_close_is_lost_or_doubled(alone: LocalCluster, dying: Dying) -> None:
    """The daemon dies when its handler has done its work, before the answer."""
    at = alone.nodes[0].mountpoint / "often"
    at.mkdir()

    def after(handler: str, work: Callable[[], object]) -> object:
        return dying.during(work, lambda: None, f"die-{handler}")

    put(at / "f", b"0123")
    fd = after("open", lambda: os.open(at / "f", os.O_APPEND | os.O_RDWR))
    assert isinstance(fd, int)
    after("write", lambda: os.write(fd, b"4567"))  # a file that exists is written by the handler
    os.write(fd, b"89")
    assert os.pread(fd, 100, 0) == b"0123456789"
    after("fsync", lambda: os.fsync(fd))
    os.write(fd, b"ab")
    after("flush", lambda: os.close(os.dup(fd)))
    assert (at / "f").read_bytes() == b"0123456789ab"
    os.write(fd, b"cd")
    (dying.orders / "died").unlink()
    (dying.orders / "die-release").touch()
    os.close(fd)
    until("the daemon has died", lambda: (dying.orders / "died").exists())
    assert (at / "f").read_bytes() == b"0123456789abcd"
    os.close(after("open", lambda: os.open(at / "f", os.O_TRUNC | os.O_WRONLY)))
    assert (at / "f").stat().st_size == 0
    assert after("opendir", lambda: os.listdir(at)) == ["f"]
    with raises_errno(errno.EOPNOTSUPP):
        os.open(at, os.O_TMPFILE | os.O_RDWR)


def test_alone_what_was_published_is_not_published_again(alone: LocalCluster, dying: Dying) -> None:
    """A shard would be newer than the commit file that names it, and its checkpoint never whole again."""
    path = alone.nodes[0].mountpoint / "shard"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.write(fd, os.urandom(3 << 20))
    for descriptor in (os.dup(fd), os.dup(fd), fd):
        dying.during(partial(os.close, descriptor), lambda: None, "die-flush")
        assert os.getxattr(path, "user.cachex.generation") == b"2"  # the first one was empty
    until("its digest is told", lambda: "user.cachex.digest" in os.listxattr(path))
    assert os.getxattr(path, "user.cachex.generation") == b"2"


@pytest.mark.parametrize("data", [b"", b"old bytes"])
def test_alone_an_open_file_that_loses_its_name_keeps_its_mode(alone: LocalCluster, dying: Dying, data: bytes) -> None:
    at = alone.nodes[0].mountpoint / f"open {len(data)}"
    at.mkdir()
    put(at / "f", data)
    put(at / "g", b"g")
    (at / "f").chmod(0o751)
    fd = os.open(at / "f", os.O_RDWR)
    dying.during(lambda: os.rename(at / "g", at / "f"), lambda: None, "die-orphaned")
    found = os.fstat(fd)
    assert (stat.S_IMODE(found.st_mode), found.st_size, found.st_nlink) == (0o751, len(data), 0)
    assert os.pread(fd, 100, 0) == data
    os.close(fd)
    assert (at / "f").read_bytes() == b"g"


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def create(here: Path, there: Path, during: Callable[..., object]) -> None:
    def meanwhile() -> None:
        (there / "new").unlink()
        put(there / "new", b"theirs")

    fd = during(lambda: os.open(here / "new", os.O_CREAT | os.O_EXCL | os.O_RDWR), meanwhile)
    os.write(fd, b"ours")
    assert os.pread(fd, 10, 0) == b"ours"
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)
    assert (here / "new").read_bytes() == (there / "new").read_bytes() == b"theirs"


def mkdir(here: Path, there: Path, during: Callable[..., object]) -> None:
    during(lambda: (here / "new").mkdir(), lambda: (there / "new").rmdir())
    assert not (here / "new").exists()


def symlink(here: Path, there: Path, during: Callable[..., object]) -> None:
    def meanwhile() -> None:
        (there / "new").unlink()
        os.symlink("theirs", there / "new")

    during(lambda: os.symlink("ours", here / "new"), meanwhile)
    assert os.readlink(here / "new") == "theirs"


def link(here: Path, there: Path, during: Callable[..., object]) -> None:
    during(lambda: os.link(here / "old", here / "new"), lambda: (there / "new").unlink())
    assert not (here / "new").exists()
    assert (here / "old").stat().st_nlink == 1


def unlink(here: Path, there: Path, during: Callable[..., object]) -> None:
    during(lambda: (here / "old").unlink(), lambda: put(there / "old", b"theirs"))
    assert (here / "old").read_bytes() == b"theirs"


def rmdir(here: Path, there: Path, during: Callable[..., object]) -> None:
    during(lambda: (here / "dir").rmdir(), lambda: (there / "dir").mkdir())
    assert (here / "dir").is_dir()


def rename(here: Path, there: Path, during: Callable[..., object]) -> None:
    during(lambda: (here / "old").rename(here / "new"), lambda: put(there / "old", b"theirs"))
    assert (here / "old").read_bytes() == b"theirs"
    assert (here / "new").read_bytes() == b"old bytes"


def rename_of_a_parent_that_goes(here: Path, there: Path, during: Callable[..., object]) -> None:
    put(here / "dir/f", b"f")
    during(lambda: (here / "dir/f").rename(here / "new"), lambda: (there / "dir").rmdir())
    assert (here / "new").read_bytes() == b"f"


def truncate(here: Path, there: Path, during: Callable[..., object]) -> None:
    during(lambda: os.truncate(here / "old", 3), lambda: put(there / "old", b"their longer bytes"))
    assert (here / "old").read_bytes() == b"their longer bytes"


def chmod(here: Path, there: Path, during: Callable[..., object]) -> None:
    during(lambda: (here / "old").chmod(0o600), lambda: (there / "old").chmod(0o444))
    assert stat.S_IMODE((here / "old").stat().st_mode) == 0o444


def setxattr(here: Path, there: Path, during: Callable[..., object]) -> None:
    def meanwhile() -> None:
        os.setxattr(there / "old", "user.a", b"theirs")

    during(lambda: os.setxattr(here / "old", "user.a", b"ours", os.XATTR_CREATE), meanwhile)
    assert os.getxattr(here / "old", "user.a") == b"theirs"


def setxattr_of_what_goes(here: Path, there: Path, during: Callable[..., object]) -> None:
    os.setxattr(here / "old", "user.a", b"0")

    def meanwhile() -> None:
        os.removexattr(there / "old", "user.a")

    during(lambda: os.setxattr(here / "old", "user.a", b"1", os.XATTR_REPLACE), meanwhile)
    assert os.listxattr(here / "old").count("user.a") == 0


def removexattr(here: Path, there: Path, during: Callable[..., object]) -> None:
    os.setxattr(here / "old", "user.a", b"0")

    def meanwhile() -> None:
        os.setxattr(there / "old", "user.a", b"theirs")

    during(lambda: os.removexattr(here / "old", "user.a"), meanwhile)
    assert os.getxattr(here / "old", "user.a") == b"theirs"


WORKS = (
    create, mkdir, symlink, link, unlink, rmdir, rename, rename_of_a_parent_that_goes, truncate, chmod, setxattr,
    setxattr_of_what_goes, removexattr,
)  # fmt: skip


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_what_another_node_does_in_between_stays(
    two: LocalCluster, dying: Dying, work: Callable[[Path, Path, Callable[..., object]], None]
) -> None:
    here, there = (node.mountpoint / work.__name__ for node in two.nodes)
    here.mkdir()
    (here / "dir").mkdir()
    put(here / "old", b"old bytes")
    work(here, there, dying.during)
