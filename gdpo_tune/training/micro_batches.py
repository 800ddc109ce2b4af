"""TRL's GRPOTrainer with a mini-batch computed in micro-batches, to the same result.

TRL pads a step to its longest prompt and completion, shuffles it, and cuts it into micro-batches of
that width. Here completions of similar length share a micro-batch, which is cut to its own longest
one, and prompts of small policies are packed. That changes rounding alone, and nothing of what is
trained. It overrides private hooks of TRL, which is why TRL is pinned to one minor version.

Shapes: n completions of this process, M micro-batches of B, T prompt and C completion positions.
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

from gdpo_tune.core.errors import PolicyError
from gdpo_tune.training import fast_cpu
from gdpo_tune.training.fast_cpu import FIXED_ROPE
from gdpo_tune.training.shared_prompts import (
    UnknownAttentionError,
    compute_group_log_probs,
    enable,
    find_obstacle,
)

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
    """GRPOTrainer that computes each prompt once, or else fills micro-batches by length.

    Gradients and metrics of an optimizer step are those of its mini-batch computed at once, up to
    rounding, for every loss type. Samples and random state are the same.
    """

    def __init__(self, *arguments: Any, shared_prompts: str = "auto", **keywords: Any) -> None:
        """Build TRL's trainer; `shared_prompts` is the setting of `ModelSettings`.

        Raises:
            PolicyError: prompts are to be shared, and the policy does not allow it.
        """
        super().__init__(*arguments, **keywords)
        model: Any = self.model
        policy = model.get_base_model() if hasattr(model, "peft_config") else model
        self.unshared = find_obstacle(policy) if shared_prompts != "off" else "it was turned off"
        """Why each prompt is computed with every of its completions; empty: it is computed once."""
        if self.unshared and shared_prompts == "on":
            raise PolicyError(
                f"model.shared_prompts = on, and the policy does not allow it: {self.unshared}; "
                "use auto, which computes a prompt with each of its completions there"
            )
        if not self.unshared and not self._can_pack(model):
            for network in (policy, self.ref_model):
                if network is not None:
                    enable(network)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._is_divided():
            order = self._order_completions(output["prompt_mask"], output["completion_mask"])
            output[PLACE] = order.argsort()
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
        if not self.unshared or self._can_pack(self.model):
            group_size: Any = self.num_generations
            order = order_by_group(*lengths, group_size)
        else:
            size = self.args.per_device_train_batch_size
            order = order_by_length(*lengths, size)
        return torch.tensor(order, device=prompt_mask.device)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before or not self._is_divided():
            return inputs
        # TRL has just sampled a step, shuffled it (drawing random numbers) and cut it.
        size: int = self.args.gradient_accumulation_steps
        batches: list[Batch] = []
        for first in range(0, len(self._buffered_inputs), size):
            mini_batch = rearrange(self._buffered_inputs[first : first + size])
            tokens = torch.stack([batch["completion_mask"].sum() for batch in mini_batch])
            own = compute_shares(tokens)
            all_tokens: Any = self.accelerator.reduce(tokens)
            of_all = compute_shares(all_tokens)
            for batch, *shares in zip(mini_batch, own, of_all, strict=True):
                batch[_SHARES] = shares
            batches += mini_batch
        self._buffered_inputs = batches
        return batches[self._step % len(batches)]

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
            kept = measure_width(completions[rows])
            first = prompts.shape[1] - measure_width(prompts[rows])
            columns = slice(first, prompts.shape[1] + kept)
            part = self._compute_log_probs(
                model, ids[rows, columns], mask[rows, columns], kept, **more
            )
            log_probs[rows, :kept] = part[0].to(log_probs.dtype)
        return log_probs, None, None

    def _compute_log_probs(
        self, model: Any, ids: Tensor, mask: Tensor, width: int, **more: Any
    ) -> LogProbs:
        if self._can_pack(model):
            return *fast_cpu.compute_log_probs(model, ids, mask, width, self.temperature), None
        if not self.unshared:
            forward = {"output_router_logits": True} if more.get("compute_aux_loss") else {}
            try:
                with self.accelerator.autocast():
                    return compute_group_log_probs(model, ids, mask, width, **forward)
            except UnknownAttentionError as error:
                self.unshared = str(error)  # from here on each prompt is padded, this time too
        if needs_positions(self.accelerator.unwrap_model(model)):
            # Without them, the first token of a padded prompt would not be at position 0.
            positions = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)
            model = functools.partial(model, position_ids=positions)
        return super()._get_per_token_logps_and_entropies(model, ids, mask, width, **more)

    def _can_pack(self, model: Any) -> bool:
        # Several processes, and another precision, need the forward pass of accelerate's wrapper.
        # The entropy bonus needs a gradient that packing does not compute.
        return (
            self.accelerator.num_processes == 1
            and not self._entropy_bonus_enabled
            and not self.args.bf16
            and fast_cpu.can_pack(model)
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


Batch = dict[str, Any]
"""Name -> tensor whose first dimension is the completion, or a tensor without dimensions."""

PLACE = "place"
"""Entry of a batch: each completion's place in the order that the functions here return."""


