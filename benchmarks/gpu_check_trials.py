"""Functions that `gpu_check.py` runs in a process of its own: trials, adapters, blocks of steps.

They return plain figures, which `gpu_check_rows.py` judges.

Adapters: does the engine sample from the policy that is trained? The engine's log-probabilities e
of its own completions are compared with those of the trainer, t. In bfloat16 both differ by
rounding from token to token, by more than a small update changes them. So the update is weighed
over all tokens: with x and z, computed in float32 with and without the adapter, engine and trainer
see sum((e - z)(x - z)) and sum((t - z)(x - z)) of it. Rounding averages out. Their ratio is 1 where
the engine has what the trainer has, and 0 where it has the base alone. It is not a share of x
itself: what is added to an activation in bfloat16 is rounded in both.

Blocks: ours is `gdpo_tune.training.train` itself, ended after the last counted step. TRL's is a
plain `GRPOTrainer` with the same policy, prompts, arguments and engine.

Shapes: N tokens of all completions.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from paired_timing import Block, Plan, Stopwatch
from step import train_ours, train_plain
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

import gdpo_tune
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import self_check, train
from gdpo_tune.training.self_check import FollowingFigures
from gdpo_tune.training.trial import build_trainer
from gdpo_tune.training.worker_cache import open_worker_cache

UNSTEADY = ("gpu_utilisation", "gpu_memory", "gpu_peak")
"""Metrics that differ from run to run."""
PIECES = 40
"""Pieces in which a neighbour takes its share of the memory."""
PAUSE = 0.25
"""Seconds between two of its allocations."""


@dataclass
class TrainedTrial:
    """What a trial reported."""

    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step -> its metrics, without the unsteady ones."""
    test: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    checkpoint: str = ""
    copied: str = ""
    """Copy of the checkpoint at `copy_at`."""
    random_states: int = 0
    """Generator states of GPUs in that checkpoint."""
    peak_bytes: int = 0
    """Most bytes that torch reserved on the GPU; 0 on a CPU."""


def train_trial(config: TrialConfig, resume: str = "", copy_at: int = 0) -> TrainedTrial:
    """Train one trial, and copy its checkpoint at a step.

    Args:
        config: of the trial.
        resume: checkpoint to continue from; empty for none.
        copy_at: step whose checkpoint is copied, because a trial keeps only the newest ones.
    """
    result = TrainedTrial()

    def report(measurement, checkpoint) -> None:
        result.metrics[measurement.step] = {
            name: value
            for name, value in measurement.metrics.items()
            if not any(word in name for word in UNSTEADY)
        }
        if checkpoint is not None and measurement.step == copy_at:
            target = config.directory / "copied" / checkpoint.name
            result.copied = str(shutil.copytree(checkpoint, target))
            result.random_states = count_device_states(target)

    started = time.monotonic()
    outcome = train(config, resume=Path(resume) if resume else None, report=report)
    result.seconds = time.monotonic() - started
    result.test = {name: estimate.mean for name, estimate in outcome.test.items()}
    result.checkpoint = str(outcome.checkpoint or "")
    if torch.cuda.is_available():
        result.peak_bytes = torch.cuda.max_memory_reserved()
    return result


def measure_first_steps(configs: Sequence[TrialConfig]) -> list[float]:
    """Train trials one after the other in this process.

    Returns:
        Seconds from the start of each trial to its first step.
    """
    seconds: list[float] = []
    for number, config in enumerate(configs):
        started = time.monotonic()

        def report(measurement, checkpoint, number=number, started=started) -> None:
            if len(seconds) == number:
                seconds.append(time.monotonic() - started)

        train(config, resume=None, report=report)
    return seconds


def measure_adapters(
    configs: Sequence[TrialConfig], size: float, uses_vllm: bool
) -> tuple[list[float], AdapterFigures]:
    """Train all trials but the last one, and see what their engine sees of an adapter of it.

    Returns:
        Seconds to the first step of each trained trial, and `measure_adapter` of the last one.
    """
    return measure_first_steps(configs[:-1]), measure_adapter(configs[-1], size, uses_vllm)


def count_device_states(checkpoint: Path) -> int:
    states = torch.load(checkpoint / "rng_state.pth", weights_only=False).get("cuda")
    if states is None:
        return 0
    return 1 if isinstance(states, torch.Tensor) else len(states)


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
    devices: int
    """GPUs that the process sees."""


