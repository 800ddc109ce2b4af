"""Exporters: the files that they write, their refusals, and the differences that they list."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from gdpo_tune import export
from gdpo_tune.core import registry
from gdpo_tune.core.errors import ExportError, UsageError
from gdpo_tune.core.trial_config import Segment
from gdpo_tune.exporters.base import format_yaml
from gdpo_tune.exporters.differences_page import PAGE, format_page
from gdpo_tune.exporters.write_export import MERGERS
from gdpo_tune.ledger import Ledger
from tests.support.export import (
    export_to,
    flatten,
    make_recipe,
    make_request,
    parse_settings,
    read_known_keys,
)
from tests.support.tuning import build_outcome, load_code_spec

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


# --- the page -------------------------------------------------------------------------------------


def make_page(library: str, *overrides: str) -> str:
    request = make_request(overrides)
    recipe = make_recipe(request=request)
    return format_page(recipe, export_to(library, recipe), request.spec.list_objectives())


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("trl", "`scale_rewards` beside it has no effect"),
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


@pytest.mark.parametrize("library", MODES)
def test_the_page_says_where_the_precision_differs(library):
    row = "| computed in | bfloat16 on a GPU, float32 elsewhere | bfloat16"
    assert row in make_page(library)
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


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def sweep(tmp_path):
    spec = load_code_spec(tmp_path)
    with Ledger.open(spec) as ledger:
        for number, (correct, form) in enumerate([(0.9, 0.2), (0.7, 0.7), (0.2, 0.9)]):
            params = spec.space.complete_baseline({"reward_weights.format": 0.1 * (number + 1)})
            ledger.start(params, "search", "model", seed=70 + number)
            ledger.complete(number, build_outcome(correct, form, 0.5))
    return spec


def test_a_trial_of_a_sweep_is_exported(sweep, tmp_path, capsys):
    directory, choice = str(sweep.directory), "max correctness where format >= 0.5"
    assert export.main([directory, "--pick", choice, "--to", "verl"]) == 0
    written = tmp_path / "sweep-trial-1-verl"
    names = {"verl.yaml", PAGE, "run.sh", "rewards.py", "prompts.parquet", "policy", "gdpo_sandbox"}
    assert {file.name for file in written.iterdir()} >= names
    assert "gdpo_reward_weights: [1.0, 0.2, 1.0]" in (written / "verl.yaml").read_text()
    assert f"trial 1 of {directory}" in (written / PAGE).read_text()
    printed = capsys.readouterr().out
    assert "trial 1: correctness 0.700" in printed
    assert f"bash {written / 'run.sh'}" in printed
    assert export.main([f"{directory}:knee", "--to", "trl", "--out", str(tmp_path / "o")]) == 0
    assert (tmp_path / "o" / "grpo.yaml").is_file()


def test_a_name_under_runs_is_enough(tmp_path, monkeypatch):
    spec = load_code_spec(tmp_path / "runs")
    with Ledger.open(spec) as ledger:
        ledger.start(spec.space.complete_baseline({}), "search", "model", seed=7)
        ledger.complete(0, build_outcome(0.9, 0.2, 0.5))
    monkeypatch.chdir(tmp_path)
    assert export.main([f"{spec.name}:knee", "--to", "trl", "--out", "o"]) == 0
    assert (tmp_path / "o" / "grpo.yaml").is_file()


def test_the_policy_and_the_budget_may_differ(sweep, tmp_path):
    other = ["--set", "policy=Qwen/Qwen2.5-7B-Instruct", "--set", "training.steps=500"]
    other += ["--recipe", "code_qwen", "--reference-data"]
    out = tmp_path / "o"
    export.main([f"{sweep.directory}:0", "--to", "trl", "--out", str(out), *other])
    text = (out / "grpo.yaml").read_text()
    assert 'model_name_or_path: "Qwen/Qwen2.5-7B-Instruct"' in text or (
        "model_name_or_path: Qwen/Qwen2.5-7B-Instruct" in text
    )
    assert "max_steps: 500" in text


def test_a_file_that_was_edited_is_kept(sweep, tmp_path):
    arguments = [f"{sweep.directory}:knee", "--to", "trl", "--out", str(tmp_path / "o")]
    export.main(arguments)
    assert export.main(arguments) == 0
    (tmp_path / "o" / "grpo.yaml").write_text("mine")
    with pytest.raises(UsageError, match="may be your work"):
        export.main(arguments)
    assert (tmp_path / "o" / "grpo.yaml").read_text() == "mine"


@pytest.mark.parametrize("damage", ["file", "below a file", "binary", "directory", "too long"])
def test_where_nothing_can_be_written(damage, sweep, tmp_path):
    out = tmp_path / "o"
    match damage:
        case "file":
            out.touch()
        case "below a file":
            out.touch()
            out /= "x"
        case "binary":
            out.mkdir()
            (out / "grpo.yaml").write_bytes(b"\xff")
        case "directory":
            (out / "grpo.yaml").mkdir(parents=True)
        case _:
            out /= "x" * 300
    with pytest.raises(UsageError, match=r"cannot be written|may be your work"):
        export.main([f"{sweep.directory}:knee", "--to", "trl", "--out", str(out)])


def test_a_file_has_nothing_to_pick_from(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("a: 1")
    with pytest.raises(UsageError, match="--pick requires a sweep"):
        export.main([str(file), "--pick", "knee", "--to", "trl"])


@pytest.mark.parametrize("library", export.WITHOUT_GDPO)
def test_a_library_without_gdpo_is_refused_with_the_reason(library, capsys):
    with pytest.raises(SystemExit) as caught:
        export.main(["x:knee", "--to", library])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert f"{library} knows one reward per completion" in error
    assert f"choose from {', '.join(sorted(registry.EXPORTERS))}" in error


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from gdpo_tune import export; print(export.build_parser().format_help());"
        "print({'torch', 'optuna', 'pydantic', 'rich', 'ray', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith("set()")
    assert all(name in done.stdout for name in registry.EXPORTERS)
