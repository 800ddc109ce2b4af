"""How often a comparison of two sweeps is wrong, and how often it finds a difference: simulated.

    python benchmarks/verdicts.py [--pairs 200] [--small]

Simulated sweeps: two reward weights and a learning rate, searched on log scales; three objectives
that trade by the weights' shares and fall with a learning rate off its best; noise of training and
evaluation together .04. Who proposes: random draws, or Optuna's samplers with a model, as sweeps
have them. Each pair is compared as `python -m gdpo_tune.report` does it.

    two sweeps    of equal settings, or one whose objectives are all multiplied
    two modes     in one sweep, over a categorical parameter without any effect, or with one

Printed: the share of pairs whose verdict calls any difference, of those in which the hypervolume's
corrected test does, and, over every tenth pair, of intervals of the hypervolume ratio that hold 1,
the truth for equal sweeps. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler

from gdpo_tune.analysis.comparison import ALPHA, compare, compute_p_values
from gdpo_tune.analysis.resampling import correct_p_values
from gdpo_tune.analysis.sides import Side, build_side
from gdpo_tune.analysis.verdict import judge
from gdpo_tune.core.trials import Estimate, Objective, TrialRecord

GOALS = tuple(Objective(name, "maximize", 0.0) for name in ("correctness", "format", "length"))
NOISE = 0.04
MODES = ("a", "b")
STARTUP = 4
EVERY = 10
"""Pairs for each one whose interval is looked at: intervals take most of the time."""
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
    """Of each of two sweeps; one number: of one sweep with two modes."""
    gain: float = 1.0
    """What the first side's objectives are multiplied with."""
    share: float = 1.0
    """Of the pairs that are asked for: samplers with a slow model get fewer."""


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


def simulate_sweep(
    sampler: str, trials: int, seed: int, gains: Sequence[float]
) -> list[TrialRecord]:
    """A simulated sweep; with several gains, its normalization is searched and has these."""
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
        worth = _compute_worth(weights, rate) * gains[MODES.index(mode)] + rng.normal(
            0, NOISE, len(GOALS)
        )
        study.tell(trial, list(worth))
        found = {goal.name: Estimate(float(v), NOISE) for goal, v in zip(GOALS, worth, strict=True)}
        records.append(
            TrialRecord(
                number=number,
                role="search",
                state="complete",
                params={"normalization": mode, "learning_rate": rate, "number": number},
                seed=number,
                proposer="startup" if sampler == "random" or number < STARTUP else "model",
                validation=found,
                test=found,
                feasible=True,
            )
        )
    return records


def _compute_worth(weights: Sequence[float], rate: float) -> np.ndarray:
    """Objectives in 0 to about .8: what a weight's share buys, less with a rate off 1.5e-4."""
    shares = np.array(weights) / sum(weights)
    return 0.8 * np.sqrt(shares) * (1 - 0.3 * math.log10(rate / 1.5e-4) ** 2)


def build_sides(case: Case, seed: int) -> list[Side]:
    """One pair of a case."""
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
        build_side(name, group, GOALS, shared=shared)
        for name, group in zip("AB", groups, strict=True)
    ]


def measure(case: Case, pairs: int) -> dict[str, float]:
    """Shares over `pairs` pairs of a case."""
    called = volume = 0
    held: list[bool] = []
    for seed in range(pairs):
        left, right = build_sides(case, seed)
        corrected = correct_p_values(compute_p_values(left, right))
        if min(corrected) <= ALPHA:  # without that no verdict calls anything, and it takes longer
            called += judge(compare(left, right)).differs
        volume += corrected[0] <= ALPHA
        if seed % EVERY == 0:
            interval = compare(left, right).ratio.interval
            held.append(interval.low <= 1 <= interval.high)
    return {
        "pairs": pairs,
        "called": called / pairs,
        "hypervolume": volume / pairs,
        "holds_1": sum(held) / len(held),
    }


def main() -> None:
    """Print the table, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--small", action="store_true", help="seconds instead of an hour")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pairs, cases = (6, SMALL) if options.small else (options.pairs, CASES)
    print("| proposed by | trials | gain | pairs | called different | hypervolume | holds 1 |")
    print("|---|---|---|---|---|---|---|")
    rows: list[dict[str, float | str]] = []
    for case in cases:
        of_case = max(1, round(pairs * case.share))
        found = measure(case, of_case)
        trials = " and ".join(map(str, case.trials))
        where = trials if len(case.trials) > 1 else f"{trials}, two modes"
        figures = " | ".join(f"{found[k]:.3f}" for k in ("called", "hypervolume", "holds_1"))
        print(f"| {case.sampler} | {where} | {case.gain:g} | {of_case} | {figures} |", flush=True)
        rows.append({"sampler": case.sampler, "trials": where, "gain": case.gain, **found})
    equal = [float(row["called"]) for row in rows if row["gain"] == 1.0]
    print(json.dumps({"largest_error_rate": max(equal), "limit": 0.05, "rows": rows}))


if __name__ == "__main__":
    main()
