"""CodeTask: programs in a scripted sandbox and the real one, rewards and metrics of verdicts."""

from collections.abc import Mapping, Sequence

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.errors import SandboxInfraError
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.sandbox import Call, Job, Limits, Result
from gdpo_tune.sandbox.jobs import SandboxInfo
from gdpo_tune.tasks import execution
from gdpo_tune.tasks.base import Task
from gdpo_tune.tasks.code import TASK, CodeTask

VERDICTS = {"passed": ("passed",) * 4, "failed": ("passed", "failed", "failed", "passed")}


class ScriptedSandbox:
    """Gives each program the status that the script names, else `failed`, and verdicts to match."""

    info = SandboxInfo(tier="scripted", layers=())

    def __init__(self, script: Mapping[str, str] = {}) -> None:
        self.script = script
        self.jobs: list[Job] = []
        self.batches = 0
        self.closed = 0

    def run_batch(self, jobs: Sequence[Job]) -> list[Result]:
        self.batches += 1
        self.jobs += jobs
        return [self.result(self.script.get(job.code, "failed")) for job in jobs]

    def result(self, status: str) -> Result:
        verdicts = VERDICTS.get(status, ("passed", "error", "not_run", "not_run"))
        return Result(status, verdicts, 0.0, "why")

    def close(self) -> None:
        self.closed += 1


def task_with(sandbox, *optional: str, **settings) -> CodeTask:
    training = TrainingSettings(**settings)
    task = CodeTask(training, optional_rewards=optional)
    task.sandbox = sandbox
    return task


def answer(program: str) -> str:
    return f"<think></think><answer>{program}</answer>"


def test_the_task_describes_itself():
    assert registry.describe_task("code") is TASK
    assert TASK.build is CodeTask
    task: Task = CodeTask(TrainingSettings())
    assert task.rewards == tuple(TASK.rewards) == ("correctness", "format", "length")
    assert task.metrics == tuple(TASK.metrics)
    assert task.problems("train", 1, 0)
    scores = task_with(ScriptedSandbox()).score(task.problems("train", 1, 0), ["a"], [1])
    assert tuple(scores.rewards) == task.rewards
    assert tuple(scores.metrics) == task.metrics
    assert set(scores.partial) == {TASK.partial_reward}


def test_an_optional_reward_is_on_where_it_has_a_weight():
    assert TASK.add_optional_rewards(["reward_weights.format", "bug_free"]) is TASK
    with_it = TASK.add_optional_rewards({"reward_weights.bug_free": 0.0})
    assert with_it.rewards == {**TASK.rewards, "bug_free": (0, 1)}
    extra = {"reward_weights.bug_free": 1.0, "partial_credit": True}
    assert with_it.published == {**TASK.published, **extra}
    assert with_it.metrics == TASK.metrics
    task = with_it.build(TrainingSettings(), SandboxSettings(), DataSettings())
    assert task.rewards == tuple(with_it.rewards)
    assert task.metrics == tuple(TASK.metrics)


@pytest.mark.parametrize(
    ("status", "correct", "share", "bug"),
    [
        ("passed", 1, 1, 0), ("failed", 0, 0.5, 0), ("error", 0, 0.25, 1), ("timeout", 0, 0.25, 1),
        ("memory", 0, 0.25, 1), ("output", 0, 0.25, 1), ("crash", 0, 0.25, 1),
        ("violation", 0, 0, 1),
    ],
)  # fmt: skip
def test_verdicts_become_rewards_and_metrics(status, correct, share, bug):
    task = task_with(ScriptedSandbox({"program": status}), "bug_free")
    scores = task.score(task.problems("train", 1, 0), [answer("program")], [10])
    assert scores.rewards["correctness"] == scores.metrics["correctness"] == [correct]
    assert scores.partial == {"correctness": [share]}
    assert scores.rewards["bug_free"] == [1 - bug]
    assert scores.metrics["bug_rate"] == [bug]


def test_correctness_does_not_ask_for_the_format():
    task = task_with(ScriptedSandbox({"def f(x): return x": "passed"}), length_limit=7)
    scores = task.score(task.problems("train", 2, 0), ["def f(x): return x"] * 2, [7, 8])
    assert scores.rewards == {"correctness": [1, 1], "format": [0, 0], "length": [1, 0]}
    assert scores.metrics["mean_length"] == [7, 8]


def test_a_completion_without_a_program_is_a_bug_and_is_not_run():
    sandbox = ScriptedSandbox()
    task = task_with(sandbox)
    scores = task.score(task.problems("train", 1, 0), ["forty-two"], [3])
    assert list(scores.metrics["bug_rate"]) == [1]
    assert list(scores.rewards["correctness"]) == [0]
    assert scores.partial == {"correctness": [0]}
    assert sandbox.batches == 0


def test_every_visible_and_hidden_test_is_run_in_one_batch():
    sandbox = ScriptedSandbox()
    task = task_with(sandbox)
    problems = task.problems("train", 4, 0)
    task.score(problems, [answer("a")] * 4, [9] * 4)
    assert sandbox.batches == 1
    for job, problem in zip(sandbox.jobs, problems, strict=True):
        tests = problem.data["visible"] + problem.data["hidden"]
        assert job.calls == tuple(Call("f", (argument,), expected) for argument, expected in tests)