def resume_trial(config: TrialConfig) -> ResumedTrial:
    """Train a trial twice, the second time from the checkpoint in its middle."""
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
    if whole.test != resumed.test:
        unequal.append("test metrics")
    if not have_equal_weights(whole.checkpoint, resumed.checkpoint):
        unequal.append("weights")
    losses = [
        abs(whole.metrics[step]["train/loss"] - resumed.metrics[step]["train/loss"])
        for step in steps
    ]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    largest = max(losses, default=math.nan)
    return ResumedTrial(steps, unequal, largest, whole.random_states, devices)


def is_same(one: float | None, other: float | None) -> bool:
    """Return whether two figures have the same bits; NaN equals NaN."""
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


def have_equal_weights(one: str, other: str) -> bool:
    """Return whether two checkpoints hold bitwise equal policies."""
    first, second = (load_policy(path)[0].state_dict() for path in (one, other))
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


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


SYNCS = 20
"""Number of times that the engine gets the weights."""
COMPLETIONS = 512
FOLLOWED = 64
"""Completions that show whether the engine follows."""
ROWS = 32
"""Completions whose logits are computed at once."""
PAD, END = 0, 1
"""Tokens of the embedded policy's tokenizer."""


@dataclass(frozen=True)
class AdapterFigures:
    """What `measure_adapter` found."""

    base_equal: bool
    """True if every bit of the frozen weights is as before."""
    syncs: int
    """Times that the engine got the weights, or steps that were trained without an engine."""
    seen: float | None = None
    """What the engine sees of the update, by what the trainer sees; None without vLLM."""
    error: float | None = None
    """Standard error of that ratio."""
    distance: float | None = None
    """Mean absolute difference between engine and trainer with the adapter, in nats a token."""
    distance_without: float | None = None
    """The same with an adapter of zeros."""


def measure_adapter(config: TrialConfig, size: float, uses_vllm: bool) -> AdapterFigures:
    """Give an adapter entries of +-`size`, and compare the engine with the trainer.

    Without vLLM the trainer's own weights sample, so there is no engine to compare; a short
    training shows that the base stays as it is.
    """
    with open_worker_cache(config) as cache:
        trainer: Any = build_trainer(config, cache)[0]
        before = copy_base(trainer.policy)
        if not uses_vllm:
            trainer.train()
            return AdapterFigures(has_base(trainer.policy, before), config.training.steps)
        prompts = cache.load_split("train").prompts
        rows = [list(prompts[row % len(prompts)]) for row in range(COMPLETIONS)]
        fill_adapter(trainer.policy, 0.0)
        trainer.vllm_generation.sync_weights()
        plain = compare_log_probabilities(trainer, rows)
        fill_adapter(trainer.policy, size)
        for _ in range(SYNCS):
            trainer.vllm_generation.sync_weights()
        compared = compare_log_probabilities(trainer, rows)
        seen, error = fit_ratio(
            compared.engine - compared.base,
            compared.trainer - compared.base,
            compared.exact - compared.base,
        )
        return AdapterFigures(
            base_equal=has_base(trainer.policy, before),
            syncs=SYNCS,
            seen=seen,
            error=error,
            distance=compared.measure_distance(),
            distance_without=plain.measure_distance(),
        )


def copy_base(policy: Any) -> dict[str, Tensor]:
    """Return a copy of every frozen weight by its name, on its device."""
    frozen = ((n, w) for n, w in policy.named_parameters() if not w.requires_grad)
    return {name: weight.detach().clone() for name, weight in frozen}


def has_base(policy: Any, copies: Mapping[str, Tensor]) -> bool:
    """Return whether every frozen weight has the bits of its copy."""
    weights = dict(policy.named_parameters())
    return all(torch.equal(weights[name], copied) for name, copied in copies.items())


