"""The page of an export: the differences that it lists."""

from __future__ import annotations

import pytest

from gdpo_tune.core import registry
from gdpo_tune.exporters.page import format_page
from gdpo_tune.exporters.write_export import MERGERS
from tests.support.export import (
    export_to,
    flatten,
    make_page,
    make_recipe,
    parse_settings,
)


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("trl", "`scale_rewards` | no such key | has no effect beside"),
        ("axolotl", "adds the weighted rewards up before it normalizes"),
        ("ms-swift", "1e-8"),
        ("ms-swift", "a separate branch without gdpo"),
        ("verl", "whitened over tokens"),
        ("verl", "the newer trainer does not pass the single rewards on"),
        ("nemo-rl", "alphabetical by reward"),
        ("nemo-rl", "eps 0"),
    ],
)
def test_the_page_says_what_differs(library, words):
    assert words in make_page(library)


VLLM = ("rollout.engine=vllm", "resources.gpus=1")
SUM = "space.normalization=grpo_no_std"


@pytest.mark.parametrize("library", ["nemo-rl", "ms-swift"])
def test_the_page_says_where_samples_are_not_weighted_by_their_probabilities(library):
    row = "probabilities that the sampler rounds differently | each completion is weighted"
    assert row in make_page(library, SUM, *VLLM)
    assert "probabilities that the sampler" not in make_page(
        "ms-swift", "rollout.engine=transformers"
    )
    assert "probabilities that the sampler" not in make_page("trl", *VLLM)


@pytest.mark.parametrize("library", ["trl", "axolotl"])
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), (True, "sequence_mask", 3.0)),
        (
            (
                "rollout.importance_sampling=token_truncate",
                "rollout.importance_sampling_cap=2",
            ),
            (True, "token_truncate", 2.0),
        ),
        (("rollout.importance_sampling=off",), (False, None, None)),
    ],
)
def test_libraries_on_trl_get_the_correction_of_what_vllm_sampled(library, overrides, expected):
    settings = flatten(parse_settings(export_to(library, make_recipe(*VLLM, *overrides))))
    keys = ("correction", "mode", "clip_max")
    name = ("trl." if library == "axolotl" else "") + "vllm_importance_sampling_"
    assert expected == tuple(settings.get(name + key) for key in keys)


def test_the_page_says_how_tokens_were_weighted():
    token = (*VLLM, "rollout.importance_sampling=token_truncate", "space.beta=0.01")
    page = make_page("ms-swift", SUM, *token)
    assert "each token is weighted by its probability in the trainer against vLLM" in page
    assert "a ratio above 3 lowered to it | the same, but the KL is weighted too" in page
    for overrides in ((*token, "space.beta=0"), (*VLLM, "rollout.importance_sampling=off")):
        assert "probabilities that the sampler" not in make_page("ms-swift", SUM, *overrides)


@pytest.mark.parametrize("library", sorted({*registry.EXPORTERS} - {*MERGERS}))
def test_the_page_says_where_the_precision_differs(library):
    row = "| computed in | bfloat16 on a GPU, float32 elsewhere | bfloat16"
    chooses = "torch.cuda.is_available()" in export_to(library, make_recipe()).run
    assert (row in make_page(library)) is not chooses
    page = make_page(library, "model.dtype=float32")
    written = export_to(library, make_recipe("model.dtype=float32")).text
    in_file = "float32" in written or "bf16: false" in written
    on_page = "| computed in | float32 | bfloat16" in page
    assert in_file is not on_page, "write it into the file, or pass precision= for the page"
    assert "computed in" not in make_page(library, "model.dtype=bfloat16")


@pytest.mark.parametrize("library", ["verl", "nemo-rl"])
def test_the_page_says_what_a_reward_that_is_not_scored_counts(library):
    assert "counts as a raw 0" in make_page(library)
    assert "counts as a raw 0" in make_page("trl", "space.normalization=grpo")
    assert "counts as a raw 0" not in make_page("trl")


def test_the_page_describes_the_shaping_of_the_rewards():
    overrides = (
        "space.length_shape=overlong",
        "space.length_cache=0.25",
        "space.conditioning.length=correctness",
        "space.conditioning_threshold.length=0.5",
        "space.partial_credit=true",
    )
    text = make_page("trl", *overrides)
    shaped = "1 up to 48 tokens, then in a line to 0 at 64; 0 unless correctness is at least 0.5"
    assert f"| `length` | 0.25 | 0 to 1 | {shaped} |" in text
    assert "partial credit: the share of tests that pass" in text
    assert "1 up to 26 tokens, then in a line to 0 at 64" in make_page(
        "trl", "space.length_shape=ramp"
    )


@pytest.mark.parametrize("library", sorted({*registry.EXPORTERS} - {*MERGERS}))
def test_the_page_begins_with_the_candidate_and_ends_where_the_policy_is(library):
    recipe = make_recipe(chosen=("chosen by 'knee': trial 7: correctness 0.5", "one seed"))
    exported = export_to(library, recipe)
    page = format_page(recipe, exported, [])
    assert "- chosen by 'knee': trial 7: correctness 0.5\n- one seed\n" in page
    assert f"\n    {exported.start}\n" in page
    assert f"Then the policy is in `{exported.result}`." in page
    settings = map(str, flatten(parse_settings(exported)).values())
    written = "".join(settings) + exported.run + exported.conversion
    assert exported.result.removesuffix("/checkpoint-60") in written
    assert "make_prompts.py" not in page
    assert "make_prompts.py FILE" in format_page(recipe, exported, [], references_data=True)


def test_the_command_for_nemo_rl_names_the_checkout():
    assert "\n    NEMO_RL=/path/to/RL bash run.sh\n" in make_page("nemo-rl")


def test_the_page_says_where_its_sizes_are_from():
    assert 'see "Measured differences" in `docs/export.md` of gdpo_tune' in make_page("verl")


@pytest.mark.parametrize(
    ("library", "install"),
    [
        ("trl", "pip install 'trl[peft,vllm]==1.16.0'"),
        ("axolotl", "pip install 'axolotl[vllm]==0.19.0'"),
        ("ms-swift", "pip install ms-swift==4.6.0 msgspec vllm"),
        ("verl", "pip install 'verl[vllm,fsdp]==0.9.1'"),
    ],
)
def test_the_library_installs_the_versions_that_it_works_with(library, install):
    recipe = make_recipe(*VLLM, "model.lora_rank=8")
    assert export_to(library, recipe).install == install
    assert "[" not in export_to("trl", make_recipe()).install
