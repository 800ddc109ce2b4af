"""Plan of a sweep: the next step follows from the spec and the records alone.

The order is baselines, configurations that requests have added, enqueued points, the sampler's
proposals, then replicates of the front. Merges and checkpoints come between them, as trainings end.
Because only the records decide, one function resumes a sweep, extends a sweep whose
`search.trials` grew, and detects that a sweep is finished.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gdpo_tune.analysis.racing import choose_replicate
from gdpo_tune.analysis.stagnation import has_stagnated
from gdpo_tune.core import task_files
from gdpo_tune.core.trials import Params, Part, Proposer, Role, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.budget import describe_spent_budget
from gdpo_tune.spec import PbtSettings, SweepSpec
from gdpo_tune.spec.model import BASELINES
from gdpo_tune.tuning.search import quasi_random
from gdpo_tune.tuning.search.candidate_plan import choose_candidate, count_candidates


@dataclass(frozen=True)
class Step:
    """Trial to start."""

    role: Role
    proposer: Proposer
    params: Params | None
    """Complete parameters, those of its training for a checkpoint, and none for a merge; None: the
    sampler proposes them."""
    replicate_of: int | None = None
    parts: tuple[Part, ...] = ()
    """Trained policies of a checkpoint or a merge."""
    request: str = ""
    """Id of the request that added it."""


DEAD_STARTS = 3
"""Trainings without a signal after which a sweep stops, if it had no other ones."""
Added = Sequence[tuple[str, Params]]
"""Configurations that requests have added and no trial has yet: id of the request, parameters."""


def find_next_step(
    spec: SweepSpec, records: Sequence[TrialRecord], hours: float = 0.0, added: Added = ()
) -> Step | None:
    """Find the next trial to start; None if there is none at present.

    While trials run, a replicate may follow once they end. `hours` is the running time of the sweep
    so far, for its budget. Once any other part of the budget is spent, candidates still follow:
    they train nothing.
    """
    budget = spec.search.budget
    if budget.hours and hours >= budget.hours:
        return None
    if describe_spent_budget(spec, records, hours):
        return _find_candidate_step(spec, records, at_end=True)
    if find_dead_start(spec, records) is not None:
        return None
    for role in BASELINES:
        if not any(record.role == role and record.is_comparable for record in records):
            return Step(role, "baseline", build_published(spec))
    for request, point in added:
        params = _fill_point(spec, point, _list_enqueued(records))
        return Step("search", "enqueued", params, request=request)
    candidate = _find_candidate_step(spec, records)
    if candidate is not None:
        return candidate
    few = len(records) < spec.search.trials  # saves counting
    if few or count_started(records) < spec.search.trials:
        enqueued = _find_enqueued_step(spec, records)
        if isinstance(spec.search.scheduler, PbtSettings):
            if enqueued is not None:
                return replace(enqueued, role="member")
            # together the members cover the space evenly
            drawn = sum(r.role == "member" and r.proposer == "startup" for r in records)
            params = spec.space.complete(quasi_random.draw_point(spec, drawn))
            return Step("member", "startup", params)
        if enqueued is not None:
            return enqueued
        if not has_stagnated(records, spec.list_objectives(), spec.search.patience):
            return Step("search", "model", None)
        candidate = _find_candidate_step(spec, records, at_end=True)
        if candidate is not None:
            return candidate
    if any(r.role == "member" and r.is_open for r in records):
        return None  # the front is unknown until they end
    limits = spec.search.replicates
    replicate = choose_replicate(records, spec.list_objectives(), limits.per_point, limits.max_runs)
    if replicate is None:
        return None
    return Step(
        "replicate", "replicate", replicate.params, replicate.original, parts=replicate.parts
    )


def _find_candidate_step(
    spec: SweepSpec, records: Sequence[TrialRecord], *, at_end: bool = False
) -> Step | None:
    """Return the merge or checkpoint whose turn it is; see `choose_candidate`."""
    candidate = choose_candidate(spec, records, at_end=at_end)
    if candidate is None:
        return None
    role, parts = candidate
    params = {} if role == "merge" else records[parts[0].trial].params
    return Step(role, "candidate", params, parts=parts)


def _find_enqueued_step(spec: SweepSpec, records: Sequence[TrialRecord]) -> Step | None:
    """Return the first point of `enqueue:` that no enqueued trial has, completed; None if all ran.

    A trial has a point if it agrees with it on the parameters that have an effect. So points may be
    added anywhere before a sweep resumes.
    """
    if not spec.enqueue:
        return None
    enqueued = _list_enqueued(records)
    active = [(params, spec.space.select_active(params)) for params in enqueued]
    for point in spec.enqueue:
        if not any(
            all(params[name] == value for name, value in point.items() if name in names)
            for params, names in active
        ):
            return Step("search", "enqueued", _fill_point(spec, point, enqueued))
    return None


def _list_enqueued(records: Sequence[TrialRecord]) -> list[Params]:
    return [record.params for record in records if record.proposer == "enqueued"]


def _fill_point(spec: SweepSpec, point: Params, enqueued: Sequence[Params]) -> Params:
    """Complete a point; a missing value is quasi-random."""
    return spec.space.complete({**quasi_random.draw_point(spec, len(enqueued)), **point})


def find_dead_start(spec: SweepSpec, records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Find the first training without a signal if more trainings would have none either.

    So it is if every training that ended has failed, and `DEAD_STARTS` of them, or all of a smaller
    sweep, had none. One is enough if the untrained policy earned the same everywhere too. Trials
    before an accepted change do not count: the change may give the others a signal.
    """
    records = [record for record in records if record.is_comparable]
    ended = [record for record in records if record.is_training and record.state != "running"]
    dead = [record for record in ended if record.had_no_signal]
    if not dead or any(record.state != "failed" for record in ended):
        return None
    silent = any(r.role == "untrained" and find_equal_rewards(spec, r) for r in records)
    enough = 1 if silent else min(DEAD_STARTS, spec.search.trials + 1)  # the published setting too
    return dead[0] if len(dead) >= enough else None


