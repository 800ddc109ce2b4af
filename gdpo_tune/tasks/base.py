"""What a reward sees and is: a problem, a sample to judge, a reward. An export carries this module.

N completions of one call; `problems` may name the same problem several times (a group).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from gdpo_tune.sandbox import Result

Split = Literal["warm_start", "train", "validation", "test"]
"""Disjoint sets of prompts: for the embedded policy's recipe, training, the search, the front."""


@dataclass(frozen=True)
class Problem:
    """One prompt and what is needed to judge a completion of it."""

    prompt: str
    """Exactly what the policy reads before its first token."""
    family: str
    """Kind of problem, for reports."""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The task's own facts about the problem, made of JSON types only."""


class Sample(NamedTuple):
    """One completion with everything that a reward or a metric may look at."""

    problem: Problem
    completion: str
    tokens: int
    """Length of the completion, the end token included."""
    length_limit: int
    """`training.length_limit` in tokens."""
    result: Result | None = None
    """Result of its program in the sandbox; None if there is no program."""


@dataclass(frozen=True)
class Reward:
    """A reward: its name, its range, and the function that judges one completion."""

    name: str
    low: float
    high: float
    score: Callable[[Sample], float | None]
    """None means not scored."""
    doc: str
    """Meaning of its mean over completions, in words."""
    partial: Callable[[Sample], float] | None = None
    """Partial credit in the same range, for a reward that is all or nothing."""
    released: Callable[[Sample], float | None] | None = None
    """Score of the authors' code in the same range, where it differs from `score`."""
