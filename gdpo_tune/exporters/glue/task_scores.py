"""Scores of completions by the reward functions of a built-in task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gdpo_tune.core.shaping import Rewards
from gdpo_tune.exporters.glue.no_programs import run_programs_once
from gdpo_tune.tasks.base import Problem, Sample

SCORES: Mapping[str, Callable[[Sample], float | None]] = {}
PARTIAL_SCORES: Mapping[str, Callable[[Sample], float | None]] = {}
"""Partial credit, for rewards that are all or nothing."""
LENGTH_LIMIT = 0
"""Tokens within which a completion earns the length reward."""


def score(
    problems: Sequence[Problem], completions: Sequence[str], lengths: Sequence[int]
) -> tuple[Rewards, Rewards]:
    """Return reward name -> N rewards, and the same with partial credit."""
    results = run_programs_once(problems, completions)
    parts = zip(problems, completions, lengths, results, strict=True)
    samples = [Sample(problem, text, n, LENGTH_LIMIT, result) for problem, text, n, result in parts]
    rewards = {name: [function(sample) for sample in samples] for name, function in SCORES.items()}
    partial = {
        name: [function(sample) for sample in samples] for name, function in PARTIAL_SCORES.items()
    }
    return rewards, partial
