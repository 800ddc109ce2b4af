"""What evaluation measures on held-out prompts, for each task, and what any trial costs."""

from __future__ import annotations

from dataclasses import dataclass

from gdpo_tune.core.trials import Direction


@dataclass(frozen=True)
class MetricInfo:
    """A held-out metric of a task."""

    direction: Direction
    low: float
    high: float
    doc: str


LENGTH_METRICS = {
    "length": MetricInfo("maximize", 0, 1, "share of completions within the length limit"),
    "mean_length": MetricInfo("minimize", 0, float("inf"), "mean tokens of a completion"),
}

CODE_METRICS = {
    "correctness": MetricInfo("maximize", 0, 1, "share of completions whose code passes all tests"),
    "format": MetricInfo("maximize", 0, 1, "share with exactly one think and one answer block"),
    **LENGTH_METRICS,
    "bug_rate": MetricInfo(
        "minimize",
        0,
        1,
        "share with no program, or one that does not compile, raises or breaks a sandbox limit",
    ),
}

MATH_METRICS = {
    "correctness": MetricInfo("maximize", 0, 1, "share of completions with the right answer"),
    "format": MetricInfo("maximize", 0, 1, "share with exactly one think and one answer block"),
    **LENGTH_METRICS,
}

GSM8K_METRICS = {
    "correctness": MetricInfo("maximize", 0, 1, "share whose answer is the right text exactly"),
    "integer": MetricInfo("maximize", 0, 1, "share whose answer consists of ASCII digits"),
    "format": MetricInfo("maximize", 0, 1, "share with a think line and an answer line"),
    **LENGTH_METRICS,
}

TOOLS_METRICS = {
    "correctness": MetricInfo("maximize", -3, 3, "mean agreement with the right calls"),
    "exact": MetricInfo("maximize", 0, 1, "share of completions with the right calls exactly"),
    "format": MetricInfo("maximize", 0, 1, "share with the tags that the answer needs, in order"),
    **LENGTH_METRICS,
}

COST_METRICS = {
    "seconds": MetricInfo("minimize", 0, float("inf"), "wall time of the trial"),
    "cpu_seconds": MetricInfo("minimize", 0, float("inf"), "CPU time of the trial"),
    "gpu_hours": MetricInfo("minimize", 0, float("inf"), "wall time times the GPUs of the trial"),
}
"""What a trial of any task costs: objectives and constraints may name these too."""
