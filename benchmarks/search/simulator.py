"""Asynchronous trials in simulated time: nothing is trained, but all decisions are real.

Each of W workers trains one trial to its end, and a free worker gets the next one at once. A trial
is measured at every level of the problem, and the tuner learns from each measurement. The budget
counts completions when they are measured. No new trial starts once it is spent, and trials that
were not measured by then are lost.

Figures are pure functions of a history. Candidates count at their true values and not at the noisy
measurements that tuners see. They are the trials that used their full budget. If checkpoints are
candidates too, a checkpoint counts while no other candidate dominates it by its measurements: as
in a sweep, validation prompts choose it. Hypervolume is a share of the box between the references
and the best values of the objectives.

Shapes: S seeds, B budgets, M objectives.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from problems import Curve, Estimates, Problem, build_spec

from gdpo_tune.analysis import pareto
from gdpo_tune.core.trials import Params
from gdpo_tune.spec.model import Search

JITTER = 0.01
"""Largest relative delay of a worker, so that ties break at random."""


class Tuner(Protocol):
    """Contestant: proposes trials and learns from their measurements."""

    def start(self, number: int) -> Params:
        """Return the parameters of a new trial."""
        ...

    def observe(self, number: int, level: int, values: Estimates) -> None:
        """Record the values of a trial that is measured before its end."""
        ...

    def finish(self, number: int, values: Estimates) -> None:
        """Record a trial that has used its full budget."""
        ...


@dataclass(frozen=True)
class Visit:
    """Measurement of a trial at one of its levels."""

    spent: int
    """Completions of all trials by then, with those of measurements if they count."""
    time: float
    """Simulated seconds since the start."""
    number: int
    level: int
    """Completions of this trial by then."""
    values: Estimates
    is_end: bool
    """True if the trial has used its full budget."""


@dataclass
class History:
    """Events of one simulated sweep."""

    visits: list[Visit] = field(default_factory=list)
    params: dict[int, Params] = field(default_factory=dict)
    """Parameters of every trial that started, including those in flight at the end."""
    asks: list[float] = field(default_factory=list)
    """Real seconds of each proposal."""


@dataclass
class _Running:
    params: Params
    curve: Curve
    passed: int = 0
    """Number of levels at which the trial has been measured."""


class Simulation:
    """One sweep of a tuner on a problem; `run` it once."""

    def __init__(self, tuner: Tuner, problem: Problem, workers: int, seed: int) -> None:
        self.history = History()
        self._tuner = tuner
        self._problem = problem
        self._workers = workers
        self._rng = np.random.default_rng(seed)
        self._seed = seed
        self._trials: dict[int, _Running] = {}
        self._due: list[tuple[float, int]] = []
        """Time and number of the next measurement of every trial in flight."""
        self._clock = 0.0
        self._spent = 0

    def run(self, budget: int) -> History:
        """Run trials until `budget` completions are spent."""
        for _ in range(self._workers):
            self._next_trial()
        while self._spent < budget:
            self._clock, number = heapq.heappop(self._due)
            if not self._measure(number):
                self._train(number)
            elif self._spent < budget:
                self._next_trial()
        return self.history

    def _next_trial(self) -> None:
        """Give a free worker a new trial."""
        number = len(self._trials)
        started = perf_counter()
        params = self._tuner.start(number)
        self.history.asks.append(perf_counter() - started)
        self.history.params[number] = params
        # Its own generator: a trial does not depend on other trials.
        own = np.random.default_rng((self._seed, number))
        self._trials[number] = _Running(params, self._problem.draw_curve(params, own))
        self._train(number)

    def _train(self, number: int) -> None:
        """Start to train a trial towards its next level."""
        trial, levels = self._trials[number], (0, *self._problem.levels)
        start, end = levels[trial.passed], levels[trial.passed + 1]
        seconds = self._problem.compute_seconds(trial.params, start, end)
        due = self._clock + seconds * (1 + JITTER * self._rng.random())
        heapq.heappush(self._due, (due, number))

    def _measure(self, number: int) -> bool:
        """Measure a trial; return whether that was its end."""
        trial, levels = self._trials[number], self._problem.levels
        level = levels[trial.passed]
        self._spent += level - (levels[trial.passed - 1] if trial.passed else 0)
        self._spent += self._problem.evaluation_cost
        trial.passed += 1
        values = trial.curve(level)
        is_end = level == levels[-1]
        if is_end:
            self._tuner.finish(number, values)
        else:
            self._tuner.observe(number, level, values)
        visit = Visit(self._spent, self._clock, number, level, values, is_end)
        self.history.visits.append(visit)
        return is_end


def find_completed(history: History) -> Mapping[int, Visit]:
    """Return number -> last visit of every trial that used its full budget."""
    return {visit.number: visit for visit in history.visits if visit.is_end}


Floats = NDArray[np.float64]
RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """Median over seeds and the middle 95 % of its bootstrap, `float[B]` each."""

    value: Floats
    low: Floats
    high: Floats


def trace_hypervolume(history: History, problem: Problem) -> list[tuple[int, float]]:
    """Return completions spent and the hypervolume from then on, for each change."""
    goals = build_spec(problem, Search()).list_objectives()
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
    """Mark the ends of trials, and the checkpoints on the front of all measurements."""
    is_end = np.array([visit.is_end for visit in visits])
    return is_end if is_end.all() else is_end | (_rank_visits(visits, problem) == 0)


def evaluate_at_budgets(steps: Sequence[tuple[float, float]], budgets: ArrayLike) -> Floats:
    """Return the hypervolume at each of B budgets, 0 before the first step."""
    spent = [step[0] for step in steps]
    volumes = np.array([0.0, *(step[1] for step in steps)])
    return volumes[np.searchsorted(spent, budgets, side="right")]


def compute_median(values: Floats, seed: int = 0) -> Interval:
    """Compute the median over the seeds of `values[S, B]`, with a bootstrap over seeds."""
    rows = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    drawn = np.median(values[rows], axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return Interval(np.median(values, axis=0), low, high)


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


def _rank_visits(visits: Sequence[Visit], problem: Problem) -> NDArray[np.int64]:
    goals = build_spec(problem, Search()).list_objectives()
    values = [[visit.values[goal.name].mean for goal in goals] for visit in visits]
    ranks = pareto.rank_points(values, goals)
    broken = np.array([_breaks_constraint(visit, problem) for visit in visits])
    if broken.all() or not broken.any():
        return ranks
    ranks[~broken] = pareto.rank_points(np.array(values)[~broken], goals)
    ranks[broken] = ranks[~broken].max() + 1
    return ranks


def _breaks_constraint(visit: Visit, problem: Problem) -> bool:
    return not all(b.holds(visit.values[name].mean) for name, b in problem.constraints.items())
