"""What the check runs in processes of its own: trials, adapters, blocks of steps; plain figures.

Adapters: does the engine sample from the policy that is trained? The engine's log-probabilities e
of its own completions are compared with those of the trainer, t. In bfloat16 both differ by
rounding from token to token, by more than a small update changes them. So the update is weighed
over all tokens: with x and z, computed in float32 with and without the adapter, engine and trainer
see sum((e - z)(x - z)) and sum((t - z)(x - z)) of it. Rounding averages out. Their ratio is 1 where
the engine has what the trainer has, and 0 where it has the base alone. It is not a share of x
itself: what is added to an activation in bfloat16 is rounded in both.

Shapes: N tokens of all completions.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from harness import build_config
from paired_timing import Block, Plan, Stopwatch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

import gdpo_tune
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import self_check, train
from gdpo_tune.training.self_check import FollowingFigures
from gdpo_tune.training.trial import build_trainer
from gdpo_tune.training.trl_arguments import uses_bfloat16
from gdpo_tune.training.worker_cache import open_worker_cache

UNSTEADY = ("gpu_utilisation", "gpu_memory", "gpu_peak")
"""Metrics that differ from run to run."""
SYNCS = 20
"""Number of times that the engine gets the weights."""
COMPLETIONS, FOLLOWED = 512, 64
"""Completions that show what an engine sees of an adapter, and whether it follows."""
ROWS = 32
"""Completions whose logits are computed at once."""
PIECES, PAUSE = 40, 0.25
"""Pieces in which a neighbour takes its share of the memory, and seconds between two of them."""


def run_kernel() -> tuple[tuple[int, int], float]:
    """Return the compute capability of the GPU, and the sum of a product of ones on it."""
    ones = torch.ones(64, 64, device="cuda")
    return torch.cuda.get_device_capability(), float((ones @ ones).sum())


def compare_bfloat16(config: TrialConfig) -> tuple[bool, bool]:
    """Return whether the device computes in bfloat16, and whether `model.dtype: auto` does."""
    return torch.cuda.is_bf16_supported(including_emulation=False), uses_bfloat16(config)


@dataclass
class TrainedTrial:
    """What a trial reported."""

    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step -> its metrics, without the unsteady ones."""
    test: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    first_step: float = 0.0
    """Seconds from the start to the first step."""
    checkpoint: str = ""
    copied: str = ""
    """Copy of the checkpoint at `copy_at`."""
    peak_bytes: int = 0
    """Most bytes that torch reserved on the GPU; 0 on a CPU."""


def train_trial(config: TrialConfig, resume: str = "", copy_at: int = 0) -> TrainedTrial:
    """Train one trial, from a checkpoint if one is named.

    The checkpoint at the step `copy_at` is copied, because a trial keeps only the newest ones.
    """
    result, started = TrainedTrial(), time.monotonic()

    def report(measurement, checkpoint) -> None:
        result.first_step = result.first_step or time.monotonic() - started
        result.metrics[measurement.step] = {
            name: value
            for name, value in measurement.metrics.items()
            if not any(word in name for word in UNSTEADY)
        }
        if checkpoint is not None and measurement.step == copy_at:
            target = config.directory / "copied" / checkpoint.name
            result.copied = str(shutil.copytree(checkpoint, target))

    outcome = train(config, resume=Path(resume) if resume else None, report=report)
    result.seconds = time.monotonic() - started
    result.test = {name: estimate.mean for name, estimate in outcome.test.items()}
    result.checkpoint = str(outcome.checkpoint or "")
    if torch.cuda.is_available():
        result.peak_bytes = torch.cuda.max_memory_reserved()
    return result


@dataclass(frozen=True)
class ResumedTrial:
    """A trial that ran once without interruption and once from the checkpoint in its middle."""

    steps: list[int]
    """Steps of the second run."""
    unequal: list[str]
    """What differs between the runs, as `step 3 train/loss`."""
    largest_difference: float
    """Of a loss."""
    random_states: int
    """Generator states of GPUs in the checkpoint."""
    devices: int
    """GPUs that the process sees."""


