"""Base class of the schedulers, and the order of trials by dominance that they share.

A trial that meets the constraints comes before one that does not; among infeasible trials, the
closer one comes first. Feasible trials are ordered front by front. Within a front, every prefix of
the order covers the front evenly. No metric is preferred.

Shapes: T trials, M objectives, C constraints. `losses` `[T, M]` are finite, and smaller is better;
`total` is the total violation of each trial `[T]`; `rank` is as from `compute_ranks`.
"""

from __future__ import annotations

from typing import Literal

import moocore
import numpy as np
from numpy.typing import NDArray

from gdpo_tune.analysis.pareto import Floats
from gdpo_tune.core.trials import Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.trial_encoding import compute_violation
from gdpo_tune.spec import SweepSpec

Verdict = Literal["continue", "stop", "pause"]
Ranks = NDArray[np.int64]
MAX_NAMED = 3
"""Number of dominating trials that an explanation names."""


class Scheduler:
    """Scheduler `fifo`: every trial runs to its end. Subclasses override its decisions.

    They leave trials of other roles than `search`, such as baselines and replicates, to their end.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def list_evaluation_steps(self, record: TrialRecord) -> tuple[int, ...]:
        """Return the steps at which a trial must be evaluated."""
        return ()

    def decide(self, record: TrialRecord, rung: Rung) -> Verdict:
        """Return the verdict on a trial after an evaluation, `rung`, that is in the ledger.

        Evaluations at other steps than those of `list_evaluation_steps` come here too.
        A new process decides every rung again in the order of their recording, except those for
        `replay`. A second call for the same rung gives the same answer.
        """
        return "continue"

    def replay(self, record: TrialRecord, rung: Rung) -> None:
        """Take in a rung of a trial that has ended, which needs no verdict any more."""

    def find_promotable(self) -> int | None:
        """Return the waiting trial that may continue now."""
        return None

    def find_ending(self) -> tuple[int, str] | None:
        """Return a waiting trial that ends where it waits, and why; no other one can go on."""
        return None

    def promote(self, number: int) -> None:
        """Note that a trial no longer waits."""

    def explain(self, number: int, rung: Rung) -> str:
        """Explain in one line why a trial does not continue from a rung."""
        return f"stopped at rung {rung.completions:,}"


def read_values(spec: SweepSpec, rung: Rung) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the M values of the objectives, and the C violations; 0 or less: it is met."""
    means = {name: metric.mean for name, metric in rung.validation.items()}
    violations = (compute_violation(bound, means[name]) for name, bound in spec.constraints.items())
    return tuple(means[name] for name in spec.objectives), tuple(violations)


def find_first(
    losses: Floats, total: Floats, rank: Ranks, rows: NDArray[np.int64], quota: int
) -> int | None:
    """Return which of some rows is first in the order of all trials; None if beyond the quota.

    There is at least one row. Equal trials stand in the order of their rows. Only the front of the
    first row is ordered, and only if the place within it matters.
    """
    lead = rows[np.lexsort((rows, rank[rows], total[rows]))[0]]
    level = total == total[lead]
    ahead = np.count_nonzero((total < total[lead]) | (level & (rank < rank[lead])))
    if ahead >= quota:
        return None
    front = np.flatnonzero(level & (rank == rank[lead]))
    is_listed = np.isin(front, rows)
    if ahead + len(front) <= quota and np.count_nonzero(is_listed) == 1:
        return int(lead)
    place = np.where(is_listed, order_evenly(losses[front]), len(losses))
    return int(front[place.argmin()]) if ahead + place.min() < quota else None


def compute_ranks(losses: Floats, total: Floats) -> Ranks:
    """Compute the front of each trial, `int[T]`, counted from 0; 0 for an infeasible trial."""
    rank = np.zeros(len(losses), dtype=np.int64)
    if (total == 0).any():
        rank[total == 0] = moocore.pareto_rank(losses[total == 0])
    return rank


def update_ranks(losses: Floats, total: Floats, rank: Ranks) -> None:
    """Update in place ranks that are right for all but the last trial, with few comparisons.

    Trials of its front that it dominates move one front back, and push others there back in turn.

    Source: Li et al. 2017, Efficient nondomination level update method for steady-state
    evolutionary multiobjective optimization.
    """
    last = len(losses) - 1
    if total[last] > 0:
        rank[last] = 0
        return
    front = rank[find_dominating(losses, total, last)].max(initial=-1) + 1
    rank[last] = front
    behind = np.flatnonzero(find_dominating(-losses, total, last))
    moved = np.array([last])
    while moved.size:
        peers = behind[rank[behind] == front]
        moved = peers[find_dominated(losses[moved], losses[peers])]
        front += 1
        rank[moved] = front


def find_dominated(some: Floats, others: Floats) -> NDArray[np.bool_]:
    """Find which of the others `[B, M]` any of some `[A, M]` dominates, `bool[B]`."""
    no_worse = np.ones((len(some), len(others)), dtype=np.bool_)
    better = np.zeros_like(no_worse)
    for column, other in zip(some.T, others.T, strict=True):
        no_worse &= column[:, np.newaxis] <= other
        better |= column[:, np.newaxis] < other
    return np.logical_or.reduce(no_worse & better)


def sum_violations(violations: Floats) -> Floats:
    """Sum each trial's violations `[T, C]` over all constraints, `float[T]`; 0: it meets them.

    The largest violation of a constraint is its unit, so that no constraint outweighs another.
    """
    total = np.zeros(len(violations))
    for column in np.clip(violations, 0, None).T:
        largest = column.max(initial=0)
        if largest > 0:
            total += column / largest
    return total


def find_dominating(losses: Floats, total: Floats, row: int) -> NDArray[np.bool_]:
    """Find the trials that dominate trial `row`, `bool[T]`.

    A feasible trial dominates an infeasible one; of two infeasible ones, the one with less total
    violation dominates.
    """
    if total[row] > 0:
        return total < total[row]
    no_worse, better = total == 0, np.zeros(len(losses), dtype=np.bool_)
    # one objective at a time: numpy is slow at reducing an axis as short as M
    for column, value in zip(losses.T, losses[row], strict=True):
        no_worse &= column <= value
        better |= column < value
    return no_worse & better


def order_evenly(front: Floats) -> NDArray[np.int64]:
    """Order a front so that every prefix covers it evenly; return each member's place, `int[T]`.

    First the best of each objective, then always the member farthest from those already placed
    (Euclidean, each objective scaled to [0, 1] over the front); ties go to the earlier row.

    Source: the epsilon-net of Schmucker et al. 2021, Multi-objective asynchronous successive
    halving, section 4.2.
    """
    spread = np.ptp(front, axis=0)
    scaled = (front - front.min(axis=0)) / np.where(spread > 0, spread, 1)
    order = list(dict.fromkeys(scaled.argmin(axis=0).tolist()))
    nearest = np.full(len(scaled), np.inf)
    for index in range(len(scaled)):
        if index == len(order):
            order.append(int(nearest.argmax()))
        member = order[index]
        nearest = np.minimum(nearest, ((scaled - scaled[member]) ** 2).sum(axis=1))
        nearest[member] = -1
    place = np.empty(len(scaled), dtype=np.int64)
    place[order] = np.arange(len(scaled))
    return place
