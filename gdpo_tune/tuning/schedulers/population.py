"""Decisions of population-based training by dominance: donors and new values. Knows no Ray.

At a meeting the last members (`quantile` of them) each take over the training of one of the first
ones, drawn at random. They continue with new values: each value of the donor is either drawn again
from its domain, or multiplied by one of a few factors and clamped to the domain. Members are
ordered by the constraints, then front by front, and within a front the more crowded one is later.
Decisions depend only on the values, the seed, the step and the members' numbers.

Source: Jaderberg et al. 2017, Population based training of neural networks; Dushatskiy et al. 2023,
Multi-objective population based training; crowding: Deb et al. 2002, NSGA-II, section III.B.

Shapes: T members, M objectives, C constraints.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gdpo_tune.analysis.pareto import Floats, compute_losses
from gdpo_tune.core.trials import Exploit, Objective, Params, ParamValue
from gdpo_tune.spec import Choices, PbtSettings, Uniform
from gdpo_tune.tuning.schedulers.priority import compute_ranks, sum_excess
from gdpo_tune.tuning.search.quasi_random import map_share

MovableDomain = Choices | Uniform


@dataclass(frozen=True)
class MemberStanding:
    """Measurements and parameters of a member at a meeting."""

    number: int
    values: tuple[float, ...]
    """M, in the units and directions of the objectives."""
    params: Params
    """Present values of the movable parameters that are searched and have an effect."""
    excess: tuple[float, ...] = ()
    """C, excess over each constraint; 0 or less: it is met."""


def decide_exploits(
    step: int,
    members: Sequence[MemberStanding],
    objectives: Sequence[Objective],
    domains: Mapping[str, MovableDomain],
    settings: PbtSettings,
    seed: int,
) -> tuple[Exploit, ...]:
    """Decide which of the T members, in any order, take over from which donors.

    `domains` are those of the movable parameters, and `seed` is the sweep's.

    Returns:
        Exploits by number of the member that takes over. None of these members is a donor. A
        population of one has no exploit; any other has at least one.
    """
    ranked = order_members(members, objectives)
    count = min(len(ranked) // 2, max(1, int(settings.quantile * len(ranked))))
    exploits: list[Exploit] = []
    for member in sorted(ranked[len(ranked) - count :], key=lambda standing: standing.number):
        # a random stream for each member, so that it does not depend on the number of others
        rng = np.random.default_rng([seed, step, member.number])
        donor = ranked[int(rng.integers(count))]
        params = explore(donor.params, domains, settings, rng)
        exploits.append(Exploit(member.number, donor.number, step, params))
    return tuple(exploits)


def order_members(
    members: Sequence[MemberStanding], objectives: Sequence[Objective]
) -> list[MemberStanding]:
    """Order members from the first donor to the last; equal ones by number.

    Values are finite: the ledger accepts no others.
    """
    if not members:
        return []
    members = sorted(members, key=lambda member: member.number)
    points = compute_losses([member.values for member in members], objectives)
    excess = np.array([member.excess for member in members], dtype=float).reshape(len(members), -1)
    broken = sum_excess(excess)
    rank = compute_ranks(points, broken)
    distance = np.zeros(len(members))
    feasible = np.flatnonzero(broken == 0)
    for front in np.unique(rank[feasible]):
        rows = feasible[rank[feasible] == front]
        distance[rows] = compute_crowding(points[rows])
    return [members[row] for row in np.lexsort((-distance, rank, broken))]


def compute_crowding(front: Floats) -> NDArray[np.float64]:
    """Compute the crowding distance of each member of a front, `float[T]`.

    It is the sum over objectives of the distance between the next better and the next worse member,
    as a share of the front's range. The best and the worst of an objective get infinity. An
    objective in which all are equal does not count.
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
    domains: Mapping[str, MovableDomain],
    settings: PbtSettings,
    rng: np.random.Generator,
) -> dict[str, ParamValue]:
    """Return new values for the movable parameters, each within its domain.

    In a domain that lists its values, only a factor's direction counts.
    """
    return {
        name: map_share(domains[name], float(rng.random()))
        if rng.random() < settings.resample
        else perturb(float(value), float(rng.choice(settings.factors)), domains[name])
        for name, value in params.items()
    }


def perturb(value: float, factor: float, domain: MovableDomain) -> ParamValue:
    """Return a number times a factor, clamped to its domain.

    In a domain that lists its values, return the next one in the factor's direction.
    """
    listed = domain.list_values()
    if listed is None:
        assert isinstance(domain, Uniform)  # a choice always lists its values
        return min(max(value * factor, float(domain.low)), float(domain.high))
    numbers = sorted(listed, key=float)
    index = bisect_left(numbers, value, key=float)
    if factor > 1:
        index += index < len(numbers) and numbers[index] == value
    elif factor < 1:
        index -= 1
    return numbers[min(max(index, 0), len(numbers) - 1)]
