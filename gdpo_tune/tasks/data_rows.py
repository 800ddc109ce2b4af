"""Problems from a data set: read rows, convert each with a layout, assign it to a split.

A source is a data file, a directory of such files, a clone of a data set on the Hub, what
`save_to_disk` of `datasets` wrote, or the id of a data set on the Hub.

Splits are disjoint by a hash of the prompt, whatever its case and white space and whatever else is
in the file: 80 % of the prompts are for training, 10 % for the search, 10 % for the front. They are
cut from `data.split`. Where `data.validation` or `data.test` names a split of the data set's own,
that is used as it is, and its prompts are left out of the others.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import glob
import gzip
import io
import json
import logging
import re
import string
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from gdpo_tune.core.errors import DataError, get_first_line
from gdpo_tune.core.files import (
    DATA_KINDS,
    expand_path,
    is_data_file,
    is_directory,
    is_local_source,
    list_data_files,
)
from gdpo_tune.core.task_info import LayoutInfo
from gdpo_tune.core.text import join_turns, list_template_columns
from gdpo_tune.tasks.base import Problem, Split
from gdpo_tune.tasks.columns import Row, RowError, get_text, parse_json, require_mapping
from gdpo_tune.tasks.generation import choose_row_split, normalize_prompt

if TYPE_CHECKING:
    from gdpo_tune.core.settings import DataSettings

PlacedRow = tuple[str, Row]
"""Where a row stands, such as `train.jsonl:12`, and the row."""
LARGEST_SHARE_LEFT_OUT = 0.5
"""Of unusable rows, beyond which the layout is probably wrong; of held-out prompts among those of
training, beyond which both are probably the same split; of texts that are too long, beyond which
the rest no longer represents the task."""


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
    unread: tuple[str, ...] = ()
    """Columns that nothing reads."""

    def __str__(self) -> str:
        prompts = sum(map(len, self.splits.values()))
        parts = ", ".join(f"{name} {len(problems)}" for name, problems in self.splits.items())
        shared = f"; {self.shared} held-out prompts left out of training" if self.shared else ""
        left_out = f"; {self.left_out} left out ({self.first_left_out})" if self.left_out else ""
        unread = f"; not read: {', '.join(self.unread)}" if self.unread else ""
        return f"{self.rows} rows, {prompts} distinct prompts ({parts}){shared}{left_out}{unread}"


def collect_problems(data: DataSettings, layout: LayoutInfo) -> CollectedData:
    """Read a source and convert its rows.

    Of several rows with the same prompt the first one counts. Of a prompt in several splits the
    row in `data.test` counts, then that in `data.validation`; case and white space do not matter.

    Raises:
        DataError: the data cannot be read or hold no row, a prompt lacks its picture or choices,
            most rows cannot be used, or most held-out prompts are in another split too.
    """
    splits: dict[Split, list[Problem]] = {"train": [], "validation": [], "test": []}
    held_out = list_parts(data)
    seen: dict[str, Split] = {}
    prompts, unread = set[str](), dict[str, None]()
    rows, faults, shared = 0, list[str](), dict[str, str]()
    for part in (*held_out, "train"):
        for place, row in read_rows(data, layout, part, unread):
            rows += 1
            try:
                problem = convert_row(layout, row)
            except RowError as error:
                faults.append(f"{place}: {error}")
                continue
            key = normalize_prompt(problem.prompt)
            if seen.setdefault(key, part) != part:
                shared.setdefault(key, f"{problem.prompt.strip()!r} ({place})")
            elif problem.prompt not in prompts:
                prompts.add(problem.prompt)
                cut = choose_row_split(problem.prompt) if part == "train" else part
                splits[part if cut in held_out else cut].append(problem)
    if not rows:
        raise DataError(f"data.source = {data.source} holds no row: give one that does")
    if len(faults) > LARGEST_SHARE_LEFT_OUT * rows:
        raise DataError(
            f"data.source = {data.source}: {len(faults)} of {rows} rows cannot be used as layout "
            f"{data.layout}, the first is {faults[0]}: correct the data, or write its layout as "
            "data.layout"
        )
    count = sum(len(splits[name]) for name in held_out)
    if len(shared) > LARGEST_SHARE_LEFT_OUT * count:
        raise DataError(
            f"data.{' and data.'.join(held_out)}: {len(shared)} of {count} prompts are in another "
            f"split too, the first is {next(iter(shared.values()))}: a policy would be measured on "
            "what it was trained on: name other splits or sources"
        )
    first = faults[0] if faults else ""
    return CollectedData(splits, rows, len(faults), first, len(shared), tuple(unread))


def list_parts(data: DataSettings) -> list[Split]:
    """Return the splits that are held out as the data set has them."""
    parts: list[Split] = ["test", "validation"]
    return [name for name in parts if (own := getattr(data, name)).split or own.source]


def shuffle_problems(problems: Iterable[Problem], seed: int) -> list[Problem]:
    """Return the problems in an order that the seed and their prompts decide."""
    return sorted(problems, key=lambda p: sha256(f"{seed}/{p.prompt}".encode()).digest())


# Rows, each with the line or number where a person finds it ---------------------------------------

Select = Callable[[str, Collection[str]], list[str]]
"""Returns the columns to read of those at a place; refuses a place that lacks one."""
_UNSEEN = re.compile(r"(?i)(image|picture|photo|video|audio)s?(_?\d+)?|choices|options")
"""Name of a column without which its prompt cannot be answered."""
_PICTURE_REASON = "what a policy of text cannot see: remove such rows, or the column"
_CHOICES_REASON = (
    "choices that its prompt lacks: name the column in data.prompt_template, or write them into "
    "the prompt, and the answer as it stands there"
)
_MESSAGES_AS_TEXT = re.compile(r'\s*\[\s*\{\s*"(?:role|content)"')
TURNS, MESSAGES = "turns", "messages"
"""Key of a row for the messages of its prompt; column of conversations, as TRL names it."""


def read_rows(
    data: DataSettings,
    layout: LayoutInfo,
    part: Split = "train",
    unread: dict[str, None] | None = None,
) -> Iterator[PlacedRow]:
    """Yield the rows of a source, in order, by the names of the layout's columns.

    `part` is `train` for `data.split`, or a split that is held out as it is. `unread` gets the
    columns that nothing reads.

    Raises:
        DataError: the source cannot be read, lacks a required column, or has what the prompts lack.
    """
    names = (*layout.columns, *layout.optional)
    columns = {name: data.columns.get(name, name) for name in names}
    composed = list_template_columns(data.prompt_template)

    def select(place: str, present: Collection[str]) -> list[str]:
        known = {name for name, column in columns.items() if column in present}
        if composed:
            known.add(names[0])
        if MESSAGES in present and not layout.keeps_messages:  # the last may be the answer
            known |= {names[0], "answer", "solution"}
        missing = [name for name in layout.columns if name not in known]
        if layout.one_of and known.isdisjoint(layout.one_of):
            missing.append(" or ".join(layout.one_of))
        stated = [*composed, *(columns[name] for name in data.columns if name in columns)]
        unknown = [column for column in stated if column not in present]
        if missing or unknown:
            proposed = propose_columns([*layout.columns, *layout.one_of], present)
            lines = ", ".join(f"{name}: {column}" for name, column in proposed.items())
            fix = f"columns: {{{lines}}}" if lines else "which columns are meant as data.columns"
            if close := propose_columns(unknown, present):
                fix = f"{', '.join(close.values())} instead, or {fix}"
            raise MissingColumnsError(
                f"{place}: no column {', '.join(unknown or missing)}; there are "
                f"{', '.join(present) or 'none'}: write {fix}",
                present,
            )
        read = {*columns.values(), *composed, *(() if layout.keeps_messages else [MESSAGES])}
        others = [column for column in present if column not in read]
        if unread is not None:
            unread.update(dict.fromkeys(others))
        unseen.update(filter(_UNSEEN.fullmatch, others))
        return [column for column in present if column in read or column in unseen]

    unseen: set[str] = set()
    own: Any = data if part == "train" else getattr(data, part)
    source, split = own.source or data.source, own.split or part
    read = read_local if is_local_source(source) else _read_hub
    config = data.config if source == data.source else ""
    for place, row in read(source, config, split, select):
        if found := sorted(name for name in unseen if row.get(name) not in (None, "", [])):
            choices = found[0].lower() in ("choices", "options")
            reason = _CHOICES_REASON if choices else _PICTURE_REASON
            raise DataError(f"{place}: column {found[0]} holds {reason}")
        yield place, name_columns(data, row, layout)


def read_local(source: str, config: str, split: str, select: Select) -> Iterator[PlacedRow]:
    """Yield the rows of a split of a file or directory, as they are in it.

    Raises:
        DataError: it cannot be read, or has no such split.
    """
    path = expand_path(source)
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
    from yaml import YAMLError

    base, library = directory.resolve().as_posix(), cast("Any", load_dataset_builder)
    try:
        if (directory / "README.md").is_file():  # it may list configurations and their files
            with TemporaryDirectory() as cache:
                found: Any = library(base, config or None, cache_dir=cache).config.data_files
        else:
            suffixes = [file.suffix for file in list_data_files(directory)]
            base = glob.escape(base)
            found = DataFilesDict.from_patterns(get_data_patterns(base), base, suffixes)
    except (OSError, ValueError, RuntimeError, YAMLError) as error:
        raise DataError(
            f"data.source = {directory}: {' '.join(str(error).split())[:300]}: correct "
            "data.config, or name a file itself as data.source"
        ) from error
    splits = {str(k): sorted(filter(is_data_file, map(Path, v))) for k, v in found.items()}
    chosen = _select_splits(directory, split, {k: files for k, files in splits.items() if files})
    return list(chain.from_iterable(chosen))


def _select_splits(source: Path, split: str, present: Mapping[str, Any]) -> list[Any]:
    names = [name.strip() for name in split.split("+")]
    if missing := [name for name in names if name not in present]:
        raise DataError(
            f"data.source = {source}: no split {', '.join(missing)}; by the names of its files "
            f"there are {', '.join(present) or 'none'}: write one of them as split, or a file "
            "itself as source"
        )
    return [present[name] for name in names]


def _read_saved(directory: Path, split: str, select: Select) -> Iterator[PlacedRow]:
    from datasets import load_from_disk

    try:
        saved: Any = load_from_disk(str(directory))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = get_first_line(error)
        raise DataError(f"{directory} cannot be read as a saved data set: {reason}") from error
    if not isinstance(saved, dict):  # a single table is all that there is
        saved = {"train": saved, str(saved.split or "train"): saved}
    for table in _select_splits(directory, split, saved):
        yield from _read_table(str(directory), table, select)


def _read_table(name: str, table: Any, select: Select) -> Iterator[PlacedRow]:
    columns = select(name, table.column_names)
    for number, row in enumerate(table.select_columns(columns).with_format(None), 1):
        yield f"{name} row {number}", row


# `datasets` reads these files too, but with one type for each column: 2021-01-01 becomes a time,
# 007 a number, a missing key None, and values of two types an error without a line. It also
# copies every file to its cache.
def _read_text(file: Path, select: Select) -> Iterator[PlacedRow]:
    """Read JSON lines, a JSON list, or CSV with a head. Columns are those of the first row."""
    name = file.name.lower()
    try:
        with gzip.open(file) if name.endswith(".gz") else file.open("rb") as opened:
            raw = cast("io.BytesIO", opened)
            if raw.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise DataError(f"{file}: it is UTF-16, as Windows writes it: save it as UTF-8")
            raw.seek(0)
            rows = (_read_csv if name.endswith(".csv") else _read_json)(file, raw)
            for first in islice(rows, 1):
                select(*first)
                yield first
            yield from rows
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {get_first_line(error)}") from error


def _read_json(file: Path, stream: io.BytesIO) -> Iterator[PlacedRow]:
    numbered: Iterable[tuple[str, Any]] = (
        (f"{file}:{n}", line) for n, line in enumerate(stream, 1)
    )
    if ".jsonl" not in file.name.lower():
        content = stream.read()
        stream.seek(0)
        if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            try:
                rows = parse_json(content, "")
            except RowError as error:
                raise DataError(f"{file}: {error.reason}: correct it") from error
            numbered = ((f"{file} row {number}", row) for number, row in enumerate(rows, 1))
    for place, line in numbered:
        if isinstance(line, bytes) and not line.strip():
            continue
        try:
            row = require_mapping(parse_json(line, "line"), "line")
        except RowError as error:
            raise DataError(
                f"{place}: {error.reason}: correct or remove the line (a file of JSON "
                "lines has one object on each line)"
            ) from error
        yield place, row


def _read_csv(file: Path, stream: io.BytesIO) -> Iterator[PlacedRow]:
    csv.field_size_limit(1 << 30)
    reader = csv.DictReader(codecs.iterdecode(stream, "utf-8-sig"), strict=True)
    try:
        names = [*(reader.fieldnames or ())]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise csv.Error(f"two columns have the name {', '.join(twice)}")
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

    # The client's notes on each retry stay off the terminal; the last error is reported.
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
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
    finally:
        logger.setLevel(before)
    yield from _read_table(f"{source} ({split})", table, select)


# Columns of the file by the names of the layout --------------------------------------------------

SYNONYMS = (
    ("problem", "question", "prompt", "input", "query", "text", "instruction", "description"),
    ("answer", "final_answer", "target", "gold", "expected_answer", "ground_truth", "result"),
    ("solution", "rationale", "reasoning", "response", "output", "cot"),
    ("code", "canonical_solution", "program"),
    ("body", "context", "passage"),
)
"""Names by which data sets call the same column."""


class MissingColumnsError(DataError):
    """Data that lack columns; `present` are those that there are.

    `cli.name_file` and `pickle` make such an error of the message alone.
    """

    def __init__(self, message: str, present: Collection[str] = ()) -> None:
        super().__init__(message)
        self.present = tuple(present)


def propose_columns(names: Iterable[str], present: Collection[str]) -> dict[str, str]:
    """Return column of a layout -> column that probably stands for it, for those that lack one."""
    proposed: dict[str, str] = {}
    by_lower = {column.lower(): column for column in reversed([*present])}
    for name in (name for name in names if name not in present):
        group = next((group for group in SYNONYMS if name.lower() in group), ())
        close = difflib.get_close_matches(name.lower(), [*by_lower], n=1, cutoff=0.75)
        likely = (by_lower.get(one, name) for one in (name.lower(), *group, *close))
        free = [column for column in likely if column not in {*proposed.values(), *names}]
        if free:
            proposed[name] = free[0]
    return proposed


def name_columns(data: DataSettings, row: Row, layout: LayoutInfo) -> Row:
    """Return a row of the data by the names of a layout, of which the first is the prompt.

    A template writes what is no text as JSON, and None as nothing. Messages become the text of the
    last one and the row's `TURNS`; what an assistant says at the end is a missing solution.
    """
    names = (*layout.columns, *layout.optional)
    columns = {name: data.columns.get(name, name) for name in names}
    named = {name: row[column] for name, column in columns.items() if column in row}
    if data.prompt_template:
        named[names[0]] = ""
        for literal, name, *_ in string.Formatter().parse(data.prompt_template):
            value = None if name is None else row.get(name)
            if value is not None and not isinstance(value, str):
                value = json.dumps(value, ensure_ascii=False, default=str)
            named[names[0]] += literal + (value or "")
    messages: Any = named.get(names[0], row.get(MESSAGES))
    if isinstance(messages, str) and _MESSAGES_AS_TEXT.match(messages):
        with suppress(RowError):  # it is a text that looks like messages
            messages = parse_json(messages, names[0])
    if layout.keeps_messages or not isinstance(messages, list):
        return named
    try:
        turns = [_read_turn(one) for one in messages]
    except (RowError, AttributeError):
        turns = []
    if turns and turns[-1]["role"] == "assistant":
        free = [name for name in ("solution", "answer") if name in names and name not in named]
        named |= dict.fromkeys(free[:1], turns.pop()["content"])
    text = turns[-1]["content"] if turns else messages  # the layout says that it is no text
    return {**named, names[0]: text, TURNS: turns}


def _read_turn(message: Mapping[str, Any]) -> dict[str, str]:
    """Return role and text of a message, whose content may be a list of parts that are texts."""
    content: Any = message.get("content")
    if isinstance(content, list):
        parts: list[Any] = content
        message = {**message, "content": "".join(get_text(part, "text") for part in parts)}
    return {key: get_text(message, key) for key in ("role", "content")}


def convert_row(layout: LayoutInfo, row: Row) -> Problem:
    """Return the problem of a row of `read_rows`, as a conversation if its prompt is one.

    The last message has what the layout adds to a prompt, such as a test to pass.
    """
    problem: Problem = layout.convert(row)
    turns = [*row.get(TURNS, ())]
    if len(turns) < 2:
        return problem
    turns[-1] = {**turns[-1], "content": problem.prompt.strip()}
    return replace(problem, prompt=f"{join_turns(turns)}\n", turns=turns)
