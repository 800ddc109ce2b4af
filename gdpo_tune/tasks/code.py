"""The code task: write a small Python function; run it, in the sandbox, against several tests.

rewards, all 0 or 1:  correctness   every test passes, hidden ones included
                      format        exactly one think block and one answer block
                      length        at most `settings.length_limit` tokens
metrics, held out:    the same three, `mean_length` in tokens, and `bug_rate`: the program is
                      missing, does not compile, raises, or exceeds a limit of the sandbox

Candidate code never runs in this process. Correctness does not ask for the format: the program is
found wherever it is (`rewards.extract_code`), so that the objectives stay independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from gdpo_tune.sandbox import Call, CodeSandbox, Job, Result, SandboxInfo
from gdpo_tune.tasks.base import Problem, Scores, Split
from gdpo_tune.tasks.code_problems import FUNCTION, generate
from gdpo_tune.tasks.rewards import extract_code, format_reward, length_reward
from gdpo_tune.trials import TrainingSettings


class Sandbox(Protocol):
    """The part of `CodeSandbox` that this task uses."""

    @property
    def info(self) -> SandboxInfo:
        """Which isolation is in force."""
        ...

    def run_batch(self, jobs: Sequence[Job]) -> list[Result]:
        """One result a job, in order."""
        ...

    def close(self) -> None:
        """End the sandbox's processes."""
        ...


class CodeTask:
    """Synthetic code problems, judged by execution. Use it as a context manager."""

    rewards = ("correctness", "format", "length")
    metrics = ("correctness", "format", "length", "mean_length", "bug_rate")

    def __init__(
        self, settings: TrainingSettings, open_sandbox: Callable[[], Sandbox] = CodeSandbox
    ) -> None:
        self._limit = settings.length_limit
        self._open_sandbox = open_sandbox
        self._sandbox: Sandbox | None = None

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` problems with distinct prompts; the same arguments give the same list.

        Raises:
            UsageError: the split does not hold that many distinct prompts.
        """
        return generate(split, count, seed)

    def score(
        self, problems: Sequence[Problem], completions: Sequence[str], lengths: Sequence[int]
    ) -> Scores:
        """Judge N completions, for training and for held-out evaluation alike.

        Args:
            problems: N problems, the one that each completion answers.
            completions: N texts, decoded without the end token.
            lengths: N token counts, the end token included.

        Raises:
            SandboxUnavailable: this machine offers no isolation, so nothing was run.
            SandboxInfraError: the sandbox broke; no completion gets a zero for that.
        """
        programs = [extract_code(completion, FUNCTION) for completion in completions]
        verdicts = self._run(problems, programs)
        correct = [float(verdict == "passed") for verdict in verdicts]
        bugs = [float(verdict not in ("passed", "failed")) for verdict in verdicts]
        formats = [format_reward(completion) for completion in completions]
        short = [length_reward(length, self._limit) for length in lengths]
        rewards = {"correctness": correct, "format": formats, "length": short}
        counts = [float(length) for length in lengths]
        return Scores(rewards=rewards, metrics={**rewards, "mean_length": counts, "bug_rate": bugs})

    def environment(self) -> dict[str, str]:
        """The tier of isolation that candidate code runs under; starts the sandbox."""
        return {"sandbox": self._running().info.tier}

    def close(self) -> None:
        """End the sandbox; the task may be used again and then starts a new one."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def __enter__(self) -> Self:
        self._running()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _running(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = self._open_sandbox()
        return self._sandbox

    def _run(self, problems: Sequence[Problem], programs: Sequence[str]) -> list[str]:
        """Status of each program; one that answers the same problem twice is run once."""
        keys = [
            (problem.prompt, program) for problem, program in zip(problems, programs, strict=True)
        ]
        by_prompt = {problem.prompt: problem for problem in problems}
        distinct = [key for key in dict.fromkeys(keys) if key[1]]
        jobs = [_job(by_prompt[prompt], program) for prompt, program in distinct]
        results = self._running().run_batch(jobs) if jobs else []
        statuses = {key: result.status for key, result in zip(distinct, results, strict=True)}
        return [statuses.get(key, "error") for key in keys]


def _job(problem: Problem, program: str) -> Job:
    tests = [*problem.data["visible"], *problem.data["hidden"]]
    return Job(
        code=program, calls=tuple(Call(FUNCTION, (argument,), value) for argument, value in tests)
    )
