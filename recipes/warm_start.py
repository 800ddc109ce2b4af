"""Supervised warm start of a small policy on one CPU core: next-token loss on completions only.

Shapes: B rows of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

Pair = tuple[list[int], list[int]]
"""Token ids of a prompt and of its completion, the end token included."""

_IGNORED = -100
_BUCKET_BATCHES = 16


@dataclass(frozen=True)
class Schedule:
    """Optimizer settings. The number of steps is fixed, so the result does not depend on speed."""

    steps: int
    batch_size: int = 32
    peak_lr: float = 2e-3
    warmup_steps: int = 50
    decay_share: float = 0.6
    """Share of the steps, at the end, over which the learning rate falls to `floor` of its peak."""
    floor: float = 0.03

    def get_lr(self, step: int) -> float:
        """Return the learning rate of a step counted from 0."""
        rise = min(1.0, (step + 1) / self.warmup_steps)
        left = (self.steps - step) / (self.decay_share * self.steps)
        return self.peak_lr * rise * max(self.floor, min(1.0, left))


def fit(
    model: LlamaForCausalLM,
    pairs: Sequence[Pair],
    schedule: Schedule,
    *,
    pad: int,
    seed: int,
    report: Callable[[str], None],
) -> float:
    """Train `model` in place and return the mean loss of the last hundred steps."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    batches = _draw_batches(pairs, schedule.batch_size, rng)
    losses: list[float] = []
    start = time.process_time()
    model.train()
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.get_lr(step)
        loss = _compute_loss(model, next(batches), pad)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 100 == 0 or step + 1 == schedule.steps:
            seconds = time.process_time() - start
            loss_now = _average_recent(losses)
            report(f"step {step + 1}/{schedule.steps}  loss {loss_now:.3f}  {seconds:.0f} CPU-s")
    model.eval()
    return _average_recent(losses)


def _average_recent(losses: Sequence[float]) -> float:
    tail = losses[-100:]
    return sum(tail) / len(tail)


def _compute_loss(model: LlamaForCausalLM, pairs: Sequence[Pair], pad: int) -> torch.Tensor:
    width = max(len(prompt) + len(completion) for prompt, completion in pairs)
    ids_BT = torch.full((len(pairs), width), pad)
    targets_BT = torch.full((len(pairs), width), _IGNORED)
    for row, (prompt, completion) in enumerate(pairs):
        end = len(prompt) + len(completion)
        ids_BT[row, :end] = torch.tensor(prompt + completion)
        targets_BT[row, len(prompt) : end] = torch.tensor(completion)
    # Padding stands on the right and attention is causal, so no mask is needed. Logits are only
    # computed where a completion token is predicted.
    hidden_BTH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
    scored_BT = targets_BT[:, 1:] != _IGNORED
    logits_V = model.lm_head(hidden_BTH[:, :-1][scored_BT])
    return torch.nn.functional.cross_entropy(logits_V, targets_BT[:, 1:][scored_BT])


def _draw_batches(pairs: Sequence[Pair], size: int, rng: random.Random) -> Iterator[list[Pair]]:
    """Yield batches of rows of similar length, which saves padding; reshuffled every epoch."""
    order = list(range(len(pairs)))
    while True:
        rng.shuffle(order)
        batches: list[list[int]] = []
        for first in range(0, len(order), size * _BUCKET_BATCHES):
            bucket = order[first : first + size * _BUCKET_BATCHES]
            bucket.sort(key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
            batches += [bucket[at : at + size] for at in range(0, len(bucket), size)]
        rng.shuffle(batches)
        for batch in batches:
            yield [pairs[i] for i in batch]
