"""Trial records for the tests of analysis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gdpo_tune.analysis.front import build_front
from gdpo_tune.core.trials import Estimate, Objective, TrialRecord

GOALS = (Objective("a", "maximize", 0.0), Objective("b", "maximize", 0.0))


def trial(
    number: int, a: float, b: float, *, se: float = 0.02, of: int | None = None, **fields: Any
) -> TrialRecord:
    """A complete trial; `of` makes it a replicate."""
    test = {"a": Estimate(a, se), "b": Estimate(b, se)}
    defaults = {
        "number": number,
        "role": "search" if of is None else "replicate",
        "state": "complete",
        "params": {"lr": float(number if of is None else of)},
        "seed": number,
        "proposer": "model",
        "replicate_of": of,
        "validation": test,
        "test": test,
        "feasible": True,
        "finished": 100.0 + number,
    }
    return TrialRecord(**{**defaults, **fields})


def front_numbers(records: Sequence[TrialRecord]) -> list[int]:
    """Who is on the front, by first trial."""
    return [member.first for member in build_front(records, GOALS).members]
