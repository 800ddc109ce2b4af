"""Micro-batches and mini-batches: the gradients and metrics of a step computed at once.

Mini-batches are several optimizer steps on the samples of a step, those of TRL's own division.
"""

import itertools
import random
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig

from gdpo_tune.core.errors import TrialFailure
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.trials import HALVED
from gdpo_tune.training import micro_batches, trial, worker_cache
from gdpo_tune.training.memory import MicroBatchLimit
from gdpo_tune.training.micro_batches import divide
from gdpo_tune.training.rollout import sample_for_trainer
from gdpo_tune.training.trainer import GDPOTrainer
from gdpo_tune.training.trl_arguments import build_trainer_arguments
from tests.support import gradients
from tests.support.gradients import ROWS, KeptGradients, assert_same_steps, run_two_steps
from tests.support.training import SETTINGS, ToyTask, have_same_weights, mark_slow_cases, stop_after
from tests.support.trials import build_trial, compute, get_results, run_metrics

GROUP, MINI = 4, 8
LOSS_TYPES = PARAMETERS["loss_type"].choices
EVERY_STEP = list(itertools.product(LOSS_TYPES, (0.0, 0.5), (1, 2)))


def count_positions(prompts, completions, parts):
    return sum(
        len(part) * (max(prompts[row] for row in part) + max(completions[row] for row in part))
        for part in parts
    )


def limit_tokens(most):
    return MicroBatchLimit(most, counts_tokens=True)


@pytest.mark.parametrize(
    ("config", "is_needed"),
    [
        (LlamaConfig(), False),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), True),
        (Gemma3TextConfig(), False),  # angles of each kind of attention
        (GPT2Config(), True),
    ],
)
def test_rotary_angles_need_positions_where_they_depend_on_the_longest(config, is_needed):
    forward = {"forward": lambda self, input_ids, position_ids: None}
    model = type("Policy", (), {"config": config, **forward})()
    assert micro_batches.needs_positions(model) == is_needed


def test_completions_are_sorted_by_length_longest_first():
    lengths = [3, 3, 3, 3, 3, 3], [1, 9, 5, 9, 1, 5]
    parts = divide(*lengths, None, MicroBatchLimit(2))
    assert parts == [[1, 3], [2, 5], [0, 4]]
    assert count_positions(*lengths, parts) == 2 * (12 + 8 + 4)


def test_prompts_decide_the_order_where_they_vary_more():
    lengths = [10, 900, 10, 900], [40, 30, 30, 40]
    parts = divide(*lengths, None, MicroBatchLimit(2))
    assert parts == [[3, 1], [0, 2]]
    assert count_positions(*lengths, parts) == 2 * (940 + 50)
    assert count_positions(*lengths, [[3, 0], [1, 2]]) == 2 * (940 + 930), "by completion"


def test_the_order_never_pads_more_than_the_order_of_arrival():
    chance = random.Random(0)
    arrival = [list(range(first, first + 4)) for first in range(0, 24, 4)]
    for _ in range(50):
        lengths = [[chance.randint(1, 50) for _ in range(24)] for _ in range(2)]
        parts = divide(*lengths, None, MicroBatchLimit(4))
        assert sorted(itertools.chain(*parts)) == list(range(24))
        assert count_positions(*lengths, parts) <= count_positions(*lengths, arrival)


def test_a_prompt_keeps_its_completions_together():
    lengths, keys = ([2, 2, 5, 5, 2, 2], [1, 3, 1, 1, 9, 8]), "aabbcc"
    for limit in (MicroBatchLimit(2), MicroBatchLimit(3), limit_tokens(19)):
        assert divide(*lengths, keys, limit)[0] == [4, 5]
    assert divide(*lengths, keys, limit_tokens(19)) == [[4, 5], [2, 3, 1, 0]], "7 + 6 tokens"
    # A group that is too large is cut, and so is what a limit allows none of.
    assert divide(*lengths, keys, limit_tokens(9)) == [[4], [5], [2, 3], [1, 0]]
    assert divide(*lengths, keys, MicroBatchLimit(0)) == [[4], [5], [2], [3], [1], [0]]


