"""``cachexfs demo`` as a user runs it: it holds, it fails loudly, it cleans up."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cachexfs.demo.report import Report
from cachexfs.errors import EXIT_DONE, EXIT_NOT_DURABLE, EXIT_USAGE

DEMO = [sys.executable, "-m", "cachexfs", "demo"]
TIMEOUT_S = 200.0
INTERRUPTED = 130


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | (env or {})
    return subprocess.run(
        [*DEMO, *arguments], capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=environment
    )


def assert_nothing_left(root: Path) -> None:
    assert str(root) not in Path("/proc/self/mounts").read_text()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                assert str(root).encode() not in (entry / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue


def test_everything_that_the_demo_promises_holds(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    done = run("--nodes", "3", "--ranks", "6", "--mib", "6", "--root", str(root), "--json")
    report = msgspec.json.decode(done.stdout, type=Report)
    assert (done.returncode, report.failed, report.error) == (EXIT_DONE, None, None), done.stderr
    assert report.saved
    assert report.restored
    assert [row.name for row in report.saved.files] == [f"__{rank}_0.distcp" for rank in range(6)] + [".metadata"]
    assert [row.node for row in report.saved.files] == ["n0", "n0", "n1", "n1", "n2", "n2", "n0"]
    assert [name for name, _ in report.saved.pfs_listing] == sorted(row.name for row in report.saved.files)
    for row in report.saved.files:
        assert row.returned_ms is not None
        assert row.partner_ms is not None
        assert row.pfs_ms is not None
        assert 0 < row.returned_ms <= row.partner_ms
        assert row.returned_ms <= row.pfs_ms
    assert report.saved.attributes["restartable"] == "pfs"
    assert report.restored.lost == "n0"
    assert report.restored.killed > 0
    assert report.restored.survivors == ["n1", "n2"]
    assert report.restored.ranks_equal == 6
    for source in report.restored.files:
        assert source.copies
        assert source.sources or f"{source.node}:memory" in source.copies
        assert not {"pfs", "memory:n0", "nvme:n0"} & set(source.sources)
        assert not any(copy.startswith("n0:") for copy in source.copies)
    assert len(report.losses_resumed) == 5
    assert report.losses_resumed == report.losses_unbroken
    assert not root.exists()
    assert_nothing_left(root)


def test_a_step_that_fails_is_named_with_exit_3_and_nothing_is_left(tmp_path: Path) -> None:
    """Without etcd on the PATH several nodes cannot be mounted."""
    root = tmp_path / "demo"
    done = run("--nodes", "3", "--ranks", "3", "--mib", "1", "--root", str(root), "--keep", env={"PATH": "/nowhere"})
    assert done.returncode == EXIT_NOT_DURABLE
    assert "failed at: mount 3 nodes" in done.stdout
    assert_nothing_left(root)
    assert (root / "nodes").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_takes_everything_down(tmp_path: Path, number: signal.Signals) -> None:
    root = tmp_path / "demo"
    with subprocess.Popen(
        [*DEMO, "--nodes", "3", "--ranks", "3", "--mib", "1", "--root", str(root)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout
        while "✓ mount 3 nodes" not in (line := process.stdout.readline()):
            assert line, "the demo ended before the nodes were mounted"
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == INTERRUPTED
    assert_nothing_left(root)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--nodes", "2"], "2"), (["--ranks", "2"], "--ranks 2"), (["--nodes", "many"], "many"), (["--fast"], "--fast")],
)
def test_wrong_usage_is_one_line_and_exit_2(arguments: list[str], word: str) -> None:
    done = run(*arguments)
    assert done.returncode == EXIT_USAGE
    assert len(done.stderr.strip().splitlines()) == 1
    assert word in done.stderr


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    done = run("--root", str(tmp_path))
    assert done.returncode == EXIT_USAGE
    assert "not empty" in done.stderr
    assert (tmp_path / "precious").exists()
