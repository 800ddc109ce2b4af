"""Our samplers against Optuna's own on a plain study, on problems of pymoo.

    python benchmarks/search/samplers.py [--seeds 5] [--processes 2] [--out DIRECTORY] [--small]

A sweep has 60 trials, 4 of them in flight, without early stopping. Hypervolume is by moocore, as a
share of the box between the references and the ideal point. The benchmark also times one proposal
when 500 trials have finished and 4 run. DIRECTORY/sweeps.jsonl keeps the sweeps, so that an
interrupted run resumes; delete a line to simulate its sweep again. DIRECTORY also gets
`table.md` and `samplers.png`. The last line is JSON.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import numpy as np
from comparison import Plan, compare, parse_arguments, print_figures
from problems import REFERENCES

from gdpo_tune.core.trials import Estimate, TrialRecord
from gdpo_tune.spec import SweepSpec, first_trials
from gdpo_tune.spec.model import ObjectiveSpec, Search
from gdpo_tune.spec.space import Choices, Domain, Space, Uniform
from gdpo_tune.tuning.proposals import SamplerView

OURS = ("auto", "gp", "tpe", "random")
PEERS = ("optuna random", "optuna tpe", "optuna nsga2", "optuna gp", "botorch qnehvi")
FULL = Plan(
    "samplers",
    problems=["branin_currin", *REFERENCES],
    contestants=[*(f"gdpo_tune {name}" for name in OURS), *PEERS],
    budget=60,
    seeds=5,
)
SMALL = Plan(
    "samplers",
    problems=["branin_currin"],
    contestants=["gdpo_tune auto", "gdpo_tune random", "optuna random", "optuna tpe"],
    budget=6,
    seeds=1,
)
MANY, FEW = 500, 12
"""Finished trials when a proposal is timed, in the full and in the small run."""
RUNNING, ASKS = 4, 3
SPACE: dict[str, Domain] = {
    **{f"x{index}": Uniform(low=0.05, high=2.0, log=True) for index in range(5)},
    "mode": Choices(choices=("a", "b", "c")),
}
"""Space of the size of a training's search space."""


@dataclass(frozen=True)
class AskTime:
    """Real seconds of a proposal."""

    sampler: str
    objectives: int
    trials: int
    median: float
    slowest: float


def time_proposals(sampler: str, objectives: int, trials: int) -> AskTime:
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
    records = [
        _build_record(spec, number, dict(zip(goals, row, strict=True)))
        for number, row in enumerate(values)
    ]
    records += [_build_record(spec, trials + number, {}) for number in range(RUNNING)]
    projection.load(records)
    seconds: list[float] = []
    for number in range(len(records), len(records) + ASKS):
        started = time.perf_counter()
        suggestion = projection.propose()
        seconds.append(time.perf_counter() - started)
        record = replace(_build_record(spec, number, {}), params=suggestion.params)
        projection.observe(record)
    return AskTime(sampler, objectives, trials, median(seconds), max(seconds))


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


def time_samplers(samplers: Sequence[str], trials: int) -> list[AskTime]:
    """Time every sampler with two and with three objectives, and print a table."""
    times = [time_proposals(sampler, count, trials) for sampler in samplers for count in (2, 3)]
    print(f"| one proposal at {trials} trials | objectives | median s | slowest s |")
    print("|---|---|---|---|")
    for one in times:
        print(f"| {one.sampler} | {one.objectives} | {one.median:.3f} | {one.slowest:.3f} |")
    print()
    return times


def main() -> None:
    """Compare samplers, time proposals and print the figures."""
    options = parse_arguments(__doc__ or "", FULL, SMALL)
    _, figures = compare(options)
    samplers = [name.split()[1] for name in options.plan.contestants if name.startswith("gdpo")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = time_samplers(samplers, FEW if options.small else MANY)
    print_figures({**figures, "asks": [asdict(one) for one in times]})


if __name__ == "__main__":
    main()
