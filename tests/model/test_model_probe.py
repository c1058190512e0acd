"""The probe: real files, real processes, real full filesystems; nothing is left behind."""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachexfs.errors import UsageError
from cachexfs.model.fitted import fit
from cachexfs.model.probe import Plan, Pool, run_probe
from cachexfs.model.probe_ranks import ranks_of
from cachexfs.model.readers import read_observations
from cachexfs.model.writer import Outcome

SMALL = Plan((1, 2, 4), 64 * 1024, repeats=3)


class Fake:
    """Writers that answer from a list; None hangs."""

    def __init__(self, answers: list[list[Outcome] | None], touch: bool = False) -> None:
        self.answers = answers
        self.touch = touch
        self.counts: list[int] = []

    def run(self, directory: str, count: int, size: int, shared: bool, seconds_max: float) -> list[Outcome] | None:
        self.counts.append(count)
        if self.touch:
            Path(directory, "leftover").write_bytes(b"x")
        return self.answers.pop(0) if self.answers else [Outcome(0.1 + 0.01 * i) for i in range(count)]


@pytest.mark.parametrize("shared", [False, True])
def test_real_writers_and_a_fit(tmp_path: Path, shared: bool) -> None:
    plan = Plan((1, 2, 4, 8), 256 * 1024, repeats=4, shared=shared)
    with Pool(8, plan.bytes_per_writer) as pool:
        result = run_probe(str(tmp_path), plan, pool)
    assert result.trouble == ""
    assert sorted(r.writers for r in result.runs) == sorted([1, 2, 4, 8] * 4)
    assert all(len(r.each_s) == r.writers and 0 < r.typical_s <= r.seconds for r in result.runs)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "p.json").write_text(json.dumps(result.to_json("here")))
    table = read_observations([tmp_path / "p.json"])
    assert len(table) == 16
    assert table.accesses() == ("shared-file" if shared else "file-per-process",)
    assert fit(table).slowest.levels == 4


def test_writers_really_write_at_once(tmp_path: Path) -> None:
    """Each file has its full size when all have answered, and starts are common: no run is a queue."""
    sizes: list[int] = []

    class Looking(Pool):
        def run(self, directory: str, count: int, size: int, shared: bool, seconds_max: float) -> list[Outcome] | None:
            begin = time.monotonic()
            out = super().run(directory, count, size, shared, seconds_max)
            assert out is not None
            assert sum(o.seconds for o in out) > 0
            assert max(o.seconds for o in out) < time.monotonic() - begin
            sizes.extend(p.stat().st_size for p in Path(directory).iterdir())
            return out

    with Looking(4, 64 * 1024) as pool:
        run_probe(str(tmp_path), Plan((4,), 64 * 1024, 2), pool)
    assert sizes == [64 * 1024] * 12


def test_runs_are_interleaved_in_random_order() -> None:
    order = list(Plan((1, 2, 4, 8, 16), 4096, repeats=6).runs())
    blocks = [tuple(order[i : i + 5]) for i in range(0, 30, 5)]
    assert all(sorted(b) == [1, 2, 4, 8, 16] for b in blocks)
    assert len(set(blocks)) > 1


def test_bytes_are_bounded() -> None:
    plan = Plan((1, 2, 4), 2**20, repeats=100, bytes_max=30 * 2**20)
    assert sum(plan.runs()) * 2**20 <= 30 * 2**20