def resume_trial(config: TrialConfig, on_cpu: bool) -> ResumedTrial:
    """Train a trial twice, the second time from the checkpoint in its middle."""
    if on_cpu:  # before CUDA is asked for anything
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    middle = config.training.steps // 2
    whole = train_trial(config, copy_at=middle)
    again = replace(config, directory=config.directory.with_name(f"{config.directory.name}_again"))
    resumed = train_trial(again, resume=whole.copied)
    steps = [step for step in resumed.metrics if step > middle]
    unequal = [
        f"step {step} {name}"
        for step in steps
        for name in sorted({*whole.metrics[step], *resumed.metrics[step]})
        if not is_same(whole.metrics[step].get(name), resumed.metrics[step].get(name))
    ]
    unequal += ["test metrics"] * (whole.test != resumed.test)
    first, second = (load_policy(one.checkpoint)[0].state_dict() for one in (whole, resumed))
    equal = all(torch.equal(first[name], second[name]) for name in first)
    unequal += ["weights"] * (first.keys() != second.keys() or not equal)
    loss = "train/loss"
    losses = [abs(whole.metrics[step][loss] - resumed.metrics[step][loss]) for step in steps]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    states = count_device_states(Path(whole.copied))
    return ResumedTrial(steps, unequal, max(losses, default=math.nan), states, devices)


def is_same(one: float | None, other: float | None) -> bool:
    """Return whether two figures have the same bits; NaN equals NaN."""
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


def count_device_states(checkpoint: Path) -> int:
    states = torch.load(checkpoint / "rng_state.pth", weights_only=False).get("cuda")
    if states is None:
        return 0
    return 1 if isinstance(states, torch.Tensor) else len(states)


def grow_and_shrink(share: float) -> None:
    """Take a share of the GPU piece by piece, release it, and begin again, until killed."""
    total = torch.cuda.get_device_properties(0).total_memory
    pieces: list[torch.Tensor] = []
    while True:
        for _ in range(PIECES):
            pieces.append(torch.ones(int(total * share / PIECES), dtype=torch.int8, device="cuda"))
            time.sleep(PAUSE)
        pieces.clear()
        torch.cuda.empty_cache()
        time.sleep(PAUSE)


def time_block(plan: Plan, is_ours: bool) -> tuple[Block, float]:
    """Train a fresh trainer for a few steps; return those after its warm-up, and the peak in MiB.

    Ours is `gdpo_tune.training.train` itself, ended after the last counted step. TRL's is a plain
    `GRPOTrainer` with the same policy, prompts, arguments and engine.
    """
    from step import train_ours, train_plain

    transformers_logging.disable_progress_bar()
    watch = Stopwatch(plan.steps, read_finish_time, plan.warm_up)
    with tempfile.TemporaryDirectory() as directory:
        (train_ours if is_ours else train_plain)(plan.build_config(0, Path(directory)), watch)
    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0
    return watch.build_block(), peak


def read_finish_time() -> float:
    """Wait until the GPU has finished its work and return the time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class AdapterFigures:
    """What `measure_adapters` found."""

    first_steps: list[float]
    """Seconds to the first step of each trained trial, of which all but one keep the engine."""
    base_equal: bool
    """True if every bit of the frozen weights is as before."""
    seen: float = math.nan
    """What the engine sees of the update, by what the trainer sees; NaN without vLLM."""
    error: float = math.nan
    """Standard error of that ratio."""
    distance: float = math.nan
    """Mean absolute difference between engine and trainer with the adapter, in nats a token."""
    distance_without: float = math.nan
    """The same with an adapter of zeros."""


def measure_adapters(
    configs: Sequence[TrialConfig], size: float, uses_vllm: bool
) -> AdapterFigures:
    """Train all trials but the last one, give that an adapter of +-`size`, and compare its engine.

    Without vLLM the trainer's own weights sample, so there is no engine to compare; a short
    training shows that the base stays as it is.
    """
    seconds = [train_trial(config).first_step for config in configs[:-1]]
    with open_worker_cache(configs[-1]) as cache:
        trainer: Any = build_trainer(configs[-1], cache)[0]
        frozen = {n: w for n, w in trainer.model.named_parameters() if not w.requires_grad}
        before = {name: weight.detach().clone() for name, weight in frozen.items()}

        def has_base() -> bool:
            weights = dict(trainer.model.named_parameters())
            return all(torch.equal(weights[name], copied) for name, copied in before.items())

        if not uses_vllm:
            trainer.train()
            return AdapterFigures(seconds, has_base())
        rows = list_prompts(cache, COMPLETIONS)
        fill_adapter(trainer.model, 0.0)
        trainer.vllm_generation.sync_weights()
        engine, by_trainer, *_ = compute_in_other_ways(trainer, rows)
        without = float((engine - by_trainer).abs().mean())
        fill_adapter(trainer.model, size)
        for _ in range(SYNCS):
            trainer.vllm_generation.sync_weights()
        engine, by_trainer, exact, base = compute_in_other_ways(trainer, rows)
        seen, error = fit_ratio(engine - base, by_trainer - base, exact - base)
        distance = float((engine - by_trainer).abs().mean())
        return AdapterFigures(seconds, has_base(), seen, error, distance, without)


def measure_following(config: TrialConfig) -> FollowingFigures:
    """Change the trainer's weights, and see whether the engine follows, as each trial does."""
    with open_worker_cache(config) as cache:
        trainer: Any = build_trainer(config, cache)[0]
        rows = list_prompts(cache, FOLLOWED)
        trainer.vllm_generation.sync_weights()
        return self_check.measure_following(trainer, rows, trainer.max_completion_length)


