"""The front as content of the runs of a sweep."""

import csv
import io
import json

import pytest

from gdpo_tune.core.trials import Cost, Part
from gdpo_tune.figures import style
from gdpo_tune.tracking import views
from gdpo_tune.tracking.front_content import build_front_content
from gdpo_tune.tracking.views import Site
from tests.support.tracking import make_complete_trial, make_running_trial, make_tiny_spec


@pytest.fixture
def project(tmp_path):
    """Return a function that builds the content of a front."""

    def build(*records, overrides=(), **tracking):
        spec = make_tiny_spec(tmp_path, *overrides)
        spec = spec.model_copy(update={"tracking": spec.tracking.model_copy(update=tracking)})
        return build_front_content(spec, list(records), Site("", "1", "p"), 1)

    return build


def values_of(front, name):
    return {n: content.values.get(name, (None,))[0] for n, content in front.trials.items()}


def tags_of(front, name):
    return {n: content.tags[name] for n, content in front.trials.items()}


def read_table(front):
    return list(csv.DictReader(io.StringIO(front.sweep.files["front.csv"])))


def test_ranks_and_tags(project):
    front = project(
        make_complete_trial(0, 0.9, 0.1),
        make_complete_trial(1, 0.5, 0.5),
        make_complete_trial(2, 0.4, 0.4),
        make_running_trial(3),
        make_complete_trial(4, 0.95, 0.95, role="untrained"),
        make_complete_trial(5, 0.99, 0.99, feasible=False),
    )
    assert values_of(front, "pareto/rank") == {0: 0, 1: 0, 2: 1, 3: None, 4: None, 5: None}
    members = tags_of(front, "pareto")
    assert {number for number, text in members.items() if text == "true"} == {0, 1}
    assert front.sweep.values["pareto/size"] == (2, 1)
    mode, other = style.MODES["gdpo"].color, "#a6cee4"
    colors = {0: mode, 1: mode, 2: other, 3: other, 4: style.INK, 5: other}
    assert tags_of(front, "mlflow.runColor") == colors


@pytest.mark.parametrize("private", [False, True])
def test_a_note_names_the_report_where_it_is(project, private):
    note = project(private=private).sweep.tags["mlflow.note.content"]
    assert ("Artifacts: `report.html`" in note) != private
    assert ("in the sweep's directory" in note) == private


def test_a_replicate_shares_its_configurations_place(project):
    again = make_complete_trial(1, 0.5, 0.5, role="replicate", replicate_of=0)
    front = project(make_complete_trial(0, 0.7, 0.3), again, make_complete_trial(2, 0.3, 0.2))
    assert values_of(front, "pareto/rank") == {0: 0, 1: 0, 2: 1}


def test_the_front_has_an_order_and_the_knee_a_mark(project):
    front = project(
        make_complete_trial(0, 0.9, 0.1),
        make_complete_trial(1, 0.1, 0.9),
        make_complete_trial(2, 0.7, 0.6),
        make_complete_trial(3, 0.7, 0.6, role="replicate", replicate_of=2),
        make_complete_trial(4, 0.6, 0.5),
        make_complete_trial(5, 0.95, 0.95, role="untrained"),
    )
    assert values_of(front, "pareto/order") == {2: 1, 3: 2, 0: 3, 1: 4, 4: 1000, 5: None}
    names = {number: f"trial-00{number} gdpo" for number in range(5)}
    names |= {2: "trial-002 gdpo, knee", 3: "trial-003 gdpo, knee", 5: "trial-005 untrained"}
    assert tags_of(front, "mlflow.runName") == names


def test_hypervolume_has_a_point_for_each_trial_at_its_end(project):
    values = [(0.5, 0.5), (0.2, 0.2), (1.0, 0.5)]
    front = project(*(make_complete_trial(number, *value) for number, value in enumerate(values)))
    assert front.sweep.curves == [
        ("hypervolume", 0.25, 2_000_000, 0),
        ("hypervolume", 0.25, 2_001_000, 1),
        ("hypervolume", 0.5, 2_002_000, 2),
    ]


