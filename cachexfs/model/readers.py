"""Readers: files of measurements into observations.

Role: recognises by content what a file is (probe result, boundary records, IOR text or JSON output, CSV; gzip
of any) and reads it. Touches only the files it is given; called by the commands. Errors name the file and
what it lacks.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cachexfs.errors import UsageError
from cachexfs.model import records
from cachexfs.model.ior import is_ior_text, read_ior_json, read_ior_text
from cachexfs.model.observe import FILE_PER_PROCESS, SHARED_FILE, Observations, observations
from cachexfs.model.rows import Row, from_csv

PROBE_FORMAT = "cachexfs-probe-1"
BYTES_MAX = 2 * 2**30


@dataclass
class _Rows:
    """Columns being collected."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_observations(
    paths: Sequence[str | os.PathLike[str]],
    *,
    where: Mapping[str, str] | None = None,
    access: str | None = None,
    route: str | None = None,
    boundary: str = "pfs",
) -> Observations:
    """All rows of ``paths``.

    ``where`` keeps CSV rows whose columns equal (or, ending in ``*``, begin with) the values; ``access`` keeps
    file-per-process or shared-file rows; ``route`` and ``boundary`` choose among boundary records. Raises
    UsageError for a file that cannot be read or is none of the formats.
    """
    if boundary not in records.BOUNDARIES:
        raise UsageError(f"boundary must be one of {', '.join(records.BOUNDARIES)}")
    found = _Rows()
    for path in paths:
        _read_file(os.fspath(path), found, dict(where or {}), route, boundary)
    rows = found.rows
    if access is not None:
        wanted = normal_access(access)
        rows = [r for r in rows if normal_access(r.access) == wanted]
    busy = [r for r in rows if r.other_bytes > 0.0]
    if busy and len(busy) < len(rows):
        found.notes.append(f"{len(busy)} rows left out: other jobs wrote at the same time")
        rows = [r for r in rows if r.other_bytes <= 0.0]
    elif busy:
        found.notes.append("other jobs wrote at the same time as every row: the model holds under that load")
    if not rows:
        raise UsageError(f"no rows to fit in {', '.join(os.fspath(p) for p in paths)} (after --where, --access)")
    return observations(
        [r.writers for r in rows],
        [r.bytes_per_writer for r in rows],
        [r.seconds for r in rows],
        typical_s=[r.typical_s for r in rows],
        censored=[r.censored for r in rows],
        time=[r.time for r in rows],
        other_bytes=[r.other_bytes for r in rows],
        system=[r.system for r in rows],
        access=[normal_access(r.access) for r in rows],
        notes=found.notes,
    )


def normal_access(text: str) -> str:
    """file-per-process, shared-file, or '' if the text says neither."""
    lowered = text.lower()
    if "shared" in lowered:
        return SHARED_FILE
    if "per-process" in lowered or "per process" in lowered or lowered == "fpp":
        return FILE_PER_PROCESS
    return ""


def _load(path: str) -> str:
    try:
        with open(path, "rb") as raw:
            head = raw.read(2)
        opener = gzip.open if head == b"\x1f\x8b" else open
        with opener(path, "rb") as stream:
            data = stream.read(BYTES_MAX + 1)
    except (OSError, EOFError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > BYTES_MAX:
        raise UsageError(f"{path} is larger than 2 GiB; give fewer rows")
    if b"\x00" in data[:4096]:
        raise UsageError(f"{path} is binary: give CSV, IOR output, a probe result or boundary records")
    return data.decode("utf-8-sig", errors="replace")


def _read_file(path: str, found: _Rows, where: dict[str, str], route: str | None, boundary: str) -> None:
    text = _load(path)
    stripped = text.lstrip()
    if not stripped:
        raise UsageError(f"{path} is empty")
    if stripped[0] in "{[":
        _read_json(path, text, found, route, boundary)
    elif is_ior_text(stripped):
        rows = read_ior_text(path, text)
        found.rows.extend(rows)
    else:
        rows, notes = from_csv(path, text, where)
        found.rows.extend(rows)
        found.notes.extend(notes)


def _read_json(path: str, text: str, found: _Rows, route: str | None, boundary: str) -> None:
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and whole.get("format") == PROBE_FORMAT:
        found.rows.extend(_probe_rows(path, whole))
        found.notes.extend(str(n) for n in whole.get("notes", []))
    elif isinstance(whole, dict) and "tests" in whole:
        found.rows.extend(read_ior_json(path, whole))
    else:
        _read_records(path, text, found, route, boundary)


def _probe_rows(path: str, whole: dict[str, object]) -> Iterable[Row]:
    rows = whole.get("rows")
    if not isinstance(rows, list):
        raise UsageError(f"{path} is a probe result without rows")
    access = str(whole.get("access", FILE_PER_PROCESS))
    system = str(whole.get("system", ""))
    try:
        for row in rows:
            yield Row(
                writers=float(row["writers"]),
                bytes_per_writer=float(row["bytes_per_writer"]),
                seconds=float(row["seconds"]),
                typical_s=float(row["typical_s"]),
                censored=bool(row.get("censored", False)),
                time=float(row["time"]),
                system=system,
                access=access,
            )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is a damaged probe result: {error!r}") from error


def _read_records(path: str, text: str, found: _Rows, route: str | None, boundary: str) -> None:
    parsed: list[records.BoundaryRecord] = []
    skipped = 0
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            parsed.append(records.decode(line))
        except UsageError:
            skipped += 1
    if not parsed:
        raise UsageError(f"{path} is JSON, but no probe result, IOR output or boundary records")
    if skipped:
        found.notes.append(f"{skipped} lines of {path} were not readable and left out")
    merged = records.merge(parsed)
    routes = {r.route for r in merged}
    if route is None and len(routes) > 1:
        raise UsageError(f"{path} holds both routes; choose one with --route partner or --route direct")
    for record in merged:
        if route is not None and record.route != route:
            continue
        pair = record.seconds(boundary)
        if pair is None and not record.failed:
            continue
        slowest, typical = pair if pair is not None else (float(record.waited_s or 0.0), float("nan"))
        found.rows.append(
            Row(
                writers=float(record.writers),
                bytes_per_writer=record.bytes_per_writer,
                seconds=slowest,
                typical_s=typical,
                censored=pair is None,
                time=record.time,
                access=FILE_PER_PROCESS,
            )
        )
