"""The generated part of docs/schedule.md, and the examples around it."""

import re

import pytest

from docs.reference_pages import SCHEDULE as PAGE
from docs.reference_pages import fill_schedule_page
from gdpo_tune import schedule
from gdpo_tune.clusters.backends.base import BACKENDS
from gdpo_tune.clusters.schedule_spec import (
    BACKEND_SETTINGS,
    ScheduleSettings,
    format_period,
    list_sections,
    parse_duration,
)
from gdpo_tune.core.registry import load
from tests.support.schedule import load_scheduled_sweep


def test_the_page_is_up_to_date():
    """If not: python docs/reference_pages.py."""
    assert PAGE.read_text() == fill_schedule_page(PAGE.read_text())


def test_every_key_has_a_line_of_its_own():
    keys = [*ScheduleSettings.model_fields]
    for name, section in list_sections().items():
        keys += [f"{name.partition(':')[0]}.{key}" for key in section.model_fields]
    for key in keys:
        rows = re.findall(
            rf"^\| `{re.escape(key)}` \|.*\| (.+) \|$", PAGE.read_text(), re.MULTILINE
        )
        assert rows, key


def test_a_page_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="the page lacks"):
        fill_schedule_page("nothing")


def test_the_example_is_valid(tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    sweep = load_scheduled_sweep(tmp_path, example.replace("code.yaml", "gpu.yaml"))
    assert sweep.settings.policy.max_runtime == 36_000


def commands_on(page: str) -> list[str]:
    lines = re.findall(
        r"^ +(?:\.venv/bin/)?python -m gdpo_tune.schedule (.*?)(?:  +#.*| \| .*)?$", page, re.M
    )
    return [schedule.build_parser().parse_args(line.split()).command for line in lines]


def test_the_commands_exist():
    assert list(dict.fromkeys(commands_on(PAGE.read_text()))) == [*schedule.COMMANDS]
    assert "render" in commands_on(PAGE.with_name("clusters.md").read_text())


def test_every_backend_has_settings_and_code():
    assert set(BACKENDS) == set(BACKEND_SETTINGS)
    for target in BACKENDS.values():
        assert callable(load(target))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("6h", 21_600), ("1d12h", 129_600), ("2h30m15s", 9015), ("60s", 60)],
)
def test_lengths_of_time(text, seconds):
    assert parse_duration(text) == seconds
    assert parse_duration(format_period(seconds)) == seconds


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["", "6", "h", "6 h", "1h1d", "-1h", "1.5h", "6H", 6, None, "1h "], "not a length of"),
        (["9" * 5000 + "h"], "not a length of time"),
        (["0s", "0d0h", "59s", "367d", "999999999d"], "must be 1m to 366d"),
    ],
)
def test_text_that_is_no_length_of_time(texts, reason):
    for text in texts:
        with pytest.raises(ValueError, match=reason):
            parse_duration(text)
