"""The tables of docs/schedule.md, from the docstrings of the models.

Written by `python -m gdpo_tune.clusters.schedule_reference docs/schedule.md`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from gdpo_tune.clusters import schedule_spec
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.text import join_names
from gdpo_tune.spec import reference

DURATION = "length of time: `90m`, `6h`, `1d12h`"


def fill_schedule_page(page: str) -> str:
    """Return the page with new tables, see `fill_between`."""
    sections = [("Keys of the file", schedule_spec.ScheduleSettings)]
    sections += [(f"`{key}`", section) for key, section in schedule_spec.list_sections().items()]
    how = (_describe_values, _describe_default)
    tables = [f"#{reference.describe_section(title, section, *how)}" for title, section in sections]
    return reference.fill_between(page, "<!-- generated: keys -->", tables)


def _describe_values(field: FieldInfo) -> str:
    kind, *_ = (*get_args(field.annotation), None)
    if schedule_spec.DURATION_VALIDATOR in (*field.metadata, *getattr(kind, "__metadata__", ())):
        return DURATION
    if get_origin(field.annotation) is tuple and get_origin(kind) is Literal:
        return f"some of {join_names(get_args(kind))}"
    return reference.describe_values(field)


def _describe_default(name: str, field: FieldInfo) -> str:
    if field.default == schedule_spec.EVERY_OCCASION:
        return "all"
    if field.default and _describe_values(field) == DURATION:
        return f"`{schedule_spec.format_period(field.default)}`"
    return reference.describe_default(name, field)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_atomically(page, fill_schedule_page(page.read_text(encoding="utf-8")))
