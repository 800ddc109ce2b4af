import math
import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from gdpo_tune.analysis.front import build_front
from gdpo_tune.core import registry
from gdpo_tune.core.text import (
    NO_VALUE,
    format_count,
    format_duration,
    format_estimate,
    format_hypervolume,
    format_interval,
    format_number,
    format_parameter,
    format_percent,
)
from gdpo_tune.core.trials import Estimate, Objective, TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.front_panels import build_panels, place_labels
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
    (panel,) = build_panels(front)
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
    (panel,) = build_panels(front)
    assert panel.y.range == (panel.y.high, panel.y.low)
    assert "lower is better" in panel.y.title
    assert panel.staircase[-1] == (0.8, panel.y.high)
    assert panel.y.get_position(0.2) > panel.y.get_position(0.8)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8))
def test_no_point_lies_beyond_the_staircase(points):
    for objectives in (UP, MIXED):
        (panel,) = build_panels(build_front(records_at(points), objectives))
        corners = [(panel.x.get_position(x), panel.y.get_position(y)) for x, y in panel.staircase]
        for x, y in points:
            place = (panel.x.get_position(x), panel.y.get_position(y))
            assert any(cx >= place[0] - 1e-9 and cy >= place[1] - 1e-9 for cx, cy in corners)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8))
def test_every_point_and_error_bar_lies_inside_the_panel(points):
    front = build_front(records_at(points), UP)
    (panel,) = build_panels(front)
    for configuration in front.members:
        for axis in (panel.x, panel.y):
            estimate = axis.get_estimate(configuration)
            for value in (estimate.mean - estimate.se, estimate.mean + estimate.se):
                assert 0 < axis.get_position(value) < 1


@pytest.mark.parametrize(("objectives", "count"), [(1, 1), (2, 1), (3, 3), (4, 6)])
def test_one_panel_for_each_pair(tmp_path, objectives, count):
    spec = make_spec(tmp_path, objectives)
    for search in (0, 1, 9):
        front = build_front(make_records(spec, search), spec.list_objectives())
        assert len(build_panels(front)) == count


def test_a_panel_names_the_knee_and_its_own_extremes():
    points = [(0.1, 0.9), (0.6, 0.7), (0.9, 0.1)]
    (panel,) = build_panels(build_front(records_at(points), UP))
    assert {text: p.configuration.first for p, text in panel.labels} == {
        "knee": 1,
        "best b": 0,
        "best a": 2,
    }


def test_a_point_with_several_titles_has_one_label():
    (panel,) = build_panels(build_front(records_at([(0.5, 0.5)]), UP))
    assert [text for _, text in panel.labels] == ["knee\nbest b\nbest a"]


def test_infeasible_points_shape_neither_line_nor_labels():
    records = records_at([(0.2, 0.2), (0.9, 0.9)])
    records[1] = replace(records[1], feasible=False)
    (panel,) = build_panels(build_front(records, UP))
    assert (0.9, 0.9) not in panel.staircase
    assert [p.configuration.first for p, _ in panel.labels] == [0]


# Labels

SIZE, FONT, RADIUS = (204.0, 230.0), 8.5, 5.0
DOT = 3.5
"""Half the side of a mark of the PNG, in points."""


@cache
def text_size(text):
    figure = Figure(dpi=72)
    FigureCanvasAgg(figure)
    box = figure.text(0, 0, text, fontsize=FONT).get_window_extent()
    return np.array([box.width, box.height])


def label_boxes(front, panel):
    boxes = []
    offsets = place_labels(panel, SIZE, FONT, RADIUS)
    for (point, text), offset in zip(panel.labels, offsets, strict=True):
        middle = np.array(panel.get_position(point)) * SIZE + offset
        boxes.append(Bbox([middle - text_size(text) / 2, middle + text_size(text) / 2]))
    return boxes


def dots(front, panel):
    points = [np.array(panel.get_position(p)) * SIZE for p in panel.points]
    return [Bbox([point - DOT, point + DOT]) for point in points]


def share(box, other):
    overlap = Bbox.intersection(box, other)
    return 0.0 if overlap is None else overlap.width * overlap.height


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=5))
def test_labels_stay_inside_and_apart(points):
    for objectives in (UP, MIXED):
        front = build_front(records_at(points), objectives)
        (panel,) = build_panels(front)
        boxes = label_boxes(front, panel)
        assert len(boxes) == len(panel.labels)
        # Less than a square point is no overlap that anybody sees.
        for index, box in enumerate(boxes):
            assert share(box, Bbox([(0, 0), SIZE])) > box.width * box.height - 1
            assert all(share(box, other) < 1 for other in boxes[index + 1 :])


