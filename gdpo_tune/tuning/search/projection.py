"""What a sampler sees: the ledger's trials as a study of finished, comparable configurations.

A sampler must not read the ledger itself (pruned trials are invisible to it, conditional parameters
it draws uniformly, replicates look like new points). So each proposal is asked of an in-memory
study with one entry a configuration:

    complete        the mean over its seeds, on validation prompts
    stopped early   its last rung plus the median change from there to the end, see `drift`
    waiting         the same, also once it goes on
    running         the same from its first rung on, in sweeps of up to 300 trials; else pending
    failed          pending for good
    untrained       left out: its parameters had no effect
    population      left out, replicates too: the parameters of a member moved while it trained
    out of space    left out (the published baseline may be)

From pending points the Gaussian process and TPE keep away, so they neither propose what runs nor
return to where a first try gave no value. The genetic algorithms and the random sampler look at
finished trials alone: what protects them is that no configuration is proposed twice, by anyone,
while one is near that is new. A sampler without a model is told nothing.

Every entry has a value in every dimension; a parameter without effect sits at its domain's middle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from optuna import Study
from optuna.samplers import BaseSampler
from optuna.trial import Trial

from gdpo_tune.core import registry
from gdpo_tune.core.trials import Params, ParamValue, Proposer, Rung, TrialRecord
from gdpo_tune.spec import SweepSpec, choose_sampler, most_trials
from gdpo_tune.tuning.search import quasi_random
from gdpo_tune.tuning.search.drift import Drift, find_last_rung
from gdpo_tune.tuning.search.sampler_study import Point, SamplerStudy
from gdpo_tune.tuning.search.samplers import SamplerFactory

MAX_WATCHED = 300
"""Trials up to which those under way are worth looking at: each look costs a new study."""
MAX_TRIES = 64
"""Quasi-random points tried in place of a configuration that was proposed before."""


@dataclass(frozen=True)
class Suggestion:
    """What the projection proposes."""

    params: dict[str, ParamValue]
    """Complete."""
    proposer: Proposer
    sampler_state: Mapping[str, Any]
    """For the ledger, so that a new process rebuilds the same projection."""


class Projection:
    """The study behind the proposals. Feed it every new or changed record with `observe`."""

    def __init__(self, spec: SweepSpec, slots: int | None = None) -> None:
        """
        Args:
            spec: the sweep.
            slots: trials at the same time, for `auto`; None where that is not known.
        """
        self.spec = spec
        self.sampler = choose_sampler(spec, slots)
        sampler = registry.SAMPLERS[self.sampler.name]
        self._sampling: SamplerFactory = registry.load(sampler.target)(spec)
        self._domains = spec.space.searched
        self._members: dict[Point, dict[int, TrialRecord]] = {}
        self._states: dict[Point, Mapping[str, Any]] = {}
        self._earlier: dict[Point, list[TrialRecord]] = {}
        """Trials of earlier sweeps, by configuration."""
        self._moving: set[int] = set()
        """Numbers of the members of a population."""
        self._guessed = False
        """Whether any trial stands at what it would come to."""
        self._under_way = most_trials(spec) <= MAX_WATCHED
        self._quasi_random_asked = 0
        self._drift = Drift(spec)
        self.known = 0
        """Records that a sampler may learn from."""
        self._entries = SamplerStudy(spec, self._domains)
        self._outdated = False
        """Whether the study has to be built anew before the next proposal."""

    @property
    def study(self) -> Study:
        """The study as the sampler sees it."""
        if self._outdated:
            self._rebuild()
        return self._entries.study

    def observe(self, record: TrialRecord, sampler_state: Mapping[str, Any] | None = None) -> None:
        """Take in a record that is new or has changed.

        A configuration that was complete and changes its mean costs the next proposal a rebuild of
        the whole study, and so does a complete trial that changes what stopped ones are worth;
        everything else is one small step.
        """
        point, moved = self._place(record, sampler_state or {})
        self._outdated |= moved
        if point is None or self._outdated:
            return
        told = self._entries.get_values(point)
        if not told:
            self._enter(point)
        elif told != self._entries.compute_mean(self._worth(point)):
            self._outdated = True

    def load_earlier(self, records: Iterable[TrialRecord]) -> None:
        """Take in complete trials of earlier sweeps, before anything else.

        They are as finished configurations of this one, until it tries one itself: then its own
        seeds alone count. They may be proposed again, since none is on this sweep's front.
        """
        for record in records:
            point = self._point(record.params)
            if point is not None:
                self._earlier.setdefault(point, []).append(record)
        self._outdated = True

    def load(self, records: Iterable[tuple[TrialRecord, Mapping[str, Any]]]) -> None:
        """Take in what a ledger holds, each record with its sampler state."""
        for record, sampler_state in records:
            self._place(record, sampler_state)
        self._outdated = True

    def propose(self) -> Suggestion:
        """Propose a configuration. `observe` its record, or `withdraw` it, before the next `propose`.

        What is proposed follows from what was observed, whenever it is asked: a new process with
        the same records proposes the same. Genetic algorithms alone go on with other children of
        the same generation there.
        """
        study = self.study
        startup = self._entries.completed < self._sampling.startup
        if not self._domains:
            return Suggestion(self.spec.space.complete({}), "startup", {})
        if startup and self._sampling.quasi_random:
            unseen = self._unseen()
            return self._quasi_random(self._quasi_random_asked if unseen is None else unseen)
        if not self._sampling.has_model:
            drawn = self._suggestion(self._entries.draw(self._new_sampler()), "startup")
            known = self._point(drawn.params) in self._members
            return self._unlike(drawn) if known else drawn
        study.sampler = self._new_sampler()
        trial = study.ask(self._entries.distributions)
        suggestion = self._suggestion(trial.params, "startup" if startup else "model", trial)
        point = self._point(suggestion.params)
        assert point is not None  # a sampler stays inside of its distributions
        if point in self._members:
            # a sampler without a finer idea repeats itself; replicates are decided elsewhere
            self._entries.fail(trial.number)
            return self._unlike(suggestion)
        literal = point == tuple(trial.params[name] for name in self._domains)
        if literal and point not in self._entries:
            self._entries.adopt(point, trial.number)
        else:
            self._entries.fail(trial.number)  # `observe` adds the true point
        return suggestion

    def withdraw(self, suggestion: Suggestion) -> None:
        """Forget a proposal that no trial will have."""
        point = self._point(suggestion.params)
        if point is not None and point not in self._members:
            self._entries.withdraw(point)

    def _place(
        self, record: TrialRecord, sampler_state: Mapping[str, Any]
    ) -> tuple[Point | None, bool]:
        """File a record under its point.

        Returns:
            The point, or None if a sampler has nothing to learn from the record; and whether
            guesses have changed.
        """
        point = self._point(record.params)
        if record.role == "member":
            self._moving.add(record.number)
        moving = record.number in self._moving or record.replicate_of in self._moving
        if moving or record.role == "untrained" or point is None:
            return None, False
        members = self._members.setdefault(point, {})
        if record.number not in members and record.proposer == "startup":
            self._quasi_random_asked += 1
        self.known += record.number not in members
        members[record.number] = record
        self._states.setdefault(point, sampler_state)
        if self._rung(record) is not None:
            self._guessed = True
        learned = record.state == "complete" and self._drift.add(record)
        return point, learned and self._guessed

    def _rebuild(self) -> None:
        """Begin a new study."""
        self._entries = SamplerStudy(self.spec, self._domains)
        self._outdated = False
        for point in dict.fromkeys((*self._earlier, *self._members)):
            self._enter(point)

    def _new_sampler(self) -> BaseSampler:
        """A sampler with the seed of the next proposal: one that has a memory would be another one
        after a restart."""
        seed = hashlib.sha256(f"{self.spec.search.seed}:{self.known}".encode()).digest()
        return self._sampling.build(int.from_bytes(seed[:4], "big") >> 1)

    def _enter(self, point: Point) -> None:
        if self._sampling.has_model:
            attrs = {**self._sampling.attrs, **self._states.get(point, {})}
            self._entries.enter(point, self._worth(point), attrs)

    def _rung(self, record: TrialRecord) -> Rung | None:
        return find_last_rung(record, under_way=self._under_way)

    def _worth(self, point: Point) -> list[dict[str, float]]:
        """Metric -> value of each complete seed; if there is none, of each that came to a rung; if
        this sweep knows nothing of the point, of each trial of an earlier one."""
        members = self._members.get(point, {}).values()
        complete = [record for record in members if record.state == "complete"]
        rungs = [rung for record in members if (rung := self._rung(record)) is not None]
        if rungs and not complete:
            return [self._drift.estimate_final(rung) for rung in rungs]
        told = complete or self._earlier.get(point, [])
        return [{name: e.mean for name, e in record.validation.items()} for record in told]

    def _point(self, params: Params) -> Point | None:
        """Where a configuration lies, or None if the space does not hold it."""
        active = self.spec.space.active(params)
        for name, domain in active.items():
            if not domain.contains(params[name]):
                return None
        return tuple(
            params[name] if name in active else domain.middle()
            for name, domain in self._domains.items()
        )

    def _suggestion(
        self, values: Params, proposer: Proposer, trial: Trial | None = None
    ) -> Suggestion:
        state: dict[str, Any] = {}
        if trial is not None:
            attrs = self._entries.study.get_trials(deepcopy=False)[trial.number].system_attrs
            # a copy of the proposal, cut into pieces
            state = {key: value for key, value in attrs.items() if ":relative_params" not in key}
        return Suggestion(self.spec.space.complete(values), proposer, state)

    def _unlike(self, repeated: Suggestion) -> Suggestion:
        """A new point near a repeated one: with one parameter of a quasi-random point. If none is
        new, a quasi-random point; if none of them is, the repeated one."""
        names = tuple(self._domains)
        for index in range(self.known, self.known + MAX_TRIES):
            name = names[index % len(names)]
            fresh = quasi_random.draw_point(self.spec, index)
            near = self._suggestion({**repeated.params, name: fresh[name]}, repeated.proposer)
            point = self._point(near.params)  # None: what it makes active has no value yet
            if point is not None and point not in self._members:
                return near
        unseen = self._unseen()
        return repeated if unseen is None else self._quasi_random(unseen)

    def _quasi_random(self, index: int) -> Suggestion:
        return self._suggestion(quasi_random.draw_point(self.spec, index), "startup")

    def _unseen(self) -> int | None:
        """The next index of the quasi-random sequence whose point is new; None if none is near."""
        for index in range(self._quasi_random_asked, self._quasi_random_asked + MAX_TRIES):
            params = self.spec.space.complete(quasi_random.draw_point(self.spec, index))
            if self._point(params) not in self._members:
                return index
        return None
