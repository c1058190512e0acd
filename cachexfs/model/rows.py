"""Rows of a CSV file of measured writes.

Role: finds the columns by name and unit, keeps write rows, removes duplicates. Pure text work without numpy;
called by ``readers``.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cachexfs.errors import UsageError

ROWS_MAX = 5_000_000
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured write; units as in ``Observations``."""

    writers: float
    bytes_per_writer: float
    seconds: float
    typical_s: float = NAN
    censored: bool = False
    time: float = NAN
    other_bytes: float = 0.0
    system: str = ""
    access: str = ""


WRITERS = {"writers": 1.0, "nwriters": 1.0, "ranks": 1.0, "nprocs": 1.0, "tasks": 1.0, "clients": 1.0, "processes": 1.0}
BYTES = {
    "bytes_per_writer": 1.0,
    "bytes_per_rank": 1.0,
    "bytes_per_process": 1.0,
    "kib_per_writer": 2.0**10,
    "mib_per_writer": 2.0**20,
    "gib_per_writer": 2.0**30,
    "mb_per_writer": 1e6,
    "gb_per_writer": 1e9,
}
TOTAL_BYTES = {"bytes_total": 1.0, "total_bytes": 1.0, "mib_total": 2.0**20, "gib_total": 2.0**30}
SECONDS = {
    "seconds": 1.0,
    "slowest_s": 1.0,
    "time_s": 1.0,
    "duration_s": 1.0,
    "elapsed_s": 1.0,
    "total_s": 1.0,
    "milliseconds": 1e-3,
    "time_ms": 1e-3,
    "duration_ms": 1e-3,
    "elapsed_ms": 1e-3,
}
TYPICAL = {"typical_s": 1.0, "median_writer_s": 1.0, "mean_writer_s": 1.0, "w_time_ave": 1.0, "typical_ms": 1e-3}
CENSORED = ("censored", "failed", "timed_out")
IDENTITY = ("date", "time", "timestamp", "run", "rep", "iter", "iteration", "id", "checkpoint", "sw_time")


def from_csv(path: str, text: str, where: dict[str, str]) -> tuple[list[Row], list[str]]:
    """Rows of a CSV text (comma, semicolon or tab) with a header line, and notes on what was left out."""
    head = text[: text.find("\n")] if "\n" in text else text
    delimiter = max(",;\t", key=head.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        header = [c.strip().lower() for c in next(reader)]
        table = _Table(path, header)
        missing = [c for c in where if c.lower() not in table.index]
        if missing:
            raise UsageError(f"{path} has no column {missing[0]!r} (--where); it has: {', '.join(header)}")
        return table.rows(reader, {k.lower(): v for k, v in where.items()})
    except csv.Error as error:
        raise UsageError(f"{path} is not readable CSV: {error}") from error


class _Table:
    """Where each quantity stands in a row."""

    def __init__(self, path: str, header: Sequence[str]) -> None:
        self.path = path
        self.index = {name: i for i, name in reversed(list(enumerate(header)))}
        self.width = len(header)
        self.writers = self._find(WRITERS, "writers")
        self.seconds = self._find(SECONDS, "seconds")
        per_writer = self._pick(BYTES)
        total = self._pick(TOTAL_BYTES)
        if per_writer is None and total is None:
            raise UsageError(f"{path} needs a column bytes_per_writer (or mib_per_writer, bytes_total); {self._have()}")
        self.bytes, self.bytes_are_total = (per_writer, False) if per_writer is not None else (total, True)
        self.typical = self._pick(TYPICAL)

    def _pick(self, names: dict[str, float]) -> tuple[int, float] | None:
        return next(((self.index[n], u) for n, u in names.items() if n in self.index), None)

    def _find(self, names: dict[str, float], what: str) -> tuple[int, float]:
        found = self._pick(names)
        if found is None:
            raise UsageError(f"{self.path} needs a column {what} (one of {', '.join(names)}); {self._have()}")
        return found

    def _have(self) -> str:
        return f"it has: {', '.join(list(self.index)[:20])[:300]}"

    def rows(self, reader: csv.reader, where: dict[str, str]) -> tuple[list[Row], list[str]]:  # type: ignore[valid-type]
        """Rows that pass ``where``, without duplicates, and notes."""
        keep = self._filter(where)
        has_identity = any(n in self.index for n in IDENTITY)
        seconds_at = self.seconds[0]
        seen: set[tuple[str, ...]] = set()
        rows: list[Row] = []
        short = duplicates = 0
        for fields in reader:  # type: ignore[attr-defined]
            if not fields or (len(fields) == 1 and not fields[0].strip()):
                continue
            if len(fields) < self.width:
                short += 1
                continue
            if not keep(fields):
                continue
            # equal rows are copies if something in them should differ, or if equal times would be a miracle
            if has_identity or len(fields[seconds_at].strip().replace(".", "").lstrip("0")) >= 6:
                key = tuple(fields)
                if key in seen:
                    duplicates += 1
                    continue
                seen.add(key)
            rows.append(self._row(fields))
            if len(rows) > ROWS_MAX:
                raise UsageError(f"{self.path} has more than {ROWS_MAX} rows; give fewer")
        notes = []
        if short:
            notes.append(f"{short} lines of {self.path} left out: fewer fields than the header")
        if duplicates:
            notes.append(f"{duplicates} duplicate rows of {self.path} left out")
        return rows, notes

    def _filter(self, where: dict[str, str]) -> Callable[[Sequence[str]], bool]:
        tests = [(self.index[c], v) for c, v in where.items()]
        phase = self.index.get("phase")

        def keep(fields: Sequence[str]) -> bool:
            if phase is not None and fields[phase].strip().lower() not in ("write", ""):
                return False
            return all(fields[i].startswith(v[:-1]) if v.endswith("*") else fields[i].strip() == v for i, v in tests)

        return keep

    def _text(self, fields: Sequence[str], name: str) -> str:
        at = self.index.get(name)
        return fields[at].strip() if at is not None else ""

    def _row(self, fields: Sequence[str]) -> Row:
        writers = number(fields[self.writers[0]])
        assert self.bytes is not None
        size = number(fields[self.bytes[0]]) * self.bytes[1]
        if self.bytes_are_total:
            size = size / writers if writers else NAN
        jobs = number(self._text(fields, "concurrent_jobs") or "1")
        label = "/".join(t for t in (self._text(fields, "system"), self._text(fields, "fs")) if t)
        return Row(
            writers=writers,
            bytes_per_writer=size,
            seconds=number(fields[self.seconds[0]]) * self.seconds[1],
            typical_s=number(fields[self.typical[0]]) * self.typical[1] if self.typical else NAN,
            censored=any(self._text(fields, n).lower() in ("1", "true", "yes") for n in CENSORED),
            time=moment(self._text(fields, "date") or self._text(fields, "time") or self._text(fields, "timestamp")),
            other_bytes=(jobs - 1.0) * writers * size if jobs > 1.0 else 0.0,
            system=label,
            access=self._text(fields, "access"),
        )


def number(text: str) -> float:
    """The number, NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return NAN


def moment(text: str) -> float:
    """Seconds since 1970 of a number, an ISO date or a C date; NaN if it is none."""
    if not text:
        return NAN
    value = number(text)
    if not math.isnan(value):
        return value
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        try:
            when = datetime.strptime(text, "%a %b %d %H:%M:%S %Y")
        except ValueError:
            return NAN
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
