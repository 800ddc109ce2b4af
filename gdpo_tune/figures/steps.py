"""Step metrics of a trial, as its `steps.jsonl` has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gdpo_tune.trials import TrialRecord

FILE = "steps.jsonl"
REWARD = "train/reward/"


@dataclass(frozen=True)
class Step:
    """The metrics of one training step."""

    step: int
    metrics: Mapping[str, float]


def read_steps(directory: Path | None) -> list[Step]:
    """Steps in order; empty where nothing was written. A line cut short by a crash is left out.

    A trial that goes on from a checkpoint repeats steps: a line replaces every earlier line of its
    own or a later step.
    """
    if directory is None or not (directory / FILE).exists():
        return []
    steps: list[Step] = []
    for line in (directory / FILE).read_text(encoding="utf-8").splitlines():
        found = _parse(line)
        if found is None:
            continue
        while steps and steps[-1].step >= found.step:
            steps.pop()
        steps.append(found)
    return steps


def steps_of(records: Sequence[TrialRecord]) -> dict[int, list[Step]]:
    """Trial number -> its steps, for the trials that have any."""
    found = {record.number: read_steps(record.directory) for record in records}
    return {number: steps for number, steps in found.items() if steps}


def reward_names(steps: Mapping[int, Sequence[Step]]) -> list[str]:
    """The rewards that any trial reports, in the order of their first appearance."""
    names: dict[str, None] = {}
    for of_trial in steps.values():
        for name in of_trial[0].metrics:
            if name.startswith(REWARD) and name.endswith("/mean"):
                names[name.removeprefix(REWARD).removesuffix("/mean")] = None
    return list(names)


def _parse(line: str) -> Step | None:
    try:
        content = json.loads(line)
        return Step(int(content["step"]), dict(content["metrics"]))
    except (ValueError, KeyError, TypeError):
        return None
