"""The text of --dry-run, its warnings, and the sampler that `auto` picks."""

import dataclasses
import json
import os
from difflib import get_close_matches

import pytest

from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.redaction import redact_passwords
from gdpo_tune.core.task_info import UNKNOWN_RANGE
from gdpo_tune.spec import load_spec, machine
from gdpo_tune.spec.dry_run import describe_time, render_dry_run
from gdpo_tune.spec.gpu import choose_sampler
from gdpo_tune.spec.machine import list_sandbox_warnings
from gdpo_tune.spec.spec_warnings import list_warnings
from gdpo_tune.tasks import code
from gdpo_tune.tuning.proposals import SamplerView
from tests.support.paths import ROOT
from tests.support.spec_cases import DRY_RUN, WARNINGS
from tests.support.tuning import load_code_spec


@pytest.mark.parametrize("case", DRY_RUN)
def test_dry_run(case, load):
    overrides, expected, completions = DRY_RUN[case]
    spec = load(*overrides)
    text = render_dry_run(spec)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert {x: get_close_matches(x, lines, 1) for x in expected if x not in lines} == {}
    head = "# Completions, " + ("as planned" if spec.search.is_divided else "at most")
    begin = lines.index(head) + 1
    if completions is not None:
        assert lines[begin : lines.index("", begin)] == completions
    assert ("# Start" in text) == (spec.start is not None)
    assert spec.dump_yaml().rstrip() in text
    assert f"# Identity: {spec.compute_identity()} (kept in runs/sweep)" in lines


@pytest.mark.parametrize(
    ("changes", "cpus", "time"),
    [
        ([], None, "at most 1 h 21 min of one trial at a time, at the pace of like_it"),
        ([], 4, "at most 20 min 15 s, 4 at a time, at the pace of like_it"),
        (["resources={gpus: 1, cpus: 2}"], None,
         "at most 1 h 21 min of one trial at a time, 1.35 GPU-hours, at the pace of like_it"),
        (["search={trials: 0, scheduler: {type: halving}, budget: {hours: 2}}"], None,
         "until the budget is spent; 0.5 s a completion, as in like_it"),
    ],
)  # fmt: skip
def test_time_is_that_of_the_last_sweep_like_it(load, tmp_path, monkeypatch, changes, cpus, time):
    if cpus is None:
        monkeypatch.setenv("RAY_ADDRESS", "cluster:6379")  # nobody knows how many trials fit there
    else:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(machine, "count_local_cpus", lambda: cpus)
    planned = ["training={steps: 10, completions_per_step: 64, evaluate_every: 4}"]
    planned += ["training.validation_prompts=100", "training.test_prompts=200"]
    planned += ["search={replicates: {max_runs: 3}, merges: {budget: 2}, checkpoints: {budget: 1}}"]
    planned += ["search.trials=5", f"storage={tmp_path}", *changes]
    for age, name, seconds, change in (
        (3, "older", 900, "search.seed=1"),
        (2, "like_it", 500, "search.seed=2"),
        (1, "of_longer_answers", 9_000, "training.max_completion_length=99"),
    ):
        trial = tmp_path / name / "trials" / "0"
        trial.mkdir(parents=True)
        file = tmp_path / name / SPEC
        file.write_text(load(*planned, change).dump_yaml())
        os.utime(file, (2e9 - age, 2e9 - age))
        cost = {"completions": 640, "evaluation_completions": 1_200, "seconds": seconds}
        line = json.dumps({"step": 10, "metrics": {}, "cost": cost})
        (trial / "steps.jsonl").write_text(line + "\n")
    # Work: 5,760 completions in training, and .3 x 13,200 in evaluation = 9,720 units, as in the
    # case "evaluations"; the sweep like it took 500 s for 640 + .3 x 1,200 = 1,000.
    assert f"# Time: {time}" in render_dry_run(load(*planned)).splitlines()
    assert describe_time(load(*planned, "task=math")).startswith("unknown before a first sweep")


def test_passwords_are_not_shown(load):
    spec = load("tracking.uri=postgresql://me:secret@host/db")
    text = render_dry_run(spec)
    assert "postgresql://me:***@host/db" in text
    assert "secret" not in text
    assert "me:secret@host" in spec.dump_yaml()  # the ledger's copy must load again
    for shown in ("http://host:5000/a@b", "tracking.uri=https://host:5000/a@b"):
        assert redact_passwords(shown) == shown
    assert redact_passwords("x=https://me:pw@host/a@b") == "x=https://me:***@host/a@b"


@pytest.mark.parametrize(
    ("resources", "is_sharded"),
    [
        ("{}", False),
        ("{workers: 2}", True),
        ("{workers: 2, sharding: full}", True),
        ("{workers: 2, sharding: none}", False),
    ],
)
def test_the_workers_of_a_trial_share_its_policy_unless_asked_otherwise(
    load, tmp_path, resources, is_sharded
):
    spec = load(f"resources={resources}")
    assert spec.build_trial_config({}, 0, tmp_path).sharded == is_sharded


