"""Exporters: the files that they write, and their refusals."""

from __future__ import annotations

import itertools

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.errors import ExportError
from gdpo_tune.core.trial_config import Segment
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

MODES = {
    "trl": ("gdpo", "grpo", "grpo_no_std", "grpo_batch"),
    "axolotl": ("gdpo", "grpo", "grpo_no_std", "grpo_batch"),
    "ms-swift": ("gdpo", "grpo", "grpo_no_std", "grpo_batch"),
    "verl": ("gdpo", "grpo", "grpo_no_std"),
    "nemo-rl": ("gdpo", "gdpo_no_std", "grpo", "grpo_no_std"),
}
VARIANTS = (
    (),
    ("space.loss_type=cispo", "space.epsilon_high=0.28"),
    ("space.loss_type=dr_grpo", "space.beta=0.01"),
    ("space.loss_type=grpo", "training.warmup_share=0.2", "training.lr_schedule=cosine"),
    ("training.warmup_share=0.2", "training.lr_schedule=linear", "training.micro_batch_size=16"),
    ("model.lora_rank=8",),
    ("model.lora_rank=8", "model.lora_targets=[q_proj]", "space.beta=0.01"),
    ("space.baseline=leave_one_out",),
    ("space.num_iterations=2",),
    ("training.mini_batch_size=16",),
    ("rollout.engine=vllm", "resources.gpus=1"),
    (
        "rollout.engine=vllm",
        "rollout.vllm_mode=server",
        "rollout.vllm_server=http://h:81",
        "resources.gpus=1",
    ),
)


def test_the_modes_of_every_exporter_are_tested():
    assert set(MODES) == set(registry.EXPORTERS) - set(MERGERS)


@pytest.mark.parametrize("library", [name for name in MODES if name != "trl"])
def test_every_key_that_is_written_is_one_that_the_library_knows(library):
    written = set[str]()
    for mode, variant in itertools.product(MODES[library], VARIANTS):
        try:
            result = export_to(library, make_recipe(f"space.normalization={mode}", *variant))
        except ExportError:
            continue
        # Keys of Hydra, of a scheduler, and of an environment, which the library passes on as they
        # are.
        others = ("hydra.", "policy.scheduler.", "env.gdpo.")
        written |= {key for key in flatten(parse_settings(result)) if not key.startswith(others)}
    if library == "verl":
        written.remove("defaults")
    assert written <= read_known_keys(library)
    assert written


@pytest.mark.parametrize("library", MODES)
@pytest.mark.parametrize("variant", VARIANTS[1:], ids=" ".join)
def test_a_setting_is_written_or_explained_or_refused(library, variant):
    grpo = "space.normalization=grpo"  # which ignores none of them
    plain = export_to(library, make_recipe(grpo))
    try:
        changed = export_to(library, make_recipe(grpo, *variant))
    except ExportError:
        return
    explained = make_page(library, grpo, *variant) != make_page(library, grpo)
    assert changed.text != plain.text or explained


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


REFUSED = [
    (("space.gamma=0.5",), tuple(MODES), "gamma = 0.5"),
    (("space.normalization=gdpo_no_std",), ("verl",), "norm_adv_by_std_in_grpo on to its GDPO"),
    (("space.normalization=gd2po",), ("verl",), "only its authors' fork of verl has"),
    (("space.num_iterations=2",), ("nemo-rl",), "num_iterations = 2"),
    (("space.loss_type=dr_grpo",), ("nemo-rl",), "loss_type = dr_grpo"),
    (("training.lr_schedule=linear",), ("verl",), "training.lr_schedule = linear"),
    (
        ("space.reward_weights.format=0", "space.reward_weights.length=0"),
        ("nemo-rl",),
        "needs at least 2 rewards",
    ),
    (
        ("space.normalization=grpo", "space.baseline=leave_one_out"),
        ("trl", "axolotl", "verl"),
        "baseline = leave_one_out",
    ),
    (
        ("policy=a/b", "model.revision=main"),
        ("verl", "nemo-rl"),
        "model.revision = main",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "library", "message"),
    [(changes, library, text) for changes, libraries, text in REFUSED for library in libraries],
)
def test_a_setting_that_a_library_would_ignore_is_refused(overrides, library, message):
    with pytest.raises(ExportError) as caught:
        export_to(library, make_recipe(*overrides))
    assert message in str(caught.value)
    assert all(problem.fix and problem.reason for problem in caught.value.problems)


