"""Tasks in processes of their own: functions that hang, exit, print, fork or use signals."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from gdpo_tune.core.errors import TaskFileError, TrialFailure, UsageError
from gdpo_tune.core.trial_files import read_completions, read_steps
from gdpo_tune.tasks import task_process
from gdpo_tune.tasks.custom import TURN_METRICS
from gdpo_tune.tasks.task_process import MOST_PRINTED, TaskProcess, check_rewards
from gdpo_tune.training import worker_cache
from tests.support.paths import ROOT
from tests.support.tables import read_table
from tests.support.training import write_policy
from tests.tasks.own_tasks import FILES, SETTINGS, build, run_trial, trial, written

FILE, CHECKED = (FILES.joinpath(name).read_text() for name in ("odd.txt", "checked.txt"))
"""Functions that hang, exit, print, fork or use signals; functions that a check refuses."""


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    """One more attempt after a second: those of a real sweep take 15."""
    monkeypatch.setattr(task_process, "PATIENCE", 1.5)


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    directory = tmp_path_factory.mktemp("odd")
    (directory / "near_the_task.py").write_text("FOUR = 4.0\n")
    with build(directory, FILE, "Odd") as task:
        yield task


def score(task: TaskProcess, *texts: str, **keywords):
    problems = task.problems("train", len(texts), 0)
    return task.score(problems, texts, [1] * len(texts), **keywords)


def test_output_forks_and_signals_harm_nothing(odd, capfd):
    # Source: signal.setitimer and the handlers of Math-Verify work in the main thread alone
    # (verl#5635, Math-Verify#50); a trial of a sweep runs in another one.
    results = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: results.append(score(odd, "a", "loud")))
        thread.start()
        thread.join()
    first, second = results
    fixed = {"ends": [1.0] * 2, "loud": [2.0] * 2, "forks": [3.0] * 2, "limited": [4.0] * 2}
    assert first.rewards == {**fixed, "draws": first.rewards["draws"]}
    assert first.rewards["draws"] == second.rewards["draws"], "draws depend on the batch alone"
    assert not any(first.failures.values())
    printed = capfd.readouterr().err
    assert len(printed) < 3 * MOST_PRINTED
    assert f"more than {MOST_PRINTED} bytes are not shown" in printed


@pytest.mark.parametrize(("text", "reason"), read_table("task_files")["ends"])
def test_a_function_that_ends_its_process_loses_that_value_alone(odd, text, reason, capfd):
    scored = score(odd, "a", text, "b")
    assert scored.rewards["ends"] == [1.0, None, 1.0]
    assert scored.failures["ends"] == {1: reason}
    assert scored.rewards["limited"] == [4.0] * 3
    assert "asked" in capfd.readouterr().err, "what it printed before its end"


def test_in_a_check_the_function_is_named(odd):
    with pytest.raises(TrialFailure, match=r"reward ends \(mine.py, line 6\) ended its process"):
        score(odd, "a", "exit", is_check=True)


@pytest.mark.parametrize(
    ("time_limit", "row", "is_check", "seconds"),
    [(None, None, False, 600), (None, 3, False, 60), (None, None, True, 60), (5, 0, False, 0.5)],
)
def test_a_call_has_the_time_that_the_guide_says(monkeypatch, time_limit, row, is_check, seconds):
    """Source: docs/own_task.md: 600 seconds, 60 in a check, a tenth for a completion alone."""
    asked = []
    monkeypatch.setattr(TaskProcess, "_request", lambda *_, limit=None: asked.append(limit))
    task = object.__new__(TaskProcess)
    task._class, task.directory = SimpleNamespace(time_limit=time_limit), None
    task._call("one", row, None, is_check=is_check)
    assert asked == [None, pytest.approx(seconds)]


KILLED = """
import os, pathlib, sys, threading, time
from gdpo_tune.core import settings as s, task_files
t = task_files.build_task(sys.argv[1], s.TrainingSettings(), s.SandboxSettings(), s.DataSettings())
rows = t.problems("train", 1, 0)
if sys.argv[2] == "busy":
    threading.Thread(target=t.score, args=(rows, ["x"], [1]), daemon=True).start()
    while not pathlib.Path("asked").exists():
        time.sleep(0.01)
