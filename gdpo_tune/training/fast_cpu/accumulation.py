"""TRL's GRPOTrainer with a step that can be computed in micro-batches, to the same effect.

Private hooks of TRL are overridden, for micro-batches without needless padding and for the packed
forward pass of small policies, which is why TRL is pinned to one minor version.

Shapes: n completions of this process, T prompt and C completion positions.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from gdpo_tune.training.fast_cpu import micro_batches, packing

# TRL calls `rollout_func` experimental and would say so for every trainer.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

_SHARES = "token_shares"
"""Entry of a micro-batch: its `micro_batches.shares`, of this process and of all."""
_TOKEN_MEANS = (
    "entropy",
    "kl",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "cispo_clip_ratio",
)
"""Figures that TRL averages over the tokens of each micro-batch, then over micro-batches."""


class MicroBatchTrainer(GRPOTrainer):
    """GRPOTrainer that fills micro-batches by length, and packs where that is worth it.

    With gradient accumulation over the whole step, gradients and figures are those of the step
    computed at once, to rounding, whatever the loss type. What is sampled, and the random state,
    are the same.
    """

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._accumulates():
            order = self._order(output["prompt_mask"], output["completion_mask"])
            output[micro_batches.PLACE] = micro_batches.places(order, output["prompt_mask"].device)
        return output

    def _accumulates(self) -> bool:
        """Whether a step has several micro-batches, and all of them make one optimizer pass."""
        arguments: Any = self.args
        return 1 < arguments.gradient_accumulation_steps == arguments.steps_per_generation

    def _order(self, prompt_mask: Tensor, completion_mask: Tensor) -> list[int]:
        """Completions, those of one prompt adjacent, in the order that micro-batches take them."""
        prompts = micro_batches.lengths(prompt_mask)
        completions = micro_batches.lengths(completion_mask)
        if self._packs(self.model):
            group_size: Any = self.num_generations
            return micro_batches.by_group(prompts, completions, group_size)
        size = self.args.per_device_train_batch_size
        return micro_batches.by_length(prompts, completions, size)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before or not self._accumulates():
            return inputs
        # A step was sampled. TRL has shuffled it, for which it drew, and cut it.
        batches = micro_batches.arranged(self._buffered_inputs)
        tokens = torch.stack([batch["completion_mask"].sum() for batch in batches])
        own = micro_batches.shares(tokens)
        everywhere: Any = self.accelerator.reduce(tokens)
        for batch, *shares in zip(batches, own, micro_batches.shares(everywhere), strict=True):
            batch[_SHARES] = shares
        self._buffered_inputs = batches
        return batches[self._step % len(batches)]

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if batch_size is None or batch_size >= len(input_ids):
            return self._log_probs(model, input_ids, attention_mask, logits_to_keep, **keywords)
        # What TRL asks for in parts are log-probabilities alone: the old ones, the reference's.
        prompts, completions = attention_mask.tensor_split([-logits_to_keep], dim=1)
        order = torch.tensor(self._order(prompts, completions), device=input_ids.device)
        log_probs = torch.zeros(completions.shape, device=input_ids.device)
        for rows in order.split(batch_size):
            kept = micro_batches.width(completions[rows])
            first = prompts.shape[1] - micro_batches.width(prompts[rows])
            columns = slice(first, prompts.shape[1] + kept)
            part = self._log_probs(
                model, input_ids[rows, columns], attention_mask[rows, columns], kept, **keywords
            )
            log_probs[rows, :kept] = part[0].to(log_probs.dtype)
        return log_probs, None, None

    def _log_probs(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if not self._packs(model):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **keywords
            )
        log_probs, entropies = packing.token_log_probs(
            model, input_ids, attention_mask, logits_to_keep, self.temperature
        )
        return log_probs, entropies, None

    def _packs(self, model: Any) -> bool:
        # Several processes train through a wrapper whose own forward pass has to run, and the
        # entropy bonus needs a gradient that packing does not carry. The wrapper is also what
        # changes the precision.
        return (
            self.accelerator.num_processes == 1
            and not self._entropy_bonus_enabled
            and not self.args.bf16
            and packing.supports(model)
        )

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], *arguments: Any, **keywords: Any
    ) -> Tensor:
        """TRL's loss of a micro-batch; those of a step add up."""
        loss: Tensor = super().compute_loss(model, inputs, *arguments, **keywords)
        return self._weighed(loss, *inputs[_SHARES]) if _SHARES in inputs else loss

    def _weighed(self, loss: Tensor, own: float, of_all: float) -> Tensor:
        """Make means over tokens of what TRL averages over micro-batches of unequal token counts.

        Among the losses that is `bnpo`, a mean over the tokens that a process has in the step.
        """
        for name in _TOKEN_MEANS:
            if name in self._metrics["train"]:
                self._metrics["train"][name][-1] *= of_all
        return loss * own if self.loss_type == "bnpo" else loss
