"""Tuners in simulated time: our samplers and schedulers, driven as by a sweep, and other libraries.

A peer runs through its public interface, with its own defaults; it is imported on use. One that
judges trials early gets our rungs and our reduction factor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.trial import Trial
from problems import (
    REDUCTION,
    REFERENCES,
    BraninCurrin,
    Estimates,
    Problem,
    PymooProblem,
    Replayed,
    build_spec,
)
from simulator import Tuner, Verdict

from gdpo_tune.core.trials import Cost, Params, Rung, State, TrialRecord
from gdpo_tune.ledger.opening import create_study, silence_optuna
from gdpo_tune.ledger.trial_encoding import compute_violation, convert_to_distribution
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.model import Search
from gdpo_tune.spec.space import Choices, Uniform
from gdpo_tune.tuning.halving import SuccessiveHalving
from gdpo_tune.tuning.proposals import SamplerView

Core = Callable[[Problem, SweepSpec], SuccessiveHalving]


def build_no_rungs(problem: Problem, spec: SweepSpec) -> SuccessiveHalving:
    """Build no rungs: first in, first out."""
    del problem
    return SuccessiveHalving(spec.list_objectives(), ())


def build_stopping_rungs(problem: Problem, spec: SweepSpec) -> SuccessiveHalving:
    """Build rungs at the problem's levels; a trial that does not continue ends there."""
    bounds = len(spec.constraints)
    return SuccessiveHalving(spec.list_objectives(), problem.rungs, REDUCTION, "stop", bounds)


def build_promoting_rungs(problem: Problem, spec: SweepSpec) -> SuccessiveHalving:
    """Build rungs at the problem's levels; a trial that does not continue may be promoted later."""
    bounds = len(spec.constraints)
    return SuccessiveHalving(spec.list_objectives(), problem.rungs, REDUCTION, "promote", bounds)