def test_the_settings_of_the_sandbox_reach_it_and_every_job(monkeypatch):
    sandbox, opened = ScriptedSandbox(), []
    settings = SandboxSettings(cpu_seconds=0.5, wall_seconds=2.5, memory_mb=100)
    monkeypatch.setattr(execution, "open_sandbox", lambda given: opened.append(given) or sandbox)
    task = CodeTask(TrainingSettings(), settings)
    task.score(task.problems("train", 2, 0), [answer("a")] * 2, [9] * 2)
    assert opened == [settings]
    limits = Limits(cpu_seconds=0.5, wall_seconds=2.5, memory_bytes=100 << 20)
    assert [job.limits for job in sandbox.jobs] == [limits] * 2


def test_the_same_program_for_the_same_problem_is_run_once():
    sandbox = ScriptedSandbox({"a": "passed"})
    task = task_with(sandbox)
    one, other = task.problems("train", 2, 0)
    texts = [answer("a"), "<answer>a", answer("a"), answer("b")]
    scores = task.score([one, one, other, one], texts, [9] * 4)
    assert [job.code for job in sandbox.jobs] == ["a", "a", "b"]
    assert list(scores.rewards["correctness"]) == [1, 1, 1, 0]


def test_a_broken_sandbox_is_an_error_and_never_a_zero():
    class BrokenSandbox(ScriptedSandbox):
        def run_batch(self, jobs):
            raise SandboxInfraError("no verdict")

    task = task_with(BrokenSandbox())
    with pytest.raises(SandboxInfraError, match="no verdict"):
        task.score(task.problems("train", 1, 0), [answer("a")], [9])


def test_the_sandbox_lives_as_long_as_the_context():
    sandbox = ScriptedSandbox()
    with task_with(sandbox) as task:
        assert task.environment() == {"sandbox": "scripted"}
        assert sandbox.closed == 0
    assert sandbox.closed == 1


def test_problems_need_no_sandbox_and_close_is_harmless(monkeypatch):
    monkeypatch.setattr(execution, "open_sandbox", lambda settings: pytest.fail("none is needed"))
    task = CodeTask(TrainingSettings())
    assert len(task.problems("test", 5, 0)) == 5
    task.close()


def test_lists_of_different_lengths_are_refused():
    task = task_with(ScriptedSandbox())
    with pytest.raises(ValueError, match="shorter"):
        task.score(task.problems("train", 2, 0), [answer("a")], [9])


UNSAFE = {"type": "unsafe_no_isolation", "workers": 2, "modules": ("numpy",)}


@pytest.mark.parametrize(
    ("settings", "name", "workers", "modules"),
    [
        ({}, "CodeSandbox", 1, ()),
        ({"workers": 3, "modules": ("numpy",)}, "CodeSandbox", 3, ("numpy",)),
        (UNSAFE, "UnsafeNoIsolationSandbox", 2, ("numpy",)),
    ],
)
def test_settings_open_the_sandbox_that_they_name(monkeypatch, settings, name, workers, modules):
    for kind in ("CodeSandbox", "UnsafeNoIsolationSandbox"):
        monkeypatch.setattr(execution, kind, lambda *args, _kind=kind, **more: (_kind, args, more))
    opened = execution.open_sandbox(SandboxSettings(**settings))
    assert opened == (name, (workers,), {"modules": modules})


@pytest.fixture(scope="module")
def real():
    with CodeTask(TrainingSettings()) as task:
        yield task


@pytest.mark.integration
def test_reference_solutions_are_correct_in_the_real_sandbox(real):
    problems = real.problems("test", 60, 0)
    assert {problem.family for problem in problems} == {"rate", "chain", "list"}
    programs = [answer(problem.data["solution"]) for problem in problems]
    scores = real.score(problems, programs, [20] * 60)
    assert set(scores.rewards["correctness"]) == {1.0}
    assert set(scores.metrics["bug_rate"]) == {0.0}
    assert real.environment()["sandbox"]


@pytest.mark.integration
def test_hidden_tests_catch_a_table_of_the_visible_ones_which_earns_their_share(real):
    problems = [p for p in real.problems("test", 40, 0) if p.family != "list"]
    for raising, form in enumerate(("{}.get(x, 12345)", "{}[x]")):
        tables = [form.format(dict(problem.data["visible"])) for problem in problems]
        programs = [answer(f"def f(x): return {table}") for table in tables]
        scores = real.score(problems, programs, [20] * len(problems))
        tests = [(len(p.data["visible"]), len(p.data["hidden"])) for p in problems]
        shares = [visible / (visible + hidden) for visible, hidden in tests]
        assert scores.partial["correctness"] == pytest.approx(shares)
        assert set(scores.rewards["correctness"]) == set(scores.metrics["correctness"]) == {0.0}
        assert set(scores.metrics["bug_rate"]) == {float(raising)}
