"""Tasks with tools: turns in training, evaluation and demonstrations, on the shipped calculator."""

import dataclasses

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl import chat_template_utils as templates

from gdpo_tune.core.errors import DataError, PolicyError
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.settings import ModelSettings, StartSettings
from gdpo_tune.core.task_info import ToolFormat
from gdpo_tune.core.trial_files import read_completions, read_steps
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.policies.prompt_choice import choose_prompt_format, prepare_tools
from gdpo_tune.training import rollout, trial, worker_cache
from gdpo_tune.training.demonstrations import collect_demonstrations
from gdpo_tune.training.evaluation import sample_completions
from gdpo_tune.training.memory import MicroBatchLimit
from gdpo_tune.training.trainer import GDPOTrainer
from tests.support.gradients import KeptGradients
from tests.support.paths import ROOT
from tests.support.training import have_same_weights, run, stop_after
from tests.support.trials import compute
from tests.tasks import own_tasks

TASK = f"{ROOT / 'search_spaces' / 'calculator.py'}:Calculator"
SETTINGS = own_tasks.SETTINGS.replace(
    steps=3, max_completion_length=80, length_limit=10, checkpoint_every=1
)
CALL = '<tool_call>{"name":"add","parameters":{"a":1,"b":2}}</tool_call>'
WRITTEN = [
    CALL,
    CALL + CALL.replace('"b":2', '"b":5'),
    CALL.replace("add", "ad"),
    CALL.replace('"b":2', '"c":2'),
    CALL.replace("}}", "}"),
    "3",
    "12",
]
"""What a policy writes in a turn: calls, a tool that does not exist, an argument that does not,
broken JSON, answers."""


@pytest.fixture(autouse=True)
def fresh_cache():
    worker_cache.release_worker_cache()
    yield
    worker_cache.release_worker_cache()


@pytest.fixture
def scripted(monkeypatch):
    """Draw turns from `WRITTEN` by the generator, as a policy that has learned to call does."""
    tokenizer = AutoTokenizer.from_pretrained(POLICIES["embedded_tools"])
    turns = [tokenizer(f"{text}<eos>", add_special_tokens=False)["input_ids"] for text in WRITTEN]
    asked = []

    def draw(model, prompts, decoding, generator, **_):
        asked.append([tokenizer.decode(prompt) for prompt in prompts])
        rows = torch.randint(len(turns), (len(prompts),), generator=generator).tolist()
        return [turns[row][: decoding.max_new_tokens] for row in rows]

    monkeypatch.setattr(rollout, "generate", draw)
    return asked


