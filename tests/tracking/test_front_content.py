"""The front as content of the runs of a sweep."""

import csv
import io

import pytest

from gdpo_tune.core.trials import Cost, Part
from gdpo_tune.figures import style
from gdpo_tune.tracking.front_content import build_front_content
from gdpo_tune.tracking.views import Site
from tests.support.tracking import make_complete_trial, make_running_trial, make_tiny_spec


def project_front(spec, records):
    return build_front_content(spec, records, Site("", "1", "p"), 1)


def ranks_of(front):
    return values_of(front, "pareto/rank")


def values_of(front, name):
    return {n: content.values.get(name, (None,))[0] for n, content in front.trials.items()}


def registered(front):
    return {"name": "tiny", "versions": front.versions}


def test_ranks_and_tags(tmp_path):
    records = [
        make_complete_trial(0, 0.9, 0.1),
        make_complete_trial(1, 0.5, 0.5),
        make_complete_trial(2, 0.4, 0.4),
        make_running_trial(3),
        make_complete_trial(4, 0.95, 0.95, role="untrained"),
        make_complete_trial(5, 0.99, 0.99, feasible=False),
    ]
    front = project_front(make_tiny_spec(tmp_path), records)
    assert ranks_of(front) == {0: 0, 1: 0, 2: 1, 3: None, 4: None, 5: None}
    tags = {number: content.tags for number, content in front.trials.items()}
    assert {number for number, t in tags.items() if t["pareto"] == "true"} == {0, 1}
    assert front.sweep.values["pareto/size"] == (2, 1)
    colors = {number: t["mlflow.runColor"] for number, t in tags.items()}
    assert colors[0] == colors[1] == style.MODES["gdpo"].color
    assert colors[2] == colors[3] == colors[5] == "#a6cee4"
    assert colors[4] == style.INK


@pytest.mark.parametrize("private", [False, True])
def test_a_note_names_the_report_where_it_is(tmp_path, private):
    spec = make_tiny_spec(tmp_path)
    spec = spec.model_copy(
        update={"tracking": spec.tracking.model_copy(update={"private": private})}
    )
    note = project_front(spec, []).sweep.tags["mlflow.note.content"]
    assert ("Artifacts: `report.html`" in note) != private
    assert ("in the sweep's directory" in note) == private


def test_a_replicate_shares_its_configurations_place(tmp_path):
    again = make_complete_trial(1, 0.5, 0.5, role="replicate", replicate_of=0)
    records = [make_complete_trial(0, 0.7, 0.3), again, make_complete_trial(2, 0.3, 0.2)]
    assert ranks_of(project_front(make_tiny_spec(tmp_path), records)) == {0: 0, 1: 0, 2: 1}


def test_the_front_has_an_order_and_the_knee_a_mark(tmp_path):
    records = [
        make_complete_trial(0, 0.9, 0.1),
        make_complete_trial(1, 0.1, 0.9),
        make_complete_trial(2, 0.7, 0.6),
        make_complete_trial(3, 0.7, 0.6, role="replicate", replicate_of=2),
        make_complete_trial(4, 0.6, 0.5),
        make_complete_trial(5, 0.95, 0.95, role="untrained"),
    ]
    front = project_front(make_tiny_spec(tmp_path), records)
    assert values_of(front, "pareto/order") == {2: 1, 3: 2, 0: 3, 1: 4, 4: 1000, 5: None}
    names = {number: content.tags["mlflow.runName"] for number, content in front.trials.items()}
    assert names == {
        0: "trial-000 gdpo",
        1: "trial-001 gdpo",
        2: "trial-002 gdpo, knee",
        3: "trial-003 gdpo, knee",
        4: "trial-004 gdpo",
        5: "trial-005 untrained",
    }


def test_hypervolume_has_a_point_for_each_trial_at_its_end(tmp_path):
    records = [
        make_complete_trial(0, 0.5, 0.5),
        make_complete_trial(1, 0.2, 0.2),
        make_complete_trial(2, 1.0, 0.5),
    ]
    front = project_front(make_tiny_spec(tmp_path), records)
    assert front.sweep.curves == [
        ("hypervolume", 0.25, 2_000_000, 0),
        ("hypervolume", 0.25, 2_001_000, 1),
        ("hypervolume", 0.5, 2_002_000, 2),
    ]


def test_the_table_holds_the_front(tmp_path):
    records = [
        make_complete_trial(0, 0.5, 0.75),
        make_complete_trial(1, 0.9, 0.25),
        make_complete_trial(2, 0.1, 0.1),
    ]
    files = project_front(make_tiny_spec(tmp_path), records).sweep.files
    rows = list(csv.DictReader(io.StringIO(files["front.csv"])))
    assert [row["trial"] for row in rows] == ["1", "0"]
    assert rows[0]["correctness"] == "0.9"
    assert rows[0]["length_se"] == "0.02"
    assert rows[0]["normalization"] == "gdpo"
    assert rows[0]["seeds"] == "1"


def test_no_trial_yet(tmp_path):
    front = project_front(make_tiny_spec(tmp_path), [])
    assert front.trials == {}
    assert front.sweep.curves == []
    assert front.sweep.values == {}
    assert "0 trials complete" in front.sweep.tags["mlflow.note.content"]


