"""Boundary records: what is appended is read again, bounded, whatever happens between."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachexfs.errors import UsageError
from cachexfs.model import records
from cachexfs.model.records import BoundaryRecord


def record(i: int = 0, **kind: object) -> BoundaryRecord:
    return BoundaryRecord(1e9 + i, f"/pfs/ckpt-{i}", 64, 2.0**30, "partner", "n1", **kind)  # type: ignore[arg-type]


def test_append_and_read(tmp_path: Path) -> None:
    path = tmp_path / "b"
    all_of_it = record(
        1, returned_s=(1.0, 0.9), partner_s=(2.0, 1.5), pfs_s=(30.0, 20.0), restartable_s=(31.0, 31.0), load=0.25
    )
    for r in (record(0), all_of_it, record(2, failed=True, waited_s=99.0)):
        records.append(path, r)
    assert records.read(path) == [record(0), all_of_it, record(2, failed=True, waited_s=99.0)]


def test_the_daemon_need_not_pay_for_numpy() -> None:
    code = (
        "import sys, cachexfs.model.records\n"
        "print([m for m in ('numpy', 'scipy', 'click', 'msgspec') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_both_files_together_stay_below_the_limit(tmp_path: Path) -> None:
    path, limit = tmp_path / "b", records.LIMIT_BYTES_MIN
    for i in range(500):
        records.append(path, record(i, pfs_s=(3.0, 2.0)), limit)
        assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= limit
    kept = records.read(path)
    assert kept[-1] == record(499, pfs_s=(3.0, 2.0))
    assert [r.time for r in kept] == [1e9 + i for i in range(500 - len(kept), 500)]
    assert len(kept) > 20


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "b"
    records.append(path, record(0))
    line = records.encode(record(1))
    with open(path, "ab") as stream:
        stream.write(line[: len(line) // 2])
    records.append(path, record(2))
    with open(path, "ab") as stream:
        stream.write(b"\xff\xfe\n" + b"x" * 10_000 + b"\n")
    records.append(path, record(3))
    found, skipped = records.scan(path)
    assert found == [record(0), record(2), record(3)]
    assert skipped >= 3


def test_many_processes_append_at_once(tmp_path: Path) -> None:
    path = tmp_path / "b"
    code = (
        "import sys; from cachexfs.model.records import *\n"
        "for i in range(200):\n"
        "    append(sys.argv[1], BoundaryRecord(float(i), 'c', 1, 1.0, 'direct', sys.argv[2]), 32768)\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(path), f"n{i}"]) for i in range(4)]
    assert [c.wait() for c in children] == [0] * 4
    found, skipped = records.scan(path)
    assert skipped == 0
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 32768
    for node in ("n0", "n1", "n2", "n3"):
        times = [r.time for r in found if r.node == node]
        assert times == sorted(times)


def test_long_names_are_cut_not_refused(tmp_path: Path) -> None:
    long = BoundaryRecord(1.0, "/" + "\U0001f600" * 5000, 1, 1.0, "direct", "n" * 3000)
    line = records.encode(long)
    assert len(line) <= records.LINE_BYTES_MAX
    assert records.decode(line).checkpoint.startswith("...")


def test_later_lines_fill_in_boundaries() -> None:
    early, late = record(0, returned_s=(1.0, 1.0)), record(0, pfs_s=(9.0, 8.0))
    assert records.merge([early, late, record(1)]) == [record(0, returned_s=(1.0, 1.0), pfs_s=(9.0, 8.0)), record(1)]


def test_unknown_fields_of_later_versions_are_ignored() -> None:
    fields = json.loads(records.encode(record(0)))
    assert records.decode(json.dumps({**fields, "weather": "fine"})) == record(0)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"v":1}',
        b'{"v":2,"time":1}',
        b'{"v":1,"time":"x"}',
        b"\x00",
        b'{"v":1,"time":NaN}',
    ],
)
def test_wrong_lines_are_refused(line: bytes) -> None:
    with pytest.raises(UsageError):
        records.decode(line)


@pytest.mark.parametrize(
    "kind",
    [
        {"pfs_s": (1.0, 2.0)},
        {"pfs_s": (-1.0, -2.0)},
        {"pfs_s": (math.inf, 1.0)},
        {"load": 1.0},
        {"failed": True},
        {"failed": True, "waited_s": 0.0},
    ],
)
def test_senseless_records_cannot_be_made(kind: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        record(0, **kind)


def test_no_file_is_an_error_and_a_small_limit_too(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        records.read(tmp_path / "b")
    with pytest.raises(UsageError):
        records.append(tmp_path / "b", record(0), 100)
    assert os.listdir(tmp_path) == []


@given(
    st.floats(0, 1e10),
    st.text(st.characters(codec="utf-8"), max_size=400),
    st.integers(1, 10**6),
    st.floats(1, 1e15),
    st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)).map(lambda p: (max(p), min(p))),
)
def test_every_record_survives_the_line(
    time: float, path: str, writers: int, size: float, pair: tuple[float, float]
) -> None:
    made = BoundaryRecord(time, path, writers, size, "direct", "n", pfs_s=pair)
    line = records.encode(made)
    assert line.count(b"\n") == 1
    again = records.decode(line)
    assert again == made or again.checkpoint.startswith("...")
