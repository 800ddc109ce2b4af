"""Demonstrations of a supervised start: where they come from, and their tokens."""

import dataclasses
import json
from pathlib import Path

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.errors import DataError
from gdpo_tune.core.settings import (
    DataSettings,
    ModelSettings,
    SandboxSettings,
    StartSettings,
    TrainingSettings,
)
from gdpo_tune.core.task_files import build_task
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.policies.prompt_choice import choose_prompt_format
from gdpo_tune.tasks.data_rows import collect_problems, convert_row
from gdpo_tune.tasks.references import read_references
from gdpo_tune.training import demonstrations
from gdpo_tune.training.demonstrations import collect_demonstrations
from tests.support.data import write_enlarged

COUNTS = {"validation_prompts": 2, "test_prompts": 2, "max_completion_length": 4096}
CODE = {"mbpp": "text", "humaneval": "prompt", "apps": "question"}
OTHERS = {"gsm8k": "question", "math": "problem", "svamp": "Question"}


def collect(
    data: DataSettings | None = None, task: str = "math", start=None, template="", **training
):
    """Return demonstrations, the task, and the format of its prompts for the embedded policy."""
    settings = TrainingSettings(**{**COUNTS, "train_prompts": 4, **training})
    data = data or DataSettings()
    own = build_task(task, settings, SandboxSettings(), data)
    policy = registry.describe_task(task).embedded if task in registry.TASKS else "embedded"
    tokenizer = load_policy(policy)[1]
    if template:
        tokenizer.chat_template = template
    off = ModelSettings(instructions="off")
    prompts = choose_prompt_format(policy, tokenizer, own.instructions, off)
    config = TrialConfig(task, policy, 0, {}, settings, Path(), data=data)
    config = dataclasses.replace(config, supervised=start or StartSettings())
    with own:
        return collect_demonstrations(config, own, prompts), own, prompts


def write(file, *rows) -> StartSettings:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return StartSettings(demonstrations=str(file))


@pytest.mark.parametrize(
    ("layout", "column", "task"),
    [
        *[(layout, column, "code") for layout, column in CODE.items()],
        ("gsm8k", "question", "gsm8k"),
        ("gsm8k", "question", "math"),
        ("math", "problem", "math"),
        ("svamp", "Question", "math"),
    ],
)
def test_solutions_of_a_data_set_are_written_for_its_training_prompts_alone(
    layout, column, task, tmp_path
):
    data = write_enlarged(layout, column, tmp_path, times=12).replace(max_prompt_length=10**5)
    splits = collect_problems(data, registry.describe_layout(layout)).splits
    found, _, prompts = collect(data, task, train_prompts=len(splits["train"]))
    references = {r.problem.prompt: r.completion for r in read_references(data) if r.problem}
    solved = [p for p in splits["train"] if references[p.prompt]]
    tokenizer = prompts.tokenizer
    texts = [references[problem.prompt] for problem in solved]
    written = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    encoded = prompts.encode([problem.prompt for problem in solved])
    pairs = zip(encoded, written, strict=True)
    expected = {(tuple(p), (*text, tokenizer.eos_token_id)) for p, text in pairs}
    assert solved
    assert {(tuple(p), tuple(c)) for p, c in found.rows} == expected
    held_out = prompts.encode([p.prompt for n in ("validation", "test") for p in splits[n]])
    assert held_out
    assert {tuple(p) for p, _ in found.rows}.isdisjoint(map(tuple, held_out))


def test_the_calls_of_toolrl_are_demonstrated_after_their_messages(tmp_path):
    rows = []
    for n in range(40):
        turns = {"system": f"Tools: f{n}", "user": f"Say {n}"}
        prompt = [{"role": role, "content": text} for role, text in turns.items()]
        truth = f"<think>No.</think>\n<response>{n}</response>"
        rows.append({"prompt": prompt, "reward_model": {"ground_truth": truth}})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = DataSettings(source=str(tmp_path / "rows.jsonl"), layout="toolrl")
    found, task, prompts = collect(data, "tools", train_prompts=8)
    problems = task.problems("train", 8, 0)
    assert [p for p, _ in found.rows] == prompts.encode([p.prompt for p in problems])
    texts = [prompts.tokenizer.decode(c, skip_special_tokens=True) for _, c in found.rows]
    layout = registry.describe_layout("toolrl")
    truth = {convert_row(layout, r).prompt: r["reward_model"]["ground_truth"] for r in rows}
    assert texts == [truth[p.prompt] for p in problems]


@pytest.mark.parametrize("task", ["code", "math", "gsm8k", "tools"])
def test_tasks_that_write_their_prompts_demonstrate_their_own_solutions(task):
    found, own, prompts = collect(task=task, train_prompts=16)
    problems = own.problems("train", 16, 0)
    assert [p for p, _ in found.rows] == prompts.encode([p.prompt for p in problems])
    assert [prompts.tokenizer.decode(c[:-1]) for _, c in found.rows] == [
        own.write_reference(p) for p in problems
    ]
    assert not found.left_out


