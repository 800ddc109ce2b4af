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


def first_in_order(
    losses: Floats, excess: Floats, candidates: NDArray[np.int64], room: int
) -> int | None:
    """Of some trials, the one that stands first in the order of all; None if that is too late.

    Only the front that it is on is laid out, so that a verdict costs little more than the ranks.

    Args:
        losses: [T, M].
        excess: [T, C], by how much each constraint is broken; 0 or less: it holds.
        candidates: rows, at least one.
        room: a place from here on, counted from 0, is too late.

    Returns:
        Its row. Equal trials stand in the order of their rows.
    """
    broken = total_excess(excess)
    rank = np.zeros(len(losses), dtype=np.int64)
    if (broken == 0).any():
        rank[broken == 0] = moocore.pareto_rank(losses[broken == 0])
    lead = candidates[np.lexsort((candidates, rank[candidates], broken[candidates]))[0]]
    level = broken == broken[lead]
    ahead = np.count_nonzero((broken < broken[lead]) | (level & (rank < rank[lead])))
    if ahead >= room:
        return None
    front = np.flatnonzero(level & (rank == rank[lead]))
    place = np.where(np.isin(front, candidates), net_order(losses[front]), len(losses))
    return int(front[place.argmin()]) if ahead + place.min() < room else None


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
