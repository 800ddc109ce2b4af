"""A cron line as other schedulers read it, or the reason why they cannot.

Names of days, steps from a number on, `7` for Sunday and the like are written out as numbers, which
all read alike. What has no counterpart is refused.
"""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from cronsim import CronSim

from gdpo_tune.clusters import cron
from gdpo_tune.clusters.render.base import Request, refuse
from gdpo_tune.clusters.schedule_spec import Schedule

READ_BY_ALL = re.compile(r"(\*(/\d+)?|\d+(-\d+(/\d+)?)?)(,(\*(/\d+)?|\d+(-\d+(/\d+)?)?))*")
DAYS = ("", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
WEEK = 7


@dataclass(frozen=True)
class Line:
    """What the five fields of a line mean."""

    texts: tuple[str, str, str, str, str]
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    """Of the month; `CronSim.LAST` for its last one."""
    months: frozenset[int]
    weekdays: frozenset[int]
    """1 is Monday, 7 Sunday."""
    special: tuple[tuple[int, int], ...]
    """Weekday and which one of the month, or `CronSim.LAST`."""
    both: bool
    """Whether a day must be right by month and by week; else one of them suffices."""

    @property
    def any_day(self) -> bool:
        """Whether the day of the month is free."""
        return self.days >= set(range(1, 32))

    @property
    def any_weekday(self) -> bool:
        """Whether the day of the week is free."""
        return len(self.weekdays) == WEEK


def parsed(text: str) -> Line:
    """The meaning of a line that is known to be sound."""
    simulated = CronSim(text, datetime(2000, 1, 1, tzinfo=UTC))
    minute, hour, day, month, weekday = text.upper().split()
    plain = [each for each in simulated.weekdays if isinstance(each, int)]
    special = [each for each in simulated.weekdays if not isinstance(each, int)]
    return Line(
        (minute, hour, day, month, weekday),
        frozenset(simulated.minutes),
        frozenset(simulated.hours),
        frozenset(simulated.days),
        frozenset(simulated.months),
        frozenset(each % WEEK or WEEK for each in plain),
        tuple(sorted((each % WEEK or WEEK, which) for each, which in special)),
        simulated.day_and,
    )


def five_fields(request: Request, *, star_decides: bool) -> str:
    """The line for a scheduler that reads five fields.

    Args:
        request: whose line.
        star_decides: whether, as for cron, a `*` in front of a step makes a day right only if it is
            right by month and by week.

    Raises:
        SpecError: it cannot say the same.
    """
    line = parsed(request.schedule.cron)
    if line.special or min(line.days) < 0:
        _refuse(request, "L, LW and # are words of few crontabs")
    *others, weekday = line.texts
    day = line.texts[2]
    steps = [field for field in (day, weekday) if field.startswith("*") and field != "*"]
    if steps and "*" not in (day, weekday) and not star_decides:
        _refuse(request, f"{steps[0]} with another day means 'both' to cron, 'either' elsewhere")
    numbers = (line.minutes, line.hours, line.days, line.months)
    written = [_written(text, found) for text, found in zip(others, numbers, strict=True)]
    sunday_first = {each % WEEK for each in line.weekdays}
    days_named = [part.split("/")[0] for part in weekday.split(",")]  # Sunday is 7 to some only
    readable = READ_BY_ALL.fullmatch(weekday) and not any("7" in part for part in days_named)
    return " ".join([*written, weekday if readable else listed(sunday_first, "-")])


def on_calendar(request: Request) -> list[str]:
    """The line as systemd's calendar events; it is due whenever one of them is.

    Raises:
        SpecError: there are none that say the same.
    """
    line = parsed(request.schedule.cron)
    clock = f"{_part(line.hours, 24)}:{_part(line.minutes, 60)}:00 {request.schedule.timezone}"
    months = _part(line.months, 12)
    if CronSim.LAST_WEEKDAY in line.days:
        _refuse(request, "systemd has no last working day of a month")
    if line.both and line.special and not line.any_day:
        _refuse(request, "systemd has no day that is one of the month and the nth of its week")
    by_month = _days_of_month(line, months)
    by_week = _days_of_week(line, months)
    if not line.both:
        found = [*by_month, *by_week]
    elif line.any_weekday or line.any_day:
        found = by_month if line.any_weekday else by_week
    else:
        names = listed(line.weekdays, "..", DAYS)
        found = [f"{names} {days}" for days in by_month]
    return [f"{days} {clock}" for days in found]


def moved_by_spring(schedule: Schedule, now: datetime) -> list[date]:
    """Days of the next year on which a time lies in the hour that spring leaves out."""
    zone, line = zoneinfo.ZoneInfo(schedule.timezone), parsed(schedule.cron)
    begins = [now + timedelta(days=day) for day in range(366)]
    found: list[date] = []
    for begin in begins:
        end = begin + timedelta(days=1)
        if begin.astimezone(zone).utcoffset() == end.astimezone(zone).utcoffset():
            continue
        for due in cron.between(schedule, begin, end):
            local = due.astimezone(zone)
            if local.hour not in line.hours or local.minute not in line.minutes:
                found.append(local.date())
    return found


def spring_note(request: Request, who: str) -> list[str]:
    """What to say of a scheduler that leaves out the times of the missing hour."""
    moved = moved_by_spring(request.schedule, request.now)
    if not moved:
        return []
    return [
        f"the run of {moved[0]}: {who} leaves out times that lie in the hour which the change of "
        "the clocks leaves out"
    ]


def listed(values: Collection[int], through: str, names: Iterable[str] = ()) -> str:
    """Numbers as a list of single ones and runs, such as `1-5,7`."""
    known = list(names)
    ordered, runs = sorted(values), list[list[int]]()
    for value in ordered:
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    words = [[known[value] if known else str(value) for value in run] for run in runs]
    parts = [f"{run[0]}{through}{run[-1]}" if len(run) > 2 else ",".join(run) for run in words]
    return ",".join(parts)


def _written(text: str, found: Collection[int]) -> str:
    return text if READ_BY_ALL.fullmatch(text) else listed(found, "-")


def _part(values: Collection[int], size: int) -> str:
    two_digits = [f"{number:02}" for number in range(61)]
    return "*" if len(values) == size else listed(values, "..", two_digits)


def _days_of_month(line: Line, months: str) -> list[str]:
    plain = [day for day in line.days if day > 0]
    dates = [f"*-{months}-{_part(plain, 31)}"] if plain else []
    return [*dates, *([f"*-{months}~01"] if CronSim.LAST in line.days else [])]


def _days_of_week(line: Line, months: str) -> list[str]:
    dates = [f"{listed(line.weekdays, '..', DAYS)} *-{months}-*"] if line.weekdays else []
    for weekday, which in line.special:
        first = WEEK * which - WEEK + 1
        days = "~07/1" if which == CronSim.LAST else f"-{first:02}..{min(first + 6, 31)}"
        dates.append(f"{DAYS[weekday]} *-{months}{days}")
    return dates


def _refuse(request: Request, reason: str) -> None:
    text = f"{request.target} cannot say it: {reason}"
    fix = "write days as numbers, or let `serve` or `tick` keep the schedule"
    refuse(request.sweep, "schedule.cron", request.schedule.cron, text, fix)