@pytest.mark.parametrize("keys", [None, "a" * 8 + "b" * 8 + "c" * 8])
def test_a_limit_of_tokens_holds_for_every_micro_batch(keys):
    chance = random.Random(0)
    for most in (60, 100, 333, 10**6):
        prompts = [chance.randint(1, 20)] * 24
        completions = [chance.randint(1, 40) for _ in range(24)]
        parts = divide(prompts, completions, keys, limit_tokens(most))
        assert sorted(itertools.chain(*parts)) == list(range(24))
        for part in parts:
            tokens = count_positions(prompts, completions, [part])
            if keys:
                distinct = len({keys[row] for row in part})
                tokens = distinct * prompts[0] + sum(completions[row] for row in part)
            assert tokens <= most
    assert parts == [list(range(24))], "one micro-batch stays in the order of its rows"


def test_columns_that_are_padding_in_every_row_are_cut():
    whole_and_cut = {
        "prompt_ids": ([[0, 0, 7], [0, 8, 9]], [[0, 7], [8, 9]]),
        "prompt_mask": ([[0, 0, 1], [0, 1, 1]], [[0, 1], [1, 1]]),
        "completion_ids": ([[1, 2, 0, 0], [3, 0, 0, 0]], [[1, 2], [3, 0]]),
        "completion_mask": ([[1, 1, 0, 0], [1, 0, 0, 0]], [[1, 1], [1, 0]]),
        "old_per_token_logps": ([[0.0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1], [4, 5]]),
        "importance_sampling_ratio": ([[1.0], [1.0]], [[1], [1]]),
        "advantages": ([1.0, -1.0], [1, -1]),
        "num_items_in_batch": (3, 3),
    }
    batch = {name: torch.tensor(whole) for name, (whole, _) in whole_and_cut.items()}
    cut = {name: values.tolist() for name, values in micro_batches.cut_padding(batch).items()}
    assert cut == {name: expected for name, (_, expected) in whole_and_cut.items()}


def test_a_micro_batch_weighs_by_its_tokens():
    assert micro_batches.compute_shares(torch.tensor([7, 3])) == pytest.approx([1.4, 0.6])


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
    *(("dapo", 0.5, 2, "shared"), ("bnpo", 0.5, 2, "shared"), ("dapo", 0.0, 1, "padded")),
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


QUICK_MINI = [(loss_type, 0.5, 1) for loss_type in LOSS_TYPES] + [("dapo", 0.0, 2)]


@pytest.mark.parametrize(("loss_type", "beta", "passes"), mark_slow_cases(EVERY_STEP, QUICK_MINI))
@pytest.mark.parametrize("way", ["packed", "shared"])
def test_mini_batches_in_micro_batches_are_those_of_trl(
    policy, tmp_path, whole, loss_type, beta, passes, way
):
    changes = {"loss_type": loss_type, "beta": beta, "learning_rate": 0.3, "num_iterations": passes}
    expected = whole("TRL", MINI, **changes)
    with compute(way):
        run = run_two_steps(policy, tmp_path, 2, MINI, **changes)
    assert run.updates_per_step == passes * ROWS // MINI
    assert [len(each) for each in run.advantages] == [ROWS, ROWS], "over all of a step"
    assert len(run.kept.gradients) == 2 * passes * ROWS // MINI
    assert_same_steps(run, expected, rel=1e-4)


def test_the_clip_acts_from_the_second_mini_batch_on(policy, tmp_path):
    run = run_two_steps(policy, tmp_path, 4, MINI, learning_rate=3.0, epsilon=0.01, beta=0.0)
    first, second, *_ = [logs["clip_ratio/region_mean"] for logs in run.kept.logs]
    assert first == 0
    assert second > 0


