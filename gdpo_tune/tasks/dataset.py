"""Prompts of a task from the data set of a sweep, and the choice of its layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain, islice
from typing import TYPE_CHECKING

from gdpo_tune.core.errors import DataError, UsageError
from gdpo_tune.core.files import expand_path, path_exists
from gdpo_tune.core.registry import LAYOUTS, describe_layout
from gdpo_tune.tasks import data_rows
from gdpo_tune.tasks.base import Problem, Split
from gdpo_tune.tasks.columns import RowError

if TYPE_CHECKING:
    from gdpo_tune.core.settings import DataSettings, TrainingSettings


def select_problems(data: DataSettings, split: Split, count: int, seed: int) -> list[Problem]:
    """Return `count` problems of one split, chosen by the seed whatever the order of the rows.

    Raises:
        DataError: the data cannot be read, or the split holds fewer prompts.
    """
    problems = collect_once(data).splits.get(split, [])
    _require_enough(data, {split: (len(problems), count)})
    return data_rows.shuffle_problems(problems, seed)[:count]


def describe_data(data: DataSettings) -> dict[str, str]:
    """Return provenance of the prompts, for a task's `environment`; nothing without a source.

    Raises:
        DataError: the data cannot be read or used.
    """
    return {"data": f"{data.source}: {collect_once(data)}"} if data.source else {}


def check_data(data: DataSettings, training: TrainingSettings, modules: Collection[str]) -> None:
    """Refuse data that would fail every trial.

    Raises:
        DataError: the data cannot be read or used, a split holds too few prompts, or tests import
            other modules than the standard library and `modules`.
    """
    if not data.source:
        return
    splits = collect_once(data).splits
    _require_enough(
        data, {k: (len(each), getattr(training, f"{k}_prompts")) for k, each in splits.items()}
    )
    offered = {name.partition(".")[0] for name in modules}
    problems = chain.from_iterable(splits.values())
    imported = {name for problem in problems for name in problem.data.get("modules", ())}
    if needed := sorted(name for name in imported if name.partition(".")[0] not in offered):
        names = ", ".join(needed)
        absent = [name for name in needed if find_spec(name.partition(".")[0]) is None]
        install = f", and install {', '.join(absent)}" if absent else ""
        raise DataError(
            f"data.source = {data.source}: tests import {names}, which the sandbox does not offer: "
            f"write sandbox: {{modules: [{', '.join([*modules, *needed])}]}}{install}"
        )


def collect_data(data: DataSettings) -> data_rows.CollectedData:
    """Read a source and convert its rows with its layout; see `collect_problems`.

    Raises:
        DataError: the data cannot be read, holds no row, or most rows cannot be used.
    """
    layout = describe_layout(data.layout)
    try:
        return data_rows.collect_problems(data, layout)
    except data_rows.MissingColumnsError as error:
        layouts = {name: describe_layout(name) for name in LAYOUTS}
        sizes = {
            name: len(other.columns)
            for name, other in layouts.items()
            if other.fits(error.present) and {*other.tasks} & {*layout.tasks}
        }
        if not sizes or data.layout in sizes:
            raise
        closest = " or ".join(name for name in sizes if sizes[name] == max(sizes.values()))
        fix = f"as these are the columns of layout {closest}, write that as data.layout"
        raise DataError(f"{error}; or, {fix}") from error


collect_once = lru_cache(maxsize=1)(collect_data)
"""Every split of a trial, and every trial of a process, reads the same data."""


def propose_layout(source: str, task: str | None, layout: str | None) -> DataSettings | None:
    """Return the layout that fits the first rows of a file or directory best; None for others.

    A task or layout that is given is kept. Most of the rows have to become problems. Then fewer
    renamed columns count, then more columns, then the order of `LAYOUTS`: stricter ones first.

    Raises:
        DataError: the source cannot be read.
        UsageError: no layout fits; the message names the columns.
    """
    from gdpo_tune.core.settings import DataSettings  # late: `--help` of commands is light

    layouts = [n for n in LAYOUTS if task is None or task in describe_layout(n).tasks]
    if layout:
        layouts = [layout] if layout in LAYOUTS else []
    if not layouts or not source or not path_exists(expand_path(source)):
        return None
    placed = data_rows.read_local(source, "", "train", lambda _, columns: [*columns])
    rows = [row for _, row in islice(placed, 20)]
    present = list(dict.fromkeys(column for row in rows for column in row))
    found: list[tuple[int, int, DataSettings]] = []
    for name, info in ((name, describe_layout(name)) for name in layouts):
        columns = data_rows.propose_columns([*info.columns, *info.one_of], present)
        spoken = (info.columns[0], "answer", "solution") if data_rows.MESSAGES in present else ()
        if not info.fits([*present, *columns, *spoken]):
            continue
        data, usable = DataSettings(source=source, layout=name, columns=columns), 0
        for row in rows:
            with suppress(RowError):
                data_rows.convert_row(info, data_rows.name_columns(data, row, info))
                usable += 1
        if 2 * usable > len(rows):
            other = sum(name != column.lower() for name, column in columns.items())
            found.append((other, -len(info.columns) - bool(info.one_of), data))
    if not found:
        infos = {name: describe_layout(name) for name in layouts}
        wanted = [
            f"{name} ({', '.join((*info.columns, *filter(None, [' or '.join(info.one_of)])))})"
            for name, info in infos.items()
        ]
        first = "question_answer" if "question_answer" in infos else layouts[0]
        example = ", ".join(f"{column}: YOURS" for column in infos[first].columns)
        raise UsageError(
            f"{source} has the columns {', '.join(present) or 'of no row'}, which fit none of the "
            f"layouts {', '.join(wanted)}\n    fix: rename the columns, or run init without --data "
            f"and write in its file\n    data: {{source: {source}, layout: {first}, "
            f"columns: {{{example}}}}}, where YOURS is a column of {source}"
        )
    return min(found, key=lambda each: each[:2])[2]


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
