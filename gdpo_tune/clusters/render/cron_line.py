"""A cron line as other schedulers read it, or the reason why they cannot.

Names of days, steps that begin at a number, `7` for Sunday and the like become numbers, which all
schedulers read alike. A line without a counterpart is refused.
"""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Collection, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import NoReturn

from cronsim import CronSim

from gdpo_tune.clusters.render.base import RenderRequest, refuse

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
    refuse(request.sweep, "schedule.cron", request.schedule.cron, text, fix)
