"""Comparison of a library's advantages and losses with those of a trial."""

from __future__ import annotations

from gdpo_tune.exporters.library import Exported
from tests.support.export import export_to, make_recipe
from tests.support.export_batch import PARTS, SIZES, StepResult

LOSSES = ("dapo", "bnpo", "grpo", "dr_grpo", "cispo")
WAYS = {"one update": (), "two passes": ("space.num_iterations=2",), "two parts": PARTS}
"""Optimizer steps on the samples of a step: probabilities differ after the first one."""
_OF_LOSSES = ("gradient of the KL", "divides by", "averages over")
"""Topics of differences that change the gradient."""


def find_row(library: str, topic: str, *overrides: str) -> str:
    """Return what a library does under a topic of its differences; empty if it has none."""
    exported = export_to(library, make_recipe(*SIZES, *overrides))
    return next((row.theirs for row in exported.differences if row.topic == topic), "")


def measure_difference(theirs: StepResult, ours: StepResult) -> float:
    """Return the root mean square of the difference of gradients, as a share of that of ours."""
    return float((theirs.gradient - ours.gradient).norm() / ours.gradient.norm())


def assert_same_or_explained(theirs: StepResult, ours: StepResult, exported: Exported) -> None:
    difference = measure_difference(theirs, ours)
    topics = [row.topic for row in exported.differences if row.topic.endswith(_OF_LOSSES)]
    if topics:
        assert difference > 1e-3, topics
    else:
        assert difference < 1e-5, exported.text
        assert (theirs.losses - ours.losses).abs().max() < 1e-5
