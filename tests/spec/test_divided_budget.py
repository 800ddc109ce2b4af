"""A budget that `halving` divides: which files mean it, and what does not go with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.core.errors import SpecError
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.dry_run import render_dry_run
from gdpo_tune.spec.model import FULL_TRAININGS

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
    ("search", "scheduler"),
    [
        ("", "fifo"),
        ("trials: 8", "fifo"),
        ("trials: 8, budget: {completions: 64000}", "fifo"),
        ("budget: {completions: 64000}", "halving"),
        ("trials: 0, budget: {completions: 64000}", "halving"),
        ("budget: {hours: 2}", "halving"),
        ("budget: {trials: 8}", "fifo"),
        ("scheduler: {type: fifo}, budget: {completions: 64000}", "fifo"),
        ("scheduler: {type: halving}, trials: 8, budget: {completions: 64000}", "halving"),
    ],
)
def test_a_budget_without_trials_is_divided(tmp_path: Path, search: str, scheduler: str):
    spec = load(tmp_path, search)
    assert spec.search.scheduler.type == scheduler
    assert spec.search.is_divided == (scheduler == "halving")
    assert spec.search.trials == (
        8
        if "trials: 8" in search and "budget: {t" not in search
        else (0 if scheduler == "halving" else 16)
    )


def test_one_training_takes_a_fifth_unless_the_file_says_so(tmp_path: Path):
    assert FULL_TRAININGS == 5
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
        ("scheduler: {type: halving}", "", "search.scheduler.type", "there is none"),
        ("scheduler: {type: halving}, budget: {trials: 9}", "", "search.scheduler.type",
         "gpu_hours or hours; or type: fifo"),
        ("scheduler: {type: fifo}, trials: 0", "", "search.trials", "at least 1"),
        ("budget: {completions: 64000}", "lr_schedule: cosine", "training.lr_schedule",
         "lr_schedule: constant"),
        ("budget: {completions: 64000}", "warmup_share: 0.1", "training.warmup_share",
         "search.scheduler: {type: fifo} with trials"),
        ("budget: {completions: 64000}", "steps: 250", "search.replicates.max_runs",
         "leave 0 steps of the budget"),
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


def read_shares(spec: SweepSpec) -> list[str]:
    """Read the lines of the dry run that say what the budget is spent on."""
    _, _, rest = render_dry_run(spec).partition("# Completions, as planned\n")
    return [" ".join(line.split()) for line in rest.partition("\n\n")[0].splitlines()]


def test_the_dry_run_says_how_the_budget_is_divided(tmp_path: Path):
    spec = load(tmp_path, "budget: {completions: 64000}")
    wide, long, replicates, *others = read_shares(spec)
    assert wide == "wide rung 8,704 8 trainings x 17 steps, with the published setting"
    assert long == (
        "long trainings 26,880 about 4 of these, or new ones at corners, to about 111 steps"
    )
    assert replicates == "replicates 28,416 4 x at most 111 steps"
    assert 8704 + 26880 + 28416 == 64000
    assert [line.rsplit(maxsplit=0)[0].split(" ")[0] for line in others] == [
        "held-out",
        "merges",
        "checkpoints",
    ]
    text = render_dry_run(spec)
    assert "# Sampler: gp (at most 7 trials of 2 parameters and 2 objectives" in text
    assert "# Scheduler: halving (many configurations to a short first rung, then a few" in text
    assert "# Sweep ends early: after 64,000 completions" in text


def test_the_dry_run_of_hours_promises_no_completions_of_long_trainings(tmp_path: Path):
    lines = read_shares(load(tmp_path, "budget: {hours: 2}"))
    assert lines[0].startswith("wide rung")
    assert not [line for line in lines if line.startswith("long trainings")]
