"""Data of the single pictures; not their looks."""

import math
from dataclasses import replace

import pytest

from gdpo_tune.analysis.effects import Contrast, Effects
from gdpo_tune.analysis.front import build_front, find_parents
from gdpo_tune.analysis.uncertainty import Interval
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.text import NO_VALUE, abbreviate_parameter, format_estimate, get_mode
from gdpo_tune.core.trial_files import (
    COMPLETIONS_FILE,
    LONGEST_TEXT,
    read_completions,
    shorten_completion,
    write_completions,
)
from gdpo_tune.core.trials import (
    Cost,
    Estimate,
    Measurement,
    Part,
    Rung,
    title_candidate,
)
from gdpo_tune.figures import parameter_figures, style
from gdpo_tune.figures.front_panels import PARENTS
from gdpo_tune.figures.front_plotly import (
    MAX_LINES,
    describe_configuration,
    describe_standing,
    draw_pairs,
)
from gdpo_tune.figures.layout import choose_time_unit
from gdpo_tune.figures.parameter_figures import draw_effects, draw_parallel, draw_slices
from gdpo_tune.figures.report_page import build_completions, build_gallery
from gdpo_tune.figures.trial_curves import (
    MAX_CURVES,
    draw_hypervolume,
    draw_learning,
    draw_rungs,
    list_rewards,
    read_all_steps,
)
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.wording import name_configuration
from gdpo_tune.spec.model import Constraint
from tests.support.figures import add_candidates, make_records, make_spec, write_steps


@pytest.fixture
def spec(tmp_path):
    return make_spec(tmp_path)


@pytest.fixture
def front(spec):
    return build_front(make_records(spec, 14, replicates=4, failed=(5,)), spec.list_objectives())


def drawn(figure):
    """(x, y) -> trace and index, of every point that a reader can point at."""
    return {
        (x, y): (trace, index)
        for trace in figure.data
        if trace.mode == "markers"
        for index, (x, y) in enumerate(zip(trace.x, trace.y, strict=True))
        if x is not None
    }


def fill(trace, index):
    color = trace.marker.color
    return color if isinstance(color, str) else color[index]


PARTS = (Part(1, 60, 0.25), Part(2, 40, 0.75))

# Fronts


def test_every_configuration_is_drawn_in_every_panel(front):
    points = drawn(draw_pairs(front))
    for configuration in front.configurations:
        a, b, c = configuration.get_values(front.objectives)
        assert {(a, b), (a, c), (b, c)} <= set(points)


def test_a_point_has_name_errors_and_the_mark_of_its_mode_and_is_hollow_for_one_seed(front):
    figure = draw_pairs(front)
    points, seen, symbols = drawn(figure), set(), {}
    for configuration in (*front.members, *front.baselines):
        trace, index = points[configuration.get_values(front.objectives)[:2]]
        assert trace.customdata[index] == configuration.name
        errors = trace.error_x.array[index], trace.error_y.array[index]
        assert errors == configuration.get_errors(front.objectives)[:2]
        if configuration.role == "search":
            mark = style.get_mark(get_mode(configuration.params))
            assert (trace.marker.symbol, trace.marker.line.color) == (mark.plotly, mark.color)
            assert (fill(trace, index) == style.PAPER) == configuration.is_provisional
            seen.add(configuration.is_provisional)
        else:
            symbols[configuration.role] = trace.marker.symbol
    assert seen == {True, False}
    assert symbols == {"untrained": "x", "published": "star"}
    assert {"untrained policy", "published weights"} <= {trace.name for trace in figure.data}
    broken = [c for c in front.configurations if not c.feasible]
    assert broken
    for configuration in broken:
        trace, index = points[configuration.get_values(front.objectives)[:2]]
        assert trace.marker.symbol == "x-thin"
        assert trace.customdata[index] == configuration.name


