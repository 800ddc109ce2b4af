"""TRL's GRPOTrainer with a mini-batch computed in micro-batches, to the same result.

TRL gets whole mini-batches and accumulates nothing. A mini-batch that needs more memory than there
is takes several forward and backward passes here, whose gradients add up. Each prompt is computed
once for its completions, or else completions of similar length share a micro-batch, cut to its own
longest one. That changes rounding alone, and nothing of what is trained. It overrides private hooks
of TRL, which is why TRL is pinned to one minor version.

Shapes: n completions of this process, M micro-batches, T prompt and C completion positions.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from gdpo_tune.core.errors import PolicyError
from gdpo_tune.policies.load_policy import takes_argument
from gdpo_tune.training import distributed, fast_cpu
from gdpo_tune.training.fast_cpu import FIXED_ROPE
from gdpo_tune.training.memory import MicroBatchLimit, free_garbage, is_out_of_memory
from gdpo_tune.training.shared_prompts import (
    UnknownAttentionError,
    compute_group_log_probs,
    enable,
    find_obstacle,
)

T = TypeVar("T")
Batch = dict[str, Any]
"""Name -> tensor whose first dimension is the completion, or a tensor without dimensions."""
LogProbs = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probabilities [n, C], entropies [n, C] and auxiliary loss, as TRL returns them."""
_SHARES = "shares"
"""Entry of a micro-batch: factors of its loss and of its `_TOKEN_MEANS`."""
_TOKEN_MEANS = (
    *("entropy", "kl", "cispo_clip_ratio"),
    *(f"clip_ratio/{kind}_mean" for kind in ("low", "high", "region")),
)
"""Metrics that TRL averages over the tokens of each micro-batch, then over micro-batches."""
KEPT_PASS = ("kept_log_probs", "kept_entropies")
"""Entries of a batch: what a forward pass of the policy gave before the loss, with its graph."""
_ROW_MEANS = ("grpo", "sapo", "dr_grpo", "luspo")
"""Losses that are means over the completions of a micro-batch."""


