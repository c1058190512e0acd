"""``cachexfs metrics``, read by Prometheus' own parser."""

from pathlib import Path

from cli_support import FakeDaemon, Run
from prometheus_client.parser import text_string_to_metric_families

STATUS = {
    "done": True, "mountpoint": "/cachex", "pfs": "/scratch/run", "node": "n1", "job": "7", "pid": 1, "uptime_s": 12.5,
    "daemons": 2, "kernel": "passthrough", "nodes": [{"name": "n1"}, {"name": "n2", "live": False}], "partner": None,
    "protected": False, "pfs_state": "hung", "pfs_away_s": 4.0, "staging_used": 1 << 30, "staging_limit": 1 << 34,
    "pending_bytes": 4096, "pending_ops": 3,
    "checkpoints": [
        {"path": "step-1", "restartable": "pfs", "t_returned": "2026-01-01T00:00:01Z",
         "t_partner": "2026-01-01T00:00:02Z", "t_pfs": "2026-01-01T00:00:03Z", "t_restartable": "2026-01-01T00:00:03Z"},
        {"path": "step-2", "restartable": "partner", "t_returned": "2026-01-01T00:00:11Z",
         "t_partner": "2026-01-01T00:00:12Z", "t_restartable": "2026-01-01T00:00:12Z"},
        {"path": "step-3", "restartable": "no", "t_returned": "2026-01-01T00:00:21Z"},
    ],
}  # fmt: skip
NEW_YEAR_S = 1767225600.0

Samples = dict[tuple[str, str], float]


def samples(text: str) -> Samples:
    """(name, value of the last label beside the mount's) -> value."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [label for name, label in sample.labels.items() if name not in ("mountpoint", "node", "job")]
            found[sample.name.removeprefix("cachexfs_"), own[-1] if own else ""] = sample.value
    return found


def test_what_a_mount_says(daemon: FakeDaemon, run: Run) -> None:
    daemon.answers["status"] = [STATUS]
    ran = run("metrics")
    found = samples(ran.out)
    assert ran.code == 0
    assert found["up", ""] == 1
    assert (found["daemons", ""], found["pending_bytes", ""], found["staging_used_bytes", ""]) == (2, 4096, 1 << 30)
    assert (found["protected", ""], found["pfs_reachable", ""], found["pfs_away_seconds", ""]) == (0, 0, 4)
    assert found["problems", ""] == 2
    assert (found["nodes", "live"], found["nodes", "lost"]) == (1, 1)
    assert [found["checkpoints", where] for where in ("no", "returned", "partner", "pfs")] == [1, 0, 1, 1]
    last = [found["last_restartable_timestamp_seconds", where] for where in ("returned", "partner", "pfs")]
    assert last == [NEW_YEAR_S + 11, NEW_YEAR_S + 12, NEW_YEAR_S + 3]


def test_a_dead_mount_is_down(daemon: FakeDaemon, run: Run) -> None:
    daemon.stop()
    found = samples(run("metrics").out)
    assert found["up", ""] == 0
    assert ("uptime_seconds", "") not in found


def test_a_file_is_replaced(daemon: FakeDaemon, run: Run, tmp_path: Path) -> None:
    daemon.answers["status"] = [STATUS]
    target = tmp_path / "cachexfs.prom"
    target.write_text("old")
    assert run("metrics", target).out == ""
    assert samples(target.read_text())["up", ""] == 1
    assert list(tmp_path.glob("*.prom*")) == [target]
    ran = run("metrics", tmp_path / "missing" / "x.prom")
    assert (ran.code, ran.err) == (
        4,
        f"cachexfs: error: cannot write {tmp_path}/missing/x.prom: No such file or directory\n",
    )


def test_without_a_mount_the_file_shows_none(run: Run, runtime: Path, kernel: Path, tmp_path: Path) -> None:
    target = tmp_path / "cachexfs.prom"
    assert run("metrics", target).code == 0
    assert samples(target.read_text()) == {}
