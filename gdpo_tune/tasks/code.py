"""The code task: write Python, which the sandbox runs against several tests.

Problems are synthetic (`code_problems`), or come from a data set (`data`, `layouts`). Candidate
code never runs in this process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from gdpo_tune.core import turns
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.code_problems import generate
from gdpo_tune.tasks.early_judge import EarlyJudge
from gdpo_tune.tasks.rewards import BLOCK_FORMAT, BUG_FREE, LENGTH, TESTS_PASSED, score_bug_free
from gdpo_tune.tasks.task import MEAN_LENGTH, BuiltInTask, TaskMetric, measure_rewards

if TYPE_CHECKING:
    from gdpo_tune.sandbox import Result, Sandbox


class CodeTask(BuiltInTask):
    """Code problems, judged by execution. Use it as a context manager."""

    reward_infos = (TESTS_PASSED, BLOCK_FORMAT, LENGTH)
    optional_reward_infos = (BUG_FREE,)
    metric_infos = {
        **measure_rewards(reward_infos),
        "mean_length": MEAN_LENGTH,
        "bug_rate": TaskMetric(
            "minimize",
            0,
            1,
            "share with no program, or one that does not compile, raises or breaks a sandbox limit",
            lambda sample: 1 - score_bug_free(sample),
        ),
    }
    generate = staticmethod(generate)
    format_request = (
        "Think first, between <think> and </think>. Then write the Python code between <answer> "
        "and </answer>, and nothing else. Use each pair of tags once, and at most {limit} tokens "
        "in all."
    )

    sandbox: Sandbox | None = None
    """Started when it is first needed, unless it was set before."""
    _early: EarlyJudge | None = None
    _starting = threading.Lock()
    """Held while an engine's thread, or one of several trials, starts both."""

    def begin_judging(self, problem: Problem, completion: str) -> None:
        """Run the program of a completion while others are sampled; see `JudgesEarly`."""
        self._start_judge().begin(problem, completion)

    def _run_programs(
        self, problems: Sequence[Problem], completions: Sequence[str]
    ) -> list[Result | None]:
        """Run the program of each completion.

        Raises:
            SandboxUnavailable: this machine offers no isolation, so nothing was run.
            SandboxInfraError: the sandbox broke; no completion gets a zero for that.
        """
        return self._start_judge().collect(problems, completions)

    def environment(self) -> dict[str, str]:
        """Return the sandbox's tier of isolation, which starts it, and where problems come from."""
        return {"sandbox": self._start_sandbox().info.tier, **super().environment()}

    def close(self) -> None:
        """End the sandbox; the task may be used again and then starts a new one."""
        if self.sandbox is not None:
            self.sandbox.close()
            self.sandbox = None
        if self._early is not None:
            self._early.close()
            self._early = None

    def __enter__(self) -> Self:
        self._start_sandbox()
        return self

    def _start_sandbox(self) -> Sandbox:
        if self.sandbox is None:
            from gdpo_tune.tasks.execution import open_sandbox

            self.sandbox = open_sandbox(self._settings)
        return self.sandbox

    def _start_judge(self) -> EarlyJudge:
        if self._early is None:
            from gdpo_tune.tasks.execution import run_programs

            with turns.hold(self._starting):
                if self._early is None:
                    run = functools.partial(run_programs, self._start_sandbox(), self._settings)
                    self._early = EarlyJudge(run)
        return self._early


TASK = CodeTask.describe(
    "embedded",
    {"train": 6000, "validation": 2500, "test": 2500},
    published_with={"bug_free": {"partial_credit": True}},
    length_reward="length",
    partial_reward="correctness",
)
