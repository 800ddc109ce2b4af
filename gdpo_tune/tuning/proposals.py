"""Proposals of a sampler: what it sees of the ledger's trials, and the thread in which it computes.

A sampler must not read the ledger itself: pruned trials would be invisible to it, it would draw
conditional parameters uniformly, and replicates would look like new points. So each proposal comes
from an in-memory study with one entry for each configuration:

    complete        the mean over its seeds, on validation prompts
    stopped early   its last rung plus the median change from there to the end
    waiting         as stopped early, also after its promotion
    running         as stopped early from its first rung on, in sweeps of up to 300 trials;
                    else pending
    failed          pending for good
    not comparable  left out: what decides results has changed since then
    untrained       left out: its parameters had no effect
    out of space    left out (the published baseline may be)

The Gaussian process and TPE keep away from pending points. So they neither propose what runs, nor
return to a configuration that failed. The genetic algorithms read only finished trials, and a
sampler without a model none. No configuration is proposed twice while a new one is near. Every
entry has a value in every dimension; a parameter without effect has its domain's middle.

A proposal is computed in a thread, so that Ray's loop keeps running, when a slot is free. If
results arrive meanwhile, it is computed once more with them. So a slow sampler misses no result,
and quick trials cannot delay it twice. A few results beside many known ones do not count.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from optuna import Study
from optuna.samplers import BaseSampler, RandomSampler
from optuna.storages import InMemoryStorage
from optuna.trial import Trial, TrialState, create_trial

from gdpo_tune.core import registry
from gdpo_tune.core.content import Fact, describe_changes, list_changes
from gdpo_tune.core.errors import IdentityError
from gdpo_tune.core.files import expand_path
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.system import CloseableResource
from gdpo_tune.core.trials import Params, ParamValue, Proposer, Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.opening import create_study
from gdpo_tune.ledger.trial_encoding import compute_violation, convert_to_distribution
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.first_trials import draw_point, draw_startup_point
from gdpo_tune.spec.gpu import choose_sampler, count_affordable_trials
from gdpo_tune.spec.model import list_decisive_values
from gdpo_tune.spec.space import Choices, Uniform
from gdpo_tune.tuning.plan import derive_seed
from gdpo_tune.tuning.samplers import SamplerFactory

BUSY_WAIT_SECONDS = 0.02
"""Time that the loop waits for a proposal; enough for a quick sampler."""
IDLE_WAIT_SECONDS = 0.5
"""Time that the loop waits when no trial runs."""
NEGLIGIBLE_SHARE = 0.01
"""Share of the known records up to which results that arrive meanwhile do not count."""

MAX_WATCHED = 300
"""Most trials of a sweep whose running trials are used: each use may rebuild the study."""
MAX_TRIES = 64
"""Number of points tried in place of a configuration that was proposed before."""
ONE_BY_ONE = 8
"""Number of trials up to which each one counts at once; then a quarter more at a time."""
Point = tuple[ParamValue, ...]
"""Configuration as one value for each dimension."""
SeedValues = Sequence[Mapping[str, float]]
"""Metric -> value, one mapping for each seed; empty while no value is known."""


class Proposals(CloseableResource):
    """Proposals of a `SamplerView`, computed in one thread; one other thread calls the methods."""

    def __init__(self, view: SamplerView) -> None:
        self._view = view
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="proposals")
        self._future: Future[Suggestion] | None = None
        self._repeated = False  # True if the computation was repeated because results arrived
        self._missed: list[tuple[TrialRecord, Mapping[str, Any]]] = []
        """Records and sampler states that arrived during the computation."""

    def observe(self, record: TrialRecord, sampler_state: Mapping[str, Any] | None = None) -> None:
        """Take in a record that is new or has changed, now or after the computation."""
        if self._future is None:
            self._view.observe(record, sampler_state)
        else:
            self._missed.append((record, sampler_state or {}))

    def poll(self, *, idle: bool) -> Suggestion | None:
        """Return a proposal, or None if it is not ready. `observe` its record before the next call.

        An error of the sampler is raised. `idle` says that no trial runs: wait longer.
        """
        if self._future is None:
            self._future = self._thread.submit(self._view.propose)
        wait([self._future], IDLE_WAIT_SECONDS if idle else BUSY_WAIT_SECONDS)
        if not self._future.done():
            return None
        suggestion, self._future = self._future.result(), None
        limit = NEGLIGIBLE_SHARE * self._view.record_count
        is_current = self._repeated or len(self._missed) <= limit
        if not is_current:
            self._view.withdraw(suggestion)
        for record, sampler_state in self._missed:
            self._view.observe(record, sampler_state)
        self._missed.clear()
        self._repeated = not is_current
        return suggestion if is_current else self.poll(idle=idle)

    def close(self, *, wait: bool = True) -> None:
        """End the thread; `wait` for a computation that still runs, or let it end by itself."""
        self._thread.shutdown(wait, cancel_futures=True)


@dataclass(frozen=True)
class Suggestion:
    """Proposal of a configuration, with complete parameters."""

    params: Params
    proposer: Proposer
    sampler_state: Mapping[str, Any]
    """State for the ledger, from which a new process rebuilds the same view."""


class SamplerView:
    """Trials as the sampler sees them; pass every new or changed record to `observe`."""

    def __init__(self, spec: SweepSpec, slots: int | None = None) -> None:
        """Create an empty view; `slots`: trials side by side, for `auto`, if known."""
        self.spec = spec
        self.sampler = choose_sampler(spec, slots)
        target = registry.SAMPLERS[self.sampler.value].target
        self._factory: SamplerFactory = registry.load(target)(spec)
        # Without a model, nothing would leave the corners again.
        self._draw = draw_startup_point if self._factory.has_model else draw_point
        self._domains = spec.space.searched_domains
        self._records: dict[Point, dict[int, TrialRecord]] = {}
        """Records of this sweep, by point and number."""
        self._states: dict[Point, Mapping[str, Any]] = {}
        self._earlier: dict[Point, list[TrialRecord]] = {}  # trials of earlier sweeps, by point
        self._has_estimates = False  # True if any trial has estimated values
        self._under_way = count_affordable_trials(spec) <= MAX_WATCHED
        self._startup_count = 0
        self._extrapolation = CurveExtrapolation(spec)
        self.record_count = 0  # of those that a sampler may learn from
        self._study = SamplerStudy(spec, self._domains)
        self._outdated = False  # True if the study must be rebuilt before the next proposal

    @property
    def study(self) -> Study:
        """Study as the sampler sees it."""
        if self._outdated:
            self._study = SamplerStudy(self.spec, self._domains)
            self._outdated = False
            for point in dict.fromkeys((*self._earlier, *self._records)):
                self._update_study(point)
        return self._study.study

    def observe(self, record: TrialRecord, sampler_state: Mapping[str, Any] | None = None) -> None:
        """Take in a record that is new or has changed.

        If the mean of a finished configuration or the estimates of stopped trials change, the
        study is rebuilt before the next proposal.
        """
        point, estimates_changed = self._add(record, sampler_state or {})
        self._outdated |= estimates_changed
        if point is None or self._outdated:
            return
        if point not in self._study.finished:
            self._update_study(point)
        elif self._study.finished[point] != self._study.compute_mean(self._list_seed_values(point)):
            self._outdated = True

    def load_earlier(self, records: Iterable[TrialRecord]) -> None:
        """Take in complete trials of earlier sweeps, before anything else.

        Each counts until this sweep tries its configuration, which may be proposed again.
        """
        for record in records:
            point = self._find_point(record.params)
            if point is not None:
                self._earlier.setdefault(point, []).append(record)
        self._outdated = True

    def load(self, records: Iterable[tuple[TrialRecord, Mapping[str, Any]]]) -> None:
        """Take in the records of a ledger, each with its sampler state."""
        for record, sampler_state in records:
            self._add(record, sampler_state)
        self._outdated = True

    def propose(self) -> Suggestion:
        """Propose a configuration. `observe` its record or `withdraw` it before the next proposal.

        A new process with the same records proposes the same, but for the children of a generation.
        """
        study = self.study
        startup = len(self._study.finished) < self._factory.startup
        if not self._domains:
            return Suggestion(self.spec.space.complete({}), "startup", {})
        if startup and self._factory.quasi_random:
            repeated = self._build_suggestion(self._draw(self.spec, self._startup_count), "startup")
            return self._propose_unseen() or repeated
        if not self._factory.has_model:
            drawn = self._build_suggestion(self._study.draw(self._build_sampler()), "startup")
            repeated = self._find_point(drawn.params) in self._records
            return self._replace_repeated(drawn) if repeated else drawn
        study.sampler = self._build_sampler()
        trial = study.ask(self._study.distributions)
        suggestion = self._build_suggestion(trial.params, "startup" if startup else "model", trial)
        point = self._find_point(suggestion.params)
        assert point is not None  # a sampler stays inside of its distributions
        if point in self._records:
            # a converged sampler repeats itself; the plan decides about replicates
            self._study.fail(trial.number)
            return self._replace_repeated(suggestion)
        literal = point == tuple(trial.params[name] for name in self._domains)
        if literal and point not in self._study.numbers:
            self._study.numbers[point] = trial.number
        else:
            self._study.fail(trial.number)  # `observe` adds the true point
        return suggestion

    def withdraw(self, suggestion: Suggestion) -> None:
        """Forget a proposal that no trial will have."""
        point, study = self._find_point(suggestion.params), self._study
        is_pending = point in study.numbers and point not in study.finished
        if point is not None and is_pending and point not in self._records:
            study.fail(study.numbers.pop(point))

    def _add(
        self, record: TrialRecord, sampler_state: Mapping[str, Any]
    ) -> tuple[Point | None, bool]:
        """Add a record under its point, and return it; None if the sampler cannot learn from it.

        Return also whether estimates, or bounds that refer to a baseline, have changed.
        """
        before, self.spec = self.spec, self.spec.resolve_constraints([record])
        has_moved = self.spec.constraints != before.constraints
        if not record.is_training or not record.is_comparable:
            return None, has_moved
        point = self._find_point(record.params)
        if point is None:
            return None, has_moved
        records = self._records.setdefault(point, {})
        is_new = record.number not in records
        self._startup_count += is_new and record.proposer == "startup"
        self.record_count += is_new
        records[record.number] = record
        self._states.setdefault(point, sampler_state)
        if find_last_rung(record, under_way=self._under_way) is not None:
            self._has_estimates = True
        learned = record.state == "complete" and self._extrapolation.add(record)
        return point, has_moved or (learned and self._has_estimates)

    def _build_sampler(self) -> BaseSampler:
        # a new one for each proposal: a restart would lose its memory
        return self._factory.build(derive_seed(self.spec, self.record_count))

    def _update_study(self, point: Point) -> None:
        if self._factory.has_model:
            attrs = {**self._factory.attrs, **self._states.get(point, {})}
            self._study.update(point, self._list_seed_values(point), attrs)

    def _list_seed_values(self, point: Point) -> list[dict[str, float]]:
        """Return the values of each complete seed of a point.

        Without one, estimate each seed that has a rung; without those, use earlier sweeps.
        """
        records = self._records.get(point, {}).values()
        complete = [record for record in records if record.state == "complete"]
        rungs = [find_last_rung(record, under_way=self._under_way) for record in records]
        if any(rungs) and not complete:
            return [self._extrapolation.estimate_final(rung) for rung in rungs if rung is not None]
        measured = complete or self._earlier.get(point, [])
        return [{name: e.mean for name, e in record.validation.items()} for record in measured]

    def _find_point(self, params: Params) -> Point | None:
        """Return the point of a configuration, or None if it is outside of the space."""
        params = self.spec.space.align(params)
        active = self.spec.space.select_active(params)
        if not all(domain.contains(params[name]) for name, domain in active.items()):
            return None
        return tuple(
            params[name] if name in active else domain.find_middle()
            for name, domain in self._domains.items()
        )

    def _build_suggestion(
        self, values: Params, proposer: Proposer, trial: Trial | None = None
    ) -> Suggestion:
        state: dict[str, Any] = {}
        if trial is not None:
            attrs = self._study.study.get_trials(deepcopy=False)[trial.number].system_attrs
            # without the pieces of a copy of the proposal
            state = {key: value for key, value in attrs.items() if ":relative_params" not in key}
        return Suggestion(self.spec.space.complete(values), proposer, state)

    def _replace_repeated(self, repeated: Suggestion) -> Suggestion:
        """Return a new point near a repeated one: one parameter is from a quasi-random point.

        If none is new, return a new quasi-random point, or else the repeated one.
        """
        names = tuple(self._domains)
        for index in range(self.record_count, self.record_count + MAX_TRIES):
            name = names[index % len(names)]
            fresh = draw_point(self.spec, index)
            near = self._build_suggestion({**repeated.params, name: fresh[name]}, repeated.proposer)
            point = self._find_point(near.params)  # None: an active one lacks a value
            if point is not None and point not in self._records:
                return near
        return self._propose_unseen() or repeated

    def _propose_unseen(self) -> Suggestion | None:
        """Propose the next new point of the quasi-random sequence; None if none is near."""
        for index in range(self._startup_count, self._startup_count + MAX_TRIES):
            suggestion = self._build_suggestion(self._draw(self.spec, index), "startup")
            if self._find_point(suggestion.params) not in self._records:
                return suggestion
        return None


class SamplerStudy:
    """In-memory study that a sampler reads, with one trial for each configuration.

    If the values of a finished configuration change, a new study is needed.
    """

    def __init__(self, spec: SweepSpec, domains: Mapping[str, Choices | Uniform]) -> None:
        """Create an empty study; `domains` are the dimensions of a point, in their order."""
        self.distributions = {n: convert_to_distribution(d) for n, d in domains.items()}
        self._spec = spec
        self._storage = InMemoryStorage()
        # a placeholder: each proposal has a sampler of its own
        self.study = create_study(self._storage, "projection", spec, RandomSampler())
        self._study_id = self._storage.get_study_id_from_name("projection")
        self.numbers: dict[Point, int] = {}
        """Point, pending or finished -> number of its trial in the study."""
        self.finished: dict[Point, tuple[float, ...]] = {}
        """Finished configuration -> values of its objectives."""

    def compute_mean(self, seed_values: SeedValues) -> tuple[float, ...]:
        """Return the mean over seeds of each objective; empty without a seed."""
        if not seed_values:
            return ()
        return tuple(
            fmean(values[name] for values in seed_values) for name in self._spec.objectives
        )

    def update(self, point: Point, seed_values: SeedValues, attrs: Mapping[str, Any]) -> None:
        """Add a point that is absent, or finish one that is pending.

        Without `seed_values` it is pending. `attrs` are of the sampler, for a point that is absent.
        """
        mean = self.compute_mean(seed_values)
        violations = {
            name: compute_violation(bound, fmean(values[name] for values in seed_values))
            for name, bound in self._spec.constraints.items()
            if seed_values
        }
        if point not in self.numbers:
            self.numbers[point] = len(self.study.get_trials(deepcopy=False))
            self.study.add_trial(
                create_trial(
                    state=TrialState.COMPLETE if seed_values else TrialState.RUNNING,
                    values=mean or None,
                    params=dict(zip(self.distributions, point, strict=True)),
                    distributions=self.distributions,
                    system_attrs=dict(attrs),
                    constraints=violations,
                )
            )
        elif seed_values:
            number = self.numbers[point]
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
            for name, value in violations.items():
                Trial(self.study, trial_id).set_constraint(name, value)
            # not by `tell`, which copies the whole trial
            self._storage.set_trial_state_values(trial_id, TrialState.COMPLETE, mean)
        if seed_values:
            self.finished[point] = mean

    def draw(self, sampler: BaseSampler) -> dict[str, ParamValue]:
        """Draw a value for each dimension from a sampler without a model."""
        trial = create_trial(state=TrialState.RUNNING)
        return {
            name: sampler.sample_independent(self.study, trial, name, distribution)
            for name, distribution in self.distributions.items()
        }

    def fail(self, number: int) -> None:
        """Close a trial of the study that stands for no point."""
        self.study.tell(number, state=TrialState.FAIL)


class CurveExtrapolation:
    """Estimates of a trial's final values: those of its last rung, and the median change since.

    A sampler that does not see stopped trials proposes them again, and values at a rung are not
    comparable with final ones. The median is over the first complete trials, by the time of their
    end. Their number grows in steps: every change of it moves all estimates.
    """

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._complete: dict[int, TrialRecord] = {}
        self._changes: dict[int, dict[str, float]] = {}
        """Completions -> metric -> median change, as far as computed."""
        self._used = 0

    def add(self, record: TrialRecord) -> bool:
        """Take in a complete trial; return whether estimates now use more trials than before."""
        self._complete[record.number] = record
        before, self._used = self._used, count_used(len(self._complete))
        if self._used > before:
            self._changes.clear()
        return self._used > before

    def estimate_final(self, rung: Rung) -> dict[str, float]:
        """Estimate the final value of every objective and constraint metric.

        If no complete trial has such a rung, the values at the rung stay as they are.
        """
        if rung.completions not in self._changes:
            by_end = sorted(
                self._complete.values(),
                key=lambda r: (math.inf if r.finished is None else r.finished, r.number),
            )
            pairs = [
                (record.validation, earlier.validation)
                for record in by_end[: self._used]
                for earlier in record.rungs
                if earlier.completions == rung.completions
            ]
            self._changes[rung.completions] = {
                name: median([end[name].mean - then[name].mean for end, then in pairs] or [0.0])
                for name in self._spec.required_metrics
            }
        changes = self._changes[rung.completions]
        return {name: rung.validation[name].mean + change for name, change in changes.items()}


def count_used(count: int) -> int:
    """Return how many of `count` complete trials the estimate uses."""
    used = min(count, ONE_BY_ONE)
    while used >= ONE_BY_ONE and used + used // 4 <= count:
        used += used // 4
    return used


def find_last_rung(record: TrialRecord, *, under_way: bool) -> Rung | None:
    """Return the newest rung of a stopped, waiting or running trial; None if it has none.

    A running trial that has never waited counts only if `under_way`.
    """
    counts = record.state in ("pruned", "paused")
    if record.state == "running":
        counts = under_way or record.paused_at > 0
    return record.rungs[-1] if counts and record.rungs else None


def load_earlier_trials(spec: SweepSpec) -> list[TrialRecord]:
    """Load the usable trials of the sweeps of `search.warm_start`, by directory and number.

    A usable trial trained a policy, is complete and has every judged metric. Trials before an
    accepted change of content are left out. An earlier sweep may still run.

    Raises:
        SpecError: the file of an earlier sweep is not valid any more.
        UsageError, IdentityError: a directory holds no ledger, or one of another sweep.
    """
    trials: list[TrialRecord] = []
    for directory in map(expand_path, spec.search.warm_start):
        with _open_earlier(directory) as ledger:
            records = ledger.get_records()
        for record in records:
            trained = record.state == "complete" and record.is_training and record.is_comparable
            if trained and record.validation.keys() >= set(spec.required_metrics):
                trials.append(record)
    return trials


def refuse_other_content(spec: SweepSpec, content: Mapping[str, Fact]) -> None:
    """Refuse to learn from a sweep that measured by other content, such as an edited reward.

    What this sweep names differently, such as its policy, it changes on purpose, and versions
    decide numbers and not their meaning.

    Raises:
        IdentityError: a file of an earlier sweep's task, data or policy has changed since then.
        SpecError, UsageError: as `load_earlier_trials`.
    """
    for directory in map(expand_path, spec.search.warm_start):
        with _open_earlier(directory) as ledger:
            earlier, newest = ledger.spec, ledger.get_contents()[-1:]
        ours, theirs = list_decisive_values(spec), list_decisive_values(earlier)
        differ = {k.partition(".")[0] for k in ours | theirs if ours.get(k) != theirs.get(k)}
        others = ["version", "hub", *differ & {"data", "policy", "task"}]
        others += ["file"] if "task" in differ else []
        for recorded in newest:
            if changes := list_changes(recorded["digests"], content, without=others):
                raise IdentityError(
                    f"search.warm_start: {describe_changes(changes, directory, recorded['time'])}\n"
                    "    fix: restore it, or take that sweep out of search.warm_start"
                )


@contextmanager
def _open_earlier(directory: Path) -> Generator[Ledger]:
    earlier = load_spec(directory / SPEC, to_run=False)
    # the directory may have moved since the sweep ran
    location = {"storage": str(directory.absolute().parent), "name": directory.absolute().name}
    with Ledger.open(earlier.model_copy(update=location), read_only=True) as ledger:
        yield ledger
