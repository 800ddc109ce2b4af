"""Asynchronous trials in simulated time: nothing is trained, but all decisions are real.

Each of W workers trains one trial to its end, and a free worker gets the next one at once. A trial
is measured at every level of the problem, and the tuner learns from each measurement. The budget
counts completions when they are measured. No new trial starts once it is spent, and trials that
were not measured by then are lost.

Candidates count at their true values and not at the noisy measurements that tuners see. They are
the trials that used their full budget. If checkpoints are candidates too, one counts while no other
candidate dominates it by its measurements: as in a sweep, validation prompts choose it. Hypervolume
is a share of the box between the references and the best values of the objectives.

Shapes: S seeds, B budgets, M objectives.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from problems import Curve, Estimates, Problem

from gdpo_tune.analysis import pareto
from gdpo_tune.core.trials import Params
from gdpo_tune.spec.model import Search

Floats = NDArray[np.float64]
JITTER = 0.01
"""Largest relative delay of a worker, so that ties break at random."""
RESAMPLES = 2000


class Tuner(Protocol):
    """Contestant: proposes trials, and learns from measurements before and at their ends."""

    def start(self, number: int) -> Params: ...
    def observe(self, number: int, level: int, values: Estimates) -> None: ...
    def finish(self, number: int, values: Estimates) -> None: ...


@dataclass(frozen=True)
class Visit:
    """Measurement of a trial at one of its levels."""

    spent: int
    """Completions of all trials by then, with those of measurements if they count."""
    time: float
    """Simulated seconds since the start."""
    number: int
    level: int
    values: Estimates
    is_end: bool
    """True if the trial has used its full budget."""


@dataclass
class History:
    """Events of one simulated sweep; trials in flight at its end have parameters, too."""

    visits: list[Visit] = field(default_factory=list)
    params: dict[int, Params] = field(default_factory=dict)
    asks: list[float] = field(default_factory=list)
    """Real seconds of each proposal."""

    def list_completed(self) -> list[int]:
        """Return the numbers of the trials that used their full budget."""
        return [visit.number for visit in self.visits if visit.is_end]


def simulate(tuner: Tuner, problem: Problem, workers: int, seed: int, budget: int) -> History:
    """Run trials of a tuner on a problem until `budget` completions are spent."""
    history, rng, levels = History(), np.random.default_rng(seed), (0, *problem.levels)
    curves: list[Curve] = []
    passed: list[int] = []
    """Number of levels at which each trial has been measured."""
    due: list[tuple[float, int]] = []
    """Time and number of the next measurement of every trial in flight."""
    clock, spent = 0.0, 0

    def train(number: int) -> None:
        start, end = levels[passed[number]], levels[passed[number] + 1]
        seconds = problem.compute_seconds(history.params[number], start, end)
        heapq.heappush(due, (clock + seconds * (1 + JITTER * rng.random()), number))

    def start_next() -> None:
        number, started = len(curves), perf_counter()
        params = tuner.start(number)
        history.asks.append(perf_counter() - started)
        history.params[number] = params
        # Its own generator: a trial does not depend on other trials.
        curves.append(problem.draw_curve(params, np.random.default_rng((seed, number))))
        passed.append(0)
        train(number)

    for _ in range(workers):
        start_next()
    while spent < budget:
        clock, number = heapq.heappop(due)
        passed[number] += 1
        level = levels[passed[number]]
        spent += level - levels[passed[number] - 1] + problem.evaluation_cost
        values, is_end = curves[number](level), level == levels[-1]
        if is_end:
            tuner.finish(number, values)
        else:
            tuner.observe(number, level, values)
        history.visits.append(Visit(spent, clock, number, level, values, is_end))
        if not is_end:
            train(number)
        elif spent < budget:
            start_next()
    return history


def trace_hypervolume(history: History, problem: Problem) -> list[tuple[int, float]]:
    """Return completions spent and the hypervolume from then on, for each change."""
    goals = problem.build_spec(Search()).list_objectives()
    box = np.prod([abs(goal.reference - problem.best[goal.name]) for goal in goals])
    points: list[list[float] | None] = []
    measured: list[Visit] = []
    steps: list[tuple[int, float]] = []
    for visit in history.visits:
        if not visit.is_end and not problem.has_checkpoints:
            continue
        truth = problem.compute_truth(history.params[visit.number], visit.level)
        is_feasible = all(bound.holds(truth[n]) for n, bound in problem.constraints.items())
        points.append([truth[goal.name] for goal in goals] if is_feasible else None)
        measured.append(visit)
        counts = _mark_candidates(measured, problem)
        counted = [p for p, counts_now in zip(points, counts, strict=True) if counts_now and p]
        volume = pareto.compute_hypervolume(counted, goals) / float(box) if counted else 0.0
        if volume != (steps[-1][1] if steps else 0.0):
            steps.append((visit.spent, volume))
    return steps


def _mark_candidates(visits: Sequence[Visit], problem: Problem) -> NDArray[np.bool_]:
    """Mark the ends of trials, and the checkpoints on the front of all measurements.

    A measurement that breaks a constraint is on the front only if all do.
    """
    is_end = np.array([visit.is_end for visit in visits])
    if is_end.all():
        return is_end
    goals = problem.build_spec(Search()).list_objectives()
    values = np.array([[visit.values[goal.name].mean for goal in goals] for visit in visits])
    holds = np.array(
        [
            all(b.holds(visit.values[name].mean) for name, b in problem.constraints.items())
            for visit in visits
        ]
    )
    among = holds if holds.any() else ~holds
    on_front = np.zeros(len(visits), dtype=bool)
    on_front[among] = pareto.rank_points(values[among], goals) == 0
    return is_end | on_front


def evaluate_at_budgets(steps: Sequence[tuple[float, float]], budgets: ArrayLike) -> Floats:
    """Return the hypervolume at each of B budgets, 0 before the first step."""
    spent = [step[0] for step in steps]
    volumes = np.array([0.0, *(step[1] for step in steps)])
    return volumes[np.searchsorted(spent, budgets, side="right")]


def compute_median(values: Floats, seed: int = 0) -> tuple[Floats, Floats, Floats]:
    """Compute the median over the seeds of `values[S, B]`, and the 95 % of its bootstrap."""
    rows = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[rows], axis=1), [2.5, 97.5], axis=0)
    return np.median(values, axis=0), low, high


def find_budget_to_reach(
    steps: Sequence[Sequence[tuple[float, float]]], target: float, budget: float
) -> float | None:
    """Return the least budget at which the median over seeds reaches `target`, or None."""
    moments = sorted({spent for seed in steps for spent, _ in seed if spent <= budget})
    if not moments:
        return None
    medians = np.median([evaluate_at_budgets(seed, moments) for seed in steps], axis=0)
    above = np.flatnonzero(medians >= target)
    return moments[above[0]] if len(above) else None
