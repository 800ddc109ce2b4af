"""Columns of a row of data: each function returns a value of its kind, or raises `RowError`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, cast

Row = Mapping[str, Any]
"""Column -> value, as JSON, CSV, Parquet or the `datasets` library give it."""
SURROGATE = re.compile("[\ud800-\udfff]")


class RowError(Exception):
    """A row that cannot become a problem: the column that is wrong, and the reason."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(f"column {column}: {reason}")
        self.column, self.reason = column, reason


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


def get_answer(row: Row, column: str) -> str:
    """Return an answer as a text: a text, a plain number (27.0 is `27`), or a list with commas."""
    value = row.get(column)
    if isinstance(value, list):
        if not value:
            raise RowError(column, "an empty list")
        each = cast("list[Any]", value)
        return ", ".join(get_answer({column: one}, column) for one in each)
    if isinstance(value, float) and math.isfinite(value):
        value = int(value) if value.is_integer() else format(Decimal(repr(value)), "f")
    is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    return str(value) if is_number else get_text({column: value}, column).strip()


def require_list(value: object, column: str) -> list[Any]:
    """Return a value that must be a list."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RowError(column, f"not a list but {name_kind(value)}")
    return list(cast("Sequence[Any]", value))


def require_texts(value: object, column: str) -> list[str]:
    """Return a value that must be a list of texts; it may be empty."""
    texts = require_list(value, column)
    if not all(isinstance(text, str) for text in texts):
        raise RowError(column, "not a list of texts")
    return texts


def require_mapping(value: object, column: str) -> dict[str, Any]:
    """Return a value that must be a mapping."""
    if not isinstance(value, Mapping):
        raise RowError(column, f"not a mapping but {name_kind(value)}")
    return dict(cast("Mapping[str, Any]", value))


def parse_json(source: object, column: str) -> Any:
    """Return the value that a text or bytes hold as JSON; any other value comes back as it is."""
    try:
        text = source.decode("utf-8-sig") if isinstance(source, bytes) else source
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise RowError(column, f"not JSON: {error}") from error


def name_kind(value: object) -> str:
    """Return the kind of a value in words."""
    return "nothing" if value is None else type(value).__name__
