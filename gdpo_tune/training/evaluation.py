"""Held-out evaluation: sampled with its own generator, standard errors clustered by prompt.

Shapes: P prompts, S completions of one prompt, M metrics.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gdpo_tune.core.completions import MOST, Completion, shortened
from gdpo_tune.core.errors import TrialFailure
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trials import Estimate
from gdpo_tune.tasks.base import Problem, Task
from gdpo_tune.training import ranks
from gdpo_tune.training.rollout import Decoding, generate
from gdpo_tune.training.scoring import require_finite, require_judged

Generate = Callable[
    [PreTrainedModel, Sequence[Sequence[int]], Decoding, torch.Generator], list[list[int]]
]
"""What samples completions: `rollout.generate`, or an engine that does the same."""

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
    sampler: Generate = generate,
    kept: list[Completion] | None = None,
) -> dict[str, Estimate]:
    """Mean and standard error of every metric of the task.

    The global random state stays as it is; equal arguments give equal estimates. Of several
    processes, each takes every n-th prompt, and all get the estimates over all prompts.

    Args:
        model: the policy.
        tokenizer: its tokenizer.
        task: judges the completions.
        held_out: P prompts.
        settings: `samples_per_prompt`, `max_completion_length`, and `completions_per_step` as the
            largest batch of all processes, because training has shown that it fits.
        seed: of the sampling.
        sampler: what samples.
        kept: gets the first completion of each of the first prompts of this process.

    Raises:
        NonFiniteError: a metric that is not a number.
    """
    # Equal draws in every process would make the noise of different prompts alike.
    generator = torch.Generator().manual_seed(seed + ranks.rank())
    decoding = Decoding(
        max_new_tokens=settings.max_completion_length,
        temperature=TEMPERATURE,
        end_tokens=end_tokens(model, tokenizer),
        pad_token=_token_id(tokenizer.pad_token_id),
    )
    size = settings.completions_per_step // ranks.count()
    mine = range(ranks.rank(), len(held_out.prompts), ranks.count())
    rows = [row for row in mine for _ in range(settings.samples_per_prompt)]
    columns: dict[str, list[float | None]] = {name: [] for name in task.metrics}
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        completions = sampler(model, [held_out.prompts[r] for r in batch], decoding, generator)
        texts: list[str] = tokenizer.batch_decode(completions, skip_special_tokens=True)
        problems = [held_out.problems[row] for row in batch]
        lengths = [len(completion) for completion in completions]
        scores = task.score(problems, texts, lengths)
        require_judged(scores.failures, len(batch))
        for name in task.metrics:
            values = scores.metrics[name]
            require_finite(values, f"metric {name}", f"on {held_out.split} prompts")
            columns[name].extend(values)
        if kept is not None:
            _keep(kept, problems, texts, scores.metrics)
    return clustered_estimates(_together(columns, settings), settings.samples_per_prompt, seed)


def _keep(
    kept: list[Completion],
    problems: Sequence[Problem],
    texts: Sequence[str],
    metrics: Mapping[str, Sequence[float | None]],
) -> None:
    """Add completions of prompts that are not there yet, up to as many as a trial keeps."""
    for index, (problem, text) in enumerate(zip(problems, texts, strict=True)):
        judged = {name: values[index] for name, values in metrics.items()}
        found = shortened(problem.prompt, text, judged)
        if len(kept) < MOST and found.prompt not in [other.prompt for other in kept]:
            kept.append(found)


def _together(
    columns: Mapping[str, Sequence[float | None]], settings: TrainingSettings
) -> dict[str, list[float | None]]:
    """The columns of all processes, in the order of the prompts."""
    width, parts = settings.samples_per_prompt, ranks.gather(columns)

    def ordered(name: str) -> list[float | None]:
        by_process = [iter(part[name]) for part in parts]
        total = sum(len(part[name]) for part in parts) // width
        owners = (by_process[prompt % len(parts)] for prompt in range(total))
        return [next(owner) for owner in owners for _ in range(width)]

    return {name: ordered(name) for name in columns}


def clustered_estimates(
    columns: Mapping[str, Sequence[float | None]], samples_per_prompt: int, seed: int
) -> dict[str, Estimate]:
    """Means of metrics, with standard errors from a bootstrap over whole prompts.

    Completions of one prompt are alike, so that resampling them one by one would understate the
    error.

    Args:
        columns: metric name -> P * S values, those of one prompt adjacent; None is left out.
        samples_per_prompt: S.
        seed: of the resampling.

    Returns:
        Metric name -> estimate; a single prompt gives a standard error of 0.

    Raises:
        TrialFailure: a metric without any value.
    """
    names = list(columns)
    values = np.array([columns[name] for name in names], dtype=np.float64)  # None becomes NaN
    values = values.reshape(len(names), -1, samples_per_prompt)
    scored = ~np.isnan(values)
    sums: NDArray[np.float64] = np.where(scored, values, 0.0).sum(axis=2)
    counts: NDArray[np.int64] = scored.sum(axis=2)
    for name, count in zip(names, counts.sum(axis=1), strict=True):
        if not count:
            raise TrialFailure(f"metric {name} has no value on any held-out completion")
    prompts = sums.shape[1]
    errors = np.zeros(len(names))
    if prompts > 1:
        # How often each prompt is drawn in each resample: one matrix product serves every metric.
        drawn = np.random.default_rng(seed).multinomial(
            prompts, np.full(prompts, 1 / prompts), size=RESAMPLES
        )
        resampled = counts @ drawn.T
        means = np.where(resampled > 0, sums @ drawn.T / np.maximum(resampled, 1), np.nan)
        errors = np.nan_to_num(np.nanstd(means, axis=1, ddof=1))
    means = sums.sum(axis=1) / counts.sum(axis=1)
    return {
        name: Estimate(mean=float(mean), se=float(error))
        for name, mean, error in zip(names, means, errors, strict=True)
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
