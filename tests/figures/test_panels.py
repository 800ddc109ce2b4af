"""Panels of a figure: places, labels, marks, colours and texts."""

import itertools
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
    CANDIDATE_COLORS,
    MODE_COLORS,
    format_bytes,
    format_count,
    format_duration,
    format_estimate,
    format_hypervolume,
    format_interval,
    format_number,
    format_parameter,
    format_percent,
)
from gdpo_tune.core.trials import Estimate, Objective
from gdpo_tune.figures import front_panels, style
from gdpo_tune.figures.front_panels import build_panels, place_labels
from gdpo_tune.figures.layout import GAP_UP, WIDTH, get_panel_size, make_panels
from tests.support.analysis import GOALS as UP
from tests.support.analysis import build_trial
from tests.support.figures import make_records, make_spec
from tests.support.tables import cases

MIXED = (Objective("a", "maximize", 0.0), Objective("b", "minimize", 1.0))


def records_at(points):
    return [
        build_trial(number, a, b, se=0.01, finished=float(number + 1))
        for number, (a, b) in enumerate(points)
    ]


def build_panel(points, objectives=UP):
    (panel,) = build_panels(build_front(records_at(points), objectives))
    return panel


POINTS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8)


# Panels


def test_the_staircase_runs_from_the_best_y_to_the_best_x():
    panel = build_panel([(0.2, 0.8), (0.5, 0.5), (0.8, 0.2), (0.3, 0.3)])
    steps = [(0.2, 0.8), (0.2, 0.5), (0.5, 0.5), (0.5, 0.2), (0.8, 0.2)]
    assert panel.staircase == ((panel.x.low, 0.8), *steps, (0.8, panel.y.low))


def test_a_minimised_axis_runs_backwards_and_its_staircase_ends_at_its_high_end():
    panel = build_panel([(0.2, 0.2), (0.8, 0.8)], MIXED)
    assert panel.y.range == (panel.y.high, panel.y.low)
    assert "lower is better" in panel.y.title
    assert panel.staircase[-1] == (0.8, panel.y.high)
    assert panel.y.get_position(0.2) > panel.y.get_position(0.8)


@settings(max_examples=30, deadline=None)
@given(POINTS)
def test_points_lie_inside_the_panel_and_none_beyond_the_staircase(points):
    for objectives in (UP, MIXED):
        front = build_front(records_at(points), objectives)
        (panel,) = build_panels(front)
        corners = [(panel.x.get_position(x), panel.y.get_position(y)) for x, y in panel.staircase]
        for x, y in points:
            place = (panel.x.get_position(x), panel.y.get_position(y))
            assert any(cx >= place[0] - 1e-9 and cy >= place[1] - 1e-9 for cx, cy in corners)
        for configuration, axis in itertools.product(front.members, (panel.x, panel.y)):
            estimate = axis.get_estimate(configuration)
            for value in (estimate.mean - estimate.se, estimate.mean + estimate.se):
                assert 0 < axis.get_position(value) < 1


@pytest.mark.parametrize(("objectives", "count"), [(1, 1), (2, 1), (3, 3), (4, 6)])
def test_one_panel_for_each_pair(tmp_path, objectives, count):
    spec = make_spec(tmp_path, objectives)
    for search in (0, 1, 9):
        front = build_front(make_records(spec, search), spec.list_objectives())
        assert len(build_panels(front)) == count


@pytest.mark.parametrize(
    ("points", "labels"),
    [
        ([(0.1, 0.9), (0.6, 0.7), (0.9, 0.1)], {1: "knee", 0: "best b", 2: "best a"}),
        ([(0.5, 0.5)], {0: "knee\nbest b\nbest a"}),  # several titles of one point are one label
    ],
)
def test_a_panel_names_the_knee_and_its_own_extremes(points, labels):
    found = [(point.configuration.first, text) for point, text in build_panel(points).labels]
    assert sorted(found) == sorted(labels.items())


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


def test_a_line_that_crosses_another_label_costs_as_one_that_lies_under_it():
    boxes = [Bbox([[0, 0], [1, 1]]), Bbox([[4, 0], [5, 1]])]
    points = [Bbox([[4.4, 0.4], [4.6, 0.6]])]
    costs = {
        place: front_panels._count_overlaps(boxes, np.array([place, (4.5, 0.5)]), points)
        for place in ((0.5, 3.0), (9.0, 0.5))  # above the first label; beyond the second one
    }
    cost = front_panels.OVERLAP_COST
    assert costs == {(0.5, 3.0): 1, (9.0, 0.5): 1 + cost}, "and a point under a label costs 1"


def label_boxes(panel):
    boxes = []
    offsets = place_labels(panel, SIZE, FONT, RADIUS)
    for (point, text), offset in zip(panel.labels, offsets, strict=True):
        middle = np.array(panel.get_position(point)) * SIZE + offset
        boxes.append(Bbox([middle - text_size(text) / 2, middle + text_size(text) / 2]))
    return boxes


def share(box, other):
    overlap = Bbox.intersection(box, other)
    return 0.0 if overlap is None else overlap.width * overlap.height


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=5))
def test_labels_stay_inside_and_apart(points):
    for objectives in (UP, MIXED):
        panel = build_panel(points, objectives)
        boxes = label_boxes(panel)
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
        points = [np.array(panel.get_position(point)) * SIZE for point in panel.points]
        dots = [Bbox([point - DOT, point + DOT]) for point in points]
        assert all(share(box, dot) < 1 for box in label_boxes(panel) for dot in dots)


def test_labels_of_a_crowd_are_placed_equally(tmp_path):
    spec = make_spec(tmp_path)
    front = build_front(make_records(spec, 1000), spec.list_objectives())
    panel = build_panels(front)[0]
    offsets = place_labels(panel, SIZE, FONT, RADIUS)
    assert place_labels(panel, SIZE, FONT, RADIUS) == offsets


