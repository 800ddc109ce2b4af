"""When a search gets nowhere, and how much rungs tell of the end."""

import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from gdpo_tune.analysis.convergence import correlate_ranks, has_stagnated, measure_agreements
from gdpo_tune.core.trials import Cost, Estimate, Objective, Rung, TrialRecord
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


OBJECTIVES = (Objective("correctness", "maximize", 0.0), Objective("length", "minimize", 1.0))


def measured(correctness: float, length: float) -> dict[str, Estimate]:
    return {"correctness": Estimate(correctness, 0.01), "length": Estimate(length, 0.01)}


def trial(
    number: int,
    early: tuple[float, float],
    late: tuple[float, float],
    state: str = "complete",
    role: str = "search",
) -> TrialRecord:
    ended = state == "complete"
    rungs = (Rung(7, measured(*early), Cost(70)), Rung(20, measured(*late), Cost(200)))
    return TrialRecord(
        number,
        role,  # type: ignore[arg-type]
        state,  # type: ignore[arg-type]
        {},
        0,
        "model",
        validation=measured(*late) if ended else {},
        rungs=rungs if ended else rungs[:1],
        cost=Cost(200 if ended else 70),
    )


def test_a_rung_that_orders_as_the_end_does_says_one():
    trials = [trial(i, (i / 10, 0.5 - i / 20), (i / 8, 0.4 - i / 20)) for i in range(6)]
    (found,) = measure_agreements(trials, OBJECTIVES)
    assert (found.completions, found.trials, found.dominated, found.front) == (70, 6, 0, 1)
    assert found.correlation == pytest.approx({"correctness": 1.0, "length": 1.0})
    assert str(found) == (
        "at 70 completions, rank correlation with final scores: correctness 1.00, length 1.00 "
        "(6 complete trials; of the 1 on their final front, 0 were dominated then)"
    )


def test_a_late_bloomer_counts_among_those_that_were_dominated():
    trials = [trial(i, (i / 10, 0.5), (i / 10, 0.5)) for i in range(5)]
    late = trial(9, (0.0, 0.9), (0.9, 0.1))
    (found,) = measure_agreements([*trials, late], OBJECTIVES)
    assert (found.dominated, found.front) == (1, 1)
    assert found.correlation["correctness"] < 1


def test_what_is_alike_everywhere_has_no_order():
    trials = [trial(i, (0.5, i / 10), (0.5, i / 10)) for i in range(5)]
    (found,) = measure_agreements(trials, OBJECTIVES)
    assert math.isnan(found.correlation["correctness"])
    assert "correctness -," in str(found)


def test_only_complete_trials_of_the_search_tell_and_five_of_them_at_least():
    four = [trial(i, (i / 10, 0.5), (i / 10, 0.5)) for i in range(4)]
    others = [
        trial(4, (0.1, 0.5), (0.1, 0.5), state="pruned"),
        trial(5, (0.1, 0.5), (0.1, 0.5), role="replicate"),
    ]
    assert measure_agreements([*four, *others], OBJECTIVES) == ()


def test_the_correlation_is_that_of_scipy_with_ties():
    generator = np.random.default_rng(0)
    one = generator.integers(0, 5, 30).astype(float)
    other = one + generator.normal(size=30)
    assert correlate_ranks(one, other) == pytest.approx(spearmanr(one, other).statistic)
