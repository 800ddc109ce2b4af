"""Population-based training by dominance: which member copies which donor, with which values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdpo_tune.core.trials import Exploit, Objective
from gdpo_tune.spec import Choices, PbtSettings, Uniform
from gdpo_tune.tuning.population import (
    MemberStanding,
    compute_crowding,
    decide_exploits,
    explore,
    order_members,
    perturb,
)

TWO = (Objective("a", "maximize", 0), Objective("b", "minimize", 1))
RATE = Uniform(low=1e-5, high=1e-3, log=True)
WEIGHT = Uniform(low=0.0, high=2.0)
GRID = Uniform(low=0.5, high=2.0, step=0.5)
LISTED = Choices(choices=(1, 4, 2))
DOMAINS = {
    "learning_rate": RATE,
    "reward_weights.format": WEIGHT,
    "reward_weights.length": GRID,
    "reward_weights.style": LISTED,
}
START = {
    "learning_rate": 1e-4,
    "reward_weights.format": 0.5,
    "reward_weights.length": 1.0,
    "reward_weights.style": 2,
}
USUAL = PbtSettings()
SHARE = st.sampled_from([i / 8 for i in range(9)])
POPULATIONS = st.lists(
    st.tuples(SHARE, SHARE, st.sampled_from([-1.0, 0.0, 0.5, 2.0])),
    min_size=1,
    max_size=24,
)


def build_member(number: int, a: float, b: float, violations: float = 0.0) -> MemberStanding:
    return MemberStanding(number, (a, b), START, (violations,))


def build_population(rows: Sequence[tuple[float, float, float]]) -> list[MemberStanding]:
    return [build_member(number, *row) for number, row in enumerate(rows)]


def list_numbers(members: Sequence[MemberStanding]) -> list[int]:
    return [standing.number for standing in order_members(members, TWO)]


def test_constraints_come_before_dominance():
    total = [build_member(3, 0.9, 0.1, violations=0.5), build_member(7, 0.9, 0.1, violations=0.2)]
    members = [*total, build_member(5, 0.2, 0.6), build_member(2, 0.3, 0.5)]
    assert list_numbers(members) == [2, 5, 7, 3]


def test_in_a_front_the_crowded_come_later_and_the_extremes_first():
    front = [
        build_member(0, 0.0, 0.0),
        build_member(1, 0.5, 0.5),
        build_member(2, 0.6, 0.6),
        build_member(3, 1.0, 1.0),
    ]
    assert list_numbers(front) == [0, 3, 1, 2]


def test_crowding_is_the_share_of_the_range_between_the_neighbours():
    front = np.array([[0.0, 4.0, 1.0], [1.0, 2.0, 1.0], [4.0, 0.0, 1.0]])
    assert compute_crowding(front).tolist() == [math.inf, 2.0, math.inf]
    assert compute_crowding(front[:1]).tolist() == [0.0]


@given(POPULATIONS, st.permutations(range(24)), st.sampled_from([0.1, 0.25, 0.5]))
def test_the_last_members_copy_the_first_in_any_order_of_arrival(rows, order, quantile):
    settings = PbtSettings(quantile=quantile)
    members = build_population(rows)
    exploits = decide_exploits(10, members, TWO, DOMAINS, settings, 3)
    shuffled = [members[i] for i in order if i < len(members)]
    assert decide_exploits(10, shuffled, TWO, DOMAINS, settings, 3) == exploits
    assert list_numbers(shuffled) == list_numbers(members)
    ranking = list_numbers(members)
    count = len(exploits)
    assert count == min(len(members) // 2, max(1, int(quantile * len(members))))
    assert {e.member for e in exploits} == set(ranking[len(ranking) - count :])
    assert {e.donor for e in exploits} <= set(ranking[:count])
    for exploit in exploits:
        assert (exploit.step, set(exploit.params)) == (10, set(DOMAINS))
        assert all(DOMAINS[name].contains(value) for name, value in exploit.params.items())


@given(POPULATIONS)
def test_no_member_copies_a_worse_member(rows):
    members = build_population(rows)
    by_number = {standing.number: standing for standing in members}
    for exploit in decide_exploits(10, members, TWO, DOMAINS, USUAL, 0):
        (a, b), (c, d) = by_number[exploit.donor].values, by_number[exploit.member].values
        total = [by_number[n].violations[0] for n in (exploit.donor, exploit.member)]
        donor, taker = (max(value, 0.0) for value in total)
        assert donor <= taker
        if taker == 0:
            assert not (c >= a and d <= b and (c, d) != (a, b))


def test_decisions_follow_from_seed_and_step_alone():
    members = build_population([(i / 8, i / 8, 0.0) for i in range(8)])

    def rates(step: int, seed: int) -> list[float]:
        settings = PbtSettings(quantile=0.5)
        exploits = decide_exploits(step, members, TWO, DOMAINS, settings, seed)
        return [float(exploit.params["learning_rate"]) for exploit in exploits]

    drawn = [rates(step, seed) for step in (10, 20) for seed in (0, 1)]
    assert rates(10, 0) == drawn[0]
    assert len({tuple(rates_of_seed) for rates_of_seed in drawn}) == 4
    assert len(set(drawn[0])) > 1, "each member has a chance of its own"


def test_new_values_derive_from_the_donor():
    good = MemberStanding(0, (1.0, 0.0), {"learning_rate": 2e-4})
    bad = MemberStanding(1, (0.0, 1.0), {"learning_rate": 9e-4})
    fixed = PbtSettings(quantile=0.5, factors=(1.0,), resample=0.0)
    (exploit,) = decide_exploits(5, [good, bad], TWO, DOMAINS, fixed, 0)
    assert exploit == Exploit(1, 0, 5, {"learning_rate": 2e-4})


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_without_resampling_values_move_by_the_factors(factor: float):
    settings = PbtSettings(factors=(factor,), resample=0.0)
    values = explore(START, DOMAINS, settings, np.random.default_rng(0))
    assert values["learning_rate"] == 1e-4 * factor
    assert values["reward_weights.format"] == 0.5 * factor
    up = factor > 1
    assert values["reward_weights.length"] == (1.5 if up else 0.5)
    assert values["reward_weights.style"] == (4 if up else 1)


def test_with_resampling_alone_values_cover_their_domains():
    settings = PbtSettings(factors=(1.25,), resample=1.0)
    chance = np.random.default_rng(0)
    drawn = [explore(START, DOMAINS, settings, chance) for _ in range(200)]
    rates = [values["learning_rate"] for values in drawn]
    assert min(rates) < 2e-5
    assert max(rates) > 5e-4
    assert {values["reward_weights.style"] for values in drawn} == {1, 2, 4}


@given(
    st.floats(1e-6, 10), st.sampled_from([0.1, 0.8, 1.0, 1.25, 9.0]), st.sampled_from([*DOMAINS])
)
def test_a_moved_value_stays_inside_and_never_goes_the_other_way(value, factor, name):
    domain = DOMAINS[name]
    result = float(perturb(value, factor, domain))
    assert domain.contains(result)
    if domain.contains(value):
        assert (result - value) * (factor - 1) >= 0
        at_end = result in (min(domain.list_values() or [0]), max(domain.list_values() or [0]))
        assert factor == 1 or result != value or at_end or result in (RATE.low, RATE.high, 2.0)


def test_a_population_of_at_most_one_member_makes_no_decisions():
    assert decide_exploits(1, [], TWO, DOMAINS, USUAL, 0) == ()
    assert decide_exploits(1, [build_member(0, 1, 1)], TWO, DOMAINS, USUAL, 0) == ()
