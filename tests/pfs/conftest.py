"""Fixtures for the tests of the PFS pool: directories and a filesystem with faults."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pfs_support import FaultMount

MOUNT_WAIT_S = 100.0


@pytest.fixture
def fault_mount(tmp_path: Path) -> Iterator[Callable[..., FaultMount]]:
    """Make mounts of ``faultfs``; several may share one backing directory, like the nodes of a job."""
    started: list[tuple[subprocess.Popen[bytes], Path]] = []

    def mount(name: str = "m", backing: Path | None = None) -> FaultMount:
        below = backing or tmp_path / f"{name}.backing"
        path, control = tmp_path / name, tmp_path / f"{name}.control"
        for directory in (path, below, control):
            directory.mkdir(exist_ok=True)
        script = str(Path(__file__).with_name("faultfs.py"))
        process = subprocess.Popen([sys.executable, script, str(below), str(path), str(control)])
        made = FaultMount(path, below, control, process.pid)
        started.append((process, made.path))
        end_s = time.monotonic() + MOUNT_WAIT_S
        while not os.path.ismount(made.path):
            assert process.poll() is None, "faultfs did not start"
            assert time.monotonic() < end_s, "faultfs did not mount"
            time.sleep(0.01)
        return made

    yield mount
    for process, path in started:
        process.kill()  # its connection ends, and with it every caller that still hangs
        process.wait()
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def pfs_dir(tmp_path: Path) -> Path:
    """A plain directory as PFS."""
    path = tmp_path / "pfs"
    path.mkdir()
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A staged file of 3 MiB and a bit."""
    path = tmp_path / "staged"
    path.write_bytes(os.urandom((3 << 20) + 17))
    return path
