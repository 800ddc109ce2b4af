"""Rewards of completions, computed and shaped as in the training that was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from gdpo_tune.core.shaping import Shaping
from gdpo_tune.exporters.glue.task_scores import score
from gdpo_tune.tasks.base import Problem

SHAPING = Shaping()
WEIGHTS: Mapping[str, float] = {}
"""Weights of the rewards of this training, whose largest is 1."""


def judge(
    problems: Sequence[str], completions: Sequence[str], lengths: Sequence[int]
) -> Mapping[str, Sequence[float | None]]:
    """Return reward name -> N rewards, unweighted; None means not scored.

    `problems` are texts of the column `problem` of prompts.parquet. `completions` lack the end
    token; `lengths` are their tokens, the end token included.
    """
    read = [Problem(**json.loads(text)) for text in problems]
    rewards, partial = score(read, completions, lengths)
    return SHAPING.apply(rewards, lengths, partial)


def judge_each(
    problems: Sequence[str], completions: Sequence[str], lengths: Sequence[int]
) -> list[Mapping[str, float | None]]:
    """Return the rewards of each of N completions by name; see `judge`."""
    rewards = judge(problems, completions, lengths)
    return [
        dict(zip(rewards, values, strict=True)) for values in zip(*rewards.values(), strict=True)
    ]


def weigh(rewards: Mapping[str, float | None]) -> float:
    """Return the weighted sum of one completion's rewards; one that is not scored counts as 0."""
    return sum(weight * (rewards[name] or 0.0) for name, weight in WEIGHTS.items())
