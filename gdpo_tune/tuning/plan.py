"""Plan of a sweep: the next trial follows from the spec and the records alone.

The order is merges that requests have added, baselines, configurations that requests have added,
enqueued points, the sampler's proposals, then replicates of the front. Merges and checkpoints of
the sweep's own come between them, as trainings end.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gdpo_tune.analysis.front import has_stagnated
from gdpo_tune.analysis.merge_choice import choose_checkpoint, choose_merge
from gdpo_tune.analysis.pareto import compute_hypervolume, rank_points
from gdpo_tune.analysis.replicates import choose_replicate
from gdpo_tune.core import task_files
from gdpo_tune.core.events import Outlook, RequestEffect
from gdpo_tune.core.text import format_first
from gdpo_tune.core.trial_config import Params
from gdpo_tune.core.trials import EVALUATED_WORK, Part, Proposer, Role, Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.budget import count_started, describe_spent_budget, find_at_target
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.first_trials import (
    count_wide,
    draw_point,
    draw_startup_point,
    list_corners,
    list_long_weights,
    list_startup_choices,
)
from gdpo_tune.spec.model import FULL_TRAININGS, MERGES_PER_TRAINING
from gdpo_tune.tuning.schedulers import MAX_NAMED, read_values, tighten_references
from gdpo_tune.tuning.survivors import (
    choose_survivors,
    find_corner,
    is_wide_rung_measured,
    list_wide_rung_trials,
)

DEAD_STARTS = 3
"""Trainings without a signal after which a sweep stops, if it had no other ones."""
CEILING = 0.03
"""Share of a reward's range that a policy at its ceiling misses at most: then nine in ten groups of
4 are equal in a reward of 0 or 1."""
DEFAULT_PATIENCE = 2
"""Further configurations in a row of a divided budget that may leave the hypervolume as it is."""
LEAST_GAIN = 0.002
"""Share of the validation hypervolume that a merge or checkpoint has to add for a test."""


@dataclass(frozen=True)
class PlannedTrial:
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


Added = Sequence[tuple[str, RequestEffect]]
"""Configurations and merges that requests have added and no trial has yet, by the request's id."""


def find_next_trial(
    spec: SweepSpec, records: Sequence[TrialRecord], hours: float = 0.0, added: Added = ()
) -> PlannedTrial | None:
    """Find the next trial to start; None if there is none at present.

    `hours` is the running time of the sweep so far, for its budget. Once any other part of the
    budget is spent, merges and checkpoints still follow: they train nothing. A merge that a person
    asked for starts even if the budget is spent. It never changes what else is planned, so a
    finished sweep stays finished.
    """
    for request, effect in added:
        if effect.parts:
            return PlannedTrial("merge", "candidate", {}, parts=effect.parts, request=request)
    budget = spec.search.budget
    if budget.hours and hours >= budget.hours:
        return None
    if find_at_target(spec, records) is not None:
        return None
    is_spent = bool(describe_spent_budget(spec, records, hours))
    records = [record for record in records if not is_asked_merge(record)]
    if is_spent:
        return plan_merge_or_checkpoint(spec, records, at_end=True)
    if find_dead_start(spec, records) is not None:
        return None
    # All but the untrained policy begin at the start.
    has_to_wait = bool(spec.start) and any(r.is_open and r.role == "start" for r in records)
    # A start that did not end well begins again.
    ended_badly = [r for r in records if r.role == "start" and r.state in ("pruned", "failed")]
    begun = {r.role for r in records if r not in ended_badly}
    for role in spec.baselines:
        if role not in begun:
            may_begin = not has_to_wait or role == "untrained"
            return PlannedTrial(role, "baseline", build_published(spec)) if may_begin else None
    if has_to_wait:
        return None
    for request, effect in added:
        if effect.point is not None:
            filled = _fill_point(spec, effect.point, records)
            return PlannedTrial("search", "enqueued", filled, request=request)
    if spec.search.is_divided:
        return _plan_divided(spec, records)
    if planned := plan_merge_or_checkpoint(spec, records):
        return planned
    few = len(records) < spec.search.trials  # saves counting
    if few or count_started(records) < spec.search.trials:
        if planned := _plan_enqueued(spec, records):
            return planned
        if not has_stagnated(records, spec.list_objectives(), spec.search.patience):
            return PlannedTrial("search", "model", None)
        if planned := plan_merge_or_checkpoint(spec, records, at_end=True):
            return planned
    return _plan_replicate(spec, records)


