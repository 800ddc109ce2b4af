"""Idle time of sandbox and engine, with completions judged while others are sampled and without.

    python experiments/overlap.py            # 8 steps of 64 completions, four runs
    python experiments/overlap.py --small    # 2 steps of 16, two runs

docs/measurements.md has its figures: commit e2daa6fa of 2026-11-23, problems that the task `code`
writes itself.

Both ways train the code task from the same seed in turns. The engine is vLLM where it is installed,
else the sampler of small policies, which gives completions all at once: then only log-probabilities
overlap with the judging. `--seconds` lets each program sleep. The last line is JSON.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from harness import build_trial, print_table, run

from gdpo_tune.core.engines import find_vllm
from gdpo_tune.core.settings import RolloutSettings, SandboxSettings, TrainingSettings
from gdpo_tune.sandbox import Sandbox
from gdpo_tune.tasks.code import CodeTask
from gdpo_tune.tasks.execution import open_sandbox
from gdpo_tune.training import engine, rollout, train, worker_cache

Interval = tuple[float, float]


@dataclass
class Log:
    """When the engine sampled, and when the sandbox ran programs; seconds of a clock."""

    sampling: list[Interval] = field(default_factory=list)
    judging: list[Interval] = field(default_factory=list)

    def measure(self) -> dict[str, float]:
        """Return idle shares of the time in which one of the two worked, and that time."""
        either = measure_union([*self.sampling, *self.judging])
        return {
            "seconds": either,
            "sandbox_idle": 1 - measure_union(self.judging) / either,
            "engine_idle": 1 - measure_union(self.sampling) / either,
        }


def measure_union(intervals: list[Interval]) -> float:
    """Return the seconds in any of the intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


class TimedSandbox(Sandbox):
    """A sandbox that notes when it runs programs, each of which takes some seconds longer."""

    def __init__(self, sandbox: Sandbox, log: Log, seconds: float) -> None:
        self.info, self._sandbox, self._log, self._seconds = sandbox.info, sandbox, log, seconds

    def run_batch(self, jobs: Any) -> Any:
        """Run jobs and note the time."""
        started = time.monotonic()
        results = self._sandbox.run_batch(jobs)
        time.sleep(self._seconds * len(jobs))
        self._log.judging.append((started, time.monotonic()))
        return results

    def close(self) -> None:
        self._sandbox.close()


@contextmanager
def timed(log: Log, seconds: float, *, early: bool) -> Iterator[None]:
    """Note the work of engine and sandbox in the block; without `early`, nothing overlaps."""

    def note(function: Any) -> Any:
        def sample(*arguments: Any, **keywords: Any) -> Any:
            started = time.monotonic()
            try:
                return function(*arguments, **keywords)
            finally:
                log.sampling.append((started, time.monotonic()))

        return sample

    start = CodeTask._start

    def start_timed(task: CodeTask) -> Any:
        if task.sandbox is None:
            task.sandbox = TimedSandbox(open_sandbox(task._settings), log, seconds)
        return start(task)

    with ExitStack() as stack:
        change = lambda *what: stack.enter_context(patch.object(*what))  # noqa: E731
        change(CodeTask, "_start", start_timed)
        change(engine.Engine, "generate", note(engine.Engine.generate))
        change(rollout, "generate", note(rollout.generate))
        if not early:
            change(CodeTask, "begin_scoring", lambda *_: None)
        yield


def train_timed(training: TrainingSettings, seconds: float, *, early: bool) -> Any:
    """Train a trial; return what was measured, and its metrics."""
    log, metrics = Log(), list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as directory, timed(log, seconds, early=early):
        config = build_trial(
            *("code", "embedded", Path(directory), {"learning_rate": 1.5e-4, "beta": 0.02}),
            training=training,
            sandbox=SandboxSettings(type="unsafe_no_isolation"),
            rollout=RolloutSettings(engine="vllm" if find_vllm() else "auto"),
        )
        report = lambda one, _: metrics.append(dict(one.metrics))  # noqa: E731
        outcome = train(config, resume=None, report=report)
        worker_cache.release_worker_cache()
    return log.measure(), (metrics, outcome.test)


def measure(steps: int = 8, size: int = 64, runs: int = 2, seconds: float = 0.01):
    """Measure both ways in turns, with some seconds added to each program."""
    prompts = {"train_prompts": 64, "validation_prompts": 16, "test_prompts": 16}
    training = TrainingSettings(
        steps=steps, completions_per_step=size, evaluate_every=steps, **prompts
    )
    measured: dict[str, list[dict[str, float]]] = {"late": [], "early": []}
    results: list[Any] = []
    train_timed(training, 0.0, early=False)  # starts the engine, and is not measured
    for _ in range(runs):
        for way, figures in measured.items():
            seen, result = train_timed(training, seconds, early=way == "early")
            figures.append(seen)
            results.append(result)
    answer: dict[str, Any] = {"engine": "vllm" if find_vllm() else "fast_cpu", "runs": runs}
    for way, figures in measured.items():
        names = figures[0]
        answer[way] = {n: round(statistics.median(one[n] for one in figures), 4) for n in names}
        print_table((way, *names), ("", *answer[way].values()))
    return {**answer, "equal": all(one == results[0] for one in results)}


if __name__ == "__main__":
    run(measure, {"steps": 2, "size": 16, "runs": 1})
