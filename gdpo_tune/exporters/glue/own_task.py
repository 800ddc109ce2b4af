"""Scores of completions by a task in a file of its own, in place of `task_scores`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gdpo_tune.core.settings import DataSettings, HeldOutData, SandboxSettings, TrainingSettings
from gdpo_tune.core.shaping import Rewards
from gdpo_tune.core.task_files import build_task
from gdpo_tune.tasks.base import Problem

TASK = ""
"""File beside this one, and its class: `task.py:Sums`."""
NEIGHBOURS = "task_modules"
"""Directory beside this file with the modules that the task imports."""
TRAINING = TrainingSettings()
SANDBOX = SandboxSettings()
DATA = DataSettings(validation=HeldOutData(), test=HeldOutData())


def score(
    problems: Sequence[Problem], completions: Sequence[str], lengths: Sequence[int]
) -> tuple[Rewards, Rewards]:
    """Return reward name -> N rewards, and the same with partial credit."""
    scores = _build_own_task().score(problems, completions, lengths)
    return scores.rewards, scores.partial


@functools.cache
def _build_own_task() -> Any:
    here = Path(__file__).resolve().parent
    sys.path.append(str(here / NEIGHBOURS))  # last, so that they hide no others
    return build_task(f"{here / TASK}", TRAINING, SANDBOX, DATA)
