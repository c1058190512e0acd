"""What the tests on real shared filesystems share."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from real_support import WAIT_TIMEOUT_S, until

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr

PATIENCE_S = 100.0  # what waits for servers that stand still waits for ever
MIB = 1 << 20


def look(root: Path, *, whole_seconds: bool = False) -> dict[str, tuple[str, int, int, int]]:
    """Relative path -> (kind, mode, size, mtime in ns or whole seconds) of all users' files below it."""
    found = {}
    for directory, names, files in os.walk(root):
        for name in [*names, *files]:
            path = Path(directory, name)
            status = path.lstat()
            size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            mtime = status.st_mtime_ns // (10**9 if whole_seconds else 1)
            kind = {stat.S_IFDIR: "d", stat.S_IFREG: "f", stat.S_IFLNK: "l"}[stat.S_IFMT(status.st_mode)]
            found[str(path.relative_to(root))] = (kind, stat.S_IMODE(status.st_mode), size, mtime)
        names[:] = [name for name in names if name != ".cachexfs"]
    return {path: row for path, row in found.items() if path != ".cachexfs"}


def promptly(what: str, function: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """The result of what must not wait for the PFS. In a thread: if it does hang, the test ends all the same."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True, name=what)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), f"{what} hangs with the PFS"
    if errors:
        raise errors[0]
    return results[0]


def until_drained(cluster: LocalCluster, path: Path, timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Wait until a path, and all below it, is on the PFS."""
    until(f"{path} on the PFS, now {xattr(path, 'stage')}: {xattr(path, 'error')}",
          lambda: xattr(path, "stage") == "pfs", timeout_s)  # fmt: skip


class Injection:
    """Errors in the system calls of a process and its threads: strace beside it, for as long as the block lasts."""

    def __init__(self, pid: int, log: Path, *rules: str) -> None:
        self._log = log
        calls = {rule.partition(":")[0] for rule in rules}
        words = ["strace", "-f", "-q", "-y", "-o", str(log), "-e", f"trace={','.join(sorted(calls))}"]
        self._words = [*words, *(word for rule in rules for word in ("-e", f"inject={rule}")), "-p", str(pid)]
        self._pid = pid

    def __enter__(self) -> Injection:
        self._process = subprocess.Popen(self._words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end_s = time.monotonic() + PATIENCE_S
        while not all(f"TracerPid:\t{self._process.pid}" in status for status in self._statuses()):
            assert self._process.poll() is None, "strace did not attach"
            assert time.monotonic() < end_s, "strace did not attach to all threads"
            time.sleep(0.01)
        return self

    def _statuses(self) -> Iterator[str]:
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            with contextlib.suppress(OSError):
                yield (task / "status").read_text()

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)

    def calls(self) -> list[str]:
        """The calls made so far, one a line: pid, call, result."""
        return self._log.read_text(errors="replace").splitlines()

    def injected(self) -> list[str]:
        """Those that got an error from us."""
        return [line for line in self.calls() if "(INJECTED)" in line]


def bare_names(pfs: Path) -> set[str]:
    """The users' names in a PFS directory."""
    return {name for name in os.listdir(pfs) if name != ".cachexfs"}
