"""Study that a sampler reads: one trial for each configuration, pending or finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from optuna.samplers import BaseSampler, RandomSampler
from optuna.storages import InMemoryStorage
from optuna.trial import Trial, TrialState, create_trial

from gdpo_tune.core.trials import ParamValue
from gdpo_tune.ledger import compute_violation, convert_to_distribution, create_study
from gdpo_tune.spec import Choices, SweepSpec, Uniform

STUDY = "projection"

Point = tuple[ParamValue, ...]
"""Configuration as one value for each dimension."""
SeedValues = Sequence[Mapping[str, float]]
"""Metric -> value, one mapping for each seed; empty while no value is known."""


class SamplerStudy:
    """In-memory study, and the number of each configuration in it.

    A finished configuration cannot change: if its values change later, a new study is needed.
    """

    def __init__(self, spec: SweepSpec, domains: Mapping[str, Choices | Uniform]) -> None:
        """Create an empty study; `domains` are the dimensions of a point, in their order."""
        self.distributions = {
            name: convert_to_distribution(domain) for name, domain in domains.items()
        }
        self._spec = spec
        self._storage = InMemoryStorage()
        # a placeholder: each proposal has a sampler of its own
        self.study = create_study(self._storage, STUDY, spec, RandomSampler())
        self._study_id = self._storage.get_study_id_from_name(STUDY)
        self._numbers: dict[Point, int] = {}
        """Point -> number of its trial in the study."""
        self.finished: dict[Point, tuple[float, ...]] = {}
        """Finished configuration -> values of its objectives."""

    def __contains__(self, point: Point) -> bool:
        """Return whether the study has a point, pending or finished."""
        return point in self._numbers

    def compute_mean(self, seed_values: SeedValues) -> tuple[float, ...]:
        """Return the mean over seeds of each objective; empty without a seed."""
        if not seed_values:
            return ()
        return tuple(
            fmean(values[name] for values in seed_values) for name in self._spec.objectives
        )

    def update(self, point: Point, seed_values: SeedValues, attrs: Mapping[str, Any]) -> None:
        """Add a point that is absent, or finish one that is pending.

        Without `seed_values` it is pending. `attrs` are system attributes of the sampler, for a
        point that is absent.
        """
        mean = self.compute_mean(seed_values)
        broken = {
            name: compute_violation(bound, fmean(values[name] for values in seed_values))
            for name, bound in self._spec.constraints.items()
            if seed_values
        }
        if point not in self:
            self._numbers[point] = len(self.study.get_trials(deepcopy=False))
            self.study.add_trial(
                create_trial(
                    state=TrialState.COMPLETE if seed_values else TrialState.RUNNING,
                    values=mean or None,
                    params=dict(zip(self.distributions, point, strict=True)),
                    distributions=self.distributions,
                    system_attrs=dict(attrs),
                    constraints=broken,
                )
            )
        elif seed_values:
            number = self._numbers[point]
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
            for name, value in broken.items():
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

    def adopt(self, point: Point, number: int) -> None:
        """Let a trial that `study.ask` created stand for a pending point."""
        self._numbers[point] = number

    def withdraw(self, point: Point) -> None:
        """Remove a pending point; ignore one that is absent or finished."""
        if point in self and point not in self.finished:
            self.fail(self._numbers.pop(point))

    def fail(self, number: int) -> None:
        """Close a trial of the study that stands for no point."""
        self.study.tell(number, state=TrialState.FAIL)
