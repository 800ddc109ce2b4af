"""Trials of `gpu_check.py` on the CPU, in a process that sees no GPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports torch
    from gpu_check_trials import ResumedTrial

    from gdpo_tune.core.trial_config import TrialConfig


def resume_trial(config: TrialConfig) -> ResumedTrial:
    """Hide the GPUs of this process; then see `gpu_check_trials.resume_trial`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from gpu_check_trials import resume_trial

    return resume_trial(config)
