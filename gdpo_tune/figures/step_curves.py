"""Which step metrics of which trials there are to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gdpo_tune.core.steps import read_steps
from gdpo_tune.core.trials import Measurement, TrialRecord

REWARD = "train/reward/"


def steps_of(records: Sequence[TrialRecord]) -> dict[int, list[Measurement]]:
    """Trial number -> its steps, for the trials that have any."""
    found = {r.number: read_steps(r.directory) for r in records if r.directory is not None}
    return {number: steps for number, steps in found.items() if steps}


def reward_names(steps: Mapping[int, Sequence[Measurement]]) -> list[str]:
    """The rewards that any trial reports, in the order of their first appearance."""
    names: dict[str, None] = {}
    for of_trial in steps.values():
        for name in of_trial[0].metrics:
            if name.startswith(REWARD) and name.endswith("/mean"):
                names[name.removeprefix(REWARD).removesuffix("/mean")] = None
    return list(names)