def test_checkpoints_and_merges_have_symbols_of_their_own_and_lines_to_parents(spec):
    records = add_candidates(make_records(spec, 8))
    front = build_front(records, spec.list_objectives())
    figure = draw_pairs(front)
    points = drawn(figure)
    by_role = {c.role: c for c in front.members if not c.is_training}
    assert set(by_role) == {"checkpoint", "merge"}
    for role, candidate in by_role.items():
        name, mark = style.CANDIDATES[role]
        trace, index = points[candidate.get_values(front.objectives)[:2]]
        assert (trace.marker.symbol, trace.marker.line.color) == (mark.plotly, mark.color)
        assert name in {trace.name for trace in figure.data}
        assert candidate.name in trace.text[index]
    assert "0.25 x 2@60 + 0.75 x 3@60" in trace.text[index]
    (lines, *_) = [t for t in figure.data if t.legendgroup == PARENTS and t.x[0] is not None]
    ends = [c.get_values(front.objectives)[:2] for c in find_parents(front, by_role["merge"])]
    merge = by_role["merge"].get_values(front.objectives)[:2]
    assert len(ends) == 2
    nothing = (None, None)
    assert list(zip(lines.x, lines.y, strict=True)) == [
        point for end in ends for point in (merge, end, nothing)
    ]


def test_a_dominated_merge_has_no_lines(spec):
    records = add_candidates(make_records(spec, 8))
    low = {name: Estimate(0.01, 0.001) for name in records[-2].test}
    worse = [replace(r, test=low) if len(r.parts) > 1 else r for r in records]
    front = build_front(worse, spec.list_objectives())
    groups = {trace.legendgroup for trace in draw_pairs(front).data}
    assert "merge" in groups
    assert PARENTS not in groups


def test_no_figure_of_parameters_shows_what_has_none(spec):
    records = make_records(spec, 12)
    before = build_front(records, spec.list_objectives())
    after = build_front(add_candidates(records), spec.list_objectives())
    dimensions = spec.space.dimensions
    for draw in (
        lambda front: draw_parallel(front, dimensions).data[0].dimensions,
        lambda front: [(t.x, t.name) for t in draw_slices(front, dimensions).data],
        lambda front: [t.name for t in draw_rungs(front).data],
    ):
        assert draw(after) == draw(before)


def test_the_hypervolume_marks_checkpoints_and_merges(spec):
    front = build_front(add_candidates(make_records(spec, 8)), spec.list_objectives())
    figure = draw_hypervolume(front)
    colors = {t.name: t.marker.color for t in figure.data if t.name}
    for role, (name, mark) in style.CANDIDATES.items():
        assert colors[name] == mark.color, role
    texts = [text for trace in figure.data for text in (trace.text or ())]
    assert any(text.startswith("merge-11") for text in texts)
    assert any(text.startswith("checkpoint 2@40") for text in texts)


def test_a_minimised_objective_has_a_reversed_axis(tmp_path):
    spec = make_spec(tmp_path, 4)
    figure = draw_pairs(build_front(make_records(spec, 6), spec.list_objectives()))
    titles = {axis.title.text: axis.range for axis in figure.select_yaxes()}
    first, last = titles["mean length (lower is better)"]
    assert first > last


