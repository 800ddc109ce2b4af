"""Exporters: what they write, what they refuse, what they say will differ."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from gdpo_tune import export
from gdpo_tune.core import registry
from gdpo_tune.core.errors import ExportError, UsageError
from gdpo_tune.core.trials import Segment
from gdpo_tune.exporters.differences_page import PAGE, page
from gdpo_tune.exporters.text import leaves, toml_text, yaml_text
from gdpo_tune.ledger import Ledger
from tests.support.export import asked, exported, pinned, recipe, settings
from tests.support.tuning import outcome, spec_in

MODES = {
    "trl": ("gdpo", "grpo", "grpo_no_std", "grpo_batch"),
    "axolotl": ("gdpo", "grpo", "grpo_no_std", "grpo_batch"),
    "ms-swift": ("gdpo", "grpo", "grpo_no_std", "grpo_batch"),
    "verl": ("gdpo", "grpo", "grpo_no_std"),
    "nemo-rl": ("gdpo", "gdpo_no_std", "grpo", "grpo_no_std"),
    "openrlhf": ("grpo", "grpo_no_std"),
    "prime-rl": ("grpo_no_std",),
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
    ("rollout.engine=vllm", "resources.gpus=1"),
    (
        "rollout.engine=vllm",
        "rollout.vllm_mode=server",
        "rollout.vllm_server=http://h:81",
        "resources.gpus=1",
    ),
)


def test_the_table_of_modes_has_every_exporter():
    assert set(MODES) == set(registry.EXPORTERS)


@pytest.mark.parametrize("library", [name for name in MODES if name != "trl"])
def test_every_key_that_is_written_is_one_that_the_library_knows(library):
    known, written = pinned(library), set[str]()
    for mode, variant in itertools.product(MODES[library], VARIANTS):
        try:
            result = exported(library, recipe(f"space.normalization={mode}", *variant))
        except ExportError:
            continue
        found = leaves(settings(result))
        # Composition, and a data set or a scheduler, which the library hands on as they are.
        found = {key: value for key, value in found.items() if not key.startswith("hydra.")}
        written |= {key for key in found if not key.startswith("policy.scheduler.")}
    if library == "verl":
        written.remove("defaults")
    assert written <= known
    assert len(written) > 15


@pytest.mark.parametrize("library", MODES)
@pytest.mark.parametrize("mode", registry.NORMALIZATIONS)
def test_a_mode_that_a_library_lacks_is_refused(library, mode):
    made = recipe(f"space.normalization={mode}")
    if mode in MODES[library]:
        assert exported(library, made).text
        return
    with pytest.raises(ExportError, match="it knows") as caught:
        exported(library, made)
    assert caught.value.exit_status == 2


REFUSED = [
    (("space.gamma=0.5",), ("trl", "verl", "nemo-rl", "ms-swift", "axolotl"), "gamma = 0.5"),
    (("space.normalization=gdpo_no_std",), ("verl",), "norm_adv_by_std_in_grpo on to its GDPO"),
    (("space.num_iterations=2",), ("nemo-rl",), "num_iterations = 2"),
    (("space.loss_type=dr_grpo",), ("nemo-rl",), "loss_type = dr_grpo"),
    (("training.lr_schedule=linear",), ("verl",), "training.lr_schedule = linear"),
    (
        ("space.reward_weights.format=0", "space.reward_weights.length=0"),
        ("nemo-rl",),
        "wants at least 2 rewards",
    ),
    (
        ("space.normalization=grpo", "space.baseline=leave_one_out"),
        ("trl", "axolotl", "verl", "openrlhf"),
        "baseline = leave_one_out",
    ),
    (
        ("policy=a/b", "model.revision=main"),
        ("verl", "nemo-rl"),
        "model.revision = main",
    ),
    (
        ("space.normalization=grpo_no_std", "space.beta=0.1", "space.num_iterations=2"),
        ("prime-rl",),
        "beta = 0.1",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "library", "message"),
    [(given, library, text) for given, libraries, text in REFUSED for library in libraries],
)
def test_what_a_library_would_ignore_is_refused(overrides, library, message):
    with pytest.raises(ExportError) as caught:
        exported(library, recipe(*overrides))
    assert message in str(caught.value)
    assert all(problem.fix and problem.reason for problem in caught.value.problems)


def test_every_reason_is_given_at_once():
    made = recipe("space.normalization=saw", "space.loss_type=cispo", "training.lr_schedule=linear")
    with pytest.raises(ExportError) as caught:
        exported("openrlhf", made)
    assert [problem.key for problem in caught.value.problems] == ["normalization", "loss_type"]


@pytest.mark.parametrize("library", ["trl", "verl", "nemo-rl", "ms-swift", "axolotl"])
def test_values_that_moved_are_refused(library):
    moved = (Segment(20, {"learning_rate": 1e-4}),)
    with pytest.raises(ExportError, match="schedule = 1 changes"):
        exported(library, recipe(schedule=moved))


def test_what_a_mode_ignores_is_no_reason_to_refuse():
    overrides = ("space.normalization=grpo", "space.gamma=0.5")
    assert exported("trl", recipe(*overrides)).text
    assert exported("trl", recipe("space.baseline=leave_one_out")).text  # gdpo whitens it out


# --- values ---------------------------------------------------------------------------------------


def test_weights_have_a_maximum_of_1_and_rewards_without_weight_are_left_out():
    made = recipe("space.reward_weights.length=0")
    assert [(reward.name, reward.weight) for reward in made.rewards] == [
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
    request = asked(overrides, space="math", fixed=())
    made = recipe(request=request)
    assert [reward.name for reward in made.rewards] == ["correctness", "integer", "format"]
    estimator = settings(exported("nemo-rl", made))["grpo"]["adv_estimator"]
    assert estimator["reward_weights"] == [1.0, 0.5, 0.25]  # correctness, format, integer
    assert estimator["use_leave_one_out_baseline"] is False
    keys = settings(exported("verl", made))["algorithm"]
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
    assert leaves(settings(exported(library, recipe(*CISPO))))[path] == pytest.approx(value)
    plain = leaves(settings(exported(library, recipe("space.epsilon_high=0.28"))))
    assert plain[path] in (0.28, 0.2)


@pytest.mark.parametrize(
    ("library", "mode", "found"),
    [
        ("trl", "gdpo", {"multi_objective_aggregation": "normalize_then_sum"}),
        ("trl", "grpo_batch", {"scale_rewards": "batch"}),
        ("axolotl", "gdpo", {"rl": "gdpo"}),
        ("axolotl", "grpo_no_std", {"rl": "grpo", "trl.scale_rewards": "none"}),
        ("ms-swift", "gdpo", {"scale_rewards": "gdpo", "kl_in_reward": False}),
        ("verl", "gdpo", {"algorithm.adv_estimator": "gdpo", "trainer.use_v1": False}),
        ("verl", "grpo", {"algorithm.norm_adv_by_std_in_grpo": True, "trainer.use_v1": True}),
        ("verl", "grpo_no_std", {"algorithm.norm_adv_by_std_in_grpo": False}),
        ("nemo-rl", "gdpo_no_std", {"grpo.adv_estimator.normalize_rewards": False}),
        ("openrlhf", "grpo", {"algo.advantage.estimator": "group_norm"}),
        ("openrlhf", "grpo_no_std", {"algo.advantage.estimator": "dr_grpo"}),
        ("prime-rl", "grpo_no_std", {"orchestrator.algo.type": "grpo"}),
    ],
)
def test_the_switch_of_each_mode(library, mode, found):
    written = leaves(settings(exported(library, recipe(f"space.normalization={mode}"))))
    assert found.items() <= written.items()


def test_trl_is_not_given_a_switch_that_has_no_effect():
    assert "scale_rewards" not in settings(exported("trl", recipe()))


def test_leaving_one_out_is_an_estimator_of_its_own_where_it_can_be_had():
    plain = ("space.normalization=grpo_no_std", "space.baseline=leave_one_out")
    assert settings(exported("verl", recipe(*plain)))["algorithm"]["adv_estimator"] == "rloo"
    swift = settings(exported("ms-swift", recipe(*plain)))
    assert (swift["advantage_estimator"], swift["scale_rewards"]) == ("rloo", "none")
    assert settings(exported("nemo-rl", recipe(*plain)))["grpo"]["use_leave_one_out_baseline"]
    script = settings(exported("openrlhf", recipe(*plain)))
    assert script["algo.advantage.estimator"] == "rloo"


def test_sizes():
    made = recipe("training.micro_batch_size=16", "space.num_iterations=2", "training.steps=50")
    trl = settings(exported("trl", made))
    assert (trl["per_device_train_batch_size"], trl["gradient_accumulation_steps"]) == (16, 4)
    assert trl["max_steps"] == 100
    verl = settings(exported("verl", made))
    assert verl["data"]["train_batch_size"] == 8
    assert verl["actor_rollout_ref"]["actor"]["ppo_epochs"] == 2
    assert verl["trainer"]["total_training_steps"] == 50
    nemo = settings(exported("nemo-rl", recipe()))
    assert nemo["grpo"]["num_prompts_per_step"] == 8
    assert nemo["policy"]["train_global_batch_size"] == 64


def test_nemo_rl_does_not_go_on_from_another_trials_checkpoints():
    folders = {
        settings(exported("nemo-rl", recipe(name=name)))["checkpointing"]["checkpoint_dir"]
        for name in ("code-knee", "code-trial-7")
    }
    assert folders == {"results/code-knee", "results/code-trial-7"}


def test_prime_rl_averages_over_every_token_and_adds_no_kl():
    written = settings(exported("prime-rl", recipe("space.normalization=grpo_no_std")))
    assert written["orchestrator"]["train"]["filter_zero_advantages"] is False
    assert written["trainer"]["loss"] == {"type": "default", "kl_tau": 0.0}
    assert "| `orchestrator.renderer.name` | `default`, unless" in told("prime-rl", SUM)


# --- text -----------------------------------------------------------------------------------------


def test_small_numbers_stay_numbers_for_readers_of_yaml_1_1():
    assert yaml_text({"a": {"b": 3e-05}, "c": []}, ("x",)) == "# x\na:\n  b: 3.0e-05\nc: []\n"


def test_toml_has_values_before_tables():
    text = toml_text({"b": {"c": {"d": 1}, "e": "x"}, "a": True}, ())
    assert text == 'a = true\n\n[b]\ne = "x"\n\n[b.c]\nd = 1\n'


# --- the page -------------------------------------------------------------------------------------


def told(library: str, *overrides: str) -> str:
    request = asked(overrides)
    made = recipe(request=request)
    return page(made, exported(library, made), request.spec.objective_list())


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("trl", "`scale_rewards` beside it has no effect"),
        ("axolotl", "adds the weighted rewards up before it normalises"),
        ("ms-swift", "1e-8"),
        ("ms-swift", "a branch of its own that knows no gdpo"),
        ("verl", "whitened over tokens"),
        ("verl", "the newer trainer does not pass the single rewards on"),
        ("nemo-rl", "alphabetical by reward"),
        ("nemo-rl", "eps 0"),
    ],
)
def test_the_page_says_what_differs(library, words):
    assert words in told(library)


VLLM = ("rollout.engine=vllm", "resources.gpus=1")
SUM = "space.normalization=grpo_no_std"


@pytest.mark.parametrize("library", ["verl", "nemo-rl", "openrlhf", "ms-swift"])
def test_what_nobody_weights_by_the_samplers_probabilities_is_said(library):
    told_row = "probabilities that the sampler rounds otherwise | each completion is weighted"
    assert told_row in told(library, SUM, *VLLM)
    assert "probabilities that the sampler" not in told("ms-swift", "rollout.engine=transformers")
    assert "probabilities that the sampler" not in told("trl", *VLLM)


@pytest.mark.parametrize("library", MODES)
def test_the_page_says_what_is_computed_in_another_precision(library):
    assert "| computed in | bfloat16 on a GPU, float32 elsewhere | bfloat16" in told(library, SUM)
    whole = told(library, SUM, "model.dtype=float32")
    written = exported(library, recipe(SUM, "model.dtype=float32")).text
    settable = "float32" in written or "bf16: false" in written
    assert ("| computed in | float32 | bfloat16" in whole) is not settable
    assert "computed in" not in told(library, SUM, "model.dtype=bfloat16")


def test_the_page_of_a_sum_says_what_to_return():
    text = told("openrlhf", "space.normalization=grpo")
    assert "0.5 * correctness + 1 * format + 0.25 * length" in text
    assert "counts as a raw 0" in told("trl", "space.normalization=grpo")
    assert "counts as a raw 0" not in told("trl")


def test_the_page_says_what_the_training_made_of_the_rewards():
    overrides = (
        "space.length_shape=overlong",
        "space.length_cache=0.25",
        "space.conditioning.length=correctness",
        "space.conditioning_threshold.length=0.5",
        "space.partial_credit=true",
    )
    text = told("trl", *overrides)
    shaped = "1 up to 48 tokens, then in a line to 0 at 64; 0 unless correctness is at least 0.5"
    assert f"| `length` | 0.25 | 0 to 1 | {shaped} |" in text
    assert "partial credit: the share of tests that pass" in text
    assert "1 up to 26 tokens, then in a line to 0 at 64" in told("trl", "space.length_shape=ramp")


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def searched(tmp_path):
    spec = spec_in(tmp_path)
    with Ledger.open(spec) as ledger:
        for number, (correct, form) in enumerate([(0.9, 0.2), (0.7, 0.7), (0.2, 0.9)]):
            params = spec.space.baseline({"reward_weights.format": 0.1 * (number + 1)})
            ledger.start(params, "search", "model", seed=70 + number)
            ledger.complete(number, outcome(correct, form, 0.5))
    return spec


def test_a_trial_of_a_sweep_is_exported(searched, tmp_path, capsys):
    folder, choice = str(searched.directory), "max correctness where format >= 0.5"
    assert export.main([folder, "--pick", choice, "--to", "verl"]) == 0
    written = tmp_path / "sweep-trial-1-verl"
    assert {file.name for file in written.iterdir()} == {"verl.yaml", PAGE}
    assert "gdpo_reward_weights: [1.0, 0.2, 1.0]" in (written / "verl.yaml").read_text()
    assert f"trial 1 of {folder}" in (written / PAGE).read_text()
    printed = capsys.readouterr().out
    assert "trial 1: correctness 0.700" in printed
    assert str(written / "verl.yaml") in printed
    assert "in the folder of that file, start it with: python -m verl" in printed
    assert export.main([f"{folder}:knee", "--to", "trl", "--out", str(tmp_path / "o")]) == 0
    assert (tmp_path / "o" / "grpo.yaml").is_file()


def test_a_name_under_runs_is_enough(tmp_path, monkeypatch):
    spec = spec_in(tmp_path / "runs")
    with Ledger.open(spec) as ledger:
        ledger.start(spec.space.baseline({}), "search", "model", seed=7)
        ledger.complete(0, outcome(0.9, 0.2, 0.5))
    monkeypatch.chdir(tmp_path)
    assert export.main([f"{spec.name}:knee", "--to", "trl", "--out", "o"]) == 0
    assert (tmp_path / "o" / "grpo.yaml").is_file()


def test_the_policy_and_the_budget_may_be_others(searched, tmp_path):
    other = ["--set", "policy=Qwen/Qwen2.5-7B-Instruct", "--set", "training.steps=500"]
    out = tmp_path / "o"
    export.main([f"{searched.directory}:0", "--to", "trl", "--out", str(out), *other])
    text = (out / "grpo.yaml").read_text()
    assert 'model_name_or_path: "Qwen/Qwen2.5-7B-Instruct"' in text or (
        "model_name_or_path: Qwen/Qwen2.5-7B-Instruct" in text
    )
    assert "max_steps: 500" in text


def test_a_file_that_was_edited_is_kept(searched, tmp_path):
    arguments = [f"{searched.directory}:knee", "--to", "trl", "--out", str(tmp_path / "o")]
    export.main(arguments)
    assert export.main(arguments) == 0
    (tmp_path / "o" / "grpo.yaml").write_text("mine")
    with pytest.raises(UsageError, match="may be your work"):
        export.main(arguments)
    assert (tmp_path / "o" / "grpo.yaml").read_text() == "mine"


@pytest.mark.parametrize("damage", ["file", "below a file", "binary", "folder", "too long"])
def test_where_nothing_can_be_written(damage, searched, tmp_path):
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
        case "folder":
            (out / "grpo.yaml").mkdir(parents=True)
        case _:
            out /= "x" * 300
    with pytest.raises(UsageError, match=r"cannot be written|may be your work"):
        export.main([f"{searched.directory}:knee", "--to", "trl", "--out", str(out)])


def test_a_file_has_nothing_to_pick_from(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("a: 1")
    with pytest.raises(UsageError, match="--pick goes with a sweep"):
        export.main([str(file), "--pick", "knee", "--to", "trl"])


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from gdpo_tune import export; print(export.parser().format_help());"
        "print({'torch', 'optuna', 'pydantic', 'rich', 'ray', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith("set()")
    assert all(name in done.stdout for name in registry.EXPORTERS)
