"""A mount that the kernel lists and a control socket that answers, without a daemon or a mount."""

import json
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cachexfs.cli import main
from cachexfs.config import mount_id

DEVICE = "0:4711"
Lines = list[dict[str, object]]


@dataclass
class FakeDaemon:
    """Answers each operation with the lines in ``answers``; ``asked`` has what came in. No answer: silence."""

    mountpoint: Path
    runtime: Path
    answers: dict[str, Lines] = field(default_factory=dict)
    asked: list[dict[str, object]] = field(default_factory=list)
    raw: bytes | None = None
    deaths: int = 0  # so many requests are the last that a daemon hears

    def __post_init__(self) -> None:
        self.socket = self.runtime / f"{mount_id(str(self.mountpoint), 'n1')}.sock"
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self.socket))
        self._server.listen()
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def register(self, pid: int, device: str = DEVICE, **changes: object) -> None:
        entry = {
            "mountpoint": str(self.mountpoint),
            "pfs": "/pfs",
            "node": "n1",
            "job": "j",
            "pid": pid,
            "device": device,
            "socket": str(self.socket),
            "log": "/var/log/x.log",
            "started_s": 1.0,
        }
        self.socket.with_suffix(".json").write_text(json.dumps(entry | changes))

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            line = connection.makefile("rb").readline()
            if not line:
                connection.close()
                return
            request = json.loads(line)
            self.asked.append(request)
            if self.deaths:
                self.deaths -= 1
                connection.close()
                continue
            if self.raw is not None:
                connection.sendall(self.raw)
                connection.close()
                continue
            for answer in self.answers.get(str(request["op"]), []):
                connection.sendall(json.dumps(answer).encode() + b"\n")
            self._open.append(connection)

    def stop(self) -> None:
        """Nobody listens any more; the socket's file stays, as after kill -9."""
        if self._thread.is_alive():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as last:
                last.connect(str(self.socket))
            self._thread.join()
        self._server.close()
        for connection in self._open:
            connection.close()


def list_mount(kernel: Path, mountpoint: Path | str, device: str = DEVICE) -> None:
    """Make the kernel list a mount of ours."""
    point = str(mountpoint).replace(" ", "\\040")
    with kernel.open("a") as file:
        file.write(f"99 22 {device} / {point} rw shared:7 - fuse.cachexfs /pfs rw,user_id=0\n")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


class Run:
    """Runs ``cachexfs ARGUMENTS`` in this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *arguments: object) -> Ran:
        self._capfd.readouterr()
        code = main.run([str(argument) for argument in arguments])
        captured = self._capfd.readouterr()
        return Ran(code, captured.out, captured.err)