def build(directory, task=TASK, settings=SETTINGS, **params):
    return own_tasks.trial(task, directory, "embedded_tools", settings, **params)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The calculator, whose process the tests share, with its policy."""
    cache = worker_cache.build_worker_cache(build(tmp_path_factory.mktemp("calculator")))
    with cache.task:
        yield cache


def sample(cache, config, count=16):
    """Sample turns as a held-out evaluation does."""
    held_out = cache.load_split("validation")
    rows = [row % len(held_out.prompts) for row in range(count)]
    decoding = trial.build_decoding(config.training, cache.take_policy(), cache.tokenizer)
    generator = torch.Generator().manual_seed(0)

    def draw(prompts):
        return rollout.generate(None, prompts, decoding, generator)

    sampled = sample_completions(config, cache, held_out, rows, draw)
    problems = [held_out.problems[row] for row in rows]
    messages, tokens, lengths = sampled
    return problems, *sampled, cache.task.score(problems, messages, lengths, tokens)


def test_turns_of_a_held_out_completion(cache, tmp_path, scripted):
    problems, messages, tokens, lengths, scores = sample(cache, build(tmp_path), 64)
    metrics = scores.metrics
    for row, turns in enumerate(messages):
        own = [turn for turn in turns if turn["role"] == "assistant"]
        answers = [turn["content"] for turn in turns if turn["role"] == "tool"]
        assert metrics["turns"][row] == len(own)
        assert metrics["tool_calls"][row] == sum(len(one.get("tool_calls", ())) for one in own)
        assert metrics["tool_errors"][row] == sum("error" in text for text in answers)
        assert metrics["tool_tokens"][row] == len(tokens[row]) - lengths[row]
        assert metrics["mean_length"][row] == lengths[row] <= len(tokens[row]) <= 80
        assert bool(answers) == (metrics["tool_tokens"][row] > 0)
        last = turns[-1]["content"] if turns[-1]["role"] == "assistant" else ""
        assert scores.rewards["length"][row] == (lengths[row] <= 10)
        assert scores.rewards["correctness"][row] == (last == problems[row].data["answer"])
    found = {text for turns in messages for turn in turns for text in [turn["content"]]}
    # Source: what Python says of these calls, in TRL's form.
    assert {"3", "6", "{'error': 'Tool ad not found.'}"} <= found
    unexpected = "add() got an unexpected keyword argument 'c'"
    assert str({"error": unexpected}) in found
    assert any(turns[0]["content"].startswith("<tool_call>{") for turns in messages), "broken JSON"
    assert "Result: 3" in "".join(text for batch in scripted[1:] for text in batch)


def test_calls_end_after_so_many_turns(cache, tmp_path, scripted):
    limited = {"trl.max_tool_calling_iterations": 1}
    _, messages, *_ = sample(cache, build(tmp_path, **limited), 64)
    counts = [sum(turn["role"] == "tool" for turn in turns[:-1]) for turns in messages]
    assert max(sum(turn["role"] == "assistant" for turn in turns) for turns in messages) == 2
    assert max(counts) == 2, "both calls of a turn are answered"
    assert any(turns[-1].get("tool_calls") for turns in messages), "a call without an answer"
    _, none, *_ = sample(cache, build(tmp_path, **{"trl.max_tool_calling_iterations": 0}))
    assert {len(turns) for turns in none} == {1}


@pytest.mark.system
def test_a_training_writes_turns_and_resumes_bit_by_bit(tmp_path, scripted):
    limited = {"trl.max_tool_calling_iterations": 2, "learning_rate": 1e-3}
    reports, outcome = run(build(tmp_path / "whole", **limited))
    newest = stop_after(build(tmp_path / "cut", **limited), 2)
    worker_cache.release_worker_cache()
    again, resumed = run(build(tmp_path / "cut", **limited), newest)
    assert (resumed.validation, resumed.test) == (outcome.validation, outcome.test)
    last = [dict(found[-1][0].metrics) for found in (reports, again)]
    assert last[0] == last[1]
    assert have_same_weights(resumed.checkpoint, outcome.checkpoint)
    steps = read_steps(tmp_path / "whole" / "trial")
    assert all(step.metrics["train/tools/call_frequency"] > 0 for step in steps)
    # Source: TRL counts the tokens of the policy alone.
    assert all(step.metrics["train/completions/mean_length"] < 80 for step in steps)
    shown = read_completions(tmp_path / "whole" / "trial")
    assert any(
        'assistant: add({"a": 1, "b": 2})\n\ntool: 3\n\nassistant: ' in s.completion for s in shown
    )
    assert {s.prompt[:6] for s in shown} == {"user: "}


def test_half_a_character_that_a_call_names_ends_no_training(cache, tmp_path, monkeypatch):
    text = CALL.replace('"add"', r'"\ud83d"').replace('"a":1', r'"a":"\ud83d"')
    turn = cache.tokenizer(f"{text}<eos>", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(rollout, "generate", lambda _, prompts, *__, **___: [turn] * len(prompts))
    settings = SETTINGS.replace(steps=1, max_completion_length=200)
    run(build(tmp_path, settings=settings, **{"trl.max_tool_calling_iterations": 1}))
    shown = read_completions(tmp_path / "trial")
    calls, answer, *_ = shown[0].completion.split("\n\n")
    assert calls == r'assistant: ?({"a": "\ud83d", "b": 2})'
    assert answer == r"tool: {'error': 'Tool \ud83d not found.'}", "as repr() writes it"


def test_half_a_character_that_a_tool_returns_ends_no_evaluation(cache, tmp_path, monkeypatch):
    def add(a, b):
        return f"{a}\ud83d{b}"

    turn = cache.tokenizer(f"{CALL}<eos>", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(rollout, "generate", lambda _, prompts, *__, **___: [turn] * len(prompts))
    monkeypatch.setattr(cache.task, "tools", [add])
    _, messages, *_ = sample(cache, build(tmp_path, **{"trl.max_tool_calling_iterations": 1}), 2)
    assert [turns[1]["content"] for turns in messages] == ["1?2", "1?2"]


def build_pair(cache, directory, changes):
    """Return a trainer of ours and one of TRL on the same turns, and where gradients are kept."""
    built = []
    for cls in (GDPOTrainer, GRPOTrainer):
        problems = cache.load_split("train").problems[:4]
        model, tokenizer = load_policy("embedded_tools")
        prepare_tools("embedded_tools", tokenizer, cache.task.tool_format)
        arguments = GRPOConfig(
            output_dir=str(directory), num_generations=4, per_device_train_batch_size=16,
            max_completion_length=80, max_steps=2, learning_rate=1e-3, optim="sgd",
            max_grad_norm=1e9,
            shuffle_dataset=False, bf16=False, gradient_checkpointing=False, use_cpu=True, beta=0.1,
            dataloader_pin_memory=False, report_to=[], disable_tqdm=True, save_strategy="no",
            logging_steps=1, lr_scheduler_type="constant", temperature=1.0,
            model_init_kwargs={"device_map": None}, **changes,
        )  # fmt: skip
        own = {"normalization": "grpo", "limit": MicroBatchLimit(5)} if cls is GDPOTrainer else {}
        trainer = cls(
            model=model, args=arguments, processing_class=tokenizer, tools=cache.task.tools,
            reward_funcs=[reward_calls], **own,
            train_dataset=Dataset.from_dict({"prompt": [list(one.turns) for one in problems]}),
        )  # fmt: skip
        kept = KeptGradients()
        trainer.add_callback(kept)
        built.append((trainer, kept))
    return built


def reward_calls(completions, **_):
    """Vary within groups, and by the turns."""
    return [len(turns) + len(turns[-1]["content"]) / 7 for turns in completions]


@pytest.mark.parametrize(
    ("loss", "way"),
    [
        *(("dapo", way) for way in ("packed", "shared", "padded")),
        *((loss, "shared") for loss in ("grpo", "bnpo", "dr_grpo", "cispo")),
    ],
)
def test_gradients_are_those_of_trl(cache, tmp_path, scripted, loss, way):
    """Source: TRL's own trainer with the same samples; its mask leaves out what tools wrote."""
    changes = {"loss_type": loss} | ({"epsilon_high": 5.0} if loss == "cispo" else {})
    found = []
    with compute(way):
        for trainer, kept in build_pair(cache, tmp_path, changes):
            masks = []

            def draw(prompts, *_, **__):
                drawn = rollout.generate(None, prompts, rollout.Decoding(80, 1.0, (1,), 0), None)
                return drawn, None

            trainer._generate_single_turn = draw
            compute_loss = trainer._compute_loss

            def keep(model, inputs, compute_loss=compute_loss, masks=masks):
                masks.append(inputs["tool_mask"] * inputs["completion_mask"])
                return compute_loss(model, inputs)

            trainer._compute_loss = keep
            torch.manual_seed(0)
            trainer.train()
            found.append((kept, masks))
    (ours, our_masks), (theirs, their_masks) = found
    counts = [sum(int(mask.sum()) for mask in masks) for masks in (our_masks, their_masks)]
    assert counts[0] == counts[1] > 0
    assert any((mask.sum(dim=1) < mask.shape[1]).any() for mask in their_masks)
    for one, other in zip(ours.gradients, theirs.gradients, strict=True):
        assert other.norm() > 1e-3
        assert (one - other).norm() <= 1e-6 * other.norm()
    for one, other in zip(ours.logs, theirs.logs, strict=True):
        for name in ("loss", "entropy", "kl", "completions/mean_length", "tools/call_frequency"):
            assert one[name] == pytest.approx(other[name], rel=1e-6, abs=1e-7), name


