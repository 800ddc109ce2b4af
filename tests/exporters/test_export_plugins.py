"""Modules of an export that ms-swift and Axolotl import, with stand-ins for both."""

from __future__ import annotations

import pytest

from gdpo_tune.exporters.runtime_prompts import ExportedPrompt, build_message_row
from gdpo_tune.exporters.write_export import export_training
from tests.support.export import (
    export_to,
    make_recipe,
    make_request,
    parse_settings,
    read_prompts,
    run_in_export,
)

COMPLETIONS = ["<think>x</think><answer>def f(x): return x</answer>", "def f(x): return x"]
LENGTHS = [26, 27]
STAND_INS = """
import json, sys, types
sys.modules["gdpo_tune"] = None  # as where it is not installed
for name in ("swift", "axolotl", "axolotl.integrations"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["swift.rewards"] = types.SimpleNamespace(orms={})
sys.modules["axolotl.integrations.base"] = types.SimpleNamespace(BasePlugin=object)
"""
JUDGE = """
import inspect, rewards
problems, completions, lengths = json.load(sys.stdin)
judge, batches = rewards.JUDGE.judge, []
def count(self, *batch):
    batches.append(batch)
    return judge(*batch)
type(rewards.JUDGE).judge = count
tokens = [[0] * length for length in lengths]
"""
SWIFT = """
orms = sys.modules["swift.rewards"].orms
classes = {name: each(args=None) for name, each in orms.items()}
call = dict(completions=completions, response_token_ids=tokens, problem=problems, trainer_state=0)
values = {name: each(**call) for name, each in classes.items()}
names = [type(each).__name__ for each in classes.values()]
print(json.dumps([values, names, judge(problems, completions, lengths), len(batches)]))
"""
AXOLOTL = """
from keep_order import KeepOrder
functions = {name: getattr(rewards, name) for name in sys.argv[1:]}
# Axolotl refuses a function with fewer parameters.
assert all(len(inspect.signature(each).parameters) >= 2 for each in functions.values())
call = dict(prompts=[], completions=completions, completion_ids=tokens, problem=problems)
values = {name: each(**call) for name, each in functions.items()}
plugin = KeepOrder().get_training_args(None)
print(json.dumps([values, plugin, judge(problems, completions, lengths), len(batches)]))
"""


def judge_in_export(directory, program, *arguments):
    problems = [row["problem"] for row in read_prompts(directory)[:2]]
    batch = problems, COMPLETIONS, LENGTHS
    return run_in_export(directory, STAND_INS + JUDGE + program, batch, *arguments)


def export_folder(library, directory, *overrides):
    request = make_request((*overrides, "training.train_prompts=16"))
    return export_training(request, library, "", directory)[0]


def test_ms_swift_gets_a_class_for_each_reward(tmp_path):
    exported = export_folder("ms-swift", tmp_path)
    values, names, expected, batches = judge_in_export(tmp_path, SWIFT)
    assert list(values) == parse_settings(exported)["reward_funcs"]
    assert names == ["correctness", "format", "length"]
    assert values == {f"{name}_reward": expected[name] for name in names}
    assert expected["length"] == [1.0, 0.0]
    assert batches == 1


def test_axolotl_gets_functions_and_keeps_the_order(tmp_path):
    settings = parse_settings(export_folder("axolotl", tmp_path))
    functions = [name.removeprefix("rewards.") for name in settings["trl"]["reward_funcs"]]
    values, plugin, expected, batches = judge_in_export(tmp_path, AXOLOTL, *functions)
    assert values == {name: expected[name.removesuffix("_reward")] for name in functions}
    assert settings["plugins"] == ["keep_order.KeepOrder"]
    assert plugin == {"shuffle_dataset": False}
    assert batches == 1


def test_ms_swift_reads_the_text_of_a_policy_without_a_chat_template():
    row = build_message_row(ExportedPrompt("2+2=", None, "{}"), 0)
    assert row == {"messages": [{"role": "user", "content": "2+2="}], "problem": "{}"}
    settings = parse_settings(export_to("ms-swift", make_recipe(is_chat=False)))
    assert (settings["template"], settings["use_chat_template"]) == ("dummy", False)


def test_ms_swift_reads_the_turns_of_a_policy_with_a_chat_template():
    turns = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2+2="}]
    assert build_message_row(ExportedPrompt("", turns, "{}"), 0)["messages"] == turns
    exported = export_to("ms-swift", make_recipe(is_chat=True))
    assert not {"template", "use_chat_template"} & set(parse_settings(exported))
    assert "chat template" in [row.topic for row in exported.differences]


@pytest.mark.parametrize(
    ("policy", "settings", "supplies"),
    [
        ("embedded", {"model_type": "llama"}, []),
        ("org/name", {}, []),
        ("/data/policy", {}, ["model_type"]),
    ],
)
def test_ms_swift_asks_for_the_architecture_of_a_directory(policy, settings, supplies):
    exported = export_to("ms-swift", make_recipe(policy=policy, policy_name=policy))
    written = parse_settings(exported)
    assert {key: written[key] for key in written if key == "model_type"} == settings
    assert list(exported.required_inputs) == supplies


@pytest.mark.parametrize("library", ["ms-swift", "axolotl"])
def test_the_precision_of_the_training_is_that_of_the_machine(library):
    checkpointing = {"ms-swift": "--gradient_checkpointing", "axolotl": "--gradient-checkpointing"}
    assert f'--bf16 "$gpu" {checkpointing[library]} "$gpu" "$@"' in (
        export_to(library, make_recipe("model.gradient_checkpointing=auto")).run
    )
    fixed = make_recipe("model.dtype=float32", "model.gradient_checkpointing=off")
    assert "$gpu" not in export_to(library, fixed).run


@pytest.mark.parametrize(
    ("changes", "differs"),
    [((), True), (("model.dtype=float32",), False), (("model.lora_rank=8",), False)],
)
def test_axolotl_keeps_trained_weights_in_bfloat16(changes, differs):
    exported = export_to("axolotl", make_recipe(*changes))
    topics = [row.topic for row in exported.differences]
    assert ("weights that are trained" in topics) == differs


@pytest.mark.parametrize(
    ("library", "key"),
    [("ms-swift", "per_device_train_batch_size"), ("axolotl", "micro_batch_size")],
)
def test_the_page_says_what_several_processes_and_passes_change(library, key):
    again = ("training.train_prompts=100", "training.steps=60")
    rows = {row.topic: row.theirs for row in export_to(library, make_recipe(*again)).differences}
    assert rows["completions of a step"].startswith(f"{key} x ")
    assert key in parse_settings(export_to(library, make_recipe()))
    assert rows["order of the prompts"] == "as in the file in every pass"