def test_the_hover_text_has_values_and_searched_parameters_in_a_few_escaped_lines(spec, front):
    for member in front.members:
        text = describe_configuration(member, front.objectives, spec.space.dimensions)
        assert all(format_estimate(member.mean[goal.name]) in text for goal in front.objectives)
        searched = [name for name in spec.space.dimensions if name in member.params]
        assert all(abbreviate_parameter(name) in text for name in searched)
        fixed = member.params.keys() - set(searched)
        assert not any(abbreviate_parameter(name) in text for name in fixed)
        assert text.count("<br>") < MAX_LINES
    many = replace(front.members[0], params={f"parameter_{i}": 1.0 for i in range(80)})
    assert describe_configuration(many, front.objectives).count("<br>") == MAX_LINES - 1
    marked = replace(front.members[0], params={"normalization": "<b>x</b>"})
    assert "&lt;b&gt;x&lt;/b&gt;" in describe_configuration(marked, front.objectives)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"numbers": (3,)}, "trial 3"),
        ({"numbers": (3, 7)}, "trial 3, replicate 7"),
        ({"numbers": (3, 7, 9)}, "trial 3, replicates 7, 9"),
        ({"numbers": (3,), "role": "untrained"}, "untrained policy"),
        ({"name": "3@40", "numbers": (3,), "role": "checkpoint"}, "checkpoint 3@40"),
        (
            {"name": "merge-3", "numbers": (3, 9), "role": "merge", "parts": PARTS},
            "merge-3 (0.25 x 1@60 + 0.75 x 2@40), replicate 9",
        ),
    ],
)
def test_headings(front, changes, name):
    member = replace(front.members[0], first=3, name="3", role="search")
    assert name_configuration(replace(member, **changes)) == name
    assert "provisional" in describe_standing(replace(member, seeds=1))
    assert "provisional" not in describe_standing(replace(member, seeds=2))


# Hypervolume


def test_the_hypervolume_curve_is_the_trace(front):
    curve = draw_hypervolume(front).data[0]
    assert list(curve.y) == [point.hypervolume for point in front.hypervolume_over_trials]
    assert curve.y[-1] == pytest.approx(front.hypervolume)


def test_every_trial_that_ended_has_one_mark_in_every_panel(front):
    figure = draw_hypervolume(front)
    for axis in ("x", "x2", "x3"):
        marks = [t for t in figure.data if t.mode == "markers" and t.xaxis == axis]
        assert sum(len(trace.x) for trace in marks) == len(front.hypervolume_over_trials)
        names = {trace.name: len(trace.x) for trace in marks}
        assert names["replicate"] == 4
        assert names["failed or stopped"] == 1


@pytest.mark.parametrize(
    ("factor", "unit", "seconds"), [(1, "minutes", 60), (60, "hours", 3600), (0.05, "seconds", 1)]
)
def test_hypervolume_stands_against_time_and_work(front, factor, unit, seconds):
    records = tuple(stretch(record, factor) for record in front.records)
    stretched = replace(front, records=records)
    figure = draw_hypervolume(stretched, gpus=2.0)
    titles = [axis.title.text for axis in figure.select_xaxes()]
    assert titles[:2] == ["trials ended", f"{unit} since the first start"]
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    trained = [r for r in records if r.role != "untrained"]
    duration = max(r.finished for r in trained) - records[0].started
    assert lines[1].x[-1] == pytest.approx(duration / seconds)
    work = 2 * sum(r.cost.seconds for r in trained)
    length, name = choose_time_unit(work)
    assert titles[2] == f"GPU-{name}"
    assert lines[2].x[-1] == pytest.approx(work / length)
    assert f"CPU-{choose_time_unit(work / 2)[1]}" in [
        axis.title.text for axis in draw_hypervolume(stretched).select_xaxes()
    ]


def stretch(record, factor):
    """Return a record with all times multiplied."""
    cost = record.cost
    return replace(
        record,
        started=record.started * factor,
        finished=record.finished * factor,
        cost=replace(cost, seconds=cost.seconds * factor, cpu_seconds=cost.cpu_seconds * factor),
    )


# Parallel coordinates


def test_axes_are_the_searched_parameters_and_the_objectives(spec, front):
    axes = draw_parallel(front, spec.space.dimensions).data[0].dimensions
    labels = [axis.label for axis in axes]
    searched = {"normalization", "group size", "learning rate", "w format", "w length"}
    assert set(labels) == searched | {"correctness", "format", "length"}
    assert len(labels) == len(set(labels))
    lines = sum(c.role != "untrained" for c in front.configurations)
    assert all(len(axis["values"]) == lines for axis in axes)


