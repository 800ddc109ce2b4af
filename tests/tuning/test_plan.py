"""The plan: remaining points of `enqueue:`, and the number of trials."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from gdpo_tune.core.trials import Estimate, Params, Proposer, Role, TrialRecord
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.plan import (
    PlannedTrial,
    count_planned,
    derive_seed,
    explain_end,
    find_dead_start,
    find_next_trial,
)
from tests.support.tuning import load_code_spec

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


def list_planned(spec: SweepSpec, records: Sequence[TrialRecord] = ()) -> list[TrialRecord]:
    """List `records` and the planned trials up to the sampler's first."""
    planned = list(records)
    while True:
        found = find_next_trial(spec, planned)
        if found is None or found.params is None:
            return planned
        planned.append(build_planned(len(planned), found.role, found.proposer, found.params))


def build_planned(number: int, role: Role, proposer: Proposer, params: Params) -> TrialRecord:
    return TrialRecord(number, role, "failed", params, number, proposer)


def list_enqueued(records: Sequence[TrialRecord]) -> list[Params]:
    return [record.params for record in records if record.proposer == "enqueued"]


@pytest.mark.parametrize("points", [[1e-4, 2e-4], [2e-4, 1e-4]])
def test_a_point_may_be_added_at_any_place_of_a_resumed_sweep(tmp_path: Path, points: list[float]):
    def spec(*rates: float) -> SweepSpec:
        points = [{"learning_rate": rate, "group_size": 4} for rate in rates]
        return load_code_spec(tmp_path, [f"enqueue={json.dumps(points)}"])

    before = list_planned(spec(1e-4))
    assert [params["learning_rate"] for params in list_enqueued(before)] == [1e-4]
    after = list_planned(spec(*points), before)
    assert [params["learning_rate"] for params in list_enqueued(after)] == [1e-4, 2e-4]
    assert find_next_trial(spec(*points), after) == PlannedTrial("search", "model", None)


def test_a_value_without_effect_does_not_repeat_a_point(tmp_path: Path):
    path = tmp_path / "conditional.yaml"
    path.write_text(CONDITIONAL_SPACE)
    spec = load_code_spec(tmp_path, [], path)
    point = {"normalization": "grpo", "beta": 0.5}
    spec = spec.model_copy(update={"enqueue": (point,)})
    assert [params["normalization"] for params in list_enqueued(list_planned(spec))] == ["grpo"]


@pytest.mark.parametrize(("per_point", "max_runs", "replicates"), [(2, 8, 8), (0, 8, 0), (2, 0, 0)])
def test_replicates_that_are_impossible_are_not_planned(
    tmp_path: Path, per_point: int, max_runs: int, replicates: int
):
    setting = f"search.replicates={{per_point: {per_point}, max_runs: {max_runs}}}"
    spec = load_code_spec(tmp_path, ["search.trials=4", setting])
    assert count_planned(spec, []) == 2 + 4 + replicates


NO_SIGNAL = "no signal: every advantage was 0"


@pytest.mark.parametrize(
    ("ends", "trials", "is_dead"),
    [
        (["failed"] * 3, 8, True),
        (["failed"] * 2, 8, False),
        (["failed"] * 2, 1, True),  # the published setting and the only other one
        (["failed", "failed", "failed", "running"], 8, True),  # which ends by itself
        (["failed", "failed", "failed", "complete"], 8, False),
        (["failed", "failed", "failed", "paused"], 8, False),
        (["failed", "failed", "failed", "crashed"], 8, True),
        (["crashed"] * 3, 8, False),
    ],
)
def test_a_sweep_stops_if_its_first_trainings_have_no_signal(tmp_path, ends, trials, is_dead):
    """What no training learns from, no further one does."""
    spec = load_code_spec(tmp_path, [f"search.trials={trials}"])
    records = [TrialRecord(0, "untrained", "complete", {}, 0, "baseline")]
    for number, end in enumerate(ends, 1):
        state = "failed" if end == "crashed" else end
        reason = NO_SIGNAL if end == "failed" else "out of memory" if end == "crashed" else ""
        role: Role = "published" if number == 1 else "search"
        records.append(TrialRecord(number, role, state, {}, number, "model", reason=reason))
    dead = find_dead_start(spec, records)
    assert (dead is not None) == is_dead
    if is_dead:
        assert dead == records[1]
        assert find_next_trial(spec, records) is None
        assert explain_end(spec, records) == "no training had a signal"


@pytest.mark.parametrize(("se", "is_dead"), [(0.0, True), (0.1, False)])
def test_one_training_is_enough_if_the_untrained_policy_earned_the_same(tmp_path, se, is_dead):
    spec = load_code_spec(tmp_path, [])
    test = {
        "correctness": Estimate(0.0, 0.02, is_constant=True),
        "format": Estimate(0.1, se, is_constant=not se),
    }
    untrained = TrialRecord(0, "untrained", "complete", {}, 0, "baseline", test=test)
    first = TrialRecord(1, "published", "failed", {}, 1, "model", reason=NO_SIGNAL)
    assert (find_dead_start(spec, [untrained, first]) == first) == is_dead


def test_the_seed_of_a_trial_follows_from_the_seed_of_the_search_and_its_number(tmp_path: Path):
    spec, other = load_code_spec(tmp_path), load_code_spec(tmp_path, ["search.seed=1"])
    assert derive_seed(spec, 3) == 996794743  # printf 0:3 | sha256sum, first 31 bits
    assert len({derive_seed(s, n) for s in (spec, other) for n in range(100)}) == 200
    assert all(0 <= derive_seed(spec, n) < 2**31 for n in range(100))
