"""The daemon starts quickly and needs neither torch nor numpy."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from cachexfs.config import MountOptions
from cachexfs.supervisor.messages import ENV_STANDBY_FD, ENV_VERSION, VERSION


def test_the_daemon_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, cachexfs.daemon; print(sorted({'torch', 'numpy', 'scipy', 'click', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_process_that_was_started_ahead_of_a_mount_that_ends_says_nothing(tmp_path: Path) -> None:
    """Its log is the mount's, where a traceback would be taken for a fault."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    places = {"staging": str(tmp_path), "runtime_dir": str(tmp_path)}
    options = MountOptions(pfs="/none", mountpoint="/none/mnt", memory=1 << 20, **places)
    (tmp_path / "options").write_bytes(msgspec.json.encode(options))
    environment = {**os.environ, ENV_STANDBY_FD: str(theirs.fileno()), ENV_VERSION: VERSION}
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "cachexfs.daemon", "--options", str(tmp_path / "options")],
            pass_fds=[theirs.fileno()], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        theirs.close()
        assert ours.recv(100), "it waits"
        ours.close()
        said, _ = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, "")
