"""Rewards, prompts and programs of exported folders, without the libraries that read them."""

import asyncio
import inspect
import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gdpo_tune.exporters import runtime
from gdpo_tune.exporters.runtime_prompts import ExportedPrompt, build_message_row, build_verl_row
from gdpo_tune.exporters.write_export import export_training
from gdpo_tune.policies.prompt_choice import find_text_prefix
from gdpo_tune.policies.prompt_format import PromptFormat
from tests.support.export import (
    export_folder,
    export_to,
    load_rewards,
    make_recipe,
    make_request,
    parse_settings,
    read_prompts,
)
from tests.support.export_batch import NAMES
from tests.support.library_runs import build_first_batch

MESSAGES = [{"role": "system", "content": "above"}, {"role": "user", "content": "ask"}]
CHAT, PLAIN = ExportedPrompt("above\n\nask", MESSAGES, "{}"), ExportedPrompt("ask", None, "{}")
COMPLETIONS = ["<think>x</think><answer>7</answer>", "7"]


@pytest.fixture
def load_counted(monkeypatch):
    """A function that returns the rewards of a folder, and the batches that they score from now."""

    def load(directory):
        rewards, batches = load_rewards(directory), []
        score = rewards.SCORER.score
        counted = lambda self, *values: batches.append(values) or score(*values)  # noqa: E731
        monkeypatch.setattr(type(rewards.SCORER), "score", counted)
        return rewards, batches

    return load


@pytest.fixture
def stand_in(monkeypatch):
    """A function that lets `import NAME` give something with these contents."""

    def stand_in(name, **contents):
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(name))
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**contents))

    return stand_in


@pytest.mark.parametrize("library", ["ms-swift", "axolotl"])
def test_ms_swift_and_axolotl_score_a_batch_once(tmp_path, load_counted, stand_in, library):
    request = make_request(("training.train_prompts=16",), "math")
    settings = parse_settings(export_training(request, library, "", tmp_path)[0])
    orms: dict[str, type] = {}
    stand_in("swift.rewards", orms=orms)
    rewards, batches = load_counted(tmp_path)
    problems = [row["problem"] for row in read_prompts(tmp_path)[:2]]
    call = {"completions": COMPLETIONS, "problem": problems, "trainer_state": 0}
    limit = request.spec.training.length_limit
    tokens = [[0] * limit, [0] * (limit + 1)]
    if library == "ms-swift":
        classes = {name: each(args=None) for name, each in orms.items()}
        assert list(classes) == settings["reward_funcs"]
        assert [type(each).__name__ for each in classes.values()] == list(NAMES)
        given = {name: each(**call, response_token_ids=tokens) for name, each in classes.items()}
    else:
        names = [name.removeprefix("rewards.") for name in settings["trl"]["reward_funcs"]]
        functions = {name: getattr(rewards, name) for name in names}
        # Axolotl refuses a function with fewer parameters.
        assert all(len(inspect.signature(each).parameters) >= 2 for each in functions.values())
        given = {name: each(**call, completion_ids=tokens) for name, each in functions.items()}
    assert len(batches) == 1
    expected = rewards.SCORER.score(problems, COMPLETIONS, [limit, limit + 1])
    assert given == {f"{name}_reward": expected[name] for name in NAMES}
    assert expected["length"] == [1.0, 0.0]


def test_axolotl_keeps_the_order_of_the_prompts(stand_in):
    exported = export_to("axolotl", make_recipe())
    stand_in("axolotl.integrations.base", BasePlugin=object)
    plugin: dict[str, type] = {}
    exec(exported.training.others["keep_order.py"], plugin)
    assert parse_settings(exported)["plugins"] == ["keep_order.KeepOrder"]
    assert plugin["KeepOrder"]().get_training_args(None) == {"shuffle_dataset": False}


class Rows(list):
    """Stand-in for verl's container of rows, of which a slice is one too."""

    def __getitem__(self, place):
        return Rows(list(self)[place]) if isinstance(place, slice) else list(self)[place]


def build_rows(problem, tokens, longest=64):
    """Return a completion as verl's reward loop passes it on: padded, below its prompt."""
    padding = torch.zeros(longest - len(tokens), dtype=torch.long)
    responses = torch.cat([torch.tensor(tokens), padding])
    mask = torch.cat([torch.ones(5), (torch.arange(longest) < len(tokens)).float()])
    batch = {"responses": responses, "attention_mask": mask}
    return Rows([SimpleNamespace(batch=batch, non_tensor_batch={"reward_model": problem})])


def ask_all(manager, problems, completions, **options):
    async def ask():
        asked = [
            manager.run_single(build_rows({"ground_truth": problem}, tokens))
            for problem, group in zip(problems, completions, strict=True)
            for tokens in group
        ]
        return await asyncio.gather(*asked, **options)

    return asyncio.run(ask())


