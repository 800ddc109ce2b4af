"""Tasks in processes of their own: functions that hang, exit, print, fork or use signals."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from gdpo_tune.core import task_files
from gdpo_tune.core.errors import TrialFailure, UsageError
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trial_files import read_completions, read_steps
from gdpo_tune.tasks import task_process
from gdpo_tune.tasks.task_process import MOST_PRINTED, TaskProcess, check_rewards
from gdpo_tune.training import train, worker_cache
from tests.support.training import write_policy

SETTINGS = TrainingSettings(
    steps=1,
    completions_per_step=16,
    max_completion_length=8,
    length_limit=4,
    train_prompts=40,
    validation_prompts=4,
    test_prompts=4,
    samples_per_prompt=1,
    dead_steps=0,
)
FILE = """
import asyncio, os, random, signal, sys, time
import near_the_task
from gdpo_tune.tasks.custom import RewardFunctionTask

def ends(completions, **_):
    print("asked")
    if "abort" in completions:
        os.abort()
    if "exit" in completions:
        os._exit(3)
    if "cancel" in completions:
        raise asyncio.CancelledError("late")
    if "panic" in completions:
        os.kill(os.getpid(), signal.SIGRTMIN + 2)
    if "leave" in completions:
        sys.exit("left")
    if "close" in completions:
        os.closerange(3, 100)
    while "hang" in completions:
        pass
    return [1.0] * len(completions)

def loud(completions, **_):
    print("x" * (3_000_000 if "loud" in completions else 1))
    return [2.0] * len(completions)

def forks(completions, **_):
    os.fork()
    return [3.0] * len(completions)

def limited(completions, **_):
    def ring(*_):
        raise TimeoutError
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        while True:
            pass
    except TimeoutError:
        return [near_the_task.FOUR] * len(completions)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, 0.001)  # rings when nothing waits for it

def draws(completions, **_):
    return [random.random() for _ in completions]

class Odd(RewardFunctionTask):
    reward_funcs = [ends, loud, forks, limited, draws]
    time_limit = 1

    def rows(self):
        return [{"prompt": str(i)} for i in range(100)]
"""


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


def build(directory: Path, text: str, name: str, settings=SETTINGS) -> TaskProcess:
    (directory / "mine.py").write_text(text)
    task = f"{directory / 'mine.py'}:{name}"
    return task_files.build_task(task, settings, SandboxSettings(), DataSettings())


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
    assert first.rewards | {"draws": 0} == {
        "ends": [1.0, 1.0],
        "loud": [2.0, 2.0],
        "forks": [3.0, 3.0],
        "limited": [4.0, 4.0],
        "draws": 0,
    }
    assert first.rewards["draws"] == second.rewards["draws"], "draws depend on the batch alone"
    assert not any(first.failures.values())
    printed = capfd.readouterr().err
    assert len(printed) < 3 * MOST_PRINTED
    assert f"more than {MOST_PRINTED} bytes are not shown" in printed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("abort", "ended its process (signal SIGABRT)"),
        ("exit", "ended its process (exit status 3)"),
        ("leave", "SystemExit: left (mine.py, line 17)"),
        ("close", "ended its process (exit status 1)"),
        ("cancel", "asyncio.exceptions.CancelledError: late (mine.py, line 13)"),
        ("panic", "ended its process (signal 36)"),
        ("hang", "did not return within 1 s (time_limit of its class)"),
    ],
)
def test_a_function_that_ends_its_process_loses_that_value_alone(odd, text, reason, capfd):
    scored = score(odd, "a", text, "b")
    assert scored.rewards["ends"] == [1.0, None, 1.0]
    assert scored.failures["ends"] == {1: reason}
    assert scored.rewards["limited"] == [4.0] * 3
    assert "asked" in capfd.readouterr().err, "what it printed before its end"


def test_in_a_check_the_function_is_named(odd):
    with pytest.raises(TrialFailure, match=r"reward ends \(mine.py, line 6\) ended its process"):
        score(odd, "a", "exit", is_check=True)


def test_a_process_ends_with_its_parent(tmp_path):
    build(
        tmp_path, "from gdpo_tune.tasks.custom import RewardFunctionTask\n" + CHECKED, "Good"
    ).close()
    program = (
        "import os, sys; from gdpo_tune.core import task_files, settings as s\n"
        "t = task_files.build_task(sys.argv[1], s.TrainingSettings(), s.SandboxSettings(), "
        "s.DataSettings())\n"
        "print(t._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", program, f"{tmp_path / 'mine.py'}:Good"]
    child = int(subprocess.run(command, capture_output=True, check=False).stdout)
    for _ in range(100):
        if (
            not Path(f"/proc/{child}").exists()
            or "State:\tZ" in Path(f"/proc/{child}/status").read_text()
        ):
            return
        time.sleep(0.1)
    pytest.fail("it lives on")


CHECKED = """from gdpo_tune.core.errors import UsageError
from gdpo_tune.tasks.custom import RewardFunctionTask
def good(completions, log_metric, log_extra, **_):
    log_metric("mine/letters", sum(map(len, completions)))
    log_extra("shouted", [text.upper() for text in completions])
    return [float(len(text) % 2) for text in completions]

