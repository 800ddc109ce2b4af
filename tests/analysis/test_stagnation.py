"""When a search gets nowhere."""

import pytest

from gdpo_tune.analysis.front import has_stagnated
from tests.support.analysis import GOALS, build_trial

START = [build_trial(0, 0.5, 0.5), build_trial(1, 0.4, 0.7)]
DOMINATED = [build_trial(n, 0.3, 0.3) for n in range(2, 5)]


def test_trials_below_the_front_do_not_move_it():
    assert not has_stagnated([*START, *DOMINATED[:2]], GOALS, 5)  # not so many yet
    assert has_stagnated([*START, *DOMINATED], GOALS, 3)
    assert not has_stagnated([*START, *DOMINATED], GOALS, 4)  # the fourth last one moved it
    assert not has_stagnated([*START, *DOMINATED], GOALS, 0)


@pytest.mark.parametrize(
    ("b", "error", "stagnated"),
    [
        (0.504, 0.0, True),  # .25 -> .252: below 1 %
        (0.506, 0.0, False),  # above 1 %, and certain
        (0.520, 0.02, True),  # above 1 %, but not above its noise
        (0.700, 0.02, False),
    ],
)
def test_a_move_counts_above_one_percent_and_above_its_noise(b, error, stagnated):
    records = [build_trial(0, 0.5, 0.5, se=error), build_trial(1, 0.5, b, se=error)]
    assert has_stagnated(records, GOALS, 1) is stagnated


def test_the_order_of_ending_counts_and_not_that_of_starting():
    late_but_good = build_trial(0, 0.9, 0.9, finished=500.0)
    others = [build_trial(n, 0.5, 0.5) for n in (1, 2, 3)]
    assert not has_stagnated([late_but_good, *others], GOALS, 2)


@pytest.mark.parametrize("state", ["pruned", "failed"])
def test_trials_without_a_result_count_as_tries(state):
    records = [*START, *(build_trial(n, 0, 0, state=state, test={}) for n in (2, 3))]
    assert has_stagnated(records, GOALS, 2)


def test_replicates_and_running_trials_neither_move_nor_count():
    replicate = build_trial(5, 0.99, 0.99, replicate_of=0)
    running = build_trial(6, 0.99, 0.99, state="running", finished=None)
    untrained = build_trial(7, 0.99, 0.99, role="untrained")
    records = [*START, *DOMINATED, replicate, running, untrained]
    assert has_stagnated(records, GOALS, 3)
    assert not has_stagnated(records, GOALS, 4)


def test_a_search_that_has_found_nothing_goes_on():
    records = [build_trial(n, 0.5, 0.5, feasible=False) for n in range(6)]
    assert not has_stagnated(records, GOALS, 3)
    assert not has_stagnated([], GOALS, 3)


def test_the_search_looks_at_validation_prompts():
    better = build_trial(2, 0.5, 0.5, test=build_trial(9, 0.9, 0.9).test)
    assert has_stagnated([*START, better], GOALS, 1)
