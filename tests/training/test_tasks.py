"""Real tasks with the policies that ship for them: trained, scored, and on data sets."""

import dataclasses
import json
import logging

import pytest
import torch

from gdpo_tune import cli
from gdpo_tune.core.errors import DataError
from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.registry import describe_layout, describe_task
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.spec import load_spec
from gdpo_tune.tasks import dataset
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.code import TASK, CodeTask, draw_code_problems
from gdpo_tune.tasks.columns import RowError
from gdpo_tune.tasks.tools import ToolsTask
from gdpo_tune.training import worker_cache
from gdpo_tune.training.decoding import Decoding
from gdpo_tune.training.fast_cpu import is_small_llama
from gdpo_tune.training.rollout import generate
from recipes.make_policy import RECIPES
from tests.support.data import read_rows, read_solutions, write_enlarged
from tests.support.paths import ROOT
from tests.support.trials import get_results, run_metrics

pytestmark = pytest.mark.integration

RECIPE_OF = {"math": "math", "gsm8k": "math", "tools": "tools"}
EVERY_SECOND = {"evaluate_every": 2, "checkpoint_every": 2}
CODE = TrainingSettings(
    steps=3, train_prompts=64, validation_prompts=8, test_prompts=8, **EVERY_SECOND
)
COUNTS = {"train_prompts": 6, "validation_prompts": 2, "test_prompts": 2}
# The embedded policy earns nothing on these problems.
FEW = TrainingSettings(steps=2, completions_per_step=16, dead_steps=0, **COUNTS, **EVERY_SECOND)


@pytest.fixture(autouse=True)
def close_cache():
    yield
    worker_cache.release_worker_cache()
    dataset.collect_once.cache_clear()


def build_trial(task, settings, directory, **params) -> TrialConfig:
    infos = list_parameters(load_task_info(task, params))
    defaults = {name: info.default for name, info in infos.items()}
    complete = {**defaults, "learning_rate": 1.5e-4, **params}
    return TrialConfig(task, describe_task(task).embedded, 0, complete, settings, directory)


def build_task_trial(task, directory, **params) -> TrialConfig:
    """Build a trial of a task that needs no sandbox."""
    lengths = RECIPES[RECIPE_OF[task]].settings
    lengths = {n: getattr(lengths, n) for n in ("max_completion_length", "length_limit")}
    counts = {"train_prompts": 64, "validation_prompts": 8, "test_prompts": 32}
    return build_trial(task, TrainingSettings(steps=2, **lengths, **counts), directory, **params)


@pytest.mark.parametrize("task", RECIPE_OF)
def test_a_task_is_trained_and_measured_in_every_metric(task, tmp_path):
    steps, outcome = run_metrics(build_task_trial(task, tmp_path))
    info = describe_task(task)
    assert is_small_llama(load_policy(info.embedded)[0])
    assert set(outcome.test) == set(info.metrics)
    for name, metric in info.metrics.items():
        assert metric.low <= outcome.test[name].mean <= metric.high
    low, high = info.rewards["correctness"]
    assert outcome.test["correctness"].mean > low + 0.2 * (high - low), "known before training"
    for name in info.rewards:
        assert steps[0][1][f"train/rewards/{name}/std"] > 0, "there is something to learn"


@pytest.mark.parametrize("mode", ["gdpo", "grpo"])
def test_groups_without_a_right_call_train_the_other_rewards(mode, tmp_path, monkeypatch):
    def problems(self, split, count, seed):
        found = [
            Problem(p.prompt, p.family, {**p.data}) for p in original(self, split, count, seed)
        ]
        for problem in found[::2]:
            problem.data.update(calls=[], response=True)
        return found

    original = ToolsTask.problems
    monkeypatch.setattr(ToolsTask, "problems", problems)
    steps, outcome = run_metrics(build_task_trial("tools", tmp_path, normalization=mode))
    assert -3 < steps[-1][1]["train/rewards/correctness/mean"] < 3
    assert -3 < outcome.test["correctness"].mean < 3


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
    begun, plain = [], CodeTask.begin_scoring

    def begin_scoring(task, problem, completion):
        begun.append((problem.prompt, completion))
        plain(task, problem, completion)

    def run(name):
        settings = CODE.replace(steps=2, completions_per_step=8)  # two batches of a split
        config = build_trial("code", settings, tmp_path / name, group_size=4, beta=0.02)
        steps, outcome = run_metrics(config)
        return steps, get_results(outcome)

    monkeypatch.setattr(CodeTask, "begin_scoring", begin_scoring)
    early = run("early")
    assert len(begun) == 2 * 8 + 2 * 8 * 2  # of steps, and of both splits
    worker_cache.release_worker_cache()
    monkeypatch.setattr(CodeTask, "begin_scoring", lambda *_: None)
    assert run("late") == early


@pytest.mark.system
def test_a_trial_of_the_code_task_is_bitwise_reproducible_in_a_reused_process(tmp_path):
    (first, outcome), (second, again) = (
        run_metrics(build_trial("code", CODE, tmp_path / name)) for name in ("a", "b")
    )
    assert first == second
    assert get_results(outcome) == get_results(again)
    assert outcome.environment["sandbox"]
    assert set(outcome.test) == set(TASK.metrics)
    assert outcome.test["correctness"].mean > 0.2, "the policy knows the task before training"
    assert 0 < first[0][1]["train/rewards/correctness/mean"] < 1
    trained = load_policy(str(outcome.checkpoint))[0].state_dict()
    before = load_policy("embedded")[0].state_dict()
    assert not all(torch.equal(trained[name], before[name]) for name in before)


