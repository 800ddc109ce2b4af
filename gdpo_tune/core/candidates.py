"""Candidates of a front: ends of trainings, checkpoints of them, and merges of several policies.

A candidate that nobody trained is made of parts: of one for a checkpoint, of several for a merge.
People call them `7` (the end of trial 7), `7@40` (trial 7 after 40 steps) and `merge-27`, where 27
is the number of the trial that evaluates the merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MERGE_PREFIX = "merge-"
TOLERANCE = 1e-9
"""Largest distance from 1 of the sum of the weights of a candidate's parts."""


@dataclass(frozen=True)
class Part:
    """A trained policy and its weight in a candidate."""

    trial: int
    """Number of the trial that trained it."""
    step: int
    """Steps of training that it has had."""
    weight: float
    """Share in the weighted mean of weights; a candidate's parts sum to 1."""


def check_weights(weights: Sequence[float]) -> None:
    """Refuse weights of parts that do not sum to 1.

    Raises:
        ValueError: they do not, or there are none.
    """
    if not weights or not abs(sum(weights) - 1) <= TOLERANCE:
        terms = " + ".join(f"{weight:g}" for weight in weights) or "no weight"
        raise ValueError(
            f"the weights of a merge must sum to 1: {terms} = {sum(weights):g}; divide each by "
            "their sum"
        )


def title_candidate(name: str) -> str:
    """Return a candidate's name for a sentence: `trial 7`, `checkpoint 7@40`, `merge-27`."""
    kind = "trial " if name.isdecimal() else "checkpoint " if "@" in name else ""
    return f"{kind}{name}"


def format_parts(parts: Sequence[Part], digits: str = ".3g") -> str:
    """Format parts: `0.5 x 7@60 + 0.5 x 12@60`, `7@40` for a checkpoint; "" keeps all `digits`."""
    if len(parts) == 1:
        return f"{parts[0].trial}@{parts[0].step}"
    return " + ".join(f"{part.weight:{digits}} x {part.trial}@{part.step}" for part in parts)
