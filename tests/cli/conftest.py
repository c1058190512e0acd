"""Fixtures of the command line's tests."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import FakeDaemon, Run, list_mount

from cachexfs.cli import mounts


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime directory of this test, where no mount is registered."""
    path = tmp_path / "run"
    path.mkdir()
    monkeypatch.setenv("CACHEXFS_RUNTIME_DIR", str(path))
    return path


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that takes the place of /proc/self/mountinfo."""
    path = tmp_path / "mountinfo"
    path.write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    monkeypatch.setattr(mounts, "MOUNTINFO", str(path))
    return path


@pytest.fixture
def daemon(tmp_path: Path, runtime: Path, kernel: Path) -> Iterator[FakeDaemon]:
    """A listed, registered, answering mount at ``tmp_path / "m"``."""
    mountpoint = tmp_path / "m"
    mountpoint.mkdir()
    fake = FakeDaemon(mountpoint, runtime)
    fake.register(pid=1)
    list_mount(kernel, mountpoint)
    yield fake
    fake.stop()


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    return Run(capfd)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that DCP itself wrote."""
    import torch
    import torch.distributed.checkpoint as dcp

    path = tmp_path_factory.mktemp("dcp") / "step-1"
    with warnings.catch_warnings():  # torch warns of no_dist
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.arange(1000.0), "step": 1}, checkpoint_id=str(path), no_dist=True)
    return path
