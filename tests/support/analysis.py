"""Trial records for the tests of analysis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gdpo_tune.analysis.front import build_front
from gdpo_tune.core.trials import Estimate, Objective, Part, TrialRecord

GOALS = (Objective("a", "maximize", 0.0), Objective("b", "maximize", 0.0))


def build_trial(
    number: int,
    a: float,
    b: float,
    *,
    se: float = 0.02,
    replicate_of: int | None = None,
    **fields: Any,
) -> TrialRecord:
    test = {"a": Estimate(a, se), "b": Estimate(b, se)}
    defaults = {
        "number": number,
        "role": "search" if replicate_of is None else "replicate",
        "state": "complete",
        "params": {"lr": float(number if replicate_of is None else replicate_of)},
        "seed": number,
        "proposer": "model",
        "replicate_of": replicate_of,
        "validation": test,
        "test": test,
        "feasible": True,
        "finished": 100.0 + number,
    }
    return TrialRecord(**{**defaults, **fields})


def build_checkpoint(
    number: int, a: float, b: float, part: tuple[int, int], **fields: Any
) -> TrialRecord:
    """Build the evaluation of a checkpoint; `part` is the trial that trained it and its step."""
    defaults = {
        "role": "checkpoint",
        "parts": (Part(*part, 1.0),),
        "params": {"lr": float(part[0])},
    }
    return build_trial(number, a, b, **{**defaults, **fields})


def build_merge(
    number: int, a: float, b: float, *parts: tuple[int, int, float], **fields: Any
) -> TrialRecord:
    """Build the evaluation of a merge; `parts` are trials, steps and weights."""
    defaults = {"role": "merge", "parts": tuple(Part(*part) for part in parts), "params": {}}
    return build_trial(number, a, b, **{**defaults, **fields})


def list_front_numbers(records: Sequence[TrialRecord]) -> list[int]:
    """List the first trials of the members of the front."""
    return [member.first for member in build_front(records, GOALS).members]