def is_asked_merge(record: TrialRecord) -> bool:
    """Return whether a trial evaluates a merge that a person asked for."""
    return bool(record.parts and record.request)


def _plan_replicate(spec: SweepSpec, records: Sequence[TrialRecord]) -> PlannedTrial | None:
    limits = spec.search.replicates
    replicate = choose_replicate(records, spec.list_objectives(), limits.per_point, limits.max_runs)
    if replicate is None:
        return None
    return PlannedTrial(
        "replicate", "replicate", replicate.params, replicate.original, parts=replicate.parts
    )


def _plan_divided(spec: SweepSpec, records: Sequence[TrialRecord]) -> PlannedTrial | None:
    """Find the next trial of a divided budget, whose scheduler continues what waits.

    First the wide rung, then the corners that begin anew. Once all that trains has ended come
    merges and checkpoints, then further configurations one by one, then replicates.
    """
    wide = list_wide_rung_trials(spec, records)
    if len(wide) < count_wide(spec, records):
        if planned := _plan_enqueued(spec, records):
            return planned
        drawn = sum(record.proposer == "startup" for record in wide)
        if drawn < len(list_startup_choices(spec)):
            params = spec.space.complete(draw_startup_point(spec, drawn))
            return PlannedTrial("search", "startup", params)
        return PlannedTrial("search", "model", None)
    if not is_wide_rung_measured(spec, records):
        return None
    corner = find_corner(choose_survivors(spec, records), records)
    if corner is not None:
        return PlannedTrial("search", "corner", corner)
    if any(record.is_open and record.is_training for record in records):
        return None
    begins = can_begin(spec, records)
    if planned := plan_merge_or_checkpoint(spec, records, at_end=not begins):
        return planned
    if begins:
        return PlannedTrial("search", "model", None)
    waits = choose_tested(spec, records) is not None
    return None if waits else _plan_replicate(spec, records)  # the front is known once all ended


def can_begin(spec: SweepSpec, records: Sequence[TrialRecord]) -> bool:
    """Return whether a divided budget may begin a configuration after the chosen ones have ended.

    So it is if the budget pays for one as long as the longest, since a shorter one hardly reaches
    the front, and if the last ones moved the hypervolume.
    """
    if count_completions_left(spec, records) < max(r.cost.completions for r in records):
        return False
    corners = sum(record.proposer == "corner" for record in records)
    further = count_started(records) - len(list_wide_rung_trials(spec, records)) - corners
    patience = spec.search.patience or DEFAULT_PATIENCE
    return further < patience or not has_stagnated(records, spec.list_objectives(), patience)


def count_completions_left(spec: SweepSpec, records: Sequence[TrialRecord]) -> float:
    """Count the completions in training that the budget leaves beside the replicates to come."""
    limit, settings = spec.search.budget.completions, spec.training
    begun = sum(record.role == "replicate" and record.is_training for record in records)
    missing = max(0, spec.search.replicates.max_trainings - begun)
    reserved = missing * settings.steps * settings.completions_per_step
    spent = sum(record.cost.completions for record in records)
    return limit - reserved - spent if limit else math.inf


def _plan_enqueued(spec: SweepSpec, records: Sequence[TrialRecord]) -> PlannedTrial | None:
    """Plan the first point of `enqueue:` that no enqueued trial has; None if all ran.

    A trial has a point if it agrees with it on the parameters that have an effect. So points may be
    added anywhere before a sweep resumes.
    """
    if not spec.enqueue:
        return None
    enqueued = [record.params for record in records if record.proposer == "enqueued"]
    active = [(params, spec.space.select_active(params)) for params in enqueued]
    for point in spec.enqueue:
        if not any(
            all(params[name] == value for name, value in point.items() if name in names)
            for params, names in active
        ):
            return PlannedTrial("search", "enqueued", _fill_point(spec, point, records))
    return None


def _fill_point(spec: SweepSpec, point: Params, records: Sequence[TrialRecord]) -> Params:
    """Complete a point to enqueue; a missing value is quasi-random."""
    enqueued = sum(record.proposer == "enqueued" for record in records)
    return spec.space.complete({**draw_point(spec, enqueued), **point})