def find_equal_rewards(spec: SweepSpec, record: TrialRecord) -> Mapping[str, float]:
    """Return the held-out rewards if all completions earned the same of each; empty otherwise."""
    names = task_files.load_task_info(spec.task, spec.space.domains).rewards
    earned = {name: record.test[name] for name in names if name in record.test}
    equal = all(estimate.is_constant for estimate in earned.values())
    return {name: e.mean for name, e in earned.items()} if equal else {}


def is_finished(
    spec: SweepSpec, records: Sequence[TrialRecord], hours: float = 0.0, added: Added = ()
) -> bool:
    """Return whether no trial is open and none is left to run; arguments as `find_next_step`."""
    open_trials = any(record.is_open for record in records)
    return not open_trials and find_next_step(spec, records, hours, added) is None


def explain_end(spec: SweepSpec, records: Sequence[TrialRecord], hours: float = 0.0) -> str:
    """Explain why no trial is left to run; `hours` as for `find_next_step`."""
    if reason := describe_spent_budget(spec, records, hours):
        return reason
    if find_dead_start(spec, records) is not None:
        return "no training had a signal"
    if count_started(records) < spec.search.trials:
        return f"{spec.search.patience} trials in a row did not move the hypervolume"
    return f"all {spec.search.trials} configurations were tried"


def count_started(records: Sequence[TrialRecord]) -> int:
    """Count the configurations that were started, without baselines, replicates and added ones."""
    return sum(record.role in ("search", "member") and not record.request for record in records)


def count_planned(spec: SweepSpec, records: Sequence[TrialRecord], added: Added = ()) -> int:
    """Return the most trials at the end; how many replicates and merges depends on the front."""
    search = max(spec.search.trials, count_started(records))
    search += len(added) + sum(bool(record.request) for record in records)
    again = sum(record.role in BASELINES and not record.is_comparable for record in records)
    trained = 2 + again + search + spec.search.replicates.max_trainings
    limit = spec.search.budget.trials
    most = min(trained, limit or trained) + count_candidates(spec)
    return max(len(records), most)


def build_published(spec: SweepSpec) -> Params:
    """Return the setting of the method's paper, completed from the space."""
    info = task_files.load_task_info(spec.task, spec.space.domains)
    return spec.space.complete_baseline(info.published)


def derive_seed(spec: SweepSpec, number: int) -> int:
    """Derive the seed of a trial, or of the sampler of a proposal, from its number.

    It is the first 31 bits of SHA-256 of `<search.seed>:<number>`.

    So a replicate, which has its own number, has a new seed, and a trial that resumes in another
    process keeps its seed.
    """
    digest = hashlib.sha256(f"{spec.search.seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class PlanCache:
    """Next step of a running sweep, computed again only after a change that may affect it.

    Ray constantly asks for the next trial, and among thousands of trials it takes half a second to
    find the next replicate. Every start, measurement and end of a trial must be noted here.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._step: Step | None = None
        self._is_step_valid = False
        self._is_budget_checked = False

    @property
    def _spec(self) -> SweepSpec:
        return self._ledger.spec

    def note_start(self) -> None:
        """Note that a trial has started."""
        self._is_step_valid = False

    def note_request(self) -> None:
        """Note that a request has changed the sweep."""
        self._is_step_valid = self._is_budget_checked = False

    def note_measurement(self) -> None:
        """Note a measurement, which changes the plan through the budget alone."""
        self._is_budget_checked = False

    def note_end(self, record: TrialRecord) -> None:
        """Note that a trial has ended.

        A stopped trial adds no step if there was none; at the end of a sweep most are stopped.
        """
        # The end of a stopped trial may allow one more merge.
        harmless = ("paused",) if self._spec.has_candidates else ("pruned", "paused")
        stopped = record.role == "search" and record.state in harmless
        self._is_step_valid &= stopped and self._step is None

    def get_step(self, *, idle: bool) -> Step | None:
        """Return the next step; None if no trial can start now. `idle`: no trial is under way."""
        # hours pass by themselves
        may_be_spent = not self._is_budget_checked or bool(self._spec.search.budget.hours)
        is_outdated = self._step is not None and may_be_spent and self.is_budget_spent()
        if not self._is_step_valid or is_outdated or (self._step is None and idle):
            records = self._ledger.get_records()
            added = self._ledger.steering.list_waiting(records)
            hours = self._compute_hours()
            self._step = find_next_step(self._spec, records, hours, added)
            self._is_step_valid = True
        self._is_budget_checked = True
        return self._step

    def is_budget_spent(self) -> bool:
        """Return whether some part of `search.budget` is spent."""
        records = self._ledger.get_records()
        return bool(describe_spent_budget(self._spec, records, self._compute_hours()))

    def _compute_hours(self) -> float:
        """Return the running time of the sweep; 0 if its budget has no hours."""
        if not self._spec.search.budget.hours:
            return 0.0
        return self._ledger.compute_hours(time.time())