def list_prompts(cache: Any, count: int) -> list[list[int]]:
    prompts = cache.load_split("train").prompts
    return [list(prompts[row % len(prompts)]) for row in range(count)]


@torch.no_grad()
def fill_adapter(policy: Any, size: float) -> None:
    """Set every entry of the adapters' second factors to +-`size`."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in policy.named_parameters():
        if ".lora_B." in name:
            signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
            weight.copy_(signs * size)


def compute_in_other_ways(
    trainer: Any, prompts: Sequence[list[int]]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample with the engine, and return log-probabilities of its N tokens.

    They are those of the engine; of the trainer, in the precision of the training; in float32; and
    in float32 without the adapter.
    """
    _, completions, scores, _ = trainer.vllm_generation.generate(
        prompts=list(prompts), images=None, num_generations=1
    )
    pairs = list(zip(prompts, map(list, completions), strict=True))
    temperature = trainer.temperature
    exact = copy.deepcopy(trainer.model.get_base_model()).float().eval()
    # The trainer has replaced it by one that computes in bfloat16, with the original's weights.
    vars(exact).pop("forward", None)
    with_adapter = compute_log_probabilities(exact, pairs, temperature)
    fill_adapter(exact, 0.0)
    return (
        torch.tensor([values[0] for row in scores for values in row]),
        compute_log_probabilities(trainer.model.eval(), pairs, temperature),
        with_adapter,
        compute_log_probabilities(exact, pairs, temperature),
    )


@torch.no_grad()
def compute_log_probabilities(
    model: Any, pairs: Sequence[tuple[list[int], list[int]]], temperature: float
) -> Tensor:
    """Compute the log-probabilities of completions, given their prompts; N on the CPU."""
    rows: list[Tensor] = []
    for start in range(0, len(pairs), ROWS):
        batch = [torch.tensor([*prompt, *end]) for prompt, end in pairs[start : start + ROWS]]
        tokens = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True).to(model.device)
        lengths = torch.tensor([len(row) for row in batch], device=model.device)
        mask = (torch.arange(tokens.shape[1], device=model.device) < lengths[:, None]).long()
        logits = model(input_ids=tokens, attention_mask=mask).logits
        for row, (prompt, completion) in enumerate(pairs[start : start + ROWS]):
            first, end = len(prompt), len(prompt) + len(completion)
            scores = logits[row, first - 1 : end - 1].float() / temperature
            chosen = tokens[row, first:end, None]
            rows.append(scores.log_softmax(-1).gather(-1, chosen)[:, 0].cpu())
    return torch.cat(rows)


def fit_ratio(one: Tensor, other: Tensor, weights: Tensor) -> tuple[float, float]:
    """Return the ratio of two weighed sums over N tokens, and its standard error.

    Raises:
        ValueError: the second sum is 0.
    """
    one, other, weights = one.double(), other.double(), weights.double()
    total = (other * weights).sum()
    if not total:
        raise ValueError("the adapter changes no log-probability, so there is nothing to compare")
    ratio = (one * weights).sum() / total
    rest = ((one - ratio * other) * weights).square().sum().sqrt()
    return float(ratio), float(rest / total.abs())


PAD, END = 0, 1
"""Tokens of the embedded policy's tokenizer."""
SPREAD = 0.02
"""Standard deviation of the weights, as Qwen's are initialised."""
TOKENIZER = Path(gdpo_tune.__file__).parent / "policies" / "embedded"


def write_policy(directory: str, shape: str) -> int:
    """Write a policy and the embedded tokenizer; return its number of parameters."""
    config = build_config(shape)
    config.pad_token_id, config.eos_token_id = PAD, END
    # On the CPU: on a device that does not work, the first step of the check has to say so. Drawn
    # here: Transformers draws every number several times, which takes a minute.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        drawn = torch.empty(weight.shape)
        weight.data = drawn.normal_(std=SPREAD, generator=generator).to(weight.dtype)
        if weight.ndim == 1:  # of a normalization
            weight.data.fill_(1)
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=PAD)
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    known = [*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])]
    for token in range(1 + max(known), config.vocab_size):
        vocabulary[f"x{token:06d}"] = token  # no text becomes it, but it has a text
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(TOKENIZER / "tokenizer_config.json", target)
    return model.num_parameters()
