"""What a front says of members that are worse than no training."""

from gdpo_tune.analysis.front import build_front
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
    shortfalls = {member.name: front.list_shortfalls(member) for member in front.members}
    assert shortfalls == {"1": ["worse than untrained in b"], "2": []}


def test_the_published_baseline_counts_where_it_is_dominated():
    published, other = build_trial(1, 0.4, 0.4, role="published"), build_trial(2, 0.9, 0.2)
    on_front = build(published, other, untrained=(0.0, 0.0))
    assert [on_front.list_shortfalls(member) for member in on_front.members] == [[], []]
    beside = build(published, other, build_trial(3, 0.6, 0.6), untrained=(0.0, 0.0))
    shortfalls = {member.name: beside.list_shortfalls(member) for member in beside.members}
    assert shortfalls == {"2": ["worse than published in b"], "3": []}
