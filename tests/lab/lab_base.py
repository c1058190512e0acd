"""Real shared filesystems on this one machine, for tests: what all of them need.

All servers and clients live in one network namespace, at addresses of its loopback; mounts are made in the namespace
of the tests. Nothing outlives its owner for good: a process gets SIGKILL when the tests end, however they do; mounts,
loop devices and the namespace are named after the owner, and the next ``Lab`` removes what a dead owner has left.
Concurrency: one thread, the main one (PR_SET_PDEATHSIG refers to the thread that starts a process).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PREFIX = "cxl-"
NET = "10.87.1"
START_S = 100.0
END_S = 10.0
POLL_S = 0.02
FS_IOC_SHUTDOWN = 0x8004587D
SHUTDOWN_NO_LOG_FLUSH = 2


class LabError(Exception):
    """A filesystem does not start here; the message says why."""


def until(what: str, condition: Callable[[], bool], timeout_s: float = START_S) -> None:
    """Wait for ``condition``. Raises ``LabError``."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise LabError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(POLL_S)


def command(*words: str | Path, timeout_s: float = START_S) -> str:
    """Run a command to its end and return its output. Raises ``LabError``."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout_s)
    if done.returncode:
        raise LabError(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def why_not(programs: tuple[str, ...]) -> str:
    """Why no filesystem can start on this machine; empty when nothing is known to be against it."""
    if os.geteuid() != 0:
        return "namespaces, loop devices and mounts need root"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is missing or closed"
    missing = [program for program in programs if shutil.which(program) is None]
    return f"{', '.join(missing)} not installed: tools/setup.sh test-system" if missing else ""


def start_time(pid: int) -> str:
    """When a process was started, in ticks since boot; empty when there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def mounts_below(root: Path) -> list[str]:
    """Mount points below a directory, the innermost first."""
    points = [line.split(" ")[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [point for point in reversed(points) if point.startswith(f"{root}/")]


def is_mounted(path: Path) -> bool:
    """Without asking the filesystem itself, which might hang."""
    return str(path) in mounts_below(path.parent)


class Server:
    """One process of a filesystem: a server, or a client with its mount."""

    def __init__(self, lab: Lab, name: str, words: list[str]) -> None:
        self._lab, self.name, self._words = lab, name, words
        self.log = lab.root / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, unless it runs."""
        if self.alive:
            return
        enter = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{self._lab.netns}", "--"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*enter, *self._words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._lab.record(self._process.pid)

    def pause(self) -> None:
        """It answers nothing from now on."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        if self.alive:
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """As a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_S)

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


class Lab:
    """Directories, namespace and processes of one run of the tests. ``close`` takes all down."""

    def __init__(self) -> None:
        _remove_the_dead()
        self.netns = f"{PREFIX}{os.getpid()}"
        self.root = Path(tempfile.gettempdir(), self.netns)
        self.root.mkdir(mode=0o755)
        (self.root / "owner").write_text(f"{os.getpid()} {start_time(os.getpid())}")
        self._servers: list[Server] = []
        self._addresses = 0
        command("ip", "netns", "add", self.netns)
        command("ip", "-n", self.netns, "link", "set", "lo", "up")

    def address(self) -> str:
        """A further address in the namespace."""
        self._addresses += 1
        address = f"{NET}.{self._addresses}"
        command("ip", "-n", self.netns, "addr", "add", f"{address}/32", "dev", "lo")
        return address

    def record(self, pid: int) -> None:
        """Remember a process for those who have to clean up."""
        with (self.root / "pids").open("a") as file:
            file.write(f"{pid} {start_time(pid)}\n")

    def server(self, name: str, *words: str | Path) -> Server:
        """Start a process in the namespace."""
        made = Server(self, name, list(map(str, words)))
        self._servers.append(made)
        return made

    def listens(self, address: str, port: int) -> bool:
        """Whether somebody in the namespace accepts connections there."""
        probe = f"exec 3<>/dev/tcp/{address}/{port}"
        words = ["nsenter", f"--net=/run/netns/{self.netns}", "--", "bash", "-c", probe]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    def mount_point(self, name: str) -> Path:
        """A directory that takes no write while nothing is mounted on it."""
        path = self.root / name
        path.mkdir()
        command("chattr", "+i", path)
        return path

    def xfs(self, name: str, mib: int) -> Path:
        """A mounted XFS of its own on a loop device, whose power can be cut."""
        image, path = self.root / f"{name}.img", self.mount_point(name)
        with image.open("wb") as file:
            file.truncate(mib << 20)
        command("mkfs.xfs", "-q", image)
        command("mount", "-o", "loop", image, path)
        return path

    def unmount(self, path: Path) -> None:
        """Take a mount away, as an administrator does."""
        command("umount", "-l", path)

    def power_cut(self, path: Path) -> None:
        """The machine of an ``xfs`` loses its power and comes back: what was not synced is gone."""
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, FS_IOC_SHUTDOWN, struct.pack("I", SHUTDOWN_NO_LOG_FLUSH))
        finally:
            os.close(fd)
        command("umount", path)
        command("mount", "-o", "loop", self.root / f"{path.name}.img", path)

    def close(self) -> None:
        """End everything. A client's end frees whoever hangs in its mount."""
        for server in self._servers:
            server.kill()
        _remove(self.root)


def _remove_the_dead() -> None:
    """Take away what runs that were killed have left."""
    for root in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid, _, started = (root / "owner").read_text().partition(" ") if (root / "owner").exists() else ("0", "", "-")
        if start_time(int(pid)) != started:
            _remove(root)


def _remove(root: Path) -> None:
    records = (root / "pids").read_text().splitlines() if (root / "pids").exists() else []
    for pid, started in (record.split() for record in records if " " in record.strip()):
        if start_time(int(pid)) == started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for point in mounts_below(root):
        command("umount", "-l", point)
    if Path("/run/netns", root.name).exists():
        command("ip", "netns", "del", root.name)
    subprocess.run(["chattr", "-i", *filter(Path.is_dir, root.iterdir())], capture_output=True, check=False)
    shutil.rmtree(root)
