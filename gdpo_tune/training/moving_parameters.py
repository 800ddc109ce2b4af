"""Reward weights and learning rate that change while a trial trains: `TrialConfig.schedule`.

New values are set before a step samples, from the schedule alone and never from a checkpoint. So a
trial is bitwise equal to an uninterrupted one if it resumes from its own checkpoint, or from one of
a training that had the same values until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from gdpo_tune.core.trials import Params, TrialConfig
from gdpo_tune.training.trainer import GDPOTrainer


@dataclass(eq=False)
class MovingParameters(TrainerCallback):
    """Callback that sets the scheduled parameters at the beginning of a step."""

    config: TrialConfig
    rewards: Sequence[str]
    """Names in the order of the trainer's weights."""
    trainer: GDPOTrainer
    current: Params | None = None
    """Parameters that were set last; None: those of the trainer's arguments or of a checkpoint."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the parameters before an optimizer pass; the first pass of a step samples."""
        step = state.global_step // self.trainer.num_iterations
        params = self.config.params_at(step)
        if params == self.current:
            return
        weights = self.config.reward_weights(step)
        self.trainer.reward_weights = torch.tensor(
            [weights[name] for name in self.rewards], dtype=self.trainer.reward_weights.dtype
        )
        self._set_learning_rate(float(params["learning_rate"]))
        self.current = params

    def _set_learning_rate(self, peak: float) -> None:
        """Set the peak of the learning rate, whose shape over the steps stays."""
        trained: Any = self.trainer  # TRL declares as optional what exists during training
        scheduler = trained.lr_scheduler
        # As LambdaLR computes it, so that the same value gives the same bits.
        rates = [peak * shape(scheduler.last_epoch) for shape in scheduler.lr_lambdas]
        peaks = [peak] * len(rates)
        scheduler.load_state_dict(
            {**scheduler.state_dict(), "base_lrs": peaks, "_last_lr": list(rates)}
        )
        for group, rate in zip(trained.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
