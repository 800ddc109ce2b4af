"""Limits of the check, which were set before any run: what held, or what did not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gdpo_tune.core.trial_files import DIFFERENCE

if TYPE_CHECKING:
    from gdpo_tune.training.self_check import FollowingFigures
    from tests.gpu.sweeps import SweepFigures
    from tests.gpu.trials import TrainedTrial

GIB = 1 << 30
SLACK, ACTIVATIONS = 0.25, 3 * GIB
"""A peak may exceed its bound by this share, and by these bytes of activations."""
RATIO = 1.05
"""Of a step of ours to one of TRL."""
SEEN = 0.2
"""Distance from 1 of what the engine sees of an update, by what the trainer sees."""
FURTHER = 1.25
"""Factor by which an adapter may increase the distance between engine and trainer."""
REUSED = 0.5
"""Share of the seconds to a first step that the next trial on the same engine takes."""
ROUNDING, MOVED = 0.05, 4
"""Nats a token between an engine and a trainer with the same weights; factor without a sync."""
WOKEN = 0.05
"""Relative difference of the second step: a first update is rounded differently from run to run on
a GPU, so that a few completions draw another token."""
SAMPLED = ("train/reward", "train/completions/mean_length")
"""Metrics that do not change unless the engine samples something else."""
APART = f"train/{DIFFERENCE}"


def is_within(bound: float, peak: float) -> bool:
    """Return whether a peak lies between its bound and the slack; in bytes."""
    return bound <= peak <= bound * (1 + SLACK) + ACTIVATIONS


def follows(figures: FollowingFigures) -> bool:
    """Return whether the engine has the trainer's weights after a sync, and only then."""
    apart = max(figures.synced, figures.changed, figures.cached, figures.restored)
    return apart <= ROUNDING and figures.missed >= MOVED * apart


def list_losses_of_sleep(awake: TrainedTrial, asleep: TrainedTrial) -> list[str]:
    """Return what a trial whose engine sleeps has lost, against the same trial with one awake.

    The first step is sampled before the first sleep. What an engine has lost while it slept shows
    in the second one: in what it samples, and in how far it is from the trainer.
    """
    first, second = ((awake.metrics[step], asleep.metrics[step]) for step in (1, 2))
    unequal = [f"{name} of step 1" for name in SAMPLED if first[0][name] != first[1][name]]
    unequal += [
        f"{name} of step 2"
        for name in SAMPLED
        if not math.isclose(second[0][name], second[1][name], rel_tol=WOKEN, abs_tol=WOKEN / 10)
    ]
    if not second[1][APART] <= min(ROUNDING, MOVED * second[0][APART]):  # nor is NaN rounding
        unequal.append(f"{APART} of step 2")
    return unequal


def find_problem(figures: SweepFigures, trials: int, *, killed: bool = False) -> str:
    """Return why a sweep is not as it should be; empty if it is.

    All `trials` train to their ends, and a killed one is tried again.
    """
    if figures.failures:
        return figures.failures[0]
    if figures.trained != trials:
        return f"{figures.trained} of {trials} complete"
    if killed and not (figures.killed and figures.retries):
        return f"{figures.killed} killed, {len(figures.retries)} tried again"
    return ""
