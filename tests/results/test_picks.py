"""The language of picks, and the trial that a pick takes."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from gdpo_tune.core.errors import PickError
from gdpo_tune.core.metrics import Condition
from gdpo_tune.core.trials import Cost, Estimate, Objective, Rung, TrialRecord
from gdpo_tune.results.open_sweep import Sweep, find_sweep
from gdpo_tune.results.picks import parse_pick, pick_trial
from gdpo_tune.spec.model import Constraint, ObjectiveSpec
from tests.support.analysis import GOALS, build_checkpoint, build_merge, build_trial
from tests.support.published_sweeps import copy_stored_sweep

BOUNDS = "max correctness where length >= 0.9 and format >= 0.95"


@dataclass
class Spec:
    """The part of a sweep's specification that a pick reads."""

    goals: tuple[Objective, ...] = GOALS
    objectives: dict[str, ObjectiveSpec] = field(default_factory=dict)
    constraints: dict[str, Constraint] = field(default_factory=dict)
    space: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(drop_inactive=dict))

    def __post_init__(self) -> None:
        self.objectives = {
            g.name: ObjectiveSpec(direction=g.direction, reference=g.reference) for g in self.goals
        }

    def list_objectives(self) -> tuple[Objective, ...]:
        return self.goals


SPEC: Any = Spec()
FRONT = [
    build_trial(0, 0.9, 0.1),
    build_trial(1, 0.8, 0.5),
    build_trial(2, 0.6, 0.7),
    build_trial(3, 0.1, 0.9),
]
"""All four are on the front; 4 is dominated."""
RECORDS = [*FRONT, build_trial(4, 0.5, 0.5)]


def pick_number(text: str, records: list[TrialRecord] = RECORDS, spec: Any = SPEC) -> int:
    return pick_trial(Sweep(spec, records), parse_pick(text)).record.number


def test_conditions_are_parsed_with_their_positions():
    pick = parse_pick(BOUNDS)
    assert [str(bound) for bound in pick.conditions] == ["length >= 0.9", "format >= 0.95"]
    assert [BOUNDS[b.position - 1 :][:6] for b in pick.conditions] == ["length", "format"]
    assert parse_pick("max_correctness").rule.metric == "correctness"


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("knee", "knee"),
        ("max_a", "max_a"),
        ("min a", "min_a"),
        ("3", "trial-3"),
        ("knee where a > 0.7", "trial-0"),
    ],
)
def test_a_short_pick_is_part_of_the_directory_name(text, label):
    assert pick_trial(Sweep(SPEC, RECORDS), parse_pick(text)).label == label


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("", 1, "the choice is empty"),
        ("nee", 1, "did you mean 'knee'"),
        ("max", 4, "the name of a metric is missing after `max`"),
        ("max >= 3", 5, "the name of a metric is missing after `max`"),
        ("max a wher b >= 1", 7, "did you mean 'where'"),
        ("max a where", 12, "the name of a metric is missing after `where` or `and`"),
        ("max a where b", 14, "b is compared by >=, <=, > or <"),
        ("max a where b >=", 17, "a number is missing"),
        ("max a where b = 3", 15, "b is compared by"),
        ("max a where b >= x", 18, "'x' is not a number"),
        ("max a where b >= nan", 18, "'nan' is not a number"),
        ("max a where b >= 1 nd c >= 2", 20, "did you mean 'and'"),
        ("7 where a >= 1", 3, "the name of a candidate has no conditions"),
        ("prefer a=2, b=1", 1, "a choice begins with knee, max or min, or is the number"),
        ("max a, b", 6, "a condition begins with `where`"),
        ("9" * 5000, 1, "is the number of a trial"),
        ("7@40 where a >= 1", 6, "the name of a candidate has no conditions"),
        ("merge-3 where a >= 1", 9, "the name of a candidate has no conditions"),
        ("7@", 1, "a checkpoint such as 7@40, or a merge such as merge-27"),
        ("merge-x", 1, "a merge such as merge-27"),
    ],
)
def test_an_error_points_at_the_problem(text, position, message):
    with pytest.raises(PickError, match="fix: ") as caught:
        parse_pick(text)
    assert caught.value.position == position
    assert message in str(caught.value)
    lines = str(caught.value).splitlines()
    assert lines[1].strip() == text.strip()
    assert lines[2].index("^") - 4 == position - 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("comparison", "value", "holds", "shortfall"),
    [
        (">=", 0.9, True, 0.0),
        (">", 0.9, False, 0.0),
        ("<=", 0.9, True, 0.0),
        ("<", 0.9, False, 0.0),
        (">=", 0.7, False, 0.2),
        ("<=", 1.0, False, 0.1),
        (">=", float("nan"), False, float("inf")),
    ],
)
def test_a_bound(comparison, value, holds, shortfall):
    bound = Condition("a", comparison, 0.9)
    assert bound.holds(value) is holds
    assert bound.compute_shortfall(value) == pytest.approx(shortfall)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("max a", 0),
        ("max_b", 3),
        ("min a", 3),
        ("max a where b >= 0.5", 1),
        ("max a where b > 0.5", 2),
        ("max b where a >= 0.2 and b <= 0.6", 1),
        ("knee", 2),
        ("knee where b > 0.5", 2),
        ("4", 4),
    ],
)
def test_the_picked_trial(text, number):
    assert pick_number(text) == number


