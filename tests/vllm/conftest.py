"""A task without a sandbox, and configurations whose completions vLLM samples."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.settings import DataSettings, RolloutSettings, TrainingSettings
from gdpo_tune.core.task_info import TaskInfo
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.tasks.base import Problem, Scores
from gdpo_tune.training import vllm_engine

TRAINING = TrainingSettings(
    steps=2,
    completions_per_step=16,
    max_completion_length=24,
    length_limit=12,
    train_prompts=16,
    validation_prompts=8,
    test_prompts=8,
    evaluate_every=2,
    checkpoint_every=2,
)


class ShapeTask:
    """Rewards of the text alone, so that no sandbox is needed."""

    rewards = ("digits", "length")
    metrics = ("digits", "length")
    instructions = ""

    def __init__(self, settings, sandbox=None, data=None):
        self.limit = settings.length_limit

    def problems(self, split, count, seed):
        return [
            Problem(
                prompt=f"Write f(x): {split[0]} is {i}, plus {string.digits[i % 10]}\n", family="x"
            )
            for i in range(count)
        ]

    def score(self, problems, completions, lengths, *_):
        digits = [sum(c.isdigit() for c in text) / 10 for text in completions]
        short = [float(length <= self.limit) for length in lengths]
        values = {"digits": digits, "length": short}
        return Scores(rewards=values, metrics=values)

    def environment(self):
        return {}

    def close(self):
        pass


RANGES = {"digits": (0.0, 2.4), "length": (0.0, 1.0)}
SHAPE = TaskInfo(ShapeTask, RANGES, {}, {}, "embedded", length_reward="length")


@pytest.fixture(autouse=True)
def shown(capfd):
    """Show the figures; vLLM also needs a standard output with a descriptor."""
    with capfd.disabled():
        print()
        yield


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """Engines of one process are never freed, so each gets a small part of the usual cache."""
    monkeypatch.setattr(vllm_engine, "CPU_CACHE", 2**26)


@pytest.fixture
def build_config(monkeypatch, tmp_path) -> Callable[..., TrialConfig]:
    """Return a builder of configurations of the embedded policy.

    Its keywords are parameters of the search, settings of `training:`, or sections of a trial.
    """
    monkeypatch.setitem(registry.TASKS, "shape", f"{__name__}:SHAPE")
    settings = set(TrainingSettings.model_fields)

    def build(**changes: Any) -> TrialConfig:
        params = {name: info.default for name, info in PARAMETERS.items()}
        params |= {"reward_weights.digits": 1.0, "reward_weights.length": 1.0}
        params |= {"learning_rate": 1e-3, "group_size": 4}
        params |= {name: changes.pop(name) for name in list(changes) if name in PARAMETERS}
        chosen = {name: changes.pop(name) for name in list(changes) if name in settings}
        config = TrialConfig(
            "shape",
            "embedded",
            0,
            params,
            TRAINING.replace(**chosen),
            Path(tmp_path),
            data=DataSettings(max_prompt_length=64),
            rollout=RolloutSettings(engine="vllm"),
        )
        return replace(config, **changes)

    return build


@pytest.fixture
def train_and_report(build_config):
    """Return a function that trains a configuration: to its outcome and its measurements."""
    from gdpo_tune.training import train, worker_cache

    def run(config: TrialConfig):
        reports = []
        try:
            outcome = train(config, resume=None, report=lambda m, _: reports.append(m))
        finally:
            worker_cache.release_worker_cache()
        return outcome, reports

    return run
