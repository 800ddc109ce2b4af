"""Projection of the ledger's trials to a study of finished, comparable configurations.

A sampler must not read the ledger itself: pruned trials would be invisible to it, it would draw
conditional parameters uniformly, and replicates would look like new points. So each proposal comes
from an in-memory study with one entry for each configuration:

    complete        the mean over its seeds, on validation prompts
    stopped early   its last rung plus the median change from there to the end, see `drift`
    waiting         as stopped early, also after its promotion
    running         as stopped early from its first rung on, in sweeps of up to 300 trials;
                    else pending
    failed          pending for good
    not comparable  left out: what decides results has changed since then
    untrained       left out: its parameters had no effect
    population      left out, replicates too: the parameters of a member moved while it trained
    out of space    left out (the published baseline may be)

The Gaussian process and TPE keep away from pending points. So they neither propose what runs, nor
return to a configuration that failed. The genetic algorithms and the random sampler read only
finished trials. For all of them, a configuration is not proposed twice while a new one is near. A
sampler without a model sees no trial.

Every entry has a value in every dimension; a parameter without effect has its domain's middle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from optuna import Study
from optuna.samplers import BaseSampler
from optuna.trial import Trial

from gdpo_tune.core import registry
from gdpo_tune.core.trials import Params, ParamValue, Proposer, TrialRecord
from gdpo_tune.spec import SweepSpec, choose_sampler, count_affordable_trials
from gdpo_tune.tuning.search import quasi_random
from gdpo_tune.tuning.search.drift import Drift, find_last_rung
from gdpo_tune.tuning.search.plan import derive_seed
from gdpo_tune.tuning.search.sampler_study import Point, SamplerStudy
from gdpo_tune.tuning.search.samplers import SamplerFactory
from gdpo_tune.tuning.search.startup import draw_startup_point

MAX_WATCHED = 300
"""Most trials of a sweep whose running trials are used: each use may rebuild the study."""
MAX_TRIES = 64
"""Number of points tried in place of a configuration that was proposed before."""


@dataclass(frozen=True)
class Suggestion:
    """Proposal of the projection."""

    params: dict[str, ParamValue]
    """Complete parameters."""
    proposer: Proposer
    sampler_state: Mapping[str, Any]
    """State for the ledger, from which a new process rebuilds the same projection."""


class Projection:
    """Study behind the proposals. Pass every new or changed record to `observe`."""

    def __init__(self, spec: SweepSpec, slots: int | None = None) -> None:
        """Create an empty projection; `slots`: trials side by side, for `auto`, if known."""
        self.spec = spec
        self.sampler = choose_sampler(spec, slots)
        target = registry.SAMPLERS[self.sampler.name].target
        self._factory: SamplerFactory = registry.load(target)(spec)
        # Without a model, nothing would leave the corners again.
        has_model = self._factory.has_model
        self._draw = draw_startup_point if has_model else quasi_random.draw_point
        self._domains = spec.space.searched_domains
        self._records: dict[Point, dict[int, TrialRecord]] = {}
        """Records of this sweep, by point and number."""
        self._states: dict[Point, Mapping[str, Any]] = {}
        self._earlier: dict[Point, list[TrialRecord]] = {}
        """Trials of earlier sweeps, by point."""
        self._population: set[int] = set()
        """Numbers of the members of a population."""
        self._has_estimates = False
        """True if any trial has estimated values."""
        self._under_way = count_affordable_trials(spec) <= MAX_WATCHED
        self._startup_count = 0
        self._drift = Drift(spec)
        self.known = 0
        """Number of records that a sampler may learn from."""
        self._study = SamplerStudy(spec, self._domains)
        self._outdated = False
        """True if the study must be rebuilt before the next proposal."""

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

        The whole study is rebuilt before the next proposal if the mean of a finished configuration
        or the estimates of stopped trials change. Every other record is one small step.
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

        Each counts as a finished configuration, until this sweep tries it: then only its own seeds
        count. They may be proposed again, since none is on this sweep's front.
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

        A proposal depends only on the observed records: a new process with the same records
        proposes the same. Only genetic algorithms then produce other children of a generation.
        """
        study = self.study
        startup = len(self._study.finished) < self._factory.startup
        if not self._domains:
            return Suggestion(self.spec.space.complete({}), "startup", {})
        if startup and self._factory.quasi_random:
            return self._propose_unseen() or self._propose_point(self._startup_count)
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
        if literal and point not in self._study:
            self._study.adopt(point, trial.number)
        else:
            self._study.fail(trial.number)  # `observe` adds the true point
        return suggestion

    def withdraw(self, suggestion: Suggestion) -> None:
        """Forget a proposal that no trial will have."""
        point = self._find_point(suggestion.params)
        if point is not None and point not in self._records:
            self._study.withdraw(point)

    def _add(
        self, record: TrialRecord, sampler_state: Mapping[str, Any]
    ) -> tuple[Point | None, bool]:
        """Add a record under its point.

        Returns:
            The point, or None if the sampler cannot learn from the record; and whether estimates,
            or bounds that refer to a baseline, have changed.
        """
        before, self.spec = self.spec, self.spec.resolve_constraints([record])
        has_moved = self.spec.constraints != before.constraints
        if not record.is_training or not record.is_comparable:
            return None, has_moved
        point = self._find_point(record.params)
        if record.role == "member":
            self._population.add(record.number)
        moved = record.number in self._population or record.replicate_of in self._population
        if moved or point is None:
            return None, has_moved
        records = self._records.setdefault(point, {})
        is_new = record.number not in records
        self._startup_count += is_new and record.proposer == "startup"
        self.known += is_new
        records[record.number] = record
        self._states.setdefault(point, sampler_state)
        if find_last_rung(record, under_way=self._under_way) is not None:
            self._has_estimates = True
        learned = record.state == "complete" and self._drift.add(record)
        return point, has_moved or (learned and self._has_estimates)

    def _build_sampler(self) -> BaseSampler:
        """Build the sampler of the next proposal, with its own seed and without a memory.

        So the proposal is the same after a restart.
        """
        return self._factory.build(derive_seed(self.spec, self.known))

    def _update_study(self, point: Point) -> None:
        if self._factory.has_model:
            attrs = {**self._factory.attrs, **self._states.get(point, {})}
            self._study.update(point, self._list_seed_values(point), attrs)

    def _list_seed_values(self, point: Point) -> list[dict[str, float]]:
        """Return metric -> value for each complete seed of a point.

        Without a complete seed, estimate each seed that has a rung. Without those, use the trials
        of earlier sweeps.
        """
        records = self._records.get(point, {}).values()
        complete = [record for record in records if record.state == "complete"]
        rungs = [find_last_rung(record, under_way=self._under_way) for record in records]
        if any(rungs) and not complete:
            return [self._drift.estimate_final(rung) for rung in rungs if rung is not None]
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

        If none is new, return a quasi-random point; if none of those is new, the repeated one.
        """
        names = tuple(self._domains)
        for index in range(self.known, self.known + MAX_TRIES):
            name = names[index % len(names)]
            fresh = quasi_random.draw_point(self.spec, index)
            near = self._build_suggestion({**repeated.params, name: fresh[name]}, repeated.proposer)
            point = self._find_point(near.params)  # None: an active one lacks a value
            if point is not None and point not in self._records:
                return near
        return self._propose_unseen() or repeated

    def _propose_unseen(self) -> Suggestion | None:
        """Propose the next new point of the quasi-random sequence; None if none is near."""
        for index in range(self._startup_count, self._startup_count + MAX_TRIES):
            suggestion = self._propose_point(index)
            if self._find_point(suggestion.params) not in self._records:
                return suggestion
        return None

    def _propose_point(self, index: int) -> Suggestion:
        return self._build_suggestion(self._draw(self.spec, index), "startup")
