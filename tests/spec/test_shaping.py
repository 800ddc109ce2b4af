"""Reward shaping in a sweep file: what is searched under what, identities, ranges."""

from __future__ import annotations

import dataclasses
import json

import pytest

from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.task_info import UNKNOWN_RANGE
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.spec_warnings import list_warnings
from gdpo_tune.tasks import code
from tests.support.paths import ROOT

SHAPED = (
    "space.conditioning={length: [none, correctness], format: [none, correctness, length]}",
    "space.conditioning_threshold.length={range: [0.5, 1]}",
    "space.partial_credit=[false, true]",
    "space.length_shape=[step, ramp, overlong]",
    "space.length_cache={range: [0.1, 1]}",
    "space.normalization=[gdpo, gdpo_no_batch_norm, grpo, dvao, saw]",
    "space.gamma={range: [0, 1]}",
    "space.baseline=[group_mean, leave_one_out]",
)
DEFAULTS = {
    "gamma": 0.0,
    "baseline": "group_mean",
    "prompt_selection": "uniform",
    "partial_credit": False,
    "length_shape": "step",
    "length_cache": 0.2,
    **{f"conditioning.{k}": "none" for k in ("correctness", "format", "length")},
    **{f"conditioning_threshold.{k}": 1.0 for k in ("correctness", "format", "length")},
}


def test_what_is_written_out_at_its_default_keeps_the_identity(load):
    written = [f"space.{name}={json.dumps(value)}" for name, value in DEFAULTS.items()]
    spec = load(*written)
    assert spec.compute_identity() == load().compute_identity()
    assert load(text=spec.dump_yaml()).compute_identity() == load().compute_identity()
    complete = load().space.complete_baseline({})
    assert {name: complete[name] for name in DEFAULTS} == DEFAULTS


def test_nothing_is_sampled_where_it_has_no_effect(load):
    space = load(*SHAPED).space
    assert space.domains["gamma"].when == {"normalization": ("gdpo", "gdpo_no_batch_norm")}
    assert space.domains["baseline"].when == {
        "normalization": ("gdpo_no_batch_norm", "grpo", "dvao")
    }
    assert space.domains["length_cache"].when == {"length_shape": ("overlong",)}
    threshold = "conditioning_threshold.length"
    assert space.domains[threshold].when == {"conditioning.length": ("correctness",)}
    assert threshold not in space.select_active({"conditioning.length": "none"})
    assert threshold in space.select_active({"conditioning.length": "correctness"})


@pytest.mark.parametrize(
    ("shape", "condition", "when"),
    [
        ("[ramp, overlong]", ", when: {normalization: gdpo}",
         {"normalization": ("gdpo",), "length_shape": ("overlong",)}),
        ("overlong", "", {}),  # it always holds
    ],
)  # fmt: skip
def test_an_implied_condition_stands_beside_a_written_one(load, shape, condition, when):
    cache = f"space.length_cache={{range: [0.1, 1]{condition}}}"
    space = load(f"space.length_shape={shape}", cache).space
    assert space.domains["length_cache"].when == when


def test_a_shaped_file_survives_being_written_out(load):
    spec = load(*SHAPED)
    again = load(text=spec.dump_yaml())
    assert again.space == spec.space
    assert again.compute_identity() == spec.compute_identity()


def test_the_published_setting_still_resolves(load):
    published = code.TASK.published
    complete = load(*SHAPED).space.complete_baseline(published)
    assert complete.keys() == list_parameters(code.TASK).keys()
    assert {**DEFAULTS, **published}.items() <= complete.items()


@pytest.fixture
def unbounded(monkeypatch):
    """The code task, with a length reward of which nobody knows the range."""
    rewards = {**code.TASK.rewards, "length": UNKNOWN_RANGE}
    monkeypatch.setattr(code, "TASK", dataclasses.replace(code.TASK, rewards=rewards))


@pytest.mark.usefixtures("unbounded")
@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("gamma=0.5", "space.gamma"),
        ("gamma={range: [0, 1]}", "space.gamma"),
        ("conditioning.format=length", "space.conditioning.format"),
        ("conditioning.format=[none, length]", "space.conditioning.format"),
    ],
)
def test_an_unknown_range_is_refused_where_it_is_needed(refuse, override, key):
    (problem,) = refuse(f"space.{override}")
    assert problem.key == key
    assert "the range of length is unknown" in problem.reason
    assert "state the lowest and highest value of length in its task" in problem.fix


@pytest.mark.usefixtures("unbounded")
def test_an_unknown_range_is_fine_where_it_is_not_needed(load):
    load("space.gamma=0", "space.conditioning.length=correctness")
    load("space.gamma=0.5", "space.reward_weights.length=0")


def test_sound_shaping_raises_no_doubt():
    assert list_warnings(load_spec(ROOT / "search_spaces" / "code.yaml", SHAPED)) == []
