import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpo_tune.analysis import build_front
from gdpo_tune.core import registry
from gdpo_tune.core.formatting import (
    NOTHING,
    format_duration,
    format_estimate,
    format_number,
    format_parameter,
)
from gdpo_tune.core.trials import Estimate, Objective, TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.labels import APART, HEIGHT, WIDTH, Box, arrange
from gdpo_tune.figures.panels import PADDING, panels
from tests.support.figures import make_records, make_spec

UP = (Objective("a", "maximize", 0.0), Objective("b", "maximize", 0.0))
MIXED = (Objective("a", "maximize", 0.0), Objective("b", "minimize", 1.0))


def records_at(points):
    return [
        TrialRecord(
            number,
            "search",
            "complete",
            {"x": number},
            number,
            "model",
            test={"a": Estimate(a, 0.01), "b": Estimate(b, 0.01)},
            feasible=True,
            finished=float(number + 1),
        )
        for number, (a, b) in enumerate(points)
    ]


# Panels


def test_the_staircase_runs_from_the_best_y_to_the_best_x():
    front = build_front(records_at([(0.2, 0.8), (0.5, 0.5), (0.8, 0.2), (0.3, 0.3)]), UP)
    (panel,) = panels(front)
    assert panel.staircase == (
        (panel.x.low, 0.8),
        (0.2, 0.8),
        (0.2, 0.5),
        (0.5, 0.5),
        (0.5, 0.2),
        (0.8, 0.2),
        (0.8, panel.y.low),
    )


def test_a_minimised_axis_runs_backwards_and_its_staircase_ends_at_its_high_end():
    front = build_front(records_at([(0.2, 0.2), (0.8, 0.8)]), MIXED)
    (panel,) = panels(front)
    assert panel.y.range == (panel.y.high, panel.y.low)
    assert "less is better" in panel.y.title
    assert panel.staircase[-1] == (0.8, panel.y.high)
    assert panel.y.place(0.2) > panel.y.place(0.8)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8))
def test_no_point_lies_beyond_the_staircase(points):
    for objectives in (UP, MIXED):
        (panel,) = panels(build_front(records_at(points), objectives))
        corners = [(panel.x.place(x), panel.y.place(y)) for x, y in panel.staircase]
        for x, y in points:
            place = (panel.x.place(x), panel.y.place(y))
            assert any(cx >= place[0] - 1e-9 and cy >= place[1] - 1e-9 for cx, cy in corners)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8))
def test_every_point_and_error_bar_lies_inside_the_panel(points):
    front = build_front(records_at(points), UP)
    (panel,) = panels(front)
    for configuration in front.members:
        for axis in (panel.x, panel.y):
            estimate = axis.of(configuration)
            for value in (estimate.mean - estimate.se, estimate.mean + estimate.se):
                assert 0 < axis.place(value) < 1


@pytest.mark.parametrize(("objectives", "count"), [(1, 1), (2, 1), (3, 3), (4, 6)])
def test_one_panel_for_each_pair(tmp_path, objectives, count):
    spec = make_spec(tmp_path, objectives)
    for search in (0, 1, 9):
        front = build_front(make_records(spec, search), spec.objective_list())
        assert len(panels(front)) == count


def test_a_panel_names_the_knee_and_its_own_extremes():
    points = [(0.1, 0.9), (0.6, 0.7), (0.9, 0.1)]
    (panel,) = panels(build_front(records_at(points), UP))
    assert {text: c.first for c, text in panel.labels} == {"knee": 1, "best b": 0, "best a": 2}


def test_a_point_with_several_titles_has_one_label():
    (panel,) = panels(build_front(records_at([(0.5, 0.5)]), UP))
    assert [text for _, text in panel.labels] == ["knee, best b, best a"]


def test_infeasible_points_shape_neither_line_nor_labels():
    records = records_at([(0.2, 0.2), (0.9, 0.9)])
    records[1] = replace(records[1], feasible=False)
    (panel,) = panels(build_front(records, UP))
    assert (0.9, 0.9) not in panel.staircase
    assert [c.first for c, _ in panel.labels] == [0]


# Labels


