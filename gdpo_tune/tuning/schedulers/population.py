"""Population-based training by dominance: who takes over from whom, with which new values.

When the members of a population meet, the last ones (`quantile` of them) each take over the
training of one of the first ones, drawn at random, and go on with new values: those of the donor,
each either drawn anew from its domain or multiplied by one of a few factors inside of it. Members
are ordered by the constraints, then front by front, and in a front the more crowded one is the
later. Decisions follow from the values, the seed, the step and the members' numbers alone. Knows no
Ray.

Source: Jaderberg et al. 2017, Population based training of neural networks; Dushatskiy et al. 2023,
Multi-objective population based training; crowding: Deb et al. 2002, NSGA-II, section III.B.

Shapes: T members, M objectives, C constraints.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import moocore
import numpy as np
from numpy.typing import NDArray

from gdpo_tune.analysis.pareto import Floats, losses
from gdpo_tune.core.trials import Exploit, Objective, Params, ParamValue
from gdpo_tune.spec import Choice, Uniform
from gdpo_tune.tuning.schedulers.priority import total_excess
from gdpo_tune.tuning.search.quasi_random import at

Range = Choice | Uniform


@dataclass(frozen=True)
class Standing:
    """A member as it arrives."""

    number: int
    values: tuple[float, ...]
    """M, in the units and directions of the objectives."""
    params: Params
    """Present values of all that moves."""
    excess: tuple[float, ...] = ()
    """C, by how much each constraint is broken; 0 or less: it holds."""


@dataclass(frozen=True)
class Exploration:
    """How values move."""

    quantile: float
    """Share of the population that takes over, and that is taken over from; at most half."""
    factors: Sequence[float]
    """A value is multiplied by one of these; where only certain values are allowed, it moves to the
    next one in that direction."""
    resample: float
    """Probability with which a value is drawn anew instead."""
    seed: int


def decide(
    step: int,
    members: Sequence[Standing],
    objectives: Sequence[Objective],
    domains: Mapping[str, Range],
    exploration: Exploration,
) -> tuple[Exploit, ...]:
    """Who takes over from whom.

    Args:
        step: at which they meet.
        members: T of them, in any order.
        objectives: M of them.
        domains: of all that moves.
        exploration: how.

    Returns:
        By number of the member that takes over. No donor is among those: a population of one has
        nothing to decide, any other has at least one exploit.
    """
    ranked = ordered(members, objectives)
    count = min(len(ranked) // 2, max(1, int(exploration.quantile * len(ranked))))
    if not count:
        return ()
    exploits: list[Exploit] = []
    for member in sorted(ranked[-count:], key=lambda standing: standing.number):
        # A stream of its own: what befalls one member does not hang on how many others there are.
        chance = np.random.default_rng([exploration.seed, step, member.number])
        donor = ranked[int(chance.integers(count))]
        params = explore(donor.params, domains, exploration, chance)
        exploits.append(Exploit(member.number, donor.number, step, params))
    return tuple(exploits)


def ordered(members: Sequence[Standing], objectives: Sequence[Objective]) -> list[Standing]:
    """Members, the first to be taken over from first; equal ones by number.

    Values are finite: the ledger takes no others.
    """
    if not members:
        return []
    members = sorted(members, key=lambda member: member.number)  # ties do not hang on who is first
    points = losses([member.values for member in members], objectives)
    excess = np.array([member.excess for member in members], dtype=float).reshape(len(members), -1)
    broken = total_excess(excess)
    rank = np.zeros(len(members), dtype=np.int64)
    distance = np.zeros(len(members))
    feasible = np.flatnonzero(broken == 0)
    if len(feasible):
        rank[feasible] = moocore.pareto_rank(points[feasible])
    for front in np.unique(rank[feasible]):
        rows = feasible[rank[feasible] == front]
        distance[rows] = crowding_distance(points[rows])
    return [members[row] for row in np.lexsort((-distance, rank, broken))]


def crowding_distance(front: Floats) -> NDArray[np.float64]:
    """How far the neighbours of each member of a front lie apart, `float[T]`.

    The sum over objectives of the distance between the next better and the next worse, as a share
    of the front's range; infinite for the best and the worst of an objective. One in which all are
    equal says nothing.
    """
    distance = np.zeros(len(front))
    for column in front.T:
        spread = float(np.ptp(column))
        if not spread:
            continue
        order = np.argsort(column, kind="stable")
        distance[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / spread
        distance[order[[0, -1]]] = np.inf
    return distance


def explore(
    params: Params,
    domains: Mapping[str, Range],
    exploration: Exploration,
    chance: np.random.Generator,
) -> dict[str, ParamValue]:
    """New values for all that moves, each inside of its domain."""
    return {
        name: at(domains[name], float(chance.random()))
        if chance.random() < exploration.resample
        else moved(float(value), float(chance.choice(exploration.factors)), domains[name])
        for name, value in params.items()
    }


def moved(value: float, factor: float, domain: Range) -> ParamValue:
    """A number times a factor, held inside of its domain.

    Of a domain that lists its values it is the next one in the factor's direction.
    """
    listed = domain.values()
    if listed is None:
        assert isinstance(domain, Uniform)  # a choice always lists its values
        return min(max(value * factor, float(domain.low)), float(domain.high))
    numbers = sorted(listed, key=float)
    place = bisect_left(numbers, value, key=float)
    if factor > 1:
        place += place < len(numbers) and numbers[place] == value
    elif factor < 1:
        place -= 1
    return numbers[min(max(place, 0), len(numbers) - 1)]
