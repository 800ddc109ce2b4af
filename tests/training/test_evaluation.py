"""Held-out evaluation: estimates, their errors, and random states that stay as they are."""

import math
import os
import random
import re
import sys
import textwrap
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from gdpo_tune.core.errors import NonFiniteError, TrialFailure
from gdpo_tune.core.trial_files import MOST_COMPLETIONS, read_completions
from gdpo_tune.policies.load_policy import list_end_tokens, load_policy
from gdpo_tune.policies.prompt_format import PromptFormat
from gdpo_tune.tasks.base import Scores
from gdpo_tune.training.evaluation import Evaluator, choose_shown_prompts, derive_evaluation_seed
from gdpo_tune.training.rollout import generate
from gdpo_tune.training.worker_cache import WorkerCache
from tests.support.paths import ROOT
from tests.support.training import SETTINGS, ToyTask
from tests.support.trials import build_trial


@pytest.fixture(scope="module")
def loaded(policy):
    return load_policy(policy)


@pytest.fixture
def build(loaded):
    """Build an evaluator of the first held-out prompts of a toy task, and its `evaluate`."""
    model, tokenizer = loaded

    def build(task: type = ToyTask, prompts=6, directory=Path(), settings=SETTINGS, **fields):
        settings = settings.replace(validation_prompts=prompts, test_prompts=prompts)
        config = build_trial("", directory, training=settings, **fields)
        cache = WorkerCache(config, task(SETTINGS), tokenizer, PromptFormat(tokenizer), None)
        evaluator = Evaluator(config, cache, generate)
        return evaluator, lambda *kept: evaluator.evaluate(model, "validation", 0, *kept)

    return build


def read_random_states():
    return torch.random.get_rng_state().tolist(), *np.random.get_state()[1], random.getstate()


def test_estimates_are_reproducible_and_leave_the_global_random_state(build):
    before = read_random_states()
    first = build(seed=7)[1]()
    assert read_random_states() == before
    assert first == build(seed=7)[1]()
    assert first != build(seed=8)[1]()
    assert tuple(first) == ToyTask.metrics


def test_keeping_completions_changes_no_estimate(build):
    kept = {}
    evaluator, evaluate = build(prompts=MOST_COMPLETIONS + 2)
    assert evaluate(kept) == evaluate()
    problems = evaluator.cache.load_split("validation").problems
    assert kept.keys() == choose_shown_prompts(len(problems))
    assert len(kept) == MOST_COMPLETIONS
    assert all(completion.prompt == problems[row].prompt for row, completion in kept.items())
    assert all(tuple(completion.metrics) == ToyTask.metrics for completion in kept.values())


def test_every_trial_keeps_completions_of_the_same_prompts(build, loaded, tmp_path):
    prompts: list[list[str]] = []
    for seed in (1, 2):
        directory = tmp_path / str(seed)
        evaluator, _ = build(prompts=MOST_COMPLETIONS + 30, seed=seed, directory=directory)
        evaluator.evaluate_test(loaded[0], 0)
        prompts.append([completion.prompt for completion in read_completions(directory)])
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == MOST_COMPLETIONS
    rows = choose_shown_prompts(MOST_COMPLETIONS + 30)
    assert max(rows) > MOST_COMPLETIONS  # at random, not the first ones


def test_every_completion_is_scored_with_its_own_problem(build):
    seen = []

    class Recorder(ToyTask):
        def score(self, problems, completions, lengths, *_):
            seen.extend(zip(problems, completions, lengths, strict=True))
            return super().score(problems, completions, lengths)

    # 26 completions: one whole batch and a rest.
    evaluator, evaluate = build(Recorder, prompts=13)
    evaluate()
    problems = evaluator.cache.load_split("validation").problems
    assert [problem for problem, _, _ in seen] == [p for p in problems for _ in range(2)]
    assert all(1 <= length <= SETTINGS.max_completion_length for _, _, length in seen)
    assert all(len(text) <= length for _, text, length in seen)


