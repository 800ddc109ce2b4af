"""Held-out evaluation: estimates, their errors, and random states that stay as they are."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from gdpo_tune.core.errors import NonFiniteError, TrialFailure
from gdpo_tune.core.trial_files import MOST_COMPLETIONS, read_completions
from gdpo_tune.policies.load_policy import list_end_tokens, load_policy
from gdpo_tune.policies.prompt_format import PromptFormat
from gdpo_tune.tasks.base import Scores
from gdpo_tune.training.evaluation import (
    Evaluator,
    choose_shown_prompts,
    derive_evaluation_seed,
)
from gdpo_tune.training.rollout import generate
from gdpo_tune.training.worker_cache import WorkerCache
from tests.support.training import SETTINGS, ToyTask, build_trial_config, write_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return load_policy(write_policy(tmp_path_factory.mktemp("policy")))


def build_evaluator(policy, task, seed=0, prompts=6) -> Evaluator:
    """Build an evaluator of the first held-out prompts of the toy task."""
    settings = SETTINGS.replace(validation_prompts=prompts, test_prompts=prompts)
    config = build_trial_config("", Path(), seed=seed, settings=settings)
    _, tokenizer = policy
    cache = WorkerCache(config, task, tokenizer, PromptFormat(tokenizer), None)
    return Evaluator(config, cache, generate)


def test_estimates_are_reproducible_and_leave_the_global_random_state(policy):
    task = ToyTask(SETTINGS)

    def run(seed):
        return build_evaluator(policy, task, seed).evaluate(policy[0], "validation", 0)

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    states = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first = run(7)
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()
    assert states[2] == random.getstate()
    assert first == run(7)
    assert first != run(8)
    assert tuple(first) == task.metrics


def test_keeping_completions_changes_no_estimate(policy):
    task, kept = ToyTask(SETTINGS), {}
    evaluator = build_evaluator(policy, task, prompts=MOST_COMPLETIONS + 2)
    estimates = evaluator.evaluate(policy[0], "validation", 0, kept)
    assert estimates == evaluator.evaluate(policy[0], "validation", 0)
    problems = evaluator.cache.load_split("validation").problems
    assert kept.keys() == choose_shown_prompts(len(problems))
    assert len(kept) == MOST_COMPLETIONS
    assert all(completion.prompt == problems[row].prompt for row, completion in kept.items())
    assert all(tuple(completion.metrics) == task.metrics for completion in kept.values())


def test_every_trial_keeps_completions_of_the_same_prompts(policy, tmp_path):
    prompts: list[list[str]] = []
    for seed in (1, 2):
        evaluator = build_evaluator(policy, ToyTask(SETTINGS), prompts=MOST_COMPLETIONS + 30)
        directory = tmp_path / str(seed)
        evaluator.config = dataclasses.replace(evaluator.config, seed=seed, directory=directory)
        evaluator.evaluate_test(policy[0], 0)
        prompts.append([completion.prompt for completion in read_completions(directory)])
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == MOST_COMPLETIONS
    rows = choose_shown_prompts(MOST_COMPLETIONS + 30)
    assert max(rows) > MOST_COMPLETIONS  # at random, not the first ones


def test_every_completion_is_scored_with_its_own_problem(policy):
    seen = []

    class Recorder(ToyTask):
        def score(self, problems, completions, lengths, *_):
            seen.extend(zip(problems, completions, lengths, strict=True))
            return super().score(problems, completions, lengths)

    # 26 completions: one whole batch and a rest.
    evaluator = build_evaluator(policy, Recorder(SETTINGS), prompts=13)
    evaluator.evaluate(policy[0], "validation", 0)
    problems = evaluator.cache.load_split("validation").problems
    assert [problem for problem, _, _ in seen] == [p for p in problems for _ in range(2)]
    assert all(1 <= length <= SETTINGS.max_completion_length for _, _, length in seen)
    assert all(len(text) <= length for _, text, length in seen)


def test_a_metric_of_nan_ends_the_trial(policy):
    class Broken(ToyTask):
        def score(self, problems, completions, lengths, *_):
            scores = super().score(problems, completions, lengths)
            return Scores(scores.rewards, {**scores.metrics, "hits": [math.nan] * len(lengths)})

    with pytest.raises(NonFiniteError, match=r"metric hits .* on validation prompts"):
        build_evaluator(policy, Broken(SETTINGS)).evaluate(policy[0], "validation", 0)


@pytest.mark.parametrize("judged", [(), ("rare",)])
def test_only_a_judged_metric_must_have_a_value(policy, judged):
    """Source: trl#4501, ms-swift#4653: a kind of task may be absent from held-out rows."""

    class Rare(ToyTask):
        metrics = ("hits", "length", "rare")

        def score(self, problems, completions, lengths, *_):
            scores = super().score(problems, completions, lengths)
            return Scores(scores.rewards, {**scores.metrics, "rare": [None] * len(lengths)})

    evaluator = build_evaluator(policy, Rare(SETTINGS))
    evaluator.config = dataclasses.replace(evaluator.config, required_metrics=judged)
    if not judged:
        assert list(evaluator.evaluate(policy[0], "validation", 0)) == ["hits", "length"]
        return
    with pytest.raises(TrialFailure, match=r"metric rare, an objective .*validation_prompts"):
        evaluator.evaluate(policy[0], "validation", 0)


def test_seeds_differ_by_trial_split_and_step():
    seeds = {
        derive_evaluation_seed(seed, split, step)
        for seed in (0, 1)
        for split in ("validation", "test")
        for step in (0, 30)
    }
    assert len(seeds) == 8


def test_end_tokens_are_the_tokenizers_and_the_models(policy):
    listed = [list_end_tokens(policy[1], declared) for declared in (None, 1, 5, [7, 1])]
    assert listed == [(1,), (1,), (1, 5), (1, 7)]
