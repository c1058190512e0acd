"""Directories that a mount is given: refused where they are somebody else's, and never emptied of what is not ours."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_support import Ran, Run

from cachexfs import ended, mountinfo
from cachexfs.demo.cluster import LocalCluster

IN_MEMORY = Path("/dev/shm")


class Places:
    """A PFS directory and a mount point, and ``mount --check`` of them."""

    def __init__(self, root: Path, run: Run) -> None:
        self.root, self.pfs, self.mountpoint = root, root / "d" / "pfs", root / "d" / "m"
        for path in (self.pfs, self.mountpoint):
            path.mkdir(parents=True)
        self._run = run

    def check(self, *words: str) -> Ran:
        return self._run("mount", "--check", self.pfs, self.mountpoint, "-o", ",".join(words))

    def refuses(self, *words: str) -> str:
        ran = self.check(*words)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
        return ran.err


@pytest.fixture
def places(tmp_path: Path, runtime: Path, run: Run) -> Places:
    return Places(tmp_path, run)


@pytest.fixture
def shm(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory in memory."""
    path = IN_MEMORY / f"cachexfs-test-{os.getpid()}"
    path.mkdir()
    yield path
    subprocess.run(["rm", "-r", path], check=True)


@pytest.mark.parametrize("option", ["staging", "spill"])
def test_a_directory_that_is_or_lies_in_the_pfs_or_the_mount_point(places: Places, option: str) -> None:
    for place in (places.pfs, places.mountpoint):
        assert f"lies in the {'PFS' if place == places.pfs else 'mount'}" in places.refuses(f"{option}={place}")
        assert "lies in" in places.refuses(f"{option}={place}/deeper")
    link = places.root / "link"
    link.symlink_to(places.pfs)
    assert "lies in the PFS directory" in places.refuses(f"{option}={link}")


def test_staging_that_holds_the_pfs_the_mount_point_or_nvme(places: Places) -> None:
    assert "holds the" in places.refuses(f"staging={places.root}/d")
    link = places.root / "link"
    link.symlink_to(places.root / "d")
    assert "holds the" in places.refuses(f"staging={link}")
    nvme = places.root / "n"
    nvme.mkdir()
    for one, two in ((nvme, nvme / "s"), (nvme / "s", nvme), (nvme, nvme)):
        assert "lies in the other" in places.refuses(f"staging={one}", f"nvme={two}")


def test_staging_that_others_use(places: Places, shm: Path) -> None:
    (shm / "precious").touch()
    said = places.refuses(f"staging={shm}")
    assert "it holds 'precious', and none of what a mount has in its staging (files, store, lock)" in said
    assert "give an empty directory" in said
    (shm / "precious").rename(shm / "lock")
    assert places.check(f"staging={shm}").code == 0  # what a daemon leaves that is killed while it starts
    (shm / "files").mkdir()
    (shm / "files" / "kept").touch()
    assert "it holds 'files'" in places.refuses(f"staging={shm}")
    (shm / "store").touch()
    assert places.check(f"staging={shm}").code == 0


def test_what_a_node_has_on_nvme_is_no_staging(places: Places, shm: Path) -> None:
    for path in ("pfs-id", "ended", "tls/key", "replicas/store", "replicas/lock", "replicas/1.data"):
        (shm / path).parent.mkdir(exist_ok=True)
        (shm / path).write_text("x")
    assert "it holds 'replicas'" in places.refuses(f"staging={shm}")
    assert "it holds '1.data'" in places.refuses(f"staging={shm}/replicas")


def test_staging_on_a_disk_is_a_warning(places: Places, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tmpfs" not in places.check(f"staging={shm}").err
    table = [mountinfo.Mounted("/", "8:1", "ext4", "/dev/sda1", "rw")]
    monkeypatch.setattr(mountinfo, "read", lambda path=mountinfo.PATH: table)
    ran = places.check(f"staging={places.root}/s")
    assert (ran.code, f"staging={places.root}/s lies on / (ext4), not on a tmpfs" in ran.err) == (0, True)


@pytest.mark.parametrize("option", ["spill", "log_file"])
def test_a_path_whose_parent_does_not_exist(places: Places, option: str) -> None:
    assert f"mkdir -p {places.root}/no" in places.refuses(f"{option}={places.root}/no/x")
    assert places.check(f"{option}={places.root}/x").code == 0


def test_what_a_mount_has_left_is_removed_and_nothing_beside_it(tmp_path: Path) -> None:
    staging, spill, nvme = tmp_path / "staging", tmp_path / "spill", tmp_path / "nvme"
    ours = [
        *(staging / name for name in ("store", "lock", "pfs-id", "mount.json", "files/1.1.a", "spare/3")),
        spill / ("a" * 16) / "1.1.a", nvme / "replicas" / "partial" / "x", nvme / "etcd" / "data" / "wal",
        nvme / f"spill-{'b' * 16}" / ("a" * 16) / "1.1.a",
    ]  # fmt: skip
    others = [
        staging / "precious", staging / "files" / "deep" / "precious", staging / "d" / "files" / "precious",
        spill / "precious" / "x", nvme / "precious",
    ]  # fmt: skip
    for path in (*ours, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    ended.clear(str(staging), str(nvme), str(spill))
    found = [path for place in (staging, spill, nvme) for path in place.rglob("*") if path.is_file()]
    assert sorted(found) == sorted(others)


def test_an_umount_leaves_what_others_have_put_into_staging(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1)
    staging = cluster.nodes[0].staging
    (cluster.nodes[0].mountpoint / "f").write_bytes(b"f")
    (staging / "precious").write_text("x")
    cluster.umount()
    assert os.listdir(staging) == ["precious"]
    (staging / "precious").unlink()
    cluster.mount()
    cluster.umount()
    assert not staging.exists()
