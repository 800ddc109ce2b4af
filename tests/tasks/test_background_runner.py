"""Programs that run before their results are asked for."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from gdpo_tune.core.errors import SandboxInfraError
from gdpo_tune.core.settings import SandboxSettings, TrainingSettings
from gdpo_tune.sandbox.local_sandbox import UnsafeNoIsolationSandbox
from gdpo_tune.tasks import execution
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.code import CodeTask
from gdpo_tune.tasks.execution import BackgroundRunner
from gdpo_tune.tasks.math import MathTask
from gdpo_tune.training.evaluation import build_early_scoring

ONE, TWO = Problem("one", "f"), Problem("two", "f")


class Recorder:
    """Runs nothing, and answers with prompt and completion; `gate` holds its first batch back."""

    def __init__(self):
        self.batches, self.gate, self.error = [], threading.Event(), None
        self.entered = threading.Event()

    def run(self, problems, completions):
        pairs = list(zip([one.prompt for one in problems], completions, strict=True))
        if pairs:
            self.batches.append(pairs)
        if threading.current_thread() is not threading.main_thread():
            self.entered.set()
            assert self.gate.wait(10)
            if self.error is not None:
                raise self.error
        return [f"{prompt}/{text}" for prompt, text in pairs]


@pytest.fixture
def runner():
    recorder = Recorder()
    runner = BackgroundRunner(recorder.run)
    runner.recorder = recorder
    yield runner
    recorder.gate.set()
    runner.close()


def test_results_are_those_of_a_batch_and_nothing_runs_twice(runner):
    runner.submit(ONE, "a")
    assert runner.recorder.entered.wait(10)
    for problem, text in ((ONE, "a"), (ONE, "b"), (TWO, "a"), (ONE, "b")):
        runner.submit(problem, text)  # while the first one runs
    runner.recorder.gate.set()
    found = runner.gather([TWO, ONE, ONE, ONE, TWO], ["a", "c", "a", "b", "a"])
    assert found == ["two/a", "one/c", "one/a", "one/b", "two/a"]
    batches = [[("one", "a")], [("one", "b"), ("two", "a")], [("one", "c")]]
    assert sorted(runner.recorder.batches) == batches


def test_a_result_serves_one_batch(runner):
    runner.recorder.gate.set()
    for _ in range(2):
        runner.submit(ONE, "a")
        assert runner.gather([ONE], ["a"]) == ["one/a"]
    assert runner.gather([ONE], ["a"]) == ["one/a"]
    assert runner.recorder.batches == [[("one", "a")]] * 3


def test_programs_whose_early_run_failed_run_again_with_their_batch(runner, caplog):
    runner.recorder.error = SandboxInfraError("broken")
    runner.recorder.gate.set()
    runner.submit(ONE, "a")
    assert runner.gather([ONE], ["a"]) == ["one/a"]
    assert runner.recorder.batches == [[("one", "a")]] * 2
    assert "1 programs run once more: SandboxInfraError('broken')" in caplog.text


def test_an_error_of_the_batch_itself_is_raised():
    def fail(problems, completions):
        raise SandboxInfraError("broken")

    runner = BackgroundRunner(fail)
    runner.submit(ONE, "a")
    with pytest.raises(SandboxInfraError, match="broken"):
        runner.gather([ONE], ["a"])
    runner.close()


def test_threads_that_begin_at_once_share_a_sandbox(monkeypatch):
    started = []

    def start(settings):
        started.append(settings)
        time.sleep(0.05)
        return UnsafeNoIsolationSandbox(1)

    monkeypatch.setattr(execution, "open_sandbox", start)
    with closing(CodeTask(TrainingSettings())) as task:
        (problem,) = task.problems("train", 1, 0)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda text: task.begin_scoring(problem, text), "abcd"))
    assert len(started) == 1


def test_the_code_task_judges_early_and_gives_the_same_scores():
    settings = TrainingSettings(), SandboxSettings(type="unsafe_no_isolation")
    texts = ["<answer>def f(x): return x + 1</answer>", "<answer>1 +</answer>", "no program"]
    with CodeTask(*settings) as plain, CodeTask(*settings) as runner:
        problems = plain.problems("train", 3, 0)
        for problem, text in zip(problems, texts, strict=True):
            runner.begin_scoring(problem, text)
        results = [task.score(problems, texts, [9, 9, 9]) for task in (plain, runner)]
    assert results[0] == results[1]
    assert build_early_scoring(runner, problems)
    assert not build_early_scoring(MathTask(settings[0]), problems)
