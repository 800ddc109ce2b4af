"""Policies that the trainings of a sweep have left, with what is known of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from gdpo_tune.analysis.merge_choice import MOST_PARENTS, select_parents
from gdpo_tune.analysis.merge_model import Evaluated, Policy, read_values
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.trials import (
    CHECKPOINT_PREFIX,
    TOLERANCE,
    Objective,
    Part,
    TrialRecord,
    format_parts,
    title_candidate,
)
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.pick_language import parse_pick
from gdpo_tune.results.picking import pick_trial

EXAMPLE = "7=0.3,12@40=0.7"


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy after some steps of a training."""

    policy: Policy
    record: TrialRecord
    """Its training, or the trial that evaluated it, with the estimates of this policy."""
    checkpoint: Path | None
    """Its directory; of a sweep on an object store, where its marker is copied to."""
    is_end: bool

    @property
    def name(self) -> str:
        """Name of the candidate: `7`, `7@40`."""
        trial, step = self.policy
        return f"{trial}" if self.is_end else f"{trial}@{step}"


def list_policies(records: Sequence[TrialRecord]) -> dict[Policy, TrainedPolicy]:
    """List the policies at which the trainings of a sweep were evaluated, kept or not.

    A member of a population may have taken over another training, so only its end counts. A
    checkpoint that a trial of its own evaluated has the estimates of that trial.
    """
    result: dict[Policy, TrainedPolicy] = {}
    for record in records:
        is_usable = record.is_training and record.state == "complete" and record.is_comparable
        if not is_usable or record.last_step is None:
            continue
        rungs = () if record.role == "member" else record.rungs
        for rung in rungs:
            early = replace(record, validation=rung.validation, test={})
            path = record.directory and record.directory / f"{CHECKPOINT_PREFIX}{rung.step}"
            path, key = path if path and path.is_dir() else None, (record.number, rung.step)
            result[key] = TrainedPolicy(key, early, path, is_end=False)
        end = (record.number, record.last_step)
        result[end] = TrainedPolicy(end, record, record.checkpoint, is_end=True)
    for record in records:
        key = (record.parts[0].trial, record.parts[0].step) if record.parts else None
        if record.role == "checkpoint" and key in result and (record.validation or record.rungs):
            path = result[key].checkpoint or record.checkpoint
            result[key] = TrainedPolicy(key, record, path, is_end=False)
    return result


def evaluate_policies(
    policies: Sequence[TrainedPolicy], metrics: Sequence[Objective]
) -> list[Evaluated]:
    """Return the validation values of policies, those that lack a metric left out."""
    values = (
        read_values(replace(p.record, checkpoint=p.checkpoint), {p.policy: 1.0}, metrics)
        for p in policies
    )
    return [entry for entry in values if entry.is_measured]


def find_parts(
    shares: Mapping[str, float], sweep: Sweep, policies: Mapping[Policy, TrainedPolicy], source: str
) -> tuple[Part, ...]:
    """Find the policies that `--weights` names.

    Raises:
        PickError, UsageError: one does not exist, is a merge or was not kept, there is only one, or
            the weights do not sum to 1.
    """
    parts: dict[Policy, Part] = {}
    for name, weight in shares.items():
        key = _find_policy(name, sweep)
        if key in parts:
            raise UsageError(f"--weights: {name} stands twice\n    fix: add up its weights")
        if key not in policies or policies[key].checkpoint is None:
            raise UsageError(
                f"--weights: the policy of {title_candidate(name)} was not kept\n    fix: train it "
                f"again: python -m gdpo_tune.train --from {quote(f'{source}:{name}')}"
            )
        parts[key] = Part(*key, weight)
    total = sum(shares.values())
    if abs(total - 1) > TOLERANCE:
        scaled = ",".join(f"{name}={weight / total:.10g}" for name, weight in shares.items())
        raise UsageError(
            f"--weights: the weights of a merge must sum to 1, and these sum to {total:g}\n"
            f"    fix: divide each by their sum: --weights {scaled}"
        )
    if len(parts) < 2:
        raise UsageError(f"--weights: a merge has two parts or more\n    fix: write {EXAMPLE}")
    return tuple(sorted(parts.values(), key=lambda part: (part.trial, part.step)))


def _find_policy(name: str, sweep: Sweep) -> Policy:
    pick = parse_pick(name)
    if not pick.names_candidate:
        raise pick.error(1, "a part is the end of a trial or a checkpoint", f"write {EXAMPLE}")
    record = pick_trial(sweep.records, sweep.spec, pick).record
    if len(record.parts) > 1:
        reason = f"{name} is a merge: {format_parts(record.parts)}"
        raise pick.error(1, reason, "write its parents, with products of the weights")
    if record.parts:
        return record.parts[0].trial, record.parts[0].step
    if record.state != "complete" or record.last_step is None:
        raise pick.error(1, f"trial {name} is {record.state}", "write a trial that is complete")
    return record.number, record.last_step


def find_parents(
    sweep: Sweep,
    policies: Mapping[Policy, TrainedPolicy],
    source: str,
    metrics: Sequence[Objective],
) -> list[Evaluated]:
    """Find the policies that a wished merge may consist of: those that exist, near the front.

    Raises:
        UsageError: there are fewer than two.
    """
    firsts = [policy for policy in policies.values() if policy.record.role != "replicate"]
    kept = evaluate_policies([p for p in firsts if p.checkpoint is not None], metrics)
    if len(kept) < 2:
        gone = [policy.name for policy in firsts if policy.is_end and policy.checkpoint is None]
        fix = "let the sweep continue"
        if gone:
            commands = (f"python -m gdpo_tune.train --from {quote(f'{source}:{n}')}" for n in gone)
            fix = "search with keep: front, or train again: " + "; ".join(list(commands)[:2])
        raise UsageError(
            f"{source}: a merge has two parts or more, and that sweep (keep: {sweep.spec.keep}) "
            f"has {'one policy' if kept else 'no policies'}\n    fix: {fix}"
        )
    selected = select_parents(kept)
    return selected if len(selected) > 1 else kept[:MOST_PARENTS]
