"""Sampling of many completions in chunks that fit into memory, without an engine that does so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

TOKENS_AT_ONCE = 2**17
"""Tokens, of prompts and completions, that Transformers holds at once: 42 completions of 2,048 +
1,024 tokens. Their keys and values take 6 GB for a policy of 1.5 billion parameters."""

Sample = Callable[[Sequence[Sequence[int]]], list[list[int]]]
"""B tokenized prompts -> B completions."""


def sample_in_chunks(
    sample: Sample, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """Sample B completions, at most `TOKENS_AT_ONCE` at a time.

    All that fit are sampled at once, as without chunks. Where a GPU has less memory, a chunk that
    runs out of it is sampled again in halves, and later ones are as small.

    Raises:
        torch.OutOfMemoryError: a single completion does not fit.
    """
    rows = count_rows(prompts, max_new_tokens)
    completions: list[list[int]] = []
    while len(completions) < len(prompts):
        chunk = prompts[len(completions) : len(completions) + rows]
        try:
            completions += sample(chunk)
            continue
        except torch.OutOfMemoryError:
            if len(chunk) == 1:
                raise
        # Only here: the error held the tensors of the chunk.
        torch.cuda.empty_cache()
        rows = len(chunk) // 2
    return completions


def count_rows(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Return how many of the B completions are sampled at once, at least 1."""
    longest = max(map(len, prompts), default=0) + max_new_tokens
    return max(1, TOKENS_AT_ONCE // longest)
