"""Columns of one row: each function returns a value of its kind, or raises `RowError`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

SURROGATE = re.compile("[\ud800-\udfff]")
Row = Mapping[str, Any]
"""Column -> value, as JSON, Parquet or the `datasets` library give it."""


class RowError(Exception):
    """A row that cannot become a problem: the column that is wrong, and the reason."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(f"column {column}: {reason}")


def get_text(row: Row, column: str) -> str:
    """Return a text that is not blank."""
    value = row.get(column)
    if not isinstance(value, str):
        raise RowError(column, f"not a text but {name_kind(value)}")
    if not value.strip():
        raise RowError(column, "empty")
    if not value.isascii() and SURROGATE.search(value):
        raise RowError(column, "half of a character (a lone surrogate), which no tokenizer reads")
    return value


def get_optional_text(row: Row, column: str) -> str:
    """Return a text; empty where the column is missing, null or empty."""
    value = row.get(column)
    return "" if value is None or value == "" else get_text(row, column)


def get_texts(row: Row, column: str) -> list[str]:
    """Return a list of texts, which may be empty."""
    value = require_list(row.get(column), column)
    if not all(isinstance(item, str) for item in value):
        raise RowError(column, "not a list of texts")
    return cast("list[str]", value)


def require_list(value: object, column: str) -> list[Any]:
    """Return a value that must be a list."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RowError(column, f"not a list but {name_kind(value)}")
    return list(cast("Sequence[Any]", value))


def require_mapping(value: object, column: str) -> dict[str, Any]:
    """Return a value that must be a mapping."""
    if not isinstance(value, Mapping):
        raise RowError(column, f"not a mapping but {name_kind(value)}")
    return dict(cast("Mapping[str, Any]", value))


def parse_json(source: object, column: str) -> Any:
    """Return the value that a text holds as JSON; a value that is no text comes back as it is."""
    try:
        return json.loads(source) if isinstance(source, str) else source
    except (ValueError, RecursionError) as error:
        raise RowError(column, f"not JSON: {error}") from error


def name_kind(value: object) -> str:
    """Return the kind of a value in words."""
    return "nothing" if value is None else type(value).__name__
