"""A few steps with the embedded policy, the code task and the sandbox."""

from __future__ import annotations

import pytest
import torch

from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.tasks.code import TASK, CodeTask, draw_code_problems
from gdpo_tune.training import train, worker_cache
from gdpo_tune.training.decoding import Decoding
from gdpo_tune.training.fast_cpu import is_small_llama
from gdpo_tune.training.rollout import generate

pytestmark = pytest.mark.integration

SETTINGS = TrainingSettings(
    steps=3,
    train_prompts=64,
    validation_prompts=8,
    test_prompts=8,
    evaluate_every=2,
    checkpoint_every=2,
)


@pytest.fixture(autouse=True)
def close_cache():
    yield
    worker_cache.release_worker_cache()


def trial(directory, settings=SETTINGS, **params) -> TrialConfig:
    defaults = {
        name: info.default for name, info in list_parameters(load_task_info("code", params)).items()
    }
    complete = {**defaults, "learning_rate": 1.5e-4, **params}
    return TrialConfig("code", "embedded", 0, complete, settings, directory)


def test_the_sampler_matches_transformers_on_the_embedded_policy():
    model, tokenizer = load_policy("embedded")
    assert is_small_llama(model)
    prompts = tokenizer([p.prompt for p in draw_code_problems("validation", 64, 0)])
    padded = tokenizer.pad(prompts, return_tensors="pt")
    end = tokenizer.eos_token_id
    output = model.generate(**padded, max_new_tokens=64, do_sample=False)
    tails = output[:, padded["input_ids"].shape[1] :].tolist()
    expected = [row[: row.index(end) + 1] if end in row else row for row in tails]
    drawn = generate(model, prompts["input_ids"], Decoding(64, None, (end,), 0), None)
    assert drawn == expected


def test_scoring_early_changes_no_result(tmp_path, monkeypatch):
    begun, runs = [], []
    plain = CodeTask.begin_scoring

    def begin_scoring(task, problem, completion):
        begun.append((problem.prompt, completion))
        plain(task, problem, completion)

    def run(name):
        reports = []
        settings = SETTINGS.replace(steps=2, completions_per_step=8)  # two batches of a split
        outcome = train(
            trial(tmp_path / name, settings, group_size=4, beta=0.02),
            resume=None,
            report=lambda measurement, _: reports.append(dict(measurement.metrics)),
        )
        runs.append((reports, outcome.validation, outcome.test))

    monkeypatch.setattr(CodeTask, "begin_scoring", begin_scoring)
    run("early")
    assert len(begun) == 2 * 8 + 2 * 8 * 2  # of steps, and of both splits
    worker_cache.release_worker_cache()
    monkeypatch.setattr(CodeTask, "begin_scoring", lambda *_: None)
    run("late")
    assert runs[0] == runs[1]


def test_a_trial_of_the_code_task_is_bitwise_reproducible_in_a_reused_process(tmp_path):
    runs = []
    for name in ("a", "b"):
        reports = []
        outcome = train(
            trial(tmp_path / name), resume=None, report=lambda m, _, to=reports: to.append(m)
        )
        runs.append(([dict(m.metrics) for m in reports], outcome))
    (first, outcome), (second, again) = runs
    assert first == second
    assert (outcome.validation, outcome.test) == (again.validation, again.test)
    assert outcome.environment["sandbox"]
    assert set(outcome.test) == set(TASK.metrics)
    assert outcome.test["correctness"].mean > 0.2, "the policy knows the task before training"
    assert 0 < first[0]["train/rewards/correctness/mean"] < 1
    assert outcome.checkpoint is not None
    trained = load_policy(str(outcome.checkpoint))[0].state_dict()
    before = load_policy("embedded")[0].state_dict()
    assert not all(torch.equal(trained[name], before[name]) for name in before)


def test_partial_credit_and_the_bug_free_reward_reach_training(tmp_path):
    one_step = SETTINGS.replace(steps=1)
    steps = []
    for partial_credit in (False, True):
        params = {"reward_weights.bug_free": 1.0, "partial_credit": partial_credit}
        config = trial(tmp_path / str(partial_credit), one_step, **params)
        outcome = train(config, resume=None, report=lambda m, _: steps.append(m.metrics))
    whole, share = ({k: m[k] for k in m if k.startswith("train/rewards/")} for m in steps)
    mean = "train/rewards/{}/mean".format
    # Both trials sample the same completions in the first step.
    assert whole[mean("correctness")] < share[mean("correctness")] < 1
    assert whole[mean("bug_free")] == share[mean("bug_free")] > 0
    assert set(outcome.test) == set(TASK.metrics)
