"""Chaos on real mounts: savers and random operations under kill -9 at random moments, and what was claimed, checked.

Role: ``ride`` lets daemons die (or be replaced by restart) under load with a supervisor: no application may see an
error or a wrong byte, and the PFS must end up with exactly what they wrote. ``claims`` notes at a random moment what
the attributes claim, kills everything, destroys what the claims survive, and compares bytes. By hand for long runs
(``make chaos``), by ``test_chaos`` for a short one. All choices follow from the seed; the moments of deaths do not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "posix"), str(HERE.parent / "core")]

from chaos_data import INDEX, METADATA, Save, digest, mixture  # noqa: E402
from chaos_work import EXIT_GONE  # noqa: E402
from twin import same_tree  # noqa: E402

from cachexfs.demo import control  # noqa: E402
from cachexfs.demo.cluster import LocalCluster  # noqa: E402

MODES: dict[str, dict[str, str | None]] = {
    "passthrough": {"supervisor": "on"},
    "handler": {"supervisor": "on", "passthrough": "off"},
    "alone": {"supervisor": "off"},
}
#: What ``all`` does, one after the other by seed: what, mode, nodes, memory.
VARIANTS = (
    ("ride", "passthrough", 1, "1G"), ("ride", "handler", 1, "64M"), ("claims", "alone", 1, "1G"),
    ("ride", "passthrough", 2, "1G"), ("claims", "passthrough", 3, "1G"), ("ride", "passthrough", 1, "300M"),
    ("claims", "handler", 1, "64M"), ("claims", "alone", 2, "64M"),
)  # fmt: skip
#: How a daemon ends, and how often: killed from outside, of a fault of its own, or standing still until it is killed.
DEATHS = {signal.SIGKILL: 85, signal.SIGSEGV: 5, signal.SIGABRT: 5, signal.SIGSTOP: 5}
END_S_MAX = 240.0  # more is a hang
LOG_LINES_SHOWN = 400
SNAPSHOT_RANKS = {"writing": 0, "returned": 1, "partner": 2, "pfs": 3}


@dataclass
class Counts:
    kills: int = 0
    restarts: int = 0
    saves: int = 0
    steps: int = 0
    claims: int = 0
    looks: int = 0
    slowest_s: float = 0.0


@dataclass
class Plan:
    """One run."""

    mode: str
    nodes: int = 1
    memory: str = "1G"
    savers: int = 3
    twins: int = 1
    bytes_max: int = 3 << 20
    kill_s: tuple[float, float] = (0.05, 2.0)
    seconds: float = 30.0
    seed: int = 1
    more: dict[str, str | None] = field(default_factory=dict)
    brutal: bool = False  # every daemon process, each time: those that start or wait as well

    def options(self) -> dict[str, str | None]:
        return MODES[self.mode] | {"memory": self.memory, "full_timeout": "120"} | self.more


class Worker:
    """One application."""

    def __init__(self, *arguments: object) -> None:
        self.name = " ".join(map(str, arguments[:1])) + f" {arguments[-1]}"
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "chaos_work.py"), *map(str, arguments)], cwd="/",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(self) -> tuple[int, str, str]:
        """Exit code, what it counted, what went wrong. A hang is a failure."""
        try:
            out, err = self.process.communicate("\n" if self.process.poll() is None else None, timeout=END_S_MAX)
        except subprocess.TimeoutExpired:
            stack = Path(f"/proc/{self.process.pid}/stack").read_text()
            return 99, "", f"hangs: {stack}"
        return self.process.returncode, out, err

    def kill(self) -> None:
        self.process.kill()
        with self.process:  # closes its pipes
            pass

    def stop(self) -> None:
        """Stop it where no request of it is under way."""
        os.kill(self.process.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] not in "TtZ":
            time.sleep(0.01)


class Chaos:
    """A cluster, its applications, and those who trouble them."""

    def __init__(self, plan: Plan, cluster: LocalCluster, scratch: Path) -> None:
        self.plan, self.cluster, self.scratch = plan, cluster, scratch
        self.counts = Counts()
        self.wrong: list[str] = []
        self.chance = random.Random(plan.seed)
        self._ended = threading.Event()
        self.generation = 0

    # ---- applications
    def start(self) -> list[Worker]:
        self.generation += 1
        workers = []
        for number in range(self.plan.savers):
            node = self.cluster.nodes[number % len(self.cluster.nodes)]
            seed = f"{self.plan.seed}.{self.generation}.{number}"
            root = node.mountpoint / f"w{self.generation}-{number}"
            workers.append(Worker("saver", root, self.scratch / f"ledger-{root.name}", seed, self.plan.bytes_max))
        for number in range(self.plan.twins):
            node = self.cluster.nodes[number % len(self.cluster.nodes)]
            seed = self.plan.seed * 1000 + self.generation * 10 + number
            workers.append(Worker("twin", node.mountpoint / "twins", self.scratch / "plain", seed))
        (self.scratch / "plain" / "twins").mkdir(parents=True, exist_ok=True)
        return workers

    def finish(self, workers: list[Worker]) -> None:
        for worker in workers:
            if worker.process.poll() is None and worker.process.stdin:
                worker.process.stdin.write("\n")
                worker.process.stdin.flush()
        for worker in workers:
            code, out, err = worker.end()
            if code and not (code == EXIT_GONE and self.plan.mode == "alone"):
                self.wrong.append(f"{worker.name}: exit {code}\n{err}")
            elif out and worker.name.startswith("saver"):
                saves, slowest = out.split()
                self.counts.saves += int(saves)
                self.counts.slowest_s = max(self.counts.slowest_s, float(slowest))
            elif out:
                self.counts.steps += int(out)

    # ---- trouble
    @contextlib.contextmanager
    def trouble(self, *, kill: bool) -> Iterator[None]:
        self._ended.clear()
        threads = [threading.Thread(target=self._watch_pfs)]
        if kill:
            threads += [threading.Thread(target=self._kill, args=(i,)) for i in range(len(self.cluster.nodes))]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()

    def _kill(self, index: int) -> None:
        chance = random.Random(f"{self.plan.seed}.{index}")
        low, high = self.plan.kill_s
        while not self._ended.wait(low * (high / low) ** chance.random()):
            if chance.random() < 0.02:
                self.cluster.run(index, "restart", str(self.cluster.nodes[index].mountpoint))
                self.counts.restarts += 1
                continue
            how = chance.choices(list(DEATHS), list(DEATHS.values()))[0]
            if self.plan.mode == "alone":  # nobody follows one that is stopped
                how = signal.SIGKILL
            for pid in self._daemons(index, also_waiting=chance.random() < 0.1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
                    self.counts.kills += 1

    def _daemons(self, index: int, *, also_waiting: bool) -> list[int]:
        """The daemon that serves; with those that start or wait for their turn, if wanted."""
        if self.plan.brutal or also_waiting:
            return [pid for pid in self.cluster.processes(index) if _is_daemon(pid)]
        entry = control.registered(self.cluster.nodes[index].runtime)
        return [entry.pid] if entry is not None and os.path.exists(f"/proc/{entry.pid}") else []

    def _watch_pfs(self) -> None:
        """Wherever DCP's commit file is on the PFS, all of its save must be."""
        while not self._ended.wait(0.05):
            self.look_at_pfs()

    def look_at_pfs(self) -> None:
        for directory, _, files in os.walk(self.cluster.pfs):
            if METADATA not in files or ".cachexfs" in directory:
                continue
            commit = Path(directory) / METADATA
            with contextlib.suppress(OSError):
                before = _identity(commit)
                problem = mixture(Path(directory), METADATA)
                if problem and _identity(commit) == before:
                    self.wrong.append(f"PFS {directory}: {problem}")
            self.counts.looks += 1

    # ---- what must be there
    def ledgers(self) -> dict[str, tuple[Save | None, Save | None]]:
        """Per directory below the mount: (save that is complete, save that may be begun over it)."""
        found: dict[str, tuple[Save | None, Save | None]] = {}
        for path in self.scratch.glob("ledger-*"):
            root = path.name.removeprefix("ledger-")
            for line in path.read_text().splitlines():
                kind, directory, *rest = line.split("\t")
                name = f"{root}/{directory}"
                if kind == "gone":
                    found.pop(name, None)
                    continue
                save = Save.of_line(rest[0])
                found[name] = (found.get(name, (None, None))[0], save) if kind == "begin" else (save, None)
        return found

    def check_tree(self, top: Path, what: str) -> None:
        """Complete saves that nobody has touched since are there, byte for byte, and nothing beside them."""
        for name, (save, begun) in self.ledgers().items():
            if save is None or begun is not None:
                continue
            for file, data in save.files().items():
                try:
                    found = (top / name / file).read_bytes()
                except OSError as error:
                    self.wrong.append(f"{what} {name}/{file} of {save.name}: {error}")
                    continue
                if found != data:
                    self.wrong.append(f"{what} {name}/{file} of {save.name}: {len(found)} bytes of {len(data)}, others")

    # ---- claims
    def snapshot(self) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
        """Files: (stage, digest); directories: restartable. Of all savers, who stand still.

        Seen from the node of each: another one does not know what is being written over a published content.
        """
        files: dict[str, tuple[str, str]] = {}
        directories: dict[str, str] = {}
        for index, node in enumerate(self.cluster.nodes):
            for root in sorted(node.mountpoint.glob("w*-*")):
                if int(root.name.rpartition("-")[2]) % len(self.cluster.nodes) == index:
                    self._look_at(root, node.mountpoint, files, directories)
        return files, directories

    @staticmethod
    def _look_at(root: Path, mount: Path, files: dict[str, tuple[str, str]], directories: dict[str, str]) -> None:
        for directory, _, names in os.walk(root):
            relative = Path(directory).relative_to(mount)
            for name in names:
                path = Path(directory) / name
                stage = control.xattr(path, "stage") or ""
                files[str(relative / name)] = stage, digest(path.read_bytes())
            if {METADATA, INDEX} & set(names):
                directories[str(relative)] = control.xattr(Path(directory), "restartable") or ""

    def hold(self, files: dict[str, tuple[str, str]], top: Path, least: str, what: str) -> None:
        """Every file that claims ``least`` or more is below ``top`` with its bytes."""
        for name, (stage, wanted) in files.items():
            if SNAPSHOT_RANKS.get(stage, 0) < SNAPSHOT_RANKS[least]:
                continue
            self.counts.claims += 1
            try:
                found = digest((top / name).read_bytes())
            except OSError as error:
                self.wrong.append(f"{what}: {name} claimed {stage}: {error}")
                continue
            if found != wanted:
                self.wrong.append(f"{what}: {name} claimed {stage}, has other bytes")

    def hold_restartable(self, directories: dict[str, str], top: Path, least: str, what: str) -> None:
        for name, boundary in directories.items():
            if SNAPSHOT_RANKS.get(boundary, 0) < SNAPSHOT_RANKS[least]:
                continue
            self.counts.claims += 1
            commit = METADATA if (top / name / METADATA).exists() else INDEX
            try:
                problem = mixture(top / name, commit)
            except OSError as error:
                problem = str(error)
            if problem:
                self.wrong.append(f"{what}: {name} claimed restartable {boundary}: {problem}")


