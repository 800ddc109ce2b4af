"""Error rate and power of the comparison of two sweeps, and coverage of intervals, simulated.

    python benchmarks/verdicts.py [--pairs 200] [--small]
    python benchmarks/verdicts.py --only intervals [--draws 1000] [--small]

A simulated sweep searches two reward weights and a learning rate on log scales. Its three
objectives trade off by the weights' shares and fall with the distance of the learning rate from its
best value. Training and evaluation together add noise of .04. Trials are random draws, or proposals
of TPE. Two sweeps have equal settings, or all objectives of one are multiplied; two modes of one
sweep are values of a categorical parameter without any effect, or with one. Each pair is compared
as in `python -m gdpo_tune.report`.

Printed are the shares of pairs whose verdict reports any difference, and in which the
hypervolume's corrected test does. Over every tenth pair it is the share of intervals of the
hypervolume ratio that contain 1, the true ratio of equal sweeps. Then, at 95 %: intervals of
`shares` of completions, each prompt with a share of its own, `alike` by a correlation; intervals
with `replicates`, under noise of training .04 and of evaluation .02; and `marks` in sweeps of 40
policies that are all as good as the untrained one. The last line is JSON.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import optuna
from harness import print_table, run
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from gdpo_tune.analysis.comparison import (
    ALPHA,
    Arm,
    build_arm,
    compare_arms,
    compute_p_values,
    correct_p_values,
)
from gdpo_tune.analysis.front import build_front
from gdpo_tune.analysis.replicates import estimate_seed_spread, pool_estimates
from gdpo_tune.core.metrics import estimate_metrics
from gdpo_tune.core.trials import Estimate, Objective, TrialRecord
from gdpo_tune.results.comparison_report import build_verdict

GOALS = tuple(Objective(name, "maximize", 0.0) for name in ("correctness", "format", "length"))
NOISE = 0.04
MODES = ("a", "b")
STARTUP = 4
EVERY = 10
"""One in this many pairs gets an interval, because intervals take most of the time."""
SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {
    "random": lambda seed: RandomSampler(seed=seed),
    "tpe": lambda seed: TPESampler(seed=seed, n_startup_trials=STARTUP, multivariate=True),
}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    sampler: str
    trials: tuple[int, ...]
    """Trials of each of two sweeps; a single number means one sweep with two modes."""
    gain: float = 1.0
    """Factor of the first side's objectives."""
    share: float = 1.0
    """Share of the requested pairs; samplers with a slow model get fewer."""


CASES = (
    Case("random", (16, 16)),
    Case("random", (40, 12)),
    Case("random", (60,)),
    Case("tpe", (16, 16), share=0.5),
    Case("tpe", (32,), share=0.5),
    Case("random", (40, 40), gain=1.1, share=0.25),
)
SMALL = (Case("random", (12, 12)), Case("random", (24,)), Case("random", (24, 24), gain=1.5))
SHARES = (0.5, 0.7, 0.9, 0.95, 0.97, 0.98, 0.985, 0.99, 0.993, 0.995, 0.997, 0.998, 0.999)
CLUSTERS = ((1, 0.0), (4, 0.0), (4, 0.3), (8, 0.5))
"""Samples of a prompt, and how alike they are."""
LAYOUTS = ((2,), (2, 2), (3,), (2, 2, 2), (2, 2, 2, 2, 2), (3, 3, 2))
"""Seeds of the configurations that have several."""
TRAINING_NOISE, EVALUATION_NOISE = 0.04, 0.02
EQUAL = dict(zip((goal.name for goal in GOALS), (0.7, 0.95, 0.99), strict=True))
"""Objective -> share that every policy truly has."""


def simulate_sweep(
    sampler: str, trials: int, seed: int, gains: Sequence[float]
) -> list[TrialRecord]:
    """Simulate a sweep; with several gains it also searches the normalization, one gain each."""
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        proposer = SAMPLERS[sampler](seed)
    study = optuna.create_study(directions=["maximize"] * len(GOALS), sampler=proposer)
    records: list[TrialRecord] = []
    for number in range(trials):
        trial = study.ask()
        weights = [trial.suggest_float(n, 0.05, 2.0, log=True) for n in ("format", "length")]
        rate = trial.suggest_float("learning_rate", 3e-5, 3e-4, log=True)
        mode = trial.suggest_categorical("mode", MODES) if len(gains) > 1 else MODES[0]
        means = compute_worth([1.0, *weights], rate) * gains[MODES.index(mode)]
        means += rng.normal(0, NOISE, len(GOALS))
        study.tell(trial, list(means))
        params = {"normalization": mode, "learning_rate": rate, "number": number}
        is_start = sampler == "random" or number < STARTUP
        values = {g.name: Estimate(float(v), NOISE) for g, v in zip(GOALS, means, strict=True)}
        proposer_name = "startup" if is_start else "model"
        records.append(build_record(number, values, params=params, proposer=proposer_name))
    return records


