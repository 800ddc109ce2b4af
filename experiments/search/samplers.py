"""Our samplers against Optuna's own on a plain study, on problems of pymoo.

    python experiments/search/samplers.py [--seeds 5] [--processes 2] [--out DIRECTORY] [--small]

docs/search.md has its figures: commit c16f1617 of 2026-11-22 with `--budget 40`, problems of pymoo.

A sweep has 60 trials, 4 of them in flight. Hypervolume is a share of the box between the references
and the ideal point. The last part times one proposal when 500 trials have finished and 4 run.
DIRECTORY keeps finished sweeps in `sweeps.jsonl`, and gets `table.md`. The last line is JSON.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from statistics import median

import numpy as np
from comparison import Plan, compare, parse_arguments
from problems import PYMOO

from gdpo_tune.core.trials import Estimate, TrialRecord
from gdpo_tune.spec import SweepSpec, first_trials
from gdpo_tune.spec.model import ObjectiveSpec, Search
from gdpo_tune.spec.space import Choices, Domain, Space, Uniform
from gdpo_tune.tuning.proposals import SamplerView

OURS = ("auto", "gp", "tpe", "random")
PEERS = ("optuna random", "optuna tpe", "optuna nsga2", "optuna gp", "botorch qnehvi")
NAMES = [*(f"gdpo_tune {name}" for name in OURS), *PEERS]
FULL = Plan("samplers", ["branin_currin", *PYMOO], NAMES, budget=60, seeds=5)
FEW_NAMES = ["gdpo_tune auto", "gdpo_tune random", "optuna random", "optuna tpe"]
SMALL = Plan("samplers", ["branin_currin"], FEW_NAMES, budget=6, seeds=1)
MANY, FEW = 500, 12
"""Finished trials when a proposal is timed, in the full and in the small run."""
RUNNING, ASKS = 4, 3
SPACE: dict[str, Domain] = {
    **{f"x{index}": Uniform(low=0.05, high=2.0, log=True) for index in range(5)},
    "mode": Choices(choices=("a", "b", "c")),
}
"""Space of the size of a training's search space."""


def time_proposals(sampler: str, objectives: int, trials: int) -> dict[str, object]:
    """Time proposals of a sweep with `trials` finished trials, and some in flight."""
    goals = [f"f{index}" for index in range(objectives)]
    spec = SweepSpec(
        name="timed",
        task="timed",
        policy="timed",
        objectives={n: ObjectiveSpec(direction="maximize", reference=0.0) for n in goals},
        space=Space(domains=SPACE),
        search=Search(trials=trials + 100, sampler=sampler),
    )
    projection = SamplerView(spec)
    values = np.random.default_rng(0).random((trials, objectives))
    ended = [dict(zip(goals, row, strict=True)) for row in values]
    records = [_build_record(spec, n, one) for n, one in enumerate([*ended, *[{}] * RUNNING])]
    projection.load(records)
    seconds: list[float] = []
    for number in range(len(records), len(records) + ASKS):
        started = time.perf_counter()
        suggestion = projection.propose()
        seconds.append(time.perf_counter() - started)
        projection.observe(replace(_build_record(spec, number, {}), params=suggestion.params))
    found = {"sampler": sampler, "objectives": objectives, "trials": trials}
    return {**found, "median": median(seconds), "slowest": max(seconds)}


def _build_record(spec: SweepSpec, number: int, values: Mapping[str, float]) -> TrialRecord:
    """Build a trial at a quasi-random point: finished if it has values, else in flight."""
    return TrialRecord(
        number=number,
        role="search",
        state="complete" if values else "running",
        params=first_trials.draw_point(spec, number),
        seed=number,
        proposer="startup",
        validation={name: Estimate(float(value), 0.02) for name, value in values.items()},
    )


def main() -> None:
    """Compare samplers, time proposals and print the figures."""
    options = parse_arguments(__doc__ or "", FULL, SMALL)
    figures = compare(options)
    samplers = [name.split()[1] for name in options.plan.contestants if name.startswith("gdpo")]
    trials = FEW if options.small else MANY
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = [time_proposals(name, count, trials) for name, count in product(samplers, (2, 3))]
    for one in times:
        print("a proposal:", ", ".join(f"{key} {value}" for key, value in one.items()))
    print(json.dumps({**figures, "asks": times}))


if __name__ == "__main__":
    main()
