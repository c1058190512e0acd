"""Boundary times on disk: one JSON line per checkpoint and report, append-only, bounded.

Role: what the mount writes and ``cachexfs fit`` reads. Standard library only: the daemon imports this module
and must not pay for numpy. Synchronous; one ``append`` is one ``write(2)`` on an O_APPEND descriptor under an
advisory lock, so several processes of a node may append. Do not call it from the trio thread: it may wait
for the disk.

A checkpoint may be reported several times, as its boundaries are reached; ``merge`` folds those lines.
The file is rotated to ``PATH.1`` at half its limit: both together stay below ``limit_bytes``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

from cachexfs.errors import UsageError

FORMAT = 1
LINE_BYTES_MAX = 2048
LIMIT_BYTES_DEFAULT = 16 * 2**20
LIMIT_BYTES_MIN = 4 * LINE_BYTES_MAX
BOUNDARIES = ("returned", "partner", "pfs", "restartable")
ROUTES = ("partner", "direct")


@dataclass(frozen=True, slots=True)
class BoundaryRecord:
    """Times of one checkpoint, all measured from its capture.

    ``time`` capture [s since 1970, UTC]; ``checkpoint`` its path; ``writers`` ranks that wrote a shard;
    ``bytes_per_writer`` [B]; ``route`` ``partner`` or ``direct``; ``node`` where it was measured.
    ``*_s``: (slowest writer, median writer) seconds to the boundary, None while not reached.
    ``waited_s``: set when ``failed``, the time after which it was given up: a lower bound, not a time.
    ``load``: others' share of the PFS bandwidth in [0, 1), None if unknown.
    """

    time: float
    checkpoint: str
    writers: int
    bytes_per_writer: float
    route: str
    node: str
    returned_s: tuple[float, float] | None = None
    partner_s: tuple[float, float] | None = None
    pfs_s: tuple[float, float] | None = None
    restartable_s: tuple[float, float] | None = None
    failed: bool = False
    waited_s: float | None = None
    load: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.time) and self.writers >= 1 and _positive(self.bytes_per_writer)):
            raise UsageError("a boundary record needs a time, writers >= 1 and bytes_per_writer > 0")
        if self.route not in ROUTES:
            raise UsageError(f"route must be one of {', '.join(ROUTES)}")
        for name in BOUNDARIES:
            pair = self.seconds(name)
            if pair is not None and not (0.0 <= pair[1] <= pair[0] < math.inf):
                raise UsageError(f"{name}_s must be (slowest, typical) with 0 <= typical <= slowest")
        if self.load is not None and not 0.0 <= self.load < 1.0:
            raise UsageError("load must lie in [0, 1)")
        if self.failed and (self.waited_s is None or not _positive(self.waited_s)):
            raise UsageError("a failed checkpoint needs waited_s > 0")

    def seconds(self, boundary: str) -> tuple[float, float] | None:
        """(slowest, typical) seconds to ``boundary``, None while not reached."""
        pair: tuple[float, float] | None = getattr(self, f"{boundary}_s")
        return pair


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0.0


def encode(record: BoundaryRecord) -> bytes:
    """One line with its newline, at most ``LINE_BYTES_MAX`` bytes; a long path keeps its end."""
    fields = {k: v for k, v in dataclasses.asdict(record).items() if v is not None and v is not False}
    fields["v"] = FORMAT
    line = _line(fields)
    if len(line) > LINE_BYTES_MAX:
        fields["checkpoint"] = "..." + record.checkpoint[-100:]
        fields["node"] = record.node[:32]
        line = _line(fields)
    if len(line) > LINE_BYTES_MAX:  # 135 characters of at most 12 bytes each and the numbers always fit
        raise UsageError("a boundary record is longer than its limit")
    return line


def _line(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes | str) -> BoundaryRecord:
    """The record of a line. Raises UsageError when it is torn, of another format or out of range."""
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise UsageError("not a boundary record: not JSON") from error
    if not isinstance(fields, dict) or fields.pop("v", None) != FORMAT:
        raise UsageError("not a boundary record of a known format")
    known = {f.name for f in dataclasses.fields(BoundaryRecord)}
    kept = {k: v for k, v in fields.items() if k in known}  # later versions may add fields
    try:
        for name in BOUNDARIES:
            pair = kept.get(f"{name}_s")
            if pair is not None:
                slowest, typical = pair
                kept[f"{name}_s"] = (float(slowest), float(typical))
        kept["time"] = float(kept["time"])
        kept["bytes_per_writer"] = float(kept["bytes_per_writer"])
        kept["writers"] = int(kept["writers"])
        return BoundaryRecord(**kept)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise UsageError(f"not a boundary record: {error}") from error


def append(path: str | os.PathLike[str], record: BoundaryRecord, limit_bytes: int = LIMIT_BYTES_DEFAULT) -> None:
    """Append one line; rotate first when the file would exceed half of ``limit_bytes``.

    Not synced: a lost line is lost information about speed, not about data. Raises OSError.
    """
    if limit_bytes < LIMIT_BYTES_MIN:
        raise UsageError(f"limit_bytes must be at least {LIMIT_BYTES_MIN}")
    line = encode(record)
    name = os.fspath(path)
    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            if not _still_there(descriptor, name):
                continue  # another process rotated while we waited for the lock
            if size > 0 and size + len(line) + 1 > limit_bytes // 2:
                os.replace(name, name + ".1")
                continue
            # after a torn line (power loss) start a new one: only the torn line is lost
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, (b"\n" if torn else b"") + line)
            return
        finally:
            os.close(descriptor)


def _still_there(descriptor: int, name: str) -> bool:
    try:
        there = os.stat(name)
    except FileNotFoundError:
        return False
    ours = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def scan(path: str | os.PathLike[str]) -> tuple[list[BoundaryRecord], int]:
    """All records, oldest first (``PATH.1`` then ``PATH``), and how many lines were not readable."""
    records: list[BoundaryRecord] = []
    skipped = 0
    name = os.fspath(path)
    for part in (name + ".1", name):
        with contextlib.suppress(FileNotFoundError), open(part, "rb") as stream:
            while line := stream.readline(LINE_BYTES_MAX + 1):
                if not line.strip():
                    continue
                try:
                    records.append(decode(line))
                except UsageError:
                    skipped += 1
    return records, skipped


def read(path: str | os.PathLike[str]) -> list[BoundaryRecord]:
    """All readable records, oldest first. FileNotFoundError if there is no file."""
    name = os.fspath(path)
    if not os.path.exists(name) and not os.path.exists(name + ".1"):
        raise FileNotFoundError(name)
    return scan(name)[0]


def merge(records: Iterable[BoundaryRecord]) -> list[BoundaryRecord]:
    """One record per (checkpoint, time, node): later lines fill in or replace what earlier ones said."""
    merged: dict[tuple[str, float, str], BoundaryRecord] = {}
    for record in records:
        key = (record.checkpoint, record.time, record.node)
        before = merged.get(key)
        if before is None:
            merged[key] = record
            continue
        filled = {
            f"{name}_s": before.seconds(name)
            for name in BOUNDARIES
            if record.seconds(name) is None and before.seconds(name) is not None
        }
        merged[key] = dataclasses.replace(record, **filled)  # type: ignore[arg-type]
    return list(merged.values())
