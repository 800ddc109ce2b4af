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
from problems import (
    REFERENCES,
    BraninCurrin,
    Estimates,
    Problem,
    PymooProblem,
    Replayed,
    build_spec,
)
from simulator import Tuner

from gdpo_tune.core.trials import Cost, Params, Rung, TrialRecord
from gdpo_tune.ledger.opening import create_study, silence_optuna
from gdpo_tune.ledger.trial_encoding import convert_to_distribution
from gdpo_tune.spec.model import Search
from gdpo_tune.tuning.proposals import SamplerView


class Product:
    """Tuner with our projection and sampler."""

    def __init__(self, problem: Problem, sampler: str, trials: int, seed: int) -> None:
        """Create the tuner.

        Args:
            problem: problem to search.
            sampler: name of a sampler in the registry.
            trials: value of `search.trials`, from which samplers plan their start-up.
            seed: seed of the sweep.
        """
        self._full = problem.levels[-1]
        self._spec = build_spec(problem, Search(trials=trials, sampler=sampler, seed=seed))
        self._projection = SamplerView(self._spec)
        self._records: dict[int, TrialRecord] = {}

    def start(self, number: int) -> Params:
        """Return the sampler's proposal."""
        suggestion = self._projection.propose()
        record = TrialRecord(
            number=number,
            role="search",
            state="running",
            params=suggestion.params,
            seed=number,
            proposer=suggestion.proposer,
        )
        self._records[number] = record
        self._projection.observe(record)
        return suggestion.params

    def observe(self, number: int, level: int, values: Estimates) -> None:
        """Let the sampler learn from a trial under way."""
        record = self._records[number]
        rung = Rung(step=level, validation=values, cost=Cost(completions=level))
        self._change(replace(record, rungs=(*record.rungs, rung), cost=rung.cost))

    def finish(self, number: int, values: Estimates) -> None:
        """Let the sampler learn from a complete trial."""
        record = self._records[number]
        rung = Rung(step=self._full, validation=values, cost=Cost(completions=self._full))
        self._change(
            replace(
                record,
                state="complete",
                validation=values,
                test=values,
                rungs=(*record.rungs, rung),
                cost=rung.cost,
            )
        )

    def compute_model_share(self) -> float:
        """Compute the share of the trials that the sampler's model proposed."""
        return sum(r.proposer == "model" for r in self._records.values()) / len(self._records)

    def _change(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        self._projection.observe(record)


class OptunaAlone:
    """Plain Optuna study over ask and tell, with constraints."""

    def __init__(self, problem: Problem, sampler: BaseSampler) -> None:
        self._problem = problem
        self._study = create_study(
            InMemoryStorage(), problem.name, build_spec(problem, Search()), sampler
        )
        self._distributions = {n: convert_to_distribution(d) for n, d in problem.domains.items()}
        self._trials: dict[int, Trial] = {}

    def start(self, number: int) -> Params:
        """Return the sampler's proposal."""
        with silence_optuna():
            self._trials[number] = self._study.ask(self._distributions)
        return self._trials[number].params

    def observe(self, number: int, level: int, values: Estimates) -> None:
        """Do nothing: Optuna uses early values only to stop trials, and of one objective."""

    def finish(self, number: int, values: Estimates) -> None:
        """Tell the study the trial's values."""
        trial = self._trials[number]
        for name, bound in self._problem.constraints.items():
            trial.set_constraint(name, bound.compute_violation(values[name].mean))
        self._study.tell(trial, [values[name].mean for name in self._problem.objectives])


def build_optuna_sampler(name: str, seed: int) -> BaseSampler:
    """Build an Optuna sampler with its defaults.

    Raises:
        ImportError: the sampler needs a package that is not installed.
    """
    if name == "qnehvi":
        return _build_qnehvi(seed)
    samplers: dict[str, Callable[..., BaseSampler]] = {
        "random": optuna.samplers.RandomSampler,
        "tpe": optuna.samplers.TPESampler,
        "nsga2": optuna.samplers.NSGAIISampler,
        "gp": optuna.samplers.GPSampler,
    }
    return samplers[name](seed=seed)


def _build_qnehvi(seed: int) -> BaseSampler:
    """Build BoTorch's noisy expected hypervolume improvement, behind Optuna's BoTorch sampler."""
    from optuna_integration.botorch import BoTorchSampler, qnehvi_candidates_func

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return BoTorchSampler(candidates_func=qnehvi_candidates_func, seed=seed)


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
        """Return the searcher's proposal."""
        with silence_optuna():
            return self._search.suggest(str(number))

    def observe(self, number: int, level: int, values: Estimates) -> None:
        """Do nothing: the searcher does not learn from trials under way."""

    def finish(self, number: int, values: Estimates) -> None:
        """Report the end of a trial to the searcher."""
        result = {name: values[name].mean for name in self._objectives}
        with silence_optuna():
            self._search.on_trial_complete(str(number), result)


Build = Callable[[Problem, int, int], Tuner]
"""Problem, budget in full trials and seed -> a tuner."""


@dataclass(frozen=True)
class Contestant:
    """Tuner that takes part in comparisons."""

    build: Build
    needs: str = ""
    """Package that it needs in addition to the project's dependencies."""
    most_seeds: int | None = None
    """Most seeds of a contestant whose proposals take seconds to minutes."""


def _build_product(sampler: str, most_seeds: int | None = None) -> Contestant:
    return Contestant(
        lambda problem, trials, seed: Product(problem, sampler, trials, seed),
        most_seeds=most_seeds,
    )


def _build_optuna(sampler: str, most_seeds: int | None = None) -> Contestant:
    return Contestant(
        lambda p, trials, seed: OptunaAlone(p, build_optuna_sampler(sampler, seed)),
        most_seeds=most_seeds,
    )


CONTESTANTS: Mapping[str, Contestant] = {
    "gdpo_tune auto": _build_product("auto", most_seeds=10),
    "gdpo_tune gp": _build_product("gp"),
    "gdpo_tune tpe": _build_product("tpe"),
    "gdpo_tune random": _build_product("random"),
    "optuna random": _build_optuna("random"),
    "optuna tpe": _build_optuna("tpe"),
    "optuna nsga2": _build_optuna("nsga2"),
    "optuna gp": _build_optuna("gp", most_seeds=10),
    "botorch qnehvi": Contestant(
        lambda p, trials, seed: OptunaAlone(p, build_optuna_sampler("qnehvi", seed)),
        needs="optuna_integration",
        most_seeds=3,
    ),
    "ray optunasearch": Contestant(lambda p, trials, seed: RayOptuna(p, seed)),
}

PROBLEMS: Mapping[str, Callable[[], Problem]] = {
    "branin_currin": BraninCurrin,
    **{name: partial(PymooProblem, name) for name in REFERENCES},
    "math": Replayed.load_shipped,
    "math_checkpoints": Replayed.load_checkpoints,
}


def find_missing_package(name: str) -> str:
    """Return the missing package of a contestant or problem; empty if it can take part."""
    needs = CONTESTANTS[name].needs if name in CONTESTANTS else ""
    if name in REFERENCES:
        needs = "pymoo"
    return needs if needs and find_spec(needs) is None else ""
