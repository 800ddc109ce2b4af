"""Problems from a data set: read rows, convert each with a layout, assign it to a split.

A source is a `.jsonl` or `.parquet` file, a directory of such files, or a data set on the Hub.

Splits are disjoint by a hash of the prompt. They are those of the embedded tasks
(`generation.choose_split`), except that nothing is kept for a warm start: 80 % of the prompts are
for training, 10 % for the search, 10 % for the front. A prompt is in the same split whatever else
is in the file, and in whatever order. The data set's own splits do not matter here: `data.split`
names the one that all three are cut from.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, cast

from gdpo_tune.core.errors import DataError, get_first_line
from gdpo_tune.core.files import DATA_FILES, expand_home, list_data_files
from gdpo_tune.core.registry import describe_layout
from gdpo_tune.core.settings import DataSettings, TrainingSettings
from gdpo_tune.tasks.base import Problem, Split
from gdpo_tune.tasks.generation import choose_split

Row = Mapping[str, Any]
"""Column -> value, as JSON, Parquet or the `datasets` library give it."""
PlacedRow = tuple[str, Row]
"""Where a row stands, such as `train.jsonl:12`, and the row."""
LARGEST_SHARE_LEFT_OUT = 0.5
"""With more unusable rows than this share, the layout is probably not that of the data."""


@dataclass(frozen=True)
class CollectedData:
    """A data set whose rows have become problems."""

    splits: Mapping[Split, list[Problem]]
    """Problems with distinct prompts."""
    rows: int
    left_out: int
    """Rows that give no problem: an answer that cannot be parsed, a test that cannot be run."""
    first_left_out: str
    """Line, column and reason of the first of them; empty if there is none."""

    def __str__(self) -> str:
        prompts = sum(map(len, self.splits.values()))
        parts = ", ".join(f"{name} {len(problems)}" for name, problems in self.splits.items())
        left_out = f"; {self.left_out} left out ({self.first_left_out})" if self.left_out else ""
        return f"{self.rows} rows, {prompts} distinct prompts ({parts}){left_out}"


def select_problems(data: DataSettings, split: Split, count: int, seed: int) -> list[Problem]:
    """Return `count` problems of one split with distinct prompts, chosen by the seed.

    A smaller `count` gives the first of them. The order of the rows does not matter.

    Raises:
        DataError: the data cannot be read, or the split holds fewer prompts.
    """
    problems = _collect_once(data).splits.get(split, [])
    _require_enough(data, {split: (len(problems), count)})
    return shuffle_problems(problems, seed)[:count]


def describe_data(data: DataSettings) -> dict[str, str]:
    """Return provenance of the prompts, for a task's `environment`; nothing without a source.

    Raises:
        DataError: the data cannot be read or used.
    """
    return {"data": f"{data.source}: {_collect_once(data)}"} if data.source else {}


def check_data(
    data: DataSettings, training: TrainingSettings, modules: Collection[str] = ()
) -> None:
    """Refuse, before any work starts, data that would fail every trial.

    `modules` are those that a sandbox offers besides the standard library.

    Raises:
        DataError: the data cannot be read or used, a split holds too few prompts, or tests import
            other modules.
    """
    if not data.source:
        return
    sizes: dict[Split, tuple[int, int]] = {
        split: (len(problems), getattr(training, f"{split}_prompts"))
        for split, problems in _collect_once(data).splits.items()
    }
    _require_enough(data, sizes)
    offered = {name.partition(".")[0] for name in modules}
    problems = chain.from_iterable(_collect_once(data).splits.values())
    imported = {name for problem in problems for name in problem.data.get("modules", ())}
    if needed := sorted(name for name in imported if name.partition(".")[0] not in offered):
        names = ", ".join(needed)
        absent = [name for name in needed if find_spec(name.partition(".")[0]) is None]
        install = f", and install {', '.join(absent)}" if absent else ""
        raise DataError(
            f"data.source = {data.source}: tests import {names}, which the sandbox does not offer: "
            f"write sandbox: {{modules: [{', '.join([*modules, *needed])}]}}{install}"
        )


def collect_data(data: DataSettings) -> CollectedData:
    """Read a source and convert its rows with its layout.

    Of several rows with the same prompt the first one counts.

    Raises:
        DataError: the data cannot be read, holds no row, or most rows cannot be used.
    """
    layout = describe_layout(data.layout)
    splits: dict[Split, list[Problem]] = {"train": [], "validation": [], "test": []}
    seen: set[str] = set()
    rows, faults = 0, list[str]()
    for place, row in read_rows(data, layout.columns, layout.optional):
        rows += 1
        try:
            problem: Problem = layout.convert(row)
        except RowError as error:
            faults.append(f"{place}: {error}")
            continue
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            splits[choose_data_split(problem.prompt)].append(problem)
    if not rows:
        raise DataError(f"data.source = {data.source} holds no row: give one that does")
    if len(faults) > LARGEST_SHARE_LEFT_OUT * rows:
        raise DataError(
            f"data.source = {data.source}: {len(faults)} of {rows} rows cannot be used as layout "
            f"{data.layout}, the first is {faults[0]}: correct the data, or write its layout as "
            "data.layout"
        )
    return CollectedData(splits, rows, len(faults), faults[0] if faults else "")


_collect_once = lru_cache(maxsize=1)(collect_data)
"""Every split of a trial, and every trial of a process, reads the same data."""


def _require_enough(data: DataSettings, sizes: Mapping[Split, tuple[int, int]]) -> None:
    """Refuse splits that are too small; `sizes` is name -> (available, needed) prompts."""
    short = {name: size for name, size in sizes.items() if size[0] < size[1]}
    if not short:
        return
    listed = "; ".join(
        f"{available or 'no'} distinct {name} prompts where training.{name}_prompts = {count}"
        for name, (available, count) in short.items()
    )
    lower = ", ".join(f"training.{name}_prompts" for name, (size, _) in short.items() if size)
    fix = f"lower {lower}, or give" if lower else "give"
    raise DataError(f"data.source = {data.source} has {listed}: {fix} more data")


def choose_data_split(prompt: str) -> Split:
    """Return the split of a prompt."""
    name = choose_split(prompt)
    return "train" if name == "warm_start" else name


def shuffle_problems(problems: Iterable[Problem], seed: int) -> list[Problem]:
    """Return the problems in an order that the seed and their prompts decide."""
    return sorted(problems, key=lambda p: sha256(f"{seed}/{p.prompt}".encode()).digest())


# Rows, each with the line or number where a person finds it ---------------------------------------

_KINDS = " or ".join(DATA_FILES)


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
                try:
                    row = require_mapping(parse_json(line, "line"), "line")
                except RowError as error:
                    raise DataError(
                        f"{place}: {error.reason}: correct or remove the line (a file of JSON "
                        "lines has one object on each line)"
                    ) from error
                if is_first:
                    _choose_columns(place, required, (), row)
                    is_first = False
                yield place, {k: row[k] for k in (*required, *optional) if k in row}
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error


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


# Columns: each function returns a value of its kind, or raises `RowError` -------------------------

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
