"""Cron lines as other schedulers read them: by a second parser, and as calendar events."""

from __future__ import annotations

import itertools
import re
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from cronsim import CronSim
from hypothesis import assume, given
from hypothesis import strategies as st

from gdpo_tune.clusters.render import base
from gdpo_tune.clusters.render.base import RenderRequest
from gdpo_tune.clusters.schedule_spec import CronSchedule
from gdpo_tune.core.errors import SpecError
from tests.support.render import LOCAL, NOW, render
from tests.support.schedule import load_scheduled_sweep


def request_of(line: str, zone: str = "UTC") -> RenderRequest:
    """A request of which only the schedule is used."""
    when = CronSchedule(cron=line, timezone=zone)
    file = SimpleNamespace(file="sweeps/nightly.yaml")
    return RenderRequest(file, when, target="here", python="", directory=Path(), now=NOW)


def field(low: int, high: int, names: tuple[str, ...] = ()) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    pair = st.tuples(number, number).map(sorted)
    return st.one_of(
        st.just("*"),
        st.integers(2, 9).map(lambda step: f"*/{step}"),
        number.map(str),
        pair.map(lambda p: f"{p[0]}-{p[1]}"),
        st.tuples(number, st.integers(2, 9)).map(lambda p: f"{p[0]}/{p[1]}"),
        st.lists(number, min_size=2, max_size=4).map(lambda n: ",".join(map(str, n))),
        *([st.sampled_from(names)] if names else []),
    )


LINES = st.tuples(
    field(0, 59),
    field(0, 23),
    field(1, 28),
    field(1, 12, ("JAN", "dec", "MAR-MAY")),
    field(0, 7, ("MON", "sun", "MON-FRI", "FRI,SUN")),
).map(" ".join)


def next_times(line: str, count: int = 30) -> list[datetime]:
    return list(itertools.islice(CronSim(line, datetime(2026, 1, 1, tzinfo=UTC)), count))


@given(LINES, st.booleans())
def test_five_fields_mean_the_same(line, star_decides):
    try:
        written = base.format_five_fields(request_of(line), star_decides=star_decides)
    except SpecError:
        assume(False)
    for text in written.split():
        assert base.COMMON_SYNTAX.fullmatch(text)
    assert "7" not in re.sub("/.*", "", written.split()[4])
    assert next_times(written) == next_times(line)


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("0 2 * * *", "0 2 * * *"),
        ("*/15 0-6 1,15 * 1-5", "*/15 0-6 1,15 * 1-5"),
        ("0 2 * * MON-FRI", "0 2 * * 1-5"),
        ("0 2 * * 7", "0 2 * * 0"),
        ("0 2 * * 5-7", "0 2 * * 0,5,6"),
        ("0 2 * * */7", "0 2 * * */7"),
        ("0 2 1 * */7", "0 2 1 * */7"),
        ("5/20 2 * * *", "5,25,45 2 * * *"),
        ("0 2 1 jan,jul *", "0 2 1 1,7 *"),
    ],
)
def test_five_fields(line, written):
    assert base.format_five_fields(request_of(line), star_decides=True) == written


@pytest.mark.parametrize(
    ("line", "events"),
    [
        ("0 2 * * *", ["*-*-* 02:00:00 UTC"]),
        ("30 2 * * 1-5", ["Mon..Fri *-*-* 02:30:00 UTC"]),
        ("0 2 * * 0", ["Sun *-*-* 02:00:00 UTC"]),
        ("*/20 * * * *", ["*-*-* *:00,20,40:00 UTC"]),
        ("0 8-17 * * 6,7", ["Sat,Sun *-*-* 08..17:00:00 UTC"]),
        ("0 1 1 */3 *", ["*-01,04,07,10-01 01:00:00 UTC"]),
        ("0 1 1,15 * 1", ["*-*-01,15 01:00:00 UTC", "Mon *-*-* 01:00:00 UTC"]),
        ("0 1 */10 * 1", ["Mon *-*-01,11,21,31 01:00:00 UTC"]),
        ("0 1 L * *", ["*-*~01 01:00:00 UTC"]),
        ("0 1 15,L * *", ["*-*-15 01:00:00 UTC", "*-*~01 01:00:00 UTC"]),
        ("0 1 * * 1#2", ["Mon *-*-08..14 01:00:00 UTC"]),
        ("0 1 * * 5L", ["Fri *-*~07/1 01:00:00 UTC"]),
    ],
)
def test_calendar_events(line, events):
    assert base.format_calendar_events(request_of(line)) == events


def test_several_events_are_several_lines(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, LOCAL.replace("* * 1-5", "1 * 1"))
    timer = render(sweep, "systemd")["gdpo-nightly.timer"]
    assert timer.count("OnCalendar=") == 2


@pytest.mark.parametrize(
    ("line", "zone", "days"),
    [
        ("30 2 * * *", "Europe/Berlin", ["2026-03-29"]),
        ("0 3 * * *", "Europe/Berlin", []),
        ("*/30 * * * *", "Europe/Berlin", []),
        ("30 2 * * *", "UTC", []),
        ("30 2 * * *", "America/New_York", ["2026-03-08"]),
        ("15 2 * * *", "Australia/Lord_Howe", ["2026-10-04"]),
    ],
)
def test_days_that_spring_moves(line, zone, days):
    skipped = base.find_skipped_days(request_of(line, zone))
    assert [str(day) for day in skipped] == days


def test_refusals_name_the_line(tmp_path):
    with pytest.raises(SpecError, match=r"schedule.cron = 30 2 LW \* \*"):
        render(load_scheduled_sweep(tmp_path, LOCAL.replace("* * 1-5", "LW * *")), "crontab")
