"""`search:`: sampler, scheduler, replicates and budget of a sweep."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import Field

from gdpo_tune.core import registry
from gdpo_tune.core.trial_config import MUTABLE_WHILE_TRAINING
from gdpo_tune.spec.problems import Problems, explain_unknown_name, show
from gdpo_tune.spec.sections import Section
from gdpo_tune.spec.space import Space

TOLERANCE = 1e-9
"""Slack in 1 / interval, so that an interval of 0.2 gives exactly five parts."""


if TYPE_CHECKING:
    PlainScheduler = Literal["fifo"]
else:  # also those that a line of the registry adds
    PlainScheduler = Literal[tuple(n for n in registry.SCHEDULERS if n not in ("asha", "pbt"))]


class FifoSettings(Section):
    """First in, first out: no trial is stopped early."""

    type: PlainScheduler = "fifo"
    """One of the schedulers below."""


class AshaSettings(Section):
    """Asynchronous successive halving by dominance: most trials end early."""

    type: Literal["asha"] = "asha"
    """One of the schedulers below."""
    reduction_factor: Annotated[float, Ge(1.01)] = 3.0
    """At each rung, one in this many trials continues, and every trial on the front of that rung.
    Rungs are at the budget divided by this number once, twice, and so on."""
    grace: Annotated[float, Ge(0), Lt(1)] = 0.3
    """Share of a trial's budget before its first comparison with other trials."""
    variant: Literal["stop", "promote"] = "stop"
    """Treatment of a trial that does not continue: `stop` ends it; `promote` lets it wait, without
    a process, until enough later trials rank behind it."""

    def list_rungs(self, steps: int) -> tuple[int, ...]:
        """Return the steps at which trials of so many steps are compared: before their end."""
        rungs: set[int] = set()
        level = steps / self.reduction_factor
        while math.ceil(level) >= self.grace * steps:
            rungs.add(math.ceil(level))
            if level <= 1:
                break
            level /= self.reduction_factor
        return tuple(sorted(rungs - {steps}))


class PbtSettings(Section):
    """Population-based training by dominance: weights and learning rate move while trials train."""

    type: Literal["pbt"] = "pbt"
    """One of the schedulers below."""
    interval: Annotated[float, Ge(0.001), Lt(1)] = 0.2
    """Share of a trial's steps between two meetings of all members. Each runs up to the meeting, in
    turns if slots are fewer than members, and continues once all have reached it."""
    quantile: Annotated[float, Gt(0), Le(0.5)] = 0.25
    """Share of the members, at least one, that take over a training at a meeting. Each of the last
    members takes over that of one of as many first members, drawn at random. Members are ordered
    by constraints, then dominance, then distance to others on their front."""
    factors: Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(1)] = (0.8, 1.25)
    """A member that takes over multiplies each value of the other member by one of these, and stays
    within the domain."""
    resample: Annotated[float, Ge(0), Le(1)] = 0.25
    """Probability that the member draws a new value from the domain instead."""

    def list_meetings(self, steps: int) -> tuple[int, ...]:
        """Return the steps at which members with so many steps meet."""
        count = math.ceil(1 / self.interval - TOLERANCE) - 1
        meetings = {round(turn * self.interval * steps) for turn in range(1, count + 1)}
        return tuple(sorted(meetings - {0, steps}))


SchedulerSettings = FifoSettings | AshaSettings | PbtSettings


class Replicates(Section):
    """Trainings of front configurations with fresh seeds, which confirm the front."""

    per_point: Annotated[int, Ge(0), Le(10**6)] = 2
    """Fresh seeds for each front configuration, besides the first run."""
    max_runs: Annotated[int, Ge(0), Le(10**6)] = 8
    """Most replicate trainings in all; 0 leaves every front point provisional."""

    @property
    def max_trainings(self) -> int:
        """Most replicate trainings, if the front is large."""
        return self.max_runs if self.per_point else 0


MERGES_PER_TRAINING = 5
"""Most merges for each training that has ended: a small sweep has few parents."""


class Merges(Section):
    """Weighted means of the weights of trained policies, which all begin as one policy.

    A merge costs an evaluation instead of a training. Off under `keep: none`.
    """

    budget: Annotated[int, Ge(0), Le(10**6)] = 40
    """Most merges that are evaluated, spread over the sweep as its trainings end, and at most five
    for each training; 0: none."""
    most_parts: Annotated[int, Ge(2), Le(16)] = 3
    """Most policies of one merge."""


class Checkpoints(Section):
    """Policies from before the end of a trial, at steps at which it was evaluated.

    Off under `keep: none`.
    """

    budget: Annotated[int, Ge(0), Le(10**6)] = 4
    """Most checkpoints that are evaluated on test prompts: those that no other policy dominates on
    validation prompts; 0: none, and only the ends of trials count."""