class Product:
    """Tuner with our projection and sampler, and the core of a scheduler."""

    def __init__(self, problem: Problem, sampler: str, core: Core, trials: int, seed: int) -> None:
        """Create the tuner.

        Args:
            problem: problem to search.
            sampler: name of a sampler in the registry.
            core: builds the scheduler's rungs.
            trials: value of `search.trials`, from which samplers plan their start-up.
            seed: seed of the sweep.
        """
        self._full = problem.levels[-1]
        self._spec = build_spec(problem, Search(trials=trials, sampler=sampler, seed=seed))
        self._projection = SamplerView(self._spec)
        self._rungs = core(problem, self._spec)
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
        self._projection.observe(record, suggestion.sampler_state)
        return suggestion.params

    def judge(self, number: int, level: int, values: Estimates) -> Verdict:
        """Return the scheduler's verdict; the sampler learns from trials that do not continue."""
        means = [values[name].mean for name in self._spec.objectives]
        broken = [
            compute_violation(bound, values[n].mean) for n, bound in self._spec.constraints.items()
        ]
        verdict = self._rungs.record(number, level, means, broken)
        record = self._records[number]
        rung = Rung(step=level, validation=values, cost=Cost(completions=level))
        states: dict[Verdict, State] = {"continue": "running", "stop": "pruned", "pause": "paused"}
        self._change(
            replace(record, state=states[verdict], rungs=(*record.rungs, rung), cost=rung.cost)
        )
        return verdict

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

    def promote(self) -> int | None:
        """Return the trial that the scheduler promotes."""
        number = self._rungs.find_promotable()
        if number is not None:
            self._rungs.promote(number)
            self._change(replace(self._records[number], state="running"))
        return number

    def compute_model_share(self) -> float:
        """Compute the share of the trials that the sampler's model proposed."""
        return sum(r.proposer == "model" for r in self._records.values()) / len(self._records)

    def _change(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        self._projection.observe(record)


class OptunaAlone:
    """Plain Optuna study over ask and tell, with constraints and without stopping."""

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

    def judge(self, number: int, level: int, values: Estimates) -> Verdict:
        """Continue always: Optuna has no early stopping for several objectives."""
        del number, level, values
        return "continue"

    def finish(self, number: int, values: Estimates) -> None:
        """Tell the study the trial's values."""
        trial = self._trials[number]
        for name, bound in self._problem.constraints.items():
            trial.set_constraint(name, compute_violation(bound, values[name].mean))
        self._study.tell(trial, [values[name].mean for name in self._problem.objectives])

    def promote(self) -> int | None:
        """Return None: no trial waits."""
        return None


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
    """Ray Tune's `OptunaSearch`, alone or with Ray's ASHA on the first objective.

    It takes no constraints. As with Ray, it gets a trial that ASHA stops as finished, with the
    values of its last rung.
    """

    def __init__(self, problem: Problem, seed: int, *, asha: bool) -> None:
        from ray.tune.schedulers import AsyncHyperBandScheduler
        from ray.tune.search.optuna import OptunaSearch

        self._problem = problem
        with silence_optuna():
            self._search = OptunaSearch(
                {name: convert_to_distribution(d) for name, d in problem.domains.items()},
                metric=list(problem.objectives),
                mode=[goal.direction[:3] for goal in problem.objectives.values()],
                seed=seed,
            )
        first, goal = next(iter(problem.objectives.items()))
        self._scheduler = AsyncHyperBandScheduler(
            time_attr="completions",
            metric=first,
            mode=goal.direction[:3],
            max_t=problem.levels[-1],
            grace_period=(*problem.rungs, *problem.levels)[0],
            reduction_factor=REDUCTION,
        )
        self._asha = asha

    def start(self, number: int) -> Params:
        """Return the searcher's proposal."""
        self._scheduler.on_trial_add(None, _build_trial(number))
        with silence_optuna():
            return self._search.suggest(str(number))

    def judge(self, number: int, level: int, values: Estimates) -> Verdict:
        """Return ASHA's verdict on the first objective."""
        if not self._asha:
            return "continue"
        result = self._build_result(level, values)
        if self._scheduler.on_trial_result(None, _build_trial(number), result) == "CONTINUE":
            return "continue"
        with silence_optuna():
            self._search.on_trial_complete(str(number), result)
        return "stop"

    def finish(self, number: int, values: Estimates) -> None:
        """Report the end of a trial to scheduler and searcher."""
        result = self._build_result(self._problem.levels[-1], values)
        self._scheduler.on_trial_complete(None, _build_trial(number), result)
        with silence_optuna():
            self._search.on_trial_complete(str(number), result)

    def promote(self) -> int | None:
        """Return None: no trial waits."""
        return None

    def _build_result(self, level: int, values: Estimates) -> dict[str, float]:
        means = {name: values[name].mean for name in self._problem.objectives}
        return {**means, "completions": level}


class SyneTuneMoasha:
    """Syne Tune's multi-objective ASHA, which draws configurations at random.

    It draws from NumPy's global generator, so a process runs one simulation at a time. It takes one
    direction for all metrics, so it gets maximised metrics with the opposite sign.

    Raises:
        ImportError: syne-tune is not installed.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        from syne_tune.optimizer.schedulers.multiobjective.moasha import MOASHA

        np.random.seed(seed)
        self._problem = problem
        self._scheduler = MOASHA(
            {name: _convert_domain(domain) for name, domain in problem.domains.items()},
            metrics=list(problem.objectives),
            time_attr="completions",
            max_t=problem.levels[-1],
            grace_period=(*problem.rungs, *problem.levels)[0],
            reduction_factor=REDUCTION,
            random_seed=seed,
        )

    def start(self, number: int) -> Params:
        """Return a random configuration."""
        self._scheduler.on_trial_add(_build_trial(number))
        return self._scheduler.suggest().config

    def judge(self, number: int, level: int, values: Estimates) -> Verdict:
        """Return the verdict of the trial's bracket."""
        result = {
            name: values[name].mean * (-1 if goal.direction == "maximize" else 1)
            for name, goal in self._problem.objectives.items()
        }
        decision = self._scheduler.on_trial_result(
            _build_trial(number), {**result, "completions": level}
        )
        return "continue" if decision == "CONTINUE" else "stop"

    def finish(self, number: int, values: Estimates) -> None:
        """Do nothing: its brackets need no end of a trial."""
        del number, values

    def promote(self) -> int | None:
        """Return None: no trial waits."""
        return None


def _build_trial(number: int) -> Any:
    """Build the fields of a trial that schedulers read."""
    return SimpleNamespace(trial_id=str(number))


def _convert_domain(domain: Choices | Uniform) -> Any:
    from syne_tune import config_space

    if isinstance(domain, Choices):
        return config_space.choice(list(domain.choices))
    if domain.integer:
        return (config_space.lograndint if domain.log else config_space.randint)(
            int(domain.low), int(domain.high)
        )
    return (config_space.loguniform if domain.log else config_space.uniform)(
        domain.low, domain.high
    )


Build = Callable[[Problem, int, int], Tuner]
"""Problem, budget in full trials and seed -> a tuner."""


@dataclass(frozen=True)
class Contestant:
    """Tuner that takes part in comparisons."""

    build: Build
    needs: str = ""
    """Package that it needs in addition to the project's dependencies."""
    takes_constraints: bool = True
    most_seeds: int | None = None
    """Most seeds of a contestant whose proposals take seconds to minutes."""


def _build_product(sampler: str, core: Core, most_seeds: int | None = None) -> Contestant:
    return Contestant(
        lambda problem, trials, seed: Product(problem, sampler, core, trials, seed),
        most_seeds=most_seeds,
    )


def _build_optuna(sampler: str, most_seeds: int | None = None) -> Contestant:
    return Contestant(
        lambda p, trials, seed: OptunaAlone(p, build_optuna_sampler(sampler, seed)),
        most_seeds=most_seeds,
    )


CONTESTANTS: Mapping[str, Contestant] = {
    "gdpo_tune auto": _build_product("auto", build_no_rungs, most_seeds=10),
    "gdpo_tune gp": _build_product("gp", build_no_rungs),
    "gdpo_tune tpe": _build_product("tpe", build_no_rungs),
    "gdpo_tune nsga2": _build_product("nsga2", build_no_rungs),
    "gdpo_tune nsga3": _build_product("nsga3", build_no_rungs),
    "gdpo_tune random": _build_product("random", build_no_rungs),
    "gdpo_tune auto + asha": _build_product("auto", build_stopping_rungs),
    "gdpo_tune tpe + asha": _build_product("tpe", build_stopping_rungs),
    "gdpo_tune tpe + asha promote": _build_product("tpe", build_promoting_rungs),
    "gdpo_tune random + asha": _build_product("random", build_stopping_rungs),
    "gdpo_tune random + asha promote": _build_product("random", build_promoting_rungs),
    "optuna random": _build_optuna("random"),
    "optuna tpe": _build_optuna("tpe"),
    "optuna nsga2": _build_optuna("nsga2"),
    "optuna gp": _build_optuna("gp", most_seeds=10),
    "botorch qnehvi": Contestant(
        lambda p, trials, seed: OptunaAlone(p, build_optuna_sampler("qnehvi", seed)),
        needs="optuna_integration",
        most_seeds=3,
    ),
    "ray optunasearch": Contestant(
        lambda p, trials, seed: RayOptuna(p, seed, asha=False), takes_constraints=False
    ),
    "ray optunasearch + asha": Contestant(
        lambda p, trials, seed: RayOptuna(p, seed, asha=True), takes_constraints=False
    ),
    "syne-tune moasha": Contestant(
        lambda p, trials, seed: SyneTuneMoasha(p, seed),
        needs="syne_tune",
        takes_constraints=False,
    ),
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
