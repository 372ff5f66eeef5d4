"""The charts: whatever the numbers, all of it stays inside and every text is escaped."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.report.svg import HEIGHT, POINTS, WIDTH, Group, Line, dot_chart, heat_map, line_chart, thin

numbers = st.floats(-1e6, 1e6, allow_subnormal=False)
positive = st.floats(1e-9, 1e6)


def inside(svg: str) -> None:
    root = ElementTree.fromstring(str(svg))
    for element in root.iter():
        for name in ("x", "x1", "x2", "cx"):
            assert -1 <= float(element.get(name, 0)) <= WIDTH + 1, ElementTree.tostring(element)
        for name in ("y", "y1", "y2", "cy"):
            assert -1 <= float(element.get(name, 0)) <= HEIGHT + 1, ElementTree.tostring(element)
        for pair in element.get("points", "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT


@settings(max_examples=60)
@given(st.lists(numbers, min_size=1, max_size=40), st.booleans())
def test_lines_stay_inside(values: list[float], from_zero: bool) -> None:
    line = Line(range(1, len(values) + 1), values, "a")
    inside(line_chart([line], x_label="x", y_label="y", from_zero=from_zero, rule=(0.5, "rule")))


@settings(max_examples=60)
@given(st.lists(positive, min_size=1, max_size=40))
def test_logarithmic_lines_stay_inside(values: list[float]) -> None:
    line = Line(range(1, len(values) + 1), values, "a")
    inside(line_chart([line], x_label="x", y_label="y", log=True))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=5))
def test_dots_stay_inside(values: list[tuple[float, float]]) -> None:
    groups = [Group("g", [(max(pair), min(pair), max(pair))] * 2) for pair in values]
    inside(dot_chart(groups, ("a", "b"), x_label="x", y_label="y"))


def test_axes_have_ticks_at_round_numbers() -> None:
    svg = line_chart([Line([0, 100], [4.4, 5.6], "a")], x_label="step", y_label="loss")
    ticks = re.findall(r'class="tick"[^>]*>([^<]*)<', svg)
    assert {"4.0", "4.5", "6.0", "0", "20", "100"} <= set(ticks)


def test_a_map_shows_each_weight_once_and_nothing_above_the_diagonal() -> None:
    weights = np.tril(np.full((3, 3), 0.25))
    svg = heat_map(weights, label="attention")
    assert svg.count("<rect") == 6 and svg.count(">25<") == 6
    assert "3 attends to 1: 25.0%" in svg


def test_texts_are_escaped() -> None:
    evil = "<script>&\"'"
    chart = line_chart([Line([0, 1], [0, 1], "a")], x_label=evil, y_label=evil, rule=(0.5, evil))
    assert "<script" not in chart and "&lt;script&gt;" in chart
    ElementTree.fromstring(str(chart))


@given(st.integers(1, 2000))
def test_long_lines_are_thinned_with_their_ends_kept(size: int) -> None:
    points = thin(range(size), [float(v) for v in range(size)])
    assert len(points) == min(size, POINTS) and points[0] == (0, 0) and points[-1] == (size - 1, size - 1)
    assert np.allclose([x for x, _ in points], [y for _, y in points])


def test_one_point_is_a_chart() -> None:
    inside(line_chart([Line([1], [3.0], "a")], x_label="x", y_label="y"))
    with pytest.raises(ValueError):
        line_chart([], x_label="x", y_label="y")
