"""Which mount a path lies in, without touching the mount."""

import os
from pathlib import Path

import pytest
from cli_support import DEVICE, list_mount

from cachexfs.cli import mounts
from cachexfs.errors import CannotTellError


def test_the_mount_of_a_path_is_the_longest_that_holds_it(kernel: Path, runtime: Path) -> None:
    list_mount(kernel, "/a", "0:1")
    list_mount(kernel, "/a/b", "0:2")
    for path, device, relative in (
        ("/a", "0:1", ""),
        ("/a/x/../y", "0:1", "y"),
        ("/a/bc", "0:1", "bc"),
        ("/a/b/", "0:2", ""),
        ("/a/b/c/d", "0:2", "c/d"),
    ):
        found = mounts.find(path)
        assert found is not None
        assert (found.mount.device, found.relative) == (device, relative)
    assert mounts.find("/ab") is None


def test_names_with_spaces_and_other_filesystems(kernel: Path) -> None:
    with kernel.open("a") as file:
        file.write("50 22 0:9 / /gone rw - fuse.cachexfs x rw\n51 22 0:10 / /gone rw - tmpfs x rw\n")
        file.write("52 22 0:11 / /odd rw - fuse.sshfs x rw\nnonsense\n")
    list_mount(kernel, "/with space", "0:3")
    ours, points = mounts.read_mountinfo()
    assert [(mount.mountpoint, mount.device) for mount in ours] == [("/with space", "0:3")]
    assert points == {"/", "/gone", "/odd", "/with space"}


def test_links_are_followed_outside_a_mount_and_not_inside(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "m"
    (inside / "step").mkdir(parents=True)
    (inside / "latest").symlink_to("step")
    (tmp_path / "link").symlink_to("m/step")
    (tmp_path / "loop").symlink_to("loop")
    list_mount(kernel, inside)
    touched: list[str] = []
    readlink = os.readlink

    def watched(path: str) -> str:
        touched.append(path)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", watched)
    found = mounts.find(str(tmp_path / "link" / "f"))
    assert found is not None
    assert found.relative == "step/f"
    found = mounts.find(str(inside / "latest"))
    assert found is not None
    assert found.relative == "latest"
    assert not [path for path in touched if path.startswith(str(inside))]
    with pytest.raises(CannotTellError, match="symbolic links"):
        mounts.find(str(tmp_path / "loop"))


def test_the_daemon_of_a_mount_has_its_device(kernel: Path, runtime: Path) -> None:
    entry = {"mountpoint": "/a", "pfs": "/p", "node": "n", "job": "j", "pid": 1, "socket": "/s", "log": ""}
    for name, device in (("1", "0:1"), ("2", DEVICE)):
        text = str(entry | {"device": device, "node": f"n{name}"}).replace("'", '"')
        (runtime / f"{name}.json").write_text(text)
    (runtime / "3.json").write_text("{broken")
    list_mount(kernel, "/a")
    found = mounts.find("/a")
    assert found is not None
    assert found.entry is not None
    assert found.entry.node == "n2"


def test_what_others_wrote_is_not_believed(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runtime / "1.json").write_text(
        '{"mountpoint":"/a","pfs":"/p","node":"n","job":"j","pid":1,"socket":"/s","log":"","device":"0:1"}'
    )
    assert len(mounts.registry()) == 1
    owner = os.stat(runtime).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:  # root's directory is believed by everybody: make it somebody's
        os.chown(runtime, 12345, -1)
    assert mounts.registry() == []
