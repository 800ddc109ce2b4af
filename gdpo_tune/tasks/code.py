"""The code task: write Python, which the sandbox runs against several tests.

Problems are synthetic (`code_problems`), or come from a data set (`data`, `layouts`). Candidate
code never runs in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Self

from gdpo_tune.core.registry import TaskInfo, weigh_equally
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.tasks.base import Problem, TaskMetric, get_ranges, measure_rewards
from gdpo_tune.tasks.built_in_task import BuiltInTask
from gdpo_tune.tasks.code_problems import generate
from gdpo_tune.tasks.rewards import block_format, bug_free, length, tests_passed

if TYPE_CHECKING:
    from gdpo_tune.sandbox import Result, Sandbox

REWARDS = (tests_passed.REWARD, block_format.REWARD, length.REWARD)
OPTIONAL_REWARDS = (bug_free.REWARD,)
"""On where the space has a weight for them."""
METRICS = {
    **measure_rewards(REWARDS),
    "mean_length": length.MEAN_LENGTH,
    "bug_rate": TaskMetric(
        "minimize",
        0,
        1,
        "share with no program, or one that does not compile, raises or breaks a sandbox limit",
        lambda sample: 1 - bug_free.score_bug_free(sample),
    ),
}


class CodeTask(BuiltInTask):
    """Code problems, judged by execution. Use it as a context manager."""

    reward_infos = REWARDS
    optional_reward_infos = OPTIONAL_REWARDS
    metric_infos = METRICS
    generate = staticmethod(generate)
    format_request = (
        "Think first, between <think> and </think>. Then write the Python code between <answer> "
        "and </answer>, and nothing else. Use each pair of tags once, and at most {limit} tokens "
        "in all."
    )

    def __init__(
        self,
        training: TrainingSettings,
        sandbox: SandboxSettings | None = None,
        data: DataSettings | None = None,
        optional_rewards: Collection[str] = (),
        opener: Callable[[SandboxSettings], Sandbox] | None = None,
    ) -> None:
        """Keep the settings; `opener` starts the sandbox, by default the one of `sandbox.type`."""
        super().__init__(training, sandbox, data, optional_rewards)
        self._settings = sandbox or SandboxSettings()
        self._opener = opener
        self._sandbox: Sandbox | None = None

    def _run_programs(
        self, problems: Sequence[Problem], completions: Sequence[str]
    ) -> list[Result | None]:
        """Run the program of each completion.

        Raises:
            SandboxUnavailable: this machine offers no isolation, so nothing was run.
            SandboxInfraError: the sandbox broke; no completion gets a zero for that.
        """
        from gdpo_tune.tasks.execution import run_programs

        return run_programs(self._start_sandbox(), self._settings, problems, completions)

    def environment(self) -> dict[str, str]:
        """Return the sandbox's tier of isolation, which starts it, and where problems come from."""
        return {"sandbox": self._start_sandbox().info.tier, **super().environment()}

    def close(self) -> None:
        """End the sandbox; the task may be used again and then starts a new one."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def __enter__(self) -> Self:
        self._start_sandbox()
        return self

    def _start_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            from gdpo_tune.tasks.execution import open_sandbox

            self._sandbox = (self._opener or open_sandbox)(self._settings)
        return self._sandbox


TASK = TaskInfo(
    build=CodeTask,
    rewards=get_ranges(REWARDS),
    optional_rewards=get_ranges(OPTIONAL_REWARDS),
    metrics=METRICS,
    published=weigh_equally(get_ranges(REWARDS)),
    published_with={"bug_free": {"partial_credit": True}},
    embedded="embedded",
    prompts={"train": 6000, "validation": 2500, "test": 2500},
    length_reward="length",
    partial_reward="correctness",
)
