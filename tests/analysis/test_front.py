"""The front: knee, extremes, baselines, and origins of its candidates."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gdpo_tune.analysis.comparison import build_arm
from gdpo_tune.analysis.effects import Dimension, Effects, estimate_effects
from gdpo_tune.analysis.front import (
    build_front,
    find_extremes,
    find_knee,
    find_parents,
    has_stagnated,
    is_above,
    subtract_estimates,
    summarize_origins,
)
from gdpo_tune.core.metrics import estimate_mean, estimate_metrics
from gdpo_tune.core.trials import (
    Cost,
    Estimate,
    Objective,
    Rung,
    title_candidate,
)
from gdpo_tune.results.wording import describe_findings, describe_origins
from tests.support.analysis import GOALS, build_checkpoint, build_merge, build_trial

UP = [Objective("a", "maximize", 0.0), Objective("b", "maximize", 0.0)]


def test_an_empty_front_has_neither_knee_nor_extremes():
    assert find_knee([], UP) is None
    assert find_extremes([], UP) == {}


def test_one_point_is_everything():
    assert find_knee([[0.3, 0.4]], UP) == 0
    assert find_extremes([[0.3, 0.4]], UP) == {"a": 0, "b": 0}


def test_the_knee_of_a_bent_front():
    front = [[0.0, 1.0], [0.5, 0.9], [0.9, 0.8], [1.0, 0.0]]
    assert find_knee(front, UP) == 2
    assert find_extremes(front, UP) == {"a": 3, "b": 0}


def test_minimised_objectives():
    front = [[0.0, 1.0], [0.1, 0.1], [1.0, 0.0]]
    down = [Objective("a", "minimize", 1.0), Objective("b", "minimize", 1.0)]
    assert find_knee(front, down) == 1
    assert find_extremes(front, down) == {"a": 0, "b": 2}


@given(st.lists(st.floats(0.02, 1.55), min_size=1, max_size=8, unique=True))
def test_for_two_objectives_the_knee_is_farthest_from_the_line_of_the_extremes(angles):
    # Points on a quarter circle: all are on the front, the ends are the extremes.
    front = np.array([[np.cos(t), np.sin(t)] for t in [0.0, *angles, np.pi / 2]])
    distances = np.abs(front.sum(axis=1) - 1) / np.sqrt(2)
    assume(np.sort(distances)[-1] - np.sort(distances)[-2] > 1e-6)
    assert find_knee(front, UP) == int(np.argmax(distances))


@given(st.permutations(range(5)), st.floats(0.1, 50), st.floats(-5, 5))
def test_units_and_order_do_not_move_the_knee(order, scale, shift):
    front = np.array([[0, 1.0], [0.3, 0.95], [0.7, 0.8], [0.9, 0.4], [1.0, 0]])
    moved = front[order] * [scale, 1] + [shift, 0]
    assert order[find_knee(moved, UP)] == find_knee(front, UP)


def test_ties_go_to_the_balanced_point():
    three = [*UP, Objective("c", "maximize", 0.0)]
    front = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.5, 0.5, 0.5], [0.9, 0.5, 0.1]]
    assert find_knee(front, three) == 3


def test_a_tie_in_one_objective_goes_to_the_point_better_in_the_others():
    three = [*UP, Objective("c", "maximize", 0.0)]
    front = [[1.0, 0.0, 0.3], [1.0, 0.5, 0.2], [0.0, 1.0, 1.0]]
    assert find_extremes(front, three)["a"] == 1


@pytest.mark.parametrize("count", [1, 3, 4])
def test_any_number_of_objectives(count):
    objectives = [Objective(str(i), "maximize", 0.0) for i in range(count)]
    corners = np.eye(count)
    assert find_extremes(corners, objectives) == {str(i): i for i in range(count)}
    assert find_knee(corners, objectives) == 0


def test_an_extreme_is_no_compromise_unless_there_is_nothing_else():
    three = [*UP, Objective("c", "maximize", 0.0)]
    best_in_two, other_end, between = [0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.4]
    assert find_knee([best_in_two, other_end, between], three) == 2
    assert find_knee([other_end, best_in_two], three) == 1


def test_a_difference_of_shares_has_the_published_interval():
    """Source: Newcombe 1998, table II, method 10: 56 of 70 and 48 of 80."""
    one, other = (
        estimate_mean(share, math.sqrt(share * (1 - share) / count), count, 0.0, 1.0)
        for share, count in ((0.8, 70), (0.6, 80))
    )
    found = subtract_estimates(one, other)
    assert found.mean == pytest.approx(0.2)
    # Towards the ends, limits are a little wider than Wilson's.
    assert (found.low, found.high) == pytest.approx((0.0524, 0.3339), abs=4e-3)


def test_the_gain_of_the_best_of_equal_policies_is_mostly_no_gain():
    """Dunnett 1955: the best of many against one control; nominal .05."""
    rng, rounds, policies, prompts = np.random.default_rng(0), 400, 40, 128
    found = {1: 0, policies: 0}
    for _ in range(rounds):
        shares = rng.binomial(prompts, 0.7, size=policies + 1) / prompts
        best, untrained = (
            estimate_mean(share, math.sqrt(share * (1 - share) / prompts), prompts, 0.0, 1.0)
            for share in (float(shares[1:].max()), float(shares[0]))
        )
        for comparisons in found:
            found[comparisons] += is_above(best, untrained, comparisons)
    assert found[1] > 0.2 * rounds
    assert found[policies] <= 0.05 * rounds


def test_a_card_speaks_for_all_policies_objectives_and_baselines_together():
    records = [
        replace(build_trial(0, 0.3, 0.3), role="untrained"),
        *(build_trial(number, 0.3 + 0.1 * number, 0.9 - 0.1 * number) for number in (1, 2, 3)),
    ]
    front = build_front(records, GOALS)
    assert front.comparisons == len(GOALS) * len(front.baselines) * len(front.configurations)


@pytest.mark.parametrize(("comparisons", "errors"), [(1, 1.96), (40, 3.22), (120, 3.52)])
def test_more_comparisons_ask_for_a_larger_difference(comparisons, errors):
    """Source: Sidak 1967: each of m holds at .95^(1/m)."""
    reach = errors * math.hypot(0.03, 0.04)
    low = Estimate(0.5, 0.04)
    assert is_above(Estimate(0.5 + 1.01 * reach, 0.03), low, comparisons)
    assert not is_above(Estimate(0.5 + 0.99 * reach, 0.03), low, comparisons)


def test_a_spread_of_few_seeds_widens_the_difference_from_what_is_known():
    """Source: Stoline and Ury 1979, table 3, at 5 degrees; Sidak 1967 where errors are known."""
    known, of_seeds = Estimate(0.4, 0.02), Estimate(0.5, 0.02, df=5)
    for one, other in ((of_seeds, known), (known, of_seeds)):
        width = [subtract_estimates(one, other, count) for count in (1, 3)]
        wider = (width[1].high - width[1].low) / (width[0].high - width[0].low)
        assert wider == pytest.approx(3.4 / 2.571, abs=0.01)
        assert width[0].df == 5
    both = [subtract_estimates(known, known, count) for count in (1, 3)]
    assert (both[1].mean - both[1].low) / (both[0].mean - both[0].low) == pytest.approx(
        2.388 / 1.96, abs=0.01
    )


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


TRAINING = Cost(completions=3840, cpu_seconds=60.0, evaluation_completions=512)
EVALUATION = Cost(cpu_seconds=2.0, evaluation_completions=256)
END = (Rung(60, {}, TRAINING),)
UNTRAINED = build_trial(0, 0.1, 0.1, role="untrained", cost=EVALUATION)
ENDS = [
    UNTRAINED,
    build_trial(1, 0.8, 0.2, cost=TRAINING, rungs=END),
    build_trial(2, 0.2, 0.8, cost=TRAINING, rungs=END),
    build_trial(3, 0.1, 0.1, cost=TRAINING, rungs=END, state="failed", test={}),
]
CANDIDATES = [
    build_checkpoint(4, 0.4, 0.4, (1, 40), cost=EVALUATION),
    build_checkpoint(5, 0.3, 0.3, (2, 20), cost=EVALUATION),
    build_merge(6, 0.6, 0.6, (1, 60, 0.5), (2, 60, 0.5), cost=EVALUATION),
    build_merge(7, 0.6, 0.6, (1, 60, 0.5), (2, 60, 0.5), replicate_of=6, role="replicate"),
    build_merge(8, 0.1, 0.1, (1, 40, 0.5), (2, 30, 0.5), state="pruned", test={}),
]
RECORDS = [*ENDS, *CANDIDATES]


def test_shares_are_nested_and_sum_to_1():
    ends, checkpoints, merges = summarize_origins(build_front(RECORDS, GOALS))
    # Two boxes of .8 x .2 share .2 x .2; the checkpoint adds .2 x .2; the merge reaches .6 x .6.
    assert ends.hypervolume == pytest.approx(0.28)
    assert checkpoints.hypervolume == pytest.approx(0.32)
    assert merges.hypervolume == pytest.approx(0.44)
    assert [o.share for o in (ends, checkpoints, merges)] == pytest.approx(
        [0.28 / 0.44, 0.04 / 0.44, 0.12 / 0.44]
    )
    # The checkpoint adds to the ends, although the merge dominates it.
    assert [o.members for o in (ends, checkpoints, merges)] == [2, 0, 1]


def test_costs_are_of_all_trials_of_a_kind():
    ends, checkpoints, merges = summarize_origins(build_front(RECORDS, GOALS))
    assert (ends.trials, ends.cost.completions, ends.cost.evaluation_completions) == (
        3,
        11520,
        1536,
    )
    assert (checkpoints.trials, checkpoints.cost.completions) == (2, 0)
    assert checkpoints.cost.evaluation_completions == 512
    assert (merges.trials, merges.cost.cpu_seconds) == (3, 2.0)
    lines = describe_origins(build_front(RECORDS, GOALS))
    assert lines[0] == (
        "final policies give 64 % of the hypervolume (2 on the front): 3 trials, 11,520 "
        "completions in training, 1,536 in evaluations, 3 min 00 s of CPU time"
    )
    assert lines[2].startswith("merges add 27 % of the hypervolume (1 on the front): 3 trials, 0")


def test_completions_beyond_the_first_rung_count_apart():
    rungs = (Rung(20, {}, Cost(completions=1280)), Rung(40, {}, Cost(completions=2560)))
    waited = [
        replace(r, rungs=rungs, paused_at=2560) if r.number == ENDS[-1].number else r
        for r in RECORDS
    ]
    beyond = ENDS[-1].cost.completions - 1280
    assert summarize_origins(build_front(waited, GOALS))[0].continued == beyond > 0
    assert (
        f"({beyond:,} of them beyond the first rung)"
        in describe_origins(build_front(waited, GOALS))[0]
    )


def test_a_sweep_of_trainings_alone_has_no_other_origin():
    assert summarize_origins(build_front(ENDS, GOALS)) == ()
    assert summarize_origins(build_front([], GOALS)) == ()


def test_a_kind_without_trials_is_left_out_and_no_hypervolume_has_no_shares():
    front = build_front([*ENDS, CANDIDATES[2]], GOALS)
    assert [origin.kind for origin in summarize_origins(front)] == ["ends", "merges"]
    hopeless = [replace(record, feasible=False) for record in RECORDS]
    assert {origin.share for origin in summarize_origins(build_front(hopeless, GOALS))} == {0.0}


def test_parents_are_ends_and_evaluated_checkpoints():
    records = [
        *ENDS,
        build_checkpoint(4, 0.4, 0.4, (1, 40)),
        build_merge(5, 0.6, 0.6, (1, 40, 0.25), (1, 60, 0.25), (2, 20, 0.25), (2, 60, 0.25)),
    ]
    front = build_front(records, GOALS)
    merge = next(c for c in front.configurations if c.role == "merge")
    assert [parent.name for parent in find_parents(front, merge)] == ["1@40", "1", "2"]
    for other in front.configurations:  # a checkpoint is no parent of itself
        assert other is merge or find_parents(front, other) == []


def test_the_end_of_a_training_is_known_from_its_checkpoint_too(tmp_path):
    ends = [replace(r, rungs=(), checkpoint=tmp_path / "checkpoint-60") for r in ENDS]
    front = build_front([*ends, CANDIDATES[2]], GOALS)
    assert [parent.name for parent in find_parents(front, front.configurations[-1])] == ["1", "2"]


def test_names():
    names = [c.name for c in build_front(RECORDS, GOALS).configurations]
    assert names == ["0", "1", "2", "1@40", "2@20", "merge-6"]
    titles = ["trial 1", "checkpoint 1@40", "merge-6"]
    assert [title_candidate(name) for name in ("1", "1@40", "merge-6")] == titles


def test_findings_call_candidates_by_their_names():
    best = build_merge(9, 0.99, 0.2, (1, 60, 0.9), (2, 60, 0.1))
    front = build_front([*RECORDS, best], GOALS)
    lines, _ = describe_findings(front, Effects())
    assert any(line.startswith("Merge-9 has the best a, 0.990") for line in lines)


def test_nothing_is_learned_from_what_was_not_trained():
    """Parameters, rungs and comparisons of searches are about trainings alone."""
    trained = [
        build_trial(
            number,
            0.1 + 0.02 * number,
            0.9 - 0.02 * number,
            cost=TRAINING,
            rungs=(Rung(20, build_trial(number, 0.02 * number, 0.5).test, Cost(1280)), *END),
        )
        for number in range(16)
    ]
    others = [
        build_checkpoint(16, 0.7, 0.7, (3, 20)),
        build_merge(17, 0.8, 0.8, (3, 60, 0.5), (4, 60, 0.5)),
        build_merge(18, 0.8, 0.8, (3, 60, 0.5), (4, 60, 0.5), replicate_of=17, role="replicate"),
    ]
    every = [*trained, *others]
    effects = [
        estimate_effects(records, GOALS, [Dimension("lr", (), 0.0, 15.0)])
        for records in (trained, every)
    ]
    assert effects[0].contrasts
    assert effects[0] == effects[1]
    assert has_stagnated(trained, GOALS, 3) is has_stagnated(every, GOALS, 3)
    sides = [build_arm("x", records, GOALS) for records in (trained, every)]
    assert sides[0].tried_count == sides[1].tried_count == 16
    assert sides[0].seconds == sides[1].seconds
    assert sides[0].independent == tuple(
        replace(c, rank=n.rank, probability=n.probability)
        for c, n in zip(sides[1].independent, sides[0].independent, strict=True)
    )
    assert sides[1].owners == (*range(16), 3, 4)


def test_merges_raise_the_hypervolume_over_trials():
    trace = build_front(RECORDS, GOALS).hypervolume_over_trials
    volumes = {point.number: point.hypervolume for point in trace}
    assert volumes[3] == pytest.approx(0.28)
    assert volumes[4] == pytest.approx(0.32)
    assert volumes[6] == pytest.approx(0.44)


def test_a_configuration_that_most_seeds_find_infeasible_leaves_the_curve():
    records = [
        build_trial(1, 0.8, 0.5),
        build_trial(2, 0.3, 0.3),
        build_trial(3, 0.8, 0.5, replicate_of=1, feasible=False),
        build_trial(4, 0.8, 0.5, replicate_of=1),
    ]
    trace = build_front(records, GOALS).hypervolume_over_trials
    assert [point.hypervolume for point in trace] == pytest.approx([0.4, 0.4, 0.09, 0.4])


def test_a_supervised_start_is_a_baseline_and_never_on_the_front():
    records = [
        build_trial(0, 0.9, 0.9, role="start"),
        build_trial(1, 0.1, 0.1, role="untrained", params={"lr": 0.0}),
        build_trial(2, 0.5, 0.5, role="published"),
        build_trial(3, 0.4, 0.7, params={"lr": 0.0}),
    ]
    front = build_front(records, GOALS)
    assert [baseline.role for baseline in front.baselines] == ["start", "untrained", "published"]
    assert [member.first for member in front.members] == [2, 3]
    assert not front.baselines[0].is_training
    assert front.hypervolume_over_trials[-1].hypervolume == pytest.approx(0.5 * 0.5 + 0.4 * 0.2)
    assert not records[0].is_training
    assert not records[0].trained_params
    worse = front.find_shortfalls(front.members[0])
    assert worse["start"] == ["a", "b"]
