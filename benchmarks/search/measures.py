"""Figures of simulated sweeps, as pure functions of their histories.

Shapes: S seeds, B budgets, M objectives. Candidates count at their true values and not at the noisy
measurements that tuners see. They are the trials that used their full budget. If checkpoints are
candidates too, a checkpoint counts while no other candidate dominates it by its measurements: as
in a sweep, validation prompts choose it. Hypervolume is a share of the box between the references
and the best values of the objectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from problems import Problem, build_spec
from simulator import History, Visit

from gdpo_tune.analysis import pareto
from gdpo_tune.spec import Search

Floats = NDArray[np.float64]
RESAMPLES = 2000
LEAST_AT_RUNG = 3
"""Least number of trials at a level that has a worst third."""


@dataclass(frozen=True)
class Interval:
    """Median over seeds and the middle 95 % of its bootstrap, `float[B]` each."""

    value: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Share:
    """Number of hits among a number of cases."""

    hits: int
    of: int

    @property
    def value(self) -> float:
        """Share of hits; NaN without any case."""
        return self.hits / self.of if self.of else float("nan")


def trace_hypervolume(history: History, problem: Problem) -> list[tuple[int, float]]:
    """Return completions spent and the hypervolume from then on, for each change."""
    goals = build_spec(problem, Search()).list_objectives()
    box = np.prod([abs(goal.reference - problem.best[goal.name]) for goal in goals])
    points: list[list[float] | None] = []
    measured: list[Visit] = []
    steps: list[tuple[int, float]] = []
    for visit in history.visits:
        if visit.verdict != "complete" and not problem.has_checkpoints:
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
    is_end = np.array([visit.verdict == "complete" for visit in visits])
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


def count_continuations(history: History, problem: Problem) -> dict[str, Share]:
    """Count how often trials continued from a rung, by their standing there.

    `front`: no trial measured at the level by then dominates it. `worst third`: two thirds of the
    trials at the level lie on better fronts. Trials that break a constraint lie behind all others.
    """
    counts = {"front": [0, 0], "worst third": [0, 0]}
    at_level: dict[int, list[Visit]] = {}
    for visit in history.visits:
        if visit.level not in problem.rungs:
            continue
        visits = at_level.setdefault(visit.level, [])
        visits.append(visit)
        if len(visits) < LEAST_AT_RUNG:
            continue
        ranks = _rank_visits(visits, problem)
        standing = {
            "front": ranks[-1] == 0,
            "worst third": (ranks < ranks[-1]).sum() * 3 >= 2 * len(ranks),
        }
        for name, stands in standing.items():
            counts[name][0] += bool(stands and visit.verdict == "continue")
            counts[name][1] += bool(stands)
    return {name: Share(hits, of) for name, (hits, of) in counts.items()}


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
