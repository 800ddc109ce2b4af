"""First in, first out: every trial runs to its end."""

from __future__ import annotations

from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from gdpo_tune.spec import SweepSpec


def build(spec: SweepSpec) -> TrialScheduler:
    """The scheduler of a sweep that stops no trial early."""
    del spec
    return FIFOScheduler()