def test_verl_gets_the_rewards_of_a_trial_in_one_batch(tmp_path, load_counted):
    request = export_folder(tmp_path, space="math", library="verl")
    problems = [row["reward_model"]["ground_truth"] for row in read_prompts(tmp_path)[:3]]
    batch = build_first_batch(request, tmp_path, problems)
    rewards, batches = load_counted(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    manager = rewards.RewardManager(None, tokenizer, None, reward_router_address=None)
    outputs = ask_all(manager, problems, batch.completions)
    assert len(batches) == 1
    for name, values in batch.rewards.items():
        given = [output["reward_extra_info"][name] for output in outputs]
        assert given == pytest.approx(values), name
    scores = [output["reward_score"] for output in outputs]
    assert scores == pytest.approx((batch.values @ batch.weights).tolist())


def build_manager(monkeypatch, score, **weights):
    monkeypatch.setattr(runtime.RewardScorer, "score_each", staticmethod(score))
    given = runtime.RewardScorer("math", None, None, None, {}, "strict", weights)
    tokenizer = SimpleNamespace(decode=lambda tokens, **_: "x" * len(tokens))
    manager = runtime.VerlRewardManager(None, tokenizer, None)
    manager.scorer = given
    return manager


def test_completions_that_come_while_others_are_scored_wait_for_the_next_batch(monkeypatch):
    sizes, begun = [], asyncio.Event()

    def score(problems, completions, lengths):
        sizes.append(len(problems))
        loop.call_soon_threadsafe(begun.set)
        return [{"length": float(length)} for length in lengths]

    async def ask():
        nonlocal loop
        loop = asyncio.get_running_loop()

        def start(length):
            rows = build_rows({"ground_truth": "p"}, [1] * length)
            return asyncio.create_task(manager.run_single(rows))

        first = start(1)
        await begun.wait()
        later = [start(length) for length in (2, 3, 4)]
        return [(await each)["reward_extra_info"]["length"] for each in (first, *later)]

    loop = None
    manager = build_manager(monkeypatch, score)
    assert asyncio.run(ask()) == [1.0, 2.0, 3.0, 4.0]
    assert sizes == [1, 3]


def test_a_failure_to_score_reaches_every_completion_of_the_batch(monkeypatch):
    def fail(*_):
        raise RuntimeError("no isolation")

    errors = ask_all(build_manager(monkeypatch, fail), ["p"], [[[1]] * 3], return_exceptions=True)
    assert [str(error) for error in errors] == ["no isolation"] * 3


def test_a_reward_that_is_not_scored_is_0_for_verl(monkeypatch):
    manager = build_manager(monkeypatch, lambda *_: [{"a": None, "b": 2.0}], a=1.0, b=0.5)
    (output,) = ask_all(manager, ["p"], [[[1, 2]]])
    assert output == {"reward_score": 1.0, "reward_extra_info": {"a": 0.0, "b": 2.0}}


def test_rows_have_the_columns_of_the_libraries():
    row = build_verl_row(CHAT, 3)
    assert (row["prompt"], row["extra_info"]) == (CHAT.messages, {"index": 3})
    assert row["reward_model"]["ground_truth"] == "{}"
    assert build_verl_row(PLAIN, 0)["prompt"] == [{"role": "user", "content": "ask"}]
    assert build_message_row(CHAT, 3) == {"messages": CHAT.messages, "problem": "{}"}
    assert build_message_row(PLAIN, 0)["messages"] == [{"role": "user", "content": "ask"}]


@pytest.mark.parametrize("mode", ["gdpo", "grpo"])
def test_nemo_rl_gets_the_rewards_of_a_trial(tmp_path, mode):
    changes = (f"space.normalization={mode}", "space.reward_weights.format=0")
    on = ("space.conditioning.length=format", "space.length_shape=ramp")
    request = export_folder(tmp_path, *changes, *on, space="math", library="nemo-rl")
    problems = [row["problem"] for row in read_prompts(tmp_path)[:3]]
    batch = build_first_batch(request, tmp_path, problems)
    rewards = load_rewards(tmp_path)
    config = {"tokenizer": str(tmp_path / "policy"), "max_completion_length": 48}
    environment = rewards.Environment({**config, "weighted_sum": mode == "grpo"})
    sampled = [tokens for group in batch.completions for tokens in group]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    ask = {"role": "user", "content": "x"}
    logs = [[ask, {"role": "assistant", "content": text}] for text in texts]
    metadata = [{"problem": problem} for problem in problems for _ in range(8)]
    observations, _, stops, given, ended, answers = environment.step(logs, metadata)
    assert {each["content"] for each in observations} == {""}
    assert ended.tolist() == [1.0] * 24
    assert stops == answers == [None] * 24
    if mode == "grpo":
        assert given.tolist() == pytest.approx((batch.values @ batch.weights).tolist())
        return
    assert set(given) == {"reward/correctness", "reward/length"}
    for name, values in batch.rewards.items():
        assert given[f"reward/{name}"].tolist() == pytest.approx(values), name


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
NO_SYSTEM = "{{ raise_exception('no') if messages[0]['role'] == 'system' }}" + TEMPLATE


def build_tokenizer(template=None):
    """Build a tokenizer of letters that writes <s> above a text."""
    letters = {letter: number for number, letter in enumerate(["<s>", *map(chr, range(128))])}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = [("<s>", 0)]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=special)
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    built.chat_template = template
    return built


