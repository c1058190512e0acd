"""Fixtures of the supervisor's tests: real mounts with the plain daemon behind, taken down after each test."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachexfs.supervisor.status import ask

DAEMON = Path(__file__).with_name("plain_daemon.py")
REPOSITORY = Path(__file__).resolve().parents[2]
#: Longer than anything takes on a loaded machine.
START_S_MAX = 100.0
END_S_MAX = 100.0


def wait_until(is_true: Callable[[], bool], what: str, timeout_s: float = START_S_MAX) -> None:
    """Poll until ``is_true``; fails the test, naming ``what``, when it never is."""
    until = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < until, f"never happened: {what}"
        time.sleep(0.01)


def is_mounted(path: Path) -> bool:
    """Whether something is mounted on ``path``."""
    return any(line.split()[1] == str(path) for line in Path("/proc/self/mounts").read_text().splitlines())


class Mount:
    """One supervisor with a plain daemon, its mount point, its backing directory and its log."""

    def __init__(self, base: Path, staging: Path) -> None:
        self.point = base / "mnt"
        self.root = staging / "root"
        self.socket = base / "status"
        self.log = base / "log"
        self.process: subprocess.Popen[bytes] | None = None
        for path in (self.point, self.root):
            path.mkdir()

    def start(self, *options: str, daemon: tuple[str, ...] = (), **environment: str) -> "Mount":
        """Start, without waiting. ``environment`` are the plain daemon's ``PLAIN_`` settings."""
        command = [sys.executable, "-m", "cachexfs.supervisor", "--mountpoint", str(self.point)]
        command += ["--status-socket", str(self.socket), "--backing-dir", str(self.root), *options, "--"]
        command += daemon or (sys.executable, str(DAEMON))
        settings = {f"PLAIN_{name.upper()}": value for name, value in environment.items()}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, "PLAIN_ROOT": str(self.root), **settings},
                stdout=log,
                stderr=log,
            )
        return self

    def up(self, *options: str, **environment: str) -> "Mount":
        """Start and wait until it serves."""
        self.start(*options, **environment)
        wait_until(lambda: self.phase() == "serving", "the mount serves")
        return self

    def status(self) -> dict[str, object]:
        return ask(str(self.socket), "status")

    def ask(self, command: str) -> dict[str, object]:
        return ask(str(self.socket), command)

    def phase(self) -> str:
        try:
            return str(self.status()["phase"])
        except OSError:
            return "absent"

    def daemon_pid(self) -> int:
        return int(str(self.status()["daemon_pid"]))

    def kill_daemon(self) -> None:
        """SIGKILL to the daemon that runs now."""
        pid = self.daemon_pid()
        if pid:
            os.kill(pid, signal.SIGKILL)

    def wait(self, timeout_s: float = END_S_MAX) -> int:
        """The supervisor's exit code."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def umount(self) -> int:
        """umount(8), then the supervisor's exit code."""
        self.take_away()
        return self.wait()

    def take_away(self) -> None:
        """umount(8), as soon as nobody looks into it (who searches the machine may be there for a moment)."""
        wait_until(lambda: not subprocess.run(["umount", self.point], timeout=END_S_MAX).returncode, "umount")

    def applied(self, op: str) -> int:
        """How often the daemon, in all its lives, has applied ``op``."""
        lines = Path(f"{self.root}.applied").read_text().splitlines()
        return sum(line.startswith(op + " ") for line in lines)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        """Take down whatever is left."""
        if self.process is not None and self.process.poll() is None:
            subprocess.run(["umount", "-l", str(self.point)], check=False, capture_output=True)
            try:
                self.process.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
        if is_mounted(self.point):
            subprocess.run(["umount", "-l", str(self.point)], check=True)
            raise AssertionError("the supervisor has left its mount behind")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """A mount that is not started yet; staging on tmpfs."""
    with tempfile.TemporaryDirectory(prefix="cxs-", dir="/dev/shm") as staging:
        one = Mount(tmp_path, Path(staging))
        try:
            yield one
        finally:
            print(one.said() if one.log.exists() else "")
            one.close()


@pytest.fixture(scope="session", autouse=True)
def _no_supervisor_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    base = str(tmp_path_factory.getbasetemp())
    left = [line for line in Path("/proc/self/mounts").read_text().splitlines() if base in line]
    assert not left, f"mounts left behind: {left}"
    mine = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = process.read_bytes()
        except OSError:
            continue
        if b"cachexfs.supervisor" in command and base.encode() in command:
            mine.append(process)
    assert not mine, f"supervisors left behind: {mine}"