@pytest.mark.parametrize("objectives", [2, 3, 4])
@pytest.mark.parametrize("search", [5, 16, 30])
def test_labels_hide_no_point_of_a_sweep(tmp_path, objectives, search):
    spec = make_spec(tmp_path, objectives)
    front = build_front(make_records(spec, search), spec.list_objectives())
    for panel in build_panels(front):
        for box in label_boxes(front, panel):
            assert all(share(box, dot) < 1 for dot in dots(front, panel))


def test_labels_of_a_crowd_are_placed_at_once_and_equally(tmp_path):
    spec = make_spec(tmp_path)
    front = build_front(make_records(spec, 1000), spec.list_objectives())
    panel = build_panels(front)[0]
    started = time.process_time()
    offsets = place_labels(panel, SIZE, FONT, RADIUS)
    assert time.process_time() - started < 2
    assert place_labels(panel, SIZE, FONT, RADIUS) == offsets


def test_a_long_name_is_placed_inside():
    name = "x" * 70
    goals = tuple(replace(goal, name=name if goal.name == "a" else goal.name) for goal in UP)
    records = [
        replace(record, test={name: record.test["a"], "b": record.test["b"]})
        for record in records_at([(0.2, 0.8), (0.8, 0.2)])
    ]
    front = build_front(records, goals)
    (panel,) = build_panels(front)
    for box in label_boxes(front, panel):
        assert box.x0 > -1
        assert box.x1 < SIZE[0] + 1


# Style


def test_no_two_modes_share_a_colour_or_a_symbol():
    assert set(style.MODES) <= set(registry.NORMALIZATIONS)
    assert style.get_mark("a mode without a mark") == style.OTHER
    others = [mark for table in (style.CANDIDATES, style.BASELINES) for _, mark in table.values()]
    marks = [*style.MODES.values(), style.OTHER, *others]
    for field in ("plotly", "matplotlib"):
        assert len({getattr(mark, field) for mark in marks}) == len(marks)
    colors = {mark.color for mark in marks}
    assert len(colors) == len(marks) - 2  # all baselines are in the colour of ink


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.12345, "0.123"), (34.26, "34.3"), (12345.6, "12,346"), (math.nan, NO_VALUE)),
        *((2.14e-5, "2.1e-5"), (-3.9e-7, "-3.9e-7"), (4.4e-4, "0.00044"), (0.0, "0.000")),
        (-1e-17, "0.000"),  # what rounding leaves of 0.3 - 0.2 - 0.1
    ],
)
def test_numbers(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("mean", "error", "text"),
    [
        (34.26, 0.227, "34.3 ± 0.2"),
        (0.5, 0.0214, "0.500 ± 0.021"),
        (0.99951, 1.4e-4, "0.9995 ± 0.0001"),
        (2.1e-5, 1.05e-6, "2.1e-5 ± 1e-6"),
        (12345.6, 0.1, "12,345.6 ± 0.1"),
        (12345.6, 30.0, "12,346 ± 30"),
        (0.0, 2e-5, "0.000 ± 0.00002"),
        (2e-5, 0.01, "2e-5 ± 0.010"),
        (0.99962, 0.0, "0.99962 ± 0.000"),  # exact
        (1.0, 1e-17, "1.000 ± 0.000"),
        (1e6, 0.0, "1,000,000 ± 0"),
        (math.nan, 0.1, f"{NO_VALUE} ± 0.1"),
    ],
)
def test_an_estimate_is_shown_to_the_first_digit_of_its_error(mean, error, text):
    """Source: JCGM 100 (GUM), 7.2.6: as many digits as the uncertainty makes meaningful."""
    assert format_estimate(Estimate(mean, error)) == text
    assert format_estimate(None) == NO_VALUE


def test_an_interval_shows_its_width():
    assert format_interval(0.99951, 0.99987) == "0.9995 to 0.9999"
    assert format_interval(0.431, 0.54) == "0.431 to 0.540"
    assert format_hypervolume(2.1e-7, (1e-7, 3e-7)) == "2.1e-7 (95 %: 1e-7 to 3e-7)"


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


def test_counts_and_percents():
    assert format_count(1, "trial") == "1 trial"
    assert format_count(0, "trial") == "0 trials"
    assert format_count(1200, "trial") == "1,200 trials"
    assert format_count(1.0, "GPU") == "1 GPU"
    assert format_count(0.5, "GPU") == "0.5 GPUs"
    assert format_percent(0.954) == "95 %"
