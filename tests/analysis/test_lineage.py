"""Lineages: which one training a member's policy comes from."""

from __future__ import annotations

from gdpo_tune.analysis.front import Training, trace_training
from gdpo_tune.analysis.replicates import pool_trials
from gdpo_tune.core.trial_config import Segment
from gdpo_tune.core.trials import Exploit, TrialRecord
from tests.support.analysis import GOALS, build_trial


def member(number: int, *lineage: Exploit, **fields) -> TrialRecord:
    return build_trial(number, 0.5, 0.5, role="member", lineage=lineage, **fields)


def rate(value: float) -> dict[str, float]:
    return {"learning_rate": value}


def test_a_trial_that_took_nothing_over_is_its_own_training():
    records = [build_trial(0, 1, 1), member(1)]
    for number in (0, 1):
        assert trace_training(records, number) == Training(number, records[number].params, number)


def test_a_lineage_leads_through_donors_as_they_were_at_the_time():
    records = [
        member(0, Exploit(0, 1, 30, rate(0.6))),
        member(1, Exploit(1, 2, 10, rate(0.5)), Exploit(1, 3, 40, rate(0.9))),
        member(2, Exploit(2, 0, 20, rate(0.7))),
        member(3),
    ]
    # 2 gave at 10 what it had begun with; what it took over at 20 is no part of that.
    began = records[2].params
    known = Training(2, began, 2, (Segment(10, rate(0.5)), Segment(30, rate(0.6))))
    assert trace_training(records, 0) == known
    assert trace_training(records, 1) == Training(
        3, records[3].params, 3, (Segment(40, rate(0.9)),)
    )
    assert trace_training(records, 2) == Training(
        0, records[0].params, 0, (Segment(20, rate(0.7)),)
    )


def test_a_replicate_is_the_training_of_its_original_with_its_own_seed():
    records = [
        member(0),
        member(1, Exploit(1, 0, 10, rate(0.5))),
        build_trial(2, 1, 1, replicate_of=1),
    ]
    expected = Training(0, records[0].params, 2, (Segment(10, rate(0.5)),))
    assert trace_training(records, 2) == expected


def test_a_member_that_took_over_is_a_configuration_of_its_own():
    params = {"lr": 1.0}
    records = [
        member(0, params=params),
        member(1, Exploit(1, 0, 10, rate(0.5)), params=params),
        build_trial(2, 0.5, 0.5, replicate_of=1, params=params),
        build_trial(3, 0.5, 0.5, params=params),
    ]
    assert [c.numbers for c in pool_trials(records, GOALS)] == [(0, 3), (1, 2)]
