"""Configurations that exporters write: their keys and values, and what is refused."""

import itertools
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from gdpo_tune.core import registry
from gdpo_tune.core.errors import ExportError
from gdpo_tune.exporters.library import format_yaml
from gdpo_tune.exporters.write_export import MERGERS
from tests.support.export import (
    export_to,
    flatten,
    make_page,
    make_recipe,
    make_request,
    parse_settings,
    read_known_keys,
)
from tests.support.export_batch import SIZES
from tests.support.tables import cases, read_table

MODES = {
    "trl": ("gdpo", "grpo", "grpo_no_std", "grpo_batch"),
    "axolotl": ("gdpo", "grpo", "grpo_no_std", "grpo_batch"),
    "ms-swift": ("gdpo", "grpo", "grpo_no_std", "grpo_batch"),
    "verl": ("gdpo", "grpo", "grpo_no_std"),
    "nemo-rl": ("gdpo", "gdpo_no_std", "grpo", "grpo_no_std"),
}
VLLM = ("rollout.engine=vllm", "resources.gpus=1")
VARIANTS = [[], *(words.split() for [words] in read_table("cases_exporters")["variants"][1:])]


def test_the_modes_of_every_exporter_are_tested():
    assert set(MODES) == set(registry.EXPORTERS) - set(MERGERS), "each has its entry in MODES"


@pytest.mark.parametrize("library", [name for name in MODES if name != "trl"])
def test_every_key_that_is_written_is_one_that_the_library_knows(library):
    written = set[str]()
    for mode, variant in itertools.product(MODES[library], VARIANTS):
        try:
            result = export_to(library, make_recipe(f"space.normalization={mode}", *variant))
        except ExportError:
            continue
        # Keys of Hydra, of a scheduler and of an environment are passed on as they are.
        others = ("hydra.", "policy.scheduler.", "env.gdpo.")
        written |= {key for key in flatten(parse_settings(result)) if not key.startswith(others)}
    assert written
    assert written - {"defaults"} <= read_known_keys(library)


@pytest.mark.parametrize("library", MODES)
@cases("exporters", "variants")
def test_a_setting_is_written_or_explained_or_refused(library, variant):
    mode = "grpo" if "grpo" in MODES[library] else MODES[library][0]  # grpo ignores none of them
    mode = f"space.normalization={mode}"
    plain = export_to(library, make_recipe(mode))
    try:
        changed = export_to(library, make_recipe(mode, *variant.split()))
    except ExportError:
        return
    if (changed.text, changed.run) == (plain.text, plain.run):
        assert make_page(library, mode, *variant.split()) != make_page(library, mode)


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", MODES)
@pytest.mark.parametrize("mode", registry.NORMALIZATIONS)
def test_a_mode_that_a_library_lacks_is_refused(library, mode):
    recipe = make_recipe(f"space.normalization={mode}")
    if mode in MODES[library]:
        assert export_to(library, recipe).text
        return
    with pytest.raises(ExportError, match="it knows") as caught:
        export_to(library, recipe)
    assert caught.value.exit_status == 2


@cases("exporters", "refused")
def test_a_setting_that_a_library_would_ignore_is_refused(library, overrides, message):
    with pytest.raises(ExportError) as caught:
        export_to(library, make_recipe(*overrides))
    assert message in str(caught.value)
    assert all(problem.fix and problem.reason for problem in caught.value.problems)


def test_fields_of_trl_are_those_of_its_configuration():
    fields = "space.trl={weight_decay: 0.1, importance_sampling_level: sequence, delta: 2}"
    settings = parse_settings(export_to("trl", make_recipe(fields)))
    names = ("weight_decay", "importance_sampling_level", "delta", "use_bias_correction_kl")
    assert [settings[name] for name in names] == [0.1, "sequence", 2.0, True]


def test_every_reason_is_given_at_once():
    settings = ("normalization=saw", "loss_type=dr_grpo", "num_iterations=2")
    with pytest.raises(ExportError) as caught:
        export_to("nemo-rl", make_recipe(*(f"space.{setting}" for setting in settings)))
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["normalization", "loss_type", "num_iterations"]


