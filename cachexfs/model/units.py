"""Units on the command line: sizes, durations, and how they are printed.

Role: click parameter types and formatting for the model's commands. Pure.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    _FloatType = click.ParamType[float]
else:
    _FloatType = click.ParamType  # click 8.1 has no type argument

_SIZES = {"": 1.0, "k": 2.0**10, "m": 2.0**20, "g": 2.0**30, "t": 2.0**40, "p": 2.0**50}
_DECIMAL = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "pb": 1e15}
_TIMES = {"ms": 1e-3, "": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400.0}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*(?:/s)?)\s*")


class Size(_FloatType):
    """Bytes: ``4096``, ``64M`` and ``64MiB`` (2^20), ``64MB`` (10^6). Zero only with ``zero=True``."""

    name = "size"

    def __init__(self, zero: bool = False) -> None:
        self.zero = zero

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = _NUMBER.fullmatch(str(value))
        unit = found.group(2).lower() if found else ""
        if unit.endswith("/s"):
            unit = unit[:-2]
        scale = _DECIMAL.get(unit, _SIZES.get(unit.removesuffix("ib") if unit != "b" else "", math.nan))
        number = float(found.group(1)) * scale if found else math.nan
        if not math.isfinite(number) or number < 0.0 or (number == 0.0 and not self.zero):
            self.fail(f"{value!r} is not a size; write bytes, or 64M, 1.5GiB, 2GB", param, ctx)
        return number


class Duration(_FloatType):
    """Seconds: ``90``, ``90s``, ``1.5h``, ``10min``, ``5d``, ``5y``, ``20ms``. Zero only with ``zero=True``."""

    name = "duration"

    def __init__(self, zero: bool = False) -> None:
        self.zero = zero

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = _NUMBER.fullmatch(str(value))
        number = float(found.group(1)) * _TIMES.get(found.group(2).lower(), math.nan) if found else math.nan
        if not math.isfinite(number) or number < 0.0 or (number == 0.0 and not self.zero):
            self.fail(f"{value!r} is not a duration; write seconds, or 90s, 10min, 1.5h, 5d", param, ctx)
        return number


def size_text(value: float) -> str:
    """Bytes for people, binary units."""
    for unit, scale in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def count_text(value: float) -> str:
    """A number with three digits, never with an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def time_text(seconds: float) -> str:
    """Seconds for people."""
    if not math.isfinite(seconds):
        return "never"
    for unit, scale in (("years", 365.25 * 86400.0), ("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * scale:
            return f"{count_text(seconds / scale)} {unit}"
    return f"{seconds * 1000:.3g} ms" if 0 < seconds < 0.1 else f"{seconds:.3g} s"