class Budget(Section):
    """Limits of a sweep. Once it reaches one, no trial starts; running trials end normally."""

    trials: Annotated[int, Ge(0), Le(10**9)] = 0
    """Trainings, baselines and replicates included; 0: no limit, as for all of these. Merges and
    checkpoints have budgets of their own."""
    completions: Annotated[int, Ge(0), Le(10**15)] = 0
    """Completions sampled in training, over all trials."""
    gpu_hours: Annotated[float, Ge(0)] = 0.0
    """Hours of training times the GPUs of a trial, over all trials."""
    hours: Annotated[float, Ge(0)] = 0.0
    """Hours in which the sweep worked: without interruptions, and without a stopped process, a
    sleeping machine or a clock that was set."""


class Search(Section):
    """Search of the space, and its limits. May change and extend a finished sweep."""

    trials: Annotated[int, Ge(1), Le(10**6)] = 16
    """Configurations to train, without baselines and replicates."""
    sampler: str = "auto"
    """One of the samplers below."""
    scheduler: Annotated[SchedulerSettings, Field(discriminator="type")] = AshaSettings()
    """Rule that stops trials before their end."""
    replicates: Replicates = Replicates()
    """Repeated training of the front, to confirm it."""
    merges: Merges = Merges()
    """Merges of trained policies."""
    checkpoints: Checkpoints = Checkpoints()
    """Checkpoints as candidates of the front."""
    budget: Budget = Budget()
    """Limits on the cost of the sweep."""
    patience: Annotated[int, Ge(0), Le(10**6)] = 0
    """Stop proposing once this many trials in a row did not move the validation hypervolume by
    more than 1 % and its noise; 0: never stop for that."""
    warm_start: tuple[str, ...] = ()
    """Directories of earlier sweeps over this task and these objectives, such as `runs/code`: the
    sampler learns from their trials, which are never on this sweep's front. Refused with `random`,
    `qmc` and a population, which do not learn."""
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 0
    """Seed of the sampler; the seeds of trials follow from it."""

    @property
    def most_merges(self) -> int:
        """Most merges of a sweep whose trainings have all ended."""
        return min(self.merges.budget, MERGES_PER_TRAINING * self.trials)


def check_search(search: Search, space: Space, steps: int, gpus: float, problems: Problems) -> None:
    """Refuse an unknown sampler, a budget that no trial spends, and schedules without effect."""
    if search.sampler not in registry.SAMPLERS:
        reason, fix = explain_unknown_name("sampler", search.sampler, registry.SAMPLERS)
        problems.refuse("search.sampler", reason, fix)
    if search.budget.gpu_hours and not gpus:
        fix = "write hours or completions instead, or give trials GPUs with resources.gpus"
        reason = "no trial has a GPU, so it is never spent"
        problems.refuse("search.budget.gpu_hours", reason, fix, "resources.gpus")
    if isinstance(search.scheduler, AshaSettings):
        _check_rungs(search.scheduler, steps, problems)
    elif isinstance(search.scheduler, PbtSettings):
        _check_population(search, search.scheduler, space, steps, problems)


def _check_rungs(scheduler: AshaSettings, steps: int, problems: Problems) -> None:
    factor, grace = scheduler.reduction_factor, scheduler.grace
    if scheduler.list_rungs(steps) or math.ceil(steps / factor) >= grace * steps:
        return
    key = "search.scheduler.grace"
    key = key if problems.has_key(key) else "search.scheduler.reduction_factor"
    reason = (
        f"the last rung lies at 1 / {show(factor)} of the budget, and {show(grace)} of it is "
        "grace, so no trial would be compared with another"
    )
    fix = f"write grace: {0.9 / factor:.2g}, or scheduler: {{type: fifo}}"
    problems.refuse(key, reason, fix, "training.steps", "search.scheduler")


def _check_population(
    search: Search, scheduler: PbtSettings, space: Space, steps: int, problems: Problems
) -> None:
    remedy = "remove the key, or write another scheduler"
    if search.trials < 2:
        reason = "a population of one has no other member to take over from"
        problems.refuse("search.trials", reason, "write 4 or more, or another scheduler")
    if search.sampler not in ("auto", "qmc"):
        reason = "the members of a population begin spread over the space: no sampler proposes them"
        problems.refuse("search.sampler", reason, remedy)
    if search.patience:
        reason = "every member of a population begins before any ends, so it would skip none"
        problems.refuse("search.patience", reason, remedy)
    if not any(name.startswith(MUTABLE_WHILE_TRAINING) for name in space.dimensions):
        reason = "nothing can move: neither the learning rate nor a reward weight is searched"
        fix = "search one, such as learning_rate: {log: [3.0e-5, 3.0e-4]}"
        problems.refuse("search.scheduler.type", reason, fix, "space", "task")
    if not scheduler.list_meetings(steps):
        reason = f"with {steps} steps, no meeting comes before the last step"
        fix = f"write {1 / max(2, min(5, steps)):g}"
        problems.refuse("search.scheduler.interval", reason, fix, "training.steps")
    if scheduler.resample == 0 and set(scheduler.factors) == {1}:
        reason = "no value would ever move: every factor is 1 and resample is 0"
        problems.refuse("search.scheduler.factors", reason, "write [0.8, 1.25]")
