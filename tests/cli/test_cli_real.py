"""The commands against a real mount, as a shell runs them."""

import contextlib
import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cachexfs.cli import mounts
from cachexfs.demo.cluster import Ended, LocalCluster

TIMEOUT_S = 150
PATIENCE = "100"  # seconds of what is reached sooner or later


@pytest.fixture(scope="module")
def alone(make_module_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    """One node, mounted."""
    return make_module_cluster(1)


@pytest.fixture
def away(alone: LocalCluster) -> Iterator[LocalCluster]:
    """The same with its PFS directory moved away."""
    elsewhere = alone.root / "pfs-away"
    os.listdir(alone.nodes[0].mountpoint)  # imported before it goes
    alone.pfs.rename(elsewhere)
    yield alone
    elsewhere.rename(alone.pfs)
    assert run(alone, "wait", alone.nodes[0].mountpoint / "late", "--at", "pfs", "--timeout", PATIENCE).code == 0


def run(cluster: LocalCluster, *arguments: object) -> Ended:
    ended = cluster.run(0, *map(str, arguments), timeout_s=TIMEOUT_S)
    said = [line for line in ended.err.splitlines() if not line.startswith("cachexfs: unmounting ")]
    assert len(said) == bool(said)  # an error is one line
    return ended


def save(checkpoint: Path, directory: Path, step: int) -> Path:
    """A DCP checkpoint, its commit file last."""
    path = directory / f"step-{step}"
    path.mkdir(parents=True)
    for file in sorted(checkpoint.iterdir(), key=lambda file: file.name == ".metadata"):
        (path / file.name).write_bytes(file.read_bytes())
    return path


def test_a_checkpoint_from_save_to_latest(alone: LocalCluster, checkpoint: Path) -> None:
    directory = alone.nodes[0].mountpoint / "run"
    save(checkpoint, directory, 9)
    newest = save(checkpoint, directory, 10)
    assert run(alone, "wait", newest / ".metadata", "--at", "pfs", "--timeout", PATIENCE).code == 0
    assert run(alone, "wait", newest, "--at", "pfs", "--timeout", PATIENCE).code == 0
    assert run(alone, "latest", directory, "--at", "pfs").out == f"{newest}\n"
    assert run(alone, "latest", directory, "--below", "10").out == f"{directory}/step-9\n"
    assert run(alone, "latest", directory, "--below", "9").code == 1
    assert run(alone, "latest", alone.pfs / "run").out == f"{alone.pfs}/run/step-10\n"
    found = json.loads(run(alone, "status", newest, "--json").out)
    assert [(point["path"], point["restartable"]) for point in found["checkpoints"]] == [("run/step-10", "pfs")]
    assert "run/step-10" in run(alone, "status").out
    families = {family.name: family for family in text_string_to_metric_families(run(alone, "metrics").out)}
    counts = {sample.labels["restartable"]: sample.value for sample in families["cachexfs_checkpoints"].samples}
    assert counts == {"no": 0, "returned": 0, "partner": 0, "pfs": 2}
    file = json.loads(run(alone, "status", newest / ".metadata", "--json").out)["file"]
    assert (file["stage"], file["pending"]) == ("pfs", 0)
    explained = run(alone, "explain", newest)
    assert explained.code == 0
    assert "'pfs'" in explained.out


def test_what_is_not_there_is_a_no(alone: LocalCluster) -> None:
    missing = alone.nodes[0].mountpoint / "none"
    for command in (["status"], ["explain"], ["wait", "--at", "pfs"]):
        ended = run(alone, *command, missing)
        assert ended.code == 1
        assert "none" in ended.err
    assert run(alone, "wait", "--at", "partner", alone.nodes[0].mountpoint).code == 2  # there is no partner


def test_without_the_pfs_wait_times_out_and_status_and_explain_say_why(away: LocalCluster) -> None:
    file = away.nodes[0].mountpoint / "late"
    file.write_bytes(b"x" * 100_000)
    began = time.monotonic()
    ended = run(away, "wait", file, "--at", "pfs", "--timeout", "1")
    assert ended.code == 124
    assert time.monotonic() - began >= 1
    assert run(away, "status").code == 3
    explained = json.loads(run(away, "explain", file, "--json").out)
    assert explained["stage"] == "returned"
    assert any(piece["boundary"] == "pfs" and piece["reason"] for piece in explained["pieces"])


def test_a_killed_daemon_is_told_and_mount_with_the_same_options_brings_all_back(alone: LocalCluster) -> None:
    mountpoint = alone.nodes[0].mountpoint
    (mountpoint / "kept").write_bytes(b"kept")
    alone.kill_daemon(0)
    for command in (["status"], ["latest"], ["explain"], ["umount"], ["wait", "--at", "pfs"]):
        ended = run(alone, *command, mountpoint)
        assert ended.code == 4, command
        assert "is dead" in ended.err
    alone.mount()
    assert (mountpoint / "kept").read_bytes() == b"kept"
    assert run(alone, "status").code == 0


def test_what_an_umount_could_not_bring_to_the_pfs_is_found_and_goes_on_by_the_command_that_status_names(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = make_cluster(1)
    mountpoint, away = cluster.nodes[0].mountpoint, cluster.root / "pfs-away"
    cluster.pfs.rename(away)
    (mountpoint / "kept").write_bytes(b"k" * 100_000)
    assert run(cluster, "umount", mountpoint, "--timeout", "1").code == 3
    left = json.loads(run(cluster, "status", mountpoint, "--json").out)
    assert (left["exit"], left["pending_bytes"], left["mounted"]) == (3, 100_000, False)
    assert left["command"] in run(cluster, "status").out
    other = cluster.root / "other"
    other.mkdir()
    refused = run(cluster, *(str(other) if word == left["pfs"] else word for word in shlex.split(left["command"])[1:]))
    assert (refused.code, left["command"] in refused.err, os.listdir(other)) == (2, True, [])
    away.rename(cluster.pfs)
    assert run(cluster, *shlex.split(left["command"])[1:]).code == 0
    assert (mountpoint / "kept").read_bytes() == b"k" * 100_000
    cluster.umount()
    assert (cluster.pfs / "kept").read_bytes() == b"k" * 100_000
    assert run(cluster, "status").code == 4


def test_mount_prints_what_it_made_and_foreground_ends_with_a_signal(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = make_cluster(1, mounted=False)
    made = json.loads(run(cluster, *cluster.mount_arguments(0), "--json").out)
    entry = mounts.registry(str(cluster.nodes[0].runtime))[0]
    assert (made["pid"], made["socket"], made["mountpoint"]) == (entry.pid, entry.socket, entry.mountpoint)
    cluster.umount()
    daemon = cluster.start(0, *cluster.mount_arguments(0), "--foreground")
    deadline = time.monotonic() + TIMEOUT_S
    while run(cluster, "status").code != 0:
        assert time.monotonic() < deadline
        assert daemon.poll() is None, daemon.communicate()
    (cluster.nodes[0].mountpoint / "f").write_bytes(b"f")
    assert run(cluster, "wait", cluster.nodes[0].mountpoint / "f", "--at", "pfs", "--timeout", PATIENCE).code == 0
    daemon.send_signal(signal.SIGTERM)
    with contextlib.closing(daemon.stdout), contextlib.closing(daemon.stderr):  # type: ignore[type-var]
        assert daemon.wait(TIMEOUT_S) == 0
    assert not os.path.ismount(cluster.nodes[0].mountpoint)
    assert (cluster.pfs / "f").read_bytes() == b"f"


def test_refresh_takes_in_what_was_changed_on_the_pfs(alone: LocalCluster) -> None:
    mount, pfs = alone.nodes[0].mountpoint, alone.pfs
    directory = mount / "shared"
    directory.mkdir()
    for name in ("changed", "gone"):
        (directory / name).write_text("mine")
    assert run(alone, "wait", directory, "--at", "pfs", "--timeout", PATIENCE).code == 0
    while alone.status(0).pending_ops:  # directories' own times land last
        time.sleep(0.01)
    (pfs / "shared/new").write_text("theirs")
    (pfs / "shared/changed").unlink()
    (pfs / "shared/changed").write_text("theirs, longer")
    (pfs / "shared/gone").unlink()
    assert not (directory / "new").exists()
    found = run(alone, "status", directory, "--refresh", "--json")
    said = json.loads(found.out)
    assert (said["new"], said["changed"], said["missing"]) == (["shared/new"], ["shared/changed"], ["shared/gone"])
    assert found.code == said["exit"] == 1
    assert (directory / "new").read_text() == "theirs"
    assert sorted(os.listdir(directory)) == ["changed", "gone", "new"]
    assert run(alone, "wait", directory, "--at", "pfs", "--timeout", PATIENCE).code == 0  # this node had a copy
    assert (pfs / "shared/gone").read_text() == "mine"
    (pfs / "shared/gone").unlink()
    ended = run(alone, "status", directory, "--refresh", "--forget")
    assert (ended.code, ended.out) == (0, "forgotten: shared/gone\n")
    assert sorted(os.listdir(directory)) == ["changed", "new"]
    assert run(alone, "status", directory, "--forget").code == 2
