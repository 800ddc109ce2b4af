"""The plan: remaining points of `enqueue:`, and the number of trials."""

import json

import pytest

from gdpo_tune.core.events import RequestEffect
from gdpo_tune.core.trials import Cost, Estimate, Part, Rung, TrialRecord
from gdpo_tune.tuning import plan
from tests.support.tuning import load_code_spec, load_halving_spec

CONDITIONAL_SPACE = """
task: code
objectives:
  correctness: {direction: maximize, reference: 0}
  format: {direction: maximize, reference: 0}
space:
  normalization: [gdpo, grpo]
  group_size: [4, 8]
  learning_rate: {log: [3.0e-5, 3.0e-4]}
  beta: {range: [0.25, 0.75], when: {normalization: [gdpo]}}
"""


def list_enqueued(spec, records):
    """Add the trials that are planned up to the sampler's first; return what is enqueued."""
    while (found := plan.find_next_trial(spec, records)) is not None and found.params is not None:
        planned = (found.role, "failed", found.params, len(records), found.proposer)
        records.append(TrialRecord(len(records), *planned))
    return [record.params for record in records if record.proposer == "enqueued"]


@pytest.mark.parametrize("points", [[1e-4, 2e-4], [2e-4, 1e-4]])
def test_a_point_may_be_added_at_any_place_of_a_resumed_sweep(tmp_path, points):
    records = []
    for rates, tried in (([1e-4], [1e-4]), (points, [1e-4, 2e-4])):
        enqueued = json.dumps([{"learning_rate": rate, "group_size": 4} for rate in rates])
        spec = load_code_spec(tmp_path, [f"enqueue={enqueued}"])
        assert [params["learning_rate"] for params in list_enqueued(spec, records)] == tried
    assert plan.find_next_trial(spec, records) == plan.PlannedTrial("search", "model", None)


def test_a_value_without_effect_does_not_repeat_a_point(tmp_path):
    path = tmp_path / "conditional.yaml"
    path.write_text(CONDITIONAL_SPACE)
    spec = load_code_spec(tmp_path, [], path)
    spec = spec.model_copy(update={"enqueue": ({"normalization": "grpo", "beta": 0.5},)})
    assert [params["normalization"] for params in list_enqueued(spec, [])] == ["grpo"]


@pytest.mark.parametrize(("per_point", "max_runs", "replicates"), [(2, 8, 8), (0, 8, 0), (2, 0, 0)])
def test_replicates_that_are_impossible_are_not_planned(tmp_path, per_point, max_runs, replicates):
    setting = f"search.replicates={{per_point: {per_point}, max_runs: {max_runs}}}"
    spec = load_code_spec(tmp_path, ["search.trials=4", setting])
    assert plan.count_planned(spec, []) == 2 + 4 + replicates


NO_SIGNAL = "no signal: every advantage was 0"


DEAD, CRASHED = "failed", "crashed"


@pytest.mark.parametrize(
    ("ends", "trials", "is_dead"),
    [
        ([DEAD] * 3, 8, True),
        ([DEAD] * 2, 8, False),
        ([DEAD] * 2, 1, True),  # the published setting and the only other one
        ([DEAD, DEAD, DEAD, "running"], 8, True),  # which ends by itself
        ([DEAD, DEAD, DEAD, "complete"], 8, False),
        ([DEAD, DEAD, DEAD, "paused"], 8, False),
        ([DEAD, DEAD, DEAD, CRASHED], 8, True),
        ([CRASHED] * 3, 8, False),
    ],
)
def test_a_sweep_stops_if_its_first_trainings_have_no_signal(tmp_path, ends, trials, is_dead):
    """What no training learns from, no further one does."""
    spec = load_code_spec(tmp_path, [f"search.trials={trials}"])
    records = [TrialRecord(0, "untrained", "complete", {}, 0, "baseline")]
    for number, end in enumerate(ends, 1):
        state = DEAD if end == CRASHED else end
        reason = {DEAD: NO_SIGNAL, CRASHED: "out of memory"}.get(end, "")
        role = "published" if number == 1 else "search"
        records.append(TrialRecord(number, role, state, {}, number, "model", reason=reason))
    assert plan.find_dead_start(spec, records) == (records[1] if is_dead else None)
    if is_dead:
        assert plan.find_next_trial(spec, records) is None
        assert plan.explain_end(spec, records) == "no training had a signal"


