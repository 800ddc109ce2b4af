"""The language of picks, and the trial that a pick takes."""

import pickle
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from gdpo_tune.core.errors import PickError
from gdpo_tune.core.metrics import Condition
from gdpo_tune.core.trials import Cost, Estimate, Objective, Rung
from gdpo_tune.results.open_sweep import Sweep, find_sweep
from gdpo_tune.results.picks import parse_pick, pick_trial
from gdpo_tune.spec.model import Constraint, ObjectiveSpec
from tests.support.analysis import GOALS, build_checkpoint, build_merge, build_trial
from tests.support.published_sweeps import copy_stored_sweep
from tests.support.tables import cases

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


def pick(text, records=RECORDS, spec=SPEC):
    return pick_trial(Sweep(spec, records), parse_pick(text))


def pick_number(text, records=RECORDS, spec=SPEC):
    return pick(text, records, spec).record.number


def test_conditions_are_parsed_with_their_positions():
    pick = parse_pick(BOUNDS)
    assert [str(bound) for bound in pick.conditions] == ["length >= 0.9", "format >= 0.95"]
    assert [BOUNDS[b.position - 1 :][:6] for b in pick.conditions] == ["length", "format"]
    assert parse_pick("max_correctness").rule.metric == "correctness"


@cases("results", "labels")
def test_a_short_pick_is_part_of_the_directory_name(text, label):
    assert pick(text).label == label


@cases("results", "wrong picks")
def test_an_error_points_at_the_problem(text, position, message):
    text = text.replace("<5000 digits>", "9" * 5000)
    with pytest.raises(PickError, match="fix: ") as caught:
        parse_pick(text)
    assert caught.value.position == position
    assert message in str(caught.value)
    lines = str(caught.value).splitlines()
    assert lines[1].strip() == text.strip()
    assert lines[2].index("^") - 4 == position - 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@cases("results", "bounds")
def test_a_bound(comparison, value, holds, shortfall):
    bound = Condition("a", comparison, 0.9)
    assert bound.holds(value) is holds
    assert bound.compute_shortfall(value) == pytest.approx(shortfall)


@cases("results", "picked trials")
def test_the_picked_trial(text, number):
    """Rules take only members of the front."""
    assert pick_number(text) == number


def test_an_error_names_the_closest_trial():
    with pytest.raises(PickError, match=r"the closest, trial 1, has a 0\.8, b 0\.5") as caught:
        pick_number("max a where a >= 0.85 and b >= 0.55")
    assert "loosen a >= 0.85 and b >= 0.55" in str(caught.value)
    assert caught.value.position == 13
    with pytest.raises(PickError, match=r"the closest, trial 0, has a 0\.9"):
        pick_number("max a where a >= 0.95", FRONT[:1])  # of one member, which spans nothing


@cases("results", "unknown names")
def test_unknown_names_are_refused(text, position, message):
    with pytest.raises(PickError) as caught:
        pick_number(text)
    assert message in str(caught.value)
    assert caught.value.position == position


def test_a_metric_that_is_no_objective_can_be_picked():
    records = [
        replace(each, test={**each.test, "cost": Estimate(5.0 - each.number, 0.1)})
        for each in FRONT
    ]
    assert pick_number("min cost", records) == 3
    assert pick_number("max a where cost < 3.5", records) == 2
    lines = pick("min cost", records).lines
    assert lines[0].endswith("trial 3: a 0.100 ± 0.020, b 0.900 ± 0.020, cost 2.000 ± 0.100")


def test_a_pick_is_described():
    lines = pick("max a where b >= 0.49").lines
    assert lines[0].endswith("trial 1: a 0.800 ± 0.020, b 0.500 ± 0.020")
    noise = "b >= 0.49 is satisfied by less than its standard error"
    assert lines[1:] == ("provisional: one seed", noise)


def test_the_wrong_end_of_an_objective_is_pointed_out():
    spec: Any = Spec((GOALS[0], Objective("b", "minimize", 1.0)))
    records = [build_trial(0, 0.9, 0.8), build_trial(1, 0.5, 0.2)]
    assert pick_number("min b", records, spec) == 1
    lines = pick("max_b", records, spec).lines
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


@cases("results", "candidates")
def test_any_candidate_can_be_picked(text, name, label):
    picked = pick(text, CANDIDATES)
    assert (picked.name, picked.label) == (name, label)


@cases("results", "absent candidates")
def test_a_candidate_that_does_not_exist_is_refused_with_those_that_do(text, message, fix):
    with pytest.raises(PickError) as caught:
        pick(text, CANDIDATES)
    assert message in str(caught.value)
    assert f"fix: {fix}" in str(caught.value)
    assert caught.value.position == 1


def test_a_sweep_without_merges_or_a_front_says_so():
    with pytest.raises(PickError, match="it has no merges"):
        pick("merge-3")
    with pytest.raises(PickError, match="nothing is on the front"):
        pick("knee", [])


def test_a_picked_candidate_is_described_by_its_name():
    merge = pick("merge-3", CANDIDATES)
    assert merge.lines[0].startswith("chosen by 'merge-3': merge-3: a 0.650 ± ")
    checkpoint = pick("0@40", CANDIDATES)
    assert "checkpoint 0@40: a 0.950" in checkpoint.lines[0]
    stopped = pick("merge-6", CANDIDATES)
    assert stopped.lines == ("chosen by 'merge-6': merge-6, pruned",)


def test_a_part_that_was_not_evaluated_on_its_own_has_no_values():
    part = pick("1@20", CANDIDATES)
    assert part.name == "1@20"
    assert part.lines[0].endswith("checkpoint 1@20, without an evaluation on test prompts")


def test_the_recommended_candidate_of_a_real_sweep_keeps_what_the_untrained_policy_has(tmp_path):
    front = find_sweep(str(copy_stored_sweep(tmp_path))).front
    assert front.knee_shortfall == []
    assert sum(bool(front.find_shortfalls(member)) for member in front.members) > 5
