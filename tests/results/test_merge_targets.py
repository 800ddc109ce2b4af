"""Targets of merges as a person writes them."""

import pytest

from gdpo_tune.core.errors import PickError, UsageError
from gdpo_tune.core.metrics import Condition
from gdpo_tune.results.merge_request import build_aim, parse_shares, parse_target
from tests.support.tables import cases
from tests.support.tuning import load_code_spec


def list_limits(spec, toward, prefer=""):
    return build_aim(parse_target(toward, prefer), spec)


@pytest.mark.parametrize("joint", [", ", " and ", ","])
def test_conditions_become_limits_and_the_rest_is_preferred(tmp_path, joint):
    spec = load_code_spec(tmp_path, ["constraints={}"])
    aim = list_limits(spec, f"length >= 0.6{joint}format > 0.8")
    assert aim.limits == (Condition("length", ">=", 0.6), Condition("format", ">", 0.8))
    assert [metric.name for metric in aim.metrics] == ["correctness", "format", "length"]
    assert aim.preferences == (1.0, 0.0, 0.0)


def test_every_objective_is_preferred_if_conditions_name_all(tmp_path):
    spec = load_code_spec(tmp_path)
    text = "length >= 0.6, format >= 0.8, correctness >= 0.1"
    assert list_limits(spec, text).preferences == (1.0, 1.0, 1.0)


def test_preferences_stand_alone_or_beside_conditions(tmp_path):
    spec = load_code_spec(tmp_path, ["constraints={}"])
    assert list_limits(spec, "", "length=1,correctness=2").preferences == (2.0, 0.0, 1.0)
    aim = list_limits(spec, "length >= 0.6", "length=3")
    assert (aim.preferences, len(aim.limits)) == ((0.0, 0.0, 3.0), 1)


def test_constraints_of_the_sweep_are_conditions_too_but_not_costs(tmp_path):
    bounds = 'constraints={correctness: ">= 0.2", cpu_seconds: "<= 60"}'
    aim = list_limits(load_code_spec(tmp_path, [bounds]), "length >= 0.6")
    assert aim.limits == (Condition("length", ">=", 0.6), Condition("correctness", ">=", 0.2))
    assert "cpu_seconds" not in [metric.name for metric in aim.metrics]


def test_a_constraint_on_a_baseline_counts_once_the_baseline_is_measured(tmp_path):
    spec = load_code_spec(tmp_path, ['constraints={correctness: ">= untrained - 0.02"}'])
    target = parse_target("length >= 0.6", "")
    assert [str(limit) for limit in build_aim(target, spec).limits] == ["length >= 0.6"]
    measured = spec.constraints["correctness"].model_copy(update={"value": 0.5})
    spec = spec.model_copy(update={"constraints": {"correctness": measured}})
    assert [str(limit) for limit in build_aim(target, spec).limits][1:] == ["correctness >= 0.48"]


def test_a_condition_may_name_any_metric_of_the_task(tmp_path):
    aim = list_limits(load_code_spec(tmp_path, ["constraints={}"]), "mean_length < 20")
    assert aim.metrics[-1].direction == "minimize"
    assert aim.preferences == (1.0, 1.0, 1.0, 0.0)


@cases("results", "wrong conditions")
def test_wrong_conditions_are_refused_at_their_place(tmp_path, toward, position, message):
    with pytest.raises(PickError, match=message) as caught:
        list_limits(load_code_spec(tmp_path), toward)
    assert caught.value.position == position


@cases("results", "wrong preferences")
def test_wrong_preferences_are_refused(tmp_path, prefer, message):
    with pytest.raises(UsageError, match=message):
        list_limits(load_code_spec(tmp_path), "", prefer)


def test_weights_may_have_spaces():
    shares = parse_shares("7 = 0.3, 12@40=0.7", "--weights", "")
    assert shares == {"7": 0.3, "12@40": 0.7}
