"""Adapters in the engine, for `gpu_check.py`: does it sample from the policy that is trained?

The engine's log-probabilities e of its own completions are compared with those of the trainer, t.
In bfloat16 both differ by rounding from token to token, by more than a small update changes them.
So the update is weighed over all tokens: with x and z, computed in float32 with and without the
adapter, engine and trainer see sum((e - z)(x - z)) and sum((t - z)(x - z)) of it. Rounding averages
out. Their ratio is 1 where the engine has what the trainer has, and 0 where it has the base alone.
It is not a share of x itself: what is added to an activation in bfloat16 is rounded in both.

Shapes: N tokens of all completions.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training.build import build_trainer
from gdpo_tune.training.worker_cache import open_worker_cache

SYNCS = 100
"""Number of times that the engine gets the weights."""
COMPLETIONS = 512


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
        before = hash_base(trainer.policy)
        if not uses_vllm:
            trainer.train()
            return AdapterFigures(hash_base(trainer.policy) == before, config.training.steps)
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
            base_equal=hash_base(trainer.policy) == before,
            syncs=SYNCS,
            seen=seen,
            error=error,
            distance=compared.measure_distance(),
            distance_without=plain.measure_distance(),
        )


def hash_base(policy: Any) -> str:
    """Return a hash of every frozen weight."""
    digest = hashlib.sha256()
    for name, weight in policy.named_parameters():
        if not weight.requires_grad:
            digest.update(name.encode())
            digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
    _, completions, theirs, _ = trainer.vllm_generation.generate(
        prompts=list(prompts), images=None, num_generations=1
    )
    pairs = list(zip(prompts, map(list, completions), strict=True))
    temperature = trainer.temperature
    exact = copy.deepcopy(trainer.policy.get_base_model()).float().eval()
    # The trainer has replaced it by one that computes in bfloat16, with the original's weights.
    vars(exact).pop("forward", None)
    with_adapter = compute_log_probabilities(exact, pairs, temperature)
    fill_adapter(exact, 0.0)
    return LogProbabilities(
        engine=torch.tensor([values[0] for row in theirs for values in row]),
        trainer=compute_log_probabilities(trainer.policy.eval(), pairs, temperature),
        exact=with_adapter,
        base=compute_log_probabilities(exact, pairs, temperature),
    )


@torch.no_grad()
def compute_log_probabilities(
    model: Any, pairs: Sequence[tuple[list[int], list[int]]], temperature: float
) -> Tensor:
    """Compute the log-probabilities of completions, given their prompts; N on the CPU."""
    rows: list[Tensor] = []
    for prompt, completion in pairs:
        tokens = torch.tensor([prompt + completion], device=model.device)
        logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float() / temperature
        chosen = tokens[0, len(prompt) :, None]
        rows.append(logits.log_softmax(-1).gather(-1, chosen)[:, 0].cpu())
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