def test_every_reason_is_given_at_once():
    recipe = make_recipe(
        "space.normalization=saw", "space.loss_type=dr_grpo", "space.num_iterations=2"
    )
    with pytest.raises(ExportError) as caught:
        export_to("nemo-rl", recipe)
    assert [problem.key for problem in caught.value.problems] == [
        "normalization",
        "loss_type",
        "num_iterations",
    ]


@pytest.mark.parametrize("library", ["trl", "verl", "nemo-rl", "ms-swift", "axolotl"])
def test_values_that_moved_are_refused(library):
    moved = (Segment(20, {"learning_rate": 1e-4}),)
    with pytest.raises(ExportError, match="schedule = 1 changes"):
        export_to(library, make_recipe(schedule=moved))


def test_a_parameter_that_the_mode_ignores_is_not_refused():
    overrides = ("space.normalization=grpo", "space.gamma=0.5")
    assert export_to("trl", make_recipe(*overrides)).text
    assert export_to("trl", make_recipe("space.baseline=leave_one_out")).text  # gdpo whitens it out


# --- values ---------------------------------------------------------------------------------------


def test_weights_have_a_maximum_of_1_and_rewards_without_weight_are_left_out():
    recipe = make_recipe("space.reward_weights.length=0")
    assert [(reward.name, reward.weight) for reward in recipe.rewards] == [
        ("correctness", 0.5),
        ("format", 1.0),
    ]


def test_weights_for_nemo_rl_are_in_the_alphabetical_order_of_their_rewards():
    overrides = [
        "task=gsm8k",
        "constraints={}",
        "objectives={}",
        "objectives.correctness={direction: maximize, reference: 0}",
        "space={}",
        "space.reward_weights={correctness: 1, format: 0.5, integer: 0.25}",
    ]
    request = make_request(overrides, space="math", fixed=())
    recipe = make_recipe(request=request)
    assert [reward.name for reward in recipe.rewards] == ["correctness", "integer", "format"]
    estimator = parse_settings(export_to("nemo-rl", recipe))["grpo"]["adv_estimator"]
    assert estimator["reward_weights"] == [1.0, 0.5, 0.25]  # correctness, format, integer
    assert estimator["use_leave_one_out_baseline"] is False
    keys = parse_settings(export_to("verl", recipe))["algorithm"]
    assert keys["gdpo_reward_keys"] == ["correctness", "integer", "format"]
    assert keys["gdpo_reward_weights"] == [1.0, 0.25, 0.5]


CISPO = ("space.loss_type=cispo", "space.epsilon_high=0.28")


@pytest.mark.parametrize(
    ("library", "path", "value"),
    [
        ("trl", "epsilon_high", 1.28),
        ("axolotl", "trl.epsilon_high", 1.28),
        ("ms-swift", "epsilon_high", 1.28),
        ("verl", "actor_rollout_ref.actor.clip_ratio_high", 0.28),
        ("verl", "actor_rollout_ref.actor.clip_ratio_low", 1.0),
        ("nemo-rl", "loss_fn.ratio_clip_max", 0.28),
        ("nemo-rl", "loss_fn.ratio_clip_min", 1.0),
    ],
)
def test_the_upper_clip_of_cispo_is_what_each_library_takes(library, path, value):
    assert flatten(parse_settings(export_to(library, make_recipe(*CISPO))))[path] == pytest.approx(
        value
    )
    plain = flatten(parse_settings(export_to(library, make_recipe("space.epsilon_high=0.28"))))
    assert plain[path] in (0.28, 0.2)


