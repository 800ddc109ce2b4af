"""The code task: write Python; run it, in the sandbox, against several tests.

Problems are synthetic (`code_problems`), or come from a data set (`data`, `layouts`).

rewards, all 0 or 1:  correctness   every test passes, hidden ones included; a trial with
                                    `partial_credit` is trained on the share of tests that pass
                      format        exactly one think block and one answer block
                      length        at most `training.length_limit` tokens
                      bug_free      under `BugFreeCodeTask` alone: the program is there, compiles,
                                    raises in no test and stays within the limits of the sandbox
metrics, held out:    the first three, all tests in correctness whatever is trained on,
                      `mean_length` in tokens, and `bug_rate`, the share that is not bug-free

Candidate code never runs in this process. Correctness does not ask for the format: the program is
found wherever it is (`rewards.extract_code`), so that the objectives stay independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from gdpo_tune.core.closing import Closing
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.sandbox import Call, Job, Limits, Result, Sandbox
from gdpo_tune.tasks.base import Problem, Scores
from gdpo_tune.tasks.code_problems import generate
from gdpo_tune.tasks.code_tests import job_of
from gdpo_tune.tasks.data import FromData, describe
from gdpo_tune.tasks.rewards import extract_code, format_reward, length_reward
from gdpo_tune.tasks.sandboxes import open_sandbox

_NO_PROGRAM = Result("error", ("error",), 0.0, "")
_DEFAULT = SandboxSettings()
_OWN_PROBLEMS = DataSettings()
_INSTRUCTIONS = (
    "Think first, between <think> and </think>. Then write the Python code between <answer> and "
    "</answer>, and nothing else. Use each pair of tags once, and at most {limit} tokens in all."
)


class CodeTask(FromData, Closing):
    """Code problems, judged by execution. Use it as a context manager."""

    rewards = ("correctness", "format", "length")
    metrics = ("correctness", "format", "length", "mean_length", "bug_rate")
    _generate = staticmethod(generate)

    def __init__(
        self,
        training: TrainingSettings,
        sandbox: SandboxSettings = _DEFAULT,
        data: DataSettings = _OWN_PROBLEMS,
        opener: Callable[[SandboxSettings], Sandbox] = open_sandbox,
    ) -> None:
        self._length_limit = training.length_limit
        self.instructions = _INSTRUCTIONS.format(limit=training.length_limit)
        self._sandbox_settings = sandbox
        self._data = data
        self._limits = Limits(sandbox.cpu_seconds, sandbox.wall_seconds, sandbox.memory_mb << 20)
        self._opener = opener
        self._sandbox: Sandbox | None = None

    def score(
        self, problems: Sequence[Problem], completions: Sequence[str], lengths: Sequence[int]
    ) -> Scores:
        """Judge N completions, for training and for held-out evaluation alike; see `Task`.

        Raises:
            SandboxUnavailable: this machine offers no isolation, so nothing was run.
            SandboxInfraError: the sandbox broke; no completion gets a zero for that.
        """
        programs = [
            extract_code(completion, problem.data["function"])
            for problem, completion in zip(problems, completions, strict=True)
        ]
        results = self._run(problems, programs)
        columns = {
            "correctness": [float(result.passed) for result in results],
            "format": [format_reward(completion) for completion in completions],
            "length": [length_reward(length, self._length_limit) for length in lengths],
            "bug_free": [float(not result.bug) for result in results],
            "mean_length": [float(length) for length in lengths],
            "bug_rate": [float(result.bug) for result in results],
        }
        return Scores(
            rewards={name: columns[name] for name in self.rewards},
            metrics={name: columns[name] for name in self.metrics},
            partial={"correctness": [result.share for result in results]},
        )

    def environment(self) -> dict[str, str]:
        """The tier of isolation that candidate code runs under, which starts the sandbox; the data.

        Raises:
            DataError: the data set cannot be had, read or used.
        """
        return {"sandbox": self._running().info.tier, **describe(self._data)}

    def close(self) -> None:
        """End the sandbox; the task may be used again and then starts a new one."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def __enter__(self) -> Self:
        self._running()
        return self

    def _running(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = self._opener(self._sandbox_settings)
        return self._sandbox

    def _run(self, problems: Sequence[Problem], programs: Sequence[str]) -> list[Result]:
        """What became of each program; one that answers the same problem twice is run once."""
        keys = [
            (problem.prompt, program) for problem, program in zip(problems, programs, strict=True)
        ]
        by_prompt = {problem.prompt: problem for problem in problems}
        distinct = [key for key in dict.fromkeys(keys) if key[1]]
        jobs = [_job(by_prompt[prompt], program, self._limits) for prompt, program in distinct]
        results = self._running().run_batch(jobs) if jobs else []
        found = dict(zip(distinct, results, strict=True))
        return [found.get(key, _NO_PROGRAM) for key in keys]


class BugFreeCodeTask(CodeTask):
    """The code task with a fourth reward, for programs that do not break, right or wrong."""

    rewards = (*CodeTask.rewards, "bug_free")


def _job(problem: Problem, program: str, limits: Limits) -> Job:
    if "visible" not in problem.data:
        return job_of(problem, program, limits)
    tests = [*problem.data["visible"], *problem.data["hidden"]]
    function = problem.data["function"]
    calls = tuple(Call(function, (argument,), value) for argument, value in tests)
    return Job(program, calls, limits=limits)
