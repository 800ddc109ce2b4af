"""Reading the columns of one row: each function returns a value of its kind or says what it met."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

Row = Mapping[str, Any]
"""Column -> value, as JSON, Parquet or the `datasets` library give it."""


class RowError(Exception):
    """A row that cannot be mapped to a problem: the column to blame, and the reason."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(column, reason)
        self.column = column
        self.reason = reason

    def __str__(self) -> str:
        return f"column {self.column}: {self.reason}"


def text(row: Row, column: str) -> str:
    """A text that is not blank.

    Raises:
        RowError: it is something else.
    """
    value = row.get(column)
    if not isinstance(value, str):
        raise RowError(column, f"not a text but {kind(value)}")
    if not value.strip():
        raise RowError(column, "empty")
    return value


def optional_text(row: Row, column: str) -> str:
    """A text; empty where the column is missing, null or blank.

    Raises:
        RowError: it is something else.
    """
    value = row.get(column)
    return "" if value is None or value == "" else text(row, column)


def texts(row: Row, column: str) -> list[str]:
    """A list of texts, which may be empty.

    Raises:
        RowError: it is something else.
    """
    value = sequence(row.get(column), column)
    if not all(isinstance(item, str) for item in value):
        raise RowError(column, "not a list of texts")
    return cast("list[str]", value)


def sequence(value: object, column: str) -> list[Any]:
    """A list.

    Raises:
        RowError: it is something else.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RowError(column, f"not a list but {kind(value)}")
    return list(cast("Sequence[Any]", value))


def mapping(value: object, column: str) -> dict[str, Any]:
    """A mapping.

    Raises:
        RowError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise RowError(column, f"not a mapping but {kind(value)}")
    return dict(cast("Mapping[str, Any]", value))


def from_json(source: str, column: str) -> Any:
    """What a text holds as JSON.

    Raises:
        RowError: it is no JSON.
    """
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RowError(column, f"not JSON: {error}") from error


def kind(value: object) -> str:
    """What a value is, in words."""
    return "nothing" if value is None else type(value).__name__
