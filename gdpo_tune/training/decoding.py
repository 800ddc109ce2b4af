"""Sampling token by token: the loop of every sampler without an engine, and what it draws.

Shapes: B completions, b of them still grow, E entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gdpo_tune.training.progress import TRAINING


def keep_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Return a block after which the global generators of CPU and device are as before."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@dataclass(frozen=True)
class Decoding:
    """Settings of one call that samples completions."""

    max_new_tokens: int
    temperature: float | None
    """None takes the most likely token."""
    end_tokens: tuple[int, ...]
    pad_token: int


class Decoder(Protocol):
    """A policy that has read B prompts, and reads their completions token by token."""

    logits: Tensor
    """[B, E], of the first token of each completion."""

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these; indices count what is left so far."""
        ...

    def read(self, tokens: Tensor) -> Tensor:
        """Read one more token of each row, [b], and return the logits of the next, [b, E]."""
        ...


@torch.no_grad()
def draw_completions(
    decoder: Decoder,
    decoding: Decoding,
    generator: torch.Generator | None,
    scores: list[Tensor] | None = None,
) -> list[list[int]]:
    """Draw B completions, each up to and including its end token.

    A `generator` of None is the global one. `scores` gets the logits of every draw, of the rows
    that are left by then.
    """
    logits = decoder.logits
    count, device = len(logits), logits.device
    drawn_tokens = torch.zeros(count, decoding.max_new_tokens, dtype=torch.long, device=device)
    live = torch.arange(count, device=device)
    ends = torch.tensor(decoding.end_tokens, device=device)
    ended = torch.zeros(count, dtype=torch.bool, device=device)
    for step in range(decoding.max_new_tokens):
        TRAINING.note_progress()
        if scores is not None:
            scores.append(logits)
        drawn = draw_tokens(logits.float(), decoding.temperature, generator)
        drawn_tokens[live, step] = drawn
        ended |= torch.isin(drawn, ends)
        finished = int(ended.sum())
        if finished == len(live) or step == decoding.max_new_tokens - 1:
            break
        # Copying a cache takes about as long as a step, so rows are dropped several at a time.
        if finished > len(live) // 8:
            kept = (~ended).nonzero()[:, 0]
            live, drawn, ended = live[kept], drawn[kept], ended[kept]
            decoder.keep(kept)
        logits = decoder.read(drawn)
    return [cut_after_end(row, decoding.end_tokens) for row in drawn_tokens.tolist()]


def draw_tokens(
    logits: Tensor, temperature: float | None, generator: torch.Generator | None
) -> Tensor:
    """Draw one token per row of logits, [rows], by inverse transform: faster than `multinomial`."""
    if temperature is None:
        return logits.argmax(dim=-1)
    mass = torch.softmax(logits / temperature, dim=-1).cumsum(dim=-1)
    threshold = torch.rand(len(mass), 1, generator=generator).to(mass.device) * mass[:, -1:]
    # right=True, because otherwise a draw of exactly 0 could take a token of probability 0.
    drawn = torch.searchsorted(mass, threshold, right=True)[:, 0]
    return drawn.clamp(max=mass.shape[1] - 1)


def list_distinct(prompts: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the distinct prompts, and the index of each prompt among them."""
    distinct: dict[tuple[int, ...], int] = {}
    rows = [distinct.setdefault(tuple(prompt), len(distinct)) for prompt in prompts]
    return list(distinct), rows


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
