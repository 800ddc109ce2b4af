"""The tables of docs/schedule.md.

Written by `python -m gdpo_tune.clusters.schedule_reference docs/schedule.md`.

They stand between two marks of the page and are written from the docstrings of the models, so that
they cannot disagree with them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gdpo_tune.clusters import durations, schedule_spec
from gdpo_tune.core.files import write_whole
from gdpo_tune.spec.docstrings import attribute_docs, first_line
from gdpo_tune.spec.problems import one_of, show
from gdpo_tune.spec.reference import bound, table

BEGIN, END = "<!-- generated: keys -->", "<!-- end -->"
FROM_ELSEWHERE = {"name": "the file's stem"}
HEAD = ("key", "values", "default", "what")


def keys() -> str:
    """A table for the file and for each of its sections."""
    parts = [_keys("Keys of the file", schedule_spec.SweepFile, "")]
    parts += [
        _keys(f"`{name}`", section, f"{name.partition(':')[0]}.")
        for name, section in schedule_spec.sections().items()
    ]
    return "\n\n".join(parts)


def filled(page: str) -> str:
    """The page with the tables as they are now.

    Raises:
        ValueError: the marks are not there, once each and in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{keys()}\n\n{END}{after}"


def _keys(title: str, section: type[BaseModel], prefix: str) -> str:
    docs = attribute_docs(section)
    rows = [
        (f"`{prefix}{name}`", values_of(field), default_of(name, field), docs[name])
        for name, field in section.model_fields.items()
    ]
    return f"### {title}\n\n{first_line(section)}\n\n{table(HEAD, rows)}"


def values_of(field: FieldInfo) -> str:
    """What a key may be, by its type and its bounds."""
    kinds = [field.annotation, *get_args(field.annotation)]
    bounds = [*field.metadata]
    for kind in kinds:
        if get_origin(kind) is Annotated:
            inner, *more = get_args(kind)
            kinds.append(inner)
            bounds += more
    if durations.WRITTEN_AS_TEXT in bounds:
        return "length of time: `90m`, `6h`, `1d12h`"
    if tuple[str, ...] in kinds:
        return "list of words"
    if any(get_origin(kind) is tuple for kind in kinds):
        return "some of " + one_of(schedule_spec.EVERY_OCCASION)
    for kind in kinds:
        if get_origin(kind) is Literal:
            return one_of(get_args(kind))
    words = {int: "whole number", float: "number", bool: "true, false"}
    named = next((words[kind] for kind in kinds if kind in words), "")
    return ", ".join(part for part in (named, *map(bound, bounds)) if part and named)


def default_of(name: str, field: FieldInfo) -> str:
    """A key's default as a reader would type it."""
    value: Any = field.default
    if value is PydanticUndefined:
        return "required"
    if name in FROM_ELSEWHERE:
        return FROM_ELSEWHERE[name]
    if isinstance(value, BaseModel):
        return "below"
    if value in ("", None):
        return ""
    if value == schedule_spec.EVERY_OCCASION:
        return "all"
    if values_of(field).startswith("length"):
        return f"`{durations.shown(value)}`"
    return f"`{show(value)}`"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_whole(page, filled(page.read_text(encoding="utf-8")))
