"""Tables of cases in `tests/data/*.yaml`: a row a line, below its name or its source."""

import functools

import pytest
from ruamel.yaml import YAML

from tests.support.paths import ROOT


@functools.cache
def read_table(name: str) -> dict:
    """Read a file of sections."""
    return YAML(typ="safe").load((ROOT / "tests" / "data" / f"{name}.yaml").read_text())


def read_named(table: str, section: str) -> list:
    """Return the rows of a section `name: row` as cases with these names."""
    return [pytest.param(*row, id=name) for name, row in read_table(table)[section].items()]


def read_sourced(table: str, section: str) -> list:
    """Return the rows of a section `source: rows` as cases that name their source."""
    return [
        pytest.param(*row, id=f"{source} {number}")
        for source, rows in read_table(table)[section].items()
        for number, row in enumerate(rows)
    ]


def cases(directory: str, table: str) -> pytest.MarkDecorator:
    """Run a test with every row of a table of a directory of tests; its first row has columns."""
    columns, *rows = read_table(f"cases_{directory}")[table]
    if len(columns) == 1:
        rows = [row[0] for row in rows]
    return pytest.mark.parametrize(",".join(columns), rows)
