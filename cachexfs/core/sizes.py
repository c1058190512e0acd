"""Sizes, rates and durations as people write them.

Role: pure. The configuration reads them, the commands print them. Called by ``cachexfs.config`` and ``cachexfs.cli``.
"""

from __future__ import annotations

import re

from cachexfs.errors import UsageError

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?b)?", re.IGNORECASE | re.ASCII)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%", re.ASCII)
_DURATION_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h|d)", re.IGNORECASE | re.ASCII)
_PLAIN_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)

SIZE_BYTES_MAX = 1 << 60
DURATION_S_MAX = 366 * 86400.0


def parse_size(text: str, whole_bytes: int | None = None) -> int:
    """Bytes of ``64G``, ``64GiB`` (both 2**30), ``64GB`` (10**9), ``1024`` or, with ``whole_bytes``, ``25%`` of it.

    Raises ``UsageError``.
    """
    stripped = text.strip()
    percent = _PERCENT.fullmatch(stripped)
    if percent:
        if whole_bytes is None:
            raise UsageError(f"'{text}' is a share of nothing: give a size such as 64G")
        share = float(percent.group(1))
        if not 0 < share <= 100:
            raise UsageError(f"'{text}' is not between 0% and 100%")
        return int(whole_bytes * share / 100)
    match = _SIZE.fullmatch(stripped)
    if not match:
        kinds = "64G, 512M or 25%" if whole_bytes is not None else "64G or 512M"
        raise UsageError(f"'{text}' is not a size: write it as {kinds}")
    number, letter, unit = match.groups()
    base = 1000 if letter and unit and unit.lower() == "b" else 1024
    size = (
        int(float(number) * base ** _POWERS[letter.lower()])
        if "." in number
        else int(number) * base ** _POWERS[letter.lower()]
    )
    if size > SIZE_BYTES_MAX:
        raise UsageError(f"'{text}' is more than {format_size(SIZE_BYTES_MAX)}")
    return size


def parse_rate(text: str) -> int | None:
    """Bytes per second of ``500M`` or ``500M/s``; ``none`` is None (no limit). Raises ``UsageError``."""
    stripped = text.strip()
    if stripped.lower() in ("none", ""):
        return None
    rate = parse_size(stripped.removesuffix("/s"))
    if rate < 1:
        raise UsageError(f"'{text}' would never end: give a rate such as 500M, or none")
    return rate


def parse_duration(text: str) -> float:
    """Seconds of ``45``, ``45s``, ``500ms``, ``2m`` or ``1h30m``. Raises ``UsageError``."""
    stripped = text.strip()
    if _PLAIN_NUMBER.fullmatch(stripped):
        seconds = float(stripped)
    else:
        parts = _DURATION_PART.findall(stripped)
        if not parts or _DURATION_PART.sub("", stripped).strip():
            raise UsageError(f"'{text}' is not a duration: write it as 45, 45s, 500ms or 2m")
        seconds = sum(float(number) * _DURATION_UNITS_S[unit.lower()] for number, unit in parts)
    if seconds > DURATION_S_MAX:
        raise UsageError(f"'{text}' is longer than a year")
    return seconds


def format_size(size_bytes: float) -> str:
    """``1.5 GiB`` and the like, three digits."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes:.0f} B"
    value = float(size_bytes)
    units = ["KiB", "MiB", "GiB", "TiB", "PiB"]
    unit = ""
    while units and abs(value) >= 1024:
        value /= 1024
        unit = units.pop(0)
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.1f} {unit}"


def format_rate(bytes_s: float) -> str:
    """``1.5 GiB/s`` and the like."""
    return format_size(bytes_s) + "/s"


def format_duration(seconds: float) -> str:
    """``850 ms``, ``12.3 s``, ``4 m 05 s``, ``3 h 12 m`` or ``2 d 03 h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
