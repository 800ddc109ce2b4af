"""The instants that a cron line means in a time zone, by the rules of Debian's cron.

A line with fixed hours and minutes follows the wall clock: a time in the hour that spring skips is
due right after it, and a time in the hour that autumn repeats is due once, the first time. A line
whose minute or hour begins with `*` follows real time: it skips the missing hour and runs in both
repeated ones.
"""

from __future__ import annotations

import itertools
import re
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator

from gdpo_tune.core.settings import Section
from gdpo_tune.spec.sections import build_refusal
from gdpo_tune.spec.text import suggest

TOO_LONG = re.compile(r"[0-9]{9}")
"""A number that no cron line needs."""
MARGIN = timedelta(hours=3)
"""The search begins this much earlier: in a repeated hour the wall clock is behind."""
NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
"""Words of some crontabs -> the five fields that they mean."""


def check_line(line: str) -> str:
    """Return a cron line that can be used; refuse others with reason and fix."""
    if line.strip() in NICKNAMES:
        raise build_refusal("not five fields", f'write cron: "{NICKNAMES[line.strip()]}"')
    example = 'such as "0 2 * * *" for two at night'
    count = len(line.split())
    if count != 5:
        fix = f"write minute, hour, day of the month, month, day of the week, {example}"
        raise build_refusal(f"{count} field{'s' if count != 1 else ''}, not five", fix)
    numbers = f"write numbers, *, lists, ranges and steps, {example}"
    if TOO_LONG.search(line):
        raise build_refusal("a number of too many digits", numbers)
    error = _find_line_error(line)
    if not error:
        return line
    minute, hour, day, month, weekday = line.split()
    parts = (f"{minute} {hour} {day} * {weekday}", f"{minute} {hour} * {month} {weekday}")
    if any(map(_find_line_error, parts)):
        raise build_refusal(error, numbers)
    raise build_refusal("there is no such day", "write a day that exists")


def check_zone(name: str) -> str:
    """Return the name of a time zone that exists; refuse others with a similar name."""
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):  # `../x`, and `Europe`
        zones = {zone.lower(): zone for zone in sorted(zoneinfo.available_timezones())}
        suggestion = suggest(name, zones)
        for lower, zone in zones.items():
            suggestion = suggestion.replace(repr(lower), repr(zone))
        fix = f"{suggestion}write a name such as Europe/Berlin or UTC"
        raise build_refusal("unknown time zone", fix) from None
    return name


class CronSchedule(Section):
    """When a sweep starts."""

    cron: Annotated[str, AfterValidator(check_line)]
    """Minute, hour, day of the month, month and day of the week, as in a crontab."""
    timezone: Annotated[str, AfterValidator(check_zone)] = "UTC"
    """Time zone of the line, such as `Europe/Berlin`."""

    def iterate_times(self, after: datetime) -> Iterator[datetime]:
        """Yield every instant after `after`, in UTC, each once and in order, for 50 years."""
        start = (after - MARGIN).astimezone(zoneinfo.ZoneInfo(self.timezone))
        latest = after
        for local in CronSim(self.cron, start):
            instant = local.astimezone(UTC)
            if instant > latest:
                latest = instant
                yield instant

    def list_times(self, after: datetime, until: datetime) -> list[datetime]:
        """Return every instant after `after` and up to `until`, in UTC."""
        return list(itertools.takewhile(lambda time: time <= until, self.iterate_times(after)))

    def find_last_time(self, until: datetime) -> datetime | None:
        """Return the last instant up to `until`, in UTC; None if there was none for 8 years."""
        for days in (1, 8, 40, 400, 3000):
            times = self.list_times(until - timedelta(days=days), until)
            if times:
                return times[-1]
        return None


def _find_line_error(line: str) -> str:
    """Return what is wrong with five fields, in a few words; empty if nothing is."""
    try:
        next(CronSim(line, datetime(2000, 1, 1, tzinfo=UTC)))
    except CronSimError as error:
        return f"{error}".lower()
    except StopIteration:
        return "no such day"
    return ""