def test_the_table_holds_the_front(project):
    values = [(0.5, 0.75), (0.9, 0.25), (0.1, 0.1)]
    front = project(*(make_complete_trial(number, *value) for number, value in enumerate(values)))
    rows = read_table(front)
    assert [row["trial"] for row in rows] == ["1", "0"]
    first = {"correctness": "0.9", "length_se": "0.02", "normalization": "gdpo", "seeds": "1"}
    assert first.items() <= rows[0].items()


def test_no_trial_yet(project):
    front = project()
    assert (front.trials, front.sweep.curves, front.sweep.values) == ({}, [], {})
    assert "0 trials complete" in front.sweep.tags["mlflow.note.content"]


def test_versions_in_the_registry(project, tmp_path):
    checkpoint = tmp_path / "checkpoint-40"
    front = project(
        make_complete_trial(0, 0.9, 0.1, checkpoint=checkpoint),
        make_complete_trial(1, 0.5, 0.5),
        make_complete_trial(2, 0.7, 0.4),
        make_complete_trial(3, 0.1, 0.1),
    )
    versions = {version["trial"]: version for version in front.versions}
    aliases = {"0": ["max_correctness"], "1": ["max_length"], "2": ["knee"]}
    assert {trial: version["aliases"] for trial, version in versions.items()} == aliases
    tags = {"correctness": "0.9", "correctness_se": "0.01", "checkpoint": str(checkpoint)}
    assert {**tags, "provisional": "true"}.items() <= versions["0"]["tags"].items()
    assert {number: set(files) for number, files in front.policies.items()} == {
        0: {"policy/README.md", "policy/MLmodel"},
        **{n: {"policy/README.md"} for n in (1, 2)},  # their checkpoints were not kept
    }
    assert all(str(checkpoint) in text for text in front.policies[0].values())


def make_candidates(directory):
    """Return two trainings, a checkpoint and a merge, all on the front."""
    evaluated = Cost(0, 1.0, 1.5, evaluation_completions=256)
    parts = (Part(0, 40, 0.5), Part(1, 40, 0.5))
    policies = [directory / "trials" / str(n) / f"checkpoint-{s}" for n, s in ((0, 40), (3, 0))]
    return [
        make_complete_trial(0, 0.9, 0.1, checkpoint=policies[0]),
        make_complete_trial(1, 0.1, 0.9),
        make_complete_trial(
            *(2, 0.95, 0.05), role="checkpoint", parts=(Part(0, 20, 1.0),), cost=evaluated
        ),
        make_complete_trial(
            *(3, 0.6, 0.6),
            role="merge",
            params={},
            parts=parts,
            checkpoint=policies[1],
            cost=evaluated,
        ),
    ]


def test_checkpoints_and_merges_are_registered_with_their_policies(project, tmp_path):
    front = project(*make_candidates(tmp_path))
    versions = {version["trial"]: version for version in front.versions}
    names = {trial: version["tags"]["candidate"] for trial, version in versions.items()}
    assert names == {"0": "0", "1": "1", "2": "0@20", "3": "merge-3"}
    assert versions["3"]["aliases"] == ["knee"]
    assert versions["3"]["tags"]["parts"] == "0.5 x 0@40 + 0.5 x 1@40"
    assert versions["3"]["tags"]["checkpoint"] == str(tmp_path / "trials" / "3" / "checkpoint-0")
    files = {number: texts["policy/README.md"] for number, texts in front.policies.items()}
    assert "merge-3 --to mergekit" in files[3]
    assert "gdpo_tune.train --from" in files[3]  # a merge trains on from its own weights
    assert "runs/tiny:0@20" in files[2]
    assert f"gdpo_tune.export {tmp_path}/runs/tiny:0 --to trl" in files[0]
    colors = tags_of(front, "mlflow.runColor")
    assert colors[2] == style.CANDIDATES["checkpoint"][1].color
    assert colors[3] == style.CANDIDATES["merge"][1].color
    rows = {row["name"]: row for row in read_table(front)}
    assert rows["merge-3"]["parts"] == "0.5 x 0@40 + 0.5 x 1@40"
    assert (rows["merge-3"]["trial"], rows["0@20"]["role"]) == ("3", "checkpoint")