def find_dead_start(spec: SweepSpec, records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Find the first training without a signal if more trainings would have none either.

    So it is if every training that ended has failed, and `DEAD_STARTS` of them, or all of a smaller
    sweep, had none. One is enough if the policy at which they began earned the same everywhere too.
    """
    ended = [record for record in records if record.is_training and record.state != "running"]
    dead = [record for record in ended if record.had_no_signal]
    if not dead or any(record.state != "failed" for record in ended):
        return None
    silent = any(r.role == spec.baselines[0] and find_equal_rewards(spec, r) for r in records)
    few = DEAD_STARTS if spec.search.is_divided else spec.search.trials + 1  # the published too
    enough = 1 if silent else min(DEAD_STARTS, few)
    return dead[0] if len(dead) >= enough else None


def find_equal_rewards(spec: SweepSpec, record: TrialRecord) -> Mapping[str, float]:
    """Return the held-out rewards if all completions earned the same of each; empty otherwise."""
    names = task_files.load_task_info(spec.task, spec.space.domains).rewards
    earned = {name: record.test[name] for name in names if name in record.test}
    equal = all(estimate.is_constant for estimate in earned.values())
    return {name: e.mean for name, e in earned.items()} if equal else {}


def find_ceiling(spec: SweepSpec, record: TrialRecord) -> Mapping[str, float]:
    """Return the held-out rewards if each has nearly the best value of its range; else nothing."""
    info, earned = task_files.load_task_info(spec.task, spec.space.domains), dict[str, float]()
    for name in info.rewards:
        metric, estimate = info.metrics[name], record.test.get(name)
        span = metric.high - metric.low
        if estimate is None or not math.isfinite(span):
            return {}
        missing = (
            metric.high - estimate.mean
            if metric.direction == "maximize"
            else (estimate.mean - metric.low)
        )
        if missing > CEILING * span:
            return {}
        earned[name] = estimate.mean
    return earned


def is_finished(
    spec: SweepSpec, records: Sequence[TrialRecord], hours: float = 0.0, added: Added = ()
) -> bool:
    """Return whether no trial is open and none is left to run; arguments as `find_next_trial`."""
    open_trials = any(record.is_open for record in records)
    return not open_trials and find_next_trial(spec, records, hours, added) is None


def is_over(spec: SweepSpec, records: Sequence[TrialRecord], hours: float = 0.0) -> bool:
    """Return whether nothing is left to run besides merges that people asked for."""
    waits = any(record.is_open and not is_asked_merge(record) for record in records)
    return not waits and find_next_trial(spec, records, hours) is None


def explain_end(spec: SweepSpec, records: Sequence[TrialRecord], hours: float = 0.0) -> str:
    """Explain why no trial is left to run; `hours` as for `find_next_trial`."""
    if reason := describe_spent_budget(spec, records, hours):
        return reason
    if find_dead_start(spec, records) is not None:
        return "no training had a signal"
    if spec.search.is_divided:
        why = [r.reason for r in records if r.is_training and r.ends_at is not None]
        return why[-1] if why else "no further training fits into the budget"
    if count_started(records) < spec.search.trials:
        return f"{spec.search.patience} trials in a row did not move the hypervolume"
    trials = spec.search.trials
    return f"all {trials} configurations were tried" if trials > 1 else "its one trial has ended"


def estimate_outlook(
    spec: SweepSpec, records: Sequence[TrialRecord], hours: float = 0.0, added: Added = ()
) -> Outlook:
    """Estimate what is still to come, at most; `hours` and `added` as for `find_next_trial`."""
    settings, search = spec.training, spec.search
    each = settings.completions_per_step
    validation, test = settings.validation_completions, settings.test_completions
    trained = [r for r in records if r.is_training]
    replicates = [r for r in trained if r.role == "replicate"]
    spent = sum(r.cost.completions for r in trained if r.role != "replicate")
    if not search.is_divided:
        ended = sum(r.role in ("search", "published") and not r.is_open for r in trained)
        under_way = sum(r.cost.completions for r in trained if r.is_open)
        count = max(0, search.trials + 1 - ended)
        training = max(0, count * settings.steps * each - under_way)
    elif not is_wide_rung_measured(spec, records) or any(r.is_open for r in trained):
        whole = spec.search_completions or FULL_TRAININGS * settings.steps * each
        training = max(0, whole - spent)
    else:
        training = 0
    longest = max((r.last_step or 0 for r in trained if not r.is_open), default=0)
    more = search.replicates.max_trainings - sum(not r.is_open for r in replicates)
    training += max(0, more) * (longest or settings.steps) * each
    rungs = (settings.steps / 2 if search.is_divided else settings.evaluate_every) * each
    evaluated = training / rungs * validation + training / (settings.steps * each) * test
    candidates = sum(bool(r.parts) and not r.request and not r.is_open for r in records)
    asked = sum(bool(effect.parts) for _, effect in added)
    waiting = count_merges_and_checkpoints(spec) - candidates + asked
    work = training + EVALUATED_WORK * (evaluated + max(0, waiting) * (validation + test / 2))
    limit = search.budget.hours
    left = max(0.0, limit - hours) if limit else None
    return Outlook(count_planned(spec, records, added), work, left)


def count_planned(spec: SweepSpec, records: Sequence[TrialRecord], added: Added = ()) -> int:
    """Return the most trials at the end; how many replicates and merges depends on the front."""
    search = max(spec.search.trials, count_started(records))
    if spec.search.is_divided:
        anew = len(list_long_weights(spec))
        if is_wide_rung_measured(spec, records):
            anew = len(choose_survivors(spec, records).begun)
        search = max(count_wide(spec, records) + anew, count_started(records))
    asked = sum(map(is_asked_merge, records)) + sum(bool(effect.parts) for _, effect in added)
    search += len(added) + sum(bool(record.request) for record in records) - asked
    trained = len(spec.baselines) + search + spec.search.replicates.max_trainings
    limit = spec.search.budget.trials
    most = min(trained, limit or trained) + count_merges_and_checkpoints(spec) + asked
    return max(len(records), most)


def build_published(spec: SweepSpec) -> Params:
    """Return the setting of the method's paper, completed from the space.

    For a task of one's own it weighs all rewards alike but those that the space fixes at 0.
    """
    published = task_files.load_task_info(spec.task, spec.space.domains).published
    if task_files.is_task_file(spec.task):
        published = {n: v for n, v in published.items() if spec.space.fixed_values.get(n) != 0}
    return spec.space.complete_baseline(published)


def derive_seed(spec: SweepSpec, number: int) -> int:
    """Derive the seed of a trial, or of the sampler of a proposal, from its number.

    It is the first 31 bits of SHA-256 of `<search.seed>:<number>`: a trial keeps its seed in every
    process, and a replicate has a new one.
    """
    digest = hashlib.sha256(f"{spec.search.seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class PlanCache:
    """Next trial of a running sweep, found again after each change: Ray constantly asks for it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._next: PlannedTrial | None = None
        self._is_valid = False

    def invalidate(self) -> None:
        """Note a start, a measurement or an end of a trial, or a request."""
        self._is_valid = False

    def get_next_trial(self, *, idle: bool) -> PlannedTrial | None:
        """Return the next trial; None if no trial can start now. `idle`: no trial is under way."""
        spec, has_next = self._ledger.spec, self._next is not None
        is_valid = self._is_valid and (has_next or not idle)
        passes = has_next and bool(spec.search.budget.hours)  # hours pass by themselves
        if not is_valid or (passes and self.is_budget_spent()):
            records = self._ledger.get_records()
            added = self._ledger.steering.list_waiting(records)
            hours = self._ledger.compute_hours(time.time())
            self._next, self._is_valid = find_next_trial(spec, records, hours, added), True
        return self._next

    def is_budget_spent(self) -> bool:
        """Return whether some part of `search.budget` is spent."""
        records, hours = self._ledger.get_records(), self._ledger.compute_hours(time.time())
        return bool(describe_spent_budget(self._ledger.spec, records, hours))


def plan_merge_or_checkpoint(
    spec: SweepSpec, records: Sequence[TrialRecord], *, at_end: bool = False
) -> PlannedTrial | None:
    """Choose the merge or checkpoint whose turn it is; None if there is none at present.

    They are spread over the sweep, so that the front is always about as good as that much training
    allows: once a share s of the trainings has ended, the share sqrt(s) of the budgets may be
    spent. Merges begin once the points that span the front have been trained: what lies between
    two neighbours adds little. `at_end`: no training will start any more.
    """
    if not spec.has_candidates:
        return None
    search, counts = spec.search, Counter(record.role for record in records)
    is_divided = search.is_divided
    if is_divided and any(record.is_open and record.is_training for record in records):
        return None  # what is merged now would be replaced by merges of longer trainings
    trained = sum(r.role == "search" and not r.is_open for r in records)
    share = 1.0 if at_end or is_divided else math.sqrt(min(1.0, trained / search.trials))
    if counts["checkpoint"] < int(share * search.checkpoints.budget):
        part = choose_checkpoint(records, spec.list_objectives(), spec.meets_constraints)
        if part is not None:
            params = next(r.params for r in records if r.number == part.trial)
            return PlannedTrial("checkpoint", "candidate", params, parts=(part,))
    is_spanned = share == 1 or trained >= min(len(list_corners(spec)), search.trials)
    if is_divided:
        allowed = spec.count_merges(sum(record.cost.completions for record in records))
    else:
        allowed = min(int(share * search.merges.budget), MERGES_PER_TRAINING * trained)
    if is_spanned and counts["merge"] < allowed:
        goals = tighten_references(spec)
        parts = choose_merge(records, goals, search.merges.most_parts, with_rungs=is_divided)
        if parts is not None:
            return PlannedTrial("merge", "candidate", {}, parts=parts)
    return None


def count_merges_and_checkpoints(spec: SweepSpec) -> int:
    """Return the most merges and checkpoints that a sweep evaluates, fresh seeds included."""
    search = spec.search
    most = spec.most_merges + search.checkpoints.budget if spec.has_candidates else 0
    return most + search.replicates.max_trainings * (most > 0)


def choose_tested(spec: SweepSpec, records: Sequence[TrialRecord]) -> int | None:
    """Return the waiting merge or checkpoint that adds most and deserves a test evaluation.

    Each that was chosen counts for the next choice: what lies between others adds little. Of merges
    at most `search.merges.budget` are chosen.
    """
    merges = sum(r.role == "merge" and r.ends_at is not None for r in records)
    roles = ("checkpoint", "merge") if merges < spec.search.merges.budget else ("checkpoint",)
    waiting = [r for r in records if r.state == "paused" and r.role in roles]
    judged = [(judge_candidate(r, r.rungs[-1], records, spec), r.number) for r in waiting]
    worthy = [(gain, -number) for (gain, reason), number in judged if not reason]
    return -max(worthy)[1] if worthy else None


def judge_candidate(
    record: TrialRecord, rung: Rung, records: Sequence[TrialRecord], spec: SweepSpec
) -> tuple[float, str]:
    """Return the validation hypervolume that a merge or checkpoint adds, and why it is not enough.

    Without a reason it gets a test evaluation. Test prompts cost more than validation prompts, on
    which it has to meet the constraints and add to what others cover that have or get one. Those
    that wait like it count only until it waits itself. Fresh seeds always get one.
    """
    if record.replicate_of is not None:
        return 0.0, ""
    values, violations = read_values(spec, rung)
    broken = [
        f"{name} {rung.validation[name].mean:.3g} is not {bound}"
        for (name, bound), over in zip(spec.constraints.items(), violations, strict=True)
        if over > 0
    ]
    if broken:
        return 0.0, f"breaks a constraint on validation prompts: {', '.join(broken)}"
    goals = spec.list_objectives()
    rivals = {
        other.name: tuple(other.validation[name].mean for name in spec.objectives)
        for other in records
        if other.state == "complete" and other.feasible and not other.is_initial
    }
    for other in records:
        is_tested = other.state == "running" and other.ends_at is not None
        waits = other.state == "paused" and record.state == "running"
        if other.parts and (is_tested or waits):
            rivals[other.name] = read_values(spec, other.rungs[-1])[0]
    better = [n for n, own in rivals.items() if list(rank_points([own, values], goals)) == [0, 1]]
    if better:
        return 0.0, f"dominated on validation prompts by {format_first(better, MAX_NAMED)}"
    before = compute_hypervolume([*rivals.values()], goals) if rivals else 0.0
    gain = compute_hypervolume([*rivals.values(), values], goals) - before
    if gain > LEAST_GAIN * before or not before:
        return gain, ""
    return gain, f"adds {gain / before:.2%} to the hypervolume on validation prompts"