def _is_daemon(pid: int) -> bool:
    """Serving, starting, or waiting for its turn; not the supervisor, which has the daemon's command in its own."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"cachexfs.daemon\0" in command and b"cachexfs.supervisor\0" not in command
    return False


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def ride(chaos: Chaos) -> None:
    """Daemons die under load; then all is where it belongs."""
    workers = chaos.start()
    with chaos.trouble(kill=True):
        deadline = time.monotonic() + chaos.plan.seconds
        while time.monotonic() < deadline and all(worker.process.poll() is None for worker in workers):
            time.sleep(0.2)
        early = len([w for w in workers if w.process.poll() is not None])
        if early:
            chaos.wrong.append(f"{early} workers ended by themselves")
    chaos.finish(workers)
    if chaos.wrong:
        return
    for node in chaos.cluster.nodes:
        chaos.check_tree(node.mountpoint, node.name)
    chaos.cluster.umount()
    chaos.check_tree(chaos.cluster.pfs, "PFS")
    chaos.look_at_pfs()
    if chaos.plan.twins:
        with contextlib.suppress(FileNotFoundError):
            chaos.wrong += [f"PFS twins: {w}" for w in same_tree(chaos.cluster.pfs / "twins", chaos.scratch / "plain")]


def claims(chaos: Chaos) -> None:
    """Claims, then the end of everything that they survive."""
    plan, cluster = chaos.plan, chaos.cluster
    deadline = time.monotonic() + plan.seconds
    while time.monotonic() < deadline and not chaos.wrong:
        workers = chaos.start()
        with chaos.trouble(kill=plan.mode != "alone"):
            time.sleep(chaos.chance.uniform(1, 6))
        for worker in workers:
            worker.stop()
        ended = [w for w in workers if w.process.poll() is not None]
        files, directories = chaos.snapshot()
        how = chaos.chance.choice(("processes", "processes", "node"))
        how = "processes" if plan.nodes == 2 else how  # one of two leaves no majority: that is for ``recover``
        for index in range(len(cluster.nodes)) if how == "processes" or len(cluster.nodes) == 1 else (0,):
            cluster.kill(index)
            chaos.counts.kills += 1
        for worker in workers:
            if worker in ended:
                code, _, err = worker.end()
                chaos.wrong.append(f"{worker.name} ended: {code} {err}")
            worker.kill()
        chaos.look_at_pfs()
        chaos.hold(files, cluster.pfs, "pfs", "PFS after the end of all")
        chaos.hold_restartable(directories, cluster.pfs, "pfs", "PFS")
        if how == "processes":
            cluster.mount()
            for node in cluster.nodes:
                chaos.hold(files, node.mountpoint, "returned", f"{node.name} after remount")
                chaos.hold_restartable(directories, node.mountpoint, "returned", f"{node.name} after remount")
            chaos.check_tree(cluster.nodes[0].mountpoint, "after remount")
        else:
            cluster.wipe(0)
            others = cluster.nodes[1:]
            for node in others:
                chaos.hold(files, node.mountpoint, "partner", f"{node.name} after the loss of n0")
                chaos.hold_restartable(directories, node.mountpoint, "partner", f"{node.name} after the loss of n0")
            if others:
                for path in chaos.scratch.glob("ledger-*"):
                    path.unlink()
                cluster.detach(0)
                cluster.mount([0])
            else:
                for path in chaos.scratch.glob("ledger-*"):
                    path.unlink()
                cluster.mount()
                chaos.hold(files, cluster.nodes[0].mountpoint, "pfs", "after the loss of the node")
        if how == "processes" and chaos.chance.random() < 0.5:  # what is left must drain
            for path in chaos.scratch.glob("ledger-*"):
                path.unlink()
        print(f"  cycle {chaos.generation} {how}: {chaos.counts}", flush=True)


def run(plan: Plan, what: str, keep: bool = False) -> Chaos:
    """Carry out a plan; ``wrong`` of the result says what was not as it must be."""
    with tempfile.TemporaryDirectory(prefix="cxc-", dir="/var/tmp", ignore_cleanup_errors=True) as text:
        scratch = Path(text)
        (scratch / "plain").mkdir()
        cluster = LocalCluster(scratch / "c", plan.nodes, None, plan.options())
        if plan.mode != "alone" and "staging" in plan.more:
            cluster.node_options[0] = {"staging": None}
        with cluster:
            chaos = Chaos(plan, cluster, scratch)
            cluster.mount()
            (ride if what == "ride" else claims)(chaos)
            for node in cluster.nodes:
                lines = node.log.read_text(errors="replace").splitlines() if node.log.exists() else []
                if any(line.startswith("Traceback") for line in lines):
                    chaos.wrong.append(f"{node.name}: a traceback in its log")
                if chaos.wrong:
                    chaos.wrong.append("\n".join([f"log of {node.name}:", *lines[-LOG_LINES_SHOWN:]]))
            if chaos.wrong and keep:
                print("\n".join(chaos.wrong[:20]), flush=True)
                print(f"kept: {scratch}", flush=True)
                time.sleep(600)
    return chaos


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("ride", "claims", "all"))
    parser.add_argument("--mode", choices=[*MODES], default="passthrough", help="of ride and claims")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--memory", default="1G")
    parser.add_argument("--savers", type=int, default=3)
    parser.add_argument("--twins", type=int, default=1)
    parser.add_argument("--mib-max", type=int, default=3)
    parser.add_argument("--brutal", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--kill-s", default="0.05-2")
    parser.add_argument("-o", default="", help="mount options")
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    low, high = map(float, given.kill_s.split("-"))
    more: dict[str, str | None] = dict(o.split("=", 1) for o in given.o.split(",") if o)
    failed = 0
    for seed in range(int(first), int(last or first) + 1):
        what, mode, nodes, memory = given.what, given.mode, given.nodes, given.memory
        if what == "all":
            what, mode, nodes, memory = VARIANTS[seed % len(VARIANTS)]
        plan = Plan(
            mode, nodes, memory, given.savers, given.twins, given.mib_max << 20, (low, high), given.seconds, seed, more,
            given.brutal,
        )  # fmt: skip
        chaos = run(plan, what, given.keep)
        verdict = "FAILED" if chaos.wrong else "ok"
        print(f"{verdict} {what} {mode} on {nodes} with {memory}, seed {seed}: {chaos.counts}")
        print("\n".join(chaos.wrong[:20]), flush=True)
        failed += bool(chaos.wrong)
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
