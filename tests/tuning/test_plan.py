"""The plan: which points of `enqueue:` are still to be run, and how many trials there will be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from gdpo_tune.core.trials import Params, Proposer, Role, TrialRecord
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.search.plan import Step, count_planned, find_next_step
from tests.support.tuning import spec_in

CONDITIONAL = """
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


def in_order(spec: SweepSpec, records: Sequence[TrialRecord] = ()) -> list[TrialRecord]:
    """`records` and the trials that the plan asks for, up to the sampler's first."""
    found = list(records)
    while True:
        step = find_next_step(spec, found)
        if step is None or step.params is None:
            return found
        found.append(record(len(found), step.role, step.proposer, step.params))


def record(number: int, role: Role, proposer: Proposer, params: Params) -> TrialRecord:
    return TrialRecord(number, role, "failed", params, number, proposer)


def enqueued(records: Sequence[TrialRecord]) -> list[Params]:
    return [record.params for record in records if record.proposer == "enqueued"]


@pytest.mark.parametrize("points", [[1e-4, 2e-4], [2e-4, 1e-4]])
def test_a_point_may_be_added_anywhere_to_a_sweep_that_goes_on(tmp_path: Path, points: list[float]):
    def spec(*rates: float) -> SweepSpec:
        given = [{"learning_rate": rate, "group_size": 4} for rate in rates]
        return spec_in(tmp_path, [f"enqueue={json.dumps(given)}"])

    before = in_order(spec(1e-4))
    assert [params["learning_rate"] for params in enqueued(before)] == [1e-4]
    after = in_order(spec(*points), before)
    assert [params["learning_rate"] for params in enqueued(after)] == [1e-4, 2e-4]
    assert find_next_step(spec(*points), after) == Step("search", "model", None)


def test_a_value_without_effect_does_not_bring_a_point_back(tmp_path: Path):
    path = tmp_path / "conditional.yaml"
    path.write_text(CONDITIONAL)
    spec = spec_in(tmp_path, [], path)
    given = {"normalization": "grpo", "beta": 0.5}
    spec = spec.model_copy(update={"enqueue": (given,)})
    assert [params["normalization"] for params in enqueued(in_order(spec))] == ["grpo"]


@pytest.mark.parametrize(("per_point", "max_runs", "replicates"), [(2, 8, 8), (0, 8, 0), (2, 0, 0)])
def test_replicates_that_cannot_come_are_not_planned(
    tmp_path: Path, per_point: int, max_runs: int, replicates: int
):
    wanted = f"search.replicates={{per_point: {per_point}, max_runs: {max_runs}}}"
    spec = spec_in(tmp_path, ["search.trials=4", wanted])
    assert count_planned(spec, []) == 2 + 4 + replicates