def test_partial_credit_and_the_bug_free_reward_reach_training(tmp_path):
    steps = []
    for partial_credit in (False, True):
        params = {"reward_weights.bug_free": 1.0, "partial_credit": partial_credit}
        one_step = CODE.replace(steps=1)
        config = build_trial("code", one_step, tmp_path / str(partial_credit), **params)
        ((_, metrics),), outcome = run_metrics(config)
        steps.append(metrics)
    whole, share = steps
    mean = "train/rewards/{}/mean".format
    # Both trials sample the same completions in the first step.
    assert whole[mean("correctness")] < share[mean("correctness")] < 1
    assert whole[mean("bug_free")] == share[mean("bug_free")] > 0
    assert set(outcome.test) == set(TASK.metrics)


LAYOUTS = ("mbpp", "mbpp_sanitized", "humaneval", "apps", "code_contests")
TEXT = {"mbpp": "text", "code_contests": "description"}


def problems(layout):
    """Yield each usable problem of a file with its right program."""
    adapter = describe_layout(layout).convert
    for row, solution in zip(read_rows(layout), read_solutions(layout), strict=True):
        try:
            yield adapter(row), solution
        except RowError:
            continue


@pytest.fixture(scope="module")
def task():
    with CodeTask(TrainingSettings()) as task:
        yield task


@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_programs_pass_and_those_of_other_problems_do_not(layout, task):
    batch, right = zip(*problems(layout), strict=True)
    chats = [f"Sure:\n```python\n{program}\n```\nDone." for program in right]
    for written, score in ((chats, 1.0), ([*chats[1:], chats[0]], 0.0)):
        rewards = task.score(batch, written, [9] * len(batch)).rewards
        assert rewards["correctness"] == [score] * len(batch)


def build_data_trial(directory, layout, **changes) -> TrialConfig:
    params = {"group_size": 4, "learning_rate": 1e-4}
    config = build_trial("code", FEW, directory / "trial", **params)
    data = write_enlarged(layout, TEXT[layout], directory)
    return dataclasses.replace(config, data=data.replace(**changes))


@pytest.mark.parametrize("layout", TEXT)
def test_the_code_task_trains_on_a_data_set(layout, tmp_path):
    config = build_data_trial(tmp_path, layout)
    steps, outcome = run_metrics(config)
    assert [step for step, _ in steps] == [1, 2]
    assert set(outcome.test) == set(TASK.metrics)
    prompts = {f"({time}) {problem.prompt}" for problem, _ in problems(layout) for time in range(5)}
    with worker_cache.open_worker_cache(config) as cache:
        trained_on, held_out = (
            {problem.prompt for problem in cache.load_split(split).problems}
            for split in ("train", "test")
        )
    assert trained_on <= prompts
    assert not trained_on & held_out
    assert f"{layout}.jsonl: {5 * len(read_rows(layout))} rows" in outcome.environment["data"]


def test_long_prompts_are_left_out_and_counted_and_too_many_are_refused(tmp_path, caplog):
    def list_lengths(limit):
        config = build_data_trial(tmp_path, "mbpp", max_prompt_length=limit)
        with worker_cache.open_worker_cache(config) as cache:
            return sorted(len(prompt) for prompt in cache.load_split("train").prompts)

    every = list_lengths(1024)
    assert len(every) == FEW.train_prompts
    longest = every.count(every[-1])
    assert longest <= 3
    caplog.set_level(logging.WARNING, "gdpo_tune.training")
    assert list_lengths(every[-1] - 1) == every[:-longest]
    assert f"{longest} of 6 train prompts are left out" in caplog.text
    with pytest.raises(DataError, match=rf"6 of 6 train prompts .* the longest has {every[-1]}:"):
        list_lengths(3)


def test_the_command_reads_and_describes_the_data_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    source = write_enlarged("mbpp", "text", tmp_path).source
    broken = {**read_rows("mbpp")[0], "test_list": []}
    with open(source, "a") as file:
        file.write(f"\n{json.dumps(broken)}")

    def describe(*overrides):
        section = f"data={{source: '{source}', layout: mbpp}}"
        changes = ["tracking.required=false", section, *overrides]
        return cli.preflight(load_spec(ROOT / "search_spaces" / "code.yaml", changes))["data"]

    description = describe(*(f"training.{name}={count}" for name, count in COUNTS.items()))
    assert "81 rows, 80 distinct prompts" in description
    assert "1 left out" in description
    assert "column test_list: no test" in description
    with pytest.raises(DataError, match=r"training\.train_prompts = 2048"):
        describe()


def test_another_data_set_gets_another_cache(tmp_path):
    config = build_data_trial(tmp_path, "mbpp")
    open_cache = worker_cache.open_worker_cache
    with open_cache(config) as first, open_cache(config) as again:
        assert first is again
    with open_cache(build_data_trial(tmp_path, "code_contests")) as other:
        assert other is not first
    own = dataclasses.replace(config, data=DataSettings(), sandbox=SandboxSettings())
    with open_cache(own) as embedded:
        assert embedded.load_split("train").problems[0].family in ("rate", "chain", "list")