class MicroBatchTrainer(GRPOTrainer):
    """GRPOTrainer that computes each prompt once, or else fills micro-batches by length.

    Gradients and metrics of an optimizer step are those of its mini-batch computed at once, up to
    rounding, for every loss type. Samples and random state are the same.
    """

    def __init__(
        self,
        *arguments: Any,
        shared_prompts: str = "auto",
        limit: MicroBatchLimit | None = None,
        **keywords: Any,
    ) -> None:
        """Build TRL's trainer; `shared_prompts` is the setting of `ModelSettings`.

        `limit` is that of a micro-batch; None: all of a process's part of a mini-batch.
        A policy that is read before the loss, to weight what vLLM sampled, is not read again for
        it; the pass takes its memory while rewards are computed.

        Raises:
            PolicyError: prompts are to be shared, and the policy does not allow it.
        """
        super().__init__(*arguments, **keywords)
        self.limit = limit or MicroBatchLimit(self.args.per_device_train_batch_size)
        """Limit of the next micro-batch; smaller than at first once memory has run out."""
        self.ran_out_of_memory = False
        arguments_of_trl: Any = self.args
        self._keeps_pass = (
            self.num_iterations == arguments_of_trl.steps_per_generation == 1
            and self.accelerator.num_processes == 1
            and not self.aux_loss_enabled
        )
        self._is_first_pass = False
        self._kept_pass: dict[str, Tensor] = {}
        model: Any = self.model
        self.unshared = find_obstacle(model) if shared_prompts != "off" else "it was turned off"
        """Why each prompt is computed with every of its completions; empty: it is computed once."""
        if self.unshared and shared_prompts == "on":
            raise PolicyError(
                f"model.shared_prompts = on, and the policy does not allow it: {self.unshared}; "
                "use auto, which computes a prompt with each of its completions there"
            )
        if not self.unshared and not self._can_pack(model):
            for network in (model, self.ref_model):
                if network is not None:
                    enable(network)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._is_first_pass, self._kept_pass = self._keeps_pass, {}
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self._is_first_pass, kept, self._kept_pass = False, self._kept_pass, {}
        return output | kept

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Compute the gradients of a mini-batch and return its loss, as TRL's method does."""
        model.train()
        batch: Batch = self._prepare_inputs(inputs)
        ids, mask = (
            torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], dim=1)
            for kind in ("ids", "mask")
        )
        compute = functools.partial(self._accumulate, model, batch)
        loss = self._compute_in_parts(ids, mask, batch["completion_mask"].shape[1], compute)
        self._step += 1
        return loss

    def _accumulate(self, model: Any, batch: Batch, parts: list[list[int]]) -> Tensor:
        """Add up the gradients of the micro-batches of a mini-batch, or leave none."""
        count, accelerator = len(parts), self.accelerator
        mask = mask_loss(batch)
        tokens = torch.stack([mask[part].sum() for part in parts])
        all_tokens: Any = accelerator.reduce(tokens)
        weights = torch.tensor([len(part) if self.loss_type in _ROW_MEANS else 1 for part in parts])
        # Of the losses, only `bnpo` is a mean over the tokens of a process.
        weights = tokens if self.loss_type == "bnpo" else weights
        factors = compute_shares(weights), compute_shares(all_tokens)
        # TRL divides by the number of micro-batches what is a mean over one of them.
        batch = {**batch, "num_items_in_batch": batch["num_items_in_batch"] / count}
        if count > 1:
            batch = {name: value for name, value in batch.items() if name not in KEPT_PASS}
        logged: Any = self._metrics["train"]
        before = {name: len(values) for name, values in logged.items()}
        losses: list[Tensor] = []
        syncs_each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        self.current_gradient_accumulation_steps *= count
        try:
            for *shares, part in zip(*factors, parts, strict=True):
                micro = cut_padding({n: v[part] if v.dim() else v for n, v in batch.items()})
                is_last = len(losses) == count - 1
                with nullcontext() if is_last or syncs_each else accelerator.no_sync(model):
                    with self.compute_loss_context_manager():
                        loss = self.compute_loss(model, {**micro, _SHARES: shares})
                    accelerator.backward(loss)
                losses.append(loss.detach())
                del loss
        except BaseException:
            model.zero_grad()
            for name, values in logged.items():
                del values[before.get(name, 0) :]
            raise
        finally:
            self.current_gradient_accumulation_steps //= count
        return torch.stack(losses).sum()

    def _compute_in_parts(
        self, ids: Tensor, mask: Tensor, width: int, compute: Callable[[list[list[int]]], T]
    ) -> T:
        """Return what `compute` makes of the rows of each micro-batch.

        When memory runs out, the limit is halved and everything is computed again, from nothing.
        Several processes would wait for the one that ran out of it, so there the error passes.
        """
        while True:
            parts = self._divide(ids, mask, width)
            try:
                return compute(parts)
            except (RuntimeError, MemoryError) as error:
                alone = self.accelerator.num_processes * self.args.gradient_accumulation_steps == 1
                if not (alone and len(parts) < len(ids) and is_out_of_memory(error)):
                    raise
            free_garbage()  # only here: the error held the tensors of a micro-batch
            self.ran_out_of_memory = True
            while len(self._divide(ids, mask, width)) <= len(parts):
                self.limit = self.limit._replace(size=self.limit.size // 2)

    def _divide(self, ids: Tensor, mask: Tensor, width: int) -> list[list[int]]:
        """Return the rows of each micro-batch, of as many completions in every process."""
        prompts, completions = mask.tensor_split([-width], dim=1)
        lengths = prompts.sum(dim=1).tolist(), completions.sum(dim=1).tolist()
        keys = None
        if not self.unshared or self._can_pack(self.model):
            keys = list(map(tuple, ids[:, :-width].tolist()))
        parts = divide(*lengths, keys, self.limit)
        if self.accelerator.num_processes > 1:
            # TRL gathers a value of each completion, so the process with the longest ones decides.
            order = [row for part in parts for row in part]
            size = min(distributed.gather(min(map(len, parts[:-1]), default=len(order))))
            parts = [order[first : first + size] for first in range(0, len(order), size)]
        return parts

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Tensor, mask: Tensor, width: int, batch_size: Any = None, **more: Any
    ) -> LogProbs:
        if batch_size is None:
            if self._kept_pass:
                kept, self._kept_pass = self._kept_pass, {}
                return kept[KEPT_PASS[0]], kept.get(KEPT_PASS[1]), None
            return self._compute_log_probs(model, ids, mask, width, **more)
        # The policy is read before the loss to weight what vLLM sampled.
        weights_samples = self.use_vllm and self.vllm_importance_sampling_correction
        is_first, self._is_first_pass = self._is_first_pass and weights_samples, False

        # TRL asks for parts only where it needs no entropies: old and reference log-probabilities.
        def compute(parts: list[list[int]]) -> Tensor:
            if is_first and len(parts) == 1:
                return self._keep_pass(model, ids, mask, width, **more)
            prompts, completions = mask.tensor_split([-width], dim=1)
            log_probs = torch.zeros(completions.shape, device=ids.device)
            for rows in parts:
                kept = measure_width(completions[rows])
                first = prompts.shape[1] - measure_width(prompts[rows])
                columns = slice(first, prompts.shape[1] + kept)
                text = ids[rows, columns], mask[rows, columns]
                part = self._compute_log_probs(model, text[0], text[1], kept, **more)[0]
                log_probs[rows, :kept] = part.to(log_probs.dtype)
            return log_probs

        return self._compute_in_parts(ids, mask, width, compute), None, None

    def _keep_pass(self, model: Any, ids: Tensor, mask: Tensor, width: int, **more: Any) -> Tensor:
        """Return the old log-probabilities [n, C], and keep their pass: it is that of the loss."""
        recomputes, how = self.args.gradient_checkpointing, self.args.gradient_checkpointing_kwargs
        if recomputes:  # which TRL turns off here
            model.gradient_checkpointing_enable(how)
        try:
            with torch.enable_grad(), self.compute_loss_context_manager():
                found = self._compute_log_probs(
                    model, ids, mask, width, compute_entropy=True, **more
                )
        finally:
            if recomputes:
                model.gradient_checkpointing_disable()
        self._kept_pass = {n: v for n, v in zip(KEPT_PASS, found, strict=False) if v is not None}
        return found[0].detach()

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
        self._kept_pass = {name: inputs[name] for name in KEPT_PASS if name in inputs}
        loss: Tensor = super().compute_loss(model, inputs, *arguments, **keywords)
        # A micro-batch weighs by its tokens, so that averages over micro-batches are over tokens.
        factor, of_all = inputs.get(_SHARES, (1.0, 1.0))
        for name in _TOKEN_MEANS:
            if name in self._metrics["train"]:
                self._metrics["train"][name][-1] *= of_all
        return loss * factor


