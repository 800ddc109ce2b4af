"""What a front says of members that are worse than no training."""

from gdpo_tune.analysis.front import build_front
from gdpo_tune.core.metrics import estimate_metrics
from gdpo_tune.core.trials import Estimate
from tests.support.analysis import GOALS, build_trial


def build(*trials, untrained=(0.5, 0.5), **fields):
    baseline = build_trial(0, *untrained, role="untrained", **fields)
    return build_front([baseline, *trials], GOALS)


def test_the_knee_keeps_what_the_untrained_policy_has():
    trials = [build_trial(1, 0.95, 0.1), build_trial(2, 0.45, 0.9), build_trial(4, 0.05, 0.95)]
    keeps = build_trial(3, 0.52, 0.52)
    assert build(*trials, keeps, untrained=(0.0, 0.0)).knee.name == "2"
    front = build(*trials, keeps)
    assert (front.knee.name, front.knee_shortfall) == ("3", [])


def test_within_noise_is_enough_where_no_member_keeps_everything():
    front = build(build_trial(1, 0.9, 0.1), build_trial(2, 0.48, 0.8), build_trial(3, 0.1, 0.9))
    assert (front.knee.name, front.knee_shortfall) == ("2", ["a"])


def test_the_knee_says_in_what_it_is_worse_than_no_training():
    front = build(build_trial(1, 0.9, 0.1), build_trial(2, 0.3, 0.8), build_trial(3, 0.1, 0.9))
    assert (front.knee.name, front.knee_shortfall) == ("2", ["a"])


def test_without_the_untrained_policy_every_member_may_be_the_knee():
    front = build_front(
        [build_trial(1, 0.9, 0.1), build_trial(2, 0.3, 0.8), build_trial(3, 0.1, 0.9)], GOALS
    )
    assert (front.knee.name, front.knee_shortfall) == ("2", [])


def test_a_member_names_the_objectives_in_which_it_is_clearly_worse():
    front = build(build_trial(1, 0.9, 0.1), build_trial(2, 0.48, 0.8))
    shortfalls = {member.name: front.find_shortfalls(member) for member in front.members}
    assert shortfalls == {"1": {"untrained": ["b"]}, "2": {}}


def test_the_published_baseline_counts_where_it_is_dominated():
    published, other = build_trial(1, 0.4, 0.4, role="published"), build_trial(2, 0.9, 0.2)
    on_front = build(published, other, untrained=(0.0, 0.0))
    assert [on_front.find_shortfalls(member) for member in on_front.members] == [{}, {}]
    beside = build(published, other, build_trial(3, 0.6, 0.6), untrained=(0.0, 0.0))
    shortfalls = {member.name: beside.find_shortfalls(member) for member in beside.members}
    assert shortfalls == {"2": {"published": ["b"]}, "3": {}}


def test_marks_allow_for_the_number_of_policies_that_are_compared():
    """Source: of 40 equal policies, the worst trails another by 3 errors in most sweeps."""
    trials = [build_trial(number, 0.5, 0.9) for number in range(1, 40)]
    for gap, is_marked in ((3.0, False), (4.0, True)):
        worse = build_trial(40, 0.5 - gap * 0.02 * 2**0.5, 0.95)
        front = build(*trials, worse, untrained=(0.5, 0.5))
        member = next(c for c in front.configurations if c.first == 40)
        assert front.find_shortfalls(member) == ({"untrained": ["a"]} if is_marked else {})
        assert (member in front.list_ties("a")) != (gap > 4.5)


def test_a_policy_that_is_always_right_may_be_tied():
    """Source: Wilson 1927: 32 of 32 leaves .893, which 31 of 32 does not exclude."""
    outcomes = {"1": [1.0] * 32, "2": [1.0] * 31 + [0.0], "3": [1.0] * 64 + [0.0] * 64}
    values = {name: estimate_metrics({"m": row}, 1, 0)["m"] for name, row in outcomes.items()}
    trials = [
        build_trial(int(name), 0, 0, test={"a": value, "b": Estimate(0.5, 0.0)})
        for name, value in values.items()
    ]
    front = build_front(trials, GOALS)
    assert [c.name for c in front.list_ties("a")] == ["2"]
    assert 0 < front.configurations[0].probability < 1
