"""Problems from a data set: read rows, convert each with a layout, assign it to a split.

A source is a data file, a directory of such files, a clone of a data set on the Hub, what
`save_to_disk` of `datasets` wrote, or the id of a data set on the Hub.

Splits are disjoint by a hash of the prompt. They are those of the embedded tasks
(`generation.choose_split`), except that nothing is kept for a warm start: 80 % of the prompts are
for training, 10 % for the search, 10 % for the front. A prompt is in the same split whatever else
is in the file, and in whatever order. `data.split` names the split of the data set that all three
are cut from. Where `data.validation` or `data.test` names one of the data set's own, that is used
as it is, and its prompts are left out of the others.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import json
import logging
import math
import re
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from gdpo_tune.core.errors import DataError, get_first_line
from gdpo_tune.core.files import (
    DATA_KINDS,
    expand_home,
    is_data_file,
    is_directory,
    is_local_source,
    list_data_files,
)
from gdpo_tune.core.prompt_template import fill_template, list_template_columns
from gdpo_tune.core.registry import LAYOUTS, describe_layout
from gdpo_tune.core.settings import DataSettings, TrainingSettings
from gdpo_tune.tasks.base import Problem, Split
from gdpo_tune.tasks.generation import choose_split

Row = Mapping[str, Any]
"""Column -> value, as JSON, CSV, Parquet or the `datasets` library give it."""
PlacedRow = tuple[str, Row]
"""Where a row stands, such as `train.jsonl:12`, and the row."""
LARGEST_SHARE_LEFT_OUT = 0.5
"""With more unusable rows than this share, the layout is probably not that of the data. With more
held-out prompts than this share in the training rows, both are probably the same split."""


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
    shared: int = 0
    """Prompts of a held-out split that were left out of another one."""

    def __str__(self) -> str:
        prompts = sum(map(len, self.splits.values()))
        parts = ", ".join(f"{name} {len(problems)}" for name, problems in self.splits.items())
        shared = f"; {self.shared} held-out prompts left out of training" if self.shared else ""
        left_out = f"; {self.left_out} left out ({self.first_left_out})" if self.left_out else ""
        return f"{self.rows} rows, {prompts} distinct prompts ({parts}){shared}{left_out}"


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


def check_data(data: DataSettings, training: TrainingSettings) -> None:
    """Refuse, before any work starts, data that would fail every trial.

    Raises:
        DataError: the data cannot be read or used, or a split holds too few prompts.
    """
    if not data.source:
        return
    sizes: dict[Split, tuple[int, int]] = {
        split: (len(problems), getattr(training, f"{split}_prompts"))
        for split, problems in _collect_once(data).splits.items()
    }
    _require_enough(data, sizes)


def collect_data(data: DataSettings) -> CollectedData:
    """Read a source and convert its rows with its layout; see `collect_problems`.

    Raises:
        DataError: the data cannot be read, holds no row, or most rows cannot be used.
    """
    layout = describe_layout(data.layout)
    try:
        return collect_problems(
            *(data, layout.convert, layout.columns, layout.optional, layout.one_of),
            keeps_messages=layout.keeps_messages,
        )
    except MissingColumnsError as error:
        fitting = [
            name
            for name in LAYOUTS
            if (info := describe_layout(name)).fits(error.present)
            and {*info.tasks} & {*layout.tasks}
        ]
        if not fitting or error.is_mapped:
            raise
        fits = f"these are the columns of layout {' or '.join(fitting)}"
        raise DataError(f"{error}; or, as {fits}, write that as data.layout") from error


def collect_problems(
    data: DataSettings,
    convert: Callable[[Row], Problem],
    required: tuple[str, ...],
    optional: tuple[str, ...],
    one_of: tuple[str, ...] = (),
    *,
    keeps_messages: bool = False,
) -> CollectedData:
    """Read a source and convert its rows; the arguments are those of a `LayoutInfo`.

    Of several rows with the same prompt the first one counts. Of a prompt in several splits the
    row in `data.test` counts, then that in `data.validation`. Such prompts are compared without
    regard to case and white space.

    Raises:
        DataError: the data cannot be read, holds no row, or most rows cannot be used.
        DataError: most held-out prompts are training prompts too.
    """
    splits: dict[Split, list[Problem]] = {"train": [], "validation": [], "test": []}
    own = [split for split in ("test", "validation") if _get_held_out(data, split)]
    seen: dict[str, Split] = {}
    rows, faults, shared = 0, list[str](), dict[str, str]()
    for part in (*own, "train"):
        for place, row in read_rows(
            data, required, optional, one_of, part=part, keeps_messages=keeps_messages
        ):
            rows += 1
            try:
                problem = convert_row(convert, row)
            except RowError as error:
                faults.append(f"{place}: {error}")
                continue
            key = " ".join(problem.prompt.casefold().split()) if own else problem.prompt
            if key in seen:
                if seen[key] != part:
                    shared.setdefault(key, f"{problem.prompt.strip()!r} ({place})")
                continue
            seen[key] = part
            split = choose_data_split(problem.prompt) if part == "train" else part
            splits["train" if part == "train" and split in own else split].append(problem)
    if not rows:
        raise DataError(f"data.source = {data.source} holds no row: give one that does")
    if len(faults) > LARGEST_SHARE_LEFT_OUT * rows:
        raise DataError(
            f"data.source = {data.source}: {len(faults)} of {rows} rows cannot be used as layout "
            f"{data.layout}, the first is {faults[0]}: correct the data, or write its layout as "
            "data.layout"
        )
    held_out = sum(len(splits[part]) for part in own)
    if len(shared) > LARGEST_SHARE_LEFT_OUT * held_out:
        raise DataError(
            f"{' and '.join(f'data.{part}' for part in own)}: {len(shared)} of {held_out} prompts "
            f"are in another split too, the first is {next(iter(shared.values()))}: a policy would "
            "be measured on what it was trained on: name other splits or sources"
        )
    return CollectedData(splits, rows, len(faults), faults[0] if faults else "", len(shared))


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

Select = Callable[[str, Collection[str]], list[str]]
"""Returns the columns to read of those at a place; refuses a place that lacks one."""
TURNS = "turns"
"""Key of a row that holds the messages of its prompt, where these are a conversation."""


def read_rows(
    data: DataSettings,
    required: tuple[str, ...],
    optional: tuple[str, ...],
    one_of: tuple[str, ...] = (),
    *,
    part: Split = "train",
    keeps_messages: bool = False,
) -> Iterator[PlacedRow]:
    """Yield the rows of a source, in order, with the columns of a layout alone, by its names.

    `part` is `train` for `data.split`, from which splits are cut, or a split that is held out as it
    is. The first required column is the prompt. It becomes the text of its last user message if
    it is a list of messages, which are then the row's `TURNS`; `keeps_messages` leaves the list.

    Raises:
        DataError: the source cannot be read, or lacks a required column.
    """
    held_out = _get_held_out(data, part)
    source = (held_out and held_out.source) or data.source
    split = (held_out.split or part) if held_out else data.split
    names = tuple(dict.fromkeys((*required, *one_of, *optional)))
    table = _read_local if is_local_source(source) else _read_hub

    def select(place: str, present: Collection[str]) -> list[str]:
        return _choose_columns(data, place, required, one_of, names, present)

    for place, row in table(source, data.config, split, select):
        yield place, name_columns(data, row, names, keeps_messages=keeps_messages)


def _get_held_out(data: DataSettings, part: Split) -> Any:
    """Return the setting of a split that is held out as it is; None where it is cut by a hash."""
    setting = getattr(data, part, None)
    return setting if setting and (setting.split or setting.source) else None


def _read_local(source: str, config: str, split: str, select: Select) -> Iterator[PlacedRow]:
    path = expand_home(source)
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        yield from _read_saved(path, split, select)
        return
    files = list_data_files(path)
    if not files:
        raise DataError(
            f"data.source = {path}: no such file, or a directory without a {DATA_KINDS} file: give "
            "the path of one"
        )
    for file in _choose_files(path, config, split) if is_directory(path) else files:
        read = _read_parquet if file.suffix.lower() == ".parquet" else _read_text
        yield from read(file, select)


def _choose_files(directory: Path, config: str, split: str) -> list[Path]:
    """Return the files of a split, as `load_dataset(directory)` chooses them by their names."""
    from datasets import load_dataset_builder
    from datasets.data_files import DataFilesDict, get_data_patterns

    base: str = directory.resolve().as_posix()
    try:
        if (directory / "README.md").is_file():  # it may list configurations and their files
            with TemporaryDirectory() as cache, _silence_client():
                library: Any = load_dataset_builder
                found: Any = library(base, config or None, cache_dir=cache).config.data_files
        else:
            suffixes = sorted({file.suffix for file in list_data_files(directory)} | {".jsonl"})
            found = DataFilesDict.from_patterns(get_data_patterns(base), base, suffixes)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"data.source = {directory}{f', config {config}' if config else ''}: "
            f"{get_first_line(error)}: name the file itself as data.source, or correct data.config"
        ) from error
    listed = {str(name): sorted(map(Path, files)) for name, files in found.items()}
    splits = {name: [f for f in files if is_data_file(f)] for name, files in listed.items()}
    chosen = _select_splits(directory, split, {n: files for n, files in splits.items() if files})
    return list(chain.from_iterable(chosen))


def _select_splits(source: Path, split: str, present: Mapping[str, Any]) -> list[Any]:
    """Return the parts that a split such as `train+validation` names."""
    names = [name.strip() for name in split.split("+")]
    missing = [name for name in names if name not in present]
    if missing:
        raise DataError(
            f"data.source = {source}: no split {', '.join(missing)}; by the names of its files "
            f"there are {', '.join(present) or 'none'}: write one of them as split, or the file "
            "itself as source"
        )
    return [present[name] for name in names]


def _read_saved(directory: Path, split: str, select: Select) -> Iterator[PlacedRow]:
    """Read what `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    from datasets import load_from_disk

    try:
        saved: Any = load_from_disk(str(directory))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = get_first_line(error)
        raise DataError(f"{directory} cannot be read as a saved data set: {reason}") from error
    parts = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
    if not isinstance(saved, dict) and split == "train":
        parts["train"] = saved  # a single table is all there is
    for table in _select_splits(directory, split, parts):
        columns = select(str(directory), table.column_names)
        for number, row in enumerate(table.select_columns(columns), 1):
            yield f"{directory} row {number}", row


# `datasets` reads these files too, but one type for each column: 2021-01-01 becomes a time, 007 a
# number, a key that is missing None, and values of two types an error without a line. It also
# copies every file to its cache.
def _read_text(file: Path, select: Select) -> Iterator[PlacedRow]:
    """Read JSON lines, a JSON list, or CSV with a head. Columns are those of the first row."""
    name, is_first = file.name.lower(), True
    try:
        with gzip.open(file) if name.endswith(".gz") else file.open("rb") as stream:
            if stream.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise DataError(f"{file}: it is UTF-16, as Windows writes it: save it as UTF-8")
            stream.seek(0)
            if name.endswith(".csv"):
                rows = _read_csv(file, cast("io.BufferedReader", stream))
            else:
                rows = _read_json(file, cast("io.BufferedReader", stream))
            for place, row in rows:
                if is_first:
                    select(place, row)
                    is_first = False
                yield place, row
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {get_first_line(error)}") from error


def _read_json(file: Path, stream: io.BufferedReader) -> Iterator[PlacedRow]:
    lines: Iterable[bytes] = stream
    if ".jsonl" not in file.name.lower():
        content = stream.read()
        if content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            try:
                for number, row in enumerate(parse_json(content, "file"), 1):
                    yield f"{file} row {number}", require_mapping(row, f"row {number}")
            except RowError as error:
                raise DataError(f"{file}: {error.reason} ({error.column}): correct it") from error
            return
        lines = io.BytesIO(content)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = require_mapping(parse_json(line, "line"), "line")
        except RowError as error:
            raise DataError(
                f"{file}:{number}: {error.reason}: correct or remove the line (a file of JSON "
                "lines has one object on each line)"
            ) from error
        yield f"{file}:{number}", row


def _read_csv(file: Path, stream: io.BufferedReader) -> Iterator[PlacedRow]:
    csv.field_size_limit(1 << 30)
    reader = csv.DictReader(io.TextIOWrapper(stream, "utf-8-sig", newline=""), strict=True)
    try:
        for row in reader:
            if None in row:
                raise csv.Error("more values than the first line has columns")
            yield f"{file}:{reader.line_num}", row
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{file}:{reader.line_num}: not CSV in UTF-8: {error}") from error


def _read_parquet(file: Path, select: Select) -> Iterator[PlacedRow]:
    import pyarrow
    from pyarrow import parquet

    library: Any = parquet  # comes without types
    try:
        with library.ParquetFile(file) as table:
            columns = select(str(file), table.schema_arrow.names)
            batches = table.iter_batches(batch_size=1024, columns=columns)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, 1):
                yield f"{file} row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{file} cannot be read as Parquet: {get_first_line(error)}") from error


def _read_hub(source: str, config: str, split: str, select: Select) -> Iterator[PlacedRow]:
    from datasets import load_dataset

    try:
        with _silence_client():
            table: Any = load_dataset(source, config or None, split=split)
    # The library's errors: no network, no such data set, no right to it (all OSErrors); an unknown
    # configuration or split; a loading script.
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"data.source = {source} (config {config or 'none'}, split {split}) "
            f"cannot be loaded from the Hub: {get_first_line(error)}. Check the three keys and "
            "the network, or download the data on a machine with a network and give a "
            f"{DATA_KINDS} file as data.source"
        ) from error
    name = f"{source} ({split})"
    columns = select(name, table.column_names)
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


# Columns of the file by the names of the layout --------------------------------------------------

MESSAGES = "messages"
"""Column of conversations, as TRL and most trainers name it."""
SYNONYMS = (
    ("problem", "question", "prompt", "input", "query", "text", "instruction", "description"),
    ("answer", "final_answer", "target", "gold", "expected_answer", "ground_truth", "label"),
    ("solution", "rationale", "reasoning", "response", "output", "cot"),
    ("code", "canonical_solution", "program"),
    ("body", "context", "passage"),
)
"""Names by which data sets call the same column."""


class MissingColumnsError(DataError):
    """Data that lack columns of their layout."""

    def __init__(self, message: str, present: Collection[str], is_mapped: bool) -> None:
        super().__init__(message)
        self.present, self.is_mapped = tuple(present), is_mapped


def _choose_columns(
    data: DataSettings,
    place: str,
    required: tuple[str, ...],
    one_of: tuple[str, ...],
    names: tuple[str, ...],
    present: Collection[str],
) -> list[str]:
    """Return the columns of the file to read; refuse rows that lack one."""
    columns = {name: data.columns.get(name, name) for name in names}
    composed = list_template_columns(data.prompt_template)
    known = {name for name, column in columns.items() if column in present}
    if composed or MESSAGES in present:
        known.add(required[0])
    if MESSAGES in present:
        known |= {"answer", "solution"}  # what the assistant says
    there = f"there are {', '.join(present) or 'none'}"
    named = [*composed, *(c for name, c in data.columns.items() if name in names)]
    if unknown := [column for column in named if column not in present]:
        close = difflib.get_close_matches(unknown[0], list(present), n=1)
        guess = f"did you mean {close[0]}? " if close else ""
        raise MissingColumnsError(
            f"{place}: no column {', '.join(unknown)}, which data.columns or data.prompt_template "
            f"names; {there}: {guess}write one that exists",
            present,
            is_mapped=True,
        )
    missing = [name for name in required if name not in known]
    if one_of and known.isdisjoint(one_of):
        missing.append(" or ".join(one_of))
    if missing:
        proposed = propose_columns([*required, *one_of], present)
        lines = ", ".join(f"{name}: {column}" for name, column in proposed.items())
        fix = f"columns: {{{lines}}}" if lines else "the layout that these have as data.layout"
        raise MissingColumnsError(
            f"{place}: no column {', '.join(missing)}; {there}: write {fix}",
            present,
            is_mapped=bool(data.columns),
        )
    chosen = [*columns.values(), *composed, *([MESSAGES] if required[0] not in present else [])]
    return [column for column in dict.fromkeys(chosen) if column in present]


def propose_columns(names: Iterable[str], present: Collection[str]) -> dict[str, str]:
    """Return column of a layout -> column that probably stands for it, for those that lack one."""
    proposed: dict[str, str] = {}
    lower = {column.lower(): column for column in reversed([*present])}
    for name in names:
        if name in present:
            continue
        group = next((group for group in SYNONYMS if name.lower() in group), (name.lower(),))
        similar = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.75)
        for candidate in (name.lower(), *group, *similar):
            column = lower.get(candidate)
            if column is not None and column not in {*proposed.values(), *names}:
                proposed[name] = column
                break
    return proposed


def name_columns(
    data: DataSettings, row: Row, names: Sequence[str], *, keeps_messages: bool = False
) -> Row:
    """Return a row of the data with the `names` of a layout, of which the first is the prompt."""
    columns = {name: data.columns.get(name, name) for name in names}
    named = {name: row[column] for name, column in columns.items() if column in row}
    if data.prompt_template:
        named[names[0]] = fill_template(data.prompt_template, row)
    prompt = named.get(names[0], row.get(MESSAGES))
    if isinstance(prompt, list) and not keeps_messages:
        messages = cast("list[Any]", prompt)
        match messages:
            case [*before, {"role": "assistant", "content": answer}]:
                messages = before
                free = next(
                    (n for n in ("solution", "answer") if n in names and n not in named), ""
                )
                named |= {free: answer} if free else {}
            case _:
                pass
        named[names[0]] = messages
        match messages:
            case [*before, {"role": "user", "content": str(text)}] if all(map(_is_turn, before)):
                named[names[0]] = text
                named |= {TURNS: messages} if before else {}
            case _:
                pass  # the layout says that it is no text
    return named


def _is_turn(message: object) -> bool:
    match message:
        case {"role": str(), "content": str()}:
            return True
        case _:
            return False


def convert_row(convert: Callable[[Row], Problem], row: Row) -> Problem:
    """Return the problem of a row of `read_rows`, as a conversation if its prompt is one.

    The last message has what the layout adds to a prompt, such as a test to pass.
    """
    problem = convert(row)
    if not (turns := row.get(TURNS)):
        return problem
    last = {"role": "user", "content": problem.prompt.strip()}
    turns = [*({"role": one["role"], "content": one["content"]} for one in turns[:-1]), last]
    text = "\n\n".join(f"{one['role']}: {one['content']}" for one in turns)
    return replace(problem, prompt=f"{text}\n", turns=turns)


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


def get_answer(row: Row, column: str) -> str:
    """Return an answer as a text: a text, a number, or a list of them, separated by commas.

    A number is written plainly: 27.0 is `27`.
    """
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
