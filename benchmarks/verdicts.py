"""Error rate and power of the comparison of two sweeps, and coverage of intervals, simulated.

    python benchmarks/verdicts.py [--pairs 200] [--small]
    python benchmarks/verdicts.py --only intervals [--draws 1000] [--small]

A simulated sweep searches two reward weights and a learning rate on log scales. Its three
objectives trade off by the weights' shares and fall with the distance of the learning rate from its
best value. Training and evaluation together add noise of .04. Trials are random draws, or proposals
of Optuna's model-based samplers, as in sweeps. Each pair is compared as in
`python -m gdpo_tune.report`.

    two sweeps    with equal settings, or with all objectives of one multiplied
    two modes     in one sweep, over a categorical parameter without any effect, or with one

The benchmark prints the share of pairs whose verdict reports any difference, and the share in which
the hypervolume's corrected test does. Over every tenth pair it prints the share of intervals of the
hypervolume ratio that contain 1, the true ratio of equal sweeps.

Three tables are about single intervals at 95 %, which should hold the truth in .95 of draws:

    shares        of completions that meet something: each prompt has a share of its own from a beta
                  distribution, and `alike` is the correlation of its completions
    replicates    a sweep of normal values with training noise .04 and evaluation noise .02, in
                  which some configurations have further seeds
    marks         sweeps of 40 policies that are all as good as the untrained one: how many have a
                  mark "worse than", and how many an extreme that is not tied with all others

The last line is JSON.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from harness import run
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler

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
from gdpo_tune.core.trials import Estimate, Objective, Role, TrialRecord
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
    "gp": lambda seed: GPSampler(seed=seed, n_startup_trials=STARTUP),
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
    Case("random", (40, 40), gain=1.2, share=0.25),
    Case("gp", (16, 16), share=0.1),
    Case("gp", (32,), share=0.1),
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
        weights = [
            1.0,
            *(trial.suggest_float(n, 0.05, 2.0, log=True) for n in ("format", "length")),
        ]
        rate = trial.suggest_float("learning_rate", 3e-5, 3e-4, log=True)
        mode = trial.suggest_categorical("mode", MODES) if len(gains) > 1 else MODES[0]
        means = compute_worth(weights, rate) * gains[MODES.index(mode)] + rng.normal(
            0, NOISE, len(GOALS)
        )
        study.tell(trial, list(means))
        estimates = {
            goal.name: Estimate(float(mean), NOISE) for goal, mean in zip(GOALS, means, strict=True)
        }
        records.append(
            TrialRecord(
                number=number,
                role="search",
                state="complete",
                params={"normalization": mode, "learning_rate": rate, "number": number},
                seed=number,
                proposer="startup" if sampler == "random" or number < STARTUP else "model",
                validation=estimates,
                test=estimates,
                feasible=True,
            )
        )
    return records


def compute_worth(weights: Sequence[float], rate: float) -> np.ndarray:
    """Compute objectives in 0 to about .8 from the weights' shares and the learning rate.

    They are highest at a learning rate of 1.5e-4.
    """
    shares = np.array(weights) / sum(weights)
    return 0.8 * np.sqrt(shares) * (1 - 0.3 * math.log10(rate / 1.5e-4) ** 2)


def build_sides(case: Case, seed: int) -> list[Arm]:
    """Simulate one pair of a case and build its two sides."""
    if len(case.trials) == 1:
        records = simulate_sweep(case.sampler, case.trials[0], seed, (case.gain, 1.0))
        groups = [[r for r in records if r.params["normalization"] == mode] for mode in MODES]
    else:
        gains = (case.gain, 1.0)
        groups = [
            simulate_sweep(case.sampler, trials, 2 * seed + side, gains[side : side + 1])
            for side, trials in enumerate(case.trials)
        ]
    shared = len(case.trials) == 1
    return [
        build_arm(name, group, GOALS, shared=shared)
        for name, group in zip("AB", groups, strict=True)
    ]


def measure(case: Case, pairs: int) -> dict[str, float]:
    """Measure the shares over `pairs` pairs of a case."""
    called = volume = 0
    held: list[bool] = []
    for seed in range(pairs):
        left, right = build_sides(case, seed)
        corrected = correct_p_values(compute_p_values(left, right))
        if min(corrected) <= ALPHA:  # otherwise no verdict differs, and `build_verdict` is slow
            called += build_verdict(compare_arms(left, right)).winner in ("left", "right", "mixed")
        volume += corrected[0] <= ALPHA
        if seed % EVERY == 0:
            interval = compare_arms(left, right).ratio.interval
            held.append(interval.low <= 1 <= interval.high)
    return {
        "pairs": pairs,
        "called": called / pairs,
        "hypervolume": volume / pairs,
        "holds_1": sum(held) / len(held),
    }


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
    for _ in range(sweeps):
        columns = {
            f"{name}/{number}": draw_outcomes(share, (1, 128, 1), 0.0, rng)[0].tolist()
            for name, share in EQUAL.items()
            for number in range(trials + 1 + replicates)
        }
        found = estimate_metrics(columns, 1, 0)
        records: list[TrialRecord] = []
        for number in range(trials + 1 + replicates):
            original = number - trials if number > trials else None
            role: Role = (
                "untrained" if number == 0 else "search" if original is None else "replicate"
            )
            values = {name: found[f"{name}/{number}"] for name in EQUAL}
            records.append(
                TrialRecord(
                    number=number,
                    role=role,
                    state="complete",
                    params={"number": number if original is None else original},
                    seed=number,
                    proposer="startup",
                    replicate_of=original,
                    validation=values,
                    test=values,
                    feasible=True,
                )
            )
        front = build_front(records, GOALS)
        marked += any(map(front.find_shortfalls, front.configurations))
        apart += any(len(front.list_ties(name)) < trials - 1 for name in front.extremes)
    return {"sweeps": sweeps, "marked": marked / sweeps, "not_tied": apart / sweeps}


def measure_intervals(draws: int, sizes: Sequence[int]) -> dict[str, object]:
    """Measure and print the tables of single intervals."""
    shown = (0.5, 0.9, 0.97, 0.99, 0.998, 0.999)
    print(f"| prompts | samples | alike | {' | '.join(map(str, shown))} | lowest |")
    print(f"|---{'|---' * (3 + len(shown))}|")
    shares: list[dict[str, float]] = []
    for prompts in sizes:
        for samples, alike in CLUSTERS:
            found = measure_shares(prompts, samples, alike, draws)
            lowest = min(found.values())
            figures = " | ".join(f"{value:.3f}" for value in (*map(found.get, shown), lowest))
            print(f"| {prompts} | {samples} | {alike:g} | {figures} |", flush=True)
            shares.append({"prompts": prompts, "samples": samples, "alike": alike, "low": lowest})
    print("\n| replicates | seeds of configurations | covers, several seeds | covers, one seed |")
    print("|---|---|---|---|")
    seeds: list[dict[str, float]] = []
    for layout in LAYOUTS:
        several, one = measure_replicates(layout, draws)
        runs = sum(layout) - len(layout)
        print(f"| {runs} | {', '.join(map(str, layout))} | {several:.3f} | {one:.3f} |")
        seeds.append({"runs": runs, "several": several, "one": one})
    print("\n| replicates | sweeps | marked worse than untrained | not tied |\n|---|---|---|---|")
    marks: list[dict[str, float]] = []
    for replicates in (0, 2):
        found = measure_marks(max(2, draws // 5), replicates)
        figures = f"{found['marked']:.3f} | {found['not_tied']:.3f}"
        print(f"| {replicates} | {found['sweeps']} | {figures} |")
        marks.append({"replicates": replicates, **found})
    return {"shares": shares, "replicates": seeds, "marks": marks}


def measure_verdicts(pairs: int, cases: Sequence[Case]) -> dict[str, object]:
    """Measure and print the table of comparisons."""
    print("| proposed by | trials | gain | pairs | called different | hypervolume | holds 1 |")
    print("|---|---|---|---|---|---|---|")
    rows: list[dict[str, float | str]] = []
    for case in cases:
        of_case = max(1, round(pairs * case.share))
        measured = measure(case, of_case)
        trials = " and ".join(map(str, case.trials))
        sides = trials if len(case.trials) > 1 else f"{trials}, two modes"
        figures = " | ".join(f"{measured[k]:.3f}" for k in ("called", "hypervolume", "holds_1"))
        print(f"| {case.sampler} | {sides} | {case.gain:g} | {of_case} | {figures} |", flush=True)
        rows.append({"sampler": case.sampler, "trials": sides, "gain": case.gain, **measured})
    equal = [float(row["called"]) for row in rows if row["gain"] == 1.0]
    print()
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