def test_versions_in_the_registry(tmp_path):
    records = [
        make_complete_trial(0, 0.9, 0.1, checkpoint=tmp_path / "checkpoint-40"),
        make_complete_trial(1, 0.5, 0.5),
        make_complete_trial(2, 0.7, 0.4),
        make_complete_trial(3, 0.1, 0.1),
    ]
    front = project_front(make_tiny_spec(tmp_path), records)
    assert registered(front)["name"] == "tiny"
    versions = {version["trial"]: version for version in registered(front)["versions"]}
    assert {trial: v["aliases"] for trial, v in versions.items()} == {
        "0": ["max_correctness"],
        "1": ["max_length"],
        "2": ["knee"],
    }
    tags = versions["0"]["tags"]
    assert (tags["correctness"], tags["correctness_se"]) == ("0.9", "0.01")
    assert tags["checkpoint"] == str(tmp_path / "checkpoint-40")
    assert tags["provisional"] == "true"
    files = read_files(front)
    assert set(files) == {"0", "1", "2"}
    assert set(files["0"]) == {"policy/README.md", "policy/MLmodel"}
    assert all(str(tmp_path / "checkpoint-40") in text for text in files["0"].values())
    assert set(files["1"]) == {"policy/README.md"}, "its checkpoint was not kept"


def read_files(front):
    return {str(number): files for number, files in front.policies.items()}


def make_candidates(directory):
    """Return two trainings, a checkpoint and a merge, all on the front."""
    evaluated = Cost(0, 1.0, 1.5, evaluation_completions=256)
    parts = (Part(0, 40, 0.5), Part(1, 40, 0.5))
    policies = [directory / "trials" / str(n) / f"checkpoint-{s}" for n, s in ((0, 40), (3, 0))]
    return [
        make_complete_trial(0, 0.9, 0.1, checkpoint=policies[0]),
        make_complete_trial(1, 0.1, 0.9),
        make_complete_trial(
            2, 0.95, 0.05, role="checkpoint", parts=(Part(0, 20, 1.0),), cost=evaluated
        ),
        make_complete_trial(
            3,
            0.6,
            0.6,
            role="merge",
            params={},
            parts=parts,
            cost=evaluated,
            checkpoint=policies[1],
        ),
    ]


def test_checkpoints_and_merges_are_registered_with_their_policies(tmp_path):
    front = project_front(make_tiny_spec(tmp_path), make_candidates(tmp_path))
    versions = {version["trial"]: version for version in registered(front)["versions"]}
    assert {trial: v["tags"]["candidate"] for trial, v in versions.items()} == {
        "0": "0",
        "1": "1",
        "2": "0@20",
        "3": "merge-3",
    }
    assert versions["3"]["aliases"] == ["knee"]
    assert versions["3"]["tags"]["parts"] == "0.5 x 0@40 + 0.5 x 1@40"
    assert versions["3"]["tags"]["checkpoint"] == str(tmp_path / "trials" / "3" / "checkpoint-0")
    files = {run: texts["policy/README.md"] for run, texts in read_files(front).items()}
    assert "merge-3 --to mergekit" in files["3"]
    assert "gdpo_tune.train --from" in files["3"]  # a merge trains on from its own weights
    assert "runs/tiny:0@20" in files["2"]


def test_shares_and_costs_of_each_kind_are_metrics(tmp_path):
    front = project_front(make_tiny_spec(tmp_path), make_candidates(tmp_path))
    values = {name: value for name, (value, _) in front.sweep.values.items()}
    # .9 x .1 + .1 x .8, then .05 x .05, then .5 x .5
    total = 0.17 + 0.0025 + 0.25
    assert values["origin/ends/share"] == pytest.approx(0.17 / total)
    assert values["origin/checkpoints/share"] == pytest.approx(0.0025 / total)
    assert values["origin/merges/share"] == pytest.approx(0.25 / total)
    assert values["origin/ends/completions"] == 5120
    assert values["origin/merges/evaluation_completions"] == 256
    assert values["origin/merges/cpu_seconds"] == 1.5
    tags = front.sweep.tags
    assert "- merges add 59 % of the hypervolume" in tags["mlflow.note.content"]
    alone = project_front(make_tiny_spec(tmp_path), make_candidates(tmp_path / "x")[:2])
    assert not any(name.startswith("origin") for name in alone.sweep.values)


def test_candidates_have_the_colours_of_their_marks(tmp_path):
    front = project_front(make_tiny_spec(tmp_path), make_candidates(tmp_path))
    colors = {number: m.tags["mlflow.runColor"] for number, m in front.trials.items()}
    assert colors[2] == style.CANDIDATES["checkpoint"][1].color
    assert colors[3] == style.CANDIDATES["merge"][1].color
    table = front.sweep.files["front.csv"]
    rows = {row["name"]: row for row in csv.DictReader(io.StringIO(table))}
    assert rows["merge-3"]["parts"] == "0.5 x 0@40 + 0.5 x 1@40"
    assert rows["merge-3"]["trial"] == "3"
    assert rows["0@20"]["role"] == "checkpoint"


def test_the_alias_of_an_objective_that_is_minimized(tmp_path):
    goal = "objectives.correctness={direction: minimize, reference: 1}"
    records = [make_complete_trial(0, 0.9, 0.9), make_complete_trial(1, 0.2, 0.5)]
    models = registered(project_front(make_tiny_spec(tmp_path, goal), records))
    aliases = {version["trial"]: version["aliases"] for version in models["versions"]}
    assert "min_correctness" in aliases["1"]
