"""Origins of a front: shares of the hypervolume, costs and parents; and who learns from none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gdpo_tune.analysis.comparison import build_arm
from gdpo_tune.analysis.convergence import has_stagnated, measure_agreements
from gdpo_tune.analysis.front import build_front, find_parents, summarize_origins
from gdpo_tune.analysis.importance import Dimension, describe_findings, estimate_effects
from gdpo_tune.core.trials import Cost, Rung, title_candidate
from gdpo_tune.results.wording import describe_origins
from tests.support.analysis import GOALS, build_checkpoint, build_merge, build_trial

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
    assert find_parents(front, front.configurations[1]) == []


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
    lines, limits = describe_findings(front, estimate_effects(front, ()))
    assert any(line.startswith("Merge-9 has the best a, 0.990") for line in lines)
    assert not any("Stopped early" in line for line in limits)


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
        estimate_effects(build_front(records, GOALS), [Dimension("lr", (), 0.0, 15.0)])
        for records in (trained, every)
    ]
    assert effects[0].estimates
    assert effects[0] == effects[1]
    assert measure_agreements(trained, GOALS) == measure_agreements(every, GOALS) != ()
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
