"""When a search gets nowhere: the hypervolume has not moved, beyond what noise does."""

import pytest

from gdpo_tune.analysis.stagnation import has_stagnated
from tests.support.analysis import GOALS, trial

START = [trial(0, 0.5, 0.5), trial(1, 0.4, 0.7)]
DOMINATED = [trial(n, 0.3, 0.3) for n in range(2, 5)]


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
    records = [trial(0, 0.5, 0.5, se=error), trial(1, 0.5, b, se=error)]
    assert has_stagnated(records, GOALS, 1) is stagnated


def test_the_order_of_ending_counts_and_not_that_of_starting():
    late_but_good = trial(0, 0.9, 0.9, finished=500.0)
    others = [trial(n, 0.5, 0.5) for n in (1, 2, 3)]
    assert not has_stagnated([late_but_good, *others], GOALS, 2)


@pytest.mark.parametrize("state", ["pruned", "failed"])
def test_trials_without_a_result_count_as_tries(state):
    records = [*START, *(trial(n, 0, 0, state=state, test={}) for n in (2, 3))]
    assert has_stagnated(records, GOALS, 2)


def test_replicates_and_running_trials_neither_move_nor_count():
    replicate = trial(5, 0.99, 0.99, of=0)
    running = trial(6, 0.99, 0.99, state="running", finished=None)
    untrained = trial(7, 0.99, 0.99, role="untrained")
    records = [*START, *DOMINATED, replicate, running, untrained]
    assert has_stagnated(records, GOALS, 3)
    assert not has_stagnated(records, GOALS, 4)


def test_a_search_that_has_found_nothing_goes_on():
    records = [trial(n, 0.5, 0.5, feasible=False) for n in range(6)]
    assert not has_stagnated(records, GOALS, 3)
    assert not has_stagnated([], GOALS, 3)


def test_the_search_looks_at_validation_prompts():
    better = trial(2, 0.5, 0.5, test=trial(9, 0.9, 0.9).test)
    assert has_stagnated([*START, better], GOALS, 1)
