"""Which sampler `auto` picks, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.spec.dry_run import render_dry_run
from gdpo_tune.spec.gpu import choose_sampler
from gdpo_tune.tuning.proposals import SamplerView
from tests.support.tuning import load_code_spec

FOUR = "objectives.mean_length={direction: minimize, reference: 64}"
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
        ((FOUR,), 2, "tpe", "4 objectives are too many"),
        (CHOICES, 2, "tpe", "every parameter is a choice"),
        (("search.trials=100",), 33, "tpe", "33 slots would wait"),
        (("search.sampler=tpe",), 2, "tpe", "as requested"),
    ],
)
def test_auto_picks_by_what_is_asked_and_says_why(
    tmp_path: Path, overrides: tuple[str, ...], slots: int | None, name: str, why: str
):
    spec = load_code_spec(tmp_path, overrides)
    chosen = choose_sampler(spec, slots)
    assert chosen.value == name
    assert why in chosen.why
    assert SamplerView(spec, slots).sampler == chosen


def test_trials_that_run_side_by_side_still_learn_from_an_earlier_sweep(tmp_path: Path):
    spec = load_code_spec(tmp_path)
    assert choose_sampler(spec, 16).value == "qmc"
    warm = spec.search.model_copy(update={"warm_start": ("runs/code",)})
    assert choose_sampler(spec.model_copy(update={"search": warm}), 16).value == "gp"


def test_the_dry_run_says_why(tmp_path: Path):
    spec = load_code_spec(tmp_path)
    assert f"# Sampler: {choose_sampler(spec)}" in render_dry_run(spec)
    assert "# Scheduler: fifo (every trial to its end)" in render_dry_run(spec)
    assert "# Sweep ends early: never" in render_dry_run(spec)
    limited = load_code_spec(
        tmp_path, ["search.budget={hours: 1.5, trials: 1000}", "search.patience=5"]
    )
    assert (
        "# Sweep ends early: after 1,000 trials, after 1.5 hours, after 5 trials in a row that do "
        "not move the hypervolume"
    ) in render_dry_run(limited)
