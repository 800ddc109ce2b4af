"""Keys and explanations for several optimizer steps on the samples of a step, and their weights."""

from __future__ import annotations

import pytest

from tests.support.export import export_to, flatten, make_recipe, parse_settings
from tests.support.export_batch import PARTS, SIZES
from tests.support.export_comparison import find_row

LIBRARIES = ("trl", "axolotl", "ms-swift", "verl", "nemo-rl")
VLLM = ("rollout.engine=vllm", "resources.gpus=1")
KL = "gradient of the KL"


def write_settings(library: str, *overrides: str) -> dict[str, object]:
    return flatten(parse_settings(export_to(library, make_recipe(*SIZES, *overrides))))


@pytest.mark.parametrize("library", ["trl", "axolotl", "verl", "nemo-rl"])
def test_the_gradient_of_the_kl_is_the_same_at_the_first_update(library):
    assert not find_row(library, KL, "space.beta=0.01")


def test_nemo_rl_multiplies_the_kl_by_the_ratio_after_the_first_update():
    parts = (*PARTS, "space.beta=0.01")
    for overrides, expected in (((), False), (parts, True)):
        written = write_settings("nemo-rl", *overrides)
        assert written["loss_fn.use_on_policy_kl_approximation"] is expected
        assert written["loss_fn.kl_output_clamp_value"] is None
        assert bool(find_row("nemo-rl", "ratio that multiplies the KL", *overrides)) is expected


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("loss", ["dapo", "cispo", "grpo"])
def test_gradients_that_are_divided_once_more_are_clipped_lower(library, loss):
    parts = (f"space.loss_type={loss}", *PARTS)
    clips = {
        value
        for key, value in write_settings(library, *parts).items()
        if key.rpartition(".")[2] in ("max_grad_norm", "grad_clip")
    }
    is_smaller = library in ("axolotl", "ms-swift") and loss != "grpo"
    assert clips == {0.5 if is_smaller else 1.0}
    row = find_row(library, f"loss_type {loss} divides by", *parts)
    assert ("gradients are 2 times smaller" in row) is is_smaller
    assert bool(row) is (library != "trl" and loss != "grpo")


def test_verl_draws_the_completions_of_an_optimizer_step_at_random():
    for overrides, expected in (((), False), (PARTS, True)):
        key = "actor_rollout_ref.actor.shuffle"
        assert write_settings("verl", *overrides)[key] is expected


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_optimizer_step_of_whole_groups_is_explained(library):
    row = find_row(library, "completions of an optimizer step", *PARTS)
    assert ("whole groups" in row) is (library in ("ms-swift", "nemo-rl"))


WEIGHTING = [
    ("ms-swift", "token_truncate", {"mode": "token_truncate", "threshold": 3.0}),
    ("ms-swift", "sequence_mask", {}),
    ("nemo-rl", "token_mask", {"type": "icepop", "ratio": 3.0, "ratio_min": 0.0}),
    ("nemo-rl", "sequence_mask", {}),
    ("verl", "token_truncate", {"is": "token", "is_threshold": 3.0}),
    ("verl", "sequence_mask", {"is": "sequence", "is_threshold": "1e-30_3.0"}),
    ("verl", "off", {}),
]


@pytest.mark.parametrize(("library", "kind", "expected"), WEIGHTING)
def test_each_library_gets_the_weights_that_it_has(library, kind, expected):
    written = write_settings(library, *VLLM, f"rollout.importance_sampling={kind}")
    starts = (
        *("rollout_importance_sampling_", "algorithm.rollout_correction.rollout_"),
        "loss_fn.truncated_importance_sampling_",
    )
    found = {k.removeprefix(s): v for k, v in written.items() for s in starts if k.startswith(s)}
    assert found == expected


@pytest.mark.parametrize("library", ["verl", "nemo-rl"])
def test_the_page_says_that_vllm_samples_whatever_did_in_the_training(library):
    topic = "engine that samples"
    assert "vLLM" in find_row(library, topic, "rollout.engine=transformers")
    assert not find_row(library, topic, *VLLM)
