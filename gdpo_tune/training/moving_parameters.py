"""Reward weights and learning rate that change while a trial trains: `TrialConfig.schedule`.

New values are set before the first sample of a step, from the schedule alone and never from what a
checkpoint holds. So a trial that goes on from its own checkpoint, or from one of a training that
had the same values until then, is bitwise the one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from gdpo_tune.core.trials import Params, TrialConfig
from gdpo_tune.training.trainer import GDPOTrainer


class Schedule(TrainerCallback):
    """Sets what the schedule asks for at the beginning of a step."""

    def __init__(self, config: TrialConfig, rewards: Sequence[str], trainer: GDPOTrainer) -> None:
        """
        Args:
            config: with a schedule.
            rewards: in the order of the trainer's weights.
            trainer: as it was made of the config's own parameters.
        """
        self._config = config
        self._rewards = rewards
        self._trainer = trainer
        self._holding: Params | None = None
        """What was set last; None: whatever a checkpoint had."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before an optimizer pass; samples are drawn in the first one of a step."""
        step = state.global_step // self._trainer.num_iterations
        params = self._config.params_at(step)
        if params != self._holding:
            set_weights(self._trainer, self._config.reward_weights(step), self._rewards)
            set_learning_rate(self._trainer, float(params["learning_rate"]))
            self._holding = params


def set_weights(trainer: GDPOTrainer, weights: Mapping[str, float], rewards: Sequence[str]) -> None:
    """Give a trainer other reward weights."""
    values = [weights[name] for name in rewards]
    trainer.reward_weights = torch.tensor(values, dtype=trainer.reward_weights.dtype)


def set_learning_rate(trainer: GDPOTrainer, peak: float) -> None:
    """Give a trainer's optimizer another peak learning rate, whose shape over the steps stays.

    Args:
        trainer: in the middle of training.
        peak: learning rate where the shape is 1, in an optimizer's units.
    """
    trained: Any = trainer  # TRL declares as optional what exists once training has begun
    scheduler = trained.lr_scheduler
    # As LambdaLR computes it, so that the same value gives the same bits.
    rates = [peak * shape(scheduler.last_epoch) for shape in scheduler.lr_lambdas]
    peaks = [peak] * len(rates)
    scheduler.load_state_dict(
        {**scheduler.state_dict(), "base_lrs": peaks, "_last_lr": list(rates)}
    )
    for group, rate in zip(trained.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
