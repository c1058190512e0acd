"""Shared fixtures: local clusters of real mounts, and the check that no test leaves a mount or a process behind."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

import pytest

from cachexfs.demo.cluster import LocalCluster

MakeCluster = Callable[..., LocalCluster]

#: Roots of this run's clusters; short, so that a control socket's path fits.
ROOT_PREFIX = f"cxt-{os.getpid()}-"
LOG_LINES_SHOWN = 40


@pytest.fixture(scope="session", autouse=True)
def _no_mount_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    ours = (f"{tempfile.gettempdir()}/{ROOT_PREFIX}", f"{tmp_path_factory.getbasetemp()}/")
    points = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    left = [point[1] for point in points if point[2].startswith("fuse.cachex") and point[1].startswith(ours)]
    assert not left, f"mounts left behind: {left}"


@pytest.fixture
def counted() -> Callable[[], AbstractContextManager[list[int]]]:
    """``with counted() as calls``: ``calls[0]`` is then the number of function calls of the body, and of tasks that ran
    meanwhile: work, whatever the machine does."""

    @contextmanager
    def count_calls() -> Iterator[list[int]]:
        calls = [0]

        def count(frame: FrameType, event: str, argument: object) -> None:
            calls[0] += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            yield calls
        finally:
            sys.setprofile(None)

    return count_calls


class ClusterFactory:
    """Makes clusters and takes them down; a log with a traceback is a failure of its own."""

    def __init__(self) -> None:
        self.made: list[LocalCluster] = []

    def __call__(
        self,
        nodes: int = 1,
        options: Mapping[str, str | None] | None = None,
        *,
        namespaces: bool = False,
        mounted: bool = True,
        pfs: Sequence[Path] = (),
    ) -> LocalCluster:
        """``pfs``: each node's own way to the one PFS directory; a plain local directory if there is none."""
        root = Path(tempfile.mkdtemp(prefix=ROOT_PREFIX))
        root.chmod(0o755)
        merged = {"supervisor": "off"} | dict(options or {})  # a killed daemon stays dead until the test remounts
        cluster = LocalCluster(root, nodes, pfs[0] if pfs else None, merged, namespaces=namespaces)
        cluster.node_pfs = dict(enumerate(pfs))
        self.made.append(cluster)
        cluster.create()
        if mounted:
            cluster.mount()
        return cluster

    def close(self) -> None:
        tracebacks = []
        left = []
        for cluster in self.made:
            for node in cluster.nodes:
                lines = node.log.read_text(errors="replace").splitlines() if node.log.exists() else []
                if any(line.startswith("Traceback") for line in lines):
                    tracebacks.append(f"{node.name}: " + "\n".join(lines[-LOG_LINES_SHOWN:]))
                print(f"--- log of {node.name}", *lines[-LOG_LINES_SHOWN:], sep="\n")
            cluster.teardown()
            left += cluster.left()
        assert not left, f"left behind: {left}"
        assert not tracebacks, "a daemon's log has a traceback:\n" + "\n".join(tracebacks)


@pytest.fixture
def make_cluster() -> Iterator[MakeCluster]:
    """Clusters for one test."""
    factory = ClusterFactory()
    yield factory
    factory.close()


@pytest.fixture(scope="module")
def make_module_cluster() -> Iterator[MakeCluster]:
    """Clusters for the tests of one module, which do not harm them."""
    factory = ClusterFactory()
    yield factory
    factory.close()
