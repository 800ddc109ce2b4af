"""`merge.json`: everything that repeats a merge, beside its policy.

    request      sweep, wish or weights, and the settings of the evaluations
    evaluations  each merge that was evaluated: parts, prediction, validation values, cost
    result       parents with paths, values, cost of all evaluations, the policy's directory

It is written after each evaluation, so an interrupted merge goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.trials import Cost, Estimate, Part
from gdpo_tune.ledger.trial_encoding import decode_estimates, encode_estimates
from gdpo_tune.results.merge_request import MergeChoice, MergeEvaluation
from gdpo_tune.spec.model import list_differences

MERGE_FILE = "merge.json"


@dataclass(frozen=True)
class MergeResult:
    """The merge that was chosen, evaluated on test prompts."""

    index: int
    """Its place among the evaluations."""
    test: Mapping[str, Estimate]
    cost: Cost
    """Cost of all evaluations."""
    policy: str
    """Name of the policy's directory, or of that of the adapters."""
    parents: tuple[Mapping[str, str | int | float], ...]
    """Source, trial, step, weight and path of each."""
    environment: Mapping[str, str]
    most_evaluations: int = 0
    """Evaluations that were asked for; there may be fewer, if no other merge could be better."""


@dataclass(frozen=True)
class MergeProgress:
    """Merges that were evaluated so far, and the result once there is one."""

    evaluations: tuple[MergeEvaluation, ...] = ()
    result: MergeResult | None = None


def read_progress(directory: Path, request: Mapping[str, Any]) -> MergeProgress:
    """Read the progress of a request; nothing if the directory has none.

    Raises:
        UsageError: the directory holds another merge, or its file is damaged.
    """
    file = directory / MERGE_FILE
    if not file.exists():
        return MergeProgress()
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        changed = list_differences(stored["request"], request)
        evaluations = tuple(
            MergeEvaluation(
                MergeChoice(
                    tuple(Part(**part) for part in entry["parts"]),
                    decode_estimates(entry["prediction"]),
                ),
                decode_estimates(entry["validation"]),
                Cost(**entry["cost"]),
            )
            for entry in stored["evaluations"]
        )
        result = None
        if found := stored["result"]:
            test, cost = decode_estimates(found["test"]), Cost(**found["cost"])
            read: dict[str, Any] = found | {"test": test, "cost": cost}
            read["parents"] = tuple(found["parents"])
            result = MergeResult(**{field.name: read[field.name] for field in fields(MergeResult)})
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it is damaged, or of another version ({error!r})"
        raise UsageError(f"{file}: {reason}\n    fix: choose another --out") from error
    if changed:
        raise UsageError(
            f"{directory} holds another merge: {'; '.join(changed)}\n"
            "    fix: choose another --out, or ask for the same"
        )
    return MergeProgress(evaluations, result)


def write_progress(directory: Path, request: Mapping[str, Any], progress: MergeProgress) -> None:
    """Replace the file in one step."""
    result = progress.result
    stored = {
        "request": request,
        "evaluations": [
            {
                "parts": [vars(part) for part in entry.choice.parts],
                "prediction": encode_estimates(entry.choice.prediction),
                "validation": encode_estimates(entry.validation),
                "cost": vars(entry.cost),
            }
            for entry in progress.evaluations
        ],
        "result": result
        and {
            **vars(result),
            "test": encode_estimates(result.test),
            "cost": vars(result.cost),
            "environment": dict(result.environment),
        },
    }
    write_atomically(directory / MERGE_FILE, json.dumps(stored, indent=1))