def picky(completions, **_):
    return [1 / len(text) for text in completions]

def short(completions, **_):
    return [1.0]

def wide(completions, **_):
    return [float(len(text)) for text in completions]

def never(completions, **_):
    raise ValueError("no key")

def slow(completions, **_):
    import time
    time.sleep(60)

def unknown(completions, **_):
    return [float("nan")] * len(completions)

def silent(completions, **_):
    return [None] * len(completions)

def theirs(completions, **_):
    raise UsageError("no key")

class Good(RewardFunctionTask):
    reward_funcs = [good]
    ranges = {"good": (0, 1), "wide": (0, 1)}
    time_limit = 0.5

    def rows(self):
        return [{"prompt": f"say {i}"} for i in range(100)]
"""


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("short", r"reward short \(mine.py, line 11\) returned 1 values for 8 completions\n +fix"),
        ("wide", r"reward wide \(mine.py, line 14\) is \d+ for completion 1, outside its range"),
        ("never", r"reward never \(.*\) raised for each of 8 texts.*ValueError: no key"),
        ("slow", r"reward slow \(mine.py, line 20\) did not return within 0.5 s"),
        ("unknown", r"unknown \(mine.py, line 24\) is nan, which ends a trial\n +fix: return a nu"),
        ("theirs", r"reward theirs \(.*\) raised for each of 8 texts.*UsageError: no key"),
    ],
)
def test_rewards_are_checked_before_a_sweep(tmp_path, function, reason):
    text = CHECKED.replace("reward_funcs = [good]", f"reward_funcs = [{function}]")
    with build(tmp_path, text, "Good") as task, pytest.raises(UsageError, match=reason):
        check_rewards(task)


def test_exceptions_on_some_texts_are_a_warning(tmp_path):
    text = CHECKED.replace("reward_funcs = [good]", "reward_funcs = [picky]")
    with build(tmp_path, text, "Good") as task:
        times, warnings = check_rewards(task)
    assert "picky" in times
    idle, warning = warnings
    assert idle == "ranges names 'good', which is no reward or metric"
    assert warning.startswith("reward picky raised for 2 of 8 texts: ZeroDivisionError")


def test_a_reward_that_scores_nothing_is_a_warning(tmp_path):
    text = CHECKED.replace("reward_funcs = [good]", "reward_funcs = [silent]")
    with build(tmp_path, text.replace('"wide"', '"silent"'), "Good") as task:
        _, (_, warning) = check_rewards(task)
    assert warning == "silent is None for each of 8 texts"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("return []", r"mine.py:Good: Good has 0 of 40 train prompts, .*\n +fix: more rows"),
        ("json.loads('')", r"JSONDecodeError: .* \(mine.py, line \d+\)\n +fix: correct the file"),
        ("import os; os._exit(4)", r"enter\(\) ended its process .*\n +fix: correct the file"),
        ("raise GeneratorExit", r"raised GeneratorExit \(mine.py, line \d+\)\n +fix: correct"),
    ],
)
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
    build(tmp_path, text, "Good").close()
    task = f"{tmp_path / 'mine.py'}:Good"
    params = {name: info.default for name, info in PARAMETERS.items()}
    params |= {"reward_weights.good": 1.0, "group_size": 4}
    policy = write_policy(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }}={% endfor %}"
    tokenizer.save_pretrained(policy)
    config = TrialConfig(task, policy, 0, params, SETTINGS, tmp_path / "trial")
    train(config, resume=None, report=lambda *_: None)
    worker_cache.release_worker_cache()
    (step,) = read_steps(tmp_path / "trial")
    assert step.metrics["train/mine/letters"] > 0
    kept = read_completions(tmp_path / "trial")
    assert all(one.columns == {"shouted": one.completion.upper()} for one in kept)
