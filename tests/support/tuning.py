"""A spec and outcomes for the tests of ledger and search."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Outcome, Params, TrialConfig
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.tuning.ray import reporter

SPACE = Path(__file__).resolve().parents[2] / "search_spaces" / "code.yaml"


def spec_in(folder: Path, overrides: Sequence[str] = (), space: Path = SPACE) -> SweepSpec:
    """The shipped search space, kept in `folder`."""
    return load_spec(space, [f"storage={folder}", *overrides], "sweep")


def outcome(
    correctness: float = 0.5, format: float = 0.5, length: float = 0.5, test_shift: float = 0.0
) -> Outcome:
    """An outcome whose test values lie `test_shift` above its validation values."""
    values = {"correctness": correctness, "format": format, "length": length}
    return Outcome(
        validation={name: Estimate(value, 0.01) for name, value in values.items()},
        test={name: Estimate(value + test_shift, 0.01) for name, value in values.items()},
        cost=Cost(completions=640, seconds=2.0, cpu_seconds=1.5),
        checkpoint=None,
        environment={"sandbox": "test"},
    )


def trade_off(params: Params) -> Outcome:
    """An outcome in which weight on the format costs correctness."""
    weight = float(params["reward_weights.format"])
    return outcome(1 / (1 + weight), weight / (1 + weight), float(params["learning_rate"]) * 1e3)


def measured(step: int, cost: Cost | None = None, se: float = 0.01, **values: float) -> Measurement:
    """A measurement on validation prompts; 64 completions a step if no cost is given."""
    found = {name: Estimate(value, se) for name, value in values.items()}
    flat = {f"validation/{name}": value for name, value in values.items()}
    return Measurement(step, flat, cost or Cost(completions=64 * step), found)


def trial_in(folder: Path) -> TrialConfig:
    """A trial of 100 steps."""
    return TrialConfig("code", "embedded", 0, {}, TrainingSettings(steps=100), folder)


def sent_to_ray(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """Measurements that reach Ray from now on."""
    arrived: list[Measurement] = []
    monkeypatch.setattr(
        reporter.tune, "report", lambda result: arrived.append(result["measurement"])
    )
    return arrived
