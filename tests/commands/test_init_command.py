"""The command `init`: every file that it writes is one that `sweep` accepts."""

import io
import json
import re
import sys
from unittest.mock import MagicMock

import pytest

from gdpo_tune import init, sweep, train
from gdpo_tune.core.errors import TaskFileError, UsageError
from gdpo_tune.core.registry import TASKS
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.spec import load_spec, machine
from gdpo_tune.spec.starter import CPU_BUDGET, CPU_TOKENS, DATA, EMBEDDED_BUDGET, LARGE_BUDGET
from gdpo_tune.tasks.dataset import check_data
from tests.support.paths import ROOT

HUB = "Qwen/Qwen2.5-1.5B-Instruct"


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(words):
    assert init.main([*words.split(), "--yes"]) == 0


def refuse(*words):
    """Return the message of a request that is refused."""
    with pytest.raises(UsageError) as caught:
        init.main([*words, "--yes"])
    return str(caught.value)


@pytest.mark.parametrize("task", TASKS)
def test_a_file_without_a_gpu_runs_as_it_is(task, capsys):
    write(f"--task {task}")
    assert sweep.main([f"{task}.yaml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "time: unknown before a first sweep of this task and policy here" in printed
    assert f"python -m gdpo_tune.sweep {task}.yaml --dry-run" in printed
    spec = load_spec(f"{task}.yaml")
    assert (spec.task, spec.resources.gpus, spec.search.is_divided) == (task, 0, True)
    assert spec.search.budget.completions == EMBEDDED_BUDGET
    assert list(spec.objectives) == list(load_task_info(task).rewards)


@pytest.mark.parametrize("task", DATA)
def test_a_file_for_a_gpu_has_the_usual_data_of_its_task(task, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write(f"gpu.yaml --task {task} --policy {HUB} --gpus 1")
    assert "asks for GPUs, resources.gpus: 1; this machine has none" in capsys.readouterr().out
    spec = load_spec("gpu.yaml", needs=[])
    assert (spec.name, spec.policy, spec.resources.gpus) == ("gpu", HUB, 1)
    assert spec.data.source == DATA[task].source["source"]
    assert spec.training.train_prompts == DATA[task].prompts["train_prompts"]
    assert spec.model.lora_rank == 32


@pytest.mark.parametrize(("present", "expected"), [(0, (0, "auto", 32)), (2, (1, "vllm", 512))])
def test_a_policy_gets_the_file_of_this_machine(present, expected, monkeypatch, capsys):
    """A laptop's file is one that it can train; a GPU's uses the GPU."""
    monkeypatch.setattr(machine, "count_visible_gpus", lambda *_: present)
    write(f"mine.yaml --task math --policy {HUB}")
    spec = load_spec("mine.yaml", needs=[])
    training = spec.training
    found = (spec.resources.gpus, spec.rollout.engine, training.completions_per_step)
    assert found == expected
    assert spec.search.budget.completions == (LARGE_BUDGET if present else CPU_BUDGET)
    assert training.max_completion_length <= (1024 if present else CPU_TOKENS)
    assert ("asks for GPUs" in capsys.readouterr().out) is False


@pytest.mark.parametrize("policy", ["/nonexistent", "./here", "~/policies/mine", "a/b/c"])
def test_a_policy_that_is_nowhere_is_refused(policy, directory):
    message = refuse("mine.yaml", "--task", "math", "--policy", policy)
    assert re.search(r"no such directory, and not the id .*\n    fix: write", message)
    assert not (directory / "mine.yaml").exists()


OWN_TASK = """
from gdpo_tune.tasks.custom import RewardFunctionTask
def right(completions, **_):
    return [1.0 for _ in completions]
class Mine(RewardFunctionTask):
    reward_funcs = [right]
    def rows(self):
        return [{'prompt': f'{n} + 1'} for n in range(9000)]
"""


@pytest.mark.parametrize("words", ["", f"--policy {HUB} --gpus 1"])
def test_a_task_without_a_length_reward_has_no_limit(directory, words):
    (directory / "mine.py").write_text(OWN_TASK)
    write(f"--task mine.py:Mine {words}")
    assert "length_limit" not in (directory / "mine.yaml").read_text()


def test_flags_decide_what_the_file_says():
    words = "--data me/words --layout math --gpus 0.5 --completions 400000"
    assert init.main(f"own.yaml --task math --policy {HUB} {words}".split()) == 0
    spec = load_spec("own.yaml", needs=[])
    assert (spec.data.source, spec.data.layout) == ("me/words", "math")
    assert (spec.resources.gpus, spec.search.budget.completions) == (0.5, 400_000)
    write("own.yaml --task math --data built-in --force")
    assert not load_spec("own.yaml").data.source


def write_rows(directory, *rows):
    (directory / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_a_file_of_data_gets_its_task_layout_and_columns(directory, capsys):
    write_rows(directory, *({"Problem": f"No. {i}", "Final_Answer": i} for i in range(90)))
    write("own.yaml --data rows.jsonl")
    said = "rows.jsonl: layout math, problem is Problem, answer is Final_Answer; 90 rows, 90 dist"
    assert said in capsys.readouterr().out
    spec = load_spec("own.yaml")
    assert (spec.task, spec.data.source, spec.data.layout) == ("math", "rows.jsonl", "math")
    assert spec.data.columns == {"problem": "Problem", "answer": "Final_Answer"}
    check_data(spec.data, spec.training, ())  # the file asks for no more prompts than there are
    write("own.yaml --data rows.jsonl --layout question_answer --force")
    assert load_spec("own.yaml").data.layout == "question_answer"


OWN = "layout: question_answer, columns: {question: YOURS, answer: YOURS}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", ""),
        ("--layout mbpp", ""),
        ("--task tools", ""),
        ("--task math", "math (problem, answer or solution)"),
        ("--task math", OWN),
    ],
)
def test_a_file_that_fits_no_layout_is_refused_with_its_columns(directory, words, message):
    write_rows(directory, {"Zeile": "a"})
    found = refuse("own.yaml", "--data", "rows.jsonl", *words.split())
    assert "has the columns Zeile, which fit none of" in found
    assert message in found
    assert not (directory / "own.yaml").exists()


def test_a_task_of_your_own_gets_its_own_rewards(directory):
    page = (ROOT / "docs" / "own_task.md").read_text()
    (directory / "sums.py").write_text(page.split("```python\n")[1].split("```")[0])
    write("--task sums.py:Sums")
    assert list(load_spec("sums.yaml").objectives) == ["right", "length"]
    with pytest.raises(TaskFileError, match="no class Nothing"):
        write("--task sums.py:Nothing")


@pytest.mark.parametrize(
    "row",
    [
        {"Question": "What is {}+1?", "answer": 3, "level": 2, "Final Answer": "x"},
        {"prompt": "Say {}", "completions": 4, "tools": []},
    ],
)
def test_a_class_is_written_for_rows(directory, row, capsys):
    # Source: a first user with rows and no class; every part of the answer has to run as it is.
    key = next(iter(row))
    rows = [{**row, key: str(row[key]).format(i)} for i in range(90)]
    del rows[3][[*row][-1]]
    write_rows(directory, *rows)
    write("--task mine.py:Mine --data rows.jsonl")
    told = capsys.readouterr().out
    assert f"wrote mine.py: the prompt is {key}" in told
    assert "  python -m gdpo_tune.score mine.yaml --completions texts.jsonl\n" in told
    assert all(name in (directory / "mine.py").read_text() for name in ("correct", "length"))
    assert list(load_spec("mine.yaml").objectives) == ["correct", "length"]
    assert sweep.main(["mine.yaml", "--dry-run"]) == 0
    (directory / "mine.py").write_text((directory / "mine.py").read_text() + "# my own\n")
    write("--task mine.py:Mine --data rows.jsonl --force")
    assert "mine.py exists and is kept" in capsys.readouterr().out
    assert (directory / "mine.py").read_text().endswith("# my own\n")


def test_a_class_that_is_written_trains(directory):
    write_rows(directory, *({"problem": f"{i}+1=", "target": i + 1} for i in range(90)))
    write("--task mine.py:Mine --data rows.jsonl")
    fixed = ["space.normalization=gdpo", "space.group_size=4", "space.learning_rate=1e-4"]
    fixed += ["space.reward_weights.length=1", "training.steps=2", "training.dead_steps=0"]
    words = [word for each in fixed for word in ("--set", each)]
    assert train.main(["mine.yaml", *words, "--out", "out"]) == 0
    assert (directory / "out" / "result.json").is_file()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("rows.csv", "question\nq\n", r"a class is written for a .jsonl file"),
        ("rows.jsonl", '{"Zeile": 1}\n', "has the columns Zeile, none of them known as the prompt"),
        ("rows.jsonl", '{"prompt": 1}\n', "row 0 has a prompt that is neither"),
        ("rows.jsonl", '{"prompt": "a"}\n{"x": 1}\n', "row 1 has a prompt that is neither"),
        ("rows.jsonl", "", "has the columns of no row"),
    ],
)
def test_rows_of_which_no_class_can_be_written_leave_nothing(directory, name, text, reason):
    (directory / name).write_text(text)
    assert reason in refuse("--task", "mine.py:Mine", "--data", name)
    assert [file.name for file in directory.iterdir()] == [name]


