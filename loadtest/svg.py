"""Plots as inline SVG: lines, dots, bars, bands. Colours are the page's variables, so they follow light and dark.

Knows axes and points, not what they mean; report.py, compare.py and economics_page.py draw with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from math import inf

from headrace.loadtest.axes import Axis

COLORS = 6  # --c0 .. --c5 of the page
WIDTH, HEIGHT = 640, 330
LEFT, RIGHT, TOP, BOTTOM = 74, 28, 12, 46
LABEL_HEIGHT = 14
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points joined in order. `labels`, if any, stand beside the points."""

    name: str
    points: Sequence[Point]
    color: int = 0
    dashed: bool = False
    dots: bool = False
    steps: bool = False  # level from each point to the next
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A rectangle from low to high, for a range; `mark` is its middle. Drawn at one place of the y axis."""

    y: float
    low: float
    mark: float
    high: float
    color: int = 0
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Columns from the x axis up; `edges` has one entry more than `heights`."""

    name: str
    edges: Sequence[float]
    heights: Sequence[float]
    color: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One plot."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line] = ()
    bars: Sequence[Bars] = ()
    bands: Sequence[Band] = ()
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)  # vertical lines with a word
    height: int = HEIGHT
    left: int = LEFT

    def svg(self) -> str:
        """A figure element with title, plot and legend."""
        parts = [self._grid()]
        parts += [self._bars(bars) for bars in self.bars]
        parts += [self._mark(value, text) for value, text in self.marks]
        parts += [self._band(band) for band in self.bands]
        parts += [self._line(line) for line in self.lines]
        keys = [_legend(line.name, line.color, line.dashed) for line in self.lines if line.name]
        keys += [_legend(bars.name, bars.color) for bars in self.bars if bars.name]
        legend = "".join(keys) if len(keys) > 1 else ""
        title = escape(self.title)
        return (
            f'<figure><figcaption>{title}</figcaption><svg viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'aria-label="{title}">{"".join(parts)}</svg><div class="legend">{legend}</div></figure>'
        )

    def _x(self, value: float) -> float:
        return self.left + min(max(self.x.place(value), -0.01), 1.01) * (WIDTH - self.left - RIGHT)

    def _y(self, value: float) -> float:
        return (
            self.height - BOTTOM - min(max(self.y.place(value), -0.01), 1.01) * (self.height - TOP - BOTTOM)
        )

    def _grid(self) -> str:
        floor, right = self.height - BOTTOM, WIDTH - RIGHT
        parts = []
        for value, text in self.x.ticks:
            at = self._x(value)
            parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{floor}"/>')
            parts.append(
                f'<text class="tick" x="{at:.1f}" y="{floor + 17}" text-anchor="middle">{escape(text)}</text>'
            )
        for value, text in self.y.ticks:
            at = self._y(value)
            parts.append(f'<path class="grid" d="M{self.left} {at:.1f}H{right}"/>')
            parts.append(
                f'<text class="tick" x="{self.left - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>'
            )
        parts.append(f'<path class="axis" d="M{self.left} {TOP}V{floor}H{right}"/>')
        middle = (self.left + right) / 2
        parts.append(
            f'<text class="label" x="{middle:.0f}" y="{self.height - 8}" text-anchor="middle">'
            f"{escape(self.x.label)}</text>"
        )
        if self.y.label:
            across = (TOP + floor) / 2
            parts.append(
                f'<text class="label" transform="translate(14 {across:.0f}) rotate(-90)" text-anchor="middle">'
                f"{escape(self.y.label)}</text>"
            )
        return "".join(parts)

    def _line(self, line: Line) -> str:
        if not line.points:
            return ""
        color = f"var(--c{line.color % COLORS})"
        places = [(self._x(x), self._y(y)) for x, y in line.points]
        path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
        for x, y in places[1:]:
            path += f"H{x:.1f}V{y:.1f}" if line.steps else f"L{x:.1f} {y:.1f}"
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts = [f'<path class="line" stroke="{color}"{dash} d="{path}"/>']
        if line.dots:
            beside = _spread([y - 7 for _, y in places])
            for index, (x, y) in enumerate(places):
                label = line.labels[index] if index < len(line.labels) else ""
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"><title>{escape(label)}</title></circle>'
                )
                end = x > WIDTH - RIGHT - 70
                side = f'x="{x - 8:.1f}" text-anchor="end"' if end else f'x="{x + 8:.1f}"'
                parts.append(f'<text class="tick" {side} y="{beside[index]:.1f}">{escape(label)}</text>')
        return "".join(parts)

    def _bars(self, bars: Bars) -> str:
        color = f"var(--c{bars.color % COLORS})"
        floor = self.height - BOTTOM
        parts = []
        for low, high, height in zip(bars.edges, bars.edges[1:], bars.heights, strict=False):
            if height:
                left, right, top = self._x(low), self._x(high), self._y(height)
                width = max(0.8, right - left - 0.6)
                parts.append(
                    f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{max(0.0, floor - top):.1f}" '
                    f'fill="{color}" opacity=".8"/>'
                )
        return "".join(parts)

    def _band(self, band: Band) -> str:
        color = f"var(--c{band.color % COLORS})"
        left, middle, right, y = self._x(band.low), self._x(band.mark), self._x(band.high), self._y(band.y)
        return (
            f'<g><title>{escape(band.title)}</title><rect x="{left:.1f}" y="{y - 7:.1f}" '
            f'width="{max(2.0, right - left):.1f}" height="14" rx="4" fill="{color}" opacity=".38"/>'
            f'<circle cx="{middle:.1f}" cy="{y:.1f}" r="5" fill="{color}"/></g>'
        )

    def _mark(self, value: float, text: str) -> str:
        at = self._x(value)
        return (
            f'<path class="mark" d="M{at:.1f} {TOP}V{self.height - BOTTOM}"/>'
            f'<text class="tick strong" x="{at + 5:.1f}" y="{TOP + 12}">{escape(text)}</text>'
        )


def _spread(heights: Sequence[float]) -> list[float]:
    """Heights of the labels beside some dots, moved up where two would overlap; the plot's top is the end."""
    placed = list(heights)
    above = inf
    for index in sorted(range(len(placed)), key=lambda index: -placed[index]):
        placed[index] = above = min(placed[index], above - LABEL_HEIGHT)
    return [max(height, float(TOP)) for height in placed]


def _legend(name: str, color: int, dashed: bool = False) -> str:
    kind = " dashed" if dashed else ""
    return f'<span class="key{kind}" style="--key:var(--c{color % COLORS})">{escape(name)}</span>'
