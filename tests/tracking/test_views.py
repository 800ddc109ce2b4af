"""Preset views of MLflow: their content, and that they fit into a tag."""

import json

import pytest

from gdpo_tune.tracking import views
from tests.support.tracking import make_tiny_spec

LONGEST_TAG = 20_000
"""Characters that MLflow takes."""


SITE = views.Site("", "9" * 18, "f" * 32)
GOALS = ("correctness", "format", "length", "pass@2", "bugs", "mean_length", "cpu_seconds")


def with_objectives(spec, goals):
    objective = spec.objectives["correctness"]
    return spec.model_copy(update={"objectives": dict.fromkeys(goals, objective)})


def views_of(spec):
    tags = views.build_experiment_tags(spec, SITE, 1000)
    entries = {name: text for name, text in tags.items() if "sharedViewState" in name}
    return {
        name.rpartition("-")[2]: json.loads(json.loads(text)["state"])
        for name, text in entries.items()
    }


def charts(state, kind):
    return [chart for chart in state["compareRunCharts"] if chart["type"] == kind]


@pytest.fixture
def states(tmp_path):
    return views_of(make_tiny_spec(tmp_path))


def test_runs_are_the_sweeps_and_the_front_comes_first(states):
    for view in ("trials", "front"):
        assert SITE.parent in states[view]["searchFilter"]
        assert states[view]["orderByKey"] == "metrics.`pareto/order`"
        assert states[view]["orderByAsc"] is True
    assert "pareto" not in states["trials"]["searchFilter"]
    assert "tags.pareto = 'true'" in states["front"]["searchFilter"]


def test_pairs_of_objectives_parameters_and_learning_curves(states):
    """mlflow#6034: the axes are those of the report, whose first objective is across."""
    (scatter,) = charts(states["trials"], "SCATTER")
    assert (scatter["xaxis"]["key"], scatter["yaxis"]["key"]) == (
        "test/correctness",
        "test/length",
    )
    (parallel,) = charts(states["front"], "PARALLEL")
    assert parallel["selectedParams"] == ["learning_rate"]
    assert parallel["selectedMetrics"] == ["test/correctness", "test/length"]
    lines = [chart["metricKey"] for chart in charts(states["front"], "LINE")]
    assert lines == ["validation/correctness", "validation/length"]


def test_curves_by_mode_have_a_line_for_each_mode(states):
    modes = states["modes"]
    assert modes["groupBy"]["groupByKeys"] == [{"mode": "tag", "groupByData": "normalization"}]
    assert modes["useGroupedValuesInCharts"] is True
    assert "tags.normalization != ''" in modes["searchFilter"]
    lines = [chart["metricKey"] for chart in charts(modes, "LINE")]
    assert lines[:2] == ["validation/correctness", "validation/length"]
    assert "train/rewards/correctness/mean" in lines


def test_charts_have_different_titles_and_lie_in_sections_that_are_open(states):
    for state in states.values():
        titles = [chart["metricKey"] for chart in charts(state, "LINE")]
        uuids = [chart["uuid"] for chart in state["compareRunCharts"]]
        for names in (titles, uuids):
            assert len(set(names)) == len(names)
        shown = {s["uuid"] for s in state["compareRunSections"] if s["display"]}
        assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} == shown


def test_no_view_opens_the_charts_that_mlflow_adds(states):
    groups = ["train", "train/rewards/correctness", "train/clip_ratio", "train/completions"]
    groups += ["train/sampling/sampling_logp_difference", "validation", "test", "cost", "pareto"]
    for state in states.values():
        sections = {section["name"]: section["display"] for section in state["compareRunSections"]}
        assert [sections[group] for group in [*groups, "origin/merges"]] == [False] * 10


def test_names_are_those_that_metrics_have_in_mlflow(tmp_path):
    front = views_of(with_objectives(make_tiny_spec(tmp_path), ("pass@4", "length")))["front"]
    (scatter,) = charts(front, "SCATTER")
    assert scatter["xaxis"]["key"] == "test/pass_4"
    assert "validation/pass_4" in [chart["metricKey"] for chart in charts(front, "LINE")]


@pytest.mark.parametrize("goals", [2, 3, 7])
def test_many_objectives_and_parameters_fit(tmp_path, goals):
    space = {
        "normalization": ["gdpo", "grpo"],
        "group_size": [4, 8],
        "learning_rate": {"log": [1e-5, 1e-3]},
        "temperature": {"range": [0.7, 1.2]},
        "beta": {"range": [0.0, 0.1]},
        "reward_weights": {name: {"log": [0.1, 2]} for name in ("correctness", "format", "length")},
    }
    spec = with_objectives(make_tiny_spec(tmp_path, f"space={json.dumps(space)}"), GOALS[:goals])
    for text in views.build_experiment_tags(spec, SITE, 1000).values():
        assert len(text) <= LONGEST_TAG


def test_a_link_opens_a_view_of_this_sweep():
    uri = "http://me:secret@host:5000/mlflow/"
    link = views.Site(uri, "3", "abc").build_link("front")
    assert link == (
        "http://host:5000/mlflow/#/experiments/3/runs?workflowType=machine_learning"
        "&viewStateShareKey=abc-front&compareRunsMode=CHART"
    )
    link = views.Site("sqlite:///mlflow.db", "3", "abc").build_link("front")
    assert link.startswith("#/experiments/3/")


def test_the_note_of_an_experiment_keeps_other_lines():
    others = "Ours: see the wiki.\n\n- **b**: (x-b-trials)"
    note = views.merge_note(others, "- **a**: (x-a-trials)", "x-a-")
    assert note == "Ours: see the wiki.\n\n- **b**: (x-b-trials)\n- **a**: (x-a-trials)"
    assert views.merge_note(note, "- **a**: new (x-a-trials)", "x-a-") == (
        "Ours: see the wiki.\n\n- **b**: (x-b-trials)\n- **a**: new (x-a-trials)"
    )
    assert views.merge_note("", "- **a**", "x-a-") == "- **a**"