@pytest.mark.parametrize(
    ("size", "way"),
    [
        *((1, "padded"), (2, "packed"), (5, "packed"), (8, "packed"), (1, "shared"), (8, "shared")),
        *((limit_tokens(60), way) for way in ("padded", "packed", "shared")),
    ],
)
def test_every_size_and_way_gives_the_same_gradients(policy, tmp_path, whole, size, way):
    with compute(way):
        run = run_two_steps(policy, tmp_path, size, beta=0.5)
    assert_same_steps(run, whole("padded", beta=0.5), rel=1e-5)


@contextmanager
def watch_passes(watch):
    """Call `watch` with the trainer, tokens, mask and width of every pass."""
    inner = GDPOTrainer._compute_log_probs

    def compute(self, model, ids, mask, width, **more):
        watch(self, ids, mask, width)
        return inner(self, model, ids, mask, width, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GDPOTrainer, "_compute_log_probs", compute)
        yield


def test_padding_is_cut_to_the_longest_of_each_micro_batch(policy, tmp_path):
    shapes = []

    def watch(_, ids, mask, width):
        shapes.append((tuple(ids.shape), int(mask.any(dim=0).sum())))

    with compute("padded"), watch_passes(watch):
        sampled = run_two_steps(policy, tmp_path, 4, beta=0.5, num_iterations=2).sampled
    assert len(shapes) == 2 * 4 * 4, "old, reference and two passes over both steps"
    assert all(rows == 4 and width == used for (rows, width), used in shapes)
    widths = [width for (_, width), _ in shapes[:4]]
    assert len(set(widths)) > 1
    assert max(map(len, sampled[0])) > min(map(len, sampled[0]))


@pytest.mark.parametrize(
    ("way", "changes", "corrects"),
    [
        *((way, {}, True) for way in ("packed", "shared", "padded")),
        *(("packed", {"gradient_checkpointing": True}, True), ("shared", {"beta": 0.5}, True)),
        ("packed", {"beta": 0.5}, False),  # of the reference alone there is a pass before
    ],
)
def test_the_pass_before_the_loss_is_that_of_the_loss(
    policy, tmp_path, monkeypatch, way, changes, corrects
):
    """With one optimizer step on samples of vLLM, TRL reads the policy twice as it is."""

    def sample_as_vllm(prompts, trainer):
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, corrects
        trainer.vllm_importance_sampling_mode = "token_truncate"
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        drawn = sample_for_trainer(prompts, trainer)
        told = [[-2.5 - 0.1 * place for place in range(len(c))] for c in drawn["completion_ids"]]
        return drawn | {"logprobs": told}

    def generate(self, inputs):
        self._keeps_pass &= keeps_pass
        return inner_generate(self, inputs)

    inner_generate = GDPOTrainer._generate_and_score_completions
    monkeypatch.setattr(GDPOTrainer, "_generate_and_score_completions", generate)
    monkeypatch.setattr(gradients, "sample_for_trainer", sample_as_vllm)
    monkeypatch.setattr(GDPOTrainer, "_last_loaded_step", -1, raising=False)
    runs, counts, passes = [], [], []
    with compute(way), watch_passes(lambda *_: passes.append(torch.is_grad_enabled())):
        for size, keeps_pass in ((ROWS, True), (ROWS, False), (4, True)):
            passes.clear()
            runs.append(run_two_steps(policy, tmp_path / f"{size}-{keeps_pass}", size, **changes))
            counts.append((len(passes), sum(passes)))
    reference = 2 * bool(changes.get("beta"))
    assert counts[:2] == [(2 + reference, 2), (2 + 2 * corrects + reference, 2)]
    assert counts[2][1] == 2 * len(runs[2].sampled[0]) // 4, "several micro-batches are read again"
    assert_same_steps(runs[0], runs[1], rel=1e-5)
    assert_same_steps(runs[2], runs[1], rel=1e-5)
    ratio = "sampling/importance_sampling_ratio/mean"
    ratios = [[log.get(ratio) for log in run.kept.logs] for run in runs]
    assert ratios[0] == ratios[1]
    assert (ratios[0][0] in (None, 1)) is not corrects