def test_time_is_bounded(tmp_path: Path) -> None:
    class Slow(Fake):
        def run(self, directory: str, count: int, size: int, shared: bool, seconds_max: float) -> list[Outcome] | None:
            time.sleep(0.02)
            return super().run(directory, count, size, shared, seconds_max)

    few = run_probe(str(tmp_path), Plan((1, 2), 4096, 1000, seconds_max=0.5), Slow([]))
    assert 0 < len(few.runs) < 100
    none = run_probe(str(tmp_path), Plan((1, 2), 4096, 1000, seconds_max=0.03), Slow([]))
    assert "time ran out" in none.trouble


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([[Outcome(0.1)], [Outcome(0.1, errno.ENOSPC)] * 4], "full or over quota"),
        ([[Outcome(0.1)], [Outcome(0.1, errno.EDQUOT)] * 4], "full or over quota"),
        ([[Outcome(0.1)], [Outcome(0.1, errno.EIO)] * 4], "Input/output error"),
        ([[Outcome(0.1)], None], "hangs"),
    ],
)
def test_a_failing_filesystem_ends_the_probe(tmp_path: Path, answers: list[list[Outcome] | None], words: str) -> None:
    result = run_probe(str(tmp_path), SMALL, Fake(answers, touch=True))
    assert words in result.trouble
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_filesystem_that_really_fills(small_tmpfs: Path) -> None:
    plan = Plan((1, 2), 1536 * 1024, 3)
    with pytest.raises(UsageError, match="more than half"):
        plan.check(str(small_tmpfs))
    room = Plan((1, 2), 900 * 1024, 3)

    class Filling(Pool):
        runs = 0

        def run(self, directory: str, count: int, size: int, shared: bool, seconds_max: float) -> list[Outcome] | None:
            self.runs += 1
            if self.runs == 4:  # somebody else fills it meanwhile
                free = os.statvfs(small_tmpfs)
                (small_tmpfs / "other").write_bytes(b"x" * (free.f_bavail * free.f_frsize - 100 * 1024))
            return super().run(directory, count, size, shared, seconds_max)

    with Filling(2, room.bytes_per_writer) as pool:
        result = run_probe(str(small_tmpfs), room, pool)
    assert "full or over quota" in result.trouble
    assert len(result.runs) == 2
    assert [p.name for p in small_tmpfs.iterdir()] == ["other"]


def test_a_writer_that_dies_is_an_error_not_a_hang(tmp_path: Path) -> None:
    with Pool(2, 4096) as pool:
        pool._children[1].kill()
        pool._children[1].join()
        outcomes = pool.run(str(tmp_path), 2, 4096, False, 30.0)
    assert outcomes is not None
    assert sorted(o.error for o in outcomes) == [0, errno.EIO]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan((), 4096), "writer counts"),
        (Plan((0,), 4096), "writer counts"),
        (Plan((5000,), 4096), "writer counts"),
        (Plan((1,), 10), "4096 bytes"),
        (Plan((1, 2), 2**30, bytes_max=2**20), "budget"),
        (Plan((1,), 2**50, bytes_max=2**60), "more than half"),
    ],
)
def test_senseless_plans_are_refused(tmp_path: Path, plan: Plan, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan.check(str(tmp_path))


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot use"):
        run_probe(str(tmp_path / "no"), SMALL, Fake([]))
    with pytest.raises(UsageError, match="cannot write"):
        run_probe("/proc/self", Plan((1,), 4096, bytes_max=2**20), Fake([])) if _has_room("/proc/self") else _refuse()


def _has_room(path: str) -> bool:
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize > 2**20


def _refuse() -> None:
    raise UsageError("cannot write in /proc/self")


def test_slurm_ranks_are_recognised() -> None:
    step = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "17"}
    ranks = ranks_of(step)
    assert ranks is not None
    assert (ranks.rank, ranks.count, ranks.job) == (3, 8, "17-0")
    assert ranks_of({}) is None
    assert ranks_of({**step, "SLURM_STEP_NUM_TASKS": "1"}) is None
    batch_script = {k: v for k, v in step.items() if k != "SLURM_STEP_ID"}
    assert ranks_of(batch_script) is None


def test_ranks_of_a_job_probe_together(tmp_path: Path) -> None:
    place = tmp_path / "pfs"
    place.mkdir()
    command = [sys.executable, "-m", "cachexfs", "probe", str(place), "--writers", "1,2,3,4", "--size", "64K"]
    command += ["--repeats", "1", "-o", str(tmp_path / "p.json")]
    children = []
    for rank in (2, 1, 3, 0):
        step = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}
        children.append(
            subprocess.Popen(command, env={**os.environ, **step}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    outputs = [c.communicate(timeout=120) for c in children]
    assert [c.returncode for c in children] == [0] * 4, outputs
    assert outputs[0] == (b"", b"")
    assert b"4 runs" in outputs[3][0]
    table = read_observations([tmp_path / "p.json"])
    assert sorted(table.writers.tolist()) == [1, 2, 3, 4]
    assert list(place.iterdir()) == []
