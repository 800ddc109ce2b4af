"""The instants that a cron line means in a time zone, by the rules of Debian's cron.

A line with fixed hours and minutes follows the wall clock: what falls into the hour that spring
leaves out is due right after it, and what falls into the hour that autumn repeats is due once, the
first time. A line whose minute or hour begins with `*` follows real time: it leaves the missing
hour out and runs through both repeated ones.
"""

from __future__ import annotations

import itertools
import re
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from cronsim import CronSim, CronSimError

from gdpo_tune.clusters.schedule_spec import Schedule
from gdpo_tune.spec.problems import did_you_mean

FIELDS = 5
TOO_LONG = re.compile(r"[0-9]{9}")
"""For a number of a cron line."""
BACK = timedelta(hours=3)
"""The search begins so much earlier: seen from within a repeated hour, a wall clock is behind."""
NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
"""Words of some crontabs -> what to write instead."""


def why_not(line: str) -> tuple[str, str] | None:
    """Reason and fix of a cron line that cannot be used; None for one that can."""
    if line.strip() in NICKNAMES:
        return "not five fields", f'write cron: "{NICKNAMES[line.strip()]}"'
    example = 'such as "0 2 * * *" for two at night'
    count = len(line.split())
    if count != FIELDS:
        return (
            f"{count} field{'s' if count != 1 else ''}, not five",
            f"write minute, hour, day of the month, month, day of the week, {example}",
        )
    numbers = f"write numbers, *, lists, ranges and steps, {example}"
    if TOO_LONG.search(line):
        return "a number of too many digits", numbers
    refused = refusal(line)
    if not refused:
        return None
    minute, hour, day, month, weekday = line.split()
    parts = (f"{minute} {hour} {day} * {weekday}", f"{minute} {hour} * {month} {weekday}")
    if any(map(refusal, parts)):
        return refused, numbers
    return "there is no such day", "write a day that comes"


def refusal(line: str) -> str:
    """What is wrong with five fields, in a few words; empty if nothing is."""
    try:
        next(CronSim(line, datetime(2000, 1, 1, tzinfo=UTC)))
    except CronSimError as error:
        return f"{error}".lower()
    except StopIteration:
        return "no such day"
    return ""


def similar_zones(name: str) -> str:
    """`did you mean 'Europe/Berlin'? ` where a known zone is close, else nothing."""
    known = {zone.lower(): zone for zone in sorted(zoneinfo.available_timezones())}
    suggestion = did_you_mean(name, known)
    for lower, zone in known.items():
        suggestion = suggestion.replace(repr(lower), repr(zone))
    return suggestion


def is_zone(name: str) -> bool:
    """Whether there is such a time zone."""
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):  # `../x`, and `Europe`
        return False
    return True


def upcoming(schedule: Schedule, after: datetime) -> Iterator[datetime]:
    """Every instant after `after`, in UTC, each once and in order, for half a century."""
    start = (after - BACK).astimezone(zoneinfo.ZoneInfo(schedule.timezone))
    latest = after
    for local in CronSim(schedule.cron, start):
        instant = local.astimezone(UTC)
        if instant > latest:
            latest = instant
            yield instant


def between(schedule: Schedule, after: datetime, until: datetime) -> list[datetime]:
    """Every instant after `after` and up to `until`, in UTC."""
    return list(itertools.takewhile(lambda instant: instant <= until, upcoming(schedule, after)))


def latest(schedule: Schedule, until: datetime) -> datetime | None:
    """The last instant up to `until`, in UTC; None if there was none for eight years."""
    for days in (1, 8, 40, 400, 3000):
        found = between(schedule, until - timedelta(days=days), until)
        if found:
            return found[-1]
    return None
