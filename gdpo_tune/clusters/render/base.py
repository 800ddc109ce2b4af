"""The request that every target gets, the filling of templates, and what all targets refuse."""

from __future__ import annotations

import json
import os
import re
import shlex
import zoneinfo
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2

from gdpo_tune.clusters.cron import CronSchedule
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.render import NEWEST_KUBERAY, TARGETS
from gdpo_tune.clusters.schedule_spec import format_period
from gdpo_tune.core import registry
from gdpo_tune.core.errors import SpecError, SpecProblem, UsageError
from gdpo_tune.spec.text import show

LOCAL_ZONES = ("localtime", "Factory")
"""Time zones that differ from machine to machine."""
PLAIN = re.compile(r"[A-Za-z/]([A-Za-z0-9_./:-]*[A-Za-z0-9/-])?|--?[a-z][a-z-]*|[0-9]+[KMGT]i?")
"""Text that needs no quotes in YAML."""
YAML_WORD = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)
"""Text that YAML 1.1, which Kubernetes reads, takes for something else."""
LEFT_OUT = re.compile(r"^# Left out: (.*)\.$", re.MULTILINE)
"""Comment of a template about what its target cannot express."""


@dataclass(frozen=True)
class RenderRequest:
    """One sweep for one target."""

    sweep: ScheduledSweep
    schedule: CronSchedule
    """Schedule of the sweep."""
    target: str
    python: str
    """Interpreter of this package on this machine."""
    directory: Path
    """Absolute directory of the files."""
    now: datetime
    kuberay: tuple[int, int] = NEWEST_KUBERAY
    """Version of the operator that reads the manifests."""
    ray_cron_job: bool = False
    """True if KubeRay keeps the schedule, instead of Kubernetes."""

    @property
    def file(self) -> str:
        """The sweep's file relative to the directory of its project."""
        path = os.path.relpath(self.sweep.file.absolute(), self.sweep.root)
        return f"./{path}" if path.startswith("-") else path  # which would be an option

    @property
    def limits(self) -> str:
        """Keys of the file that `run --wait` keeps by itself, with their values."""
        settings = self.sweep.settings
        longest = settings.policy.max_runtime
        limits = {
            "max_runtime": longest and format_period(longest),
            "max_attempts": settings.policy.max_attempts,
            **{f"budget.{key}": value for key, value in settings.budget},
            "notify": "by webhook" if settings.notify else None,
        }
        return ", ".join(f"{key} {show(value)}" for key, value in limits.items() if value)

    def build_command(self, python: str, *more: str) -> list[str]:
        """Return the words that run the sweep for the last past time of its schedule."""
        name = self.sweep.name
        return [python, "-m", "gdpo_tune.schedule", self.file, "run", name, "--wait", *more]

    def fill(self, template: str, file: str, **values: Any) -> str:
        """Return a file of this request from a template."""
        settings = self.sweep.settings
        common = {"sweep": self.sweep, "settings": settings, "policy": settings.policy}
        common |= {"backend": settings.backend, "schedule": self.schedule}
        return fill_template(template, request=self, file=file, **common, **values)


def render_all(
    sweeps: Sequence[ScheduledSweep],
    target: str,
    python: str,
    directory: Path,
    now: datetime,
    kuberay: tuple[int, int] | None = None,
    *,
    ray_cron_job: bool = False,
) -> tuple[dict[str, dict[str, str]], list[SpecProblem]]:
    """Return sweep -> file -> text, and the problems of sweeps with a backend for other targets.

    Raises:
        SpecError: every problem of all sweeps, if one is for this target or none can be rendered.
        UsageError: an option is for other targets.
    """
    misplaced = [("--ray-cron-job", "kuberay")] if ray_cron_job and target != "kuberay" else []
    if kuberay and target not in ("kuberay", "rayjob"):
        misplaced.append(("--kuberay", "kuberay and rayjob"))
    for option, targets in misplaced:
        text = f"{option} is for --to {targets}, not for --to {target}"
        raise UsageError(f"{text}\n    fix: leave it out")
    render = registry.load(TARGETS[target])
    fixed = (target, python, directory.absolute(), now, kuberay or NEWEST_KUBERAY, ray_cron_job)
    rendered = dict[str, dict[str, str]]()
    problems: list[SpecProblem] = []
    for sweep in sweeps:
        try:
            request = RenderRequest(sweep, _find_schedule(sweep, target), *fixed)
            rendered[sweep.name] = render(request)
        except SpecError as error:
            problems += error.problems
    others = [problem for problem in problems if problem.key == "backend.kind"]
    if problems and not (rendered and problems == others):
        raise SpecError(tuple(problems))
    return rendered, others


def find_left_out(files: dict[str, str]) -> list[str]:
    """Return what a sweep's file says and the target cannot express, by the files' comments."""
    return list(dict.fromkeys(LEFT_OUT.findall("\n".join(files.values()))))


def fill_template(template: str, **values: Any) -> str:
    """Return the text of a template of `templates/` with these variables.

    Filters: `scalar` writes a text for YAML, `quote` one word for a shell, `join_words` several.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"scalar": _write_scalar, "quote": shlex.quote, "join_words": shlex.join}
    return environment.get_template(template).render(values)


def refuse(sweep: ScheduledSweep, key: str, value: str, reason: str, fix: str) -> NoReturn:
    """Raise a `SpecError` for a key of a sweep's file."""
    raise SpecError((SpecProblem(str(sweep.file), key, value, reason, fix),))


def _write_scalar(value: str) -> str:
    if PLAIN.fullmatch(value) and not YAML_WORD.fullmatch(value):
        return value
    # JSON's text in quotes is YAML's, but for the line breaks that only YAML knows
    return json.dumps(value, ensure_ascii=any(each in value for each in "\x85\u2028\u2029"))


def _find_schedule(sweep: ScheduledSweep, target: str) -> CronSchedule:
    schedule = sweep.settings.schedule
    if schedule is None:
        fix = "write schedule: {cron: ..., timezone: ...}"
        refuse(sweep, "schedule", "", f"{target} requires a schedule, and there is none", fix)
    zone = schedule.timezone
    if zone not in zoneinfo.available_timezones() or zone in LOCAL_ZONES:
        reason = f"a zone of this machine, which {target} cannot express"
        refuse(sweep, "schedule.timezone", zone, reason, "write one like Europe/Berlin")
    return schedule
