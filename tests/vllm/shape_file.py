"""A task of a sweep, and a training whose engine dies once, in the middle of a trial."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Measurement, Outcome, Report
from gdpo_tune.tasks.custom import RewardFunctionTask

LAST_WORDS = "CUDA error: an illegal memory access was encountered"


def digits(completions, **_):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def short(completions, **_):
    return [float(len(text) % 7 < 3) for text in completions]


class Shape(RewardFunctionTask):
    reward_funcs = [digits, short]
    ranges = {"digits": (0.0, 1.0), "short": (0.0, 1.0)}

    def rows(self):
        return [{"prompt": f"Write f(x): k is {i}, plus 9\n"} for i in range(200)]


def train(config: TrialConfig, *, report: Report, **options: Any) -> Outcome:
    """Train as `gdpo_tune.training.train`, with an engine that dies."""
    from gdpo_tune.training import train

    def report_and_break(measurement: Measurement, checkpoint: Path | None) -> None:
        report(measurement, checkpoint)
        if measurement.metrics:
            break_engine_once(config.directory.parent / "died")

    return train(config, report=report_and_break, **options)


def break_engine_once(mark: Path) -> None:
    """Let the next work of an engine in this process fail, unless one of the sweep has failed."""
    from vllm.v1.engine.llm_engine import LLMEngine

    if hasattr(LLMEngine, "unbroken"):
        return
    unbroken: Callable[[Any], Any] = LLMEngine.step
    LLMEngine.unbroken = unbroken

    def step(self: Any) -> Any:
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return unbroken(self)
        raise RuntimeError(LAST_WORDS)

    LLMEngine.step = step
