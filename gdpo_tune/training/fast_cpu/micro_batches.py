"""Which completions of a step are computed together, so that little of it is padding.

TRL pads a step to its longest prompt and its longest completion, shuffles it, and cuts it into
micro-batches that keep that width. Here completions of like length meet, and every micro-batch is
cut to its own longest. In which of them a completion is changes rounding alone.

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
"""Entry of a batch: where each completion stands in the order that the functions here give."""


def by_length(prompts: Sequence[int], completions: Sequence[int], size: int) -> list[int]:
    """Completions in the order in which micro-batches hold the fewest positions, longest first.

    The best of three: sorted by completion, by prompt, and by both together, because prompt and
    completion are padded apart, and which of them varies more hangs on the data. Longest first,
    because then memory that does not suffice runs out at once.

    Args:
        prompts: n lengths.
        completions: n lengths.
        size: B, completions of a micro-batch; divides n.
    """
    rows = range(len(prompts))
    orders = [
        sorted(rows, key=lambda row: (completions[row], prompts[row]), reverse=True),
        sorted(rows, key=lambda row: (prompts[row], completions[row]), reverse=True),
        sorted(rows, key=lambda row: (prompts[row] + completions[row], prompts[row]), reverse=True),
    ]
    return min(orders, key=lambda order: positions(prompts, completions, order, size))


def by_group(prompts: Sequence[int], completions: Sequence[int], group_size: int) -> list[int]:
    """Completions of one prompt side by side, for a forward pass that computes it once.

    Longest group first, and in it the longest completion.

    Args:
        prompts: n lengths.
        completions: n lengths, those of one prompt adjacent.
        group_size: completions of one prompt; divides n.
    """
    groups = [range(i, i + group_size) for i in range(0, len(prompts), group_size)]
    groups.sort(
        key=lambda group: prompts[group[0]] + sum(completions[row] for row in group), reverse=True
    )
    return [
        row
        for group in groups
        for row in sorted(group, key=lambda row: completions[row], reverse=True)
    ]


def positions(
    prompts: Sequence[int], completions: Sequence[int], order: Sequence[int], size: int
) -> int:
    """Positions that all micro-batches have, padding included; arguments as in `by_length`."""
    parts = [order[i : i + size] for i in range(0, len(order), size)]
    return sum(
        len(part) * (max(prompts[row] for row in part) + max(completions[row] for row in part))
        for part in parts
    )


def lengths(mask: Tensor) -> list[int]:
    """Tokens of each row of a mask [n, T] or [n, C]."""
    return mask.sum(dim=1).tolist()


def places(order: Sequence[int], device: torch.device) -> Tensor:
    """[n]: where each completion stands in `order`."""
    return torch.tensor(order, device=device).argsort()


def arranged(batches: Sequence[Batch]) -> list[Batch]:
    """As many micro-batches of the same size, filled in the order of `PLACE`, each cut to its own.

    Args:
        batches: M micro-batches that hold the completions in any order.
    """
    order = torch.cat([batch[PLACE] for batch in batches]).argsort().chunk(len(batches))
    whole = {
        name: torch.cat([batch[name] for batch in batches]) if value.dim() else value
        for name, value in batches[0].items()
        if name != PLACE
    }
    return [
        cut({name: value[rows] if value.dim() else value for name, value in whole.items()})
        for rows in order
    ]


def cut(batch: Batch) -> Batch:
    """A batch without the columns that are padding in all of its rows.

    Prompts are padded on the left, and all else that has two dimensions is [n, C], padded on the
    right, or [n, 1].
    """
    prompt, completion = (width(batch[f"{part}_mask"]) for part in ("prompt", "completion"))

    def narrowed(name: str, value: Tensor) -> Tensor:
        if value.dim() < 2:
            return value
        return value[:, -prompt:] if name.startswith("prompt_") else value[:, :completion]

    return {name: narrowed(name, value) for name, value in batch.items()}


def width(mask: Tensor) -> int:
    """Columns that a mask needs, at least 1."""
    return max(1, int(mask.sum(dim=1).max()))


def shares(tokens: Tensor) -> list[float]:
    """Of `tokens` [M] in all, what each micro-batch has, times M: 1 on average."""
    return (tokens.double() * len(tokens) / tokens.sum().clamp(min=1)).tolist()
