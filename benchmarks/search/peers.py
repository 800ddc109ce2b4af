"""Other libraries in simulated time, each through its public interface and with its own defaults.

A peer that judges trials early gets our rungs and our reduction factor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.trial import Trial
from problems import REDUCTION, Estimates, Problem, build_spec
from simulator import Verdict

from gdpo_tune.core.trials import Params
from gdpo_tune.ledger import (
    compute_violation,
    convert_to_distribution,
    create_study,
    silence_optuna,
)
from gdpo_tune.spec import Choices, Search, Uniform


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
