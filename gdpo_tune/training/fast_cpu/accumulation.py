"""TRL's GRPOTrainer with a mini-batch computed in micro-batches, to the same result.

It overrides private hooks of TRL, to cut padding out of micro-batches and to pack small policies.
This is why TRL is pinned to one minor version. Nothing here decides what is trained.

Shapes: n completions of this process, T prompt and C completion positions.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from gdpo_tune.training.fast_cpu import micro_batches, packing
from gdpo_tune.training.fast_cpu.llama import FIXED_ROPE

# TRL would warn in every trainer that `rollout_func` is experimental.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

LogProbs = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probabilities [n, C], entropies [n, C] and auxiliary loss, as TRL returns them."""
_SHARES = "token_shares"
"""Entry of a micro-batch: its `compute_shares` of the mini-batch, in this process and in all."""
_TOKEN_MEANS = (
    "entropy",
    "kl",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "cispo_clip_ratio",
)
"""Metrics that TRL averages over the tokens of each micro-batch, then over micro-batches."""


class MicroBatchTrainer(GRPOTrainer):
    """GRPOTrainer that fills micro-batches by length, and packs prompts of small policies.

    Gradients and metrics of an optimizer step are those of its mini-batch computed at once, up to
    rounding, for every loss type. TRL decides which completions a mini-batch holds. Samples and
    random state are the same.
    """

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._is_divided():
            order = self._order_completions(output["prompt_mask"], output["completion_mask"])
            output[micro_batches.PLACE] = order.argsort()
        return output

    def count_mini_batches(self) -> int:
        """Return the number of optimizer steps of a pass; 0 if TRL samples more often than that."""
        arguments: Any = self.args
        size, rest = divmod(arguments.steps_per_generation, arguments.gradient_accumulation_steps)
        return 0 if rest else size

    def _is_divided(self) -> bool:
        """Return whether a step has several micro-batches, which make whole mini-batches."""
        arguments: Any = self.args
        return arguments.steps_per_generation > 1 and self.count_mini_batches() > 0

    def _order_completions(self, prompt_mask: Tensor, completion_mask: Tensor) -> Tensor:
        """Order completions, [n], for micro-batches; those of one prompt are adjacent."""
        lengths = prompt_mask.sum(dim=1).tolist(), completion_mask.sum(dim=1).tolist()
        if self._can_pack(self.model):
            group_size: Any = self.num_generations
            order = micro_batches.order_by_group(*lengths, group_size)
        else:
            size = self.args.per_device_train_batch_size
            order = micro_batches.order_by_length(*lengths, size)
        return torch.tensor(order, device=prompt_mask.device)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before or not self._is_divided():
            return inputs
        # TRL has just sampled a step, shuffled it (drawing random numbers) and cut it.
        size: int = self.args.gradient_accumulation_steps
        batches: list[micro_batches.Batch] = []
        for first in range(0, len(self._buffered_inputs), size):
            batches += self._rearrange(self._buffered_inputs[first : first + size])
        self._buffered_inputs = batches
        return batches[self._step % len(batches)]

    def _rearrange(self, mini_batch: Sequence[micro_batches.Batch]) -> list[micro_batches.Batch]:
        batches = micro_batches.rearrange(mini_batch)
        tokens = torch.stack([batch["completion_mask"].sum() for batch in batches])
        own = micro_batches.compute_shares(tokens)
        all_tokens: Any = self.accelerator.reduce(tokens)
        of_all = micro_batches.compute_shares(all_tokens)
        for batch, *shares in zip(batches, own, of_all, strict=True):
            batch[_SHARES] = shares
        return batches

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Tensor, mask: Tensor, width: int, batch_size: Any = None, **more: Any
    ) -> LogProbs:
        if batch_size is None or batch_size >= len(ids):
            return self._compute_log_probs(model, ids, mask, width, **more)
        # TRL asks for parts only where it needs no entropies: old and reference log-probabilities.
        prompts, completions = mask.tensor_split([-width], dim=1)
        order = self._order_completions(prompts, completions)
        log_probs = torch.zeros(completions.shape, device=ids.device)
        for rows in order.split(batch_size):
            kept = micro_batches.measure_width(completions[rows])
            first = prompts.shape[1] - micro_batches.measure_width(prompts[rows])
            columns = slice(first, prompts.shape[1] + kept)
            part = self._compute_log_probs(
                model, ids[rows, columns], mask[rows, columns], kept, **more
            )
            log_probs[rows, :kept] = part[0].to(log_probs.dtype)
        return log_probs, None, None

    def _compute_log_probs(
        self, model: Any, ids: Tensor, mask: Tensor, width: int, **more: Any
    ) -> LogProbs:
        if not self._can_pack(model):
            if needs_positions(self.accelerator.unwrap_model(model)):
                # Without them, the first token of a padded prompt would not be at position 0.
                positions = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)
                model = functools.partial(model, position_ids=positions)
            return super()._get_per_token_logps_and_entropies(model, ids, mask, width, **more)
        return *packing.compute_log_probs(model, ids, mask, width, self.temperature), None

    def _can_pack(self, model: Any) -> bool:
        # Several processes, and another precision, need the forward pass of accelerate's wrapper.
        # The entropy bonus needs a gradient that packing does not compute.
        return (
            self.accelerator.num_processes == 1
            and not self._entropy_bonus_enabled
            and not self.args.bf16
            and packing.can_pack(model)
        )

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], *arguments: Any, **keywords: Any
    ) -> Tensor:
        """Return TRL's loss of a micro-batch; the losses of a mini-batch add up."""
        loss: Tensor = super().compute_loss(model, inputs, *arguments, **keywords)
        if _SHARES not in inputs:
            return loss
        # A micro-batch weighs by its tokens, so that averages over micro-batches are over tokens.
        # Of the losses, only `bnpo` is a mean over the tokens of a process in the mini-batch.
        own, of_all = inputs[_SHARES]
        for name in _TOKEN_MEANS:
            if name in self._metrics["train"]:
                self._metrics["train"][name][-1] *= of_all
        return loss * own if self.loss_type == "bnpo" else loss


def needs_positions(model: Any) -> bool:
    """Return whether padding on the left would move what a policy computes.

    That is so where positions are learned, or where rotary angles depend on the longest position.
    Fixed rotary angles are relative, so that they need none, up to rounding.

    Source: trl#469, trl#6800; `generate` of transformers counts from the first token of a prompt.
    """
    if not takes_argument(model, "position_ids"):
        return False
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [v for v in rope.values() if isinstance(v, dict)]
    return not kinds or any(kind.get("rope_type") not in FIXED_ROPE for kind in kinds)


def takes_argument(model: Any, name: str) -> bool:
    """Return whether the forward pass of a policy, below its adapters, has an argument."""
    network = model.get_base_model() if hasattr(model, "peft_config") else model
    return name in inspect.signature(type(network).forward).parameters
