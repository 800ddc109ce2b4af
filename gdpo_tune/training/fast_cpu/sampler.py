"""Sampling from a small Llama policy on a CPU, several times faster than Transformers.

For a policy of half a million parameters, `generate` of Transformers spends its time on overhead,
not on arithmetic. This sampler computes each distinct prompt once, drops finished rows from the
batch and draws tokens with a cumulative sum. Its greedy output equals that of `generate`.

Shapes: B completions, U distinct prompts, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gdpo_tune.training.fast_cpu.llama import KeyValueCache, Llama


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float | None,
    end_tokens: Sequence[int],
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Sample B completions, each up to and including its end token.

    Args:
        model: a policy that `is_small_llama` accepts.
        prompts: B prompts, none of them empty; equal ones are computed once.
        max_new_tokens: longest completion.
        temperature: None takes the most likely token.
        end_tokens: each ends a completion.
        generator: source of randomness; None is the global one.
    """
    llama = Llama(model)
    distinct: dict[tuple[int, ...], int] = {}
    rows = torch.tensor([distinct.setdefault(tuple(p), len(distinct)) for p in prompts])
    unique, present = pad_left(list(distinct), 0)
    width, lengths = unique.shape[1], present.sum(dim=1)
    cos, sin = llama.compute_angles(width + max_new_tokens)
    cache = KeyValueCache(llama, len(distinct), width + max_new_tokens)
    hidden = _read_prompts(llama, unique, present, (cos, sin), cache)

    hidden, lengths = hidden[rows], lengths[rows]
    cache.select(rows)
    cache.used = width
    visible = torch.arange(width + max_new_tokens) >= (width - lengths)[:, None]
    tokens = torch.zeros(len(rows), max_new_tokens, dtype=torch.long)
    live = torch.arange(len(rows))
    ends, ended = torch.tensor(end_tokens), torch.zeros(len(rows), dtype=torch.bool)
    for step in range(max_new_tokens):
        drawn = _draw(llama.compute_logits(hidden), temperature, generator)
        tokens[live, step] = drawn
        ended |= torch.isin(drawn, ends)
        finished = int(ended.sum())
        if finished == len(live) or step == max_new_tokens - 1:
            break
        # Copying the cache takes about as long as a step, so rows are dropped several at a time.
        if finished > len(live) // 8:
            kept = (~ended).nonzero()[:, 0]
            live, drawn, lengths, visible = live[kept], drawn[kept], lengths[kept], visible[kept]
            ended = ended[kept]
            cache.select(kept)
        cache.mask = visible[:, None, None, : cache.used + 1]
        position = (lengths + step)[:, None]
        hidden = llama.forward(drawn[:, None], (cos[position], sin[position]), cache)
        cache.used += 1
    return [cut_after_end(row, end_tokens) for row in tokens.tolist()]


@torch.no_grad()
def compute_next_logits(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Tensor:
    """Compute logits [rows, E] of the token after each text, as `sample` does."""
    llama = Llama(model)
    tokens, present = pad_left(texts, 0)
    width = tokens.shape[1]
    cache = KeyValueCache(llama, len(tokens), width)
    hidden = _read_prompts(llama, tokens, present, llama.compute_angles(width), cache)
    return llama.compute_logits(hidden)


def pad_left(prompts: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Return tokens and mask, [rows, width of the longest prompt] each."""
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), padding)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return tokens, torch.arange(width) >= (width - lengths)[:, None]


def cut_after_end(tokens: list[int], end_tokens: Sequence[int]) -> list[int]:
    """Drop what follows the first end token."""
    for position, token in enumerate(tokens):
        if token in end_tokens:
            return tokens[: position + 1]
    return tokens


def _read_prompts(
    llama: Llama,
    tokens: Tensor,
    present: Tensor,
    angles: tuple[Tensor, Tensor],
    cache: KeyValueCache,
) -> Tensor:
    """Fill the cache with the prompts and return the hidden states [U, D] of their last tokens."""
    width = tokens.shape[1]
    position = (present.cumsum(dim=1) - 1).clamp(min=0)
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    # Padding attends to itself, because a row of the mask without any entry gives NaN.
    cache.mask = ((causal & present[:, None]) | torch.eye(width, dtype=torch.bool))[:, None]
    cos, sin = angles
    return llama.forward(tokens, (cos[position], sin[position]), cache)


def _draw(logits: Tensor, temperature: float | None, generator: torch.Generator | None) -> Tensor:
    """Draw one token per row, [rows], by inverse transform: much faster than `multinomial`."""
    if temperature is None:
        return logits.argmax(dim=-1)
    mass = torch.softmax(logits / temperature, dim=-1).cumsum(dim=-1)
    threshold = torch.rand(len(mass), 1, generator=generator) * mass[:, -1:]
    # right=True, because otherwise a draw of exactly 0 could take a token of probability 0.
    drawn = torch.searchsorted(mass, threshold, right=True)[:, 0]
    return drawn.clamp(max=mass.shape[1] - 1)
