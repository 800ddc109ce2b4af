"""Failures that a sweep survived."""

from __future__ import annotations

from dataclasses import dataclass

WAS_LOST = "was lost"
"""End of the description of an incident in which a node was lost."""
IS_TRIED_AGAIN = "is tried again"
"""Start of the description of an incident in which an attempt at a trial failed."""


@dataclass(frozen=True)
class Incident:
    """A failure that a sweep survived: a node was lost, an attempt at a trial failed."""

    time: float
    """Unix seconds."""
    description: str
    """In one line; of trials, a predicate of each: `is tried again: ...`."""
    trials: tuple[int, ...] = ()
    """Numbers of the trials that it concerns."""

    def __str__(self) -> str:
        """Return the description with the trials, in one line."""
        if not self.trials:
            return self.description
        numbers = ", ".join(map(str, self.trials))
        if self.description.startswith("node "):
            return f"{self.description}, with trial{'s' if len(self.trials) > 1 else ''} {numbers}"
        several = len(self.trials) > 1
        return f"{'each of trials' if several else 'trial'} {numbers} {self.description}"