def test_a_wide_parameter_has_a_logarithmic_axis_with_plain_ticks(spec, front):
    axes = draw_parallel(front, ["learning_rate"]).data[0].dimensions
    (axis,) = [axis for axis in axes if axis.label == "learning rate"]
    shown = [c for c in front.configurations if c.role != "untrained"]
    rates = [c.params["learning_rate"] for c in shown]
    assert [10**value for value in axis["values"]] == pytest.approx(rates)
    assert "1e-4" in axis.ticktext


@pytest.mark.parametrize("rates", [[1e-4, 2e-4], [10.0**-k for k in range(3, 10)], [*range(8)]])
def test_a_configuration_without_a_parameter_stands_below_its_numbers(rates):
    axis = parameter_figures._build_axis("beta", [*rates, None])
    *shown, below = axis["values"]
    assert below < min(shown)
    assert axis["tickvals"][0] == below
    assert axis["ticktext"][0] == NO_VALUE
    assert shown == sorted(shown) or shown == sorted(shown, reverse=True)


def test_a_category_has_one_tick_a_value(front):
    axis = draw_parallel(front, ["normalization"]).data[0].dimensions[0]
    shown = [c for c in front.configurations if c.role != "untrained"]
    named = [axis.ticktext[int(value)] for value in axis["values"]]
    assert named == [c.params["normalization"] for c in shown]


# Step metrics


def measured(step, metrics):
    return Measurement(step, metrics, Cost())


def test_rewards_are_found_by_their_metrics(front):
    assert read_all_steps(front.records) == {}
    write_steps(front.records[1])
    assert list_rewards(read_all_steps(front.records)) == ["correctness", "format", "length"]


def test_every_figure_of_a_report_is_light_with_its_legend_above(spec):
    records = make_records(spec, 14)
    write_steps(records[1])
    gallery = build_gallery(Sweep(spec, records))
    assert {"pairs", "progress", "training"} <= set(gallery)
    for name, draw in gallery.items():
        layout = draw().layout
        assert (layout.paper_bgcolor, layout.legend.orientation) == (style.PAPER, "h"), name


def test_a_legend_names_each_thing_once(spec):
    rung = Rung(2, make_records(spec, 1)[-1].validation, Cost(2))
    records = [
        replace(r, rungs=(rung, rung)) if r.is_training else r for r in make_records(spec, 14)
    ]
    gallery = build_gallery(Sweep(spec, records))
    assert {"pairs", "progress", "rungs"} <= set(gallery)
    for title, draw in gallery.items():
        traces = [trace for trace in draw().data if trace.type == "scatter"]
        names = [trace.name for trace in traces if trace.showlegend is not False]
        assert len(names) == len(set(names)), title
        if title == "progress":
            assert set(names) == {trace.name for trace in traces} - {None}


def test_learning_curves_are_running_means(front):
    steps = {1: [measured(n, {"train/rewards/format/mean": float(n)}) for n in range(1, 8)]}
    figure = draw_learning(front, steps)
    assert list(figure.data[0].y) == [1, 1.5, 2, 2.5, 3, 4, 5]


def test_a_large_sweep_draws_a_limited_number_of_curves_and_the_front_among_them(tmp_path):
    spec = make_spec(tmp_path)
    front = build_front(make_records(spec, 90), spec.list_objectives())
    one = [measured(1, {"train/rewards/format/mean": 1.0})]
    figure = draw_learning(front, {record.number: one for record in front.records})
    names = {trace.name for trace in figure.data if trace.name.startswith("trial")}
    assert len(names) == MAX_CURVES
    assert {f"trial {member.first}" for member in front.members} <= names


# Constraints


