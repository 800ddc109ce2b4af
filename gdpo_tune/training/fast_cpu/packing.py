"""Log-probabilities of completions without computing their prompt once for each of them.

TRL gives the network every completion with a copy of its prompt, padded on both sides. Here the
completions of one prompt stand behind it in one row, and a mask lets each see the prompt and itself
alone: the same numbers from about half of the tokens. The head reads only what predicts a token of
a completion, where TRL's reads every position.

Shapes: N completions, T prompt and C completion positions as TRL pads them, R packed rows of width
S, D hidden, E entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gdpo_tune.training.rollout import supports as is_small_llama

_WIDTH = 640
"""Tokens in a row. Attention grows with its square, so a large group takes several rows."""


def supports(model: PreTrainedModel) -> bool:
    """Whether this model takes a mask of its own, and is small enough for the gain to show."""
    config: Any = model.config
    return is_small_llama(model) and config._attn_implementation == "sdpa"


def token_log_probs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    completion_width: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """What TRL's forward pass gives, to rounding error.

    Args:
        model: a causal language model that `supports` accepts.
        input_ids: [N, T + C], prompts padded on the left, completions on the right.
        attention_mask: [N, T + C], 1 for a token and 0 for padding.
        completion_width: C.
        temperature: that logits are divided by.

    Returns:
        Log-probabilities of the completions' tokens, with gradient, and entropies in nats, without;
        both [N, C], 0 at padding.
    """
    packed = _pack(input_ids, attention_mask, completion_width)
    segments = torch.tensor(packed.segments)
    rows = model.model(
        input_ids=torch.tensor(packed.tokens),
        position_ids=torch.tensor(packed.positions),
        attention_mask=_mask(segments)[:, None],
        use_cache=False,
    ).last_hidden_state
    predicting = rows.flatten(0, 1)[torch.tensor(packed.sources)]
    logits = model.lm_head(predicting) / temperature
    every = logits.log_softmax(dim=-1)
    chosen = every.gather(1, torch.tensor(packed.targets)[:, None])[:, 0]
    with torch.no_grad():
        entropies = -(every.exp() * every).sum(dim=-1)
    slots = torch.tensor(packed.slots)
    count = len(input_ids) * completion_width
    shape = (len(input_ids), completion_width)
    return (
        chosen.new_zeros(count).index_put((slots,), chosen).view(shape),
        entropies.new_zeros(count).index_put((slots,), entropies).view(shape),
    )


@dataclass
class _Packed:
    """R rows as lists of equal length, and where the head has to look."""

    tokens: list[list[int]] = field(default_factory=list[list[int]])
    positions: list[list[int]] = field(default_factory=list[list[int]])
    segments: list[list[int]] = field(default_factory=list[list[int]])
    """0 for the prompt, 1, 2, ... for its completions, -1 for padding."""
    sources: list[int] = field(default_factory=list[int])
    """Index into the flattened rows of each hidden state that predicts a completion's token."""
    targets: list[int] = field(default_factory=list[int])
    """The token that it predicts."""
    slots: list[int] = field(default_factory=list[int])
    """Index of that token in the flattened [N, C]."""


def _pack(input_ids: Tensor, attention_mask: Tensor, completion_width: int) -> _Packed:
    real = attention_mask.bool().tolist()
    prompt_width = input_ids.shape[1] - completion_width
    groups: dict[tuple[int, ...], list[int]] = {}
    completions: list[list[int]] = []
    for index, tokens in enumerate(input_ids.tolist()):
        kept = [token if keep else None for token, keep in zip(tokens, real[index], strict=True)]
        prompt = tuple(token for token in kept[:prompt_width] if token is not None)
        completions.append([token for token in kept[prompt_width:] if token is not None])
        groups.setdefault(prompt, []).append(index)
    longest = max(1, *(len(completion) for completion in completions))
    room = max(1, (_WIDTH - prompt_width) // longest)
    rows = [
        (prompt, group[first : first + room])
        for prompt, group in groups.items()
        for first in range(0, len(group), room)
    ]
    width = max(len(prompt) + sum(len(completions[i]) for i in part) for prompt, part in rows)
    packed = _Packed()
    for prompt, part in rows:
        _append_row(packed, prompt, part, completions, width, completion_width)
    return packed


def _append_row(
    packed: _Packed,
    prompt: Sequence[int],
    part: Sequence[int],
    completions: Sequence[list[int]],
    width: int,
    completion_width: int,
) -> None:
    start = len(packed.tokens) * width
    tokens = list(prompt)
    positions = list(range(len(prompt)))
    segments = [0] * len(prompt)
    for segment, index in enumerate(part, start=1):
        completion = completions[index]
        count = len(completion)
        if count:
            first = start + len(tokens)
            # The prompt's last token predicts the first one; each other is predicted by the last.
            packed.sources += [start + len(prompt) - 1, *range(first, first + count - 1)]
            packed.targets += completion
            slot = index * completion_width
            packed.slots += range(slot, slot + count)
        tokens += completion
        positions += range(len(prompt), len(prompt) + count)
        segments += [segment] * count
    padding = width - len(tokens)
    packed.tokens.append(tokens + [0] * padding)
    packed.positions.append(positions + [0] * padding)
    packed.segments.append(segments + [-1] * padding)


def _mask(segments: Tensor) -> Tensor:
    """[R, S] -> [R, S, S]: each token sees what precedes it in its prompt and its completion."""
    width = segments.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    same = segments[:, :, None] == segments[:, None, :]
    return causal & (same | (segments[:, None, :] == 0))