def test_a_task_in_a_file_demonstrates_what_its_class_writes(tmp_path):
    head = """from gdpo_tune.tasks.custom import RewardFunctionTask

def short(completions, **_):
    return [1.0 for _ in completions]

class MyTask(RewardFunctionTask):
    reward_funcs = [short]
    def rows(self):
        return [{"prompt": f"{n} plus 1 is", "sum": n + 1} for n in range(60)]

"""
    file = tmp_path / "mine.py"
    file.write_text(head)
    with pytest.raises(DataError, match=r"states no solutions(.|\n)*its class write_reference"):
        collect(task=f"{file}:MyTask")
    text = "    def write_reference(self, problem):\n        return f\"<a>{problem.data['sum']}\"\n"
    file = tmp_path / "solved.py"
    file.write_text(head + text)
    found, own, prompts = collect(task=f"{file}:MyTask")
    with own:
        sums = [problem.data["sum"] for problem in own.problems("train", 4, 0)]
    assert [prompts.tokenizer.decode(c[:-1]) for _, c in found.rows] == [f"<a>{n}" for n in sums]


def test_data_without_solutions_are_refused(tmp_path):
    data = write_enlarged("apps", "question", tmp_path, times=12)
    file = Path(data.source)
    rows = map(json.loads, file.read_text().splitlines())
    file.write_text("".join(json.dumps({**row, "solutions": "[]"}) + "\n" for row in rows))
    with pytest.raises(DataError) as error:
        collect(data, "code", train_prompts=2)
    assert "layout apps of" in str(error.value)
    assert "apps.jsonl:1: column solutions: no solution in Python 3" in str(error.value)
    assert "fix: write lines" in str(error.value)


def test_a_file_has_texts_and_completions(tmp_path):
    _, own, prompts = collect()
    train, test = own.problems("train", 1, 0)[0], own.problems("test", 1, 0)[0]
    start = write(
        tmp_path / "mine.jsonl",
        {"prompt": train.prompt.strip(), "completion": "<answer>1</answer>", "other": 1},
        {"prompt": f" {test.prompt.upper()}", "completion": "<answer>2</answer>"},
        {"prompt": "Something else", "completion": "<answer>3</answer>"},
    )
    found, *_ = collect(start=start)
    shown = [train.prompt, "Something else\n"]
    assert [p for p, _ in found.rows] == prompts.encode(shown)  # as the task's own prompts end
    assert found.left_out == {"held-out prompts": 1}
    assert str(found).endswith("tokens to write; 1 left out: held-out prompts")


def test_prompts_of_a_file_may_be_messages(tmp_path):
    turns = [{"role": "user", "content": "2 + 2"}]
    start = write(tmp_path / "mine.jsonl", {"prompt": turns, "completion": "4"})
    template = "{% for m in messages %}{{ m.content }}={% endfor %}"
    found, _, prompts = collect(start=start, template=template)
    assert [p for p, _ in found.rows] == prompts.encode([turns])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, r"mine.jsonl:1: no column completion; there are prompt\n    fix: "),
        ({"prompt": 1, "completion": "b"}, "mine.jsonl:1: column prompt: not a text but"),
        ({"prompt": "a", "completion": " "}, "mine.jsonl:1: column completion: empty"),
        ({"prompt": [{"role": "user"}], "completion": "b"}, "mine.jsonl:1: column prompt: no list"),
        (
            {"prompt": [{"role": "assistant", "content": "x"}], "completion": "b"},
            "before the policy's turn",
        ),
    ],
)
def test_a_row_that_is_no_demonstration_is_named(row, message, tmp_path):
    with pytest.raises(DataError, match=message):
        collect(start=write(tmp_path / "mine.jsonl", row))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty\n    fix: write lines"),
        (None, r"mine.jsonl: no such file\n    fix: write data, or"),
        ("{", r"mine.jsonl:1: "),
    ],
)
def test_files_without_demonstrations_are_refused(content, message, tmp_path):
    if content is not None:
        (tmp_path / "mine.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        collect(start=StartSettings(demonstrations=str(tmp_path / "mine.jsonl")))


def test_what_does_not_fit_is_left_out_and_more_than_half_is_refused(tmp_path, monkeypatch):
    rows = [{"prompt": f"{n}", "completion": "no, 17 " * (1 if n else 50)} for n in range(4)]
    start = write(tmp_path / "mine.jsonl", *rows)
    found, *_ = collect(start=start, max_completion_length=40)
    assert (len(found.rows), found.left_out) == (3, {"too long": 1})
    with pytest.raises(DataError, match=r"4 of 4 have more tokens than .*the longest have \d+ and"):
        collect(start=start, max_completion_length=1)
    monkeypatch.setattr(demonstrations, "read_position_limit", lambda *_: 3)
    with pytest.raises(DataError, match="or than the 3 positions of the policy"):
        collect(start=start)
