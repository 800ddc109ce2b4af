"""Two steps of every task that needs no sandbox, with the policy that ships for it."""

from __future__ import annotations

import pytest

from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.registry import describe_task
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.tools import ToolsTask
from gdpo_tune.training import train, worker_cache
from gdpo_tune.training.fast_cpu import is_small_llama
from recipes.make_policy import RECIPES

pytestmark = pytest.mark.integration

RECIPE_OF = {"math": "math", "gsm8k": "math", "tools": "tools"}


@pytest.fixture(autouse=True)
def close_cache():
    yield
    worker_cache.release_worker_cache()


def trial(task, directory, **params) -> TrialConfig:
    lengths = RECIPES[RECIPE_OF[task]].settings
    settings = TrainingSettings(
        steps=2,
        max_completion_length=lengths.max_completion_length,
        length_limit=lengths.length_limit,
        train_prompts=64,
        validation_prompts=8,
        test_prompts=32,
    )
    defaults = {name: info.default for name, info in list_parameters(describe_task(task)).items()}
    complete = {**defaults, "learning_rate": 1.5e-4, **params}
    policy = describe_task(task).embedded
    return TrialConfig(task, policy, 0, complete, settings, directory)


@pytest.mark.parametrize("task", RECIPE_OF)
def test_a_task_is_trained_and_measured_in_every_metric(task, tmp_path):
    reports = []
    outcome = train(trial(task, tmp_path), resume=None, report=lambda m, _: reports.append(m))
    info = describe_task(task)
    assert is_small_llama(load_policy(info.embedded)[0])
    assert set(outcome.test) == set(info.metrics)
    for name, metric in info.metrics.items():
        assert metric.low <= outcome.test[name].mean <= metric.high
    low, high = info.rewards["correctness"]
    assert outcome.test["correctness"].mean > low + 0.2 * (high - low), "known before training"
    for name in info.rewards:
        assert reports[0].metrics[f"train/rewards/{name}/std"] > 0, "there is something to learn"


@pytest.mark.parametrize("mode", ["gdpo", "grpo"])
def test_groups_without_a_right_call_train_the_other_rewards(mode, tmp_path, monkeypatch):
    def problems(self, split, count, seed):
        problems_of_split = [
            Problem(p.prompt, p.family, {**p.data}) for p in original(self, split, count, seed)
        ]
        for problem in problems_of_split[::2]:
            problem.data.update(calls=[], response=True)
        return problems_of_split

    original = ToolsTask.problems
    monkeypatch.setattr(ToolsTask, "problems", problems)
    reports = []
    config = trial("tools", tmp_path, normalization=mode)
    outcome = train(config, resume=None, report=lambda m, _: reports.append(m))
    assert -3 < reports[-1].metrics["train/rewards/correctness/mean"] < 3
    assert -3 < outcome.test["correctness"].mean < 3
