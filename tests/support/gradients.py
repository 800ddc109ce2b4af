"""Gradients and logs of every optimizer step, and two reward functions without a sandbox."""

from __future__ import annotations

import torch
from transformers import TrainerCallback


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