print(t._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
BUSY = """
def good(completions, **_):
    open("asked", "w").close()
    time.sleep(600)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_process_ends_with_its_parent(tmp_path, monkeypatch, state):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    text = CHECKED.replace("class Good", f"import time\n{BUSY}\n\nclass Good")
    text = text.replace("time_limit = 0.5", "time_limit = 600")
    name = written(tmp_path, text if state == "busy" else CHECKED, "Good")
    command = [sys.executable, "-c", KILLED, name, state]
    child = int(subprocess.run(command, capture_output=True, check=False).stdout)
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(child)
        for _ in range(100):
            if process.status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(0.1)
        pytest.fail("it lives on")


def checking(function):
    return CHECKED.replace("reward_funcs = [good]", f"reward_funcs = [{function}]")


@pytest.mark.parametrize(("function", "reason"), read_table("task_files")["checked"])
def test_rewards_are_checked_before_a_sweep(tmp_path, function, reason):
    with (
        build(tmp_path, checking(function), "Good") as task,
        pytest.raises(UsageError, match=reason),
    ):
        check_rewards(task)


@pytest.mark.parametrize(("function", "said"), read_table("task_files")["warned"])
def test_what_a_check_warns_of(tmp_path, function, said):
    text = checking(function)
    with build(tmp_path, text.replace('"wide"', f'"{function}"'), "Good") as task:
        times, (idle, warning) = check_rewards(task)
    assert function in times
    assert idle == "ranges names 'good', which is no reward or metric"
    assert re.fullmatch(said, warning)


@pytest.mark.parametrize(("rows", "reason"), read_table("task_files")["unreadable"])
def test_rows_that_cannot_be_read_are_refused(tmp_path, rows, reason):
    body = f"        {rows}\n        return [{{"
    text = "import json\n" + CHECKED.replace("        return [{", body)
    task = build(tmp_path, text, "Good")
    with pytest.raises(UsageError, match=reason), task:
        pass
    task.close()


def test_every_process_finds_the_same_rows(tmp_path, monkeypatch):
    # Source: PYTHONHASHSEED of Python: the order of a set of texts differs from process to process.
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    body = """        import random
        return [{"prompt": f"{one} {random.random()}"} for one in {*map(str, range(99))}]
        return [{"""
    text = CHECKED.replace("        return [{", body)
    found = []
    for _ in range(2):
        with build(tmp_path, text, "Good") as task:
            found.append(task.problems("validation", 4, 0))
    assert found[0] == found[1]


def test_a_conversation_trains_and_what_functions_log_is_kept(tmp_path):
    # Source: TRL 1.16, `GRPOTrainer._log_metric`: means are logged under the name itself.
    text = CHECKED.replace('f"say {i}"', '[{"role": "user", "content": f"say {i}"}]').replace(
        "completions]", "(one[0]['content'] for one in completions)]"
    )
    text = text.replace("map(len, completions)", "len(one[0]['content']) for one in completions")
    policy = write_policy(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }}={% endfor %}"
    tokenizer.save_pretrained(policy)
    task = written(tmp_path, text, "Good")
    run_trial(trial(task, tmp_path, policy, SETTINGS.replace(steps=1)))
    worker_cache.release_worker_cache()
    (step,) = read_steps(tmp_path / "trial")
    assert step.metrics["train/mine/letters"] > 0
    kept = read_completions(tmp_path / "trial")
    assert all(one.columns == {"shouted": one.completion.upper()} for one in kept)


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    text = FILES.joinpath("calls.txt").read_text()
    with build(tmp_path_factory.mktemp("calls"), text, "Calls") as task:
        yield task


def test_tools_are_called_in_the_process_of_the_task(calls, capfd):
    add, later, _ = calls.tools
    assert add(a=2, b=3) == "5"
    assert "added" in capfd.readouterr().err
    text, process = re.fullmatch(r"\['(\w+)', (\d+)\]", later(text="b")).groups()
    assert (text, int(process)) == ("b", calls._process.pid)
    # Source: TRL reads whether a tool is async, and Transformers its signature and docstring.
    assert not any(map(inspect.iscoroutinefunction, calls.tools))
    assert [get_json_schema(tool) for tool in calls.tools] == calls.tool_format.schemas
    assert [problem.turns for problem in calls.problems("train", 2, 0)] == [
        [{"role": "user", "content": problem.prompt.removeprefix("user: ")}]
        for problem in calls.problems("train", 2, 0)
    ]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("hang", "did not return within 0.5 s (tool_time_limit of its class)"),
        ("exit", "ended its process (exit status 3)"),
        ("leave", "left"),
        ("key", "'key'"),
    ],
)
def test_a_call_that_fails_tells_the_policy_and_no_other(calls, how, reason):
    # Source: TRL 1.16, `_tool_call_loop`: the policy reads str() of an `Exception`.
    add, _, fail = calls.tools
    with pytest.raises(Exception, match=f"^{re.escape(reason)}$"):
        fail(how=how)
    assert add(a=2, b=3) == "5", "the process is there again"


def test_arguments_of_a_policy_that_do_not_fit(calls):
    with pytest.raises(Exception, match=r"^add\(\) missing 1 required positional argument: 'b'$"):
        calls.tools[0](a=2)
    with pytest.raises(Exception, match=r"got an unexpected keyword argument 'self'$"):
        calls.tools[0](a=2, b=3, self=1)


def test_turns_are_measured_and_reach_rewards(calls):
    """Source: TRL's messages; the tokens that the policy wrote are 5 of 9."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "name": "add", "content": "{'error': 'no b'}"},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "x", "tool_calls": [call]},
    ]
    problems = calls.problems("train", 2, 0)
    scored = calls.score(problems, [turns, "plain"], [5, 3], [[0] * 9, [0] * 3])
    measured = {name: scored.metrics[name] for name in TURN_METRICS}
    assert measured == {
        "turns": [2.0, 1.0],
        "tool_calls": [3.0, 0.0],
        "tool_errors": [1.0, 0.0],
        "tool_tokens": [4.0, 0.0],
    }
    assert scored.metrics["mean_length"] == [5.0, 3.0]
    assert all(calls.directions[name] == "minimize" for name in TURN_METRICS)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            '"""Add.\n\n    Args:\n        a: One.\n        b: Other.\n    """',
            "",
            "has no docstring",
        ),
        ("        a: One.\n", "", r"the docstring has no description for the argument 'a'"),
        ("a: int, b: int", "a, b: int", "Argument a is missing a type hint"),
        ("a: int, b: int", "a: int, b: int, /", "positional.only"),
        ("a: int, b: int", "a: int, *b: int", "got an unexpected keyword argument 'b'"),
    ],
    ids=["no docstring", "no description", "no type", "no keyword", "no name"],
)
def test_a_tool_without_docstring_or_types_is_refused_with_its_line(tmp_path, old, new, reason):
    text = FILES.joinpath("calls.txt").read_text().replace(old, new, 1)
    with pytest.raises(UsageError, match=rf"tool \w+ \(mine.py, line \d+\): .*{reason}.*\n +fix"):
        build(tmp_path, text, "Calls")


def test_tools_are_a_list_of_functions(tmp_path):
    text = (
        FILES.joinpath("calls.txt").read_text().replace("[add, later, fail]", "(f for f in [add])")
    )
    with pytest.raises(TaskFileError, match="raised UsageError: Calls: tools has to be a list of"):
        build(tmp_path, text, "Calls")