def build_record(number: int, values: Mapping[str, Estimate], **changes: Any) -> TrialRecord:
    """Build a complete trial; it starts its search unless `changes` say otherwise."""
    fields: dict[str, Any] = {"role": "search", "proposer": "startup", **changes}
    measured = {"validation": values, "test": values, "feasible": True}
    return TrialRecord(number=number, state="complete", seed=number, **measured, **fields)


def compute_worth(weights: Sequence[float], rate: float) -> np.ndarray:
    """Compute objectives in 0 to about .8, which are highest at a learning rate of 1.5e-4."""
    shares = np.array(weights) / sum(weights)
    return 0.8 * np.sqrt(shares) * (1 - 0.3 * math.log10(rate / 1.5e-4) ** 2)


def build_sides(case: Case, seed: int) -> list[Arm]:
    """Simulate one pair of a case and build its two sides."""
    gains, shared = (case.gain, 1.0), len(case.trials) == 1
    if shared:
        records = simulate_sweep(case.sampler, case.trials[0], seed, gains)
        groups = [[r for r in records if r.params["normalization"] == mode] for mode in MODES]
    else:
        groups = [
            simulate_sweep(case.sampler, trials, 2 * seed + side, gains[side : side + 1])
            for side, trials in enumerate(case.trials)
        ]
    return [build_arm(n, of, GOALS, shared=shared) for n, of in zip("AB", groups, strict=True)]


def count_calls(build: Callable[[int], Sequence[Arm]], pairs: int) -> tuple[float, float]:
    """Return the shares of pairs with any difference, and with one of hypervolume by its test."""
    called = volume = 0
    for seed in range(pairs):
        left, right = build(seed)
        corrected = correct_p_values(compute_p_values(left, right))
        volume += corrected[0] <= ALPHA
        if min(corrected) <= ALPHA:  # otherwise no verdict differs, and `build_verdict` is slow
            called += build_verdict(compare_arms(left, right)).winner in ("left", "right", "mixed")
    return called / pairs, volume / pairs


def measure(case: Case, pairs: int) -> dict[str, float]:
    """Measure the shares over `pairs` pairs of a case."""
    called, volume = count_calls(lambda seed: build_sides(case, seed), pairs)
    some = range(0, pairs, EVERY)
    intervals = [compare_arms(*build_sides(case, seed)).ratio.interval for seed in some]
    holds = sum(one.low <= 1 <= one.high for one in intervals) / len(intervals)
    return {"pairs": pairs, "called": called, "hypervolume": volume, "holds_1": holds}


def draw_outcomes(
    share: float, shape: tuple[int, int, int], alike: float, rng: np.random.Generator
) -> np.ndarray:
    """Draw 0 and 1 `[draws, prompts * samples]`, those of one prompt correlated by `alike`."""
    draws, prompts = shape[:2]
    shares = np.full((draws, prompts), share)
    if alike:
        spread = 1 / alike - 1
        shares = rng.beta(share * spread, (1 - share) * spread, (draws, prompts))
    return (rng.random(shape) < shares[:, :, None]).astype(np.float64).reshape(draws, -1)


def measure_shares(prompts: int, samples: int, alike: float, draws: int) -> dict[float, float]:
    """Return share -> coverage of its interval."""
    rng, coverage = np.random.default_rng(0), {}
    for share in SHARES:
        outcomes = draw_outcomes(share, (draws, prompts, samples), alike, rng)
        columns = {str(index): row.tolist() for index, row in enumerate(outcomes)}
        found = estimate_metrics(columns, samples, 0).values()
        coverage[share] = sum(e.low <= share <= e.high for e in found) / draws
    return coverage


def measure_replicates(layout: Sequence[int], draws: int) -> tuple[float, float]:
    """Return the coverage of a configuration with several seeds, and of one with a single one."""
    rng, held = np.random.default_rng(0), np.zeros(2)
    noise = math.hypot(TRAINING_NOISE, EVALUATION_NOISE)
    for _ in range(draws):
        seeds = [
            [{"m": Estimate(float(value), EVALUATION_NOISE)} for value in rng.normal(0, noise, n)]
            for n in (*layout, 1)
        ]
        spread = estimate_seed_spread(seeds)["m"]
        for index, of_one in enumerate((seeds[0], seeds[-1])):
            found = pool_estimates([seed["m"] for seed in of_one], spread)
            held[index] += found.low <= 0 <= found.high
    return float(held[0] / draws), float(held[1] / draws)


