"""Charts as inline SVG.

Role: the few marks that ``report`` needs, with axes that a person can read. Pure text; colours are CSS classes
of the page. A chart is filled by its methods in order and ends as a string.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 14, 48
Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """``low`` to ``high`` in data units, ``log`` scale or not, ``label`` with unit, optional tick ``labels``."""

    low: float
    high: float
    label: str
    log: bool = False
    labels: tuple[tuple[float, str], ...] = ()

    def at(self, value: float) -> float:
        """Position in 0..1, clipped."""
        if self.log:
            low, high, x = math.log(self.low), math.log(self.high), math.log(max(value, 1e-300))
        else:
            low, high, x = self.low, self.high, value
        return min(max((x - low) / (high - low), -0.02), 1.02)

    def ticks(self) -> list[tuple[float, str]]:
        """(value, text) of the ticks."""
        if self.labels:
            return list(self.labels)
        if self.log:
            return [(v, _text(v)) for v in _log_ticks(self.low, self.high)]
        return [(v, _text(v)) for v in _linear_ticks(self.low, self.high)]


def _log_ticks(low: float, high: float) -> list[float]:
    if high < 6 * low:
        return _linear_ticks(low, high)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1.0,) if last - first > 3 else (1.0, 2.0, 5.0)
    return [s * 10.0**e for e in range(first, last + 1) for s in steps if low * 0.999 <= s * 10.0**e <= high * 1.001]


def _linear_ticks(low: float, high: float) -> list[float]:
    span = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(span))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= span)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, int(high / step + 1e-9) + 1)]


def _text(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:,.6g}" if abs(value) >= 1000 else f"{value:.6g}"


def padded(values: Sequence[float], share: float = 0.12) -> tuple[float, float]:
    """Limits of a log axis with room around positive ``values``."""
    good = [v for v in values if v > 0 and math.isfinite(v)]
    low, high = min(good), max(good)
    room = (high / low) ** share if high > low * 1.05 else 1.5
    return low / room, high * room


@dataclass
class Chart:
    """One chart; ``title`` is read by screen readers."""

    x: Axis
    y: Axis
    title: str
    height: int = HEIGHT
    left: int = LEFT
    parts: list[str] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)

    def _x(self, value: float) -> float:
        return self.left + self.x.at(value) * (WIDTH - self.left - RIGHT)

    def _y(self, value: float) -> float:
        return self.height - BOTTOM - self.y.at(value) * (self.height - TOP - BOTTOM)

    def line(self, points: Sequence[Point], css: str, name: str = "") -> None:
        """A polyline."""
        path = " ".join(f"{self._x(a):.1f},{self._y(b):.1f}" for a, b in points)
        self.parts.append(f'<polyline class="{css}" points="{path}"/>')
        self._name(css, name)

    def band(self, upper: Sequence[Point], lower: Sequence[Point], css: str, name: str = "") -> None:
        """The area between two lines."""
        path = " ".join(f"{self._x(a):.1f},{self._y(b):.1f}" for a, b in [*upper, *reversed(lower)])
        self.parts.append(f'<polygon class="{css}" points="{path}"/>')
        self._name(css, name)

    def points(self, points: Sequence[Point], css: str, name: str = "", radius: float = 2.6) -> None:
        """Dots."""
        dots = "".join(f'<circle cx="{self._x(a):.1f}" cy="{self._y(b):.1f}" r="{radius}"/>' for a, b in points)
        self.parts.append(f'<g class="{css}">{dots}</g>')
        self._name(css, name)

    def box(self, x0: float, x1: float, y0: float, y1: float, css: str, name: str = "") -> None:
        """A filled rectangle in data units."""
        a, b = sorted((self._x(x0), self._x(x1)))
        c, d = sorted((self._y(y0), self._y(y1)))
        self.parts.append(
            f'<rect class="{css}" x="{a:.1f}" y="{c:.1f}" '
            f'width="{max(b - a, 0.5):.1f}" height="{max(d - c, 0.5):.1f}"/>'
        )
        self._name(css, name)

    def vertical(self, value: float, css: str, note: str = "") -> None:
        """A vertical line with a note at its top."""
        at = self._x(value)
        self.parts.append(f'<line class="{css}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{self.height - BOTTOM}"/>')
        if note:
            anchor, shift = ("end", -4) if at > WIDTH * 0.7 else ("start", 4)
            self.parts.append(
                f'<text class="note" x="{at + shift:.1f}" y="{TOP + 10}" text-anchor="{anchor}">'
                f"{html.escape(note)}</text>"
            )

    def text(self, x: float, y: float, text: str, shift: float = 6.0) -> None:
        """A note beside a point."""
        self.parts.append(
            f'<text class="note" x="{self._x(x) + shift:.1f}" y="{self._y(y) + 4:.1f}">{html.escape(text)}</text>'
        )

    def _name(self, css: str, name: str) -> None:
        if name:
            self.legend.append((css, name))

    def _axes(self) -> str:
        bottom, right = self.height - BOTTOM, WIDTH - RIGHT
        out = []
        for value, text in self.x.ticks():
            at = self._x(value)
            out.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
            out.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
        for value, text in self.y.ticks():
            at = self._y(value)
            out.append(f'<line class="grid" x1="{self.left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
            out.append(
                f'<text class="tick" x="{self.left - 6}" y="{at + 4:.1f}" text-anchor="end">{html.escape(text)}</text>'
            )
        middle = (self.left + right) / 2
        out.append(
            f'<text class="axis" x="{middle:.0f}" y="{self.height - 10}" text-anchor="middle">'
            f"{html.escape(self.x.label)}</text>"
        )
        if self.y.label:
            at = (TOP + bottom) / 2
            out.append(
                f'<text class="axis" x="14" y="{at:.0f}" text-anchor="middle" transform="rotate(-90 14 {at:.0f})">'
                f"{html.escape(self.y.label)}</text>"
            )
        return "".join(out)

    def render(self) -> str:
        """The SVG and its legend."""
        keys = "".join(f'<span><i class="key {css}"></i>{html.escape(name)}</span>' for css, name in self.legend)
        legend = f'<div class="legend">{keys}</div>' if keys else ""
        clip = f"c{abs(hash((self.title, self.height))) % 10**8}"
        area = f'x="{self.left}" y="{TOP}" width="{WIDTH - self.left - RIGHT}" height="{self.height - TOP - BOTTOM}"'
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{html.escape(self.title, quote=True)}">'
            f'<clipPath id="{clip}"><rect {area}/></clipPath>{self._axes()}'
            f'<g clip-path="url(#{clip})">{"".join(self.parts)}</g></svg>{legend}'
        )
