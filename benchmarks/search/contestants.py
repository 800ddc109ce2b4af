"""Who is compared on what, by name. Nothing here is imported before it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from momf import BraninCurrin
from peers import OptunaAlone, RayOptuna, SyneTuneMoasha, optuna_sampler
from problems import Problem
from product import Core, Product, no_rungs, promoting, stopping
from pymoo_problems import REFERENCES, PymooProblem
from replayed import Replayed
from simulator import Tuner

Build = Callable[[Problem, int, int], Tuner]
"""Problem, budget in full trials and seed -> a tuner."""


@dataclass(frozen=True)
class Contestant:
    """Something that searches."""

    build: Build
    needs: str = ""
    """A package that it needs besides the project's own."""
    takes_constraints: bool = True
    most_seeds: int | None = None
    """Of one whose proposals take seconds to minutes."""


def _product(sampler: str, core: Core, most_seeds: int | None = None) -> Contestant:
    return Contestant(
        lambda problem, trials, seed: Product(problem, sampler, core, trials, seed),
        most_seeds=most_seeds,
    )


def _optuna(sampler: str, most_seeds: int | None = None) -> Contestant:
    return Contestant(
        lambda p, trials, seed: OptunaAlone(p, optuna_sampler(sampler, seed)),
        most_seeds=most_seeds,
    )


CONTESTANTS: Mapping[str, Contestant] = {
    "gdpo_tune auto": _product("auto", no_rungs, most_seeds=10),
    "gdpo_tune gp": _product("gp", no_rungs),
    "gdpo_tune tpe": _product("tpe", no_rungs),
    "gdpo_tune nsga2": _product("nsga2", no_rungs),
    "gdpo_tune nsga3": _product("nsga3", no_rungs),
    "gdpo_tune random": _product("random", no_rungs),
    "gdpo_tune auto + asha": _product("auto", stopping),
    "gdpo_tune tpe + asha": _product("tpe", stopping),
    "gdpo_tune tpe + asha promote": _product("tpe", promoting),
    "gdpo_tune random + asha": _product("random", stopping),
    "gdpo_tune random + asha promote": _product("random", promoting),
    "optuna random": _optuna("random"),
    "optuna tpe": _optuna("tpe"),
    "optuna nsga2": _optuna("nsga2"),
    "optuna gp": _optuna("gp", most_seeds=10),
    "botorch qnehvi": Contestant(
        lambda p, trials, seed: OptunaAlone(p, optuna_sampler("qnehvi", seed)),
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
    "math": Replayed.of_shipped,
}


def missing(name: str) -> str:
    """The package without which a contestant or a problem cannot take part; empty if it can."""
    needs = CONTESTANTS[name].needs if name in CONTESTANTS else ""
    if name in REFERENCES:
        needs = "pymoo"
    return needs if needs and find_spec(needs) is None else ""