def mask_loss(batch: Mapping[str, Any]) -> Tensor:
    """Return 1 for the tokens [n, C] that are trained, and 0 for padding and those of tools."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


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


def divide(
    prompts: Sequence[int],
    completions: Sequence[int],
    keys: Sequence[Hashable] | None,
    limit: MicroBatchLimit,
) -> list[list[int]]:
    """Divide n completions, of which lengths are given, into micro-batches within a limit.

    `keys` names the prompt of each completion, if a prompt is computed once for those of a
    micro-batch. Then they stay together while the limit allows it. Otherwise completions of similar
    length share a micro-batch, in the best of three orders: by completion, by prompt, by their sum.
    The longest come first, so that memory that does not suffice runs out at once.
    """
    rows = range(len(prompts))

    def count_tokens(part: Sequence[int]) -> int:
        if keys is None:
            return len(part) * (max(prompts[r] for r in part) + max(completions[r] for r in part))
        distinct = {keys[row]: prompts[row] for row in part}
        return sum(distinct.values()) + sum(completions[row] for row in part)

    def fill(units: Sequence[list[int]]) -> list[list[int]]:
        parts: list[list[int]] = []
        for unit in units:
            for piece in [unit] if measure(unit) <= limit.size else [[row] for row in unit]:
                if parts and measure([*parts[-1], *piece]) <= limit.size:
                    parts[-1] += piece
                else:
                    parts.append([*piece])
        return parts

    measure = count_tokens if limit.counts_tokens else len
    if measure(rows) <= limit.size:
        return [[*rows]]
    if keys is not None:
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: -completions[row]):
            groups[keys[row]].append(row)
        return fill(sorted(groups.values(), key=count_tokens, reverse=True))
    orders = [
        sorted(rows, key=lambda row: (completions[row], prompts[row]), reverse=True),
        sorted(rows, key=lambda row: (prompts[row], completions[row]), reverse=True),
        sorted(rows, key=lambda row: (prompts[row] + completions[row], prompts[row]), reverse=True),
    ]
    filled = (fill([[row] for row in order]) for order in orders)
    return min(filled, key=lambda parts: sum(map(count_tokens, parts)))


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
