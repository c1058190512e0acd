"""Reading measurements: every format, and every way in which they can be wrong."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from cachexfs.errors import UsageError
from cachexfs.model import records
from cachexfs.model.fitted import fit
from cachexfs.model.observe import observations
from cachexfs.model.readers import read_observations

HEADER = "writers,bytes_per_writer,seconds"
GOOD = "\n".join(f"{n},1073741824,{1.0 + 0.1 * n + 0.001 * r:.4f}" for n in (1, 2, 4, 8) for r in range(5))


def write(tmp_path: Path, text: str, name: str = "x.csv") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_csv_and_its_gzip(tmp_path: Path) -> None:
    plain = write(tmp_path, f"{HEADER}\n{GOOD}\n")
    packed = tmp_path / "x.csv.gz"
    packed.write_bytes(gzip.compress(Path(plain).read_bytes()))
    a, b = read_observations([plain]), read_observations([packed])
    assert len(a) == len(b) == 20
    assert np.array_equal(a.seconds, b.seconds)


@pytest.mark.parametrize(
    "text",
    [
        f"\ufeff{HEADER}\r\n" + GOOD.replace("\n", "\r\n"),
        f"{HEADER}\n{GOOD}".replace(",", ";"),
        f"{HEADER}\n{GOOD}".replace(",", "\t"),
        "Writers , Bytes_Per_Writer,SECONDS\n" + GOOD,
    ],
)
def test_csv_dialects(tmp_path: Path, text: str) -> None:
    assert len(read_observations([write(tmp_path, text)])) == 20


def test_units_in_column_names(tmp_path: Path) -> None:
    text = "ranks,mib_per_writer,time_ms\n4,1024,1500\n8,1024,1700\n"
    table = read_observations([write(tmp_path, text)])
    assert table.bytes_per_writer[0] == 2.0**30
    assert table.seconds[0] == pytest.approx(1.5)


def test_total_bytes_are_divided(tmp_path: Path) -> None:
    table = read_observations([write(tmp_path, "writers,bytes_total,seconds\n4,4294967296,1.5\n")])
    assert table.bytes_per_writer[0] == 2.0**30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("  \n \n", "is empty"),
        (f"{HEADER}\n", "no rows"),
        ("a,b,c\n1,2,3\n", "needs a column writers"),
        ("writers,seconds\n1,2\n", "needs a column bytes_per_writer"),
        ("writers,bytes_per_writer\n1,2\n", "needs a column seconds"),
        (f"{HEADER}\n1,1073741824,-1\n2,1073741824,-2\n", "zero or negative"),
        (f"{HEADER}\n1,1073741824,nan\n2,1073741824,inf\n", "not a number"),
        (f"{HEADER}\n1,1073741824,abc\n", "not a number"),
        (f"{HEADER}\n1.5,1073741824,1\n", "not whole"),
        (f"{HEADER}\n1,1024,1500\n2,1024,1600\n", "a unit is wrong"),
        (f"{HEADER}\n1,1e15,1\n2,1e15,1\n", "a unit is wrong"),
        ('{"a": 1}', "JSON, but"),
        ('{"format": "cachexfs-probe-1"}', "without rows"),
        ('{"format": "cachexfs-probe-1", "rows": [{"writers": 1}]}', "damaged"),
        ('{"tests": []}', "without write results"),
        ("IOR-3.0.1: MPI Coordinated Test of Parallel I/O\nnothing\n", "without write results"),
        ("a\x00b", "is binary"),
        (f'{HEADER}\n"1,2\n', "no rows"),
    ],
)
def test_wrong_files_say_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_observations([write(tmp_path, text)])


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_observations([tmp_path / "no.csv"])
    with pytest.raises(UsageError, match="cannot read"):
        read_observations([tmp_path])
    (tmp_path / "cut.gz").write_bytes(gzip.compress(GOOD.encode() * 50)[:60])
    with pytest.raises(UsageError, match="cannot read"):
        read_observations([tmp_path / "cut.gz"])


def test_a_few_bad_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    bad = "4,1073741824,-3\n4,1073741824,nan\n4,-5,2\n4,1073741824\n"
    table = read_observations([write(tmp_path, f"{HEADER}\n{GOOD}\n{bad}")])
    assert len(table) == 20
    assert sum("dropped" in n for n in table.notes) == 3
    assert any("fewer fields" in n for n in table.notes)


def test_duplicates_are_left_out_only_when_they_are_copies(tmp_path: Path) -> None:
    stamped = "date,writers,bytes_per_writer,seconds\n" + "2020-01-01 00:00:00,4,1073741824,1.5\n" * 3
    assert len(read_observations([write(tmp_path, stamped)])) == 1
    exact = f"{HEADER}\n" + "4,1073741824,1.523871\n" * 3
    assert len(read_observations([write(tmp_path, exact)])) == 1
    rounded = f"{HEADER}\n" + "4,1073741824,1.5\n" * 3
    assert len(read_observations([write(tmp_path, rounded)])) == 3


def test_where_access_and_other_jobs(tmp_path: Path) -> None:
    text = "system,access,concurrent_jobs,writers,bytes_per_writer,seconds\n"
    text += "a,file-per-process,,4,1073741824,1.5\nb,file-per-process,,4,1073741824,2.5\n"
    text += "a,single-shared-file,,4,1073741824,3.5\na,file-per-process,2.0,4,1073741824,4.5\n"
    path = write(tmp_path, text)
    table = read_observations([path], where={"system": "a"}, access="file-per-process")
    assert table.seconds.tolist() == [1.5]
    assert any("other jobs" in n for n in table.notes)
    assert len(read_observations([path], where={"system": "a*"})) == 2
    with pytest.raises(UsageError, match="no column 'nope'"):
        read_observations([path], where={"nope": "a"})
    with pytest.raises(UsageError, match="no rows to fit"):
        read_observations([path], where={"system": "c"})
    with pytest.raises(UsageError, match="--access"):
        fit(read_observations([path], where={"concurrent_jobs": ""}))


IOR = """IOR-3.3.0: MPI Coordinated Test of Parallel I/O
Options:
api                 : POSIX
access              : {access}
tasks               : 16
clients per node    : 8

