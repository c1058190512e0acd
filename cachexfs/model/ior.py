"""IOR output, text or JSON, into rows.

Role: understands the tables of IOR 2 to 4 (`ior` and `ior -O summaryFormat=JSON`); called by ``readers``.
Bytes come from bandwidth times time, which is right under stonewalling too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cachexfs.errors import UsageError
from cachexfs.model.rows import NAN, Row, number

_OPTION = re.compile(r"^\s*([A-Za-z][A-Za-z \-]*?)\s*[=:]\s*(.+?)\s*$")


def is_ior_text(text: str) -> bool:
    """True if the beginning looks like IOR's own output."""
    head = text[:20000]
    return bool(re.search(r"^IOR-\d|MPI Coordinated Test of Parallel I/O", head, re.M))


def read_ior_text(path: str, text: str) -> list[Row]:
    """Write rows of one or several IOR runs in ``text``. UsageError if there are none."""
    rows: list[Row] = []
    access, tasks = "", NAN
    columns: list[str] = []
    for line in text.splitlines():
        option = _OPTION.match(line)
        if option:
            name, value = option.group(1).strip().lower(), option.group(2)
            if name == "access":
                access = value
            elif name in ("tasks", "clients"):
                tasks = number(value.split()[0])
            continue
        words = line.split()
        if words[:2] == ["access", "bw(MiB/s)"]:
            columns = words
        elif columns and words and words[0] == "write" and len(words) >= len(columns) - 1:
            named = dict(zip(columns, words, strict=False))
            rows.append(_row(number(named["bw(MiB/s)"]), number(named.get("total(s)", "nan")), tasks, access))
    if not rows:
        raise UsageError(f"{path} is IOR output without write results; run IOR with -w and without -v=0")
    return rows


def read_ior_json(path: str, whole: dict[str, object]) -> list[Row]:
    """Write rows of IOR's JSON summary. UsageError if there are none."""
    rows = list(_json_rows(whole))
    if not rows:
        raise UsageError(f"{path} is IOR's JSON without write results")
    return rows


def _json_rows(whole: dict[str, object]) -> Iterator[Row]:
    tests = whole.get("tests")
    for test in tests if isinstance(tests, list) else []:
        options = test.get("Options", {}) if isinstance(test, dict) else {}
        results = test.get("Results", []) if isinstance(test, dict) else []
        for result in results if isinstance(results, list) else []:
            if isinstance(result, dict) and result.get("access") == "write":
                yield _row(
                    number(str(result.get("bwMiB"))),
                    number(str(result.get("totalTime"))),
                    number(str(options.get("tasks"))),
                    str(options.get("access", "")),
                )


def _row(bandwidth_mib_s: float, seconds: float, tasks: float, access: str) -> Row:
    return Row(
        writers=tasks,
        bytes_per_writer=bandwidth_mib_s * 2**20 * seconds / tasks if tasks else NAN,
        seconds=seconds,
        access=access,
    )
