"""Observations: rows of measured writes, checked once.

Role: the one table that fits read. Built by ``readers`` or by a caller; pure. Rows that cannot be right are
dropped and counted in ``notes``; a table that cannot be right raises UsageError with what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cachexfs.errors import UsageError
from cachexfs.model.arrays import Floats
from cachexfs.model.location import Levels

FILE_PER_PROCESS = "file-per-process"
SHARED_FILE = "shared-file"
RATE_MAX = 400.0 * 2**30
"""Bytes per second and writer above which units are wrong: no client writes durably that fast."""
RATE_MIN = 4096.0
WRITERS_MAX, BYTES_MAX = 1e9, 1e18
SECONDS_MIN, SECONDS_MAX = 1e-6, 1e8
BAD_SHARE_MAX = 0.5
BYTES_GAP_RATIO = 1.9


@dataclass(frozen=True)
class Observations:
    """One row per checkpoint (or benchmark repetition); arrays of shape (n,).

    ``writers``; ``bytes_per_writer`` [B]; ``seconds`` slowest writer, start to durable [s]; ``typical_s``
    median or mean writer [s], NaN if unknown; ``censored`` True where ``seconds`` is only a lower bound (timed
    out, failed); ``time`` [s since 1970], NaN if unknown; ``other_bytes`` written by others meanwhile [B].
    ``system``, ``access``: labels, '' if unknown. ``notes``: what was dropped and why.
    """

    writers: Floats
    bytes_per_writer: Floats
    seconds: Floats
    typical_s: Floats
    censored: Floats
    time: Floats
    other_bytes: Floats
    system: tuple[str, ...]
    access: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return int(self.writers.size)

    def take(self, mask: Floats, note: str = "") -> Observations:
        """The rows where ``mask`` is true, with ``note`` added."""
        index = np.flatnonzero(mask)
        return Observations(
            self.writers[index],
            self.bytes_per_writer[index],
            self.seconds[index],
            self.typical_s[index],
            self.censored[index],
            self.time[index],
            self.other_bytes[index],
            system=tuple(self.system[i] for i in index),
            access=tuple(self.access[i] for i in index),
            notes=(*self.notes, note) if note else self.notes,
        )

    def systems(self) -> tuple[str, ...]:
        """Distinct non-empty system labels, sorted."""
        return tuple(sorted({s for s in self.system if s}))

    def accesses(self) -> tuple[str, ...]:
        """Distinct non-empty access labels, sorted."""
        return tuple(sorted({a for a in self.access if a}))


def observations(
    writers: Sequence[float] | Floats,
    bytes_per_writer: Sequence[float] | Floats | float,
    seconds: Sequence[float] | Floats,
    *,
    typical_s: Sequence[float] | Floats | None = None,
    censored: Sequence[bool] | Floats | None = None,
    time: Sequence[float] | Floats | None = None,
    other_bytes: Sequence[float] | Floats | None = None,
    system: Sequence[str] | str = "",
    access: Sequence[str] | str = "",
    notes: Sequence[str] = (),
) -> Observations:
    """Checked observations from columns (units as in ``Observations``).

    Rows with NaN, infinite, zero or negative values are dropped and counted. Raises UsageError when no row is
    left, when more than half are bad, or when the implied rate says that a unit is wrong.
    """
    n = np.asarray(writers, dtype=np.float64).reshape(-1)
    rows = n.size
    t = np.asarray(seconds, dtype=np.float64).reshape(-1)
    b = np.broadcast_to(np.asarray(bytes_per_writer, dtype=np.float64), t.shape).copy()
    if n.shape != t.shape:
        raise UsageError(f"{n.size} writers but {t.size} times: columns must have one entry per row")
    if rows == 0:
        raise UsageError("no rows: nothing was measured; run 'cachexfs probe DIR' or give a file with rows")
    table = Observations(
        n,
        b,
        t,
        _column(typical_s, rows, np.nan),
        _column(censored, rows, 0.0),
        _column(time, rows, np.nan),
        _column(other_bytes, rows, 0.0),
        (system,) * rows if isinstance(system, str) else tuple(system),
        (access,) * rows if isinstance(access, str) else tuple(access),
        tuple(notes),
    )
    return _check_units(_drop_bad(table))


def _column(values: Sequence[float] | Sequence[bool] | Floats | None, rows: int, default: float) -> Floats:
    if values is None:
        return np.full(rows, default)
    column = np.asarray(values, dtype=np.float64).reshape(-1)
    if column.size != rows:
        raise UsageError(f"a column has {column.size} entries, the table {rows} rows")
    return column


def _drop_bad(table: Observations) -> Observations:
    n, b, t = table.writers, table.bytes_per_writer, table.seconds
    reasons = (
        ("not a number", ~(np.isfinite(n) & np.isfinite(b) & np.isfinite(t))),
        ("a time that is zero or negative", np.isfinite(t) & (t <= 0.0)),
        ("bytes per writer that are zero or negative", np.isfinite(b) & (b <= 0.0)),
        ("writers below 1 or not whole", np.isfinite(n) & ((n < 1.0) | (n != np.floor(n)))),
        (
            "a value that no checkpoint has",
            (n > WRITERS_MAX) | (b > BYTES_MAX) | (b < 1.0) | (t > SECONDS_MAX) | (t < SECONDS_MIN),
        ),
    )
    bad: Floats = np.zeros(len(table), dtype=bool)
    notes: list[str] = []
    for why, mask in reasons:
        count = int(np.sum(mask & ~bad))
        if count:
            notes.append(f"{count} of {len(table)} rows dropped: {why}")
        bad = bad | mask
    share = float(np.mean(bad))
    if share > BAD_SHARE_MAX:
        raise UsageError(f"most rows are unusable ({'; '.join(notes)}); check the columns and their units")
    good = table.take(~bad)
    typical = good.typical_s.copy()
    wrong = np.isfinite(typical) & ((typical <= 0.0) | (typical > good.seconds * 1.0001))
    if np.any(wrong):
        typical[wrong] = np.nan
        notes.append(f"{int(np.sum(wrong))} typical times ignored: not between 0 and the slowest")
    return replace(good, typical_s=typical, notes=(*table.notes, *notes))


def _check_units(table: Observations) -> Observations:
    rate = float(np.median(table.bytes_per_writer / table.seconds))
    if rate > RATE_MAX:
        raise UsageError(
            f"the rows imply {rate / 2**30:.4g} GiB/s per writer: a unit is wrong; "
            "bytes_per_writer is bytes and seconds is seconds"
        )
    if rate < RATE_MIN:
        raise UsageError(
            f"the rows imply {rate:.3g} bytes/s per writer: a unit is wrong; "
            "bytes_per_writer is bytes (not MiB or GiB) and seconds is seconds (not ms)"
        )
    return table


def level_groups(table: Observations) -> list[Floats]:
    """Row indices of each level: same writers, and bytes per writer without a gap above a factor of 1.9."""
    order = np.lexsort((table.bytes_per_writer, table.writers))
    n = table.writers[order]
    log_b = np.log(table.bytes_per_writer[order])
    new = (np.diff(n) != 0) | (np.diff(log_b) > np.log(BYTES_GAP_RATIO))
    return [np.sort(part) for part in np.split(order, np.flatnonzero(new) + 1)]


def level_medians(table: Observations, seconds: Floats, minimum_repeats: int = 1) -> Levels:
    """Median time of each level, sorted by writers; ``seconds`` picks the column (slowest or typical) [s].

    A censored row counts as later than any other; a level whose median is censored is left out. Times are
    compared as s/B, so that rows of one level may differ in bytes.
    """
    rows: list[tuple[float, float, float, float]] = []
    for group in level_groups(table):
        used = group[np.isfinite(seconds[group])]
        if used.size < max(1, minimum_repeats):
            continue
        b = float(np.median(table.bytes_per_writer[used]))
        per_byte = seconds[used] / table.bytes_per_writer[used]
        per_byte = np.where(table.censored[used] > 0, np.inf, per_byte)
        middle = float(np.sort(per_byte)[(used.size - 1) // 2] + np.sort(per_byte)[used.size // 2]) / 2.0
        if np.isfinite(middle):
            rows.append((float(table.writers[used[0]]), b, middle * b, float(used.size)))
    columns = np.array(rows, dtype=np.float64).reshape(-1, 4)
    return Levels(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3])