def test_rules_take_only_members_of_the_front():
    assert pick_number("min b where a <= 0.5") == 3


def test_an_error_names_the_closest_trial():
    with pytest.raises(PickError, match=r"the closest, trial 1, has a 0\.8, b 0\.5") as caught:
        pick_number("max a where a >= 0.85 and b >= 0.55")
    assert "loosen a >= 0.85 and b >= 0.55" in str(caught.value)
    assert caught.value.position == 13


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("max aa", 5, "did you mean 'a'? this metric is unknown"),
        ("max a where c >= 1", 13, "the metrics of this sweep are a, b"),
        ("9", 1, "no trial 9; the last one is 4"),
    ],
)
def test_unknown_names_are_refused(text, position, message):
    with pytest.raises(PickError) as caught:
        pick_number(text)
    assert message in str(caught.value)
    assert caught.value.position == position


def test_an_empty_front_is_refused():
    with pytest.raises(PickError, match="nothing is on the front"):
        pick_number("knee", [])


def test_a_metric_that_is_no_objective_can_be_picked():
    def with_cost(record: TrialRecord, cost: float) -> TrialRecord:
        return build_trial(
            record.number,
            record.test["a"].mean,
            record.test["b"].mean,
            test={**record.test, "cost": Estimate(cost, 0.1)},
        )

    records = [with_cost(record, 5.0 - record.number) for record in FRONT]
    assert pick_number("min cost", records) == 3
    assert pick_number("max a where cost < 3.5", records) == 2
    lines = pick_trial(Sweep(SPEC, records), parse_pick("min cost")).lines
    assert lines[0].endswith("trial 3: a 0.100 ± 0.020, b 0.900 ± 0.020, cost 2.000 ± 0.100")


def test_a_pick_is_described():
    lines = pick_trial(Sweep(SPEC, RECORDS), parse_pick("max a where b >= 0.49")).lines
    assert lines[0].endswith("trial 1: a 0.800 ± 0.020, b 0.500 ± 0.020")
    noise = "b >= 0.49 is satisfied by less than its standard error"
    assert lines[1:] == ("provisional: one seed", noise)


def test_the_wrong_end_of_an_objective_is_pointed_out():
    spec: Any = Spec((GOALS[0], Objective("b", "minimize", 1.0)))
    records = [build_trial(0, 0.9, 0.8), build_trial(1, 0.5, 0.2)]
    assert pick_number("min b", records, spec) == 1
    lines = pick_trial(Sweep(spec, records), parse_pick("max_b")).lines
    assert "trial 0" in lines[0]
    assert lines[-1] == "the sweep minimizes b"


