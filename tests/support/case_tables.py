"""Cases of tests in YAML: a list of tables in one file a directory of tests."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.support.paths import ROOT


@functools.cache
def read_tables(directory: str) -> dict[str, list[list[Any]]]:
    """Return the tables of a directory of tests by name; the first row of each has the columns."""
    file = ROOT / "tests" / "data" / f"cases_{directory}.yaml"
    return YAML(typ="safe").load(file)


def cases(directory: str, table: str) -> pytest.MarkDecorator:
    """Run a test with every row of a table."""
    columns, *rows = read_tables(directory)[table]
    if len(columns) == 1:
        rows = [row[0] for row in rows]
    return pytest.mark.parametrize(",".join(columns), rows)
