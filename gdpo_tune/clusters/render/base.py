"""Parts that all targets share: the request, templates, refusals, and cron lines.

Names of days, steps that begin at a number, `7` for Sunday and the like become numbers, which all
schedulers read alike. A line without a counterpart is refused.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import zoneinfo
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from cronsim import CronSim

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.render import NEWEST_KUBERAY, TARGETS
from gdpo_tune.clusters.schedule_spec import CronSchedule, format_period
from gdpo_tune.core import registry
from gdpo_tune.core.errors import SpecError, SpecProblem, UsageError
from gdpo_tune.core.text import show

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


def list_unsupported(files: dict[str, str]) -> list[str]:
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


def refuse_key(sweep: ScheduledSweep, key: str, value: str, reason: str, fix: str) -> NoReturn:
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
        refuse_key(sweep, "schedule", "", f"{target} requires a schedule, and there is none", fix)
    zone = schedule.timezone
    if zone not in zoneinfo.available_timezones() or zone in ("localtime", "Factory"):
        reason = f"a zone of this machine, which {target} cannot express"
        refuse_key(sweep, "schedule.timezone", zone, reason, "write one like Europe/Berlin")
    return schedule


COMMON_SYNTAX = re.compile(r"(\*(/\d+)?|\d+(-\d+(/\d+)?)?)(,(\*(/\d+)?|\d+(-\d+(/\d+)?)?))*")
"""A field that every scheduler reads alike."""
DAYS = ("", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
TWO_DIGITS = [f"{number:02}" for number in range(61)]
WEEK = 7


def format_five_fields(request: RenderRequest, *, star_decides: bool) -> str:
    """Return the line for a scheduler that reads five fields; refuse one that it cannot express.

    With `star_decides` the scheduler reads `*` before a step as cron does: a day must then fit
    month and week.
    """
    parsed = _parse(request)
    weekdays, special = _split_weekdays(parsed)
    if special or min(parsed.days) < 0:
        _refuse_line(request, "L, LW and # are words of few crontabs")
    *others, weekday = request.schedule.cron.upper().split()
    day = others[2]
    steps = [text for text in (day, weekday) if text.startswith("*") and text != "*"]
    if steps and "*" not in (day, weekday) and not star_decides:
        _refuse_line(request, f"{steps[0]} with another day means 'both' to cron, 'either' there")
    numbers = (parsed.minutes, parsed.hours, parsed.days, parsed.months)
    written = [
        text if COMMON_SYNTAX.fullmatch(text) else format_field(values, "-")
        for text, values in zip(others, numbers, strict=True)
    ]
    has_sunday_7 = any("7" in part.split("/")[0] for part in weekday.split(","))
    if has_sunday_7 or not COMMON_SYNTAX.fullmatch(weekday):
        weekday = format_field({each % WEEK for each in weekdays}, "-")
    return " ".join([*written, weekday])


def format_calendar_events(request: RenderRequest) -> list[str]:
    """Return the line as systemd's calendar events, of which a time fits one; refuse others."""
    parsed = _parse(request)
    weekdays, special = _split_weekdays(parsed)
    any_day, any_weekday = parsed.days >= set(range(1, 32)), len(weekdays) == WEEK
    if CronSim.LAST_WEEKDAY in parsed.days:
        _refuse_line(request, "systemd has no last working day of a month")
    if parsed.day_and and special and not any_day:
        _refuse_line(request, "systemd has no day that is one of the month and the nth of its week")
    months, names = _format_part(parsed.months, 12), format_field(weekdays, "..", DAYS)
    plain = [day for day in parsed.days if day > 0]
    by_month = [f"*-{months}-{_format_part(plain, 31)}"] if plain else []
    by_month += [f"*-{months}~01"] if CronSim.LAST in parsed.days else []
    by_week = [f"{names} *-{months}-*"] if names else []
    for weekday, which in special:
        first = WEEK * which - WEEK + 1
        part = "~07/1" if which == CronSim.LAST else f"-{first:02}..{min(first + 6, 31)}"
        by_week.append(f"{DAYS[weekday]} *-{months}{part}")
    if not parsed.day_and:
        days = by_month + by_week
    elif any_weekday or any_day:
        days = by_month if any_weekday else by_week
    else:
        days = [f"{names} {each}" for each in by_month]
    clock = f"{_format_part(parsed.hours, 24)}:{_format_part(parsed.minutes, 60)}:00"
    return [f"{each} {clock} {request.schedule.timezone}" for each in days]


def find_skipped_days(request: RenderRequest) -> list[date]:
    """Return days of the next year on which a time lies in the hour that spring skips."""
    schedule, parsed, days = request.schedule, _parse(request), list[date]()
    zone = zoneinfo.ZoneInfo(schedule.timezone)
    for begin in (request.now + timedelta(days=day) for day in range(366)):
        end = begin + timedelta(days=1)
        if begin.astimezone(zone).utcoffset() == end.astimezone(zone).utcoffset():
            continue
        for due in schedule.list_times(begin, end):
            local = due.astimezone(zone)
            if local.hour not in parsed.hours or local.minute not in parsed.minutes:
                days.append(local.date())
    return days


def format_field(values: Collection[int], through: str, names: Sequence[str] = ()) -> str:
    """Return numbers as a list of single ones and ranges, such as `1-5,7`."""
    ranges = list[list[int]]()
    for value in sorted(values):
        if ranges and ranges[-1][-1] == value - 1:
            ranges[-1].append(value)
        else:
            ranges.append([value])
    words = [[names[value] if names else str(value) for value in each] for each in ranges]
    parts = [f"{w[0]}{through}{w[-1]}" if len(w) > 2 else ",".join(w) for w in words]
    return ",".join(parts)


def _format_part(values: Collection[int], size: int) -> str:
    return "*" if len(values) == size else format_field(values, "..", TWO_DIGITS)


def _parse(request: RenderRequest) -> CronSim:
    return CronSim(request.schedule.cron, datetime(2000, 1, 1, tzinfo=UTC))


def _split_weekdays(parsed: CronSim) -> tuple[set[int], list[tuple[int, int]]]:
    """Return the days of every week (1: Monday, 7: Sunday), and days with their week."""
    plain = {each % WEEK or WEEK for each in parsed.weekdays if isinstance(each, int)}
    special = [each for each in parsed.weekdays if not isinstance(each, int)]
    return plain, sorted((day % WEEK or WEEK, which) for day, which in special)


def _refuse_line(request: RenderRequest, reason: str) -> NoReturn:
    text = f"{request.target} cannot express it: {reason}"
    fix = "write days as numbers, or let `serve` or `tick` keep the schedule"
    refuse_key(request.sweep, "schedule.cron", request.schedule.cron, text, fix)