def label_box(anchor, offset, text, font=11.0):
    half = len(text) * WIDTH * font / 2
    x, y = anchor[0] + offset[0], anchor[1] + offset[1]
    return Box(x - half, y - HEIGHT * font / 2, x + half, y + HEIGHT * font / 2)


# A panel keeps its points away from its edges.
INNER = st.floats(300 * PADDING / 2, 300 * (1 - PADDING / 2))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(INNER, INNER), min_size=1, max_size=3))
def test_labels_stay_inside_and_apart(anchors):
    texts = ["best correctness", "knee", "best format"][: len(anchors)]
    offsets = arrange(anchors, texts, anchors, (300, 300), 11.0)
    boxes = [label_box(*rest) for rest in zip(anchors, offsets, texts, strict=True)]
    # Less than a square pixel is no overlap that anybody sees.
    for index, box in enumerate(boxes):
        assert box.area - box.overlap(Box(0, 0, 300, 300)) < 1
        assert all(box.overlap(other) < 1 for other in boxes[index + 1 :])


def test_labels_of_neighbours_do_not_read_as_one():
    """Points of a panel in which both labels stood in one line, less than a space apart."""
    points = [(40, 202), (25, 211), (76, 210), (22, 200), (154, 210), (163, 204), (181, 197)]
    anchors, texts, font = points[:2], ["knee", "ahead in format"], 8.5
    offsets = arrange(anchors, texts, points, (204, 230), font)
    knee, ahead = (label_box(*rest, font) for rest in zip(anchors, offsets, texts, strict=True))
    assert knee.grown(APART * font).overlap(ahead) < 1


def test_a_long_label_stays_inside():
    anchor, text = (135, 178), "knee, ahead in format, ahead in correctness"
    (offset,) = arrange([anchor], [text], [anchor], (230, 230), 8.5)
    box = label_box(anchor, offset, text, 8.5)
    assert box.area - box.overlap(Box(0, 0, 230, 230)) < 1
    assert box.overlap(Box(129, 172, 141, 184)) == 0


def test_a_label_avoids_a_point():
    free = arrange([(150, 150)], ["knee"], [], (300, 300), 11.0)[0]
    blocked = (150 + free[0], 150 + free[1])
    moved = arrange([(150, 150)], ["knee"], [blocked], (300, 300), 11.0)[0]
    assert label_box((150, 150), moved, "knee").overlap(
        Box(blocked[0] - 6, blocked[1] - 6, blocked[0] + 6, blocked[1] + 6)
    ) == pytest.approx(0)


def test_the_line_of_a_label_avoids_a_point():
    anchor, above = (150, 150), (150, 165)
    obstacles = [anchor, above, (125, 135)]
    dx, dy = arrange([anchor], ["best format"], obstacles, (300, 300), 11.0)[0]
    # Points of the line from the anchor to the text, an eighth of it apart.
    line = [(150 + i / 8 * dx, 150 + i / 8 * dy) for i in range(1, 9)]
    assert all(math.dist(point, above) > 6 for point in line)


# Style


def test_every_mode_has_a_colour_and_a_symbol_of_its_own():
    assert set(style.MODES) == set(registry.NORMALIZATIONS)
    for field in ("color", "plotly", "matplotlib"):
        assert len({getattr(mark, field) for mark in style.MODES.values()}) == len(style.MODES)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (34.26, "34.3"), (12345.6, "12,346"), (math.nan, NOTHING)],
)
def test_numbers(value, text):
    assert format_number(value) == text


def test_an_error_has_as_many_decimals_as_its_mean():
    assert format_estimate(Estimate(34.26, 0.227)) == "34.3 ± 0.2"
    assert format_estimate(Estimate(0.5, 0.0214)) == "0.500 ± 0.021"
    assert format_estimate(None) == NOTHING


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (0.0001513, "1.51e-4"),
        (0.00001, "1e-5"),
        (8, "8"),
        ("gdpo", "gdpo"),
        (0.0, "0"),
        (True, "true"),
    ],
)
def test_parameters(value, text):
    assert format_parameter(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.6, "1 min 00 s"),
        (425, "7 min 05 s"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text
