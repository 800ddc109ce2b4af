"""Rows of a data set, each with the place that a person finds it at.

A source is a `.jsonl` or `.parquet` file, a folder of such files, or a data set on the Hub.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from gdpo_tune.core.errors import DataError
from gdpo_tune.core.settings import DATA_FILES, DataSettings
from gdpo_tune.tasks.data.columns import Row


class Placed(NamedTuple):
    """One row and where it stands, such as `train.jsonl:12`."""

    place: str
    row: Row


def read_rows(
    data: DataSettings, required: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[Placed]:
    """The rows of a source, in order; of large columns only those that are named.

    Args:
        data: what to read.
        required: columns that must be there.
        optional: columns that are read, too, where they are.

    Raises:
        DataError: the source cannot be had or read, or lacks a required column.
    """
    if not data.is_local:
        return _hub_rows(data, required, optional)
    return _local_rows(Path(data.source).expanduser(), required, optional)


def _local_rows(
    source: Path, required: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[Placed]:
    files = data_files(source)
    if not files:
        raise DataError(
            f"data.source = {source}: no such file, or a folder without a {' or '.join(DATA_FILES)}"
            " file: give the path of one"
        )
    for file in files:
        read = _parquet_rows if file.suffix == ".parquet" else _jsonl_rows
        yield from read(file, required, optional)


def data_files(source: Path) -> list[Path]:
    """The files that a local source stands for, sorted by name; empty if there is none."""
    if source.is_dir():
        return sorted(file for file in source.iterdir() if file.suffix in DATA_FILES)
    return [source] if source.is_file() and source.suffix in DATA_FILES else []


# --- JSON lines -----------------------------------------------------------------------------------


def _jsonl_rows(
    file: Path, required: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[Placed]:
    """One object a line; blank lines are skipped. Columns are those of the first row."""
    first = True
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place = f"{file}:{number}"
                row = _json_object(place, line)
                if first:
                    _require(place, required, row)
                    first = False
                yield Placed(place, {k: row[k] for k in (*required, *optional) if k in row})
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error


def _json_object(place: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place}: not a line of JSON: {error}: mend or remove the line (a file of JSON lines "
            "has one object on each line)"
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: not a JSON object with a value for each column")
    return cast("dict[str, Any]", row)


# --- Parquet --------------------------------------------------------------------------------------


def _parquet_rows(
    file: Path, required: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[Placed]:
    import pyarrow
    from pyarrow import parquet

    library: Any = parquet  # comes without types
    try:
        with library.ParquetFile(file) as table:
            present: list[str] = table.schema_arrow.names
            _require(str(file), required, present)
            wanted = [name for name in (*required, *optional) if name in present]
            number = 0
            for batch in table.iter_batches(batch_size=1024, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield Placed(f"{file} row {number}", row)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{file} cannot be read as Parquet: {_first_line(error)}") from error


# --- the Hub --------------------------------------------------------------------------------------


def _hub_rows(
    data: DataSettings, required: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[Placed]:
    table: Any = _load(data)
    where = f"{data.source} ({data.split})"
    present: list[str] = table.column_names
    _require(where, required, present)
    wanted = [name for name in (*required, *optional) if name in present]
    for number, row in enumerate(table.select_columns(wanted), 1):
        yield Placed(f"{where} row {number}", row)


def _load(data: DataSettings) -> Any:
    from datasets import load_dataset

    try:
        with _quiet_client():
            return load_dataset(data.source, data.config or None, split=data.split)
    # What the library raises for each of its reasons: no network, no such data set, no right to
    # it (all OSErrors); an unknown configuration or split; a loading script.
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"data.source = {data.source} (config {data.config or 'none'}, split {data.split}) "
            f"cannot be had from the Hub: {_first_line(error)}. Check the three keys and the "
            f"network, or download the data where there is one and give a {' or '.join(DATA_FILES)}"
            " file as data.source"
        ) from error


@contextmanager
def _quiet_client() -> Generator[None]:
    """Keep the notes of the Hub's client on each retry off the terminal: the last error tells."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


# --- shared ---------------------------------------------------------------------------------------


def _require(place: str, required: tuple[str, ...], present: list[str] | Mapping[str, Any]) -> None:
    missing = [name for name in required if name not in present]
    if missing:
        raise DataError(
            f"{place}: no column {', '.join(missing)}; there are {', '.join(present) or 'none'}: "
            "write the layout that these columns have as data.layout, or rename them"
        )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
