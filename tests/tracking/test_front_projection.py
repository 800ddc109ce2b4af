"""The front as content of the runs of a sweep."""

import csv
import io

from gdpo_tune.figures import style
from gdpo_tune.tracking.front_projection import project_front
from gdpo_tune.tracking.run_content import SWEEP
from tests.support.tracking import make_complete_trial, make_running_trial, make_tiny_spec


def ranks_of(front):
    points = {number: message["metrics"] for number, message in front.trials.items()}
    return {number: p[0][1] if p else None for number, p in points.items()}


def metric(front, name):
    return [p for message in front.sweep for p in message.get("metrics", ()) if p[0] == name]


def registered(front):
    (models,) = [message["models"] for message in front.final if "models" in message]
    return models


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
    tags = {number: message["tags"] for number, message in front.trials.items()}
    assert {number for number, t in tags.items() if t["pareto"] == "true"} == {0, 1}
    assert metric(front, "pareto/size") == [["pareto/size", 2, None, 0]]
    colors = {number: t["mlflow.runColor"] for number, t in tags.items()}
    assert colors[0] == colors[1] == style.MODES["gdpo"].color
    assert colors[2] == colors[3] == colors[5] == "#a6cee4"
    assert colors[4] == style.INK


def test_a_replicate_shares_its_configurations_place(tmp_path):
    again = make_complete_trial(1, 0.5, 0.5, role="replicate", replicate_of=0)
    records = [make_complete_trial(0, 0.7, 0.3), again, make_complete_trial(2, 0.3, 0.2)]
    assert ranks_of(project_front(make_tiny_spec(tmp_path), records)) == {0: 0, 1: 0, 2: 1}


def test_hypervolume_has_a_point_for_each_trial_at_its_end(tmp_path):
    records = [
        make_complete_trial(0, 0.5, 0.5),
        make_complete_trial(1, 0.2, 0.2),
        make_complete_trial(2, 1.0, 0.5),
    ]
    front = project_front(make_tiny_spec(tmp_path), records)
    assert metric(front, "hypervolume") == [
        ["hypervolume", 0.25, 2_000_000, 0],
        ["hypervolume", 0.25, 2_001_000, 1],
        ["hypervolume", 0.5, 2_002_000, 2],
    ]


def test_the_table_holds_the_front(tmp_path):
    records = [
        make_complete_trial(0, 0.5, 0.75),
        make_complete_trial(1, 0.9, 0.25),
        make_complete_trial(2, 0.1, 0.1),
    ]
    artifact = project_front(make_tiny_spec(tmp_path), records).sweep[-1]["artifact"]
    assert artifact["name"] == "front.csv"
    rows = list(csv.DictReader(io.StringIO(artifact["text"])))
    assert [row["trial"] for row in rows] == ["1", "0"]
    assert rows[0]["correctness"] == "0.9000"
    assert rows[0]["length_se"] == "0.0200"
    assert rows[0]["normalization"] == "gdpo"
    assert rows[0]["seeds"] == "1"


def test_no_trial_yet(tmp_path):
    front = project_front(make_tiny_spec(tmp_path), [])
    assert front.trials == {}
    assert metric(front, "hypervolume") == []
    assert metric(front, "pareto/size") == []
    (tags,) = [message["tags"] for message in front.sweep if "tags" in message]
    assert "0 trials complete" in tags["mlflow.note.content"]


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
    files = {m["run"]: m["artifact"]["text"] for m in front.final if m["run"] != SWEEP}
    assert set(files) == {"0", "1", "2"}
    assert "checkpoint-40" in files["0"]


def test_the_alias_of_an_objective_that_is_minimized(tmp_path):
    goal = "objectives.correctness={direction: minimize, reference: 1}"
    records = [make_complete_trial(0, 0.9, 0.9), make_complete_trial(1, 0.2, 0.5)]
    models = registered(project_front(make_tiny_spec(tmp_path, goal), records))
    aliases = {version["trial"]: version["aliases"] for version in models["versions"]}
    assert "min_correctness" in aliases["1"]
