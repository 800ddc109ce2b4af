"""What every target is given, what it gives back, and what all of them refuse."""

from __future__ import annotations

import os
import zoneinfo
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from gdpo_tune.clusters.durations import shown
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.render.names import NEWEST_KUBERAY
from gdpo_tune.clusters.schedule_spec import Schedule
from gdpo_tune.core.errors import Problem, SpecError
from gdpo_tune.spec.problems import show

ELSEWHERE_UNKNOWN = ("localtime", "Factory")
"""Zones that are whatever a machine makes of them."""


@dataclass(frozen=True)
class Request:
    """What is to be written."""

    sweep: ScheduledSweep
    schedule: Schedule
    """Of the sweep, which has one."""
    target: str
    python: str
    """Interpreter of this package, on this machine."""
    folder: Path
    """Where the files will lie, absolute."""
    now: datetime
    kuberay: tuple[int, int] = NEWEST_KUBERAY
    """Version of the operator that reads the manifests."""
    ray_cron_job: bool = False
    """Whether KubeRay is to keep the schedule, instead of Kubernetes."""

    @property
    def file(self) -> str:
        """The sweep's file as seen from the folder of its project."""
        return os.path.relpath(self.sweep.file.absolute(), self.sweep.root)

    def command(self, python: str, *more: str) -> list[str]:
        """The words that run the sweep for the last time that has come."""
        name = self.sweep.name
        return [python, "-m", "gdpo_tune.schedule", self.file, "run", name, "--wait", *more]

    def head(self, file: str, left_out: Sequence[str]) -> list[str]:
        """The comments that a file begins with."""
        settings, when = self.sweep.settings, self.schedule
        again = f"python -m gdpo_tune.schedule {self.file} render --to {self.target}"
        return [
            f"{file}: {settings.space}, {when.cron} in {when.timezone}. Written by",
            f"  {again}{' --ray-cron-job' if self.ray_cron_job else ''}",
            f"Kept by the command: {', '.join(kept(self.sweep))}.",
            *(f"Left out: {each}." for each in left_out),
        ]


@dataclass(frozen=True)
class Rendered:
    """What a target has made of a sweep."""

    files: dict[str, str]
    """Name -> text."""
    left_out: tuple[str, ...]
    """What the file of the sweep says, and the target cannot."""


def schedule_for(sweep: ScheduledSweep, target: str) -> Schedule:
    """The schedule that a target is to keep.

    Raises:
        SpecError: the sweep has no schedule, or one by a clock that is not known elsewhere.
    """
    when = sweep.settings.schedule
    if when is None:
        fix = "write schedule: {cron: ..., timezone: ...}"
        refuse(sweep, "schedule", "", f"{target} needs one, and there is none", fix)
    known = when.timezone in zoneinfo.available_timezones()
    if not known or when.timezone in ELSEWHERE_UNKNOWN:
        reason = f"a zone of this machine, which {target} cannot express"
        refuse(sweep, "schedule.timezone", when.timezone, reason, "write one like Europe/Berlin")
    return when


def kept(sweep: ScheduledSweep) -> list[str]:
    """What `run --wait` sees to by itself, as the file says it."""
    policy, budget = sweep.settings.policy, sweep.settings.budget
    limits = {
        "max_runtime": policy.max_runtime and shown(policy.max_runtime),
        "max_attempts": policy.max_attempts,
        "budget.trials": budget.trials,
        "budget.gpu_hours": budget.gpu_hours,
        "budget.gpu_hours_per_30d": budget.gpu_hours_per_30d,
        "notify": "by webhook" if sweep.settings.notify else None,
    }
    return [f"{key} {show(value)}" for key, value in limits.items() if value is not None]


def refuse(sweep: ScheduledSweep, key: str, value: str, reason: str, fix: str) -> NoReturn:
    """Say no, with the file to blame.

    Raises:
        SpecError: always.
    """
    raise SpecError((Problem(str(sweep.file), key, value, reason, fix),))
