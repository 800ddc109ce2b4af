"""Rows of a data set, each with the line or number where a person finds it.

A source is a `.jsonl` or `.parquet` file, a directory of such files, or a data set on the Hub.

The functions that read a column return a value of its kind, or raise `RowError`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gdpo_tune.core.errors import DataError, get_first_line
from gdpo_tune.core.files import DATA_FILES, expand_home, is_directory, is_file
from gdpo_tune.tasks.base import Problem, Split
from gdpo_tune.tasks.generation import choose_split

if TYPE_CHECKING:
    from gdpo_tune.core.settings import DataSettings

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


_KINDS = " or ".join(DATA_FILES)


PlacedRow = tuple[str, Row]
"""Where a row stands, such as `train.jsonl:12`, and the row."""


def read_rows(
    data: DataSettings, required: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[PlacedRow]:
    """Yield the rows of a source, in order, with the named columns alone.

    Raises:
        DataError: the source cannot be read, or lacks a required column.
    """
    if not data.is_local:
        yield from _read_hub(data, required, optional)
        return
    source = expand_home(data.source)
    files = list_data_files(source)
    if not files:
        raise DataError(
            f"data.source = {source}: no such file, or a directory without a {_KINDS} file: give "
            "the path of one"
        )
    for file in files:
        read = _read_parquet if file.suffix == ".parquet" else _read_json_lines
        yield from read(file, required, optional)


def list_data_files(source: Path) -> list[Path]:
    """Return the files that a local source stands for, sorted by name; empty if there is none."""
    if is_directory(source):
        return sorted(file for file in source.iterdir() if file.suffix in DATA_FILES)
    return [source] if is_file(source) and source.suffix in DATA_FILES else []


def _read_json_lines(
    file: Path, required: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[PlacedRow]:
    """Read one object a line; blank lines are skipped. Columns are those of the first row."""
    is_first = True
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place = f"{file}:{number}"
                row = _parse_line(place, line)
                if is_first:
                    _choose_columns(place, required, (), row)
                    is_first = False
                yield place, {k: row[k] for k in (*required, *optional) if k in row}
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error


def _parse_line(place: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place}: not a line of JSON: {error}: correct or remove the line (a file of JSON "
            "lines has one object on each line)"
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: not a JSON object with a value for each column")
    return cast("dict[str, Any]", row)


def _read_parquet(
    file: Path, required: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[PlacedRow]:
    import pyarrow
    from pyarrow import parquet

    library: Any = parquet  # comes without types
    try:
        with library.ParquetFile(file) as table:
            columns = _choose_columns(str(file), required, optional, table.schema_arrow.names)
            batches = table.iter_batches(batch_size=1024, columns=columns)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, 1):
                yield f"{file} row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{file} cannot be read as Parquet: {get_first_line(error)}") from error


def _read_hub(
    data: DataSettings, required: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[PlacedRow]:
    from datasets import load_dataset

    try:
        with _silence_client():
            table: Any = load_dataset(data.source, data.config or None, split=data.split)
    # The library's errors: no network, no such data set, no right to it (all OSErrors); an unknown
    # configuration or split; a loading script.
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"data.source = {data.source} (config {data.config or 'none'}, split {data.split}) "
            f"cannot be loaded from the Hub: {get_first_line(error)}. Check the three keys and "
            "the network, or download the data on a machine with a network and give a "
            f"{_KINDS} file as data.source"
        ) from error
    name = f"{data.source} ({data.split})"
    columns = _choose_columns(name, required, optional, table.column_names)
    for number, row in enumerate(table.select_columns(columns), 1):
        yield f"{name} row {number}", row


@contextmanager
def _silence_client() -> Generator[None]:
    """Keep the Hub client's notes on each retry off the terminal; the last error is reported."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _choose_columns(
    place: str, required: tuple[str, ...], optional: tuple[str, ...], present: Collection[str]
) -> list[str]:
    """Return the columns to read; refuse rows that lack one of the required ones."""
    missing = [name for name in required if name not in present]
    if missing:
        raise DataError(
            f"{place}: no column {', '.join(missing)}; there are {', '.join(present) or 'none'}: "
            "write the layout that these columns have as data.layout, or rename them"
        )
    return [name for name in (*required, *optional) if name in present]


def choose_data_split(prompt: str) -> Split:
    """Return the split of a prompt."""
    name = choose_split(prompt)
    return "train" if name == "warm_start" else name


def choose_problems(problems: Iterable[Problem], count: int, seed: int) -> list[Problem]:
    """Return the first `count` problems in an order that the seed and their prompts decide."""
    return sorted(problems, key=lambda p: sha256(f"{seed}/{p.prompt}".encode()).digest())[:count]