@torch.no_grad()
def fill_adapter(policy: Any, size: float) -> None:
    """Set every entry of the adapters' second factors to +-`size`."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in policy.named_parameters():
        if ".lora_B." in name:
            signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
            weight.copy_(signs * size)


@dataclass(frozen=True)
class LogProbabilities:
    """Log-probabilities of the N tokens that the engine sampled."""

    engine: Tensor
    trainer: Tensor
    """In the precision of the training."""
    exact: Tensor
    """In float32."""
    base: Tensor
    """In float32, without the adapter."""

    def measure_distance(self) -> float:
        """Return the mean absolute difference between engine and trainer, in nats a token."""
        return float((self.engine - self.trainer).abs().mean())


def compare_log_probabilities(trainer: Any, prompts: Sequence[list[int]]) -> LogProbabilities:
    """Sample with the engine, and compute the log-probabilities of its tokens in other ways."""
    pairs, engine = sample(trainer, prompts)
    temperature = trainer.temperature
    exact = copy.deepcopy(trainer.policy.get_base_model()).float().eval()
    # The trainer has replaced it by one that computes in bfloat16, with the original's weights.
    vars(exact).pop("forward", None)
    with_adapter = compute_log_probabilities(exact, pairs, temperature)
    fill_adapter(exact, 0.0)
    return LogProbabilities(
        engine=engine,
        trainer=compute_log_probabilities(trainer.policy.eval(), pairs, temperature),
        exact=with_adapter,
        base=compute_log_probabilities(exact, pairs, temperature),
    )


Pairs = list[tuple[list[int], list[int]]]
"""Tokens of prompts, each with those of a completion."""


def sample(trainer: Any, prompts: Sequence[list[int]]) -> tuple[Pairs, Tensor]:
    """Sample a completion a prompt; return both, and the engine's log-probabilities of N tokens."""
    _, completions, scores, _ = trainer.vllm_generation.generate(
        prompts=list(prompts), images=None, num_generations=1
    )
    pairs = list(zip(prompts, map(list, completions), strict=True))
    return pairs, torch.tensor([values[0] for row in scores for values in row])


def measure_following(config: TrialConfig) -> FollowingFigures:
    """Change the trainer's weights, and see whether the engine follows, as each trial does."""
    with open_worker_cache(config) as cache:
        trainer: Any = build_trainer(config, cache)[0]
        prompts = cache.load_split("train").prompts
        rows = [list(prompts[row % len(prompts)]) for row in range(FOLLOWED)]
        trainer.vllm_generation.sync_weights()
        return self_check.measure_following(trainer, rows, trainer.max_completion_length)


@torch.no_grad()
def compute_log_probabilities(model: Any, pairs: Pairs, temperature: float) -> Tensor:
    """Compute the log-probabilities of completions, given their prompts; N on the CPU."""
    rows: list[Tensor] = []
    for start in range(0, len(pairs), ROWS):
        batch = pairs[start : start + ROWS]
        longest = max(len(prompt) + len(completion) for prompt, completion in batch)
        tokens = torch.full((len(batch), longest), PAD, device=model.device)
        mask = torch.zeros_like(tokens)
        for row, (prompt, completion) in enumerate(batch):
            length = len(prompt) + len(completion)
            tokens[row, :length] = tokens.new_tensor(prompt + completion)
            mask[row, :length] = 1
        logits = model(input_ids=tokens, attention_mask=mask).logits
        for row, (prompt, completion) in enumerate(batch):
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


SPREAD = 0.02
"""Standard deviation of the weights, as Qwen's are initialised."""
VOCABULARY = 151_936
"""Tokens of the Qwen policies: the logits are as wide as theirs."""
TOKENIZER = Path(gdpo_tune.__file__).parent / "policies" / "embedded"
SHAPES: Mapping[str, Callable[[], Any]] = {
    "qwen3-0.6b": lambda: Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": lambda: Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    ),
    "tiny": lambda: Qwen3Config(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    ),
}


def write_policy(directory: str, shape: str) -> int:
    """Write a policy with random weights and return its number of parameters.

    Args:
        directory: created if missing.
        shape: a key of `SHAPES`; the weights are those of the same architecture and size.
    """
    config = SHAPES[shape]()
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
    _write_tokenizer(target, config.vocab_size)
    return model.num_parameters()


def _write_tokenizer(directory: Path, size: int) -> None:
    """Write the embedded policy's tokenizer with a text for each of `size` tokens."""
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    known = [*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])]
    for token in range(1 + max(known), size):
        vocabulary[f"x{token:06d}"] = token  # no text becomes it, but it has a text
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(TOKENIZER / "tokenizer_config.json", directory)


def run(plan: Plan, ours: bool, seed: int) -> Block:
    """Train a fresh trainer for a few steps and measure all but the first ones."""
    transformers_logging.disable_progress_bar()
    watch = Stopwatch(plan.steps, read_finish_time, plan.warm_up)
    with tempfile.TemporaryDirectory() as directory:
        config = plan.build_config(seed, Path(directory))
        (train_ours if ours else train_plain)(config, watch)
    if not torch.cuda.is_available():
        return watch.build_block()
    peak = torch.cuda.max_memory_allocated() / 2**20
    return watch.build_block(peak, torch.cuda.get_device_name())


def read_finish_time() -> float:
    """Wait until the GPU has finished its work and return the time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
