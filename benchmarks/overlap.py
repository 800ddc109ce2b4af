"""Idle time of sandbox and engine, with completions judged while others are sampled and without.

    python benchmarks/overlap.py            # 8 steps of 64 completions, four runs
    python benchmarks/overlap.py --small    # 2 steps of 16, two runs

Both ways train the code task from the same seed, one after the other in turns; the last line is
JSON. The engine is vLLM where it is installed, else the sampler of small policies, which gives
completions all at once. Then only log-probabilities overlap with the judging. `--seconds` lets each
program sleep, as programs do whose tests take longer.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import build_trial, run

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
        sampling, judging = join(self.sampling), join(self.judging)
        either = sum_lengths(join([*sampling, *judging]))
        return {
            "seconds": either,
            "sandbox_idle": 1 - sum_lengths(judging) / either,
            "engine_idle": 1 - sum_lengths(sampling) / either,
        }


def join(intervals: list[Interval]) -> list[Interval]:
    """Return the union of intervals, in order and apart from each other."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def sum_lengths(intervals: list[Interval]) -> float:
    """Return the seconds in intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


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
    changed: list[tuple[Any, str, Any]] = []

    def change(owner: Any, name: str, value: Any) -> None:
        changed.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

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

    change(CodeTask, "_start", start_timed)
    change(engine.Engine, "generate", note(engine.Engine.generate))
    change(rollout, "generate", note(rollout.generate))
    if not early:
        change(CodeTask, "begin_scoring", lambda *_: None)
    try:
        yield
    finally:
        for owner, name, value in reversed(changed):
            setattr(owner, name, value)


def train_timed(directory: Path, training: TrainingSettings, seconds: float, *, early: bool) -> Any:
    """Train a trial; return what was measured, and its metrics."""
    config = build_trial(
        *("code", "embedded", directory, {"learning_rate": 1.5e-4, "beta": 0.02}),
        training=training,
        sandbox=SandboxSettings(type="unsafe_no_isolation"),
        rollout=RolloutSettings(engine="vllm" if find_vllm() else "auto"),
    )
    log, metrics = Log(), list[dict[str, float]]()
    with timed(log, seconds, early=early):
        outcome = train(
            config, resume=None, report=lambda one, _: metrics.append(dict(one.metrics))
        )
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
    with tempfile.TemporaryDirectory() as directory:  # starts the engine, and is not measured
        train_timed(Path(directory), training, 0.0, early=False)
    for _ in range(runs):
        for way, figures in measured.items():
            with tempfile.TemporaryDirectory() as directory:
                place = Path(directory)
                seen, result = train_timed(place, training, seconds, early=way == "early")
            figures.append(seen)
            results.append(result)
    answer: dict[str, Any] = {"engine": "vllm" if find_vllm() else "fast_cpu", "runs": runs}
    for way, figures in measured.items():
        answer[way] = {
            name: round(statistics.median(one[name] for one in figures), 4) for name in figures[0]
        }
        print(
            f"{way:5}  {answer[way]['seconds']:6.2f} s of sampling and judging, sandbox idle "
            f"{answer[way]['sandbox_idle']:.0%}, engine idle {answer[way]['engine_idle']:.0%}"
        )
    return {**answer, "equal": all(one == results[0] for one in results)}


if __name__ == "__main__":
    run(measure, {"steps": 2, "size": 16, "runs": 1})
