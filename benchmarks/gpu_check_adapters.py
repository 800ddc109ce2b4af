"""Adapters in the engine, for `gpu_check.py`: does it sample from the policy that is trained?

The engine's log-probabilities e of its own completions are compared with the trainer's, computed in
float32: t with the adapter and z without. The share of the update that the engine sees is the slope
of e - z over t - z. It is 1 where the engine has the whole adapter and 0 where it has the base
alone. The engine's rounding, which is larger than a small update, averages out over the tokens.

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

from gdpo_tune.core.trials import TrialConfig
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
    """Share of the update that the engine sees; None without vLLM."""
    error: float | None = None
    """Standard error of that share."""
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
        engine, without, _ = compare_log_probabilities(trainer, rows)
        distance_without = float((engine - without).abs().mean())
        fill_adapter(trainer.policy, size)
        for _ in range(SYNCS):
            trainer.vllm_generation.sync_weights()
        engine, without, trained = compare_log_probabilities(trainer, rows)
        seen, error = fit_share(engine - without, trained - without)
        return AdapterFigures(
            base_equal=hash_base(trainer.policy) == before,
            syncs=SYNCS,
            seen=seen,
            error=error,
            distance=float((engine - trained).abs().mean()),
            distance_without=distance_without,
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


def compare_log_probabilities(
    trainer: Any, prompts: Sequence[list[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample with the engine; return log-probabilities of its N tokens.

    Returns:
        Those of the engine, and in float32 those of the trainer without and with the adapter.
    """
    _, completions, theirs, _ = trainer.vllm_generation.generate(
        prompts=list(prompts), images=None, num_generations=1
    )
    engine = torch.tensor([values[0] for row in theirs for values in row])
    exact = copy.deepcopy(trainer.policy.get_base_model()).float().eval()
    # The trainer has replaced it by one that computes in bfloat16, with the original's weights.
    vars(exact).pop("forward", None)
    pairs = list(zip(prompts, map(list, completions), strict=True))
    trained = compute_log_probabilities(exact, pairs, trainer.temperature)
    fill_adapter(exact, 0.0)
    return engine, compute_log_probabilities(exact, pairs, trainer.temperature), trained


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


def fit_share(seen: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Fit `seen` = share x `wanted` over N tokens; return the share and its standard error.

    Raises:
        ValueError: `wanted` is 0 for every token.
    """
    seen, wanted = seen.double(), wanted.double()
    square = wanted.square().sum()
    if not square:
        raise ValueError("the adapter changes no log-probability, so there is nothing to compare")
    share = (seen * wanted).sum() / square
    rest = (seen - share * wanted).square().sum() / max(1, len(wanted) - 1)
    return float(share), float((rest / square).sqrt())
