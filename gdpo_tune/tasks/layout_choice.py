"""Proposal of a layout for a file whose columns nobody has named yet."""

from __future__ import annotations

from itertools import islice

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import expand_home, is_present
from gdpo_tune.core.registry import LAYOUTS, describe_layout
from gdpo_tune.core.settings import DataSettings
from gdpo_tune.tasks.data_rows import (
    MESSAGES,
    RowError,
    convert_row,
    name_columns,
    propose_columns,
    read_local,
)

ROWS = 20
"""First rows of a file that decide."""


def propose_layout(source: str, task: str | None, layout: str | None) -> DataSettings | None:
    """Return the layout that fits the first rows of a file or directory best; None for others.

    A task or layout that is given is kept. Most of the rows have to become problems. Then fewer
    columns with other names count, then more columns of the layout, then the order of `LAYOUTS`, in
    which the stricter ones come first.

    Raises:
        DataError: the source cannot be read.
        UsageError: no layout fits; the message names the columns.
    """
    layouts = [n for n in LAYOUTS if task is None or task in describe_layout(n).tasks]
    if layout:
        layouts = [layout] if layout in LAYOUTS else []
    if not layouts or not source or not is_present(expand_home(source)):
        return None
    rows = [row for _, row in islice(read_local(source, "", "train", lambda _, all: [*all]), ROWS)]
    present = list(dict.fromkeys(column for row in rows for column in row))
    found: list[tuple[int, int, DataSettings]] = []
    for name, info in ((name, describe_layout(name)) for name in layouts):
        columns = propose_columns([*info.columns, *info.one_of], present)
        spoken = (info.columns[0], "answer", "solution") if MESSAGES in present else ()
        if not info.fits([*present, *columns, *spoken]):
            continue
        data, usable = DataSettings(source, name, columns), 0
        for row in rows:
            try:
                convert_row(info, name_columns(data, row, info))
                usable += 1
            except RowError:
                continue
        if 2 * usable > len(rows):
            other = sum(name != column.lower() for name, column in columns.items())
            found.append((other, -len(info.columns) - bool(info.one_of), data))
    if not found:
        raise UsageError(
            f"{source} has the columns {', '.join(present) or 'of no row'}, which fit none of the "
            f"layouts {', '.join(layouts)}\n    fix: name another layout with --layout, or write "
            "in the file which columns are meant as data.columns"
        )
    return min(found, key=lambda each: each[:2])[2]