def test_a_long_name_is_placed_inside():
    goals = (Objective("x" * 70, "maximize", 0.0), UP[1])
    records = [
        replace(record, test={goals[0].name: record.test["a"], "b": record.test["b"]})
        for record in records_at([(0.2, 0.8), (0.8, 0.2)])
    ]
    (panel,) = build_panels(build_front(records, goals))
    assert all(box.x0 > -1 and box.x1 < SIZE[0] + 1 for box in label_boxes(panel))


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


FORMATS = {
    "number": format_number,
    "estimate": lambda pair: format_estimate(pair and Estimate(*pair)),
    "parameter": format_parameter,
    "duration": format_duration,
    "percent": format_percent,
    "bytes": format_bytes,
    "count": lambda pair: format_count(*pair),
    "interval": lambda ends: format_interval(*ends),
}


@cases("figures", "texts")
def test_values_as_text(kind, value, text):
    """Source of estimates: JCGM 100 (GUM), 7.2.6: as many digits as the error makes meaningful."""
    assert FORMATS[kind](value) == text


def test_a_hypervolume_shows_its_interval_and_why_it_ends_there():
    why = "not above it: noise makes a front look better"
    for volume, interval, reference, text in (
        (2.1e-7, (1e-7, 3e-7), "", "2.1e-7 (95 %: 1e-7 to 3e-7)"),
        (0.5, (0.25, 0.75), "", "0.500 (95 %: 0.250 to 0.750)"),
        (0.5, (0.25, 0.5), "a 0", f"0.500 (95 %: 0.250 to 0.500, {why}; reference: a 0)"),
    ):
        assert format_hypervolume(volume, interval, *([reference] if reference else [])) == text


# Layout


@pytest.mark.parametrize("objectives", [2, 3, 4, 7, 8, 10])
def test_rows_of_panels_have_their_size_in_pixels(objectives):
    """plotly.py#2273: spacing as a share of the figure grows with the rows, and is then refused."""
    count = objectives * (objectives - 1) // 2
    figure, cells = make_panels(count)
    assert len(cells) == count
    layout = figure.layout
    inner = layout.height - layout.margin.t - layout.margin.b
    domains = {tuple(layout[each].domain) for each in layout if str(each).startswith("yaxis")}
    rows = sorted(domains)
    for low, high in rows:
        assert (high - low) * inner == pytest.approx(get_panel_size(count)[1], abs=1)
    for below, above in itertools.pairwise(rows):
        assert (above[0] - below[1]) * inner == pytest.approx(GAP_UP, abs=1)
    assert len(rows) == max(cell["row"] for cell in cells)
    wide = layout.width or WIDTH
    inner = wide - layout.margin.l - layout.margin.r
    columns = {tuple(layout[each].domain) for each in layout if str(each).startswith("xaxis")}
    assert len(columns) == max(cell["col"] for cell in cells)
    for low, high in columns:
        assert (high - low) * inner == pytest.approx(get_panel_size(count)[0], abs=1)


def test_a_tick_has_the_notation_of_the_text():
    """mlflow#1753: plotly's default writes `60µ` and `5B`, where tables have 6e-5."""
    figure, _ = make_panels(2)
    axes = figure.layout.template.layout
    assert (axes.xaxis.exponentformat, axes.yaxis.exponentformat) == ("e", "e")


def test_a_long_tick_is_not_cut():
    """Plotly's reference of axes: long tick labels grow the margin with `automargin` alone."""
    axes = make_panels(2)[0].layout.template.layout
    assert axes.xaxis.automargin
    assert axes.yaxis.automargin


# Colours, which MLflow shows without symbols

DEUTERANOPIA = np.array(
    [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]
)
"""Of linear RGB. Source: Machado, Oliveira and Fernandes 2009, table 1, severity 1.0."""
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
"""Of linear sRGB, for white D65."""
WHITE = np.array([0.95047, 1.0, 1.08883])


def convert_to_lab(color, simulation):
    """CIE 1976 L*a*b* of `#rrggbb`, as seen under a simulation (a 3 x 3 matrix)."""
    shares = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    ratios = XYZ @ np.clip(simulation @ linear, 0, 1) / WHITE
    f = np.where(ratios > 216 / 24389, np.cbrt(ratios), (24389 / 27 * ratios + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def measure_distance(first, second, simulation=DEUTERANOPIA):
    """CIE76: 2.3 is just noticeable."""
    ends = [convert_to_lab(color, simulation) for color in (first, second)]
    return float(np.linalg.norm(ends[0] - ends[1]))


def test_the_arithmetic_gives_known_distances():
    assert measure_distance("#ffffff", "#000000", np.eye(3)) == pytest.approx(100, abs=0.1)
    assert measure_distance("#ff0000", "#00ff00", np.eye(3)) == pytest.approx(170.6, abs=0.3)
    assert measure_distance("#0072b2", "#7b3294") == pytest.approx(10.2, abs=0.1)


def test_dots_of_common_kinds_differ_under_deuteranopia():
    """wandb/docs#1600: gdpo against merge had a distance of 10 in MLflow, which has dots alone."""
    common = {mode: MODE_COLORS[mode] for mode in ("gdpo", "grpo", "grpo_no_std")}
    pairs = itertools.combinations({**common, **CANDIDATE_COLORS}.items(), 2)
    near = {(a, b) for (a, x), (b, y) in pairs if measure_distance(x, y) < 20}
    assert near == set()
    others = [measure_distance(CANDIDATE_COLORS["merge"], x) for x in MODE_COLORS.values()]
    assert min(others) >= 20
