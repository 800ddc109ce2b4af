"""Held-out evaluation: sampled with its own generator, standard errors clustered by prompt.

Shapes: P prompts, S completions of one prompt, M metrics.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gdpo_tune.tasks.base import Problem, Task
from gdpo_tune.training.rollout import Decoding, generate
from gdpo_tune.training.scoring import require_finite
from gdpo_tune.trials import Estimate, TrainingSettings

TEMPERATURE = 1.0
"""Of every evaluation, whatever a trial trains with: objectives compare policies, not decoding."""
RESAMPLES = 1000


@dataclass(frozen=True)
class HeldOut:
    """Prompts of one split, ready to be evaluated on."""

    split: str
    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]
    """P tokenized prompts."""


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    held_out: HeldOut,
    settings: TrainingSettings,
    seed: int,
) -> dict[str, Estimate]:
    """Mean and standard error of every metric of the task.

    The global random state stays as it is; equal arguments give equal estimates.

    Args:
        model: the policy.
        tokenizer: its tokenizer.
        task: judges the completions.
        held_out: P prompts.
        settings: `samples_per_prompt`, `max_completion_length`, and `completions_per_step` as the
            largest batch, because training has shown that it fits.
        seed: of the sampling.

    Raises:
        NonFiniteError: a metric that is not a number.
    """
    generator = torch.Generator().manual_seed(seed)
    decoding = Decoding(
        max_new_tokens=settings.max_completion_length,
        temperature=TEMPERATURE,
        end_tokens=end_tokens(model, tokenizer),
        pad_token=_token_id(tokenizer.pad_token_id),
    )
    rows = [row for row in range(len(held_out.prompts)) for _ in range(settings.samples_per_prompt)]
    columns: dict[str, list[float]] = {name: [] for name in task.metrics}
    for start in range(0, len(rows), settings.completions_per_step):
        batch = rows[start : start + settings.completions_per_step]
        completions = generate(model, [held_out.prompts[r] for r in batch], decoding, generator)
        texts: list[str] = tokenizer.batch_decode(completions, skip_special_tokens=True)
        problems = [held_out.problems[row] for row in batch]
        lengths = [len(completion) for completion in completions]
        metrics = task.score(problems, texts, lengths).metrics
        for name in task.metrics:
            require_finite(metrics[name], f"metric {name}", f"on {held_out.split} prompts")
            columns[name].extend(metrics[name])
    return clustered_estimates(columns, settings.samples_per_prompt, seed)


def clustered_estimates(
    columns: Mapping[str, Sequence[float]], samples_per_prompt: int, seed: int
) -> dict[str, Estimate]:
    """Means of metrics, with standard errors from a bootstrap over whole prompts.

    Completions of one prompt are alike, so that resampling them one by one would understate the
    error.

    Args:
        columns: metric name -> P * S values, those of one prompt adjacent.
        samples_per_prompt: S.
        seed: of the resampling.

    Returns:
        Metric name -> estimate; a single prompt gives a standard error of 0.
    """
    names = list(columns)
    values = np.array([columns[name] for name in names], dtype=np.float64)
    by_prompt: NDArray[np.float64] = values.reshape(len(names), -1, samples_per_prompt).mean(axis=2)
    prompts = by_prompt.shape[1]
    errors = np.zeros(len(names))
    if prompts > 1:
        # How often each prompt is drawn in each resample: one matrix product serves every metric.
        drawn = np.random.default_rng(seed).multinomial(
            prompts, np.full(prompts, 1 / prompts), size=RESAMPLES
        )
        errors = (by_prompt @ drawn.T / prompts).std(axis=1, ddof=1)
    return {
        name: Estimate(mean=float(mean), se=float(error))
        for name, mean, error in zip(names, by_prompt.mean(axis=1), errors, strict=True)
    }


def evaluation_seed(seed: int, split: str, step: int) -> int:
    """A seed that depends on the trial, the split and the step, and on nothing else."""
    digest = hashlib.sha256(f"{seed}/{split}/{step}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's, then those that the model declares."""
    config: Any = model.generation_config
    declared = config.eos_token_id
    if declared is None:
        declared = []
    elif isinstance(declared, int):
        declared = [declared]
    return tuple(dict.fromkeys([_token_id(tokenizer.eos_token_id), *declared]))


def _token_id(token: Any) -> int:
    assert isinstance(token, int), "load_policy refuses a policy without a pad or end token"
    return token
