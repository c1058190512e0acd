"""Several nodes of CacheX FS on this one machine: mounts, kills, wipes, remounts.

Role: what the demo and the tests run on. A node is a directory (mount point, NVMe, log, runtime directory), a staging
directory on tmpfs and an address of its own: of the loopback (127.x.y.z), or in a network namespace, where links can be
shaped and cut. Every process of a node carries its ``CACHEXFS_RUNTIME_DIR`` in its environment; that mark, never a
name, says whom a kill may hit. Concurrency: one thread uses a cluster, commands to several nodes run in parallel.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from cachexfs.cli.protocol import Status
from cachexfs.demo import control
from cachexfs.demo.netns import NodeNetwork
from cachexfs.errors import CacheXError
from cachexfs.mountpoint import unprotect

MOUNT_TIMEOUT_S = 150.0  # both longer than a survivor waits for what a lost node had begun (``owners.FENCE_S``)
UMOUNT_TIMEOUT_S = 150.0
KILL_TIMEOUT_S = 60.0  # a loaded machine takes a while
POLL_S = 0.02
PORT_FIRST = 10_000
PORT_LAST = 30_000  # below the ports that the kernel gives to clients
PORTS_PER_NODE = 4  # daemon, etcd's two, one to spare
SOCKET_PATH_BYTES_MAX = 100  # sockaddr_un holds 108 with its NUL; the daemon adds nothing longer
REGISTRY_NAME_BYTES = 22  # "/" + 16 digits + ".sock"
SHM = Path("/dev/shm")
RUNTIME_VARIABLE = "CACHEXFS_RUNTIME_DIR"


class ClusterError(CacheXError):
    """A node did not do what it was told; the message carries the command's own words and the log's place."""


@dataclass(frozen=True)
class Node:
    """Where one node lives. ``address`` is a line of the node list; all paths are absolute."""

    index: int
    name: str
    host: str
    port: int
    root: Path
    staging: Path
    runtime: Path

    @property
    def mountpoint(self) -> Path:
        return self.root / "mnt"

    @property
    def nvme(self) -> Path:
        return self.root / "nvme"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def address(self) -> str:
        return f"{self.name}={self.host}:{self.port}"


@dataclass(frozen=True)
class Ended:
    """What a command left: exit code and both outputs."""

    code: int
    out: str
    err: str


class LocalCluster:
    """``nodes`` nodes below ``root`` over one PFS directory. Use as a context manager: leaving it takes all down.

    ``options`` are mount options for every node (``{"node_timeout": "3"}``; ``None`` takes a default of ours away).
    With one node it is alone: no partner, no secret, no NVMe unless ``options`` says so.
    """

    def __init__(
        self,
        root: Path,
        nodes: int = 4,
        pfs: Path | None = None,
        options: Mapping[str, str | None] | None = None,
        *,
        namespaces: bool = False,
    ) -> None:
        self.root = root.absolute()
        self.pfs = (pfs or self.root / "pfs").absolute()
        self.tag = secrets.token_hex(3)
        self.secret = self.root / "secret"
        self.node_list = self.root / "nodes"
        self._options = dict(options or {})
        self.node_options: dict[int, dict[str, str | None]] = {}
        self.node_pfs: dict[int, Path] = {}  # where a node has its own way to the PFS directory
        self.prefix: list[str] = []  # before each command, for another user's mounts
        self._scratch: list[Path] = []
        self._port = _free_ports()
        self.network = NodeNetwork(f"cx{self.tag}n", nodes) if namespaces else None
        self.nodes = [self._place(index) for index in range(nodes)]

    def __enter__(self) -> LocalCluster:
        try:
            self.create()
        except BaseException:
            self.teardown()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.teardown()

    def _place(self, index: int) -> Node:
        root = self.root / f"node{index}"
        runtime = root / "run"
        if len(os.fsencode(runtime)) + REGISTRY_NAME_BYTES > SOCKET_PATH_BYTES_MAX:
            runtime = self._scratch_dir(Path(tempfile.gettempdir()), index)
        staging = root / "staging" if _on_tmpfs(self.root) else self._scratch_dir(SHM, index)
        if self.network:
            host = self.network.host(index)
        else:  # an address of the loopback that another cluster of this machine is unlikely to have
            high, middle = 64 + int(self.tag[:2], 16) % 64, int(self.tag[2:4], 16)
            host = f"127.{high}.{middle}.{index + 1}"
        return Node(index, f"n{index}", host, self._port, root, staging, runtime)

    def _scratch_dir(self, parent: Path, index: int) -> Path:
        path = parent / f"cachexfs-{self.tag}-{index}"
        self._scratch.append(path)
        return path

    def create(self) -> None:
        """Directories, secret, node list, namespaces. No mount yet."""
        self.pfs.mkdir(parents=True, exist_ok=True)
        for node in self.nodes:
            for path in (node.mountpoint, node.nvme, node.staging, node.runtime):
                path.mkdir(parents=True, exist_ok=True)
            node.runtime.chmod(0o700)
        self.secret.touch(0o600)
        self.secret.write_bytes(secrets.token_bytes(32))
        self.node_list.write_text("".join(f"{node.address}\n" for node in self.nodes))
        if self.network:
            self.network.up()

    def options(self, index: int) -> dict[str, str]:
        """The mount options of a node: ours, then the cluster's."""
        node = self.nodes[index]
        ours: dict[str, str | None] = {
            "memory": "1G",
            "prefault": "off",  # many nodes share one machine's memory
            "staging": str(node.staging),
            "job": f"local-{self.tag}",
            "log_file": str(node.log),
            "route": "partner",  # what is shown and tested does not depend on how fast this machine's disks are today
        }
        if len(self.nodes) > 1:
            ours |= {"nodes": f"@{self.node_list}", "node": node.name, "secret": str(self.secret)}
            ours |= {"nvme": str(node.nvme)}
        merged = ours | self._options | self.node_options.get(index, {})
        return {key: value for key, value in merged.items() if value is not None}

    def environment(self, index: int) -> dict[str, str]:
        """The environment of a node's commands: this process's, without its own CacheX FS settings, and the mark."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("CACHEXFS_")}
        return kept | {RUNTIME_VARIABLE: str(self.nodes[index].runtime)}

    def start(self, index: int, *arguments: str) -> subprocess.Popen[str]:
        """Start ``cachexfs ARGUMENTS`` on a node; its outputs are pipes."""
        enter = self.network.enter(index) if self.network else []
        return subprocess.Popen(
            [*self.prefix, *enter, sys.executable, "-m", "cachexfs", *arguments],
            env=self.environment(index),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            start_new_session=True,
        )

    def run(self, index: int, *arguments: str, timeout_s: float = MOUNT_TIMEOUT_S) -> Ended:
        """Run ``cachexfs ARGUMENTS`` on a node to its end. Raises ``ClusterError`` at the deadline."""
        return _finish(self.start(index, *arguments), timeout_s, " ".join(arguments[:1]))

    def mount(self, indices: Iterable[int] | None = None) -> None:
        """Mount on the nodes named (all by default), in parallel. Raises ``ClusterError`` if one of them fails."""
        chosen = self._chosen(indices)
        self._all(chosen, {index: self.mount_arguments(index) for index in chosen}, MOUNT_TIMEOUT_S)

    def mount_arguments(self, index: int) -> list[str]:
        """The arguments of ``cachexfs`` that mount a node."""
        flags = ",".join(f"{key}={value}" for key, value in self.options(index).items())
        pfs = self.node_pfs.get(index, self.pfs)
        return ["mount", str(pfs), str(self.nodes[index].mountpoint), "-o", flags]

    def umount(self, indices: Iterable[int] | None = None, *arguments: str) -> None:
        """Drain and unmount, in parallel: a node serves its peers until all of them are done."""
        chosen = self._chosen(indices)
        commands = {index: ["umount", str(self.nodes[index].mountpoint), *arguments] for index in chosen}
        self._all(chosen, commands, UMOUNT_TIMEOUT_S)

    def _chosen(self, indices: Iterable[int] | None) -> list[int]:
        return list(range(len(self.nodes))) if indices is None else list(indices)

    def _all(self, chosen: list[int], commands: dict[int, list[str]], timeout_s: float) -> None:
        started = {index: self.start(index, *commands[index]) for index in chosen}
        ended = {index: _finish(process, timeout_s, commands[index][0]) for index, process in started.items()}
        for index, result in ended.items():
            if result.code:
                said = (result.err or result.out).strip() or "it said nothing"
                raise ClusterError(f"{commands[index][0]} on {self.nodes[index].name}: {said} (exit {result.code})")

    def kill_daemon(self, index: int) -> None:
        """kill -9 of the daemon alone, as its registry entry names it; etcd and a supervisor live on."""
        entry = control.registered(self.nodes[index].runtime)
        if entry is None:
            raise ClusterError(f"{self.nodes[index].name} has no registered daemon")
        self._kill([entry.pid])

    def kill(self, index: int) -> None:
        """kill -9 of everything that runs for a node (daemon, supervisor, PFS workers, etcd): the node is lost."""
        while pids := self.processes(index):  # a worker may have been forked while we looked
            self._kill(pids)

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while any(_running(pid) for pid in pids):
            if time.monotonic() > deadline:
                raise ClusterError(f"processes {pids} survive kill -9 for {KILL_TIMEOUT_S:.0f} s: is the PFS hung?")
            time.sleep(POLL_S)

    def processes(self, index: int) -> list[int]:
        """Pids of all living processes that were started for a node."""
        mark = f"{RUNTIME_VARIABLE}={self.nodes[index].runtime}".encode()
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
        return [pid for pid in found if pid != os.getpid() and _running(pid)]

    def wipe(self, index: int, *, keep_catalogue: bool = False) -> None:
        """Destroy what a lost node had: staging memory and NVMe. The directories stay, empty.

        ``keep_catalogue`` spares etcd's data (and its running member): only the node's copies are gone.
        """
        for path in (self.nodes[index].staging, self.nodes[index].nvme):
            for entry in list(path.iterdir()):
                if keep_catalogue and any(entry.rglob("etcd.pid")):
                    continue
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def detach(self, index: int) -> None:
        """Take a mount away as an administrator does (``umount -l``): no drain, no question to the daemon."""
        _umount_lazily(str(self.nodes[index].mountpoint))

    def remount(self, index: int) -> None:
        """Mount again with the same options over what a kill left."""
        self.mount([index])

    def status(self, index: int) -> Status:
        """What the node's daemon says of itself."""
        return control.ask(self.nodes[index].runtime, {"op": "status", "path": None}, Status)

    def answers(self, index: int) -> bool:
        """Whether a daemon of the node answers now."""
        try:
            self.status(index)
        except CacheXError:
            return False
        return True

    def sources(self, index: int) -> list[control.FileSources]:
        """What served the reads of each file on a node since its mount."""
        return control.ask(self.nodes[index].runtime, {"op": "sources", "path": None}, control.Sources).files

    def xattr(self, path: Path, name: str) -> str | None:
        """The value of ``user.cachex.<name>``, or None when there is none."""
        return control.xattr(path, name)

    def left(self) -> list[str]:
        """What a clean end must not leave: mounts below the root and marked processes, described."""
        mounts = [f"mount {point}" for point in _mounts_below(self.root)]
        return mounts + [f"{node.name}: process {pid}" for node in self.nodes for pid in self.processes(node.index)]

    def teardown(self, *, remove: bool = True) -> None:
        """Kill what runs, unmount lazily, remove namespaces and (unless told otherwise) all files. Idempotent."""
        for node in self.nodes:
            self.kill(node.index)
        for point in reversed(_mounts_below(self.root)):
            _umount_lazily(point)
        if self.network:
            self.network.down()
        for path in self._scratch:
            shutil.rmtree(path, ignore_errors=True)
        for node in self.nodes:
            unprotect(str(node.mountpoint))
        if remove:
            shutil.rmtree(self.root, ignore_errors=True)


def _free_ports() -> int:
    """First of ``PORTS_PER_NODE`` neighbouring ports that nobody listens on at any address of this machine."""
    while True:
        first = random.randrange(PORT_FIRST, PORT_LAST, PORTS_PER_NODE)
        try:
            for port in range(first, first + PORTS_PER_NODE):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first


def _finish(process: subprocess.Popen[str], timeout_s: float, what: str) -> Ended:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise ClusterError(f"'cachexfs {what}' did not end within {timeout_s:.0f} s") from None
    return Ended(process.returncode, out, err)


def _running(pid: int) -> bool:
    """Alive and not a zombie that somebody has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _on_tmpfs(path: Path) -> bool:
    while not path.exists():
        path = path.parent
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, fstype, *_ = line.split(" ")
        if (str(path) + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, fstype
    return kind == "tmpfs"


def _mounts_below(root: Path) -> list[str]:
    points = [line.split(" ")[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{root}/")]


def _umount_lazily(point: str) -> None:
    """Never waits for a daemon: the mount leaves the tree at once, whatever still holds it."""
    tool = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
    subprocess.run([*tool, point], capture_output=True, timeout=KILL_TIMEOUT_S, check=False)
