"""What every task offers to the trainer.

N completions of one call; `problems` may name the same problem several times (a group).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol, Self

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
    """What the task itself put there, made of JSON types only."""


@dataclass(frozen=True)
class Scores:
    """Verdicts on N completions, in their order."""

    rewards: Mapping[str, Sequence[float | None]]
    """Reward name -> N training signals, unweighted; None means not scored."""
    metrics: Mapping[str, Sequence[float]]
    """Metric name -> N contributions; the metric itself is their mean."""


class Task(Protocol):
    """A source of problems and the judge of completions. Use it as a context manager."""

    rewards: tuple[str, ...]
    metrics: tuple[str, ...]

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` problems with distinct prompts; the same arguments give the same list."""
        ...

    def score(
        self, problems: Sequence[Problem], completions: Sequence[str], lengths: Sequence[int]
    ) -> Scores:
        """Judge N completions.

        Args:
            problems: N problems, the one that each completion answers.
            completions: N texts, decoded without the end token.
            lengths: N token counts, the end token included.
        """
        ...

    def environment(self) -> dict[str, str]:
        """Provenance that only the task knows, such as the sandbox's tier."""
        ...

    def close(self) -> None:
        """End every process that the task started."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
