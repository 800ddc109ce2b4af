"""Measures of the importance of parameters, where the true importance is known.

    python benchmarks/importance.py [--seeds 10] [--first 0] [--trials 40] [--sampler auto]

A case is one objective of a simulated sweep of `--trials` trials, which the product's sampler
proposed, see `importance_problems.py`. The truth is the total Sobol index: the share of the
variance of a trial, over the whole space, that involves a parameter. A ranking agrees with the
truth if no parameter stands above another whose true importance is at least `GAP` larger.

The benchmark prints for each measure the share of cases whose ranking agrees, by kind of problem,
and the mean of Kendall's tau. Of the package's own measure it also prints how many cases are shown
(the others are found unreliable from the data alone), the agreement of those, the coverage of the
intervals, and how often a parameter with and without effect counts as clear. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import optuna
from importance_measures import MEASURES
from importance_problems import GOALS, KINDS, Case, Floats, simulate_case
from scipy.stats import kendalltau

from gdpo_tune.analysis.effects import (
    GAP,
    LEAST_CROWDED,
    NOISE_ALONE,
    RELIABLE,
    RELIABLE_CROWDED,
    compute_reliability,
    compute_total_indices,
    ranks_agree,
)
from gdpo_tune.analysis.resampling import compute_interval
from gdpo_tune.analysis.response import Encoder, draw_surfaces
from gdpo_tune.core.registry import SAMPLERS
from gdpo_tune.results.dimensions import list_dimensions

OWN = "gdpo_tune"


@dataclass(frozen=True)
class Result:
    """One objective of one case, by every measure."""

    kind: str
    truth: Floats
    """Importances `[D]`."""
    rankings: Mapping[str, Floats]
    """Measure -> its values `[D]`."""
    reliability: float
    least: float
    """Reliability from which the report would show the importances."""
    intervals: Floats
    """Of the package's measure, `[D, 2]`."""

    @property
    def is_shown(self) -> bool:
        """True if the report would show the importances."""
        return self.reliability >= self.least

    def agrees(self, measure: str) -> bool:
        """Return whether the ranking by a measure agrees with the truth."""
        return ranks_agree(self.truth, self.rankings[measure])


def measure_case(case: Case, objective: str, least: float) -> Result:
    """Measure the importances for one objective of a case in every way."""
    encoder = Encoder(list_dimensions(case.spec.space))
    names = [dimension.name for dimension in encoder.dimensions]
    places = np.stack([encoder.convert(record.params) for record in case.records])
    values = np.array([record.test[objective].mean for record in case.records])
    surfaces = draw_surfaces(encoder, places, values, np.ones(len(values)))
    shares = compute_total_indices(encoder, surfaces.weights, surfaces.noise)
    intervals = [compute_interval(row) for row in shares]
    found = {name: measure(case, objective) for name, measure in MEASURES.items()}
    rankings = {name: np.array([of.get(n, 0.0) for n in names]) for name, of in found.items()}
    return Result(
        kind=case.kind,
        truth=np.array([case.truth[objective][name] for name in names]),
        rankings={**rankings, OWN: shares.mean(axis=1)},
        reliability=compute_reliability(shares),
        least=least,
        intervals=np.array([(interval.low, interval.high) for interval in intervals]),
    )


def summarise_measure(results: list[Result], measure: str) -> dict[str, float]:
    """Return the shares of cases with an agreeing ranking, and the mean of Kendall's tau."""
    by_kind = {
        kind: float(np.mean([r.agrees(measure) for r in results if r.kind == kind]))
        for kind in dict.fromkeys(r.kind for r in results)
    }
    taus = [kendalltau(r.truth, r.rankings[measure]).statistic for r in results]
    every = float(np.mean([r.agrees(measure) for r in results]))
    return {**by_kind, "all": every, "tau": float(np.nanmean(taus))}


def summarise_own(results: list[Result]) -> dict[str, float | None]:
    """Return how often the package's measure is shown, and how right it is then."""
    shown = [r for r in results if r.is_shown]
    truth = np.concatenate([r.truth for r in results])
    low, high = np.vstack([r.intervals for r in results]).T
    clear = low > NOISE_ALONE
    # A drawn share is never exactly 0, so an interval holds 0 if it reaches what noise gives.
    held = ((low <= truth) | (low <= NOISE_ALONE)) & (truth <= high)
    return {
        "cases": len(results),
        "shown": len(shown) / len(results),
        "agree_of_shown": _mean([r.agrees(OWN) for r in shown]),
        "coverage": _mean(held),
        "clear_without_effect": _mean(clear[truth == 0]),
        "clear_from_0.1": _mean(clear[truth >= 0.1]),
        "clear_from_0.2": _mean(clear[truth >= 0.2]),
    }


def _mean(values: list[bool] | Floats) -> float | None:
    return float(np.mean(values)) if len(values) else None


def main() -> None:
    """Simulate all cases; print both tables, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="sweeps of each kind")
    parser.add_argument("--first", type=int, default=0, help="seed of the first sweep")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--sampler", default="auto")
    parser.add_argument("--small", action="store_true", help="seconds instead of ten minutes")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    seeds, sampler = (1, "tpe") if options.small else (options.seeds, options.sampler)
    least = RELIABLE
    if SAMPLERS[sampler].crowds:
        least = RELIABLE_CROWDED if options.trials >= LEAST_CROWDED else 1.01
    results = [
        measure_case(case, goal, least)
        for seed in range(options.first, options.first + seeds)
        for kind in KINDS
        for case in [simulate_case(kind, seed, options.trials, sampler)]
        for goal in GOALS
    ]
    print(f"| measure | {' | '.join(KINDS)} | all | tau |")
    print("|---|---|---|---|---|---|")
    rows = {name: summarise_measure(results, name) for name in (*MEASURES, OWN)}
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in row.values())} |")
    own = summarise_own(results)
    print(f"\n{OWN}:", ", ".join(f"{name} {value}" for name, value in own.items()))
    print(
        json.dumps({"gap": GAP, "sampler": sampler, "trials": options.trials, **own, "rows": rows})
    )


if __name__ == "__main__":
    main()
