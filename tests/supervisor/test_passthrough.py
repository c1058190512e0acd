"""Passthrough: the kernel does the I/O on the backing file, and everything still is one filesystem."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachexfs.supervisor import passthrough

from .conftest import REPOSITORY, Mount, wait_until

SIZE = 3 << 20
WHY_NOT = "needs Linux 6.9 with CONFIG_FUSE_PASSTHROUGH, and root"


@pytest.fixture
def passed(mount: Mount) -> Mount:
    mount.up("--passthrough", "auto", die="write")  # a WRITE that reached the daemon would be logged, then kill it
    if not mount.status()["passthrough"]:
        pytest.skip(WHY_NOT)
    return mount


def writes_seen(mount: Mount) -> int:
    log = Path(f"{mount.root}.applied")
    return mount.applied("write") if log.exists() else 0


def test_bytes_do_not_pass_through_the_daemon(passed: Mount) -> None:
    data = os.urandom(SIZE)
    path = passed.point / "f"
    with open(path, "wb", buffering=0) as out:
        assert out.write(data) == SIZE
        assert os.fstat(out.fileno()).st_size == SIZE
        assert path.read_bytes() == data
    assert (passed.root / "f").read_bytes() == data
    assert os.stat(path).st_blocks * 512 >= SIZE
    assert writes_seen(passed) == 0
    wait_until(lambda: passed.status()["backings"] == 0, "backings are given back")
    assert passed.umount() == 0


def test_truncate_append_rename_and_unlink_while_open(passed: Mount) -> None:
    path = passed.point / "f"
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND)
    os.write(fd, b"0123456789")
    os.ftruncate(fd, 4)
    os.write(fd, b"xy")
    assert os.pread(fd, 99, 0) == b"0123xy"
    os.rename(path, passed.point / "g")
    os.write(fd, b"z")
    assert (passed.point / "g").read_bytes() == b"0123xyz"
    second = os.open(passed.point / "g", os.O_RDONLY)
    os.unlink(passed.point / "g")
    os.write(fd, b"!")
    assert os.pread(second, 99, 0) == b"0123xyz!"
    assert os.fstat(fd).st_size == 8
    os.close(fd)
    os.close(second)
    assert writes_seen(passed) == 0
    assert passed.umount() == 0


def test_shared_mappings_write_and_read(passed: Mount) -> None:
    path = passed.point / "m"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    os.truncate(fd, 1 << 16)
    with mmap.mmap(fd, 1 << 16) as shared:
        shared[4096:4099] = b"abc"
        other = os.open(path, os.O_RDONLY)
        with mmap.mmap(other, 1 << 16, prot=mmap.PROT_READ) as view:
            assert view[4096:4099] == b"abc"
        assert os.pread(other, 3, 4096) == b"abc"
        os.close(other)
    os.close(fd)
    assert path.read_bytes()[4096:4099] == b"abc"
    assert passed.umount() == 0


def test_sparse_files_stay_sparse(passed: Mount) -> None:
    path = passed.point / "s"
    with open(path, "wb", buffering=0) as out:
        out.seek(64 << 20)
        out.write(b"end")
    assert os.stat(path).st_size == (64 << 20) + 3
    assert os.stat(path).st_blocks * 512 < 1 << 20
    assert passed.umount() == 0


def test_a_published_file_opened_again_through_two_lives(passed: Mount) -> None:
    path = passed.point / "f"
    path.write_bytes(b"first")
    held = os.open(path, os.O_RDONLY)
    passed.kill_daemon()
    wait_until(lambda: passed.status()["restarts"] == 1 and passed.phase() == "serving", "restart")
    with open(path, "r+b", buffering=0) as out:
        out.write(b"FIRST")
    assert os.pread(held, 9, 0) == b"FIRST"
    os.close(held)
    assert writes_seen(passed) == 0
    assert passed.umount() == 0


def test_off_means_the_handler(mount: Mount) -> None:
    mount.up("--passthrough", "off")
    status = mount.status()
    assert status["passthrough"] is False
    assert status["passthrough_reason"] == "passthrough=off"
    (mount.point / "f").write_bytes(b"by handler")
    assert (mount.point / "f").read_bytes() == b"by handler"
    assert mount.status()["backings"] == 0
    assert mount.umount() == 0


def test_a_filesystem_that_was_not_allowed_gets_the_handler(mount: Mount, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert os.stat(elsewhere).st_dev != os.stat(mount.root).st_dev
    mount.up("--passthrough", "auto", root=str(elsewhere))
    (mount.point / "f").write_bytes(b"x" * 100)
    assert (mount.point / "f").read_bytes() == b"x" * 100
    status = mount.status()
    if status["passthrough"]:
        assert "--backing-dir" in str(status["last_refusal"])
    assert status["backings"] == 0
    assert mount.umount() == 0


@pytest.mark.parametrize(
    ("release", "caps", "why"),
    [
        ("5.14.0-427.el9.x86_64", True, "older than 6.9"),
        ("6.8.0", True, "older than 6.9"),
        ("6.9", True, ""),
        ("7.0-rc1", True, ""),
        ("6.18.4", False, "CAP_SYS_ADMIN"),
    ],
)
def test_probing_says_why_not(monkeypatch: pytest.MonkeyPatch, release: str, caps: bool, why: str) -> None:
    uname = os.uname_result(("Linux", "node", release, "#1", "x86_64"))
    monkeypatch.setattr(passthrough.os, "uname", lambda: uname)
    monkeypatch.setattr(passthrough, "has_sys_admin", lambda: caps)
    monkeypatch.setattr(passthrough, "_INITIAL_USER_NAMESPACE", os.stat("/proc/self/ns/user").st_ino)
    said = passthrough.probe("auto")
    assert (why in said) if why else said == ""
    assert passthrough.probe("off") == "passthrough=off"


def test_root_of_a_container_is_told_why_not() -> None:
    """Its CAP_SYS_ADMIN is good for mounting, and the kernel refuses each backing file."""
    code = "from cachexfs.supervisor.passthrough import probe; print(probe('auto'))"
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "user namespace" in done.stdout
