"""Which of several unfinished trials are worth more, by dominance and never by one metric.

A trial that meets the constraints comes before one that does not; of those that do not, the one
closer to them. Those that do come front by front, and inside of a front in an order in which any
beginning covers it evenly. Everything is a loss (smaller is better); values are finite.

Shapes: T trials, M objectives, C constraints.
"""

from __future__ import annotations

import moocore
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ranks = NDArray[np.int64]


def first_in_order(
    losses: Floats, broken: Floats, rank: Ranks, candidates: NDArray[np.int64], room: int
) -> int | None:
    """Of some trials, the one that stands first in the order of all; None if that is too late.

    Only the front that it is on is laid out, and only if its place there matters.

    Args:
        losses: [T, M].
        broken: [T], total excess.
        rank: [T], see `ranks`.
        candidates: rows, at least one.
        room: a place from here on, counted from 0, is too late.

    Returns:
        Its row. Equal trials stand in the order of their rows.
    """
    lead = candidates[np.lexsort((candidates, rank[candidates], broken[candidates]))[0]]
    level = broken == broken[lead]
    ahead = np.count_nonzero((broken < broken[lead]) | (level & (rank < rank[lead])))
    if ahead >= room:
        return None
    front = np.flatnonzero(level & (rank == rank[lead]))
    asked = np.isin(front, candidates)
    if ahead + len(front) <= room and np.count_nonzero(asked) == 1:
        return int(lead)
    place = np.where(asked, net_order(losses[front]), len(losses))
    return int(front[place.argmin()]) if ahead + place.min() < room else None


def ranks(losses: Floats, broken: Floats) -> Ranks:
    """The front that each trial is on, `int[T]`, counted from 0; 0 for who breaks a constraint.

    Args:
        losses: [T, M].
        broken: [T], total excess.
    """
    rank = np.zeros(len(losses), dtype=np.int64)
    if (broken == 0).any():
        rank[broken == 0] = moocore.pareto_rank(losses[broken == 0])
    return rank


def add_rank(losses: Floats, broken: Floats, rank: Ranks) -> None:
    """Bring ranks up to date with the last trial: what `ranks` gives, but for a few comparisons.

    Whom it dominates on its front moves one front back, and pushes back others there in turn.

    Args:
        losses: [T, M].
        broken: [T], total excess.
        rank: [T], right for all but the last; changed.

    Source: Li et al. 2017, Efficient nondomination level update method for steady-state
    evolutionary multiobjective optimization.
    """
    last = len(losses) - 1
    if broken[last] > 0:
        rank[last] = 0
        return
    front = rank[dominating(losses, broken, last)].max(initial=-1) + 1
    rank[last] = front
    behind = np.flatnonzero(dominating(-losses, broken, last))
    moved = np.array([last])
    while moved.size:
        there = behind[rank[behind] == front]
        moved = there[any_dominating(losses[moved], losses[there])]
        front += 1
        rank[moved] = front


def any_dominating(some: Floats, others: Floats) -> NDArray[np.bool_]:
    """Which of the others `[B, M]` any of some `[A, M]` dominates, `bool[B]`."""
    no_worse = np.ones((len(some), len(others)), dtype=np.bool_)
    better = np.zeros_like(no_worse)
    for column, other in zip(some.T, others.T, strict=True):
        no_worse &= column[:, np.newaxis] <= other
        better |= column[:, np.newaxis] < other
    return np.logical_or.reduce(no_worse & better)


def total_excess(excess: Floats) -> Floats:
    """How far each trial is from meeting all constraints, `float[T]`; 0: it meets them.

    Each constraint counts in units of the largest excess over it, so that none drowns another.
    """
    total = np.zeros(len(excess))
    for column in np.clip(excess, 0, None).T:
        largest = column.max(initial=0)
        if largest > 0:
            total += column / largest
    return total


def dominating(losses: Floats, broken: Floats, row: int) -> NDArray[np.bool_]:
    """Which trials are better than trial `row` beyond any trade-off, `bool[T]`.

    A trial that meets the constraints dominates one that does not; of two that do not, the one with
    less total excess dominates.

    Args:
        losses: [T, M].
        broken: [T], total excess.
        row: index of the trial.
    """
    if broken[row] > 0:
        return broken < broken[row]
    no_worse, better = broken == 0, np.zeros(len(losses), dtype=np.bool_)
    # An objective at a time: numpy is slow at reducing an axis as short as M.
    for column, value in zip(losses.T, losses[row], strict=True):
        no_worse &= column <= value
        better |= column < value
    return no_worse & better


def net_order(front: Floats) -> NDArray[np.int64]:
    """Place of each member of a front in an order that covers it evenly, `int[T]`.

    First the best of each objective, then always the member farthest from those already placed
    (Euclidean, each objective scaled to [0, 1] over the front); ties go to the earlier row.

    Source: the epsilon-net of Schmucker et al. 2021, Multi-objective asynchronous successive
    halving, section 4.2.
    """
    spread = np.ptp(front, axis=0)
    scaled = (front - front.min(axis=0)) / np.where(spread > 0, spread, 1)
    order = list(dict.fromkeys(scaled.argmin(axis=0).tolist()))
    nearest = np.full(len(scaled), np.inf)
    for member in order:
        nearest = np.minimum(nearest, ((scaled - scaled[member]) ** 2).sum(axis=1))
    nearest[order] = -1
    while len(order) < len(scaled):
        member = int(nearest.argmax())
        order.append(member)
        nearest = np.minimum(nearest, ((scaled - scaled[member]) ** 2).sum(axis=1))
        nearest[member] = -1
    place = np.empty(len(scaled), dtype=np.int64)
    place[order] = np.arange(len(scaled))
    return place