def test_the_packed_pass_reads_each_prompt_once(policy, tmp_path):
    prompts = []

    def watch(_, ids, mask, width):
        rows = zip(ids[:, :-width], mask[:, :-width].bool(), strict=True)
        prompts.append({tuple(row[present].tolist()) for row, present in rows})

    alike = [letter + "=" for letter in "abcdefgh"]  # so that lengths alone would mix them
    with watch_passes(watch):
        run_two_steps(policy, tmp_path, 2 * GROUP, beta=0.5, prompts=alike)
    assert [len(distinct) for distinct in prompts] == [2] * len(prompts)
    for first, second in zip(prompts[::2], prompts[1::2], strict=True):
        assert not first & second


GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CPU = RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried")


@contextmanager
def limit_memory(fails, error=GPU):
    """Let a pass run out of memory if `fails` says so of its tokens, and of a gradient."""
    passes = []

    def watch(trainer, ids, mask, width):
        tokens = ids.numel()
        if not trainer.unshared:
            prompts = zip(ids[:, :-width].tolist(), mask[:, :-width].sum(dim=1), strict=True)
            distinct = {tuple(prompt): int(count) for prompt, count in prompts}
            tokens = sum(distinct.values()) + int(mask[:, -width:].sum())
        passes.append((tokens, torch.is_grad_enabled()))
        if fails(*passes[-1]):
            raise error

    with watch_passes(watch):
        yield passes


TOKENS = limit_tokens(10**6)
SETTINGS_OF_MEMORY = [
    *(("shared", ROWS, GPU), ("shared", TOKENS, CPU), ("padded", TOKENS, GPU)),
    *(("padded", ROWS, CPU), ("packed", 8, CPU)),
]
HALVED_STEPS = [(*each, loss) for each in SETTINGS_OF_MEMORY for loss in LOSS_TYPES]
LOSSES = ("dapo", "bnpo", "grpo", "dapo", "bnpo")
QUICK_HALVES = [(*each, loss) for each, loss in zip(SETTINGS_OF_MEMORY, LOSSES, strict=True)]


@pytest.mark.parametrize(
    ("way", "micro", "error", "loss_type"), mark_slow_cases(HALVED_STEPS, QUICK_HALVES)
)
def test_a_micro_batch_that_does_not_fit_is_halved_and_its_step_repeated(
    policy, tmp_path, whole, way, micro, error, loss_type
):
    changes = {"loss_type": loss_type, "beta": 0.5, "num_iterations": 2, "learning_rate": 0.3}
    expected = whole(way, **changes)
    most = 40
    with compute(way), limit_memory(lambda tokens, _: tokens > most, error) as passes:
        run = run_two_steps(policy, tmp_path, micro, **changes)
    assert_same_steps(run, expected, rel=1e-5)
    torch.testing.assert_close(run.weights, expected.weights, rtol=1e-4, atol=1e-6)
    assert len(run.kept.gradients) == len(expected.kept.gradients), "no optimizer step more"
    assert run.limit is not None
    assert run.limit.counts_tokens == isinstance(micro, MicroBatchLimit)
    failed = [tokens > most for tokens, _ in passes]
    assert any(failed)
    assert failed.count(True) <= 5, "a limit that was halved stays"


