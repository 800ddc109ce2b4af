"""Level and power of the effects of each dimension, where the true effects are known.

    python benchmarks/effects.py [--seeds 20] [--first 0] [--trainings 13] [--sampler auto]

A case is a simulated sweep whose trainings were all measured at one step: the published setting;
six configurations that have every choice at least twice and the corners of two reward weights; the
others proposed by the sampler. Some have a second measurement. Values are effects (0 to 4 standard
deviations between trainings with one setting) and noise of evaluation and seed, whose variance
differs between objectives as in a real sweep of `code.yaml`.

    additive     each dimension acts alone; a range by its own scale
    conditional  one range acts under one mode alone
    bent         ranges with peaks and cliffs, and interactions as large as the noise

The level is the share of sweeps in which any interval of any question of any objective misses the
true difference, a mean over the space of all else. Power is the share of differences of a size that
are told apart. The last line is JSON.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
import optuna
from harness import print_table, run
from numpy.typing import NDArray

from gdpo_tune.analysis.effects import Dimension, estimate_effects
from gdpo_tune.core.trials import Cost, Estimate, Params, Rung, TrialRecord
from gdpo_tune.results.open_sweep import list_dimensions
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.model import ObjectiveSpec, Search
from gdpo_tune.spec.space import Choices, Domain, Space, Uniform
from gdpo_tune.tuning.proposals import SamplerView

Floats = NDArray[np.float64]
Worth = Callable[[Params], float]
KINDS = ("additive", "conditional", "bent")
GOALS = ("correctness", "format", "length")
SIZES = (0.0, 0.0, 1.0, 2.0, 3.0, 4.0)
EVALUATION, SPREAD = 0.03, 1.2
"""Standard error of an evaluation, and the deviation of the logarithm of a variance over its."""
STEP, LAST, COMPLETIONS = 20, 60, 1280
POINTS = 500
"""Points of the space over which true differences are means."""
WEIGHTS = ("reward_weights.format", "reward_weights.length")
PLAIN: dict[str, Domain] = {
    "normalization": Choices(choices=("gdpo", "grpo", "grpo_no_std")),
    "group_size": Choices(choices=(4, 8)),
    **{name: Uniform(low=0.05, high=2.0, log=True) for name in WEIGHTS},
    "learning_rate": Uniform(low=3e-5, high=3e-4, log=True),
}
GAMMA = {"gamma": Uniform(low=0.0, high=1.0, when={"normalization": ("gdpo",)})}


def simulate(kind: str, seed: int, count: int, sampler: str) -> tuple[float, list[tuple]]:
    """Return whether any interval misses the truth, and a row of each question.

    A row is the sort of its dimension, the true difference in standard deviations, whether it is
    told apart, and how many more trainings it is said to take.
    """
    rng = np.random.default_rng((seed, KINDS.index(kind)))
    search = Search(trials=count, sampler="random" if sampler == "none" else sampler, seed=seed)
    spec = _build_spec(GOALS, _build_space(kind), search=search)
    dimensions = list_dimensions(spec.space)
    ratios = np.maximum(1, np.exp(SPREAD * rng.standard_normal(len(GOALS)) + 1))
    deviations = dict(zip(GOALS, EVALUATION * np.sqrt(ratios), strict=True))
    worths = {goal: _draw_worth(kind, dimensions, rng) for goal in GOALS}
    records: list[TrialRecord] = []
    view = SamplerView(spec)

    def train(params: Params, role: str) -> None:
        values = {
            goal: 0.5 + deviations[goal] * (worth(params) + rng.standard_normal())
            for goal, worth in worths.items()
        }
        estimates = {goal: Estimate(float(v), EVALUATION) for goal, v in values.items()}
        rungs = [Rung(STEP, estimates, Cost(COMPLETIONS))]
        if len(records) % 3 == 0:
            rungs.append(Rung(LAST, estimates, Cost(3 * COMPLETIONS)))
        number, measured = len(records), {"validation": estimates, "test": estimates}
        ended = {"feasible": True, "finished": float(number), "rungs": tuple(rungs), **measured}
        record = TrialRecord(number, role, "complete", params, number, "model", **ended)
        records.append(record)
        view.observe(record)

    middle = {"normalization": "gdpo", "group_size": 8, "learning_rate": 1e-4, "gamma": 0.5}
    train(spec.space.complete({**middle, **dict.fromkeys(WEIGHTS, 1.0)}), "published")
    corners = [*itertools.product((0.05, 2.0), repeat=2), (0.05, 2.0), (2.0, 0.05)]
    modes, sizes = (rng.permutation(6) % k for k in (3, 2))
    for corner, mode, size in zip(corners, modes, sizes, strict=True):
        params = _draw(spec.space.domains, rng) | dict(zip(WEIGHTS, corner, strict=True))
        params["normalization"] = PLAIN["normalization"].choices[mode]
        params["group_size"] = PLAIN["group_size"].choices[size]
        train(spec.space.complete(params), "search")
    while len(records) < count:
        is_random = sampler == "none"
        params = _draw(spec.space.domains, rng) if is_random else view.propose().params
        train(spec.space.complete(params), "search")
    effects = estimate_effects(records, spec.list_objectives(), dimensions)
    assert (effects.step, effects.trainings) == (STEP, count)
    rows, misses = [], False
    points = _draw_points(kind)
    for goal in GOALS:
        truths = _compute_truths(worths[goal], points, spec)
        for found in (c for c in effects.contrasts if c.objective == goal):
            truth = truths[found.dimension, found.before, found.after]
            true = truth * deviations[goal]
            misses |= not found.interval.low <= true <= found.interval.high
            # Told apart the wrong way round is not found.
            is_right = found.is_told_apart and found.value * true >= 0
            rows.append((_name_sort(found.dimension), abs(truth), is_right, found.more))
    return misses, rows


def _name_sort(name: str) -> str:
    sorts = {"normalization": "two of three choices", "group_size": "two choices"}
    return sorts.get(name, "range, corners" if name in WEIGHTS else "range")


def _draw(domains: Mapping[str, Domain], rng: np.random.Generator) -> Params:
    params: Params = {}
    for name, domain in domains.items():
        if isinstance(domain, Choices):
            params[name] = domain.choices[rng.integers(len(domain.choices))]
        else:
            low, high, share = float(domain.low), float(domain.high), rng.uniform()
            params[name] = low + share * (high - low)
            if domain.log:
                params[name] = low * (high / low) ** share
    return params


def _draw_worth(kind: str, dimensions: tuple[Dimension, ...], rng: np.random.Generator) -> Worth:
    """Draw the worth of a setting in standard deviations between trainings."""
    parts: dict[str, Callable] = {}
    for d in dimensions:
        size = float(rng.choice(SIZES)) * rng.choice([-1, 1])
        if d.choices:
            # The first two choices differ by the size; a third one is like either, or between.
            levels = [0.0, size, size * rng.choice([0, 0.5, 1])][: len(d.choices)]
            parts[d.name] = dict(zip(d.choices, levels, strict=True)).__getitem__
        else:
            parts[d.name] = _draw_curve(d, size, kind == "bent", rng)
    crossed = [d for d in dimensions if not d.choices]
    cross = float(rng.choice([-1, 1])) if kind == "bent" else 0.0

    def compute(params: Params) -> float:
        total = sum(
            part(params[name])
            for name, part in parts.items()
            if name != "gamma" or params["normalization"] == "gdpo"
        )
        if cross:
            sign = 1 if params["normalization"] == "grpo" else -0.5
            (first,), (second,) = (d.encode(params[d.name]) for d in crossed[:2])
            total += cross * (sign * first + 3 * first * second) / 2
        return total

    return compute


def _draw_curve(d: Dimension, size: float, is_bent: bool, rng: np.random.Generator) -> Callable:
    form, centre = rng.integers(3) if is_bent else 0, rng.uniform(-0.6, 0.6)

    def compute(value: float) -> float:
        (x,) = d.encode(value)
        if form == 0:
            return size * x / 2
        return size * (
            1 - (x - centre) ** 2 if form == 1 else 1 / (1 + math.exp((centre - x) / 0.15))
        )

    return compute


@cache
def _draw_points(kind: str) -> list[Params]:
    domains, rng = _build_space(kind).domains, np.random.default_rng(0)
    return [_draw(domains, rng) for _ in range(POINTS)]


def _build_spec(goals: Sequence[str], space: Space, **fields: Search) -> SweepSpec:
    objectives = {n: ObjectiveSpec(direction="maximize", reference=0.0) for n in goals}
    names = dict.fromkeys(("name", "task", "policy"), "simulated")
    return SweepSpec(objectives=objectives, space=space, **names, **fields)


def _build_space(kind: str) -> Space:
    return Space(domains=PLAIN | (GAMMA if kind == "conditional" else {}))


def _compute_truths(
    worth: Worth, points: Sequence[Params], spec: SweepSpec
) -> dict[tuple[str, str, str], float]:
    """Return the true differences: of the linear model that fits the whole space best."""
    goal = [Estimate(worth(params), 0.0) for params in points]
    records = [
        TrialRecord(i, "search", "complete", p, i, "model", rungs=(Rung(1, {"x": v}, Cost()),))
        for i, (p, v) in enumerate(zip(points, goal, strict=True))
    ]
    objective = _build_spec(["x"], spec.space).list_objectives()
    found = estimate_effects(records, objective, list_dimensions(spec.space))
    return {(c.dimension, c.before, c.after): c.value for c in found.contrasts}


def measure(seeds: int = 20, first: int = 0, trainings: int = 13, sampler: str = "auto"):
    """Simulate `seeds` sweeps of each kind, from the seed `first` on; `none`: random proposals."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    results = {
        kind: [simulate(kind, seed, trainings, sampler) for seed in range(first, first + seeds)]
        for kind in KINDS
    }
    level = {kind: float(np.mean([misses for misses, _ in of])) for kind, of in results.items()}
    level["all"] = float(np.mean(list(level.values())))
    print_table(("sweeps with a wrong interval", *level), (len(KINDS) * seeds, *level.values()))
    rows = [row for kind in KINDS[:2] for _, of in results[kind] for row in of]
    power: dict[str, dict[str, float]] = {}
    for sort in ("two choices", "two of three choices", "range, corners", "range"):
        own = [row for row in rows if row[0] == sort]
        power[sort] = {
            f"{size:g}": float(np.mean([r[2] for r in own if abs(r[1] - size) < 0.1] or [np.nan]))
            for size in sorted(set(SIZES))
        }
        power[sort]["more"] = float(np.median([row[3] for row in own if not row[2]] or [0]))
    print_table(
        ("told apart, by the size of the difference", *power["range"]),
        *((sort, *of.values()) for sort, of in power.items()),
    )
    return {"trainings": trainings, "sampler": sampler, "level": level, "power": power}


if __name__ == "__main__":
    run(measure, {"seeds": 1, "sampler": "none"})
