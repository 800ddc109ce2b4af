"""The study that a sampler reads: one trial a configuration, pending or finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from optuna.samplers import BaseSampler, RandomSampler
from optuna.storages import InMemoryStorage
from optuna.trial import Trial, TrialState, create_trial

from gdpo_tune.core.trials import ParamValue
from gdpo_tune.ledger import compute_violation, create_study, to_distribution
from gdpo_tune.spec import Choice, SweepSpec, Uniform

STUDY = "projection"

Point = tuple[ParamValue, ...]
"""A value a dimension: what tells configurations apart."""
Worth = Sequence[Mapping[str, float]]
"""Metric -> value, one mapping a seed; empty while nothing is known."""


class SamplerStudy:
    """An in-memory study, and where in it each configuration stands.

    What is finished stays as it is: a study does not forget. A configuration that is worth
    something else later needs a new study.
    """

    def __init__(self, spec: SweepSpec, domains: Mapping[str, Choice | Uniform]) -> None:
        """
        Args:
            spec: the sweep.
            domains: the dimensions of a point, in their order.
        """
        self.distributions = {name: to_distribution(domain) for name, domain in domains.items()}
        self.completed = 0
        """Configurations that are finished."""
        self._spec = spec
        self._storage = InMemoryStorage()
        # a placeholder: each proposal has a sampler of its own
        self.study = create_study(self._storage, STUDY, spec, RandomSampler())
        self._study_id = self._storage.get_study_id_from_name(STUDY)
        self._numbers: dict[Point, int] = {}
        """Of the study's trials, by configuration."""
        self._told: dict[Point, tuple[float, ...]] = {}
        """What the sampler knows of those that are finished."""

    def __contains__(self, point: Point) -> bool:
        """Whether the study has it, pending or finished."""
        return point in self._numbers

    def get_values(self, point: Point) -> tuple[float, ...]:
        """What the sampler knows of a point, an objective each; empty if it is not finished."""
        return self._told.get(point, ())

    def compute_mean(self, worth: Worth) -> tuple[float, ...]:
        """Mean over seeds, an objective each; empty while nothing is known."""
        if not worth:
            return ()
        return tuple(fmean(values[name] for values in worth) for name in self._spec.objectives)

    def enter(self, point: Point, worth: Worth, attrs: Mapping[str, Any]) -> None:
        """Bring a point that is absent or pending to what is known now.

        Args:
            point: the configuration.
            worth: of each of its seeds; empty: it is pending.
            attrs: what the sampler wants to find again beside a point that is absent.
        """
        mean = self.compute_mean(worth)
        broken = {
            name: compute_violation(bound, fmean(values[name] for values in worth))
            for name, bound in self._spec.constraints.items()
            if worth
        }
        if point not in self:
            self._numbers[point] = len(self.study.get_trials(deepcopy=False))
            self.study.add_trial(
                create_trial(
                    state=TrialState.COMPLETE if worth else TrialState.RUNNING,
                    values=mean or None,
                    params=dict(zip(self.distributions, point, strict=True)),
                    distributions=self.distributions,
                    system_attrs=dict(attrs),
                    constraints=broken,
                )
            )
        elif worth:
            number = self._numbers[point]
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
            for name, value in broken.items():
                Trial(self.study, trial_id).set_constraint(name, value)
            # not by `tell`, which copies the whole trial for who asked it
            self._storage.set_trial_state_values(trial_id, TrialState.COMPLETE, mean)
        if worth:
            self._told[point] = mean
            self.completed += 1

    def draw(self, sampler: BaseSampler) -> dict[str, ParamValue]:
        """A value a dimension from a sampler without a model; the study stays as it is."""
        trial = create_trial(state=TrialState.RUNNING)
        return {
            name: sampler.sample_independent(self.study, trial, name, distribution)
            for name, distribution in self.distributions.items()
        }

    def adopt(self, point: Point, number: int) -> None:
        """Let a trial that the study made itself, when it was asked, stand for a pending point."""
        self._numbers[point] = number

    def withdraw(self, point: Point) -> None:
        """Forget a pending point; one that is absent or finished stays as it is."""
        if point in self and not self.get_values(point):
            self.fail(self._numbers.pop(point))

    def fail(self, number: int) -> None:
        """Close a trial of the study that stands for nothing."""
        self.study.tell(number, state=TrialState.FAIL)
