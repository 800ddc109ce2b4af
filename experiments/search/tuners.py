"""Tuners in simulated time: our samplers, driven as by a sweep, and other libraries.

A peer runs through its public interface, with its own defaults; it is imported on use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.trial import Trial
from problems import PYMOO, BraninCurrin, Estimates, Problem, PymooProblem, Replayed
from simulator import Tuner

from gdpo_tune.core.trials import Cost, Params, Rung, TrialRecord
from gdpo_tune.ledger.opening import create_study, silence_optuna
from gdpo_tune.ledger.trial_encoding import convert_to_distribution
from gdpo_tune.spec.model import Search
from gdpo_tune.tuning.proposals import SamplerView


class Product:
    """Tuner with our projection and sampler; `trials` is `search.trials`, which plans start-ups."""

    def __init__(self, problem: Problem, sampler: str, trials: int, seed: int) -> None:
        spec = problem.build_spec(Search(trials=trials, sampler=sampler, seed=seed))
        self._full = problem.levels[-1]
        self._projection = SamplerView(spec)
        self._records: dict[int, TrialRecord] = {}

    def start(self, number: int) -> Params:
        found = self._projection.propose()
        fields = {"seed": number, "proposer": found.proposer}
        self._keep(TrialRecord(number, "search", "running", found.params, **fields))
        return found.params

    def observe(self, number: int, level: int, values: Estimates) -> None:
        record = self._records[number]
        rung = Rung(step=level, validation=values, cost=Cost(completions=level))
        self._keep(replace(record, rungs=(*record.rungs, rung), cost=rung.cost))

    def finish(self, number: int, values: Estimates) -> None:
        record = self._records[number]
        rung = Rung(step=self._full, validation=values, cost=Cost(completions=self._full))
        ended = {"state": "complete", "validation": values, "test": values, "cost": rung.cost}
        self._keep(replace(record, rungs=(*record.rungs, rung), **ended))

    def compute_model_share(self) -> float:
        """Compute the share of the trials that the sampler's model proposed."""
        return sum(r.proposer == "model" for r in self._records.values()) / len(self._records)

    def _keep(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        self._projection.observe(record)


class OptunaAlone:
    """Plain Optuna study over ask and tell, with constraints."""

    def __init__(self, problem: Problem, sampler: BaseSampler) -> None:
        self._problem = problem
        spec = problem.build_spec(Search())
        self._study = create_study(InMemoryStorage(), problem.name, spec, sampler)
        self._distributions = {n: convert_to_distribution(d) for n, d in problem.domains.items()}
        self._trials: dict[int, Trial] = {}

    def start(self, number: int) -> Params:
        with silence_optuna():
            self._trials[number] = self._study.ask(self._distributions)
        return self._trials[number].params

    def observe(self, number: int, level: int, values: Estimates) -> None:
        """Do nothing: Optuna uses early values only to stop trials."""

    def finish(self, number: int, values: Estimates) -> None:
        trial = self._trials[number]
        for name, bound in self._problem.constraints.items():
            trial.set_constraint(name, bound.compute_violation(values[name].mean))
        self._study.tell(trial, [values[name].mean for name in self._problem.objectives])


class RayOptuna:
    """Ray Tune's `OptunaSearch`, which takes no constraints."""

    def __init__(self, problem: Problem, seed: int) -> None:
        from ray.tune.search.optuna import OptunaSearch

        self._objectives = tuple(problem.objectives)
        with silence_optuna():
            self._search = OptunaSearch(
                {name: convert_to_distribution(d) for name, d in problem.domains.items()},
                metric=list(problem.objectives),
                mode=[goal.direction[:3] for goal in problem.objectives.values()],
                seed=seed,
            )

    def start(self, number: int) -> Params:
        with silence_optuna():
            return self._search.suggest(str(number))

    def observe(self, number: int, level: int, values: Estimates) -> None:
        """Do nothing: the searcher does not learn from trials under way."""

    def finish(self, number: int, values: Estimates) -> None:
        result = {name: values[name].mean for name in self._objectives}
        with silence_optuna():
            self._search.on_trial_complete(str(number), result)


def build_qnehvi(seed: int) -> BaseSampler:
    """Build BoTorch's noisy expected hypervolume improvement, behind Optuna's BoTorch sampler."""
    from optuna_integration.botorch import BoTorchSampler, qnehvi_candidates_func

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return BoTorchSampler(candidates_func=qnehvi_candidates_func, seed=seed)


@dataclass(frozen=True)
class Contestant:
    """Tuner that takes part in comparisons."""

    build: Callable[[Problem, int, int], Tuner]
    """Builds the tuner for a problem, a budget in full trials and a seed."""
    needs: str = ""
    """Package that it needs in addition to the project's dependencies."""
    most_seeds: int | None = None
    """Most seeds of a contestant whose proposals take seconds to minutes."""


def _build_product(sampler: str, most_seeds: int | None = None) -> Contestant:
    return Contestant(lambda p, trials, s: Product(p, sampler, trials, s), most_seeds=most_seeds)


def _build_optuna(sampler: Callable[..., BaseSampler], **fields: object) -> Contestant:
    return Contestant(lambda p, _, seed: OptunaAlone(p, sampler(seed=seed)), **fields)


CONTESTANTS: Mapping[str, Contestant] = {
    "gdpo_tune auto": _build_product("auto", most_seeds=10),
    "gdpo_tune gp": _build_product("gp"),
    "gdpo_tune tpe": _build_product("tpe"),
    "gdpo_tune random": _build_product("random"),
    "optuna random": _build_optuna(optuna.samplers.RandomSampler),
    "optuna tpe": _build_optuna(optuna.samplers.TPESampler),
    "optuna nsga2": _build_optuna(optuna.samplers.NSGAIISampler),
    "optuna gp": _build_optuna(optuna.samplers.GPSampler, most_seeds=10),
    "botorch qnehvi": _build_optuna(build_qnehvi, needs="optuna_integration", most_seeds=3),
    "ray optunasearch": Contestant(lambda p, _, seed: RayOptuna(p, seed)),
}
PROBLEMS: Mapping[str, Callable[[], Problem]] = {
    "branin_currin": BraninCurrin,
    **{name: partial(PymooProblem, name) for name in PYMOO},
    "math": partial(Replayed.load_shipped, is_paid=False),
    "math_checkpoints": partial(Replayed.load_shipped, is_paid=True),
}


def find_missing_package(name: str) -> str:
    """Return the missing package of a contestant or problem; empty if it can take part."""
    needs = "pymoo" if name in PYMOO else CONTESTANTS[name].needs if name in CONTESTANTS else ""
    return needs if needs and find_spec(needs) is None else ""