def test_rewards_know_the_updates_as_trl_counts_them(build, loaded):
    """Source: transformers' `TrainerState`: `global_step` counts updates, two in a step here."""
    states = []

    class Recorder(ToyTask):
        def score(self, problems, completions, lengths, tokens, state):
            states.append(dict(state))
            return super().score(problems, completions, lengths)

    halves = SETTINGS.replace(mini_batch_size=SETTINGS.completions_per_step // 2)
    evaluator, _ = build(Recorder, settings=halves)
    evaluator.evaluate(loaded[0], "validation", 2)
    assert states == [{"global_step": 4, "max_steps": 2 * SETTINGS.steps}]


class Rare(ToyTask):
    """A task with a metric that is `value` of every completion."""

    metrics, value = ("hits", "length", "rare"), None

    def score(self, problems, completions, lengths, *_):
        scores = super().score(problems, completions, lengths)
        return Scores(scores.rewards, {**scores.metrics, "rare": [self.value] * len(lengths)})


def test_only_a_judged_metric_must_have_a_value(build):
    """Source: trl#4501, ms-swift#4653: a kind of task may be absent from held-out rows."""
    assert list(build(Rare)[1]()) == ["hits", "length"]
    with pytest.raises(TrialFailure, match=r"metric rare, an objective .*validation_prompts"):
        build(Rare, required_metrics=("rare",))[1]()


def test_a_metric_of_nan_ends_the_trial(build, monkeypatch):
    monkeypatch.setattr(Rare, "value", math.nan)
    with pytest.raises(NonFiniteError, match=r"metric rare .* on validation prompts"):
        build(Rare)[1]()


def test_seeds_differ_by_trial_split_and_step():
    cases = product((0, 1), ("validation", "test"), (0, 30))
    assert len({derive_evaluation_seed(*case) for case in cases}) == 8


def test_end_tokens_are_the_tokenizers_and_the_models(loaded):
    listed = [list_end_tokens(loaded[1], declared) for declared in (None, 1, 5, [7, 1])]
    assert listed == [(1,), (1,), (1, 5), (1, 7)]


def measure_likelihood(policy, tokenizer, split, seed):
    """Return the log-probability per token of texts that have nothing to do with the task."""
    assert not policy.training
    torch.rand(1)  # as a benchmark that samples would
    texts = {"validation": ["ab=", "cde="], "test": [a + b for a in "wxyzqv" for b in "abcdefgh="]}
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in texts[split]]
    return [-policy(each, labels=each).loss.item() for each in ids]


class Measured(ToyTask):
    """A task with a metric of the policy itself."""

    metrics = (*ToyTask.metrics, "kept")
    evaluations = {"kept": measure_likelihood}
    places = {"kept": "kept.py, line 3"}


def test_a_function_measures_the_policy_itself_beside_its_completions(build, loaded):
    """Source: the mean, and its error s / sqrt(n), of the numbers that the function returns."""
    model, tokenizer = loaded
    before, trains = read_random_states(), model.training
    evaluator, _ = build(Measured)
    found = evaluator.evaluate(model.train(), "test", 0)
    assert model.training
    model.train(trains)
    assert read_random_states() == before
    assert tuple(found) == Measured.metrics
    plain = build()[0].evaluate(model, "test", 0)
    assert {name: found[name] for name in plain} == plain
    values = measure_likelihood(model.eval(), tokenizer, "test", 0)
    model.train(trains)
    assert found["kept"].mean == pytest.approx(np.mean(values), abs=1e-6)
    assert found["kept"].se == pytest.approx(np.std(values) / 54**0.5, rel=0.15)  # of a bootstrap


def test_another_program_measures_the_policy_as_the_documentation_shows(
    build, loaded, monkeypatch, tmp_path
):
    _, _, block = (ROOT / "docs/own_task.md").read_text().partition("prints a JSON list")
    _, _, block = block.partition("\n\n")
    names = {}
    exec(textwrap.dedent(block.partition("\nThe command and every trial")[0]), names)
    evaluator, _ = build(Measured)
    seed = derive_evaluation_seed(evaluator.config.seed, "test", 0)
    program = tmp_path / "my-benchmark"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"assert sys.argv[2:] == ['--split', 'test', '--seed', '{seed}']\n"
        "found = os.listdir(sys.argv[1])\n"
        "print([float(name in found) for name in ('model.safetensors', 'tokenizer.json', 'none')])"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(Measured, "evaluations", {"kept": names["benchmark"]})
    found = evaluator.evaluate(loaded[0], "test", 0)
    assert found["kept"].mean == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (0.5, "evaluation kept (kept.py, line 3) returned 0.5, a float, in place of a list of 2"),
        ([0.5], r"evaluation kept (kept.py, line 3) returned 1 values for 2 items"),
        ([1.0, "a"], "returned 'a', a str, for item 1, in place of a number"),
        ([1.0, math.nan], "evaluation kept (kept.py, line 3) of item 1 is nan on validation"),
        ([1.0, 3.0], "metric kept (kept.py, line 3) is 3 for item 1, outside its range (-9, 2)"),
        ([None, None], "metric kept, an objective or a constraint, has no value on two"),
        (KeyError("x"), "evaluation kept (kept.py, line 3) raised KeyError: 'x'"),
    ],
)
def test_an_evaluation_that_cannot_be_used_ends_the_trial(build, monkeypatch, returned, reason):
    def measure(*_, **__):
        if isinstance(returned, Exception):
            raise returned
        return returned

    monkeypatch.setattr(Measured, "evaluations", {"kept": measure})
    ranges = {"kept": (-9, 2)} if returned == [1.0, 3.0] else {}
    monkeypatch.setattr(Measured, "ranges", ranges, raising=False)
    with pytest.raises((TrialFailure, NonFiniteError), match=re.escape(reason)):
        build(Measured, required_metrics=("kept",))[1]()
