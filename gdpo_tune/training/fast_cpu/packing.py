"""Log-probabilities of completions that compute each prompt once.

TRL gives the network a copy of the prompt with every completion, padded on both sides. Here the
completions of one prompt follow it in one row, and a mask lets each see only the prompt and itself.
This gives the same numbers from about half of the tokens. The output head reads only the positions
that predict a token of a completion; TRL's reads all.

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

from gdpo_tune.training.fast_cpu.llama import is_small_llama

_WIDTH = 640
"""Tokens in a row. The cost of attention grows with its square, so large groups take more rows."""


def can_pack(model: PreTrainedModel) -> bool:
    """Return whether this model accepts a mask of any form, and is small enough to gain by it."""
    config: Any = model.config
    return is_small_llama(model) and config._attn_implementation == "sdpa"


def compute_log_probs(
    model: Any, input_ids: Tensor, attention_mask: Tensor, completion_width: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute what TRL's forward pass computes, up to rounding.

    Args:
        model: a causal language model that `can_pack` accepts.
        input_ids: [N, T + C], prompts padded on the left, completions on the right.
        attention_mask: [N, T + C], 1 for a token and 0 for padding.
        completion_width: C.
        temperature: divides the logits.

    Returns:
        Log-probabilities of the completions' tokens, with gradient, and entropies in nats, without;
        both [N, C], 0 at padding.
    """
    packed = _pack(input_ids, attention_mask, completion_width)
    segments = torch.tensor(packed.segments)  # [R, S]
    own = segments[:, :, None] == segments[:, None, :]
    # [R, S, S]: a token sees what precedes it in its prompt and completion.
    mask = (own | (segments[:, None, :] == 0)).tril()
    rows = model.model(
        input_ids=torch.tensor(packed.tokens),
        position_ids=torch.tensor(packed.positions),
        attention_mask=mask[:, None],
        use_cache=False,
    ).last_hidden_state
    predicting = rows.flatten(0, 1)[torch.tensor(packed.sources)]
    logits = model.lm_head(predicting) / temperature
    log_probs = logits.log_softmax(dim=-1)
    chosen = log_probs.gather(1, torch.tensor(packed.targets)[:, None])[:, 0]
    with torch.no_grad():
        entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
    slots = (torch.tensor(packed.slots),)
    shape = (len(input_ids), completion_width)
    return (
        chosen.new_zeros(shape).view(-1).index_put(slots, chosen).view(shape),
        entropies.new_zeros(shape).view(-1).index_put(slots, entropies).view(shape),
    )


@dataclass
class _Packed:
    """R rows as lists of equal length, and the positions that the output head reads."""

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

    def append(
        self, prompt: Sequence[int], completions: dict[int, list[int]], width: int, slots: int
    ) -> None:
        """Append a row of `width` S; `completions` are by number, each of at most `slots` C."""
        start = len(self.tokens) * width
        tokens = list(prompt)
        positions = list(range(len(prompt)))
        segments = [0] * len(prompt)
        for segment, (index, completion) in enumerate(completions.items(), start=1):
            count = len(completion)
            if count:
                first = start + len(tokens)
                # The prompt's last token predicts the first token; each token predicts the next.
                self.sources += [start + len(prompt) - 1, *range(first, first + count - 1)]
                self.targets += completion
                self.slots += range(index * slots, index * slots + count)
            tokens += completion
            positions += range(len(prompt), len(prompt) + count)
            segments += [segment] * count
        padding = width - len(tokens)
        self.tokens.append(tokens + [0] * padding)
        self.positions.append(positions + [0] * padding)
        self.segments.append(segments + [-1] * padding)


def _pack(input_ids: Tensor, attention_mask: Tensor, completion_width: int) -> _Packed:
    prompt_width = input_ids.shape[1] - completion_width
    starts = (prompt_width - attention_mask[:, :prompt_width].sum(dim=1)).tolist()
    lengths: list[int] = attention_mask[:, prompt_width:].sum(dim=1).tolist()
    groups: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for index, tokens in enumerate(input_ids.tolist()):
        prompt = tuple(tokens[starts[index] : prompt_width])
        completion = tokens[prompt_width : prompt_width + lengths[index]]
        groups.setdefault(prompt, {})[index] = completion
    room = max(1, (_WIDTH - prompt_width) // max(1, *lengths))
    rows = [
        (prompt, dict(list(group.items())[first : first + room]))
        for prompt, group in groups.items()
        for first in range(0, len(group), room)
    ]
    width = max(len(prompt) + sum(map(len, part.values())) for prompt, part in rows)
    packed = _Packed()
    for prompt, part in rows:
        packed.append(prompt, part, width, completion_width)
    return packed
