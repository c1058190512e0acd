"""kill -9 of the daemon under load: the application sees a pause, never an error, never a wrong byte."""

import hashlib
import mmap
import os
import random
import threading
import time
from pathlib import Path

import pytest

from .conftest import Mount, wait_until

KILLS = 20
BLOCK = 1 << 20


class Load:
    """Threads that write, read back, rename, list and remove, until told to stop; keeps every exception."""

    def __init__(self, point: Path) -> None:
        self.point = point
        self.errors: list[BaseException] = []
        self.rounds = 0
        self.bytes_checked = 0
        self._is_over = threading.Event()
        workers = [self.write_big, self.write_big, self.small_files, self.append_and_read]
        self._threads = [threading.Thread(target=self._guard, args=(w, i)) for i, w in enumerate(workers)]

    def _guard(self, work, number: int) -> None:  # type: ignore[no-untyped-def]
        rng = random.Random(number)
        folder = self.point / f"w{number}"
        try:
            folder.mkdir()
            while not self._is_over.is_set():
                work(folder, rng)
                self.rounds += 1
        except BaseException as error:
            self.errors.append(error)

    def write_big(self, folder: Path, rng: random.Random) -> None:
        """Write 8 MiB under a temporary name, rename, read back; the old one is replaced."""
        data = rng.randbytes(BLOCK)
        fd = os.open(folder / "part", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for i in range(8):
            assert os.pwrite(fd, data, i * BLOCK) == BLOCK
        os.fsync(fd)
        os.close(fd)
        os.rename(folder / "part", folder / "whole")
        got = (folder / "whole").read_bytes()
        assert hashlib.sha1(got).digest() == hashlib.sha1(data * 8).digest()
        self.bytes_checked += len(got)

    def small_files(self, folder: Path, rng: random.Random) -> None:
        """O_EXCL creates, symlinks, links, directories: each works once and only once."""
        for i in range(10):
            fd = os.open(folder / f"f{i}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            os.write(fd, b"%d" % i)
            os.close(fd)
        os.mkdir(folder / "d")
        os.symlink("f0", folder / "s")
        os.rename(folder / "f1", folder / "d" / "g")
        assert (folder / "s").read_bytes() == b"0"
        assert (folder / "d" / "g").read_bytes() == b"1"
        assert sorted(os.listdir(folder)) == ["d"] + [f"f{i}" for i in range(10) if i != 1] + ["s"]
        os.unlink(folder / "d" / "g")
        os.rmdir(folder / "d")
        os.unlink(folder / "s")
        for i in range(10):
            if i != 1:
                os.unlink(folder / f"f{i}")
        assert os.listdir(folder) == []

    def append_and_read(self, folder: Path, rng: random.Random) -> None:
        """O_APPEND records stay in order and complete, through one handle that lives long."""
        path = folder / "log"
        with open(path, "ab", buffering=0) as out:
            for i in range(50):
                out.write(b"%06d\n" % i)
            assert path.read_bytes() == b"".join(b"%06d\n" % i for i in range(50))
        os.unlink(path)

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_twenty_kills_under_load_are_not_seen(mount: Mount, passthrough: str) -> None:
    mount.up("--passthrough", passthrough, direct="1")
    rng = random.Random(7)
    with Load(mount.point) as load:
        for kill in range(1, KILLS + 1):
            rounds = load.rounds
            time.sleep(rng.uniform(0.0, 0.15))
            mount.kill_daemon()
            wait_until(
                lambda kill=kill: mount.phase() == "serving" and mount.status()["restarts"] == kill,  # type: ignore[misc]
                f"daemon after kill {kill}",
            )
            if kill % 5 == 0:
                wait_until(lambda rounds=rounds: load.rounds > rounds or load.errors, "the load goes on")  # type: ignore[misc]
    assert load.errors == []
    assert load.bytes_checked > 0
    assert mount.status()["restarts"] == KILLS
    wait_until(lambda: mount.status()["handles_open"] == 0, "the last RELEASE is answered")
    assert mount.umount() == 0


def test_upgrade_under_load_is_not_seen(mount: Mount) -> None:
    mount.up()
    with Load(mount.point) as load:
        for life in range(2, 7):
            pid = mount.daemon_pid()
            assert mount.ask("restart") == {"said": "restarting"}
            wait_until(
                lambda life=life: mount.phase() == "serving" and mount.status()["life"] == life,  # type: ignore[misc]
                "the new daemon serves",
            )
            assert mount.daemon_pid() != pid
    assert load.errors == []
    assert mount.status()["failures_in_a_row"] == 0
    assert mount.umount() == 0


def test_open_files_and_mappings_go_on_in_the_next_life(mount: Mount) -> None:
    mount.up()
    path = mount.point / "f"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(fd, b"a" * 8192)
    with mmap.mmap(fd, 8192) as shared:
        mount.kill_daemon()
        wait_until(lambda: mount.status()["restarts"] == 1, "restart")
        shared[0:3] = b"xyz"
        assert os.pread(fd, 4, 0) == b"xyza"
        os.unlink(path)
        mount.kill_daemon()
        wait_until(lambda: mount.status()["restarts"] == 2 and mount.phase() == "serving", "restart")
        assert os.pread(fd, 4, 0) == b"xyza"
        assert os.fstat(fd).st_size == 8192
        assert os.pwrite(fd, b"!", 8192) == 1
    os.close(fd)
    assert not path.exists()
    wait_until(lambda: mount.status()["handles_open"] == 0, "release")
    assert mount.umount() == 0
    assert os.listdir(f"{mount.root}.held") == []


def test_a_directory_listing_goes_on_in_the_next_life(mount: Mount) -> None:
    mount.up()
    for i in range(500):
        (mount.point / f"f{i}").touch()
    with os.scandir(mount.point) as entries:
        names = [next(entries).name for _ in range(10)]
        mount.kill_daemon()
        names += [entry.name for entry in entries]
    assert sorted(names) == sorted(f"f{i}" for i in range(500))
    assert mount.umount() == 0
