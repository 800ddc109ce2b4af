"""Micro-batches: little padding, and the gradients and metrics of the step computed at once."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from gdpo_tune.core.errors import TrialFailure
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.trials import HALVED
from gdpo_tune.training import fast_cpu, micro_batches, train
from gdpo_tune.training.memory import MicroBatchLimit
from gdpo_tune.training.micro_batches import divide
from gdpo_tune.training.rollout import sample_for_trainer
from gdpo_tune.training.trainer import GDPOTrainer
from tests.support import gradients
from tests.support.gradients import ROWS, assert_same_steps, run_two_steps
from tests.support.training import (
    SETTINGS,
    build_trial_config,
    mark_slow_cases,
    stop_after,
)

GROUP = 4
LOSS_TYPES = PARAMETERS["loss_type"].choices


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Several threads would wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Order of completions


def count_positions(prompts, completions, parts):
    return sum(
        len(part) * (max(prompts[row] for row in part) + max(completions[row] for row in part))
        for part in parts
    )


def test_completions_are_sorted_by_length_longest_first():
    lengths = [3, 3, 3, 3, 3, 3], [1, 9, 5, 9, 1, 5]
    parts = divide(*lengths, None, MicroBatchLimit(2))
    assert parts == [[1, 3], [2, 5], [0, 4]]
    assert count_positions(*lengths, parts) == 2 * (12 + 8 + 4)


def test_prompts_decide_the_order_where_they_vary_more():
    prompts, completions = [10, 900, 10, 900], [40, 30, 30, 40]
    parts = divide(prompts, completions, None, MicroBatchLimit(2))
    assert parts == [[3, 1], [0, 2]]
    assert count_positions(prompts, completions, parts) == 2 * (940 + 50)
    by_completion = [[3, 0], [1, 2]]
    assert count_positions(prompts, completions, by_completion) == 2 * (940 + 930)


def test_the_order_never_pads_more_than_the_order_of_arrival():
    chance = random.Random(0)
    for _ in range(50):
        prompts = [chance.randint(1, 50) for _ in range(24)]
        completions = [chance.randint(1, 50) for _ in range(24)]
        parts = divide(prompts, completions, None, MicroBatchLimit(4))
        assert sorted(itertools.chain(*parts)) == list(range(24))
        arrival = [list(range(first, first + 4)) for first in range(0, 24, 4)]
        before = count_positions(prompts, completions, arrival)
        assert count_positions(prompts, completions, parts) <= before


def test_a_prompt_keeps_its_completions_together():
    lengths, keys = ([2, 2, 5, 5, 2, 2], [1, 3, 1, 1, 9, 8]), "aabbcc"
    for limit in (MicroBatchLimit(2), MicroBatchLimit(3), MicroBatchLimit(19, counts_tokens=True)):
        assert divide(*lengths, keys, limit)[0] == [4, 5]
    tokens = MicroBatchLimit(19, counts_tokens=True)
    assert divide(*lengths, keys, tokens) == [[4, 5], [2, 3, 1, 0]], "7 + 6 tokens"
    # A group that is too large is cut, and so is what a limit allows none of.
    smaller = MicroBatchLimit(9, counts_tokens=True)
    assert divide(*lengths, keys, smaller) == [[4], [5], [2, 3], [1, 0]]
    assert divide(*lengths, keys, MicroBatchLimit(0)) == [[4], [5], [2], [3], [1], [0]]


@pytest.mark.parametrize("keys", [None, "a" * 8 + "b" * 8 + "c" * 8])
def test_a_limit_of_tokens_holds_for_every_micro_batch(keys):
    chance = random.Random(0)
    for most in (60, 100, 333, 10**6):
        prompts = [chance.randint(1, 20)] * 24
        completions = [chance.randint(1, 40) for _ in range(24)]
        parts = divide(prompts, completions, keys, MicroBatchLimit(most, counts_tokens=True))
        assert sorted(itertools.chain(*parts)) == list(range(24))
        for part in parts:
            tokens = count_positions(prompts, completions, [part])
            if keys:
                distinct = len({keys[row] for row in part})
                tokens = distinct * prompts[0] + sum(completions[row] for row in part)
            assert tokens <= most
    assert parts == [list(range(24))], "one micro-batch stays in the order of its rows"


def test_columns_that_are_padding_in_every_row_are_cut():
    batch = {
        "prompt_ids": torch.tensor([[0, 0, 7], [0, 8, 9]]),
        "prompt_mask": torch.tensor([[0, 0, 1], [0, 1, 1]]),
        "completion_ids": torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0]]),
        "completion_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]),
        "old_per_token_logps": torch.arange(8.0).view(2, 4),
        "importance_sampling_ratio": torch.ones(2, 1),
        "advantages": torch.tensor([1.0, -1.0]),
        "num_items_in_batch": torch.tensor(3),
    }
    shapes = {name: tuple(value.shape) for name, value in micro_batches.cut_padding(batch).items()}
    assert shapes == {
        "prompt_ids": (2, 2),
        "prompt_mask": (2, 2),
        "completion_ids": (2, 2),
        "completion_mask": (2, 2),
        "old_per_token_logps": (2, 2),
        "importance_sampling_ratio": (2, 1),
        "advantages": (2,),
        "num_items_in_batch": (),
    }
    assert micro_batches.cut_padding(batch)["prompt_ids"].tolist() == [[0, 7], [8, 9]]
    assert micro_batches.cut_padding(batch)["old_per_token_logps"].tolist() == [[0, 1], [4, 5]]


def test_a_micro_batch_weighs_by_its_tokens():
    assert micro_batches.compute_shares(torch.tensor([7, 3])) == pytest.approx([1.4, 0.6])


# The same step


@contextmanager
def compute(way: str):
    """Let a small policy be computed `packed`, as it is, with `shared` prompts, or `padded`."""
    with pytest.MonkeyPatch.context() as patch:
        if way != "packed":
            patch.setattr(fast_cpu, "can_pack", lambda _: False)
        if way == "padded":
            patch.setattr(micro_batches, "find_obstacle", lambda _: "a test")
        yield


@pytest.fixture(scope="module")
def whole(policy, tmp_path_factory):
    """Run the step at once, each setting only the first time."""
    results = {}

    def run_once(way, **changes):
        key = (way, *changes.items())
        if key not in results:
            with compute(way):
                results[key] = run_two_steps(
                    policy, tmp_path_factory.mktemp("whole"), ROWS, **changes
                )
        return results[key]

    return run_once


EVERY_STEP = list(itertools.product(LOSS_TYPES, (0.0, 0.5), (1, 2)))
STEPS = [
    *((*step, "packed") for step in EVERY_STEP),
    *(
        (*step, way)
        for way in ("shared", "padded")
        for step in EVERY_STEP
        if step[0] == "dapo" or step[1:] == (0.5, 2)
    ),
]
QUICK = [
    *((loss_type, 0.5, 2, "packed") for loss_type in LOSS_TYPES),
    *((loss_type, 0.5, 2, "shared") for loss_type in LOSS_TYPES),
    ("dapo", 0.0, 1, "padded"),
]


@pytest.mark.parametrize(("loss_type", "beta", "passes", "way"), mark_slow_cases(STEPS, QUICK))
def test_a_step_in_micro_batches_equals_the_step_at_once(
    policy, tmp_path, whole, loss_type, beta, passes, way
):
    changes = {"loss_type": loss_type, "beta": beta, "num_iterations": passes, "learning_rate": 0.3}
    expected = whole(way, **changes)
    with compute(way):
        run = run_two_steps(policy, tmp_path, 4, **changes)
    assert len(run.kept.gradients) == len(run.kept.logs) == 2 * passes
    assert_same_steps(run, expected, rel=1e-5)
    for ours, theirs in zip(run.kept.logs, expected.kept.logs, strict=True):
        for name in ("completions/mean_length", "rewards/vowels/mean"):
            if name in theirs:  # of the first pass alone
                assert ours[name] == theirs[name]


@pytest.mark.parametrize(
    ("size", "way"),
    [
        *((1, "padded"), (2, "packed"), (5, "packed"), (8, "packed"), (1, "shared"), (8, "shared")),
        *((MicroBatchLimit(60, counts_tokens=True), way) for way in ("padded", "packed", "shared")),
    ],
)
def test_every_size_and_way_gives_the_same_gradients(policy, tmp_path, whole, size, way):
    with compute(way):
        run = run_two_steps(policy, tmp_path, size, beta=0.5)
    assert_same_steps(run, whole("padded", beta=0.5), rel=1e-5)


def test_padding_is_cut_to_the_longest_of_each_micro_batch(policy, tmp_path, monkeypatch):
    shapes = []

    def seen(self, model, input_ids, attention_mask, *arguments, **keywords):
        shapes.append((tuple(input_ids.shape), int(attention_mask.any(dim=0).sum())))
        return inner(self, model, input_ids, attention_mask, *arguments, **keywords)

    inner = GDPOTrainer._compute_log_probs
    monkeypatch.setattr(GDPOTrainer, "_compute_log_probs", seen)
    with compute("padded"):
        sampled = run_two_steps(policy, tmp_path, 4, beta=0.5, num_iterations=2).sampled
    assert len(shapes) == 2 * 4 * 4, "old, reference and two passes over both steps"
    assert all(rows == 4 and width == used for (rows, width), used in shapes)
    widths = [width for (_, width), _ in shapes[:4]]
    assert len(set(widths)) > 1
    assert max(map(len, sampled[0])) > min(map(len, sampled[0]))


@pytest.mark.parametrize("way", ["packed", "shared", "padded"])
@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"beta": 0.5}])
def test_the_pass_before_the_loss_is_that_of_the_loss(policy, tmp_path, monkeypatch, way, changes):
    """With one optimizer step on samples of vLLM, TRL reads the policy twice as it is."""

    def sample_as_vllm(prompts, trainer):
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
        trainer.vllm_importance_sampling_mode = "token_truncate"
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        drawn = sample_for_trainer(prompts, trainer)
        told = [[-2.5 - 0.1 * place for place in range(len(c))] for c in drawn["completion_ids"]]
        return drawn | {"logprobs": told}

    def count(self, model, *arguments, **keywords):
        passes.append(torch.is_grad_enabled())
        return inner(self, model, *arguments, **keywords)

    def generate(self, inputs):
        self._keeps_pass &= keeps_pass
        return inner_generate(self, inputs)

    inner, inner_generate = (
        GDPOTrainer._compute_log_probs,
        GDPOTrainer._generate_and_score_completions,
    )
    monkeypatch.setattr(GDPOTrainer, "_compute_log_probs", count)
    monkeypatch.setattr(GDPOTrainer, "_generate_and_score_completions", generate)
    monkeypatch.setattr(gradients, "sample_for_trainer", sample_as_vllm)
    monkeypatch.setattr(GDPOTrainer, "_last_loaded_step", -1, raising=False)
    runs, counts = [], []
    for size, keeps in ((ROWS, True), (ROWS, False), (4, True)):
        passes, keeps_pass = [], keeps
        with compute(way):
            runs.append(run_two_steps(policy, tmp_path / f"{size}-{keeps}", size, **changes))
        counts.append((len(passes), sum(passes)))
    reference = 2 * bool(changes.get("beta"))
    assert counts[:2] == [(2 + reference, 2), (4 + reference, 2)]
    assert counts[2][1] == 2 * len(runs[2].sampled[0]) // 4, "several micro-batches are read again"
    assert_same_steps(runs[0], runs[1], rel=1e-5)
    assert_same_steps(runs[2], runs[1], rel=1e-5)
    ratio = "sampling/importance_sampling_ratio/mean"
    assert [log[ratio] for log in runs[0].kept.logs] == [log[ratio] for log in runs[1].kept.logs]
    assert runs[0].kept.logs[0][ratio] != 1


def test_the_packed_pass_reads_each_prompt_once(policy, tmp_path, monkeypatch):
    prompts = []

    def seen(model, input_ids, attention_mask, completion_width, temperature):
        rows = zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
        split = input_ids.shape[1] - completion_width
        texts = [tuple(t for t, m in zip(i[:split], a[:split], strict=True) if m) for i, a in rows]
        prompts.append(set(texts))
        return inner(model, input_ids, attention_mask, completion_width, temperature)

    inner = fast_cpu.compute_log_probs
    monkeypatch.setattr(fast_cpu, "compute_log_probs", seen)
    alike = [letter + "=" for letter in "abcdefgh"]  # so that lengths alone would mix them
    run_two_steps(policy, tmp_path, 2 * GROUP, beta=0.5, prompts=alike)
    assert [len(distinct) for distinct in prompts] == [2] * len(prompts)
    for first, second in zip(prompts[::2], prompts[1::2], strict=True):
        assert not first & second


# When memory runs out


GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CPU = RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried")


@contextmanager
def limit_memory(monkeypatch, fails, error=GPU):
    """Let a pass run out of memory if `fails` says so of its tokens, and of a gradient."""
    passes = []
    inner = GDPOTrainer._compute_log_probs

    def compute(self, model, ids, mask, width, **more):
        tokens = ids.numel()
        if not self.unshared:
            prompts = zip(ids[:, :-width].tolist(), mask[:, :-width].sum(dim=1), strict=True)
            distinct = {tuple(prompt): int(count) for prompt, count in prompts}
            tokens = sum(distinct.values()) + int(mask[:, -width:].sum())
        passes.append((tokens, torch.is_grad_enabled()))
        if fails(*passes[-1]):
            raise error
        return inner(self, model, ids, mask, width, **more)

    with monkeypatch.context() as patch:
        patch.setattr(GDPOTrainer, "_compute_log_probs", compute)
        yield passes


TOKENS = MicroBatchLimit(10**6, counts_tokens=True)
SETTINGS_OF_MEMORY = [
    *(("shared", ROWS, GPU), ("shared", TOKENS, CPU), ("padded", TOKENS, GPU)),
    *(("padded", ROWS, CPU), ("packed", 8, CPU)),
]
HALVED_STEPS = [(*each, loss) for each in SETTINGS_OF_MEMORY for loss in LOSS_TYPES]
QUICK_HALVES = [each for each in HALVED_STEPS if each[-1] in ("dapo", "bnpo", "grpo")]


@pytest.mark.parametrize(
    ("way", "micro", "error", "loss_type"), mark_slow_cases(HALVED_STEPS, QUICK_HALVES)
)
def test_a_micro_batch_that_does_not_fit_is_halved_and_its_step_repeated(
    policy, tmp_path, whole, monkeypatch, way, micro, error, loss_type
):
    changes = {"loss_type": loss_type, "beta": 0.5, "num_iterations": 2, "learning_rate": 0.3}
    expected = whole(way, **changes)
    most = 40
    with compute(way), limit_memory(monkeypatch, lambda tokens, _: tokens > most, error) as passes:
        run = run_two_steps(policy, tmp_path, micro, **changes)
    assert_same_steps(run, expected, rel=1e-5)
    torch.testing.assert_close(run.weights, expected.weights, rtol=1e-4, atol=1e-6)
    assert len(run.kept.gradients) == len(expected.kept.gradients), "no optimizer step more"
    assert run.limit is not None
    assert run.limit.counts_tokens == isinstance(micro, MicroBatchLimit)
    failed = [tokens > most for tokens, _ in passes]
    assert any(failed)
    assert failed.count(True) <= 5, "a limit that was halved stays"


def test_gradients_of_a_step_that_ran_out_of_memory_are_dropped(
    policy, tmp_path, whole, monkeypatch
):
    """Memory runs out in the third micro-batch of the second step."""
    expected = whole("shared", learning_rate=0.3)
    with compute("shared"), limit_memory(monkeypatch, lambda *_: len(passes) == 7) as passes:
        run = run_two_steps(policy, tmp_path, 4, learning_rate=0.3)
    assert len(passes) == 4 + 3 + 8
    assert_same_steps(run, expected, rel=1e-5)
    assert run.limit == MicroBatchLimit(2)
    for ours, theirs in zip(run.kept.logs, expected.kept.logs, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("way", ["shared", "padded"])
def test_log_probabilities_of_the_reference_are_halved(policy, tmp_path, whole, monkeypatch, way):
    expected = whole(way, beta=0.5)

    def fails(tokens, has_gradient):
        return tokens > 60 and not has_gradient

    with compute(way), limit_memory(monkeypatch, fails):
        run = run_two_steps(policy, tmp_path, ROWS, beta=0.5)
    assert_same_steps(run, expected, rel=1e-5)
    assert run.limit is not None


@pytest.mark.parametrize("way", ["shared", "padded"])
def test_a_single_completion_that_does_not_fit_ends_the_training(
    policy, tmp_path, monkeypatch, way
):
    with (
        compute(way),
        limit_memory(monkeypatch, lambda *_: True) as passes,
        pytest.raises(torch.OutOfMemoryError),
    ):
        run_two_steps(policy, tmp_path, ROWS)
    assert len(passes) == 5, "16, 8, 4, 2 and 1 completions"


def test_another_error_is_not_taken_for_a_lack_of_memory(policy, tmp_path, monkeypatch):
    error = RuntimeError("shapes do not match")
    with (
        compute("shared"),
        limit_memory(monkeypatch, lambda *_: True, error) as passes,
        pytest.raises(RuntimeError, match="shapes"),
    ):
        run_two_steps(policy, tmp_path, ROWS)
    assert len(passes) == 1


# In a trial


def settings(**changes):
    return SETTINGS.replace(**changes)


def run(config, resume=None):
    reports = []
    outcome = train(config, resume=resume, report=lambda m, _: reports.append((m.step, m.metrics)))
    return reports, outcome


@pytest.mark.system
@pytest.mark.parametrize(
    "model", [ModelSettings(), ModelSettings(lora_rank=4)], ids=["full", "LoRA"]
)
def test_a_trial_in_micro_batches_reports_what_it_reports_at_once(policy, tmp_path, toy, model):
    parameters = {"num_iterations": 2, "beta": 0.05, "learning_rate": 1e-3}

    def configure(directory, size):
        training = settings(micro_batch_size=size)
        config = build_trial_config(policy, tmp_path / directory, settings=training, **parameters)
        return dataclasses.replace(config, model=model)

    whole, expected = run(configure("whole", 0))
    parts, outcome = run(configure("parts", 4))
    assert [step for step, _ in parts] == [step for step, _ in whole] == [1, 2, 3]
    for (_, ours), (_, theirs) in zip(parts, whole, strict=True):
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
        assert ours["train/completions/mean_length"] == theirs["train/completions/mean_length"]
    assert outcome.cost.completions == expected.cost.completions == 48
    assert parts != whole, "rounding shows that the step was computed in another order"


def test_a_trial_resumes_with_smaller_micro_batches(policy, tmp_path, toy):
    """A user does this after memory ran out."""
    config = build_trial_config(
        policy, tmp_path / "t", learning_rate=1e-3, settings=settings(steps=4)
    )
    whole, _ = run(dataclasses.replace(config, directory=tmp_path / "whole"))
    newest = stop_after(config, 2)
    smaller = config.training.replace(micro_batch_size=2)
    rest, _ = run(dataclasses.replace(config, training=smaller), resume=newest)
    rest = drop_repeated(rest)
    assert [step for step, _ in rest] == [3, 4]
    for (_, ours), (_, theirs) in zip(rest, whole[2:], strict=True):
        assert ours["train/completions/mean_length"] == theirs["train/completions/mean_length"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-3, abs=1e-6)


def test_a_trial_whose_memory_runs_out_says_so(policy, tmp_path, toy, monkeypatch):
    def build(name):
        return build_trial_config(policy, tmp_path / name, learning_rate=1e-3)

    expected, whole = run(build("whole"))
    assert HALVED not in whole.environment
    with limit_memory(monkeypatch, lambda tokens, has_gradient: has_gradient and tokens > 60):
        halved, outcome = run(build("halved"))
    assert re.fullmatch(r"at most \d+ tokens", outcome.environment[HALVED])
    assert outcome.cost.completions == whole.cost.completions
    for (_, ours), (_, theirs) in zip(halved, expected, strict=True):
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    alone = r"out of memory: lower training\.completions_per_step \(16\).* \(CUDA out of memory"
    with (
        limit_memory(monkeypatch, lambda _, has_gradient: has_gradient),
        pytest.raises(TrialFailure, match=alone),
    ):
        run(build("too_small"))


def drop_repeated(reports):
    """Drop the measurement that a resumed trial reports again."""
    return [(step, metrics) for step, metrics in reports if metrics]
