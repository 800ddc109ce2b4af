"""Order in which the completions of a step fill micro-batches, so that little of it is padding.

TRL pads a step to its longest prompt and completion, shuffles it, and cuts it into micro-batches of
that width. Here completions of similar length share a micro-batch, which is cut to its own longest
one. The micro-batch in which a completion is computed changes rounding alone.

Shapes: n completions of this process, M micro-batches of B, T prompt and C completion positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]
"""Name -> tensor whose first dimension is the completion, or a tensor without dimensions."""

PLACE = "place"
"""Entry of a batch: each completion's place in the order that the functions here return."""


def order_by_length(prompts: Sequence[int], completions: Sequence[int], size: int) -> list[int]:
    """Order n completions by length, so that micro-batches of `size` B hold few positions.

    The order is the best of three: by completion, by prompt, and by their sum. Both are padded
    apart, and the data decide which varies more. The longest come first, so that memory that does
    not suffice runs out at once.
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
