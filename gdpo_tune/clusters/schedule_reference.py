"""The tables of docs/schedule.md, from the docstrings of the models.

Written by `python -m gdpo_tune.clusters.schedule_reference docs/schedule.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gdpo_tune.clusters import schedule_spec
from gdpo_tune.core.files import write_atomically
from gdpo_tune.spec.text import join_names, show
from gdpo_tune.spec.reference import describe_bound, read_attribute_docs, render_table

BEGIN, END = "<!-- generated: keys -->", "<!-- end -->"
KINDS = {int: "whole number", float: "number", bool: "true, false"}
DURATION = "length of time: `90m`, `6h`, `1d12h`"


def fill_page(page: str) -> str:
    """Return the page with new tables between its two marks; refuse a page without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    tables = [_format_section("Keys of the file", schedule_spec.ScheduleSettings, "")]
    for key, section in schedule_spec.list_sections().items():
        tables.append(_format_section(f"`{key}`", section, f"{key.partition(':')[0]}."))
    return "\n\n".join([before + BEGIN, *tables, END + after])


def _format_section(title: str, section: type[BaseModel], prefix: str) -> str:
    docs = read_attribute_docs(section)
    rows = [
        (f"`{prefix}{name}`", _describe_values(field), _format_default(name, field), docs[name])
        for name, field in section.model_fields.items()
    ]
    summary = (section.__doc__ or "").partition("\n")[0]
    return f"### {title}\n\n{summary}\n\n{render_table(('key', 'values', 'default', 'what'), rows)}"


def _describe_values(field: FieldInfo) -> str:
    """Return the values that a key may have, by its type and its bounds."""
    parts = [*_flatten(field.annotation), *field.metadata]
    if schedule_spec.DURATION_VALIDATOR in parts:
        return DURATION
    if tuple[str, ...] in parts:
        return "list of words"
    literal = next((part for part in parts if get_origin(part) is Literal), None)
    if literal is not None:
        is_list = any(get_origin(part) is tuple for part in parts)
        return ("some of " if is_list else "") + join_names(get_args(literal))
    kind = next((KINDS[part] for part in parts if isinstance(part, type) and part in KINDS), "")
    return ", ".join(filter(None, [kind, *map(describe_bound, parts)])) if kind else ""


def _flatten(kind: object) -> Iterator[Any]:
    yield kind
    for part in get_args(kind) if get_origin(kind) is not Literal else ():
        yield from _flatten(part)


def _format_default(name: str, field: FieldInfo) -> str:
    value: Any = field.default
    if name == "name":
        return "the file's stem"
    if isinstance(value, BaseModel) or value is PydanticUndefined:
        return "required" if value is PydanticUndefined else "below"
    if value in ("", None):
        return ""
    if value == schedule_spec.EVERY_OCCASION:
        return "all"
    is_duration = _describe_values(field) == DURATION
    return f"`{schedule_spec.format_duration(value) if is_duration else show(value)}`"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_atomically(page, fill_page(page.read_text(encoding="utf-8")))
