"""Prompts composed of columns of a row: `data.prompt_template`."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from typing import Any


def list_template_columns(template: str) -> list[str]:
    """Return the columns that a prompt template names.

    Raises:
        ValueError: a brace stands alone, or is followed by what is no name of a column.
    """
    names: list[str] = []
    for _, name, form, conversion in string.Formatter().parse(template):
        if name == "" or form or conversion:
            raise ValueError("write the name of a column in braces, or {{ for a brace")
        names += [] if name is None else [name]
    return list(dict.fromkeys(names))


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """Return a prompt composed of columns; what is no text is written as JSON, None as nothing."""
    text = ""
    for literal, name, *_ in string.Formatter().parse(template):
        value = row.get(name or "")
        if not isinstance(value, str):
            value = "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
        text += literal + value
    return text