@pytest.mark.parametrize("task", ["code", "math", "tools"])
def test_the_sweeps_that_ship_for_embedded_policies_have_no_warning(task):
    assert list_warnings(load_spec(ROOT / "search_spaces" / f"{task}.yaml")) == []


@pytest.mark.parametrize("case", WARNINGS)
def test_warnings(case, load):
    overrides, expected = WARNINGS[case]
    assert list_warnings(load(*overrides)) == expected


@pytest.mark.parametrize(
    ("settings", "room", "parallel"),
    [
        ("{workers: 2}", 2048, None),
        ("{workers: 3}", 2048, 2),
        ("{workers: 9, memory_mb: 1500}", 2048, 1),
        ("{workers: 1, memory_mb: 2048}", 2048, None),
        ("{workers: 2, memory_mb: 2049}", 2048, None),  # refused, hence not doubted as well
        ("{workers: 9}", None, None),
    ],
)
def test_warnings_of_memory(settings, room, parallel, load, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine, "read_machine_memory", lambda: room and room << 20)
    spec = load(f"sandbox={settings}")
    expected = parallel and (
        f"sandbox.workers = {spec.sandbox.workers}: {parallel} at a time will run, because each "
        f"may use {spec.sandbox.memory_mb} MiB and candidates get 50% of the 2048 MiB that this "
        f"machine has. Write workers: {parallel}, or lower sandbox.memory_mb."
    )
    assert list_warnings(spec) == [*list_sandbox_warnings(spec)] == ([expected] if parallel else [])
    monkeypatch.setenv("RAY_ADDRESS", "ray://cluster:10001")  # a cluster is another machine
    assert not [*list_sandbox_warnings(spec)]


WEIGHTS = "space.reward_weights={correctness: 1, format: 1, length: 1}"


@pytest.mark.parametrize(
    ("rewards", "overrides", "doubt"),
    [
        ({"correctness": (-3, 3)}, [WEIGHTS], "span different widths (correctness 6, format 1, "),
        ({"correctness": (-3, 3)}, [], ""),
        ({"correctness": (-3, 3)}, [WEIGHTS, "space.normalization=gdpo", "search.trials=2"], ""),
        ({"correctness": (0, 3), "length": UNKNOWN_RANGE}, [WEIGHTS],
         "span different widths (correctness 3, format 1, length unknown). Under grpo only weight"),
        ({"length": UNKNOWN_RANGE}, [WEIGHTS],
         "may span different widths (correctness 1, format 1, length unknown)"),
        ({"correctness": (-3.0, 3.0)}, ["space.conditioning.correctness=format"],
         "space.conditioning.correctness: an unmet condition gives correctness 0, and its lowest "
         "value is -3: a completion may gain by failing. Condition rewards that start at 0."),
    ],
)  # fmt: skip
def test_warnings_of_the_ranges_of_rewards(load, monkeypatch, rewards, overrides, doubt):
    changed = dataclasses.replace(code.TASK, rewards={**code.TASK.rewards, **rewards})
    monkeypatch.setattr(code, "TASK", changed)
    if "span" in doubt:
        doubt = f"space.reward_weights: fixed, while rewards {doubt}"
    found = list_warnings(load(*overrides))
    assert len(found) == bool(doubt)
    assert all(warning.startswith(doubt) for warning in found)


CHOICES = (
    "space.learning_rate=[1.0e-4, 2.0e-4]",
    "space.reward_weights={correctness: 1, format: [0.5, 1], length: [0.5, 1]}",
)


@pytest.mark.parametrize(
    ("overrides", "slots", "name", "why"),
    [
        ((), None, "gp", "16 trials of 5 parameters and 3 objectives: small enough"),
        ((), 8, "gp", "small enough"),
        ((), 16, "qmc", "all 16 trials run side by side"),
        (("search.trials=300",), 2, "gp", "300 trials"),
        (("search.trials=301",), 2, "tpe", "301 trials takes many seconds"),
        (("search.trials=301", "search.budget.trials=40"), 2, "gp", "40 trials"),
        (("search.trials=301", "search.budget.completions=38400"), 2, "gp", "10 trials"),
        (("objectives.mean_length={direction: minimize, reference: 64}",), 2, "tpe",
         "4 objectives are too many"),
        (CHOICES, 2, "tpe", "every parameter is a choice"),
        (("search.trials=100",), 32, "gp", "100 trials"),
        (("search.trials=100",), 33, "tpe", "33 slots would wait"),
        (("search.sampler=tpe",), 2, "tpe", "as requested"),
    ],
)  # fmt: skip
def test_auto_picks_by_what_is_asked_and_says_why(tmp_path, overrides, slots, name, why):
    spec = load_code_spec(tmp_path, overrides)
    chosen = choose_sampler(spec, slots)
    assert chosen.value == name
    assert why in chosen.why
    assert SamplerView(spec, slots).sampler == chosen


def test_trials_that_run_side_by_side_still_learn_from_an_earlier_sweep(tmp_path):
    spec = load_code_spec(tmp_path)
    warm = spec.search.model_copy(update={"warm_start": ("runs/code",)})
    assert choose_sampler(spec.model_copy(update={"search": warm}), 16).value == "gp"