SCHEMAS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {}}}}]


def write_tokenizer(template):
    tokenizer = AutoTokenizer.from_pretrained(POLICIES["embedded_tools"])
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_2", "glm4moe"])
def test_policies_that_trl_knows_are_taken(name):
    """Source: TRL's `get_training_chat_template`: Qwen3 drops thoughts of earlier turns."""
    own = getattr(templates, f"{name}_chat_template")
    tokenizer = write_tokenizer(own)
    off = ModelSettings(instructions="off")
    prompts = choose_prompt_format(name, tokenizer, "", off, ToolFormat(SCHEMAS))
    assert tokenizer.response_template
    assert templates.is_chat_template_prefix_preserving(tokenizer)
    assert (tokenizer.chat_template == own) == (name != "qwen3")
    assert "add" in prompts.render([{"role": "user", "content": "1"}])


PLAIN = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
WRITES = PLAIN.replace("}}", "}}{{ turn.tool_calls | tojson if turn.tool_calls }}")
READS = {"start_anchor": "x", "fields": {"content": {"content": "text"}}}


@pytest.mark.parametrize(
    ("template", "reads", "reason"),
    [
        (None, None, "there is no chat template that writes calls of tools and answers"),
        (PLAIN, None, "there is no chat template that writes calls of tools and answers"),
        (WRITES, None, "Unrecognized chat template, failed to add response schema"),
        (WRITES, READS, "the call .* is read as {'content': "),
        (WRITES, {"fields": {}}, "the call .* is read as {'role': 'assistant', 'content': "),
    ],
    ids=["none", "plain", "unknown", "not read", "no response template"],
)
def test_policies_that_cannot_call_are_refused_in_one_line(template, reads, reason):
    tools = ToolFormat(SCHEMAS, response_template=reads)
    with pytest.raises(PolicyError, match=f"^policy 'p' cannot call tools: {reason}") as caught:
        prepare_tools("p", write_tokenizer(template), tools)
    assert "\n" not in str(caught.value)
    assert "docs/tools.md" in str(caught.value)


