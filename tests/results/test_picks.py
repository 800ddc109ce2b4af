"""The words for a choice, and what they find on a front."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from gdpo_tune.analysis.selection import find_extremes, find_preferred
from gdpo_tune.core.errors import PickError
from gdpo_tune.core.trials import Estimate, Objective, TrialRecord
from gdpo_tune.results.pick_language import Bound, Metric, parse
from gdpo_tune.results.picking import choose, told_of
from gdpo_tune.spec.model import ObjectiveSpec
from tests.support.analysis import GOALS, trial

BOUNDS = "max correctness where length >= 0.9 and format >= 0.95"


@dataclass
class Spec:
    """As much of a sweep's file as a choice looks at."""

    goals: tuple[Objective, ...] = GOALS
    objectives: dict[str, ObjectiveSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.objectives = {
            g.name: ObjectiveSpec(direction=g.direction, reference=g.reference) for g in self.goals
        }

    def objective_list(self) -> tuple[Objective, ...]:
        return self.goals


SPEC: Any = Spec()
FRONT = [trial(0, 0.9, 0.1), trial(1, 0.8, 0.5), trial(2, 0.6, 0.7), trial(3, 0.1, 0.9)]
"""All four are on the front; 4 is dominated."""
RECORDS = [*FRONT, trial(4, 0.5, 0.5)]


def found(text: str, records: list[TrialRecord] = RECORDS, spec: Any = SPEC) -> int:
    return choose(records, spec, parse(text)).record.number


def test_conditions_are_read_with_their_places():
    pick = parse(BOUNDS)
    assert [str(bound) for bound in pick.bounds] == ["length >= 0.9", "format >= 0.95"]
    assert [BOUNDS[b.metric.position - 1 :][:6] for b in pick.bounds] == ["length", "format"]
    assert parse("max_correctness").rule.metric.name == "correctness"


@pytest.mark.parametrize(
    ("text", "label"),
    [("knee", "knee"), ("max_a", "max_a"), ("min a", "min_a"), ("7", ""), ("knee where a > 1", "")],
)
def test_a_choice_that_stays_one_names_its_folder(text, label):
    assert parse(text).label == label


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("", 1, "nothing to choose by"),
        ("nee", 1, "did you mean 'knee'"),
        ("max", 4, "it ends where the name of a metric"),
        ("max >= 3", 5, "a metric is missing after `max`"),
        ("max a wher b >= 1", 7, "did you mean 'where'"),
        ("max a where", 12, "it ends where the name of a metric to compare"),
        ("max a where b", 14, "b is compared by >=, <=, > or <"),
        ("max a where b = 3", 15, "b is compared by"),
        ("max a where b >= x", 18, "'x' is no number"),
        ("max a where b >= nan", 18, "'nan' is no number"),
        ("max a where b >= 1 nd c >= 2", 20, "did you mean 'and'"),
        ("7 where a >= 1", 3, "a trial by its number is taken as it is"),
        ("prefer a", 9, "a has no weight"),
        ("9" * 5000, 1, "is the number of a trial"),
        ("prefer a=0", 10, "a weight is above 0"),
        ("prefer a=1, a=2", 13, "a has a weight already"),
        ("prefer a=1 b=2", 12, "separated by commas"),
    ],
)
def test_what_cannot_be_read_is_pointed_at(text, position, message):
    with pytest.raises(PickError, match="fix: ") as caught:
        parse(text)
    assert caught.value.position == position
    assert message in str(caught.value)
    lines = str(caught.value).splitlines()
    assert lines[1].strip() == text.strip()
    assert lines[2].index("^") - 4 == position - 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("op", "value", "holds", "missing"),
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
def test_a_bound(op, value, holds, missing):
    bound = Bound(Metric("a", 1), op, 0.9)
    assert bound.holds(value) is holds
    assert bound.missing(value) == pytest.approx(missing)


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
        ("prefer a=1", 0),
        ("prefer a=1, b=9", 3),
        ("prefer a=2, b=1", 1),
        ("4", 4),
    ],
)
def test_what_a_choice_finds(text, number):
    assert found(text) == number


def test_only_members_of_the_front_are_found_by_words():
    assert found("min b where a <= 0.5") == 3


def test_nothing_that_satisfies_names_the_closest():
    with pytest.raises(PickError, match=r"the closest, trial 1, has a 0\.8, b 0\.5") as caught:
        found("max a where a >= 0.85 and b >= 0.55")
    assert "loosen a >= 0.85 and b >= 0.55" in str(caught.value)
    assert caught.value.position == 13


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("max aa", 5, "did you mean 'a'? there is no such name"),
        ("max a where c >= 1", 13, "the metrics of this sweep are a, b"),
        ("prefer c=1", 8, "the objectives of this sweep are a, b"),
        ("9", 1, "no trial 9; the last one is 4"),
    ],
)
def test_names_that_there_are_not(text, position, message):
    with pytest.raises(PickError) as caught:
        found(text)
    assert message in str(caught.value)
    assert caught.value.position == position


def test_an_empty_front_has_nothing_to_choose():
    with pytest.raises(PickError, match="nothing is on the front"):
        found("knee", [])


def test_a_metric_that_is_no_objective_can_be_asked_for():
    def with_cost(record: TrialRecord, cost: float) -> TrialRecord:
        return trial(
            record.number,
            record.test["a"].mean,
            record.test["b"].mean,
            test={**record.test, "cost": Estimate(cost, 0.1)},
        )

    records = [with_cost(record, 5.0 - record.number) for record in FRONT]
    assert found("min cost", records) == 3
    assert found("max a where cost < 3.5", records) == 2
    told = told_of(choose(records, SPEC, parse("min cost")), SPEC)
    assert told[0].endswith("trial 3: a 0.100 ± 0.020, b 0.900 ± 0.020, cost 2.000 ± 0.100")


def test_what_is_told_of_a_choice():
    told = told_of(choose(RECORDS, SPEC, parse("max a where b >= 0.49")), SPEC)
    assert told[0].endswith("trial 1: a 0.800 ± 0.020, b 0.500 ± 0.020")
    assert told[1:] == ["provisional: one seed", "b >= 0.49 holds by less than its standard error"]


def test_the_wrong_end_of_an_objective_is_told():
    spec: Any = Spec((GOALS[0], Objective("b", "minimize", 1.0)))
    records = [trial(0, 0.9, 0.8), trial(1, 0.5, 0.2)]
    assert found("min b", records, spec) == 1
    told = told_of(choose(records, spec, parse("max_b")), spec)
    assert "trial 0" in told[0]
    assert told[-1] == "b is to be minimized"


def test_the_whole_weight_on_one_objective_is_its_extreme():
    values = np.random.default_rng(0).random((20, 3))
    goals = [Objective(name, "maximize", 0.0) for name in "abc"]
    for column, goal in enumerate(goals):
        weights = [float(index == column) for index in range(3)]
        assert find_preferred(values, goals, weights) == find_extremes(values, goals)[goal.name]


def test_only_ratios_of_weights_matter():
    values = np.random.default_rng(1).random((20, 2))
    assert find_preferred(values, GOALS, [1, 3]) == find_preferred(values, GOALS, [5, 15])
    assert find_preferred(values, GOALS, [1, 3]) == find_preferred(
        values, GOALS, [0.5e308, 1.5e308]
    )
    assert find_preferred([], GOALS, [1, 1]) is None
