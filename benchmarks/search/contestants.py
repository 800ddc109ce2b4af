"""Contestants and problems of the comparisons by name; other packages are imported on use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from momf import BraninCurrin
from peers import OptunaAlone, RayOptuna, SyneTuneMoasha, build_optuna_sampler
from problems import Problem
from product import Core, Product, build_no_rungs, build_promoting_rungs, build_stopping_rungs
from pymoo_problems import REFERENCES, PymooProblem
from replayed import Replayed
from simulator import Tuner

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
