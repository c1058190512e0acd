"""The type of a command's time: ``10``, ``10s``, ``500ms``, ``2m`` or ``1h30m``, as in mount options.

Role: for the options of all commands but the model's, which have their own. No concurrency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cachexfs.core.sizes import parse_duration
from cachexfs.errors import UsageError

if TYPE_CHECKING:
    _FloatType = click.ParamType[float]
else:
    _FloatType = click.ParamType  # click 8.1 has no type argument


class Seconds(_FloatType):
    """Seconds, at least ``low_s``. What is no time, such as ``nan``, is refused."""

    name = "seconds"

    def __init__(self, low_s: float = 0.0) -> None:
        self._low_s = low_s

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """A default is a number already."""
        if isinstance(value, int | float):
            return float(value)
        try:
            seconds = parse_duration(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)
        if seconds < self._low_s:
            self.fail(f"'{value}' is shorter than {self._low_s:g} s", param, ctx)
        return seconds
