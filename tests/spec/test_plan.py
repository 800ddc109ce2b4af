"""`search.plan`: what a file without it means, and what does not go with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.core.errors import SpecError
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.model import GrowthSettings

FILE = """
task: code
policy: embedded
objectives:
  correctness: {{direction: maximize, reference: 0}}
  format: {{direction: maximize, reference: 0}}
space:
  learning_rate: {{log: [3.0e-5, 3.0e-4]}}
  reward_weights: {{correctness: 1, format: {{log: [0.1, 2]}}, length: 1}}
training: {{{training}}}
search: {{{search}}}
storage: {storage}
"""


def load(directory: Path, search: str, training: str = "", *overrides: str) -> SweepSpec:
    file = directory / "sweep.yaml"
    file.write_text(FILE.format(search=search, training=training, storage=directory))
    return load_spec(file, overrides)


@pytest.mark.parametrize(
    ("search", "plan"),
    [
        ("", "fixed"),
        ("trials: 8", "fixed"),
        ("trials: 8, budget: {completions: 64000}", "fixed"),
        ("budget: {completions: 64000}", "auto"),
        ("budget: {hours: 2}", "auto"),
        ("budget: {trials: 8}", "fixed"),
        ("plan: fixed, budget: {completions: 64000}", "fixed"),
        ("plan: auto, trials: 8, budget: {completions: 64000}", "auto"),
    ],
)
def test_a_budget_without_trials_is_divided_by_the_plan(tmp_path: Path, search: str, plan: str):
    spec = load(tmp_path, search)
    assert spec.search.plan == plan
    assert isinstance(spec.search.scheduler, GrowthSettings) == (plan == "auto")


def test_one_training_takes_a_fifth_unless_the_file_says_so(tmp_path: Path):
    budget = "budget: {completions: 64000}"
    alone = f"replicates: {{max_runs: 0}}, {budget}"
    assert load(tmp_path, alone).training.steps == 200  # 1,000 steps of 64 / 5
    assert load(tmp_path, alone, "completions_per_step: 128").training.steps == 100
    assert load(tmp_path, alone, "steps: 40").training.steps == 40
    more = load(tmp_path, alone, "", "search.budget.completions=128000")
    assert more.training.steps == 400
    assert load(tmp_path, budget).training.steps == 111  # / (5 + 4)


def test_replicates_have_their_part_of_the_budget(tmp_path: Path):
    spec = load(tmp_path, "budget: {completions: 64000}")
    assert spec.search.replicates.max_trainings == 4
    assert spec.search_completions == 64000 - 4 * 111 * 64
    none = load(tmp_path, "replicates: {per_point: 0}, budget: {completions: 64000}")
    assert (none.search_completions, none.training.steps) == (64000, 200)
    assert load(tmp_path, "budget: {hours: 2}").search_completions == 0


def test_a_larger_budget_is_the_same_sweep(tmp_path: Path):
    small = load(tmp_path, "budget: {completions: 64000}")
    large = load(tmp_path, "budget: {completions: 128000}")
    assert small.compute_identity() == large.compute_identity()
    fixed = load(tmp_path, "trials: 8", "steps: 250")
    assert small.compute_identity() != fixed.compute_identity()


def test_the_stored_file_means_the_same(tmp_path: Path):
    spec = load(tmp_path, "budget: {completions: 64000}")
    stored = tmp_path / "stored.yaml"
    stored.write_text(spec.dump_yaml())
    assert load_spec(stored) == spec


@pytest.mark.parametrize(
    ("search", "training", "key", "words"),
    [
        ("plan: auto", "", "search.plan", "completions: 61440"),
        ("plan: auto, scheduler: {type: asha}, budget: {hours: 1}", "", "search.scheduler.type",
         "decides itself"),
        ("plan: fixed, scheduler: {type: growth}", "", "search.scheduler.type", "plan: auto"),
        ("budget: {completions: 640}", "", "search.budget.completions", "3 trainings"),
        ("budget: {completions: 64000}", "lr_schedule: cosine", "training.lr_schedule",
         "lr_schedule: constant"),
        ("budget: {completions: 64000}", "warmup_share: 0.1", "training.warmup_share",
         "plan: fixed"),
        ("budget: {completions: 64000}", "steps: 250", "search.replicates.max_runs",
         "leave 0 steps of the budget"),
        ("plan: later", "", "search.plan", "auto"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, search: str, training: str, key: str, words: str
):
    with pytest.raises(SpecError) as caught:
        load(tmp_path, search, training)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert words in f"{problem.reason} {problem.fix}"
