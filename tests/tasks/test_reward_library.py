"""Reward functions of `gdpo_tune.rewards`, called as TRL and tasks in files call them."""

import re
from contextlib import closing

import pytest

from gdpo_tune import rewards
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.task_files import build_task, load_task_info
from gdpo_tune.tasks import execution
from gdpo_tune.tasks.code import CodeTask
from gdpo_tune.tasks.math import MathTask
from gdpo_tune.tasks.tools import ToolsTask
from tests.support.training import build_plain_trainer, write_policy
from tests.tasks.own_tasks import FILES, written

RIGHT = "<think></think>\n<answer>def f(x): return x + 1</answer>"
WRONG = "<think></think>\n<answer>def f(x): return x</answer>"
BROKEN = "<think></think>\n<answer>def f(x): return [][x]</answer>"
TESTS = ["assert f(1) == 2", "assert f(2) == 3"]
CALL = {"name": "pay", "parameters": {"sum": 7}}
CALLED = '<think></think>\n<tool_call>\n{"name": "pay", "parameters": {"sum": 7}}\n</tool_call>'


@pytest.mark.parametrize(
    ("name", "completions", "columns", "expected"),
    [
        ("answer", ["<answer>1/2</answer>", "1"], {"answer": ["0.5", "2"]}, [1, 0]),
        ("answer", ["8.45", "8.45"], {"answer": ["8.4"] * 2, "tolerance": [0.1, None]}, [1, 0]),
        ("exact_answer", ["18", "18.0"], {"answer": ["18"] * 2}, [1, 0]),
        ("integer", ["18", "x"], {}, [1, 0]),
        ("block_format", ["<think></think><answer></answer>", "x"], {}, [1, 0]),
        ("line_format", ["<think></think>\n<answer></answer>", "x"], {}, [1, 0]),
        ("length", ["x", "y"], {"length_limit": [2, 1]}, [1, 0]),
        ("tool_calls", [CALLED, "x"], {"calls": [[CALL], [CALL]]}, [3, -3]),
        ("tool_calls", ["x"] * 2, {"calls": [[CALL], []]}, [-3, None]),
        ("tool_format", [CALLED, "x"], {"calls": [[CALL], [CALL]]}, [1, 0]),
    ],
)
def test_texts_and_messages_as_trl_gives_them(name, completions, columns, expected):
    """Source: TRL 1.16, `GRPOTrainer._calculate_rewards`."""
    function = getattr(rewards, name)
    ids = [[1, 2]] * 2
    others = {"prompts": ["?"] * 2, "completion_ids": ids, "trainer_state": None, **columns}
    assert function(completions=completions, **others) == expected
    messages = [[{"role": "assistant", "content": text}] for text in completions]
    assert function(completions=messages, **others) == expected
    assert function.__name__ == name


def test_everything_that_is_offered_stands_in_the_list():
    assert set(rewards.__all__) == {name for name in vars(rewards) if not name.startswith("_")}


def test_a_function_of_one_completion_reads_the_columns_that_it_names():
    @rewards.reward(-1, 1)
    def polite(completion, name, weight=0.5):
        return weight if name in completion else None

    assert (polite.low, polite.high, polite.doc) == (-1, 1, "mean polite")
    given = {"name": ["Ann", "Tom"], "weight": [None, 1.0], "prompts": ["?"] * 2}
    assert polite(["Dear Ann", "Dear Ann"], **given) == [0.5, None]
    with pytest.raises(TypeError, match="name"):
        polite(["Dear Ann"])


def test_the_docstring_lists_every_reward():
    listed = re.findall(r"^    (\w[\w, ]*?)(?:\(\.\.\.\))?  ", rewards.__doc__, re.MULTILINE)
    assert {name for line in listed for name in line.split(", ")} == {*rewards.__all__} - {"reward"}


@pytest.fixture
def _own_sandbox(monkeypatch):
    """Close the sandbox of this process after the test."""
    closers = []
    monkeypatch.setattr("atexit.register", closers.append)
    yield
    for close in closers:
        close()
    execution._share_sandbox.cache_clear()
    execution._run_rows.cache_clear()


@pytest.mark.usefixtures("_own_sandbox")
def test_programs_run_in_the_sandbox_and_once_for_all_functions(monkeypatch):
    columns = {"prompts": ["?"] * 4, "function": ["f"] * 4, "asserts": [TESTS] * 4}
    completions = [RIGHT, WRONG, BROKEN, ""]
    assert rewards.tests_passed(completions, **columns) == [1, 0, 0, 0]
    monkeypatch.setattr("gdpo_tune.tasks.execution.run_programs", None)
    assert rewards.share_passed(completions, **columns) == [1, 0, 0, 0]
    assert rewards.bug_free(completions, **columns) == [1, 1, 0, 0]
    del columns["asserts"]
    with pytest.raises(Exception, match="needs asserts, or streams"):
        rewards.tests_passed(completions, **columns)


@pytest.mark.usefixtures("_own_sandbox")
def test_programs_that_read_and_print():
    columns = {"prompts": ["Double."] * 2, "streams": [[["2", "4"], ["3", "6"]]] * 2}
    texts = ["<answer>print(2 * int(input()))</answer>", "<answer>print(4)</answer>"]
    assert rewards.tests_passed(texts, **columns) == [1, 0]
    assert rewards.share_passed(texts, **columns) == [1, 0.5]


def test_a_trainer_of_trl_takes_them(tmp_path):
    functions = [rewards.block_format, rewards.integer]
    policy = write_policy(tmp_path / "policy")
    trainer = build_plain_trainer(policy, tmp_path / "out", reward_funcs=functions)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/integer/mean"] == 0


def test_a_task_in_a_file_uses_them_with_the_settings_of_the_sweep(tmp_path):
    name = written(tmp_path, (FILES / "increments.txt").read_text(), "Increments")
    info = load_task_info(name)
    assert info.rewards == {"correctness": (0, 1), "bug_free": (0, 1), "length": (0, 1)}
    settings = TrainingSettings(length_limit=9), SandboxSettings(cpu_seconds=0.5), DataSettings()
    with closing(build_task(name, *settings)) as task:
        problem = task.problems("train", 1, 0)[0]
        number = problem.prompt.split()[-1].strip(".")
        texts = [f"<answer>def f(x): return x + {number}</answer>", BROKEN]
        texts.append("<answer>def f(x):\n while True: pass</answer>")
        scores = task.score([problem] * 3, texts, [9, 10, 9])
    expected = {"correctness": [1, 0, 0], "bug_free": [1, 0, 0], "length": [1, 0, 1]}
    assert scores.rewards == expected


def test_the_tasks_that_ship_use_the_same_functions():
    assert CodeTask.reward_funcs["correctness"] is rewards.tests_passed
    assert MathTask.reward_funcs["correctness"] is rewards.answer
    assert ToolsTask.reward_funcs["correctness"] is rewards.tool_calls