@pytest.mark.parametrize(
    ("task", "policy", "is_named"),
    [("tools", HUB, True), ("gsm8k", HUB, True), ("math", HUB, False), ("tools", "", False)],
)
def test_the_scoring_is_named_where_a_recipe_may_want_the_other(directory, task, policy, is_named):
    write(f"--task {task} {policy and '--policy '}{policy}")
    text = (directory / f"{task}.yaml").read_text()
    assert ("scoring: strict" in text) == is_named
    assert load_spec(f"{task}.yaml", needs=[]).scoring == "strict"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_end_of_the_input_at_a_question_writes_nothing(directory, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal("tools\n\n"))
    with pytest.raises(UsageError, match="no answer, so nothing was written"):
        init.main([])
    assert list(directory.iterdir()) == []


def test_it_asks_in_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal("tools\n\n\n\n70000\n"))
    assert init.main([]) == 0
    spec = load_spec("tools.yaml")
    assert (spec.policy, spec.search.budget.completions) == ("embedded_tools", 70_000)


def test_the_layout_is_that_of_the_task_in_the_answer(directory, monkeypatch):
    """A file may hold what two tasks need; the first layout that fits it is not of every task."""
    code = {"code": "def f(x): return x + 1", "test_list": ["assert f(1) == 2"], "answer": "4"}
    rows = ({**code, "text": f"Add {i}.", "question": f"No. {i}?"} for i in range(90))
    write_rows(directory, *rows)
    monkeypatch.setattr(sys, "stdin", Terminal("math\n\n\n\n"))
    assert init.main(["own.yaml", "--data", "rows.jsonl"]) == 0
    assert load_spec("own.yaml").data.layout == "question_answer"