def order_by_length(prompts: Sequence[int], completions: Sequence[int], size: int) -> list[int]:
    """Order n completions by length, so that micro-batches of `size` B hold few positions.

    The order is the best of three: by completion, by prompt, and by their sum. The longest come
    first, so that memory that does not suffice runs out at once.
    """
    rows = range(len(prompts))
    orders = [
        sorted(rows, key=lambda row: (completions[row], prompts[row]), reverse=True),
        sorted(rows, key=lambda row: (prompts[row], completions[row]), reverse=True),
        sorted(rows, key=lambda row: (prompts[row] + completions[row], prompts[row]), reverse=True),
    ]
    return min(orders, key=lambda order: count_positions(prompts, completions, order, size))


def order_by_group(
    prompts: Sequence[int], completions: Sequence[int], group_size: int
) -> list[int]:
    """Order completions by prompt, for a forward pass that computes each prompt once.

    The longest group comes first, and in it the longest completion. `prompts` and `completions`
    are n lengths, those of one group adjacent.
    """
    groups = [row // group_size for row in range(len(prompts))]
    totals = [prompts[first] for first in range(0, len(prompts), group_size)]
    for group, length in zip(groups, completions, strict=True):
        totals[group] += length
    return sorted(
        range(len(prompts)), key=lambda row: (-totals[groups[row]], groups[row], -completions[row])
    )


def count_positions(
    prompts: Sequence[int], completions: Sequence[int], order: Sequence[int], size: int
) -> int:
    """Count the positions of all micro-batches, padding included; see `order_by_length`."""
    parts = [order[i : i + size] for i in range(0, len(order), size)]
    return sum(
        len(part) * (max(prompts[row] for row in part) + max(completions[row] for row in part))
        for part in parts
    )


def rearrange(batches: Sequence[Batch]) -> list[Batch]:
    """Fill M micro-batches of the same size in the order of `PLACE` and cut their padding."""
    order = torch.cat([batch[PLACE] for batch in batches]).argsort().chunk(len(batches))
    whole = {
        name: torch.cat([batch[name] for batch in batches]) if value.dim() else value
        for name, value in batches[0].items()
        if name != PLACE
    }
    return [
        cut_padding({name: value[rows] if value.dim() else value for name, value in whole.items()})
        for rows in order
    ]


def cut_padding(batch: Batch) -> Batch:
    """Drop the columns that are padding in every row.

    Prompts are padded on the left. All other entries of two dimensions are [n, C], padded on the
    right, or [n, 1].
    """
    prompt, completion = (measure_width(batch[f"{part}_mask"]) for part in ("prompt", "completion"))

    def narrow(name: str, value: Tensor) -> Tensor:
        if value.dim() < 2:
            return value
        return value[:, -prompt:] if name.startswith("prompt_") else value[:, :completion]

    return {name: narrow(name, value) for name, value in batch.items()}


def measure_width(mask: Tensor) -> int:
    """Return the number of columns that a mask needs, at least 1."""
    return max(1, int(mask.sum(dim=1).max()))


def compute_shares(tokens: Tensor) -> list[float]:
    """Return each micro-batch's share of `tokens` [M], times M: 1 on average."""
    return (tokens.double() * len(tokens) / tokens.sum().clamp(min=1)).tolist()
