"""Memory of vLLM on a GPU, computed from the shape of a policy; docs/gpus.md states it."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
CONTEXT = GIB // 2
"""Bytes of a GPU that CUDA takes for a process beside what torch allocates and can limit."""
GRAPHS = GIB // 2
"""Bytes of an engine's compiled graphs."""
BATCHED_TOKENS = 4096
"""Tokens that an engine of TRL computes at once."""
PROBABILITIES = 16
"""Bytes of an engine for each entry of the vocabulary and each completion that it samples at once:
four arrays of 32-bit numbers while a token is drawn."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of vLLM beside the trainer."""

    weights: int
    """The policy's weights, and the slot of an adapter."""
    workspace: int
    """Graphs, activations, and the probabilities of the next tokens: an estimate."""
    longest: int
    """Cache of one completion of full length with its prompt."""

    @property
    def least(self) -> int:
        """Bytes without which no engine samples as it should."""
        return self.weights + self.workspace + self.longest


def estimate_engine(
    *,
    parameters: int,
    width: int,
    inner_width: int,
    vocabulary: int,
    cached: int,
    completions: int,
    length: int,
    number: int,
) -> EngineMemory:
    """Compute the memory of an engine; a count that is not known is 0.

    Args:
        parameters: numbers of the policy, and of the slot of an adapter.
        width: numbers of a hidden state.
        inner_width: numbers between the two halves of a layer's feed-forward part.
        vocabulary: tokens of the vocabulary.
        cached: numbers in the cache of one token: keys and values of every layer.
        completions: completions that are sampled at once.
        length: tokens that the cache of one completion with its prompt holds.
        number: bytes of a number.
    """
    activations = BATCHED_TOKENS * (4 * width + 3 * inner_width) * number
    return EngineMemory(
        weights=parameters * number,
        workspace=GRAPHS + activations + PROBABILITIES * vocabulary * completions,
        longest=length * cached * number,
    )
