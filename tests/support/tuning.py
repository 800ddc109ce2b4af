"""A spec and outcomes for the tests of ledger and search."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Outcome, Params
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.tuning.attempts import (
    AttemptConfig,
    RunSettings,
    StopFlag,
    TrialPlaced,
    TrialUpdate,
    unwrap_message,
)
from gdpo_tune.tuning.ray import attempt
from tests.support.paths import ROOT

SPACE = ROOT / "search_spaces" / "code.yaml"
FIXED = (
    "search.trials=16",
    "search.replicates={per_point: 2, max_runs: 6}",
    "search.budget.completions=0",
    "training.steps=60",
)
"""Overrides of a sweep that trains a number of configurations instead of dividing a budget."""
ENDS_ONLY = ("search.merges.budget=0", "search.checkpoints.budget=0")
"""Overrides of a sweep whose only candidates are the ends of its trainings."""


def is_asked_to_stop(directory: Path) -> bool:
    """Return whether the trial in a directory is asked to stop."""
    return StopFlag(directory.parent.parent).is_set(int(directory.name))


def load_code_spec(
    directory: Path, overrides: Sequence[str] = (), space: Path = SPACE
) -> SweepSpec:
    """Load the shipped search space: a fixed plan, without merges and with an absolute bound.

    Its storage is in `directory`.
    """
    bound = 'constraints.correctness=">= 0.2"'
    return load_spec(
        space, [f"storage={directory}", *FIXED, *ENDS_ONLY, bound, *overrides], "sweep"
    )


def load_halving_spec(directory: Path, steps: int = 1400, *overrides: str) -> SweepSpec:
    """Load the shipped search space with a budget of so many steps of 64 completions.

    It has merges, but no replicates, and an absolute bound. Its storage is in `directory`.
    """
    budget = [f"search.budget.completions={64 * steps}", "search.replicates.max_runs=0"]
    bound = 'constraints.correctness=">= 0.2"'
    return load_spec(SPACE, [f"storage={directory}", *budget, bound, *overrides], "sweep")


def build_outcome(
    correctness: float = 0.5, format: float = 0.5, length: float = 0.5, test_shift: float = 0.0
) -> Outcome:
    values = {"correctness": correctness, "format": format, "length": length}
    return Outcome(
        validation={name: Estimate(value, 0.01) for name, value in values.items()},
        test={name: Estimate(value + test_shift, 0.01) for name, value in values.items()},
        cost=Cost(completions=640, seconds=2.0, cpu_seconds=1.5),
        checkpoint=None,
        environment={"sandbox": "test"},
    )


def build_trade_off(params: Params) -> Outcome:
    """Build an outcome in which weight on the format costs correctness."""
    weight = float(params["reward_weights.format"])
    return build_outcome(
        1 / (1 + weight), weight / (1 + weight), float(params["learning_rate"]) * 1e3
    )


def build_measurement(
    step: int, cost: Cost | None = None, se: float = 0.01, **values: float
) -> Measurement:
    """Build a measurement on validation prompts; the default cost is 64 completions per step."""
    estimates = {name: Estimate(value, se) for name, value in values.items()}
    flat = {f"validation/{name}": value for name, value in values.items()}
    return Measurement(step, flat, cost or Cost(completions=64 * step), estimates)


def build_trial_config(directory: Path) -> TrialConfig:
    (directory / SPEC).touch()
    (directory / "trials" / "3").mkdir(parents=True)
    training = TrainingSettings(steps=100)
    return TrialConfig("code", "embedded", 0, {}, training, directory / "trials" / "3")


def build_attempt(trial: TrialConfig, train: str = "none:none", **setup: Any) -> AttemptConfig:
    spec_file = trial.directory.parent.parent / SPEC
    return AttemptConfig(trial, RunSettings(train, spec_file, **setup))


def record_reports(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """Record the measurements that are sent to Ray from now on."""
    arrived: list[Measurement] = []

    def receive(result: dict[str, Any]) -> None:
        message = unwrap_message(result)
        if not isinstance(message, TrialPlaced):
            assert isinstance(message, TrialUpdate)
            arrived.append(message.measurement)

    monkeypatch.setattr(attempt.tune, "report", receive)
    return arrived
