"""First in, first out: every trial runs to its end."""

from __future__ import annotations

from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.schedulers.base import Scheduler


def build(spec: SweepSpec) -> Scheduler:
    """The scheduler of a sweep that stops no trial early."""
    del spec
    return Scheduler()
