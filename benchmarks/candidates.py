"""Truth of fronts with 5, 50 and 500 candidates, and of verdicts about them, simulated.

    python benchmarks/candidates.py [--sweeps 400] [--small]

A simulated sweep trains policies as in `verdicts.py`. Its candidates are the ends of the trainings,
checkpoints a little worse than the ends, and merges of two of them a little better than the mean of
both: they come in families. Values on validation and test prompts differ from the true objectives
by normal noise. Validation values choose which candidates are evaluated on test prompts: those on
the validation front first, then the next fronts, up to a budget. Test values claim the front.

The first table compares the claimed hypervolume and its interval with the hypervolume that the
claimed members truly have, and with that of all that was tested; and the probability of being on
the front with the share of candidates that truly are. The second one has the share of pairs of
equal searches whose verdict reports any difference. The last line is JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from harness import print_table, run
from numpy.typing import NDArray
from verdicts import GOALS, compute_worth, count_calls

from gdpo_tune.analysis.comparison import Arm, build_arm
from gdpo_tune.analysis.pareto import compute_hypervolume, rank_points
from gdpo_tune.analysis.uncertainty import estimate_front_probability, estimate_hypervolume_interval
from gdpo_tune.core.trials import Estimate, Part, TrialRecord

Floats = NDArray[np.float64]
TRAINING = 0.04
"""Noise of training, which moves the true values of a policy and of all that is made of it."""
OWN = 0.01
"""Spread of a checkpoint or a merge around what its parents let expect."""
VALIDATION, TEST = 0.03, 0.02
"""Errors of evaluations; a test evaluation has twice as many prompts."""
BINS = (0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class Case:
    """Candidates of a sweep, and how many of them are evaluated on test prompts."""

    trainings: int
    checkpoints: int = 0
    merges: int = 0
    budget: int = 10_000
    """Test evaluations."""
    luck: bool = False
    """True if checkpoints and merges are truly as good as the end of a training."""

    def __str__(self) -> str:
        """Return a name for a table."""
        made = " of luck" if self.luck else ""
        more = f" + {self.checkpoints} + {self.merges}{made}" if self.merges else ""
        return f"{self.trainings}{more}"

    @property
    def count(self) -> int:
        return self.trainings + self.checkpoints + self.merges


CASES = (
    Case(3, 1, 1, 5),
    Case(5, 5, 20, 15),
    Case(16, 14, 20, 20),
    Case(16, 14, 20, 50),
    Case(100, 200, 200, 60),
    Case(100, 200, 200, 500),
)
PAIRS = (
    (Case(16), Case(16)),
    (Case(16, 14, 20, 24), Case(16, 14, 20, 24)),
    (Case(16, 14, 20), Case(16, 14, 20)),
    (Case(40, 80, 80, 60), Case(40, 80, 80, 60)),
    (Case(16, 14, 20, 24), Case(30, 30, 40, 50)),
    (Case(5, 5, 20, 15), Case(5, 5, 20, 15)),
    (Case(16, 14, 20, 24, luck=True), Case(16)),
    (Case(16, 14, 20, luck=True), Case(16)),
    (Case(16, 100, 100, 60, luck=True), Case(16)),
)


@dataclass(frozen=True)
class Sweep:
    """Simulated candidates, `float[count, 3]`: ends first, then checkpoints, then merges."""

    truth: Floats
    validation: Floats
    test: Floats
    parents: tuple[tuple[int, ...], ...]
    """Trainings that each candidate is made of."""
    chosen: NDArray[np.int64]
    """Candidates that were evaluated on test prompts."""


def simulate_sweep(case: Case, seed: int) -> Sweep:
    rng = np.random.default_rng(seed)
    weights = np.exp(rng.uniform(np.log(0.05), np.log(2.0), (case.trainings, 2)))
    rates = np.exp(rng.uniform(np.log(3e-5), np.log(3e-4), case.trainings))
    ends = np.array(
        [compute_worth([1.0, *pair], rate) for pair, rate in zip(weights, rates, strict=True)]
    )
    ends += rng.normal(0, TRAINING, ends.shape)
    origins = rng.integers(case.trainings, size=case.checkpoints)
    pairs = rng.integers(case.trainings - 1, size=(case.merges, 2))
    pairs[:, 1] += pairs[:, 1] >= pairs[:, 0]  # two different parents
    left, right = ends[pairs[:, 0]], ends[pairs[:, 1]]
    if case.luck:
        made = np.vstack([ends[origins], left])
    else:
        checkpoints = ends[origins] * rng.uniform(0.9, 1.0, (case.checkpoints, 1))
        made = np.vstack([checkpoints, (left + right) / 2 + 0.1 * np.abs(left - right)])
        made += rng.normal(0, OWN, made.shape)
    truth = np.vstack([ends, made])
    validation = truth + rng.normal(0, VALIDATION, truth.shape)
    test = truth + rng.normal(0, TEST, truth.shape)
    single = [(index,) for index in (*range(case.trainings), *origins.tolist())]
    chosen = np.argsort(rank_points(validation, GOALS), kind="stable")[: case.budget]
    return Sweep(truth, validation, test, (*single, *map(tuple, pairs.tolist())), chosen)


def measure_front(case: Case, seed: int) -> dict[str, float]:
    """Measure the claims about one simulated front."""
    sweep = simulate_sweep(case, seed)
    truth, seen = sweep.truth[sweep.chosen], sweep.test[sweep.chosen]
    errors = np.full(seen.shape, TEST)
    claimed, members = (rank_points(values, GOALS) == 0 for values in (seen, truth))
    volume, of_claimed, of_tested, best = (
        compute_hypervolume(values, GOALS) for values in (seen, truth[claimed], truth, sweep.truth)
    )
    interval = estimate_hypervolume_interval(seen, errors, GOALS)
    shares = estimate_front_probability(seen, errors, GOALS)
    result = {
        "hypervolume": volume,
        "excess": volume - of_claimed,
        "missed": best - of_claimed,
        "width": interval.high - interval.low,
        "covers_claimed": interval.low <= of_claimed <= interval.high,
        "covers_tested": interval.low <= of_tested <= interval.high,
        "members": claimed.sum(),
        "true_members": members[claimed].sum(),
        "expected_members": shares[claimed].sum(),
    }
    bins = np.digitize(shares, BINS)
    gaps = {f"gap_{n}": (shares - members)[bins == n].sum() for n in range(len(BINS) + 1)}
    return {**result, **gaps}


def measure_fronts(case: Case, sweeps: int) -> dict[str, float]:
    """Measure the claims about many fronts: means, and the mean distance of P from the truth."""
    rows = [measure_front(case, seed) for seed in range(sweeps)]
    mean = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    gaps = [abs(mean.pop(f"gap_{index}")) for index in range(len(BINS) + 1)]
    return mean | {"calibration_error": sum(gaps) / min(case.budget, case.count)}


def build_records(case: Case, seed: int) -> list[TrialRecord]:
    """Simulate a sweep and build its records; what was not chosen for test was pruned."""
    sweep = simulate_sweep(case, seed)
    roles = ["search"] * case.trainings + ["checkpoint"] * case.checkpoints
    tested = set(sweep.chosen.tolist())
    return [
        TrialRecord(
            number=number,
            role=role,
            state="complete" if number in tested or role == "search" else "pruned",
            params={"number": number} if role == "search" else {},
            seed=number,
            proposer="startup" if role == "search" else "candidate",
            validation=_estimate(sweep.validation[number], VALIDATION),
            test=_estimate(sweep.test[number], TEST),
            feasible=True,
            parts=()
            if role == "search"
            # A checkpoint has a step of its own, which tells two of one training apart.
            else tuple(Part(p, number, 1 / len(parents)) for p in parents),
        )
        for number, (role, parents) in enumerate(
            zip_longest(roles, sweep.parents, fillvalue="merge")
        )
    ]


def _estimate(values: Sequence[float], error: float) -> dict[str, Estimate]:
    return {g.name: Estimate(float(v), error) for g, v in zip(GOALS, values, strict=True)}


def measure_verdicts(cases: tuple[Case, Case], pairs: int) -> dict[str, float]:
    """Measure how often the verdict on two searches reports a difference."""

    def build(seed: int) -> list[Arm]:
        return [
            build_arm(name, build_records(case, 2 * seed + index), GOALS)
            for index, (name, case) in enumerate(zip("AB", cases, strict=True))
        ]

    called, volume = count_calls(build, pairs)
    return {"called": called, "hypervolume": volume}


def measure(sweeps: int = 400, cases: int = len(CASES), pairs: int = len(PAIRS)):
    fronts = [
        {"candidates": case.count, "tested": case.budget, **measure_fronts(case, sweeps)}
        for case in CASES[:cases]
    ]
    print_table(tuple(fronts[0]), *(tuple(row.values()) for row in fronts))
    verdicts = [
        {"left": str(sides[0]), "right": str(sides[1]), **measure_verdicts(sides, sweeps)}
        for sides in PAIRS[:pairs]
    ]
    print_table(tuple(verdicts[0]), *(tuple(row.values()) for row in verdicts))
    return {
        "sweeps": sweeps,
        "smallest_coverage": min(min(r["covers_claimed"], r["covers_tested"]) for r in fronts),
        "largest_error_rate": max(row["called"] for row in verdicts),
        "fronts": fronts,
        "verdicts": verdicts,
    }


if __name__ == "__main__":
    run(measure, {"sweeps": 10, "cases": 2, "pairs": 2})