def test_every_comment_is_kept_apart_from_its_key(directory):
    init.main(["--yes"])
    lines = (directory / "code.yaml").read_text().splitlines()
    assert sum("#" in line for line in lines) > 8
    assert all(line.split("#")[0][-1:] in ("", " ") for line in lines if "#" in line)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "kode"], "did you mean 'code'"),
        (["--completions", "0"], "completions '0': write a whole number of at least 1"),
        (["--completions", "640"], "640: it pays for .* and the wide rung of"),
        (["--gpus", "-1"], "gpus '-1': write a number of at least 0"),
        (["--gpus", "nan"], "gpus 'nan'"),
        (["code.txt"], "ends with .yaml"),
        (["my code.yaml"], "my code.yaml:3: name = my code"),
        (["--layout", "gsm8k", "--task", "math"], "--layout gsm8k has no effect"),
        (["a" * 5000 + ".yaml"], "more than 255 bytes"),
        (["--layout", "gsm", "--data", "me/words", "--task", "math"], "did you mean 'gsm8k'"),
    ],
)
def test_a_wrong_answer_writes_nothing(directory, words, message):
    assert re.search(message, refuse(*words))
    assert list(directory.iterdir()) == []


def test_a_file_that_exists_is_kept(directory):
    (directory / "code.yaml").write_text("mine")
    assert "exists already" in refuse()
    assert (directory / "code.yaml").read_text() == "mine"


@pytest.mark.parametrize("name", ["123", "null", "true", "1e5", "-", "a\"b'c", "a  # b", "é\nx: 1"])
def test_names_that_yaml_would_read_as_something_else_are_quoted(name):
    words = ["own.yaml", "--task", "math", "--force", "--yes"]
    assert init.main([*words, "--policy", HUB, "--layout", "math", "--data", name]) == 0
    assert load_spec("own.yaml", needs=[]).data.source == name
    assert init.main([*words, "--policy", name]) == 0
    assert load_spec("own.yaml", needs=[]).policy == name


def test_a_file_may_have_a_number_for_a_name(directory):
    write("123.yaml --task math")
    assert load_spec("123.yaml").name == "123"
    (directory / "taken.yaml").mkdir()
    assert "taken.yaml is a directory" in refuse("taken.yaml", "--force")


def test_ctrl_c_at_a_question_writes_nothing(directory, monkeypatch, capsys):
    stop = MagicMock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(Terminal, "readline", stop, raising=False)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", stop)
    assert init.main([]) == 130
    assert "Nothing was written" in capsys.readouterr().err
    assert list(directory.iterdir()) == []