def measure_marks(sweeps: int, replicates: int, trials: int = 40) -> dict[str, float]:
    """Return the shares of sweeps with a false mark, and with an extreme not tied with all."""
    rng, marked, apart = np.random.default_rng(replicates), 0, 0
    numbers = range(trials + 1 + replicates)
    for _ in range(sweeps):
        columns = {
            f"{name}/{number}": draw_outcomes(share, (1, 128, 1), 0.0, rng)[0].tolist()
            for name, share in EQUAL.items()
            for number in numbers
        }
        found = estimate_metrics(columns, 1, 0)
        records: list[TrialRecord] = []
        for number in numbers:
            values = {name: found[f"{name}/{number}"] for name in EQUAL}
            of = number - trials if number > trials else None
            role = "untrained" if number == 0 else "search" if of is None else "replicate"
            params = {"number": number if of is None else of}
            records.append(build_record(number, values, role=role, params=params, replicate_of=of))
        front = build_front(records, GOALS)
        marked += any(map(front.find_shortfalls, front.configurations))
        apart += any(len(front.list_ties(name)) < trials - 1 for name in front.extremes)
    return {"sweeps": sweeps, "marked": marked / sweeps, "not_tied": apart / sweeps}


def measure_intervals(draws: int, sizes: Sequence[int]) -> dict[str, object]:
    """Measure and print the tables of single intervals."""
    shown = (0.5, 0.9, 0.97, 0.99, 0.998, 0.999)
    table: list[tuple[object, ...]] = [("prompts", "samples", "alike", *map(str, shown), "lowest")]
    shares: list[dict[str, float]] = []
    for prompts, (samples, alike) in product(sizes, CLUSTERS):
        found = measure_shares(prompts, samples, alike, draws)
        lowest = min(found.values())
        table.append((prompts, samples, f"{alike:g}", *map(found.get, shown), lowest))
        shares.append({"prompts": prompts, "samples": samples, "alike": alike, "low": lowest})
    print_table(*table)
    seeds = [
        dict(zip(("several", "one"), measure_replicates(layout, draws), strict=True))
        for layout in LAYOUTS
    ]
    runs = [sum(layout) - len(layout) for layout in LAYOUTS]
    print_table(
        ("replicates", "seeds of configurations", "covers, several seeds", "covers, one seed"),
        *((n, layout, *row.values()) for n, layout, row in zip(runs, LAYOUTS, seeds, strict=True)),
    )
    marks = [{"replicates": n, **measure_marks(max(2, draws // 5), n)} for n in (0, 2)]
    print_table(
        ("replicates", "sweeps", "marked worse than untrained", "not tied"),
        *(tuple(row.values()) for row in marks),
    )
    several = [{"runs": n, **row} for n, row in zip(runs, seeds, strict=True)]
    return {"shares": shares, "replicates": several, "marks": marks}


def measure_verdicts(pairs: int, cases: Sequence[Case]) -> dict[str, object]:
    """Measure and print the table of comparisons."""
    rows: list[dict[str, float | str]] = []
    for case in cases:
        trials = " and ".join(map(str, case.trials))
        sides = trials if len(case.trials) > 1 else f"{trials}, two modes"
        found = measure(case, max(1, round(pairs * case.share)))
        rows.append({"sampler": case.sampler, "trials": sides, "gain": case.gain, **found})
    print_table(tuple(rows[0]), *(tuple(row.values()) for row in rows))
    equal = [float(row["called"]) for row in rows if row["gain"] == 1.0]
    return {"largest_error_rate": max(equal), "limit": 0.05, "rows": rows}


def measure_all(
    pairs: int = 200,
    draws: int = 1000,
    only: str = "",
    sizes: list[int] = [64, 128, 256],
    cases: int = len(CASES),
):
    """Measure the comparisons, single intervals, or both; `only`: intervals or verdicts."""
    if only not in ("", "intervals", "verdicts"):
        raise SystemExit(f"--only is intervals or verdicts, not {only}")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    result: dict[str, object] = {}
    if only != "intervals":
        result |= measure_verdicts(pairs, CASES[:cases] if cases else SMALL)
    if only != "verdicts":
        result |= measure_intervals(draws, sizes)
    return result


if __name__ == "__main__":
    run(measure_all, {"pairs": 2, "draws": 10, "sizes": [64], "cases": 0})