def test_shares_and_costs_of_each_kind_are_metrics(project, tmp_path):
    front = project(*make_candidates(tmp_path))
    values = {name: value for name, (value, _) in front.sweep.values.items()}
    # .9 x .1 + .1 x .8, then .05 x .05, then .5 x .5
    gains = {"ends": 0.17, "checkpoints": 0.0025, "merges": 0.25}
    for kind, gain in gains.items():
        share = gain / sum(gains.values())
        assert values[f"origin/{kind}/share"] == pytest.approx(share)
    assert values["origin/ends/completions"] == 5120
    assert values["origin/merges/evaluation_completions"] == 256
    assert values["origin/merges/cpu_seconds"] == 1.5
    note = front.sweep.tags["mlflow.note.content"]
    assert "- merges add 59 % of the hypervolume" in note
    alone = project(*make_candidates(tmp_path)[:2])
    assert not any(name.startswith("origin") for name in alone.sweep.values)


def test_the_alias_of_an_objective_that_is_minimized(project):
    goal = "objectives.correctness={direction: minimize, reference: 1}"
    records = [make_complete_trial(0, 0.9, 0.9), make_complete_trial(1, 0.2, 0.5)]
    versions = project(*records, overrides=[goal]).versions
    aliases = {version["trial"]: version["aliases"] for version in versions}
    assert "min_correctness" in aliases["1"]


# Preset views of MLflow: their content, and that they fit into a tag

LONGEST_TAG = 20_000
"""Characters that MLflow takes."""


SITE = views.Site("", "9" * 18, "f" * 32)
GOALS = ("correctness", "format", "length", "pass@2", "bugs", "mean_length", "cpu_seconds")


def with_objectives(spec, goals):
    objective = spec.objectives["correctness"]
    return spec.model_copy(update={"objectives": dict.fromkeys(goals, objective)})


def views_of(spec):
    tags = views.build_experiment_tags(spec, SITE, 1000)
    return {
        name.rpartition("-")[2]: json.loads(json.loads(text)["state"])
        for name, text in tags.items()
        if "sharedViewState" in name
    }


def charts(state, kind):
    return [chart for chart in state["compareRunCharts"] if chart["type"] == kind]


def list_lines(state):
    return [chart["metricKey"] for chart in charts(state, "LINE")]


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
    assert (scatter["xaxis"]["key"], scatter["yaxis"]["key"]) == ("test/correctness", "test/length")
    (parallel,) = charts(states["front"], "PARALLEL")
    assert parallel["selectedParams"] == ["learning_rate"]
    assert parallel["selectedMetrics"] == ["test/correctness", "test/length"]
    assert list_lines(states["front"]) == ["validation/correctness", "validation/length"]


def test_curves_by_mode_have_a_line_for_each_mode(states):
    modes = states["modes"]
    assert modes["groupBy"]["groupByKeys"] == [{"mode": "tag", "groupByData": "normalization"}]
    assert modes["useGroupedValuesInCharts"] is True
    assert "tags.normalization != ''" in modes["searchFilter"]
    lines = list_lines(modes)
    assert lines[:2] == ["validation/correctness", "validation/length"]
    assert "train/rewards/correctness/mean" in lines


def test_charts_have_different_titles_and_lie_in_sections_that_are_open(states):
    for state in states.values():
        uuids = [chart["uuid"] for chart in state["compareRunCharts"]]
        for names in (list_lines(state), uuids):
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
    assert "validation/pass_4" in list_lines(front)


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
