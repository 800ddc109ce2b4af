"""What is to be run next: a pure function of the spec and the records.

The order is baselines, points to try first, the sampler's proposals, then replicates of the front.
Because the records alone decide, the same function continues a sweep, extends one whose
`search.trials` grew, and says that one is finished.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gdpo_tune.analysis import has_stagnated, next_replicate
from gdpo_tune.core import task_files
from gdpo_tune.core.trials import Params, Proposer, Role, TrialRecord
from gdpo_tune.spec import PbtSettings, SweepSpec
from gdpo_tune.tuning.search import quasi_random
from gdpo_tune.tuning.search.budget import describe_spent_budget

BASELINES: tuple[Role, ...] = ("untrained", "published")
"""What every sweep begins with."""


@dataclass(frozen=True)
class Step:
    """A trial to start."""

    role: Role
    proposer: Proposer
    params: Params | None
    """Complete parameters; None: the sampler is to propose them."""
    replicate_of: int | None = None


def find_next_step(
    spec: SweepSpec, records: Sequence[TrialRecord], hours: float = 0.0
) -> Step | None:
    """The next trial; None if there is none as things stand.

    While trials run, None may turn into a replicate once they end.

    Args:
        spec: what is asked.
        records: every trial.
        hours: in which the sweep ran so far, for its budget.
    """
    if describe_spent_budget(spec, records, hours):
        return None
    for role in BASELINES:
        if not any(record.role == role for record in records):
            return Step(role, "baseline", published(spec))
    few = len(records) < spec.search.trials  # then there is no need to count
    if few or count_started(records) < spec.search.trials:
        enqueued = enqueued_step(spec, records)
        if isinstance(spec.search.scheduler, PbtSettings):
            return replace(enqueued, role="member") if enqueued else member_step(spec, records)
        if enqueued is not None:
            return enqueued
        if not has_stagnated(records, spec.objective_list(), spec.search.patience):
            return Step("search", "model", None)
    if any(r.role == "member" and r.is_open for r in records):
        return None  # until they end, nobody knows who is on the front
    wanted = spec.search.replicates
    replicate = next_replicate(records, spec.objective_list(), wanted.per_point, wanted.max_runs)
    if replicate is None:
        return None
    return Step("replicate", "replicate", replicate.params, replicate.of)


def enqueued_step(spec: SweepSpec, records: Sequence[TrialRecord]) -> Step | None:
    """The first point of `enqueue:` that was not run, completed; None if there is none.

    A point was run if a trial that was enqueued agrees with it, so points may be added anywhere to
    a sweep that goes on.
    """
    if not spec.enqueue:
        return None
    enqueued = [record for record in records if record.proposer == "enqueued"]
    for given in spec.enqueue:
        if not any(agrees(spec, record.params, given) for record in enqueued):
            filled = {**quasi_random.draw_point(spec, len(enqueued)), **given}
            return Step("search", "enqueued", spec.space.complete(filled))
    return None


def member_step(spec: SweepSpec, records: Sequence[TrialRecord]) -> Step:
    """A further member of a population; all of them together cover the space evenly."""
    known = sum(record.role == "member" and record.proposer == "startup" for record in records)
    return Step("member", "startup", spec.space.complete(quasi_random.draw_point(spec, known)))


def agrees(spec: SweepSpec, params: Params, given: Params) -> bool:
    """Whether a trial's parameters are what `given` asks for, where it has an effect."""
    active = spec.space.active(params)
    return all(params[name] == value for name, value in given.items() if name in active)


def is_finished(spec: SweepSpec, records: Sequence[TrialRecord], hours: float = 0.0) -> bool:
    """Whether nothing runs or waits and nothing is left to run; `hours` as for `find_next_step`."""
    open_trials = any(record.is_open for record in records)
    return not open_trials and find_next_step(spec, records, hours) is None


def ending(spec: SweepSpec, records: Sequence[TrialRecord], hours: float = 0.0) -> str:
    """Why nothing is left to run, for a person; `hours` as for `find_next_step`."""
    reason = describe_spent_budget(spec, records, hours)
    if reason:
        return reason
    tried = count_started(records)
    if tried < spec.search.trials:
        return f"{spec.search.patience} trials in a row did not move the hypervolume"
    return f"all {spec.search.trials} configurations were tried"


def count_started(records: Sequence[TrialRecord]) -> int:
    """Configurations that were begun, baselines and replicates aside."""
    return sum(record.role in ("search", "member") for record in records)


def planned(spec: SweepSpec, records: Sequence[TrialRecord]) -> int:
    """Trials that will exist at the end, at most: replicates depend on how large the front is."""
    search = max(spec.search.trials, count_started(records))
    most = 2 + search + spec.search.replicates.most
    return max(len(records), min(most, spec.search.budget.trials or most))


def published(spec: SweepSpec) -> Params:
    """The setting of the method's paper, completed from the space."""
    return spec.space.baseline(task_files.task_info(spec.task).published)


def derive_trial_seed(spec: SweepSpec, number: int) -> int:
    """Seed of a trial's training: the first 31 bits of SHA-256 of `<search.seed>:<number>`.

    So a replicate, which has a number of its own, has a fresh seed, and a trial that goes on in
    another process has its old one.
    """
    digest = hashlib.sha256(f"{spec.search.seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