@pytest.mark.parametrize("template", [None, TEMPLATE, NO_SYSTEM])
def test_nemo_rl_reads_the_tokens_of_a_trial(template):
    tokenizer = build_tokenizer(template)
    row = {**build_message_row(CHAT, 0), "task_name": "t"}
    (ours,) = PromptFormat(tokenizer, "above").encode(["ask"])
    read = runtime.process_nemo_prompt(row, None, tokenizer, 100, 7, reading={})
    (turn,) = read["message_log"]
    assert turn["token_ids"].tolist() == ours
    assert (read["length"], read["loss_multiplier"], read["idx"]) == (len(ours), 1.0, 7)
    assert (read["extra_env_info"], read["task_name"]) == ({"problem": "{}"}, "t")
    cut = runtime.process_nemo_prompt(row, None, tokenizer, len(ours), 7, reading={})
    assert (len(cut["message_log"][0]["token_ids"]), cut["loss_multiplier"]) == (4, 0.0)


def test_verl_reads_the_tokens_of_a_trial_without_a_chat_template(tmp_path):
    policy = tmp_path / "policy"
    build_tokenizer().save_pretrained(policy)
    (policy / "config.json").write_text('{"max_position_embeddings": 300}')
    assert find_text_prefix(str(policy)) == "<s>"
    recipe = make_recipe(is_chat=False, policy_name=str(policy), context_length=300)
    settings = parse_settings(export_to("verl", recipe))
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = settings["actor_rollout_ref"]["model"]["custom_chat_template"]
    messages = build_verl_row(ExportedPrompt("a'{{b", None, ""), 0)["prompt"]
    read = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert read == build_tokenizer()("a'{{b")["input_ids"]
    assert settings["data"]["max_prompt_length"] == 300 - 64


def start(directory, **environment):
    command = ["bash", str(directory / "run.sh"), "a=b c"]
    changed = {**os.environ, "ANY_VERSION": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=changed, check=False)


def write_command(directory, name):
    """Write a command that prints its arguments, and return the path that finds it."""
    directory.mkdir()
    file = directory / name
    file.write_text('#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH" "$@"\n')
    file.chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def test_the_program_for_verl_gives_paths_that_hydra_reads(tmp_path):
    folder = tmp_path / "a folder's export"
    export_folder(folder, space="math", library="verl")
    path = write_command(tmp_path / "bin", "python")
    lines = start(folder, PATH=path, PYTHONPATH="/one").stdout.splitlines()
    quoted = str(folder).replace("'", "\\'")
    assert lines[0] == f"{folder}:{folder}/modules:/one"
    assert lines[-1] == "a=b c"
    assert f"data.train_files='{quoted}/prompts.parquet'" in lines
    assert f"actor_rollout_ref.model.path='{quoted}/policy'" in lines


def test_the_program_for_nemo_rl_asks_for_its_checkout(tmp_path):
    folder = tmp_path / "out"
    export_folder(folder, space="math", library="nemo-rl")
    path = write_command(tmp_path / "bin", "uv")
    for checkout in ({}, {"NEMO_RL": str(tmp_path)}):
        done = start(folder, PATH=path, **checkout)
        assert (done.returncode, done.stdout) == (2, "")
        assert "NEMO_RL=/path/to/RL bash run.sh" in done.stderr
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "run_grpo.py").touch()
    lines = start(folder, PATH=path, NEMO_RL=str(tmp_path)).stdout.splitlines()
    assert lines[1:4] == ["run", "--project", str(tmp_path)]
    assert lines[4:] == ["python", "run_gdpo.py", "--config", "nemo_rl.yaml", "a=b c"]


def test_the_environment_of_nemo_rl_has_the_name_that_its_data_ask_for(tmp_path):
    export_folder(tmp_path, space="math", library="nemo-rl")
    settings = parse_settings(export_to("nemo-rl", make_recipe()))
    default = settings["data"]["default"]
    program = (tmp_path / "run_gdpo.py").read_text()
    assert f'register_env("{default["env_name"]}", "rewards.RewardEnvironment")' in program
    assert f'register_processor("{default["processor"]}"' in program
    assert default["env_name"] in settings["env"]
    rewards = (tmp_path / "rewards.py").read_text()
    assert "\nRewardEnvironment = ray.remote(Environment)\n" in rewards
    assert json.loads(read_prompts(tmp_path)[0]["problem"])["prompt"]