def test_a_constraint_is_a_line_where_it_can_be_seen(front):
    inside = draw_pairs(front, {"correctness": Constraint(op=">=", bound=0.5)})
    assert [line.x0 for line in inside.layout.shapes if line.x0 == line.x1] == [0.5, 0.5]
    outside = draw_pairs(front, {"correctness": Constraint(op=">=", bound=-3.0)})
    assert not outside.layout.shapes


# Slices and rungs


def test_slices_show_every_configuration_once_a_panel(spec, front):
    figure = draw_slices(front, spec.space.dimensions)
    trained = sum(c.role != "untrained" for c in front.configurations)
    panels = {(trace.xaxis, trace.yaxis) for trace in figure.data}
    assert len(panels) == 9
    assert sum(len(trace.x) for trace in figure.data) == 9 * trained


def test_a_cross_where_a_trial_was_stopped(front):
    rungs = tuple(
        Rung(step, {goal.name: Estimate(0.1 * step, 0.01) for goal in front.objectives}, Cost(step))
        for step in (2, 4)
    )
    stopped = replace(front.records[3], state="pruned", rungs=rungs)
    curves = draw_rungs(replace(front, records=(stopped,))).data
    assert [tuple(curve.y) for curve in curves] == [(0.2, 0.4)] * 3
    assert [curve.marker.symbol[-1] for curve in curves] == ["x"] * 3


# Completions


def test_completions_are_kept_short_and_shown_as_text(front):
    breaks = "\N{LINE SEPARATOR}\N{NEXT LINE}\v\r\n"
    long = "<script>alert(1)</script>" + breaks + "!" * 5000
    said = shorten_completion("?" * 5000, long, {"correctness": 1.0})
    assert max(len(said.prompt), len(said.completion)) == LONGEST_TEXT + 1
    assert build_completions(front) == ""
    directory = front.members[0].numbers[0]
    write_completions(front.records[directory].directory, [said])
    assert read_completions(front.records[directory].directory) == [said]
    shown = build_completions(front)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" + breaks + "!!!" in shown
    assert "<script>" not in shown
    assert "correctness 1" in shown
    assert "Not shown, or without kept completions: " in shown
    write_completions(front.records[0].directory, [said])
    head = build_completions(front).partition("</thead>")[0]
    assert head.index("untrained policy") < head.index(title_candidate(front.members[0].name))


@pytest.mark.parametrize("line", ['{"prompt": ', '{"prompt": "?"}', "7"])
def test_a_line_that_holds_no_completion_is_told(tmp_path, line):
    write_completions(tmp_path, [shorten_completion("?", "!", {})])
    with (tmp_path / COMPLETIONS_FILE).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UsageError, match=f"{COMPLETIONS_FILE}:2: this line holds no completion"):
        read_completions(tmp_path)


def test_an_interval_is_coloured_only_if_it_is_told_apart():
    ends = {"apart": (0.2, 0.6), "unclear": (-0.1, 0.3), "unknown": (-math.inf, math.inf)}
    values = {"apart": 0.4, "unclear": 0.1, "unknown": math.nan}
    contrasts = [
        Contrast(
            name, "x", "y", "a", values[name], Interval(*ends[name]), 0 if name == "apart" else 7
        )
        for name in ends
    ]
    (points,) = draw_effects(Effects(tuple(contrasts))).data
    colors = dict(zip(points.y, points.marker.color, strict=True))
    assert colors["apart: x to y"] == style.REWARDS[0]
    assert {colors["unclear: x to y"], colors["unknown: x to y"]} == {style.FAINT}
    words = dict(zip(points.y, points.text, strict=True))
    assert words["apart: x to y"] == "y above x in a by 0.400 (0.200 to 0.600)"
    assert words["unclear: x to y"].startswith("cannot be told apart: -0.100 to 0.300")
    assert words["unknown: x to y"].endswith("7 more trainings would tell")
    reaches = dict(zip(points.y, points.error_x.array, strict=True))
    assert reaches["apart: x to y"] == pytest.approx(0.2)
