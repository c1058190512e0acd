"""Help for the tests of ``recover``: jobs that die at once, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from real_support import Template, until

from cachexfs.demo.cluster import Ended, LocalCluster
from cachexfs.demo.control import registered, xattr

TIMEOUT_S = 150


def recover(cluster: LocalCluster, index: int, *arguments: object, to: Path | None = None) -> Ended:
    """``cachexfs recover`` of a node's NVMe."""
    goal = ["--to", str(to or cluster.pfs)] if "--list" not in arguments else []
    return cluster.run(index, "recover", str(cluster.nodes[index].nvme), *goal, *map(str, arguments),
                       timeout_s=TIMEOUT_S)  # fmt: skip


def outcomes(ended: Ended) -> dict[str, str]:
    """path -> outcome of a ``--json`` run."""
    return {file["path"]: file["outcome"] for file in json.loads(ended.out)["files"]}


def reasons(ended: Ended) -> dict[str, str]:
    """path -> reason of what was not published."""
    return {file["path"]: file["reason"] for file in json.loads(ended.out)["files"] if file["reason"]}


def held(cluster: LocalCluster, index: int) -> list[dict[str, Any]]:
    """The files that ``recover --list --verify`` shows for a node."""
    ended = recover(cluster, index, "--list", "--verify", "--json")
    stores = json.loads(ended.out)["stores"]
    assert [store["node"] for store in stores] == [cluster.nodes[index].name]
    return list(stores[0]["files"])


def kill_all(cluster: LocalCluster) -> None:
    """The whole job dies: daemons, supervisors, etcd. Memory is lost, NVMe stays."""
    for node in cluster.nodes:
        cluster.kill(node.index)
    for node in cluster.nodes:
        for path in node.staging.rglob("*"):
            if path.is_file():
                path.unlink()


def until_restartable(cluster: LocalCluster, directory: str, *at: str) -> None:
    path = cluster.nodes[-1].mountpoint / directory
    until(f"restartable at {at}", lambda: xattr(path, "restartable") in at)


def until_manifests(cluster: LocalCluster, template: Template, directory: str) -> None:
    """Wait until the replicas' manifests say what the mount shows (they follow a rename at once, but not in it)."""
    wanted = {f"{directory}/{name}" for name in template.files}

    def told() -> bool:
        files = [file for node in cluster.nodes for file in held(cluster, node.index)]
        return wanted <= {file["path"] for file in files if file["published"]}

    until("manifests follow", told)


def damage(cluster: LocalCluster, index: int, path: str, at: int = 0) -> None:
    """Flip a byte of the replica of ``path`` on a node's NVMe."""
    files = held(cluster, index)
    wanted = next(file for file in files if file["path"] == path)
    found = [
        data for data in cluster.nodes[index].nvme.rglob("*.data") if data.stat().st_size == wanted["size"]
    ]  # fmt: skip
    assert len(found) == 1, found
    with found[0].open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def hidden(pfs: Path) -> list[str]:
    """Files that wait under hidden names, and their records."""
    return [path.name for path in (pfs / ".cachexfs/tmp").rglob("*") if path.is_file()]


def save(template: Template, cluster: LocalCluster, directory: str) -> None:
    template.save([node.mountpoint for node in cluster.nodes], directory)


def rounds(cluster: LocalCluster, *arguments: object, after: Callable[[], None] = lambda: None) -> Sequence[Ended]:
    """``recover`` on each node in turn, then once more where something was withheld."""
    first = []
    for node in cluster.nodes:
        first.append(recover(cluster, node.index, "--json", *arguments))
        after()
    return [*first, *(recover(cluster, node.index, "--json", *arguments) for node in cluster.nodes)]


def flat(directory: Path) -> dict[str, bytes]:
    """Relative path -> bytes of all files below a directory, without ``.cachexfs``."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and ".cachexfs" not in os.fspath(path)
    }


@contextlib.contextmanager
def stopped(cluster: LocalCluster, index: int) -> Iterator[None]:
    """The daemon of a node does nothing meanwhile."""
    entry = registered(cluster.nodes[index].runtime)
    assert entry is not None
    os.kill(entry.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(entry.pid, signal.SIGCONT)