@pytest.mark.parametrize(("se", "is_dead"), [(0.0, True), (0.1, False)])
def test_one_training_is_enough_if_the_untrained_policy_earned_the_same(tmp_path, se, is_dead):
    spec = load_code_spec(tmp_path, [])
    test = {
        "correctness": Estimate(0.0, 0.02, is_constant=True),
        "format": Estimate(0.1, se, is_constant=not se),
    }
    untrained = TrialRecord(0, "untrained", "complete", {}, 0, "baseline", test=test)
    first = TrialRecord(1, "published", "failed", {}, 1, "model", reason=NO_SIGNAL)
    assert (plan.find_dead_start(spec, [untrained, first]) == first) == is_dead


def test_the_seed_of_a_trial_follows_from_the_seed_of_the_search_and_its_number(tmp_path):
    spec, other = load_code_spec(tmp_path), load_code_spec(tmp_path, ["search.seed=1"])
    assert plan.derive_seed(spec, 3) == 996794743  # printf 0:3 | sha256sum, first 31 bits
    assert len({plan.derive_seed(s, n) for s in (spec, other) for n in range(100)}) == 200
    assert all(0 <= plan.derive_seed(spec, n) < 2**31 for n in range(100))


TRAINING = 60 * 64
"""Completions of a training; it costs two rungs of 256, and a test of 512."""
WORK = TRAINING + 0.3 * (2 * 256 + 512)
MERGE = 0.3 * (256 + 512 / 2)
"""Work of a merge, half of which get a test."""
WAITS = ("id", RequestEffect(parts=(Part(2, 60, 0.5), Part(3, 60, 0.5))))


@pytest.mark.parametrize(
    ("overrides", "states", "added", "work"),
    [
        ([], [], [], (5 + 6) * WORK),  # with the published setting, and fresh seeds
        (["search.replicates.max_runs=0"], ["complete"], [], 4 * WORK),
        ([], ["complete", "failed", "complete"], [], (2 + 6) * WORK),
        (["search.replicates.max_runs=0"], ["complete", "running"], [], (4 - 1 / 6) * WORK),
        ([], [], [WAITS], (5 + 6) * WORK + MERGE),
    ],
)
def test_the_outlook_is_the_work_of_all_that_is_still_to_come(
    tmp_path, overrides, states, added, work
):
    spec = load_code_spec(tmp_path, ["search.trials=4", *overrides])
    records = [TrialRecord(0, "untrained", "complete", {}, 0, "baseline")]
    for number, state in enumerate(states, 1):
        role, cost = "published" if number == 1 else "search", Cost(TRAINING // 6)
        rungs = (Rung(60, {}, Cost(TRAINING)),) if state == "complete" else ()
        trial = TrialRecord(number, role, state, {}, number, "model", cost=cost, rungs=rungs)
        records.append(trial)
    assert plan.estimate_outlook(spec, records, 0.0, added).work == pytest.approx(work)


@pytest.mark.parametrize(("steps", "candidates"), [(1400, 28 + 4), (0, 40 + 4)])
def test_the_outlook_of_a_divided_budget_or_of_hours_alone(tmp_path, steps, candidates):
    """Arithmetic: as much as 5 trainings of 280 steps, a rung every 140; merges, checkpoints."""
    spec = load_halving_spec(tmp_path, steps, "search.budget.hours=9", "training.steps=280")
    evaluated = 10 * 256 + 5 * 512 + candidates * (256 + 512 / 2)
    work = plan.estimate_outlook(spec, [], 0.0).work
    assert work == pytest.approx(1400 * 64 + 0.3 * evaluated)


@pytest.mark.parametrize(
    ("budget", "spent", "left"), [(2, 0.5, 1.5), (2, 3.0, 0.0), (0, 3.0, None)]
)
def test_the_outlook_has_the_hours_that_are_left(tmp_path, budget, spent, left):
    spec = load_code_spec(tmp_path, [f"search.budget.hours={budget}"])
    assert plan.estimate_outlook(spec, [], spent).hours == left
