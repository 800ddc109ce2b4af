"""Reward shaping in a sweep file: what is searched under what, identities, ranges, doubts."""

from __future__ import annotations

import dataclasses
import json

import pytest

from gdpo_tune.core.errors import SpecError
from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.task_info import UNKNOWN_RANGE
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.spec_warnings import list_warnings
from gdpo_tune.tasks import code
from tests.support.paths import ROOT
from tests.support.spec_cases import GOOD

CODE = ROOT / "search_spaces" / "code.yaml"
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


@pytest.fixture
def load(tmp_path):
    def loaded(*overrides, text=GOOD):
        path = tmp_path / "sweep.yaml"
        path.write_text(text)
        return load_spec(path, overrides)

    return loaded


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


def test_a_written_condition_is_kept_beside_the_implied_one(load):
    space = load(
        "space.length_shape=[ramp, overlong]",
        "space.length_cache={range: [0.1, 1], when: {normalization: gdpo}}",
    ).space
    assert space.domains["length_cache"].when == {
        "normalization": ("gdpo",),
        "length_shape": ("overlong",),
    }


def test_no_condition_is_implied_where_it_always_holds(load):
    space = load("space.length_shape=overlong", "space.length_cache=[0.1, 0.2]").space
    assert space.domains["length_cache"].when == {}


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


# Ranges


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
def test_an_unknown_range_is_refused_where_it_is_needed(load, override, key):
    with pytest.raises(SpecError) as caught:
        load(f"space.{override}")
    (problem,) = caught.value.problems
    assert problem.key == key
    assert "the range of length is unknown" in problem.reason
    assert "state the lowest and highest value of length in its task" in problem.fix


@pytest.mark.usefixtures("unbounded")
def test_an_unknown_range_is_fine_where_it_is_not_needed(load):
    load("space.gamma=0", "space.conditioning.length=correctness")
    load("space.gamma=0.5", "space.reward_weights.length=0")


# Doubts

DOUBTS = {
    "pairs": (
        ["space.group_size=[2, 4]", "space.length_shape=[step, ramp]"],
        "space.length_shape = ramp: in a group of 2 under gdpo, shapes of the length reward",
    ),
    "no weight": (
        ["space.reward_weights.length=0", "space.conditioning.length=correctness"],
        "space.conditioning.length: reward_weights.length is 0 in every trial",
    ),
    "no weight of length": (
        ["space.reward_weights.length=0", "space.length_shape=ramp"],
        "space.length_shape: reward_weights.length is 0 in every trial",
    ),
    "no weight of what is passed in part": (
        [
            "space.reward_weights.correctness=0",
            "space.reward_weights.length=1",
            "space.partial_credit=[false, true]",
        ],
        "space.partial_credit: reward_weights.correctness is 0 in every trial",
    ),
    "threshold of nothing": (
        ["space.conditioning_threshold.length=0.5"],
        "space.conditioning_threshold.length: conditioning.length is never correctness, format",
    ),
    "no choice of prompts": (
        ["space.group_size=4", "space.prompt_selection=informative", "training.train_prompts=16"],
        "space.prompt_selection = informative: a step with groups of 4 samples 16 prompts",
    ),
    "cache of nothing": (
        ["space.length_cache=0.5"],
        "space.length_cache: length_shape is never overlong",
    ),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_doubtful_shaping(load, name):
    overrides, start = DOUBTS[name]
    assert any(warning.startswith(start) for warning in list_warnings(load(*overrides)))


def test_sound_shaping_raises_no_doubt():
    assert list_warnings(load_spec(CODE, SHAPED)) == []
    sum_first = ("space.normalization=[grpo_no_std, dvao]", "space.length_shape=ramp")
    warnings = list_warnings(load_spec(CODE, ["space.group_size=[2, 4]", *sum_first]))
    assert not any("length_shape" in warning for warning in warnings)


def test_an_unmet_condition_on_a_reward_below_zero_is_doubtful(load, monkeypatch):
    rewards = {**code.TASK.rewards, "correctness": (-3.0, 3.0)}
    monkeypatch.setattr(code, "TASK", dataclasses.replace(code.TASK, rewards=rewards))
    doubt = "space.conditioning.correctness: an unmet condition gives correctness 0"
    found = list_warnings(load("space.conditioning.correctness=format"))
    assert any(warning.startswith(doubt) for warning in found)
    assert not any(warning.startswith(doubt) for warning in list_warnings(load()))
