"""Parents of a merge: the trained policies that it is the weighted mean of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote

from gdpo_tune.core.trials import CHECKPOINT_PREFIX, Part, TrialRecord


@dataclass(frozen=True)
class Parent:
    """A trained policy and its weight in a merge."""

    source: str
    """Sweep and candidate, such as `runs/code:7@40`."""
    weight: float
    policy: str
    """Path or URL of the policy; empty if its checkpoint was not kept."""


def list_parents(
    records: Sequence[TrialRecord], parts: Sequence[Part], sweep: str, steps: int
) -> list[Parent]:
    """List the parents of a merge; `sweep` is the sweep's location, `steps` those of its trials."""
    parents: list[Parent] = []
    for part in parts:
        record = records[part.trial]
        name = f"{part.trial}" if part.step == steps else f"{part.trial}@{part.step}"
        policy = find_policy(record, part.step)
        parents.append(Parent(f"{sweep}:{name}", part.weight, policy))
    return parents


def find_policy(training: TrialRecord, step: int) -> str:
    """Find the checkpoint of a training; empty if it was not kept. A store is not asked."""
    name = f"{CHECKPOINT_PREFIX}{step}"
    if training.address:
        return f"{training.address}/{name}"
    path = training.directory and training.directory.absolute() / name
    return str(path) if path and path.is_dir() else ""


def explain_merge(
    name: str, parents: Sequence[Parent], sweep: str, command: str
) -> tuple[str, str]:
    """Return why a merge is no training, and below each other the commands that make it anew.

    `command` trains or exports a parent: `{}` stands for its source.
    """
    count = len(parents)
    reason = f"{name} is a merge: {count} trainings and one merge, not one training"
    commands = [command.format(quote(parent.source)) for parent in parents]
    commands.append(f"python -m gdpo_tune.export {quote(f'{sweep}:{name}')} --to mergekit")
    return reason, "\n         ".join(commands)