def test_gradients_of_a_step_that_ran_out_of_memory_are_dropped(policy, tmp_path, whole):
    """Memory runs out in the third micro-batch of the second step."""
    expected = whole("shared", learning_rate=0.3)
    with compute("shared"), limit_memory(lambda *_: len(passes) == 7) as passes:
        run = run_two_steps(policy, tmp_path, 4, learning_rate=0.3)
    assert len(passes) == 4 + 3 + 8
    assert_same_steps(run, expected, rel=1e-5)
    assert run.limit == MicroBatchLimit(2)
    for ours, theirs in zip(run.kept.logs, expected.kept.logs, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("way", ["shared", "padded"])
def test_log_probabilities_of_the_reference_are_halved(policy, tmp_path, whole, way):
    with compute(way), limit_memory(lambda tokens, has_gradient: tokens > 60 and not has_gradient):
        run = run_two_steps(policy, tmp_path, ROWS, beta=0.5)
    assert_same_steps(run, whole(way, beta=0.5), rel=1e-5)
    assert run.limit is not None


@pytest.mark.parametrize(
    ("way", "error", "count"),
    [
        ("shared", GPU, 5),  # 16, 8, 4, 2 and 1 completions
        ("padded", GPU, 5),
        ("shared", RuntimeError("shapes do not match"), 1),
    ],
)
def test_a_single_completion_that_does_not_fit_or_another_error_ends_the_training(
    policy, tmp_path, way, error, count
):
    with (
        compute(way),
        limit_memory(lambda *_: True, error) as passes,
        pytest.raises(type(error), match=re.escape(str(error))),
    ):
        run_two_steps(policy, tmp_path, ROWS)
    assert len(passes) == count


@pytest.mark.parametrize(
    ("mini", "micro", "expected"),
    [
        (0, 0, (16, 1, 1, 6)),
        (16, 0, (16, 1, 1, 6)),
        (0, "auto", (16, 1, 1, 6)),
        (0, 4, (16, 1, 1, 6)),
        (8, "auto", (8, 1, 2, 12)),
        (8, 4, (8, 1, 2, 12)),
        (4, 1, (4, 1, 4, 24)),
    ],
)
def test_the_setting_becomes_arguments_of_TRL(policy, tmp_path, mini, micro, expected):
    parts = SETTINGS.replace(mini_batch_size=mini, micro_batch_size=micro, warmup_share=1 / 3)
    config = build_trial(policy, tmp_path, training=parts, num_iterations=2)
    arguments = build_trainer_arguments(config, ToyTask.rewards)
    assert expected == (
        arguments.per_device_train_batch_size,
        arguments.gradient_accumulation_steps,
        arguments.steps_per_generation,
        arguments.max_steps,
    )
    assert arguments.generation_batch_size == 16
    assert arguments.warmup_steps == arguments.max_steps // 3


@pytest.mark.parametrize("mini", [5, 32])
def test_a_size_that_does_not_divide_ends_the_trial(policy, tmp_path, toy, mini):
    config = build_trial(policy, tmp_path, training=SETTINGS.replace(mini_batch_size=mini))
    message = f"mini_batch_size {mini} does not divide the 16 completions of a step"
    with pytest.raises(TrialFailure, match=message):
        run_metrics(config)


def test_each_step_samples_once_and_is_reported_once(policy, tmp_path, toy, monkeypatch):
    samples, updates = [], []
    build_inner = trial.build_trainer

    def build_watched(config, cache):
        trainer, sampler = build_inner(config, cache)
        inner = trainer._generate_and_score_completions
        watched = KeptGradients()
        watched.on_pre_optimizer_step = lambda *_, **__: updates.append(trainer.state.global_step)
        trainer.add_callback(watched)
        trainer._generate_and_score_completions = lambda rows: (
            samples.append(len(rows)) or inner(rows)
        )
        return trainer, sampler

    monkeypatch.setattr(trial, "build_trainer", build_watched)
    parts = SETTINGS.replace(mini_batch_size=4, micro_batch_size=2, lr_schedule="linear")
    config = build_trial(policy, tmp_path, training=parts, num_iterations=2)
    reports, outcome = run_metrics(config)
    assert [step for step, _ in reports] == [1, 2, 3]
    assert samples == [16, 16, 16]
    assert updates == list(range(24))
    rates = [metrics["train/learning_rate"] for _, metrics in reports]
    # The mean over the 8 optimizer steps of each step, on a line from 0.01 to 0 over 24.
    assert rates == pytest.approx([0.01 * (1 - (8 * step + 3.5) / 24) for step in range(3)])
    assert outcome.cost.completions == 48


@pytest.mark.parametrize(("stop", "passes"), mark_slow_cases([(3, 1), (3, 2), (5, 2)], [(3, 2)]))
def test_a_resumed_trial_in_mini_batches_is_bitwise_equal(policy, tmp_path, toy, stop, passes):
    # 3 steps of 4 prompts pass over 12 prompts, so a resume also crosses that boundary.
    sizes = {"mini_batch_size": 8, "micro_batch_size": 4}
    parts = SETTINGS.replace(steps=stop + 1, lr_schedule="cosine", warmup_share=0.3, **sizes)
    parameters = {"num_iterations": passes, "beta": 0.01, "training": parts}
    whole, expected = run_metrics(build_trial(policy, tmp_path / "whole", **parameters))
    config = build_trial(policy, tmp_path / "cut", **parameters)
    newest = stop_after(config, stop)
    assert newest.name == f"checkpoint-{stop}"
    torch.rand(3)
    rest, outcome = run_metrics(config, newest)
    assert rest == whole[stop:]
    assert get_results(outcome) == get_results(expected)
    assert have_same_weights(outcome.checkpoint, expected.checkpoint)


def assert_same_metrics(ours, theirs):
    """Compare the steps of two trials up to rounding."""
    for (step, own), (number, other) in zip(ours, theirs, strict=True):
        assert step == number
        assert own == pytest.approx(other, rel=1e-3, abs=1e-6)
        name = "train/completions/mean_length"
        assert own[name] == other[name]


@pytest.mark.system
@pytest.mark.parametrize(
    "model", [ModelSettings(), ModelSettings(lora_rank=4)], ids=["full", "LoRA"]
)
def test_a_trial_in_micro_batches_reports_what_it_reports_at_once(policy, tmp_path, toy, model):
    changes = {"num_iterations": 2, "beta": 0.05, "learning_rate": 1e-3, "model": model}
    (whole, expected), (parts, outcome) = (
        run_metrics(
            build_trial(
                policy,
                tmp_path / str(size),
                training=SETTINGS.replace(micro_batch_size=size),
                **changes,
            )
        )
        for size in (0, 4)
    )
    assert [step for step, _ in parts] == [1, 2, 3]
    assert_same_metrics(parts, whole)
    assert outcome.cost.completions == expected.cost.completions == 48
    assert parts != whole, "rounding shows that the step was computed in another order"


def test_a_trial_resumes_with_smaller_micro_batches(policy, tmp_path, toy):
    """A user does this after memory ran out."""
    changes = {"learning_rate": 1e-3}
    longer, smaller = SETTINGS.replace(steps=4), SETTINGS.replace(steps=4, micro_batch_size=2)
    whole, _ = run_metrics(build_trial(policy, tmp_path / "whole", training=longer, **changes))
    newest = stop_after(build_trial(policy, tmp_path / "t", training=longer, **changes), 2)
    config = build_trial(policy, tmp_path / "t", training=smaller, **changes)
    rest, _ = run_metrics(config, newest)
    assert [step for step, _ in rest] == [3, 4]
    assert_same_metrics(rest, whole[2:])


def test_a_trial_whose_memory_runs_out_says_so(policy, tmp_path, toy):
    def run(name):
        return run_metrics(build_trial(policy, tmp_path / name, learning_rate=1e-3))

    expected, whole = run("whole")
    assert HALVED not in whole.environment
    with limit_memory(lambda tokens, has_gradient: has_gradient and tokens > 60):
        halved, outcome = run("halved")
    assert re.fullmatch(r"at most \d+ tokens", outcome.environment[HALVED])
    assert outcome.cost.completions == whole.cost.completions
    assert_same_metrics(halved, expected)
    alone = r"out of memory: lower training\.completions_per_step \(16\).* \(CUDA out of memory"
    with (
        limit_memory(lambda _, has_gradient: has_gradient),
        pytest.raises(TrialFailure, match=alone),
    ):
        run("too_small")
    assert worker_cache._cache is None
