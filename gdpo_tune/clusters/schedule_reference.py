"""The tables of docs/schedule.md, from the docstrings of the models.

Written by `python -m gdpo_tune.clusters.schedule_reference docs/schedule.md`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gdpo_tune.clusters import schedule_spec
from gdpo_tune.core.files import write_whole
from gdpo_tune.spec.problems import one_of, show
from gdpo_tune.spec.reference import bound, table

BEGIN, END = "<!-- generated: keys -->", "<!-- end -->"
OTHER_DEFAULTS = {"name": "the file's stem"}
HEAD = ("key", "values", "default", "what")


def fill_page(page: str) -> str:
    """Return the page with the present tables between its two marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    tables = [_format_section("Keys of the file", schedule_spec.SweepFile, "")]
    for key, section in schedule_spec.list_sections().items():
        tables.append(_format_section(f"`{key}`", section, f"{key.partition(':')[0]}."))
    return "\n\n".join([before + BEGIN, *tables, END + after])


def _format_section(title: str, section: type[BaseModel], prefix: str) -> str:
    rows = [
        (
            f"`{prefix}{name}`",
            describe_values(field),
            _format_default(name, field),
            " ".join((field.description or "").split()),
        )
        for name, field in section.model_fields.items()
    ]
    summary = (section.__doc__ or "").partition("\n")[0]
    return f"### {title}\n\n{summary}\n\n{table(HEAD, rows)}"


def describe_values(field: FieldInfo) -> str:
    """Return the values that a key may have, by its type and its bounds."""
    kinds = [field.annotation, *get_args(field.annotation)]
    bounds = [*field.metadata]
    for kind in kinds:
        if get_origin(kind) is Annotated:
            inner, *more = get_args(kind)
            kinds.append(inner)
            bounds += more
    if schedule_spec.DURATION_VALIDATOR in bounds:
        return "length of time: `90m`, `6h`, `1d12h`"
    if tuple[str, ...] in kinds:
        return "list of words"
    if any(get_origin(kind) is tuple for kind in kinds):
        return "some of " + one_of(schedule_spec.EVERY_OCCASION)
    for kind in kinds:
        if get_origin(kind) is Literal:
            return one_of(get_args(kind))
    words = {int: "whole number", float: "number", bool: "true, false"}
    word = next((words[kind] for kind in kinds if kind in words), "")
    return ", ".join(part for part in (word, *map(bound, bounds)) if part and word)


def _format_default(name: str, field: FieldInfo) -> str:
    value: Any = field.default
    if value is PydanticUndefined:
        return "required"
    if name in OTHER_DEFAULTS:
        return OTHER_DEFAULTS[name]
    if isinstance(value, BaseModel):
        return "below"
    if value in ("", None):
        return ""
    if value == schedule_spec.EVERY_OCCASION:
        return "all"
    is_duration = describe_values(field).startswith("length")
    return f"`{schedule_spec.format_duration(value) if is_duration else show(value)}`"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_whole(page, fill_page(page.read_text(encoding="utf-8")))