def test_a_parameter_that_the_mode_ignores_is_not_refused():
    overrides = ("space.normalization=grpo", "space.gamma=0.5")
    assert export_to("trl", make_recipe(*overrides)).text
    assert export_to("trl", make_recipe("space.baseline=leave_one_out")).text  # gdpo whitens it out


# Values -------------------------------------------------------------------------------------------

ABSENT = "absent"
WRITTEN = YAML(typ="safe").load(Path(__file__).with_name("values.yaml"))


@pytest.mark.parametrize(("library", "overrides", "expected"), WRITTEN)
def test_values_in_the_terms_of_each_library(library, overrides, expected):
    written = flatten(parse_settings(export_to(library, make_recipe(*SIZES, *overrides))))
    assert {key: written.get(key, ABSENT) for key in expected} == expected


TERMS = [
    (library, override, key, value)
    for override, value, *keys in read_table("cases_exporters")["terms"][1:]
    for library, key in zip(MODES, keys, strict=True)
    if key
]


@pytest.mark.parametrize(("library", "override", "key", "value"), TERMS)
def test_a_setting_has_its_value_in_the_terms_of_every_library(library, override, key, value):
    written = flatten(parse_settings(export_to(library, make_recipe(*SIZES, override))))
    assert written[key] == value


def test_weights_have_a_maximum_of_1_and_an_order_of_the_library():
    """Those of NeMo-RL are in the alphabetical order of their rewards; none of 0 is written."""
    recipe = make_recipe("space.reward_weights.length=0")
    weights = [(reward.name, reward.weight) for reward in recipe.rewards]
    assert weights == [("correctness", 0.5), ("format", 1.0)]
    overrides = [
        *("task=gsm8k", "constraints={}", "objectives={}", "space={}"),
        "objectives.correctness={direction: maximize, reference: 0}",
        "space.reward_weights={correctness: 1, format: 0.5, integer: 0.25}",
    ]
    recipe = make_recipe(request=make_request(overrides, space="math", fixed=()))
    assert [reward.name for reward in recipe.rewards] == ["correctness", "integer", "format"]
    estimator = parse_settings(export_to("nemo-rl", recipe))["grpo"]["adv_estimator"]
    assert estimator["reward_weights"] == [1.0, 0.5, 0.25]  # correctness, format, integer
    assert estimator["use_leave_one_out_baseline"] is False
    keys = parse_settings(export_to("verl", recipe))["algorithm"]
    assert keys["gdpo_reward_keys"] == ["correctness", "integer", "format"]
    assert keys["gdpo_reward_weights"] == [1.0, 0.25, 0.5]


@cases("exporters", "policy values")
def test_values_that_follow_from_the_policy(library, fields, expected):
    exported = export_to(library, make_recipe(**fields))
    written = flatten(parse_settings(exported))
    assert {key: written.get(key, ABSENT) for key in expected} == expected
    assert not exported.required_inputs


def test_ms_swift_asks_for_the_architecture_of_a_directory():
    recipe = make_recipe(policy="/data/policy", policy_name="/data/policy")
    assert list(export_to("ms-swift", recipe).required_inputs) == ["model_type"]


@pytest.mark.parametrize("library", ["ms-swift", "axolotl"])
def test_the_precision_of_the_training_is_that_of_the_machine(library):
    checkpointing = {"ms-swift": "--gradient_checkpointing", "axolotl": "--gradient-checkpointing"}
    run = export_to(library, make_recipe("model.gradient_checkpointing=auto")).run
    assert f'--bf16 "$gpu" {checkpointing[library]} "$gpu" "$@"' in run
    fixed = make_recipe("model.dtype=float32", "model.gradient_checkpointing=off")
    assert "$gpu" not in export_to(library, fixed).run


@cases("exporters", "installs")
def test_the_library_installs_the_versions_that_it_works_with(library, install):
    assert export_to(library, make_recipe(*VLLM, "model.lora_rank=8")).install == install
    assert "[" not in export_to("trl", make_recipe()).install


def test_small_numbers_stay_numbers_for_readers_of_yaml_1_1():
    assert format_yaml({"a": {"b": 3e-05}, "c": []}, "x") == "# x\na:\n  b: 3.0e-05\nc: []\n"
