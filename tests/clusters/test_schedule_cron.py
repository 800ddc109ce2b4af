"""Cron lines in time zones, against a calendar of our own that goes through every minute."""

from __future__ import annotations

import itertools
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from gdpo_tune.clusters.schedule_spec import CronSchedule, check_zone

YEAR = datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata")
MINUTE = timedelta(minutes=1)


def by_the_wall(
    zone: ZoneInfo, hour: int, minute: int, weekdays: str = "0123456"
) -> list[datetime]:
    """Instants of a fixed time of day; Monday is 0."""
    found = set()
    for number in range(-1, 367):
        day = date(2026, 1, 1) + timedelta(days=number)
        if str(day.weekday()) not in weekdays:
            continue
        wall = datetime.combine(day, time(hour, minute))
        while True:  # a wall clock never shows what spring leaves out: take the next that it does
            instant = wall.replace(tzinfo=zone).astimezone(UTC)
            if instant.astimezone(zone).replace(tzinfo=None) == wall:
                break
            wall += MINUTE
        found.add(instant)
    return sorted(t for t in found if YEAR[0] < t <= YEAR[1])


def list_quarters(zone: ZoneInfo, start: datetime, end: datetime) -> list[tuple[datetime, ...]]:
    """List every quarter of an hour, and what the wall clock shows then."""
    quarter = timedelta(minutes=15)
    instants = (start + quarter * number for number in range(1, (end - start) // quarter + 1))
    return [(instant, instant.astimezone(zone)) for instant in instants]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize(("hour", "minute"), [(2, 30), (2, 0), (1, 30), (0, 0), (3, 0), (23, 59)])
def test_a_fixed_time_follows_the_wall_clock(zone, hour, minute):
    found = CronSchedule(cron=f"{minute} {hour} * * *", timezone=zone).list_times(*YEAR)
    assert found == by_the_wall(ZoneInfo(zone), hour, minute)


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("weeks", [((3, 7), (4, 7)), ((10, 3), (11, 3))])
def test_a_line_with_stars_follows_real_time(zone, weeks):
    """In the weeks in which the clocks of some zones change."""
    weeks = [datetime(2026, month, day, tzinfo=UTC) for month, day in weeks]
    quarters = list_quarters(ZoneInfo(zone), *weeks)
    found = CronSchedule(cron="*/30 * * * *", timezone=zone).list_times(*weeks)
    assert found == [instant for instant, wall in quarters if wall.minute in (0, 30)]
    if zone == "Australia/Lord_Howe":
        return  # shifts by half an hour, which cronsim's walk by hours steps over: see `cron`
    found = CronSchedule(cron="15 */6 * * *", timezone=zone).list_times(*weeks)
    assert found == [i for i, wall in quarters if wall.hour % 6 == 0 and wall.minute == 15]


def test_saturdays():
    found = CronSchedule(cron="0 20 * * 6", timezone="Europe/Berlin").list_times(*YEAR)
    assert found == by_the_wall(ZoneInfo("Europe/Berlin"), 20, 0, "5")
    assert len(found) == 52


def test_two_times_in_the_missing_hour_are_one():
    night = datetime(2026, 3, 29, tzinfo=UTC)
    berlin = CronSchedule(cron="0,30 2,3 * * *", timezone="Europe/Berlin")
    hours = [1, 1.5]  # 03:00 and 03:30 of summer; 02:00 and 02:30 would be 03:00
    expected = [night + timedelta(hours=hour) for hour in hours]
    assert berlin.list_times(night, night + timedelta(hours=12)) == expected


@pytest.mark.parametrize("zone", ["Europe/Berlin", "Australia/Lord_Howe", "America/New_York"])
def test_where_the_search_begins_makes_no_difference(zone):
    schedule = CronSchedule(cron="10,40 0-3 * * *", timezone=zone)
    nights = {
        "Europe/Berlin": ((3, 28), (10, 24)),
        "Australia/Lord_Howe": ((4, 4), (10, 3)),
        "America/New_York": ((3, 8), (11, 1)),
    }[zone]
    for month, day in nights:
        start = datetime(2026, month, day, 12 if zone != "America/New_York" else 0, tzinfo=UTC)
        end = start + timedelta(hours=24)
        whole = schedule.list_times(start, end)
        cuts = [start + timedelta(minutes=7) * number for number in range(24 * 60 // 7)]
        parts = [schedule.list_times(a, b) for a, b in itertools.pairwise([*cuts, end])]
        assert list(itertools.chain(*parts)) == whole
        assert len(whole) == len(set(whole))


def test_the_last_time_before_a_moment():
    schedule = CronSchedule(cron="30 2 * * *", timezone="Europe/Berlin")
    assert schedule.find_last_time(datetime(2026, 3, 29, 0, 59, tzinfo=UTC)) == datetime(
        2026, 3, 28, 1, 30, tzinfo=UTC
    )
    at = datetime(2026, 3, 29, 1, tzinfo=UTC)
    assert schedule.find_last_time(at) == at
    leap = CronSchedule(cron="0 0 29 2 *")
    assert leap.find_last_time(datetime(2027, 1, 1, tzinfo=UTC)) == datetime(
        2024, 2, 29, tzinfo=UTC
    )


@pytest.mark.parametrize(
    ("line", "reason", "fix"),
    [
        ("0 2 * *", "4 fields, not five", "0 2 * * *"),
        ("0 0 2 * * *", "6 fields, not five", "0 2 * * *"),
        ("", "0 fields, not five", "0 2 * * *"),
        ("@daily", "not five fields", '"0 0 * * *"'),
        ("60 2 * * *", "bad minute", "ranges"),
        ("0 24 * * *", "bad hour", "ranges"),
        ("0 2 32 * *", "bad day-of-month", "ranges"),
        ("0 2 31 2 *", "there is no such day", "a day that exists"),
        ("0 2 * 13 *", "bad month", "ranges"),
        ("0 2 * * 8", "bad day-of-week", "ranges"),
        ("*/0 2 * * *", "bad minute", "ranges"),
        ("5-1 2 * * *", "bad minute", "ranges"),
        ("0 2 * 2 1#5 x", "6 fields, not five", "0 2 * * *"),
        ("0 0 30,31 2 *", "there is no such day", "a day that exists"),
        ("0 0 30 2 8", "bad day-of-week", "ranges"),
    ],
)
def test_lines_that_cannot_be_used(line, reason, fix):
    with pytest.raises(ValidationError) as caught:
        CronSchedule(cron=line)
    (error,) = caught.value.errors()
    assert reason in error["msg"]
    assert fix in error["ctx"]["fix"]


@pytest.mark.parametrize(
    "line", ["0 2 * * *", "*/15 9-17 * JAN-MAR MON-FRI", "0 0 L * *", "0 0 29 2 *"]
)
def test_lines_that_can_be_used(line):
    assert CronSchedule(cron=line).cron == line


@pytest.mark.parametrize("name", ["Europe/Berlin", "UTC", "America/Argentina/Buenos_Aires"])
def test_zones_that_exist(name):
    assert check_zone(name) == name


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("europe/berln", "did you mean 'Europe/Berlin' or "),
        *((name, "") for name in ("Europe", "../etc/passwd", "", "/UTC", "MEZ/x")),
        ("Mars", "write a name"),
    ],
)
def test_zones_that_do_not_exist(name, fix):
    with pytest.raises(PydanticCustomError, match="unknown time zone") as caught:
        check_zone(name)
    assert caught.value.context["fix"].startswith(fix)