# Checkpoints and merges

END = (Rung(60, {}, Cost()),)
CANDIDATES = [
    build_trial(0, 0.9, 0.1, rungs=END),
    build_trial(1, 0.1, 0.9, rungs=END),
    build_checkpoint(2, 0.95, 0.05, (0, 40)),
    build_merge(3, 0.7, 0.7, (0, 60, 0.5), (1, 20, 0.5)),
    build_merge(4, 0.6, 0.6, (0, 60, 0.5), (1, 20, 0.5), replicate_of=3, role="replicate"),
    build_trial(5, 0.2, 0.2, role="untrained"),
    build_merge(6, 0.1, 0.1, (0, 60, 0.1), (1, 60, 0.9), state="pruned", test={}),
]


@pytest.mark.parametrize(
    ("text", "name", "label"),
    [
        ("0", "0", "trial-0"),
        ("0@40", "0@40", "trial-0-step-40"),
        ("0@60", "0", "trial-0"),
        ("merge-3", "merge-3", "merge-3"),
        ("3", "merge-3", "merge-3"),
        ("4", "4", "trial-4"),
        ("knee", "merge-3", "knee"),
        ("knee where a >= 0.5 and b >= 0.5", "merge-3", "merge-3"),
        ("max_a", "0@40", "max_a"),
        ("max a where b <= 0.08", "0@40", "trial-0-step-40"),
    ],
)
def test_any_candidate_can_be_picked(text, name, label):
    picked = pick_trial(Sweep(SPEC, CANDIDATES), parse_pick(text))
    assert (picked.name, picked.label) == (name, label)


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("0@30", "trial 0 has no candidate at step 30", "write 0@40, 0@60"),
        ("1@40", "trial 1 has no candidate at step 40", "write 1@20, 1@60"),
        ("9@40", "no trial 9; the last one is 6", "write another number"),
        ("3@40", "trial 3 trains nothing", "write merge-3"),
        ("5@40", "trial 5 is the untrained policy", "write another number"),
        ("merge-0", "that sweep has no merge-0", "write merge-3, merge-6"),
        ("merge-99", "that sweep has no merge-99", "write merge-3, merge-6"),
    ],
)
def test_a_candidate_that_does_not_exist_is_refused_with_those_that_do(text, message, fix):
    with pytest.raises(PickError) as caught:
        pick_trial(Sweep(SPEC, CANDIDATES), parse_pick(text))
    assert message in str(caught.value)
    assert f"fix: {fix}" in str(caught.value)
    assert caught.value.position == 1


def test_a_sweep_without_merges_says_so():
    with pytest.raises(PickError, match="it has no merges"):
        pick_trial(Sweep(SPEC, RECORDS), parse_pick("merge-3"))


def test_a_picked_candidate_is_described_by_its_name():
    merge = pick_trial(Sweep(SPEC, CANDIDATES), parse_pick("merge-3"))
    assert merge.lines[0].startswith("chosen by 'merge-3': merge-3: a 0.650 ± ")
    checkpoint = pick_trial(Sweep(SPEC, CANDIDATES), parse_pick("0@40"))
    assert "checkpoint 0@40: a 0.950" in checkpoint.lines[0]
    stopped = pick_trial(Sweep(SPEC, CANDIDATES), parse_pick("merge-6"))
    assert stopped.lines == ("chosen by 'merge-6': merge-6, pruned",)


def test_a_part_that_was_not_evaluated_on_its_own_has_no_values():
    part = pick_trial(Sweep(SPEC, CANDIDATES), parse_pick("1@20"))
    assert part.name == "1@20"
    assert part.lines[0].endswith("checkpoint 1@20, without an evaluation on test prompts")


def test_the_recommended_candidate_of_a_real_sweep_keeps_what_the_untrained_policy_has(tmp_path):
    front = find_sweep(str(copy_stored_sweep(tmp_path))).front
    assert front.knee_shortfall == []
    assert sum(bool(front.find_shortfalls(member)) for member in front.members) > 5
