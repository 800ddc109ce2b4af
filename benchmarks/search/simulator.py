"""Asynchronous trials in simulated time: nothing is trained, but all decisions are real.

Each of W workers trains one trial. A trial is measured at every level of the problem. There the
tuner decides whether it continues, stops, or waits for a promotion, and a free worker gets the next
trial at once. The budget counts completions when they are measured. No new trial starts once it is
spent, and trials that were not measured by then are lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, Protocol

import numpy as np
from problems import Curve, Estimates, Problem

from gdpo_tune.core.trials import Params

Verdict = Literal["continue", "stop", "pause"]
JITTER = 0.01
"""Largest relative delay of a worker, so that ties break at random."""


class Tuner(Protocol):
    """Contestant: proposes trials and judges them at their levels."""

    def start(self, number: int) -> Params:
        """Return the parameters of a new trial."""
        ...

    def judge(self, number: int, level: int, values: Estimates) -> Verdict:
        """Return the verdict on a trial that is measured before its end."""
        ...

    def finish(self, number: int, values: Estimates) -> None:
        """Record a trial that has used its full budget."""
        ...

    def promote(self) -> int | None:
        """Return a paused trial to resume; None to start a new trial."""
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
    verdict: Verdict | Literal["complete"]


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
            if self._measure(number):
                self._train(number)
            elif self._spent < budget:
                self._next_trial()
        return self.history

    def _next_trial(self) -> None:
        """Give a free worker a promoted or a new trial."""
        promoted = self._tuner.promote()
        if promoted is not None:
            self._train(promoted)
            return
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
        """Measure a trial; return whether it continues at once."""
        trial, levels = self._trials[number], self._problem.levels
        level = levels[trial.passed]
        self._spent += level - (levels[trial.passed - 1] if trial.passed else 0)
        self._spent += self._problem.evaluation_cost
        trial.passed += 1
        values = trial.curve(level)
        verdict: Verdict | Literal["complete"] = "complete"
        if level < levels[-1]:
            verdict = self._tuner.judge(number, level, values)
        else:
            self._tuner.finish(number, values)
        visit = Visit(self._spent, self._clock, number, level, values, verdict)
        self.history.visits.append(visit)
        return verdict == "continue"


def find_completed(history: History) -> Mapping[int, Visit]:
    """Return number -> last visit of every trial that used its full budget."""
    return {visit.number: visit for visit in history.visits if visit.verdict == "complete"}