def collect(cache, directory, monkeypatch, write):
    start = StartSettings(demonstrations="data", steps=1)
    config = dataclasses.replace(build(directory), supervised=start)
    monkeypatch.setattr(cache.task, "write_reference", write)
    return config, collect_demonstrations(config, cache.task, cache.prompts)


def test_demonstrations_call_the_tools_and_learn_the_turns_of_the_policy(
    cache, tmp_path, monkeypatch
):
    turns = [CALL, CALL.replace('"b":2', '"b":8'), "9"]
    config, found = collect(cache, tmp_path, monkeypatch, lambda _: turns)
    codec = cache.tokenizer
    text = f"{CALL}<eos>Result: 3\n{turns[1]}<eos>Result: 9\n9<eos>"
    assert {codec.decode(completion) for _, completion in found.rows} == {text}
    (mask,) = {tuple(mask) for mask in found.masks}
    own = [t for t, kept in zip(found.rows[0][1], mask, strict=True) if kept]
    assert codec.decode(own) == "".join(f"{turn}<eos>" for turn in turns)
    row = trial.build_start_trainer(config, cache).train_dataset[0]
    labels = [label for label in row["labels"] if label != -100]
    assert labels == own, "prompts and tools have no loss"
    assert len(row["labels"]) == len(row["input_ids"])


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (["3", "4"], "each turn but the last has to call a tool, the last none: 'assistant: 3'"),
        ([CALL], "each turn but the last has to call a tool, the last none"),
        (CALL, "each turn but the last has to call a tool, the last none"),
        ([CALL.replace("add", "sub"), "3"], "a call raised: .*Tool sub not found"),
    ],
    ids=["no call", "no answer", "a text", "a wrong call"],
)
def test_demonstrations_of_wrong_turns_are_refused(cache, tmp_path, monkeypatch, turns, reason):
    pattern = f"^start.demonstrations = data: {reason}.*\n    fix: return the texts of the"
    with pytest.raises(DataError, match=pattern):
        collect(cache, tmp_path, monkeypatch, lambda _: turns)
