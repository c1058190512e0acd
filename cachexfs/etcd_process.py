"""Which process a node's etcd member is: a file beside its data says so, over daemons and commands.

Role: base layer, for ``adapters/etcd_server``, which starts it, and for commands that end what a mount has left. A
process id alone would not do: the kernel gives it to others.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

import msgspec

PID_NAME = "etcd.pid"
STOP_TIMEOUT_S = 5.0


class Process(msgspec.Struct, frozen=True):
    """Content of the pid file. ``started``: clock ticks from the kernel's boot, which ``boot`` names, to the start."""

    pid: int
    started: int
    boot: str


def identity(pid: int) -> Process | None:
    """Which process has this id now; None when it has ended (a child of ours is then reaped)."""
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # from the third of proc(5) on: state first, start time the twentieth
    return None if fields[0] in "ZX" else Process(pid, int(fields[19]), boot)


def running(pid_path: Path) -> int | None:
    """Process id of the member that the file names, None when it does not run."""
    try:
        process = msgspec.json.decode(pid_path.read_bytes(), type=Process)
    except (OSError, msgspec.DecodeError):  # it never ran, or NVMe fails: then its writes fail, too, and end it
        return None
    return process.pid if process.pid > 1 and identity(process.pid) == process else None


def end(pid_path: Path) -> None:
    """End the member: SIGTERM, after ``STOP_TIMEOUT_S`` SIGKILL. Blocks. Raises ``OSError``."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        pid = running(pid_path)
        if pid is None:
            return
        fd = os.pidfd_open(pid)
        try:
            if running(pid_path) == pid:
                signal.pidfd_send_signal(fd, number)
                select.select([fd], [], [], STOP_TIMEOUT_S)
        finally:
            os.close(fd)