Results:

access    bw(MiB/s)  IOPS       Latency(s)  block(KiB) xfer(KiB)  open(s)    wr/rd(s)   close(s)   total(s)   iter
------    ---------  ----       ----------  ---------- ---------  --------   --------   --------   --------   ----
write     4096.00    4096       0.1         1048576    1024.00    0.001      3.9        0.1        4.00       0
read      9000.00    4096       0.1         1048576    1024.00    0.001      3.9        0.1        1.00       0
write     2048.00    4096       0.1         1048576    1024.00    0.001      7.9        0.1        8.00       1
Max Write: 4096.00 MiB/sec (4294.97 MB/sec)
"""
IOR2 = """IOR-2.10.3: MPI Coordinated Test of Parallel I/O

Summary:
\tapi                = MPIIO (version=3, subversion=0)
\taccess             = file-per-process, independent
\tclients            = 128 (1 per node)

access    bw(MiB/s)  block(KiB) xfer(KiB)  open(s)    wr/rd(s)   close(s)   total(s)   iter
------    ---------  ---------- ---------  --------   --------   --------   --------   ----
write     65536      1048576    1024.00    0.003127   1.60       0.01       2.00       0
"""


def test_ior_text(tmp_path: Path) -> None:
    table = read_observations([write(tmp_path, IOR.format(access="file-per-process"), "a.out")])
    assert table.writers.tolist() == [16, 16]
    assert table.seconds.tolist() == [4.0, 8.0]
    assert table.bytes_per_writer.tolist() == [2.0**30, 2.0**30]
    assert table.accesses() == ("file-per-process",)
    old = read_observations([write(tmp_path, IOR2, "b.out")])
    assert old.writers.tolist() == [128]
    assert old.bytes_per_writer.tolist() == [2.0**30]
    assert read_observations([write(tmp_path, IOR.format(access="single-shared-file"), "c")]).accesses() == (
        "shared-file",
    )


def test_ior_json(tmp_path: Path) -> None:
    result = {"access": "write", "bwMiB": 4096.0, "totalTime": 4.0}
    tests = [{"Options": {"access": "file-per-process", "tasks": 16}, "Results": [result, {"access": "read"}]}]
    table = read_observations([write(tmp_path, json.dumps({"Version": "3", "tests": tests}), "x.json")])
    assert (table.writers[0], table.seconds[0], table.bytes_per_writer[0]) == (16, 4.0, 2.0**30)


def test_boundary_records(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    for i in range(6):
        for name, pair in (("partner_s", (2.0, 1.5)), ("pfs_s", (9.0 + i, 8.0))):
            records.append(
                path, records.BoundaryRecord(float(i), f"/c/{i}", 8, 2.0**30, "partner", "n0", **{name: pair})
            )
    gone = records.BoundaryRecord(99.0, "/c/99", 8, 2.0**30, "direct", "n0", failed=True, waited_s=60.0)
    records.append(path, gone)
    with pytest.raises(UsageError, match="--route"):
        read_observations([path])
    table = read_observations([path], route="partner")
    assert table.seconds.tolist() == [9.0, 10.0, 11.0, 12.0, 13.0, 14.0]
    assert table.typical_s.tolist() == [8.0] * 6
    assert read_observations([path], route="partner", boundary="partner").seconds.tolist() == [2.0] * 6
    lost = read_observations([path], route="direct")
    assert (lost.censored.tolist(), lost.seconds.tolist()) == ([1.0], [60.0])


def test_a_million_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    n = 2.0 ** rng.integers(0, 7, 1_000_000)
    t = (1 + 0.2 * n) * np.exp(0.1 * rng.standard_normal(n.size))
    model = fit(observations(n, 2.0**30, t))
    assert model.predict(64, 2.0**30).median_s == pytest.approx(13.8, rel=0.03)
    text = "\n".join([HEADER, *(f"{int(a)},1073741824,{b:.6f}" for a, b in zip(n[:100_000], t[:100_000], strict=True))])
    assert len(read_observations([write(tmp_path, text)])) > 99_000


@pytest.mark.parametrize("columns", [([1, 2], [3.0]), ([], [])])
def test_columns_that_do_not_fit(columns) -> None:
    with pytest.raises(UsageError):
        observations(columns[0], 2.0**30, columns[1])
