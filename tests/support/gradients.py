"""Two steps of a trainer, with their gradients and logs, on rewards without a sandbox."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from gdpo_tune.training.memory import MicroBatchLimit
from gdpo_tune.training.rollout import sample_for_trainer
from gdpo_tune.training.trainer import GDPOTrainer
from tests.support.training import build_plain_trainer

ROWS = 16
"""Completions of a step."""
COUNTED_BY_TOKEN = ("loss", "grad_norm", "entropy", "kl", "clip_ratio/region_mean")


class KeptGradients(TrainerCallback):
    """Gradients of every optimizer step, before the weights change, and the logs."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []
        self.logs: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(gradients).clone())

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.logs.append(dict(logs))


def vowels(completions, **_):
    return [float(sum(c in "aeiou" for c in text)) for text in completions]


def short(completion_ids, **_):
    return [float(len(ids) < 5) for ids in completion_ids]


@dataclass
class TwoSteps:
    """What two steps of a training have computed and drawn."""

    kept: KeptGradients
    sampled: list[list[list[int]]] = field(default_factory=list)
    advantages: list[torch.Tensor] = field(default_factory=list)
    state: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    updates_per_step: int = 0
    limit: MicroBatchLimit | None = None
    """The limit of micro-batches at the end, if memory has run out."""
    weights: torch.Tensor = field(default_factory=lambda: torch.empty(0))


def run_two_steps(
    policy: str, directory: Path, micro: int | MicroBatchLimit, mini: int = ROWS, **changes: Any
) -> TwoSteps:
    """Run two steps in mini-batches of `mini` completions and micro-batches of at most `micro`."""
    run = TwoSteps(KeptGradients())

    def keep_samples(prompts, trainer):
        drawn = sample_for_trainer(prompts, trainer)
        run.sampled.append(drawn["completion_ids"])
        return drawn

    trainer = build_plain_trainer(
        policy,
        directory,
        cls=GDPOTrainer,
        normalization="gdpo",
        reward_funcs=[vowels, short],
        rollout_func=keep_samples,
        limit=micro if isinstance(micro, MicroBatchLimit) else MicroBatchLimit(micro),
        per_device_train_batch_size=mini,
        steps_per_generation=ROWS // mini,
        max_steps=2 * changes.get("num_iterations", 1) * ROWS // mini,
        max_grad_norm=1e9,  # nothing is scaled, so that gradients are those of the loss
        optim="sgd",  # Adam would enlarge the rounding error of gradients near 0
        **changes,
    )
    compute = trainer._compute_advantages

    def keep_advantages(rewards, weights, group_size):
        run.advantages.append(compute(rewards, weights, group_size))
        return run.advantages[-1]

    trainer._compute_advantages = keep_advantages
    trainer.add_callback(run.kept)
    trainer.train()
    run.state, run.updates_per_step = torch.random.get_rng_state(), trainer.updates_per_step
    run.limit = trainer.limit if trainer.ran_out_of_memory else None
    run.weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
    return run


def assert_same_steps(run: TwoSteps, expected: TwoSteps, rel: float) -> None:
    """Compare gradients up to rounding, logs up to ten times of it, and draws bit by bit."""
    assert run.sampled == expected.sampled
    assert torch.equal(run.state, expected.state), "no draw more or less"
    gradients = list(zip(run.kept.gradients, expected.kept.gradients, strict=True))
    for ours, theirs in gradients:
        assert theirs.norm() > 1e-3
        assert (ours - theirs).norm() <= rel * theirs.norm()
    for ours, theirs in zip(run.kept.logs, expected.kept.logs, strict=True):
        assert set(ours) == set(theirs)
        for name in COUNTED_BY_TOKEN:
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=10 * rel, abs=1e-6), name
