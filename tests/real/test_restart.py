"""``cachexfs restart`` and ``cachexfs upgrade`` under load: a pause, no error, no byte wrong."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from real_support import Template, until

from cachexfs.demo import control
from cachexfs.demo.cluster import LocalCluster

WRITERS = 8
RESTARTS = 3


class Load:
    """Writers that create, write, fsync, rename and remove files, and check what they read back."""

    def __init__(self, root: Path) -> None:
        self.errors: list[str] = []
        self.rounds = 0
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(root / f"w{n}", n)) for n in range(WRITERS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, directory: Path, seed: int) -> None:
        try:
            directory.mkdir()
            number = 0
            while not self._ended.is_set():
                self._round(directory, os.urandom(40_000 + 1000 * seed), number)
                number += 1
                self.rounds += 1
        except (OSError, AssertionError) as error:
            self.errors.append(f"writer {seed}: {error!r}")

    @staticmethod
    def _round(directory: Path, data: bytes, number: int) -> None:
        temporary, final = directory / "tmp", directory / f"f{number % 5}"
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        for start in range(0, len(data), 10_000):
            os.write(fd, data[start : start + 10_000])
        os.close(fd)
        temporary.rename(final)
        assert final.read_bytes() == data, f"{final} has other bytes"
        with final.open("ab") as file:
            file.write(b"appended")
        assert final.stat().st_size == len(data) + 8, (
            f"{final} was appended to {final.stat().st_size - len(data)} bytes"
        )
        if number % 5 == 4:
            final.unlink()


def interpreter(path: Path, *lines: str) -> Path:
    """An installation of its own, as far as the supervisor can see: a prefix whose python marks what it runs."""
    python = path / "bin" / "python"
    python.parent.mkdir(parents=True)
    modules = Path(__file__).parents[2]
    run = f'export PYTHONPATH="$MORE_PATH:{modules}"\nexport CACHEXFS_TEST_MARK={path.name}\nexec {sys.executable} "$@"'
    python.write_text("\n".join(["#!/bin/sh", *lines, run, ""]))
    python.chmod(0o755)
    return path


def mark_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((v.partition(b"=")[2].decode() for v in variables if v.startswith(b"CACHEXFS_TEST_MARK=")), "")


def daemon(cluster: LocalCluster) -> int:
    entry = control.registered(cluster.nodes[0].runtime)
    assert entry is not None
    return entry.pid


def test_restarts_under_eight_writers_and_a_checkpoint(
    make_cluster: Callable[..., LocalCluster], templates: tuple[Template, Template], tmp_path: Path
) -> None:
    cluster = make_cluster(1, {"supervisor": "on"})
    mount = cluster.nodes[0].mountpoint
    new = interpreter(tmp_path / "new")
    errors: list[OSError] = []
    saved: list[int] = []

    def save_on() -> None:
        try:
            while len(saved) <= RESTARTS or not done.is_set():
                templates[len(saved) % 2].save([mount], f"step-{len(saved)}")
                saved.append(len(saved))
        except OSError as error:
            errors.append(error)

    done = threading.Event()
    with Load(mount) as load, (mount / "held").open("w+b", buffering=0) as held:
        held.write(b"before")
        saver = threading.Thread(target=save_on)
        saver.start()
        pids = [daemon(cluster)]
        for command in ["restart"] * (RESTARTS - 1) + ["upgrade"]:
            goal = load.rounds + WRITERS
            until("the writers go on", lambda goal=goal: load.rounds >= goal or bool(load.errors))
            arguments = [str(mount), str(new)] if command == "upgrade" else [str(mount)]
            ended = cluster.run(0, command, "--json", *arguments)
            assert ended.code == 0, ended.err
            pids.append(json.loads(ended.out)["pid"])
            assert daemon(cluster) == pids[-1]
        goal = load.rounds + WRITERS
        until("the writers go on", lambda: load.rounds >= goal or bool(load.errors))
        done.set()
        saver.join()
        held.write(b" and after")
    assert (load.errors, errors) == ([], [])
    assert len(set(pids)) == RESTARTS + 1
    assert mark_of(pids[-1]) == "new"
    assert (mount / "held").read_bytes() == b"before and after"
    wrong = [text for step in saved for text in templates[step % 2].same_as(mount / f"step-{step}")]
    assert wrong == []
    cluster.kill_daemon(0)
    assert (mount / "held").read_bytes() == b"before and after"
    until("another daemon answers", lambda: cluster.answers(0))
    assert mark_of(daemon(cluster)) == "new"
    cluster.umount()
    wrong = [text for step in saved for text in templates[step % 2].same_as(cluster.pfs / f"step-{step}")]
    assert wrong == []


DOES_NOT_START = ("exit 3",)
DOES_NOT_SERVE = ("export MORE_PATH=$(dirname $0)",)  # where sitecustomize lies


@pytest.mark.parametrize("lines", [DOES_NOT_START, DOES_NOT_SERVE], ids=["start", "serve"])
def test_a_program_that_cannot_serve_is_not_taken(
    make_cluster: Callable[..., LocalCluster], tmp_path: Path, lines: tuple[str, ...]
) -> None:
    cluster = make_cluster(1, {"supervisor": "on"})
    mount = cluster.nodes[0].mountpoint
    (mount / "f").write_bytes(b"1")
    broken = interpreter(tmp_path / "broken", *lines)
    (broken / "bin" / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'cachexfs.daemon' in sys.orig_argv:\n"
        "    from cachexfs.frontend.fuse import Operations\n"
        "    Operations.resume = lambda *_: sys.exit(5)\n"
    )
    ended = cluster.run(0, "upgrade", str(mount), str(broken))
    assert ended.code == 4
    assert "the old program serves" in ended.err
    assert (mount / "f").read_bytes() == b"1"
    until("the old program's daemon answers", lambda: cluster.answers(0))
    assert mark_of(daemon(cluster)) == ""
    assert cluster.run(0, "restart", str(mount)).code == 0
    cluster.umount()


def test_without_a_supervisor_there_is_nothing_to_restart_with(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1, {"supervisor": "off"})
    ended = cluster.run(0, "restart", str(cluster.nodes[0].mountpoint))
    assert ended.code == 2
    assert "no supervisor" in ended.err
    assert cluster.run(0, "upgrade", str(cluster.nodes[0].mountpoint), "/no/such/prefix").code == 2


def test_an_upgrade_goes_on_when_the_old_daemon_dies_meanwhile(
    make_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    cluster = make_cluster(1, {"supervisor": "on"})
    mount = cluster.nodes[0].mountpoint
    (mount / "f").write_bytes(b"1")
    slow = interpreter(tmp_path / "slow", "sleep 1")
    process = cluster.start(0, "upgrade", str(mount), str(slow))
    until("the new program starts", lambda: any(runs(pid, slow) for pid in cluster.processes(0)))
    cluster.kill_daemon(0)
    assert (mount / "f").read_bytes() == b"1"
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert mark_of(daemon(cluster)) == "slow"
    cluster.kill_daemon(0)
    assert (mount / "f").read_bytes() == b"1"
    until("another daemon answers", lambda: cluster.answers(0))
    assert mark_of(daemon(cluster)) == "slow"
    cluster.umount()


def runs(pid: int, prefix: Path) -> bool:
    """Whether a process is the shell script of an ``interpreter`` that has not become Python yet."""
    try:
        return os.fsencode(prefix / "bin/python") in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