@pytest.mark.parametrize(
    ("library", "mode", "switches"),
    [
        ("trl", "gdpo", {"multi_objective_aggregation": "normalize_then_sum"}),
        ("trl", "grpo_batch", {"scale_rewards": "batch"}),
        (
            "axolotl",
            "gdpo",
            {"rl": "grpo", "trl.multi_objective_aggregation": "normalize_then_sum"},
        ),
        ("axolotl", "grpo_no_std", {"rl": "grpo", "trl.scale_rewards": "none"}),
        ("ms-swift", "gdpo", {"scale_rewards": "gdpo", "kl_in_reward": False}),
        ("verl", "gdpo", {"algorithm.adv_estimator": "gdpo", "trainer.use_v1": False}),
        ("verl", "grpo", {"algorithm.norm_adv_by_std_in_grpo": True, "trainer.use_v1": True}),
        ("verl", "grpo_no_std", {"algorithm.norm_adv_by_std_in_grpo": False}),
        ("nemo-rl", "gdpo_no_std", {"grpo.adv_estimator.normalize_rewards": False}),
    ],
)
def test_the_switch_of_each_mode(library, mode, switches):
    written = flatten(
        parse_settings(export_to(library, make_recipe(f"space.normalization={mode}")))
    )
    assert switches.items() <= written.items()


@pytest.mark.parametrize(
    ("library", "path", "value"),
    [
        ("trl", "use_bias_correction_kl", True),
        ("axolotl", "trl.use_bias_correction_kl", True),
        ("verl", "actor_rollout_ref.actor.kl_loss_type", "low_var_kl+"),
    ],
)
def test_the_gradient_of_the_kl_is_written(library, path, value):
    written = flatten(parse_settings(export_to(library, make_recipe("space.beta=0.01"))))
    assert written[path] == value


@pytest.mark.parametrize(
    ("library", "overrides", "words"),
    [
        ("axolotl", (), "`use_bias_correction_kl` is off there, so the file turns it on"),
        ("verl", ("space.num_iterations=2",), "do not multiply it by the ratio"),
        ("ms-swift", (), "of k3 alone, which is not that of the reverse KL"),
    ],
)
def test_the_page_names_the_gradient_of_the_kl(library, overrides, words):
    assert words in make_page(library, "space.beta=0.01", *overrides)
    topic = "| gradient of the KL | k3 times the ratio of probabilities"
    assert (topic in make_page(library, "space.beta=0.01", *overrides)) is (library != "axolotl")
    assert topic not in make_page(library, "space.beta=0", *overrides)


def test_trl_is_not_given_a_switch_that_has_no_effect():
    assert "scale_rewards" not in parse_settings(export_to("trl", make_recipe()))


def test_leave_one_out_is_an_estimator_of_its_own_if_the_library_has_it():
    plain = ("space.normalization=grpo_no_std", "space.baseline=leave_one_out")
    assert (
        parse_settings(export_to("verl", make_recipe(*plain)))["algorithm"]["adv_estimator"]
        == "rloo"
    )
    swift = parse_settings(export_to("ms-swift", make_recipe(*plain)))
    assert (swift["advantage_estimator"], swift["scale_rewards"]) == ("rloo", "none")
    assert parse_settings(export_to("nemo-rl", make_recipe(*plain)))["grpo"][
        "use_leave_one_out_baseline"
    ]


def test_sizes():
    recipe = make_recipe(
        "training.micro_batch_size=16", "space.num_iterations=2", "training.steps=50"
    )
    trl = parse_settings(export_to("trl", recipe))
    assert (trl["per_device_train_batch_size"], trl["gradient_accumulation_steps"]) == (16, 4)
    assert trl["max_steps"] == 100
    verl = parse_settings(export_to("verl", recipe))
    assert verl["data"]["train_batch_size"] == 8
    assert verl["actor_rollout_ref"]["actor"]["ppo_epochs"] == 2
    assert verl["trainer"]["total_training_steps"] == 50
    nemo = parse_settings(export_to("nemo-rl", make_recipe()))
    assert nemo["grpo"]["num_prompts_per_step"] == 8
    assert nemo["policy"]["train_global_batch_size"] == 64


def test_nemo_rl_does_not_resume_from_checkpoints_of_another_trial():
    directories = {
        parse_settings(export_to("nemo-rl", make_recipe(name=name)))["checkpointing"][
            "checkpoint_dir"
        ]
        for name in ("code-knee", "code-trial-7")
    }
    here = "${oc.env:PWD}/results"
    assert directories == {f"{here}/code-knee", f"{here}/code-trial-7"}


# --- text -----------------------------------------------------------------------------------------


def test_small_numbers_stay_numbers_for_readers_of_yaml_1_1():
    assert format_yaml({"a": {"b": 3e-05}, "c": []}, "x") == "# x\na:\n  b: 3.0e-05\nc: []\n"
