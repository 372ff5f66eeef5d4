"""Small charts as inline SVG that use the page's fonts and colours, in light and dark mode and on paper.

Every text goes through `escape`. Colours are classes (`c1`, `c2`, …) of the page's style sheet.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

WIDTH, HEIGHT = 420, 240  # in units of the text size, so that it is readable on a phone
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 14, 46
POINTS = 240  # points per line; more are invisible


@dataclass(frozen=True)
class Line:
    """A curve; `name` for the legend, `colour` a class, `faint` for background curves."""

    x: Sequence[float]
    y: Sequence[float]
    name: str
    colour: str = "c1"
    faint: bool = False


@dataclass(frozen=True)
class Group:
    """A label on the x axis with a value and interval for each series."""

    label: str
    values: Sequence[tuple[float, float, float]]  # value, low, high


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    log: bool = False,
    from_zero: bool = False,
    rule: tuple[float, str] | None = None,
) -> Markup:
    """Curves over one pair of axes, both logarithmic with `log`; `rule` is a labelled horizontal line."""
    ys = [y for line in lines for y in line.y] + ([rule[0]] if rule else []) + ([0.0] if from_zero else [])
    x = _axis([value for line in lines for value in line.x], (LEFT, WIDTH - RIGHT), log, tight=True)
    y = _axis(ys, (HEIGHT - BOTTOM, TOP), log)
    parts = [_frame(x, y, x_label, y_label)]
    if rule:
        at = y.place(rule[0])
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(WIDTH - RIGHT - 4, at - 6, rule[1], "end", "note"))
    for line in lines:
        path = " ".join(f"{x.place(a):.1f},{y.place(b):.1f}" for a, b in thin(line.x, line.y))
        parts.append(f'<polyline class="line {line.colour}{" faint" if line.faint else ""}" points="{path}"/>')
    return _svg(parts, y_label)


def dot_chart(groups: Sequence[Group], series: Sequence[str], *, x_label: str, y_label: str) -> Markup:
    """For each group, a dot and its interval per series, side by side."""
    highs = [high for group in groups for _, _, high in group.values]
    y = _axis([0.0, *highs], (HEIGHT - BOTTOM, TOP), False)
    width = (WIDTH - LEFT - RIGHT) / len(groups)
    parts = [_frame(None, y, x_label, y_label)]
    for place, group in enumerate(groups):
        middle = LEFT + width * (place + 0.5)
        parts.append(_text(middle, HEIGHT - BOTTOM + 17, group.label, "middle", "tick"))
        for number, (value, low, high) in enumerate(group.values):
            at = middle + (number - (len(series) - 1) / 2) * 16
            ends = f'y1="{y.place(low):.1f}" y2="{y.place(high):.1f}"'
            parts.append(f'<line class="whisker c{number + 1}" x1="{at:.1f}" x2="{at:.1f}" {ends}/>')
            parts.append(f'<circle class="dot c{number + 1}" cx="{at:.1f}" cy="{y.place(value):.1f}" r="4.5"/>')
    return _svg(parts, y_label)


def heat_map(weights: np.ndarray, *, label: str) -> Markup:
    """A square map with rows and columns numbered from 1; the upper triangle, which is masked, stays empty."""
    size, cell = len(weights), 34
    top = float(weights.max()) or 1.0
    parts = []
    for row in range(size):
        parts.append(_text(20, 30 + cell * row + cell / 2 + 4, str(row + 1), "end", "tick"))
        parts.append(_text(28 + cell * row + cell / 2, 20, str(row + 1), "middle", "tick"))
        for column in range(row + 1):
            value = float(weights[row, column])
            box = f'x="{28 + cell * column}" y="{30 + cell * row}" width="{cell - 2}" height="{cell - 2}" rx="3"'
            title = f"{row + 1} attends to {column + 1}: {value:.1%}"
            parts.append(
                f'<rect class="heat" {box} style="fill-opacity:{value / top:.3f}"><title>{title}</title></rect>'
            )
            if value >= 0.005:
                tone = "cell dark" if value / top > 0.55 else "cell"
                parts.append(
                    _text(
                        27 + cell * column + cell / 2, 33 + cell * row + cell / 2, f"{100 * value:.0f}", "middle", tone
                    )
                )
    side = 32 + cell * size
    return _svg(parts, label, side, side)


def thin(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """At most `POINTS` points: means of neighbours, with both ends kept."""
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(a) <= POINTS:
        return list(zip(a.tolist(), b.tolist(), strict=True))
    chunks = zip(np.array_split(a[1:-1], POINTS - 2), np.array_split(b[1:-1], POINTS - 2), strict=True)
    middle = [(float(p.mean()), float(q.mean())) for p, q in chunks]
    return [(float(a[0]), float(b[0])), *middle, (float(a[-1]), float(b[-1]))]


@dataclass(frozen=True)
class _Axis:
    place: Callable[[float], float]
    ticks: list[tuple[float, str]]


def _axis(values: Sequence[float], ends: tuple[float, float], log: bool, tight: bool = False) -> _Axis:
    low, high = min(values), max(values)
    if log:
        first, last = math.log10(low), math.log10(high)
        first, last = (first, max(last, first + 0.1)) if tight else (math.floor(first), math.ceil(last + 1e-9))
        powers = range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1)
        step = max(1, math.ceil(len(powers) / 5))
        marks = [(10.0**power, _power(power)) for power in powers[::step]]
        return _Axis(lambda v: _between(math.log10(v), first, last, ends), marks)
    gap = _nice((high - low) / 5 or abs(high) / 5 or 1.0)
    if not tight:
        low, high = math.floor(low / gap + 1e-9) * gap, math.ceil(high / gap - 1e-9) * gap
    if high == low:
        high = low + gap
    count = math.floor((high - low) / gap + 1e-9) + 1
    start = math.ceil(low / gap - 1e-9)
    marks = [(gap * (start + i), _number(gap * (start + i), gap)) for i in range(count)]
    return _Axis(
        lambda v: _between(v, low, high, ends), [mark for mark in marks if mark[0] <= high * (1 + 1e-9) + 1e-12]
    )


def _between(value: float, low: float, high: float, ends: tuple[float, float]) -> float:
    return ends[0] + (value - low) / (high - low) * (ends[1] - ends[0])


def _nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, at least the step."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= step * (1 - 1e-9))


def _number(value: float, step: float) -> str:
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _power(power: int) -> str:
    return f"{10**power:,}" if 0 <= power <= 4 else f"{10.0**power:g}" if power >= -3 else f"1e{power}"


def _frame(x: _Axis | None, y: _Axis, x_label: str, y_label: str) -> str:
    parts = []
    for value, text in y.ticks:
        at = y.place(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(LEFT - 7, at + 4, text, "end", "tick"))
    for value, text in x.ticks if x else ():
        parts.append(_text(x.place(value), HEIGHT - BOTTOM + 17, text, "middle", "tick"))  # type: ignore[union-attr]
    foot = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{foot}" y2="{foot}"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "middle", "label"))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], label: str, width: float = WIDTH, height: float = HEIGHT) -> Markup:
    limit = f' style="max-width:{width}px"' if width != WIDTH else ""
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}"{limit}>'
    return Markup(head + "".join(parts) + "</svg>")  # all texts above are escaped
