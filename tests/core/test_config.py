"""Names of mounts and the runtime directory."""

import os

import msgspec
import pytest

from cachexfs.config import MountOptions, NodeAddress, default_runtime_dir, mount_id


def test_a_mounts_name_depends_on_mount_point_and_node() -> None:
    names = {
        mount_id("/cachex", "n1"),
        mount_id("/cachex", "n2"),
        mount_id("/cache", "xn1"),
        mount_id("/cachex/n", "1"),
    }
    assert len(names) == 4
    assert all(len(name) == 16 and int(name, 16) >= 0 for name in names)


def test_the_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_runtime_dir({"CACHEXFS_RUNTIME_DIR": "/x/y/../z"}) == "/x/z"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_runtime_dir({"XDG_RUNTIME_DIR": "/run/user/0"}) == "/run/cachexfs"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert default_runtime_dir({"XDG_RUNTIME_DIR": "/run/user/1000"}) == "/run/user/1000/cachexfs"
    assert default_runtime_dir({}) == "/tmp/cachexfs-1000"


def test_options_reach_the_daemon_as_json() -> None:
    options = MountOptions(
        pfs="/pfs", mountpoint="/m", memory=1, nodes=(NodeAddress("a", "h", 1), NodeAddress("b", "h", 2))
    )
    assert msgspec.json.decode(msgspec.json.encode(options), type=MountOptions) == options
    assert not options.alone
    assert MountOptions(pfs="/pfs", mountpoint="/m", memory=1).alone
