"""Configurations that a person adds to a running sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.core.errors import UsageError
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.document import read_scalar
from gdpo_tune.spec.load import read_point
from tests.support.tuning import load_code_spec


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    shape = "space.length_shape=[step, overlong]"
    return load_code_spec(tmp_path, [shape, "space.length_cache={range: [0.1, 0.5]}"])


def test_a_value_without_effect_is_refused(spec: SweepSpec):
    with pytest.raises(UsageError, match=r"length_cache has no effect here: it needs .*overlong"):
        read_point(spec, {"length_shape": "step", "length_cache": 0.3})
    partial = {"length_cache": 0.3}  # the shape may still become overlong
    assert read_point(spec, partial) == partial


def test_a_change_drops_values_that_lose_their_effect(spec: SweepSpec):
    base = {"length_shape": "overlong", "length_cache": 0.3, "group_size": 8}
    assert read_point(spec, {"length_shape": "step"}, base) == {
        "length_shape": "step",
        "group_size": 8,
    }


def test_whole_numbers_become_floats_where_the_parameter_is_one(spec: SweepSpec):
    point = read_point(spec, {"reward_weights.format": 1})
    assert isinstance(point["reward_weights.format"], float)


@pytest.mark.parametrize(
    ("text", "value"),
    [("2e-4", 2e-4), ("8", 8), ("gdpo", "gdpo"), ("true", True), ("[1", "[1"), ("[1]", "[1]")],
)
def test_a_word_of_the_command_line_is_yaml(text: str, value: object):
    assert read_scalar(text) == value
